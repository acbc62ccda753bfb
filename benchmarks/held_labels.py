"""What held labels do where a noise is learnt: small regressions and digits, by learning rate, β and VL's curvature.

    python benchmarks/held_labels.py --workers 2 --out results/quality/held_labels.json

Adam at a constant rate, batches of 64. What the file has is not run again.
"""

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

import varlap
from varlap.curvature import DEFAULT, DEFAULT_FOR_NUMBERS
from varlap.data import load
from varlap.experiments import origin

Data = tuple[Tensor, Tensor]
CURVATURES: dict[str, varlap.Fisher | None] = {
    "VL's own for labels": DEFAULT,
    "VL's own for numbers": DEFAULT_FOR_NUMBERS,
    "the paper's": varlap.Fisher(),
    "MAP": None,
}
LEARNING_RATES, BETAS, SEEDS = (1e-3, 5e-3, 2e-2), (0.1, 1.0), (0, 1, 2)
NUM_TRAIN, NUM_TEST = 600, 2_000


def waves() -> tuple[Data, Data]:
    """A sine with noise that grows along x."""
    generator = torch.Generator().manual_seed(0)

    def drawn(size: int) -> Data:
        x = 6 * torch.rand(size, 1, generator=generator) - 3
        noise = torch.randn(size, 1, generator=generator)
        return x, (2 * x).sin() + (0.05 + 0.4 * (2 * x).sigmoid()) * noise

    return drawn(NUM_TRAIN), drawn(NUM_TEST)


def digits() -> tuple[Data, Data]:
    """The first digits, against all others."""
    data = load("digits")
    x, y = data.train_images.flatten(1).float(), data.train_labels
    return (x[:NUM_TRAIN], y[:NUM_TRAIN]), (x[NUM_TRAIN:], y[NUM_TRAIN:])


def curve(num_outputs: int) -> nn.Module:
    layers = nn.Linear(1, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, num_outputs)
    return nn.Sequential(*layers)


TASKS: dict[str, tuple[Callable[[], tuple[Data, Data]], Callable[[], nn.Module], str, int]] = {
    "digits": (digits, lambda: varlap.models.mlp(64, 10), "categorical", 100),
    "regression": (waves, lambda: curve(1), "gaussian", 200),
    "regression with its own noise": (waves, lambda: curve(2), "heteroscedastic", 200),
}
KEYS = ("task", "curvature", "beta", "lr", "seed")
STUDIED = [(t, c, b, lr, s) for t in TASKS for lr in LEARNING_RATES for b in BETAS for c in CURVATURES for s in SEEDS]


def run(task: str, curvature: str, beta: float, lr: float, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    data, network, likelihood, epochs = TASKS[task]
    train, test = data()
    torch.manual_seed(seed)
    bnn = varlap.BNN(network(), likelihood)
    objective: Any = varlap.MAP(len(train[1]), beta)
    if curvature != "MAP":
        objective = varlap.VL(len(train[1]), beta, curvature=CURVATURES[curvature], seed=seed)
    found: dict[str, Any] = {"task": task, "curvature": curvature, "beta": beta, "lr": lr, "seed": seed}
    settings = {"epochs": epochs, "batch_size": 64, "lr": lr, "schedule": "constant", "seed": seed}
    try:
        varlap.fit(bnn, objective, train, **settings, progress="none")
        return found | {"test_nll": varlap.evaluate(bnn, test, only="nll")["nll"]}
    except varlap.errors.NonFiniteError as error:
        return found | {"test_nll": None, "failure": str(error)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    runs: list[dict[str, Any]] = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    done = {tuple(run[key] for key in KEYS) for run in runs}
    spec = {
        "curvatures": {name: repr(curvature) for name, curvature in CURVATURES.items()},
        "epochs": {name: task[-1] for name, task in TASKS.items()},
        "batch_size": 64,
        "num_train": NUM_TRAIN,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pool = ProcessPoolExecutor(args.workers)
    pending = [pool.submit(run, *settings) for settings in STUDIED if settings not in done]
    try:
        for finished in track(as_completed(pending), "runs", total=len(pending)):
            runs.append(finished.result())
            runs.sort(key=lambda one: STUDIED.index(tuple(one[key] for key in KEYS)))
            result = {"spec": spec, "origin": origin("cpu"), "runs": runs}
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C nothing else is begun


if __name__ == "__main__":
    main()
