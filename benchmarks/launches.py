"""Where a compiled step's time goes on a GPU: kernels launched and their times by kind, with and without combo kernels.

    python benchmarks/launches.py --out results/bench/launches-h200.json

PreactResNet-18 with softplus, batch 128, bfloat16; each way is set up once, timed in five rounds of 60 steps and
profiled.
"""

import argparse
import collections
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import varlap
from varlap.objectives import compiled

OBJECTIVES: dict[str, Any] = {
    "MAP": lambda: varlap.MAP(50_000, 0.01),
    "VL exact": lambda: varlap.VL(50_000, 0.01, curvature=varlap.Fisher()),
    "VL default": lambda: varlap.VL(50_000, 0.01),
}
KINDS = {"triton": "fused", "multi_tensor": "optimizer", "Mem": "copies"}


def measure(make: Any) -> dict[str, Any]:
    started = time.perf_counter()
    torch.manual_seed(0)
    network = varlap.models.preact_resnet18().cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    bnn, objective = varlap.BNN(network).train(), make()
    groups = bnn.parameter_groups(1e-4)[: None if objective.uses_variances else 1]
    optimizer = torch.optim.Adam(groups, fused=True, capturable=True)
    step = varlap.TrainingStep(bnn, objective, optimizer, precision="bf16")
    x = torch.randn(128, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (128,), device="cuda")
    for number in (0, 1):
        step(x, y, number=number)
    torch.cuda.synchronize()
    result: dict[str, Any] = {"setup_s": time.perf_counter() - started}
    for number in (0, 1):  # with a remembered curvature, the second step has none of its own
        rounds = []
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(60):
                step(x, y, number=number)
            torch.cuda.synchronize()
            rounds.append(1e3 * (time.perf_counter() - started) / 60)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            step(x, y, number=number)
            torch.cuda.synchronize()
        kinds: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
        for event in profiled.events() or ():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                kind = next((kind for start, kind in KINDS.items() if start in event.name), "convolutions and others")
                kinds[kind][0] += 1
                kinds[kind][1] += event.device_time
        row = {"median_ms": statistics.median(rounds), "ms_per_step": rounds, "launches_and_us_by_kind": dict(kinds)}
        result[f"step {number}"] = row
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    origin = {"varlap": varlap.__version__, "torch": torch.__version__, "hardware": torch.cuda.get_device_name()}
    result: dict[str, Any] = {"origin": origin, "steps": {}}
    for options in ({"combo_kernels": False}, {"combo_kernels": True}):
        compiled.OPTIONS = options
        for name, make in OBJECTIVES.items():
            result["steps"][f"{name}, {options}"] = row = measure(make)
            print(name, options, {key: row[key]["median_ms"] for key in row if key != "setup_s"}, flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
