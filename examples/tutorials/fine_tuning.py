"""Fine-tuning a head: a pretrained body, and a Bayesian last layer.

`python examples/tutorials/fine_tuning.py` draws its picture into the current folder.
"""

# --8<-- [start:data]
import matplotlib.pyplot as plt
import torch
from torch import nn

import varlap

digits = varlap.data.load("digits")


def classes(images, labels, wanted):
    """Take the images of some classes, which then count from 0."""
    chosen = (labels >= wanted[0]) & (labels <= wanted[-1])
    return images[chosen], labels[chosen] - wanted[0]


old = classes(digits.train_images, digits.train_labels, range(5))
new = classes(digits.train_images, digits.train_labels, range(5, 10))
test = classes(digits.test_images, digits.test_labels, range(5, 10))
# --8<-- [end:data]

# --8<-- [start:pretrain]
torch.manual_seed(0)
body = nn.Sequential(*varlap.models.convnet(image_size=8, activation=nn.SiLU)[:-1])
pretrained = nn.Sequential()
pretrained.add_module("body", body)
pretrained.add_module("head", nn.Linear(64, 5))
objective = varlap.MAP(num_data=len(old[1]), beta=0.01)
varlap.fit(varlap.BNN(pretrained), objective, old, epochs=20, lr=3e-3, progress="none")
# --8<-- [end:pretrain]


# --8<-- [start:head]
def fine_tuned(method, num_labels, beta):
    """Put a new head on the frozen body and train the head alone."""
    torch.manual_seed(1)
    network = nn.Sequential()
    network.add_module("body", body.requires_grad_(False))
    network.add_module("head", nn.Linear(64, 5))
    bnn = varlap.BNN(network, select="head.*", prior=varlap.OneScalePrior(0.5))
    few = new[0][:num_labels], new[1][:num_labels]
    objective = method(num_data=num_labels, beta=beta)
    varlap.fit(bnn, objective, few, epochs=150, batch_size=num_labels, lr=3e-2, progress="none")
    return bnn


bnn = fine_tuned(varlap.VL, 100, beta=0.01)
print(f"{bnn.num_weights()} Bayesian weights:", ", ".join(bnn.log_sigma))
# --8<-- [end:head]

# --8<-- [start:exact]
linearised = bnn.predict(test[0], how="linearised", num_samples=100)
sampled = bnn.predict(test[0], how="sampled", num_samples=100)
print(f"largest difference in probability: {(linearised.probs - sampled.probs).abs().max():.0e}")
# --8<-- [end:exact]

# --8<-- [start:scores]
counts = (30, 100, 300)
nll = {"MAP": [], "VL, sampled": []}
for count in counts:
    scores = varlap.evaluate(fine_tuned(varlap.MAP, count, beta=0.01), test)
    nll["MAP"].append(scores["nll"])
    scores = varlap.evaluate(fine_tuned(varlap.VL, count, beta=0.01), test, how="sampled", num_samples=100)
    nll["VL, sampled"].append(scores["nll"])
for name, values in nll.items():
    print(f"{name}: NLL", ", ".join(f"{value:.2f} with {count}" for count, value in zip(counts, values, strict=True)))
# --8<-- [end:scores]

# --8<-- [start:picture]
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
left.plot(counts, nll["MAP"], "o-", color="#4477aa", label="MAP")
left.plot(counts, nll["VL, sampled"], "s--", color="#ee6677", label="VL, sampled")
left.set(xlabel="labelled images", ylabel="test NLL", xscale="log", xticks=counts, xticklabels=counts, ylim=(0, None))
left.minorticks_off()
left.spines[["top", "right"]].set_visible(False)
left.legend(frameon=False)
varlap.plot.reliability(sampled, test[1], bins=10, ax=right)
right.set_title("VL with 100 labels")
figure.savefig("fine-tuning.png", dpi=110)
# --8<-- [end:picture]
