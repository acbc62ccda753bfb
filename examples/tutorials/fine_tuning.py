"""Fine-tuning a head: a body that was trained before, and a Bayesian last layer on top.

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
few = new[0][:60], new[1][:60]
test = classes(digits.test_images, digits.test_labels, range(5, 10))
# --8<-- [end:data]

# --8<-- [start:pretrain]
torch.manual_seed(0)
body = nn.Sequential(*varlap.models.convnet(image_size=8, activation=nn.SiLU)[:-1])
pretrained = nn.Sequential()
pretrained.add_module("body", body)
pretrained.add_module("head", nn.Linear(64, 5))
varlap.fit(varlap.BNN(pretrained), varlap.MAP(num_data=len(old[1]), beta=0.01), old, epochs=20, lr=3e-3, progress="none")
# --8<-- [end:pretrain]


# --8<-- [start:head]
def fine_tuned(objective):
    """Put a new head on the frozen body and train the head alone."""
    torch.manual_seed(1)
    network = nn.Sequential()
    network.add_module("body", body.requires_grad_(False))
    network.add_module("head", nn.Linear(64, 5))
    bnn = varlap.BNN(network, select="head.*")
    varlap.fit(bnn, objective, few, epochs=150, batch_size=30, lr=3e-2, progress="none")
    return bnn


bnns = {"MAP": fine_tuned(varlap.MAP(num_data=60, beta=0.01)), "VL": fine_tuned(varlap.VL(num_data=60, beta=0.01))}
print(f"{bnns['VL'].num_weights()} Bayesian weights:", ", ".join(bnns["VL"].log_sigma))
# --8<-- [end:head]

# --8<-- [start:scores]
for name, how in (("MAP", "mean"), ("VL", "mean"), ("VL", "linearised"), ("VL", "sampled")):
    scores = varlap.evaluate(bnns[name], test, how=how, num_samples=None if how == "mean" else 100, ood=old[0])
    wanted = ("nll", "accuracy", "ece", "ood_auroc_entropy")
    print(f"{name}, {how}:", {score: round(scores[score], 3) for score in wanted})
# --8<-- [end:scores]

# --8<-- [start:picture]
predictions = {
    "MAP": bnns["MAP"].predict(test[0]),
    "VL, linearised": bnns["VL"].predict(test[0], how="linearised", num_samples=100),
}
elsewhere = bnns["VL"].predict(old[0], how="linearised", num_samples=100)
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
varlap.plot.reliability(predictions, test[1], bins=10, ax=left)
varlap.plot.entropy_histogram(predictions["VL, linearised"], elsewhere, ax=right)
right.set_title("VL, linearised: new digits and old")
figure.savefig("fine-tuning.png", dpi=110)
# --8<-- [end:picture]
