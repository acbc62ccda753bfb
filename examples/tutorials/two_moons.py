"""Two moons: predictions at points between the classes, and far from the data.

`python examples/tutorials/two_moons.py` draws its picture into the current folder.
"""

# --8<-- [start:data]
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_moons
from torch import nn

import varlap

points, labels = make_moons(200, noise=0.15, random_state=0)
x, y = torch.tensor(points, dtype=torch.float32), torch.tensor(labels)
# --8<-- [end:data]

# --8<-- [start:train]
torch.manual_seed(0)
network = varlap.models.mlp(2, 2, hidden=(50,), activation=nn.SiLU)
bnn = varlap.BNN(network, likelihood="categorical", prior=varlap.FanInPrior(gain=10))
varlap.fit(bnn, varlap.VL(num_data=len(x), beta=0.1), (x, y), epochs=300, batch_size=100, lr=3e-2, progress="none")
# --8<-- [end:train]

# --8<-- [start:points]
asked = torch.tensor([[0.0, 1.0], [0.5, 0.25], [0.5, -2.5]])
prediction = bnn.predict(asked, how="linearised", num_samples=300)
for where, probs, total, weights in zip(
    ("on a moon", "between them", "far away"),
    prediction.probs,
    prediction.entropy,
    prediction.mutual_information,
    strict=True,
):
    print(f"{where:12}  class 1: {probs[1]:.2f}  entropy {total:.2f}  mutual information {weights:.3f}")
# --8<-- [end:points]

# --8<-- [start:picture]
options = {"train": (x, y), "limits": (-2.5, 3.5, -3.0, 3.5), "resolution": 100}
figure, axes = plt.subplots(1, 3, figsize=(10, 3.1), sharey=True, layout="constrained")
varlap.plot.decision_2d(bnn, **options, ax=axes[0])
varlap.plot.decision_2d(bnn, what="entropy", how="linearised", num_samples=300, **options, ax=axes[1])
varlap.plot.decision_2d(bnn, what="mutual_information", how="linearised", num_samples=300, **options, ax=axes[2])
for ax, title in zip(axes, ("mean network", "linearised: in all", "linearised: from the weights"), strict=True):
    ax.set_title(title)
for ax in axes[1:]:
    ax.get_legend().remove()
    ax.set_ylabel("")
figure.savefig("two-moons.png", dpi=100)
# --8<-- [end:picture]
