"""How good the probabilities are: VL beside MAP, VI, temperature-scaled MAP and linearised Laplace, each at its best.

    VARLAP_DATA=... python benchmarks/prediction_quality.py --batch-norm --lr 2e-3 --epochs 30 \\
        --out results/quality/fashion-mnist-10000-predictions.json

A small convnet on the first 10,000 Fashion-MNIST images. The 2,000 images after them are for validation: they choose
each method's β and way of predicting, and fit temperatures. Each has as many trials. The test images are
scored by the chosen network alone; MNIST is the out-of-distribution partner. What the file has is not run again.
"""

import argparse
import itertools
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

import varlap
from varlap.errors import VarlapWarning
from varlap.experiments import origin

NUM_TRAIN, NUM_VALIDATION = 10_000, 2_000
OBJECTIVES: dict[str, Any] = {"map": varlap.MAP, "vi": varlap.VI, "vl": varlap.VL}
MEAN, SAMPLED = {"how": "mean"}, {"how": "sampled", "num_samples": 10}
LINEARISED = {"how": "linearised", "num_samples": 30}
# What each method may predict by; validation chooses. "scaled" divides by a temperature fitted on validation images.
# As many trials for each method that is trained; found to hold its best β inside.
GRIDS = {
    "map": [0.3, 1.0, 3.0, 10.0],
    "vi": [0.01, 0.03, 0.1, 0.3],
    "vl": [0.01, 0.03, 0.1, 0.3],
    "laplace": [0.0003, 0.001, 0.003, 0.01],
}
LAPLACE = "MAP, Laplace"
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "MAP": {"mean": MEAN},
    "MAP, temperature": {"mean, scaled": MEAN},
    "MAP, Laplace": {"linearised": LINEARISED},
    "VI": {"mean": MEAN, "sampled": SAMPLED},
    "VL": {"mean": MEAN, "linearised": LINEARISED},
    "VL, temperature": {"mean, scaled": MEAN},
}
TRAINED_BY = {"MAP, temperature": "map", "MAP, Laplace": "map", "VL, temperature": "vl"}
SCORES = ("nll", "accuracy", "ece", "brier", "aurc", "ood_auroc_entropy", "ood_auroc_mutual_information")


def trained(method: str, beta: float, seed: int, args: argparse.Namespace, data: dict[str, Any]) -> varlap.BNN:
    torch.manual_seed(seed)
    bnn = varlap.BNN(varlap.models.convnet(1, 10, image_size=28, width=args.width, batch_norm=args.batch_norm))
    objective = OBJECTIVES[method](NUM_TRAIN, beta, seed=seed)
    settings: dict[str, Any] = {"epochs": args.epochs, "lr": args.lr, "seed": seed, "progress": "none"}
    varlap.fit(bnn, objective, data["train"], **settings)
    return bnn


def trials(method: str, seed: int, args: argparse.Namespace, data: dict[str, Any]) -> list[dict[str, Any]]:
    """Train at every β of the method's grid, choose by validation NLL, and test the chosen."""
    rows: dict[str, list[tuple[dict[str, Any], varlap.BNN]]] = {}
    for beta in GRIDS[method]:
        started = time.perf_counter()
        bnn = trained(method, beta, seed, args, data)
        seconds = time.perf_counter() - started
        for name, ways in WAYS.items():
            if name != LAPLACE and TRAINED_BY.get(name, name.lower()) == method:
                for way in ways:
                    row = {"method": name, "way": way, "beta": beta, "seed": seed, "seconds": seconds}
                    rows.setdefault(name, []).append((row | validated(bnn, name, way, data), bnn))
    if method == "map":  # Laplace starts from the MAP that was chosen, and has a β of its own
        chosen, bnn = min(rows["MAP"], key=lambda pair: pair[0]["validation"]["nll"])
        fisher = varlap.laplace(bnn, data["train"])
        for beta in GRIDS["laplace"]:
            bnn.set_optimal_variances(fisher, NUM_TRAIN, beta)
            row = chosen | {"method": LAPLACE, "way": "linearised", "beta": beta, "beta_of_the_mean": chosen["beta"]}
            rows.setdefault(LAPLACE, []).append((row | validated(bnn, LAPLACE, "linearised", data), bnn))
    for name, found in rows.items():
        row, bnn = min(found, key=lambda pair: pair[0]["validation"]["nll"])
        if name == LAPLACE:
            bnn.set_optimal_variances(fisher, NUM_TRAIN, row["beta"])
        options = WAYS[name][row["way"]] | {"temperature": row["temperature"], "only": SCORES}
        row["test"] = varlap.evaluate(bnn, data["test"], ood=data["ood"], **options)
    return [row for found in rows.values() for row, _ in found]


def validated(bnn: varlap.BNN, name: str, way: str, data: dict[str, Any]) -> dict[str, Any]:
    """Score the validation images, after fitting a temperature to them where the way is a scaled one."""
    options = WAYS[name][way]
    temperature = varlap.fit_temperature(bnn, data["validation"], **options) if "scaled" in way else 1.0
    scores = varlap.evaluate(bnn, data["validation"], **options, temperature=temperature, only=SCORES)
    return {"temperature": temperature, "validation": scores}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Average the test scores of the chosen runs, and the differences in NLL from VL's, seed by seed."""
    chosen: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        if "test" in row:
            chosen.setdefault(row["method"], {})[row["seed"]] = row
    result = {}
    for method, by_seed in chosen.items():
        entry: dict[str, Any] = {"seeds": len(by_seed)}
        kept = ("seed", "beta", "way", "temperature")
        entry["chosen"] = [{key: row[key] for key in kept} for row in by_seed.values()]
        for score in SCORES:
            values = [row["test"][score] for row in by_seed.values() if score in row["test"]]
            if len(values) == len(by_seed):
                entry[score] = statistics.mean(values)
        vl = chosen.get("VL", {})
        paired = [by_seed[seed]["test"]["nll"] - vl[seed]["test"]["nll"] for seed in by_seed if seed in vl]
        if len(paired) > 1 and method != "VL":
            entry["nll_minus_vl"] = statistics.mean(paired)
            entry["standard_error"] = statistics.stdev(paired) / len(paired) ** 0.5
        result[method] = entry
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(OBJECTIVES))
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--width", type=int, default=32, help="channels of the first convolution")
    parser.add_argument("--batch-norm", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    images = varlap.data.load("fashion_mnist")
    normalise = varlap.data.Normaliser.of(images.train_images)
    x, y = normalise(images.train_images[: NUM_TRAIN + NUM_VALIDATION]), images.train_labels
    data = {
        "train": (x[:NUM_TRAIN], y[:NUM_TRAIN]),
        "validation": (x[NUM_TRAIN:], y[NUM_TRAIN : NUM_TRAIN + NUM_VALIDATION]),
        "test": (normalise(images.test_images), images.test_labels),
        "ood": normalise(varlap.data.load("mnist").test_images[:2000]),
    }
    spec = {key: value for key, value in vars(args).items() if key not in ("out", "seeds", "methods")} | {
        "betas": GRIDS
    }
    rows: list[dict[str, Any]] = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    done = {(row["method"].lower(), row["seed"]) for row in rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore", VarlapWarning)  # samples of a wide posterior are part of the comparison
    for seed, method in track(list(itertools.product(args.seeds, args.methods)), "runs"):
        if (method, seed) not in done:
            rows += trials(method, seed, args, data)
        result = {"spec": spec, "origin": origin("cpu"), "summary": summary(rows), "runs": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    for method, entry in summary(rows).items():
        print(method, entry)


if __name__ == "__main__":
    main()
