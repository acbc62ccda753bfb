"""What a step costs by how often, and on how much of the batch, VL evaluates its curvature; interleaved in one run.

    python benchmarks/curvature_cost.py --device cuda --precision bf16 --out results/bench/curvatures-h200.json

Each curvature but the exact one is remembered, `memory=0.9`, and a part of the batch has statistics of its own.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

import varlap
from varlap.experiments import origin
from varlap.training.benchmark import BETA, MODELS, NUM_DATA, BenchSpec
from varlap.training.step import TrainingStep

PERIOD = 8  # steps; a multiple of every `every` below
PARTS = [(4, 1 / 4), (2, 1 / 8), (1, 1 / 16), (1, 1 / 4)]  # (every, fraction)
CURVATURES = {
    f"{fraction:g} of the batch, every {every}": varlap.Fisher(every, fraction, memory=0.9, batch_norm="part")
    for every, fraction in PARTS
} | {"exact": varlap.Fisher()}


def stepper(spec: BenchSpec, objective: Any) -> Callable[[int], Any]:
    torch.manual_seed(0)
    device = torch.device(spec.device)
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(spec.batch_size, *MODELS[spec.model].input_shape, generator=noise).to(device)
    y = torch.randint(0, 10, (spec.batch_size,), generator=noise).to(device)
    network: torch.nn.Module = spec.network().to(device).train()
    if x.ndim == 4 and device.type == "cuda":
        x = x.to(memory_format=torch.channels_last)
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    bnn = varlap.BNN(network)
    groups = bnn.parameter_groups(1e-4)
    on_cuda = device.type == "cuda"
    chosen = groups[:1] if isinstance(objective, varlap.MAP) else groups
    optimizer = torch.optim.Adam(chosen, fused=on_cuda, capturable=on_cuda)
    step = TrainingStep(bnn, objective, optimizer, precision=spec.precision)
    return lambda number: step(x, y, number=number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preact-resnet-18", choices=list(MODELS))
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    spec = BenchSpec(**settings)
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    num_steps = PERIOD * -(-args.steps // PERIOD)
    objectives: dict[str, Any] = {"MAP": varlap.MAP(NUM_DATA, BETA), "VI": varlap.VI(NUM_DATA, BETA)}
    objectives |= {name: varlap.VL(NUM_DATA, BETA, curvature=curvature) for name, curvature in CURVATURES.items()}
    steps: dict[str, Callable[[int], Any]] = {}
    times: dict[str, list[float]] = {name: [] for name in objectives}
    with Progress() as progress:
        task = progress.add_task("setting up", total=len(objectives) + args.rounds)
        for name, objective in objectives.items():
            steps[name] = stepper(spec, objective)
            for number in range(2 * PERIOD):
                steps[name](number)
            progress.advance(task)
        progress.update(task, description="timing")
        for _ in range(args.rounds):
            for name, step in steps.items():
                wait()
                started = time.perf_counter()
                for number in range(num_steps):
                    step(number)
                wait()
                times[name].append(1e3 * (time.perf_counter() - started) / num_steps)
            progress.advance(task)
    rows = {
        name: {
            "median_ms": statistics.median(own),
            "ratio_to_map": statistics.median(a / b for a, b in zip(own, times["MAP"], strict=True)),
            "ms_per_step": own,
            "curvature": repr(CURVATURES[name]) if name in CURVATURES else None,
        }
        for name, own in times.items()
    }
    for name, row in rows.items():
        print(f"{name:32} {row['median_ms']:8.2f} ms {row['ratio_to_map']:6.2f} x MAP")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"spec": settings, "origin": origin(args.device), "methods": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
