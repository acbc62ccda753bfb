"""Whether averaging the means over the training helps: the last ones beside two averages, for MAP and for VL.

    VARLAP_DATA=... python benchmarks/averaging.py --out results/quality/averaging.json

As in results/choices: a small convnet, 10,000 images of Fashion-MNIST, 100 epochs of Adam at 1e-3, MAP and VL at the β
that held-out images chose there. Each training keeps an exponential average of the means over the steps, and their mean
over the ends of the last quarter of the epochs. What the file has is not run again.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import varlap
from varlap.experiments import ImageTask, origin

NUM_TRAIN, DECAY, LAST_PART = 10_000, 0.999, 0.25
METHODS, SCHEDULES = ("MAP", "MAP with a rising β", "VL"), ("cosine", "constant")
SCORES = ("nll", "accuracy", "ece")


class Averaging:
    """Averages a network's parameters while `fit` trains it: `fit` tells its progress of every step and epoch."""

    def __init__(self, bnn: varlap.BNN, num_epochs: int) -> None:
        self.bnn, self.first_epoch = bnn, round((1 - LAST_PART) * num_epochs)
        self.averages = {
            "exponential": AveragedModel(bnn.network, multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
            "last quarter": AveragedModel(bnn.network),
        }

    def start(self, *, num_epochs: int, steps_per_epoch: int | None, first_step: int) -> None: ...

    def step(self, number: int, num_items: int, values: Mapping[str, float] | None) -> None:  # noqa: ARG002
        self.averages["exponential"].update_parameters(self.bnn.network)

    def epoch(self, row: Mapping[str, float]) -> None:
        if row["epoch"] >= self.first_epoch:
            self.averages["last quarter"].update_parameters(self.bnn.network)

    def close(self) -> None: ...


def objective_of(method: str, num_steps: int, seed: int) -> varlap.MAP | varlap.VL:
    rise = round(0.3 * num_steps)
    if method == "VL":
        return varlap.VL(NUM_TRAIN, 0.1, variances="closed-form", beta_warmup_steps=rise, seed=seed)
    return varlap.MAP(NUM_TRAIN, 1.0, beta_warmup_steps=rise if "rising" in method else 0, seed=seed)


def run(method: str, schedule: str, seed: int, epochs: int, task: ImageTask) -> dict[str, Any]:
    torch.manual_seed(seed)
    bnn = varlap.BNN(task.network())
    objective = objective_of(method, epochs * -(-NUM_TRAIN // 128), seed)
    averaging = Averaging(bnn, epochs)
    settings: dict[str, Any] = {"epochs": epochs, "schedule": schedule, "lr": 1e-3, "seed": seed}
    varlap.fit(bnn, objective, task.training, progress=averaging, **settings)
    scores = {"last": scored(bnn, task)}
    for name, average in averaging.averages.items():
        bnn.network.load_state_dict(average.module.state_dict())
        scores[name] = scored(bnn, task)
    return {"method": method, "schedule": schedule, "seed": seed, "scores": scores}


def scored(bnn: varlap.BNN, task: ImageTask) -> dict[str, float]:
    found = varlap.evaluate(bnn, task.test, only=SCORES)
    held_out = varlap.evaluate(bnn, task.held_out, only=["nll"])["nll"]
    temperature = varlap.fit_temperature(bnn, task.held_out)
    scaled = varlap.evaluate(bnn, task.test, temperature=temperature, only=["nll"])["nll"]
    return found | {"held_out_nll": held_out, "scaled_nll": scaled}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Average over the seeds, with the difference in NLL from the last means, seed by seed."""
    result: dict[str, Any] = {}
    for method, schedule in dict.fromkeys((run["method"], run["schedule"]) for run in runs):
        own = [run["scores"] for run in runs if (run["method"], run["schedule"]) == (method, schedule)]
        for name in own[0]:
            entry = {score: statistics.mean(scores[name][score] for scores in own) for score in own[0][name]}
            entry["nll_minus_last"] = [scores[name]["nll"] - scores["last"]["nll"] for scores in own]
            result[f"{method}, {schedule}, {name}"] = entry | {"seeds": len(own)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    task = ImageTask("fashion_mnist", "convnet", validation=0.1, seed=0, num_train=NUM_TRAIN)
    spec = {"epochs": args.epochs, "num_train": NUM_TRAIN, "decay": DECAY, "last_part": LAST_PART}
    runs: list[dict[str, Any]] = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    done = {(run["method"], run["schedule"], run["seed"]) for run in runs}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for seed, method, schedule in track(list(itertools.product(range(args.seeds), METHODS, SCHEDULES)), "runs"):
        if (method, schedule, seed) not in done:
            runs.append(run(method, schedule, seed, args.epochs, task))
        result = {"spec": spec, "origin": origin("cpu"), "summary": summary(runs), "runs": runs}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, entry in summary(runs).items():
        print(name, entry)


if __name__ == "__main__":
    main()
