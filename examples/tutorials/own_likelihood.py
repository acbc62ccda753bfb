"""Your own likelihood: a Student-t, which is robust to outliers.

`python examples/tutorials/own_likelihood.py` draws its picture into the current folder.
"""

# --8<-- [start:data]
import math

import matplotlib.pyplot as plt
import torch
from torch import nn

import varlap

torch.manual_seed(0)
x = torch.linspace(-2, 2, 80)[:, None]
y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)
y[5::16] += 2.5  # outliers
# --8<-- [end:data]


# --8<-- [start:likelihood]
class StudentT(nn.Module):
    """Targets around the outputs with heavy tails: 4 degrees of freedom and a learnt scale."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(-1.0))

    def log_prob(self, outputs, targets):  # one value for each item
        z = (targets - outputs) / self.log_scale.exp()
        constant = math.lgamma(2.5) - math.lgamma(2.0) - 0.5 * math.log(4 * math.pi)
        return (constant - self.log_scale - 2.5 * torch.log1p(z.square() / 4)).sum(1)

    def sample(self, outputs, generator, targets=None):  # a normal over the root of a mean of 4 squared normals
        normals = torch.randn(5, *outputs.shape, generator=generator, dtype=outputs.dtype, device=outputs.device)
        return outputs + self.log_scale.exp() * normals[0] / normals[1:].square().mean(0).sqrt()

    def predict(self, outputs):
        variance = 2 * (2 * self.log_scale).exp()
        return varlap.Prediction(mean=outputs, variance=variance.expand_as(outputs))

    def score(self, outputs, noise, targets=None):  # optional: a Student-t's Fisher information is 5/7 of 1/scale²
        return math.sqrt(5 / 7) * noise / self.log_scale.exp()


# --8<-- [end:likelihood]

# --8<-- [start:check]
generator = torch.Generator().manual_seed(0)
likelihood, outputs = StudentT(), torch.zeros(100_000, 1, requires_grad=True)
drawn = likelihood.sample(outputs.detach(), generator)
(gradient,) = torch.autograd.grad(likelihood.log_prob(outputs, drawn).sum(), outputs)
scale = likelihood.log_scale.exp().item()
print(f"mean score {gradient.mean():.2f}, its variance {gradient.var() * scale**2:.2f} in units of 1/scale²")
# --8<-- [end:check]


# --8<-- [start:train]
def trained(likelihood):
    """Train the same network under a likelihood."""
    torch.manual_seed(0)
    network = varlap.models.mlp(1, 1, hidden=(50,), activation=nn.GELU)
    bnn = varlap.BNN(network, likelihood, prior=varlap.FanInPrior(gain=10))
    varlap.fit(bnn, varlap.VL(num_data=len(x), beta=0.02), (x, y), epochs=500, lr=3e-2, progress="none")
    return bnn


bnns = {"Gaussian": trained("gaussian"), "Student-t": trained(StudentT())}
clean = torch.sin(2 * x)
for name, bnn in bnns.items():
    error = (bnn.predict(x).mean - clean).square().mean().sqrt()
    print(f"{name}: distance from the true curve {error:.2f}, NLL {varlap.evaluate(bnn, (x, y))['nll']:.2f}")
# --8<-- [end:train]

# --8<-- [start:picture]
grid = torch.linspace(-2.5, 2.5, 200)[:, None]
figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True, layout="constrained")
for ax, (name, bnn) in zip(axes, bnns.items(), strict=True):
    varlap.plot.regression_band(bnn, grid, train=(x, y), ax=ax)
    ax.plot(grid, torch.sin(2 * grid), color="black", linestyle=":", label="true curve")
    ax.set(title=name, ylabel="y" if ax is axes[0] else "", ylim=(-3, 4))
    ax.get_legend().remove()
figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize="small")
figure.savefig("own-likelihood.png", dpi=110)
# --8<-- [end:picture]
