"""Regression in one dimension: a curve, its noise, and the uncertainty of the weights.

`python examples/tutorials/regression.py` draws its picture into the current folder.
"""

# --8<-- [start:data]
import matplotlib.pyplot as plt
import torch
from torch import nn

import varlap

torch.manual_seed(0)
x = torch.cat([torch.linspace(-2, -0.5, 20), torch.linspace(0.8, 2, 20)])[:, None]
y = torch.sin(3 * x) + 0.2 * torch.randn_like(x)
# --8<-- [end:data]

# --8<-- [start:train]
torch.manual_seed(0)
network = varlap.models.mlp(1, 1, hidden=(50,), activation=nn.Tanh)
bnn = varlap.BNN(network, varlap.Gaussian(noise=0.3), prior=varlap.FanInPrior(gain=3))
objective = varlap.VL(num_data=len(x), beta=0.05)
varlap.fit(bnn, objective, (x, y), epochs=2000, lr=3e-2, progress="none")
print(f"noise: {bnn.likelihood.log_noise.exp():.2f}")
# --8<-- [end:train]

# --8<-- [start:variances]
varlap.laplace(bnn, (x, y), beta=1.0)
# --8<-- [end:variances]

# --8<-- [start:numbers]
prediction = bnn.predict(torch.tensor([[-3.0], [0.0], [1.5]]), how="linearised", closed_form=True)
columns = prediction.mean, prediction.std, prediction.epistemic_variance.sqrt()
for at, mean, std, weights in zip((-3.0, 0.0, 1.5), *columns, strict=True):
    print(f"x = {at:4}: {mean.item():5.2f} ± {std.item():.2f}, of which the weights' {weights.item():.2f}")
# --8<-- [end:numbers]

# --8<-- [start:picture]
grid = torch.linspace(-3.2, 3.2, 300)[:, None]
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True, layout="constrained")
varlap.plot.regression_band(bnn, grid, train=(x, y), ax=left)
varlap.plot.regression_band(bnn, grid, train=(x, y), how="linearised", closed_form=True, ax=right)
for ax in (left, right):
    ax.plot(grid, torch.sin(3 * grid), color="black", linestyle=":", label="true curve")
left.set(title="mean network", ylim=(-3.5, 3.5))
right.set(title="linearised", ylabel="")
handles, labels = right.get_legend_handles_labels()
for ax in (left, right):
    ax.get_legend().remove()
figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize="small")
figure.savefig("regression.png", dpi=110)
# --8<-- [end:picture]
