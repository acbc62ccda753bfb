"""Draw results/quality/estimators.json: by how much VL's negative log-likelihood differs from the MLPs'.

    python benchmarks/plot_estimators.py results/quality/estimators.json docs/images/estimators.png

Bars are two standard errors over splits, either way. The axis is linear around zero and logarithmic further out.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from PIL import Image

RIVALS = {"VL minus MLP": ("C0", -0.13), "VL minus MLP, held out": ("C1", 0.13)}
LABELS = {"VL minus MLP": "noise from training residuals", "VL minus MLP, held out": "noise from held-out rows"}
NUM_COLOURS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    tables = json.loads(args.results.read_text())["summary"]
    figure, ax = plt.subplots(figsize=(7, 4.4), layout="constrained")
    for rival, (colour, shift) in RIVALS.items():
        rows = [(place, entry["nll"][rival]) for place, entry in enumerate(tables.values()) if rival in entry["nll"]]
        ax.errorbar(
            [value["mean"] for _, value in rows],
            [place + shift for place, _ in rows],
            xerr=[2 * value["standard_error"] for _, value in rows],
            fmt="o",
            markersize=4,
            color=colour,
            label=LABELS[rival],
        )
    ax.axvline(0, color="k", linewidth=0.8)
    ax.set_xscale("symlog", linthresh=0.1)
    ax.set(xlabel="NLL: VL minus MLP, nats a row (left: VL is better)", yticks=range(len(tables)), yticklabels=tables)
    ax.invert_yaxis()
    ax.legend(title="MLPRegressor's", frameon=False, fontsize="small")
    figure.savefig(args.out, dpi=110)
    with Image.open(args.out) as drawn:
        few = drawn.convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE)
    few.save(args.out, optimize=True)


if __name__ == "__main__":
    main()
