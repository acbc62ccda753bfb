"""How noisy the gradient of VL's curvature term is, by the way it is differentiated and by the size of the batch.

"held" and "quiet" have the same expectation, so noise is all that they differ in: the root of the summed variances over
draws of labels and batches, beside the norm of quiet's mean. "whole" has another expectation. With batch norm in
training mode, as here in PreactResNet, the expectation depends on the batch size too.

    python benchmarks/gradient_noise.py --out results/bench/gradient-noise.json --picture docs/images/gradient-noise.png
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import varlap
from varlap.curvature import Fisher
from varlap.experiments.evaluation import origin
from varlap.posterior.batch import checked_batch
from varlap.streams import Streams

SIZES = (32, 128, 512)
GRADIENTS = {"held": "#bb5566", "quiet": "#4477aa", "whole": "#999999"}
NETWORKS = {
    "MLP": lambda: torch.nn.Sequential(torch.nn.Flatten(), varlap.models.mlp(64, 10, hidden=(50,))),
    "PreactResNet-18, width 4": lambda: varlap.models.preact_resnet18(10, 1, width=4),
}


def main() -> None:
    """Train each network on the digits for a while, then draw gradients of the curvature term."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    digits = varlap.data.load("digits")
    x, y = varlap.data.Normaliser.of(digits.train_images)(digits.train_images), digits.train_labels
    rows = []
    for name, make in NETWORKS.items():
        torch.manual_seed(0)
        bnn = varlap.BNN(make())
        objective = varlap.VL(len(y), 0.1, curvature=Fisher())
        varlap.fit(bnn, objective, (x, y), epochs=args.epochs, lr=3e-3, progress="none")
        for size in SIZES:
            for gradient in GRADIENTS:
                drawn = torch.stack([_drawn(bnn, x, y, size, gradient, number) for number in range(args.draws)])
                variance = drawn.var(0).sum()
                mean = (drawn.mean(0).square().sum() - variance / args.draws).clamp(min=0).sqrt()
                row = {"network": name, "batch_size": size, "gradient": gradient}
                rows.append(row | {"noise": variance.sqrt().item(), "norm_of_mean": mean.item()})
                print(rows[-1])
    spec = {"data": "digits", "seed": 0, "epochs": args.epochs, "draws": args.draws, "beta": 0.1}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"spec": spec, "origin": origin("cpu"), "rows": rows}, indent=1) + "\n")
    if args.picture is not None:
        _draw(rows, args.picture)


def _drawn(bnn: varlap.BNN, x: Tensor, y: Tensor, size: int, gradient: str, number: int) -> Tensor:
    """Return ∂(½ Σ σ² S ḡ²)/∂μ for a batch and labels of its own."""
    items = torch.randperm(len(y), generator=torch.Generator().manual_seed(number))[:size]
    batch = checked_batch(x[items], y[items], None, num_data=len(y), step=number)
    curvature = Fisher(gradient=gradient)  # type: ignore[arg-type]
    with bnn.spare_buffers():
        _, estimate = curvature.estimate(bnn, batch, Streams(0, number), create_graph=True)
        variance = {name: (2 * log_sigma.detach()).exp() for name, log_sigma in bnn.log_sigma.items()}
        outputs, cotangents = zip(*estimate.pull_back(variance), strict=True)
        found = torch.autograd.grad(outputs, list(bnn.means().values()), cotangents, materialize_grads=True)
    return torch.cat([one.flatten() for one in found])


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(1, len(NETWORKS), figsize=(9, 3), squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], NETWORKS, strict=True):
        for gradient, colour in GRADIENTS.items():
            found = [row for row in rows if (row["network"], row["gradient"]) == (name, gradient)]
            axis.plot(SIZES, [row["noise"] for row in found], color=colour, marker="o", label=f"noise, {gradient}")
        quiet = [row["norm_of_mean"] for row in rows if (row["network"], row["gradient"]) == (name, "quiet")]
        axis.plot(SIZES, quiet, color="black", linestyle=":", label="norm of quiet's mean")
        axis.set(xscale="log", yscale="log", title=name, xlabel="batch size", xticks=SIZES, xticklabels=SIZES)
        low, high = axis.get_ylim()
        ticks = [tick for tick in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2) if low <= tick <= high]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("of the regulariser's gradient")
    figure.legend(*axes[0][0].get_legend_handles_labels(), frameon=False, loc="outside right center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
