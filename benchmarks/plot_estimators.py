"""Draw results/quality/estimators.json: by how much VL's negative log-likelihood differs from that of the best MLP.

    python benchmarks/plot_estimators.py results/quality/estimators.json docs/images/estimators.png

Bars are 95 % intervals of Student's t over splits: one that crosses zero is no clear difference. The axis is linear
around zero and logarithmic further out.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from PIL import Image

from varlap.experiments.uci.summary import T_QUANTILES

METHODS = {"VL": ("C0", -0.13), "VL, constant noise": ("C1", 0.13)}
NUM_COLOURS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    tables = json.loads(args.results.read_text())["summary"]
    figure, ax = plt.subplots(figsize=(7, 4.4), layout="constrained")
    for method, (colour, shift) in METHODS.items():
        name = f"{method} minus best MLP"
        rows = [(place, entry) for place, entry in enumerate(tables.values()) if name in entry["nll"]]
        ax.errorbar(
            [entry["nll"][name]["mean"] for _, entry in rows],
            [place + shift for place, _ in rows],
            xerr=[T_QUANTILES[entry["splits"] - 2] * entry["nll"][name]["standard_error"] for _, entry in rows],
            fmt="o",
            markersize=4,
            color=colour,
            label=method,
        )
    ax.axvline(0, color="k", linewidth=0.8)
    ax.set_xscale("symlog", linthresh=0.1)
    ax.set(xlabel="NLL minus that of the best MLP, nats a row (left: VL is better)")
    ax.set_yticks(range(len(tables)), labels=list(tables))
    ax.invert_yaxis()
    ax.legend(frameon=False, fontsize="small")
    figure.savefig(args.out, dpi=110)
    with Image.open(args.out) as drawn:
        few = drawn.convert("RGB").quantize(NUM_COLOURS, dither=Image.Dither.NONE)
    few.save(args.out, optimize=True)


if __name__ == "__main__":
    main()
