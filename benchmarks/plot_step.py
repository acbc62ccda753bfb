"""Draw step times from result files of `varlap bench step`.

python benchmarks/plot_step.py results/bench/step-h200.json results/bench/step-cpu.json --out docs/images/step.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    figure, axes = plt.subplots(1, len(args.results), figsize=(6.4 * len(args.results), 3.2), squeeze=False)
    for axis, path in zip(axes[0], args.results, strict=True):
        result = json.loads(path.read_text())
        methods = result["methods"]
        names = list(methods)[::-1]
        ratios = [methods[name]["ratio_to_map"] for name in names]
        bars = axis.barh(names, ratios, color=["#4477aa" if name.startswith("VL") else "#bbbbbb" for name in names])
        axis.bar_label(
            bars, [f" {methods[n]['median_ms']:.1f} ms, {r:.2f}×" for n, r in zip(names, ratios, strict=True)]
        )
        axis.set_xscale("log")
        axis.set_xlim(0.5, 12 * max(ratios))
        axis.axvline(1, color="black", linewidth=0.8)
        spec, hardware = result["spec"], result["origin"]["hardware"]
        axis.set_title(f"{spec['model']}, batch {spec['batch_size']}, {spec['precision']}, {hardware}", fontsize=9)
        axis.set_xlabel("time of a step / MAP's")
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=130)


if __name__ == "__main__":
    main()
