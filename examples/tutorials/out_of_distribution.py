"""Out of distribution: a network trained on digits is shown letters.

`python examples/tutorials/out_of_distribution.py` draws its pictures into the current folder.
"""

# --8<-- [start:data]
import matplotlib.pyplot as plt
import torch
from torch import nn

import varlap
from varlap.experiments import outside

digits = varlap.data.load("digits")
train, test = (digits.train_images, digits.train_labels), (digits.test_images, digits.test_labels)
letters = outside("letters", digits)
# --8<-- [end:data]

# --8<-- [start:train]
torch.manual_seed(0)
bnn = varlap.BNN(varlap.models.convnet(image_size=8, activation=nn.SiLU), likelihood="categorical")
objective = varlap.VL(num_data=len(train[1]), beta=0.03)
varlap.fit(bnn, objective, train, epochs=30, lr=3e-3, progress="none")
# --8<-- [end:train]

# --8<-- [start:scores]
for how in ("mean", "linearised"):
    scores = varlap.evaluate(bnn, test, how=how, ood=letters)
    print(f"{how}: NLL {scores['nll']:.3f}, accuracy {scores['accuracy']:.3f}")
    print("  AUROC by entropy", round(scores["ood_auroc_entropy"], 3))
    if "ood_auroc_mutual_information" in scores:
        print("  AUROC by mutual information", round(scores["ood_auroc_mutual_information"], 3))
# --8<-- [end:scores]

# --8<-- [start:picture]
inside, elsewhere = (bnn.predict(images, how="linearised") for images in (test[0], letters))
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
varlap.plot.entropy_histogram(bnn.predict(test[0]), bnn.predict(letters), ax=left)
varlap.plot.entropy_histogram(inside.mutual_information, elsewhere.mutual_information, ax=right)
left.set_title("mean network")
right.set(title="linearised", xlabel="mutual information (nats)", ylabel="")
figure.savefig("out-of-distribution.png", dpi=110)
# --8<-- [end:picture]

# --8<-- [start:letters]
surest = elsewhere.entropy.argsort()[:5]
least = elsewhere.entropy.argsort(descending=True)[:5]
figure, axes = plt.subplots(2, 5, figsize=(6, 2.9), layout="constrained")
for ax, item in zip(axes.flat, [*surest.tolist(), *least.tolist()], strict=True):
    ax.imshow(letters[item, 0], cmap="gray_r")
    ax.set_title(f"{elsewhere.labels[item]}, {elsewhere.confidence[item]:.0%}", fontsize=9)
    ax.set(xticks=[], yticks=[])
axes[0, 0].set_ylabel("surest")
axes[1, 0].set_ylabel("least sure")
figure.savefig("out-of-distribution-letters.png", dpi=110)
# --8<-- [end:letters]
