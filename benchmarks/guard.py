"""What looking for NaN and Inf costs: an eager step with the guards, and with them taken out, in turn.

python benchmarks/guard.py --out results/reliability/guard-cpu.json
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

import varlap
from varlap.objectives import objective
from varlap.posterior import batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    bnn = varlap.BNN(varlap.models.convnet()).train()
    step = varlap.TrainingStep(bnn, varlap.VL(50_000, 0.01), varlap.adam(bnn, 1e-4))
    x, y = torch.randn(128, 1, 28, 28), torch.randint(0, 10, (128,))
    guards = objective.check_finite, batch.check_finite
    times: dict[str, list[float]] = {"guarded": [], "unguarded": []}
    for turn in range(args.rounds):
        for name, seconds in times.items():
            for module, guard in zip((objective, batch), guards, strict=True):
                module.check_finite = guard if name == "guarded" else lambda *_, **__: None
            started = time.perf_counter()
            for number in range(8):
                step(x, y, number=8 * turn + number)
            seconds.append(1e3 * (time.perf_counter() - started) / 8)
    ratios = [a / b for a, b in zip(times["guarded"], times["unguarded"], strict=True)]
    result = {
        "spec": {"model": "convnet", "batch_size": 128, "rounds": args.rounds, "objective": "VL, default curvature"},
        "origin": {"varlap": varlap.__version__, "torch": torch.__version__, "hardware": platform.machine()},
        "median_ms": {name: statistics.median(values) for name, values in times.items()},
        "median_ratio": statistics.median(ratios),
        "ms_per_step": times,
    }
    print(result["median_ms"], result["median_ratio"])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
