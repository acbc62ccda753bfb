"""When VL's training diverges: how noisy its regulariser's gradient is, against the rate and β.

    VARLAP_DATA=... python benchmarks/stability.py --workers 2 --out results/quality/stability.json

A narrow PreactResNet-18, 5,000 images of CIFAR-10 with crops and flips, Adam with a cosine of 8 epochs, batches of 64.
What the file has is not run again.
"""

import argparse
import dataclasses
import json
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

import varlap
from varlap.curvature import DEFAULT
from varlap.experiments import ImageTask, origin
from varlap.experiments.augmentation import augmentation

NUM_TRAIN, WIDTH, EPOCHS, BATCH_SIZE = 5_000, 16, 8, 64
SELDOM = varlap.Fisher(every=8, fraction=0.5, memory=0.9, batch_norm="part")
"""a sixteenth of the images, as `varlap reproduce` takes at this batch size"""
CURVATURES = {
    "seldom": SELDOM,
    "seldom, quiet": dataclasses.replace(SELDOM, gradient="quiet"),
    "seldom, whole": dataclasses.replace(SELDOM, gradient="whole"),
    "seldom, no memory": dataclasses.replace(SELDOM, memory=0.0),
    "the default": DEFAULT,
    "exact": varlap.Fisher(),
}
STUDIED = [(curvature, 1.0, 2e-3, seed) for seed in (0, 1) for curvature in CURVATURES]
STUDIED += [
    (curvature, beta, lr, 0) for beta, lr in ((1.0, 1e-3), (0.1, 2e-3)) for curvature in ("seldom", "seldom, quiet")
]


def run(curvature: str, beta: float, lr: float, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    task = ImageTask("cifar10", "preact-resnet-18", validation=0.1, seed=0, num_train=NUM_TRAIN, width=WIDTH)
    torch.manual_seed(seed)
    bnn = varlap.BNN(task.network())
    history = varlap.fit(
        bnn,
        varlap.VL(len(task.training[1]), beta, curvature=CURVATURES[curvature], seed=seed),
        task.training,
        validation=task.held_out,
        augment=augmentation(task.images, task.normalise),
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        lr=lr,
        schedule="cosine",
        seed=seed,
        progress="none",
    )
    return {
        **{"curvature": curvature, "beta": beta, "lr": lr, "seed": seed},
        "training_nll": [-row["log_likelihood"] for row in history.epochs],
        "held_out_nll": [row["validation_nll"] for row in history.epochs],
        "held_out_accuracy": history.epochs[-1]["validation_accuracy"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    spec: dict[str, Any] = {"num_train": NUM_TRAIN, "width": WIDTH, "epochs": EPOCHS, "batch_size": BATCH_SIZE}
    spec["curvatures"] = {name: repr(curvature) for name, curvature in CURVATURES.items()}
    runs: list[dict[str, Any]] = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    done = {(run["curvature"], run["beta"], run["lr"], run["seed"]) for run in runs}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    pool = ProcessPoolExecutor(args.workers)
    pending = [pool.submit(run, *settings) for settings in STUDIED if settings not in done]
    try:
        for finished in track(as_completed(pending), "runs", total=len(pending)):
            runs.append(finished.result())
            runs.sort(key=lambda one: STUDIED.index((one["curvature"], one["beta"], one["lr"], one["seed"])))
            result = {"spec": spec, "origin": origin("cpu"), "runs": runs}
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C nothing else is begun
    for one in runs:
        print(*(one[name] for name in ("curvature", "beta", "lr", "seed")), one["training_nll"][-1])


if __name__ == "__main__":
    main()
