"""How good the scikit-learn estimators are without tuning, beside scikit-learn's own MLPs with their defaults.

    python benchmarks/estimators.py --uci FOLDER --out results/quality/estimators.json

Classes: iris, wine, breast cancer and digits; numbers: diabetes and the nine UCI tables (FOLDER holds their folders,
each with `data/data.txt`, `index_features.txt`, `index_target.txt`, `index_train_K.txt` and `index_test_K.txt`). The
bundled tables have five folds, the UCI ones the first of their standard splits. Both sides see standardised inputs and
targets. The MLPs come with their 200 passes and with 2,000, since many have not converged after 200; and with VL's
hidden layers, ten times their rate and a stricter tolerance, since at their own rate they stop too early. MLPRegressor
has no variance. It is given one in two ways: the mean squared residual of its training rows; or, "held out", that of
a tenth of them that a first fit does not see, before a second fit sees all. VL is judged against the one of these that
has the best mean over the splits reported, by a paired t test. VLRegressor comes with its noise and with a constant
one. Each run carries its origin and its seed; what the file has is not run again.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from rich.progress import track
from sklearn import datasets
from sklearn.compose import TransformedTargetRegressor
from sklearn.model_selection import KFold, StratifiedKFold, train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import varlap
from varlap.experiments import origin
from varlap.experiments.uci.summary import Estimate
from varlap.integrations.scikit_learn import sizing

Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
CLASSES = {"iris": datasets.load_iris, "wine": datasets.load_wine}
CLASSES |= {"breast cancer": datasets.load_breast_cancer, "digits": datasets.load_digits}
UCI = {  # name: number of splits
    "yacht": 5,
    "bostonHousing": 5,
    "energy": 5,
    "concrete": 5,
    "wine-quality-red": 5,
    "kin8nm": 3,
    "power-plant": 3,
    "naval-propulsion-plant": 3,
    "protein-tertiary-structure": 3,
}
ALL = [*CLASSES, "diabetes", *UCI]
NUM_FOLDS = 5
TUNED_ON = (
    "other splits of the same tables (UCI splits 10 to 12, protein 3; other folds of the bundled ones); their rows "
    "overlap, and earlier defaults had been judged by several of the splits reported, so this is no independent test"
)
SMALLEST_PROBABILITY = 1e-15
NUM_WORST = 3  # rows of which a run says what they cost
MANY = 2000  # passes; scikit-learn's default is 200
CONSTANT = "VL, constant noise"
FAST: dict[str, Any] = {"max_iter": MANY, "learning_rate_init": 0.01, "tol": 1e-6}
CLASS_MLPS: dict[str, dict[str, Any]] = {
    "MLP": {},
    "MLP, 2000 passes": {"max_iter": MANY},
    "MLP, VL's layers": {"layers": sizing.CLASSES, **FAST},
}
MLPS: dict[str, dict[str, Any]] = {
    "MLP": {},
    "MLP, held out": {"held_out": True},
    "MLP, 2000 passes": {"max_iter": MANY},
    "MLP, 2000 passes, held out": {"max_iter": MANY, "held_out": True},
    "MLP, VL's layers": {"layers": sizing.NUMBERS, **FAST},
    "MLP, VL's layers, held out": {"layers": sizing.NUMBERS, **FAST, "held_out": True},
}
LETTERS = dict(zip(MLPS, "abcdef", strict=True))  # of the page's table
LESS_IS_BETTER = {"accuracy": False, "rmse": True, "nll": True}


def splits(table: str, args: argparse.Namespace) -> Iterator[Split]:
    if table in UCI:
        folder = args.uci / table / "data"
        rows = np.loadtxt(folder / "data.txt")
        features = np.loadtxt(folder / "index_features.txt").astype(int)
        X, y = rows[:, features], rows[:, int(np.loadtxt(folder / "index_target.txt"))]
        for number in range(UCI[table]):
            train, test = (np.loadtxt(folder / f"index_{part}_{number}.txt").astype(int) for part in ("train", "test"))
            yield X[train], y[train], X[test], y[test]
        return
    load: Any = CLASSES.get(table, datasets.load_diabetes)
    X, y = load(return_X_y=True)
    folds = (StratifiedKFold if table in CLASSES else KFold)(NUM_FOLDS, shuffle=True, random_state=args.seed)
    for train, test in folds.split(X, y):
        yield X[train], y[train], X[test], y[test]


def class_scores(model: Any, data: Split) -> dict[str, Any]:
    X, y, X_test, y_test = data
    model.fit(X, y)
    probs = np.clip(model.predict_proba(X_test), SMALLEST_PROBABILITY, None)
    probs /= probs.sum(1, keepdims=True)
    labels = np.unique(y)
    costs = -np.log(probs[np.arange(len(y_test)), np.searchsorted(labels, y_test)])
    return scored(costs, accuracy=np.mean(labels[probs.argmax(1)] == y_test))


def gaussian_scores(y: np.ndarray, mean: np.ndarray, std: np.ndarray | float) -> dict[str, Any]:
    costs = 0.5 * np.square((y - mean) / std) + np.log(std) + 0.5 * np.log(2 * np.pi)
    return scored(costs, rmse=np.sqrt(np.mean(np.square(y - mean))))


def scored(costs: np.ndarray, **score: Any) -> dict[str, Any]:
    """Return a run's scores, and the test rows that cost most, with their nats."""
    scores = {name: float(value) for name, value in score.items()} | {"nll": float(costs.mean())}
    worst = [[int(row), round(float(costs[row]), 2)] for row in costs.argsort()[::-1][:NUM_WORST]]
    return {"scores": scores, "worst_rows": worst}


def mlp_classifier(seed: int, data: Split, layers: sizing.BySize | None = None, **options: Any) -> dict[str, Any]:
    mlp = MLPClassifier(random_state=seed, **options | hidden(layers, data))
    return class_scores(make_pipeline(StandardScaler(), mlp), data) | iterations(mlp)


def vl_regressor(seed: int, data: Split, noise: Any) -> dict[str, Any]:
    X, y, X_test, y_test = data
    model = varlap.VLRegressor(noise=noise, random_state=seed).fit(X, y)
    return gaussian_scores(y_test, *model.predict(X_test, return_std=True))


def hidden(layers: sizing.BySize | None, data: Split) -> dict[str, Any]:
    """Return the hidden layers that VL has for so many rows as an MLP's option, or none."""
    return {} if layers is None else {"hidden_layer_sizes": layers.of(len(data[0])).hidden}


def mlp_regressor(
    seed: int, data: Split, held_out: bool = False, layers: sizing.BySize | None = None, **options: Any
) -> dict[str, Any]:
    X, y, X_test, y_test = data
    inner = make_pipeline(StandardScaler(), MLPRegressor(random_state=seed, **options | hidden(layers, data)))
    model: Any = TransformedTargetRegressor(inner, transformer=StandardScaler())
    X_rest, y_rest = X, y
    if held_out:
        X_fit, X_rest, y_fit, y_rest = train_test_split(X, y, test_size=0.1, random_state=seed)
        model.fit(X_fit, y_fit)
    else:
        model.fit(X, y)
    std = float(np.sqrt(np.mean(np.square(model.predict(X_rest) - y_rest))))
    mean = (model.fit(X, y) if held_out else model).predict(X_test)
    return gaussian_scores(y_test, mean, std) | iterations(model.regressor_[-1])


def iterations(mlp: Any) -> dict[str, Any]:
    """Return how many passes the fit took, and whether it was stopped before it had converged."""
    return {"n_iter": int(mlp.n_iter_), "hit_max_iter": bool(mlp.n_iter_ >= mlp.max_iter)}


def methods(table: str, seed: int) -> dict[str, Callable[[Split], dict[str, Any]]]:
    if table in CLASSES:
        mlps = {name: partial(mlp_classifier, seed, **options) for name, options in CLASS_MLPS.items()}
        return {"VL": lambda data: class_scores(varlap.VLClassifier(random_state=seed), data)} | mlps
    ways = {"VL": "varying", CONSTANT: "constant"}
    mlps = {name: partial(mlp_regressor, seed, **options) for name, options in MLPS.items()}
    return {name: partial(vl_regressor, seed, noise=noise) for name, noise in ways.items()} | mlps


def mean_and_error(values: Sequence[float]) -> dict[str, Any]:
    found = Estimate.of(values)
    return {"mean": found.mean, "standard_error": found.standard_error}


def difference(values: dict[str, list[float]], method: str, other: str) -> dict[str, Any]:
    """Return the mean difference, split by split, and whether a paired t test at 5 % finds it clear."""
    paired = [one - another for one, another in zip(values[method], values[other], strict=True)]
    return mean_and_error(paired) | {"is_clear": Estimate.of(paired).is_clear}


def summary(runs: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Average over a seed's splits, with standard errors; the best MLP is that of the best mean over them."""
    result: dict[str, Any] = {}
    runs = [run for run in runs if run["seed"] == seed]
    for table in dict.fromkeys(run["table"] for run in runs):
        names = list(methods(table, seed))
        own = {name: [r for r in runs if r["table"] == table and r["method"] == name] for name in names}
        if len({len(rows) for rows in own.values()}) > 1 or len(own["VL"]) < 2:  # not all are done yet
            continue
        entry: dict[str, Any] = {"splits": len(own["VL"]), "training_rows": own["VL"][0]["training_rows"]}
        rivals = [name for name in names if name in MLPS]
        for score in own["VL"][0]["scores"]:
            values = {method: [run["scores"][score] for run in rows] for method, rows in own.items()}
            best = (min if LESS_IS_BETTER[score] else max)(rivals, key=lambda name: statistics.fmean(values[name]))
            entry[score] = {method: mean_and_error(numbers) for method, numbers in values.items()}
            entry[score] |= {"best MLP": best}
            for method in [name for name in names if name not in MLPS]:
                entry[score][f"{method} minus best MLP"] = difference(values, method, best)
            if CONSTANT in names:
                entry[score][f"VL minus {CONSTANT}"] = difference(values, "VL", CONSTANT)
        entry["cpu_s"] = {method: statistics.mean(run["cpu_s"] for run in rows) for method, rows in own.items()}
        entry["hit_max_iter"] = {name: sum(run["hit_max_iter"] for run in own[name]) for name in rivals}
        result[table] = entry
    return result


def clearly(result: dict[str, Any], scores: Sequence[str], better: bool = True, method: str = "VL") -> list[str]:
    """Return the tables where a method is clearly better, or worse, than the best MLP."""
    found = []
    for table, entry in result.items():
        for score in [name for name in scores if f"{method} minus best MLP" in entry.get(name, {})]:
            one = entry[score][f"{method} minus best MLP"]
            if one["is_clear"] and (one["mean"] < 0) == (LESS_IS_BETTER[score] == better):
                found.append(table)
    return found


def markdown(result: dict[str, Any]) -> str:
    """Return the table of the documentation; the letter says which of the MLPs was the best."""
    heads = ["accuracy or RMSE: VL", "MLP", "best MLP", "NLL: VL", "constant noise", "MLP", "best MLP"]
    heads += ["NLL: VL minus best MLP", "constant noise minus best MLP"]
    lines = ["| table | training rows | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) + 1)]
    for table, entry in result.items():
        score = "accuracy" if "accuracy" in entry else "rmse"
        cells = [f"{table} ({score})", f"{entry['training_rows']:,}"]
        for name in (score, "nll"):
            best = entry[name]["best MLP"]
            cells.append(shown(entry[name]["VL"], 3))
            if name == "nll":
                cells.append(shown(entry[name].get(CONSTANT), 3))
            cells += [shown(entry[name]["MLP"], 3), f"{shown(entry[name][best], 3)} ({LETTERS[best]})"]
        cells += [shown(entry["nll"].get(f"{method} minus best MLP"), 2, "+") for method in ("VL", CONSTANT)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shown(value: dict[str, Any] | None, digits: int, sign: str = "") -> str:
    """Return a mean with its standard error; bold where a difference is clear.

    >>> shown({"mean": 0.5, "standard_error": 0.1, "is_clear": True}, 2, "+")
    '**+0.5 ± 0.1**'
    """
    if value is None:
        return ""
    words = f"{value['mean']:{sign}.{digits}g} ± {value['standard_error']:.1g}"
    return f"**{words}**" if value.get("is_clear") else words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uci", type=Path, help="folder of the UCI tables; without it they are left out")
    parser.add_argument("--tables", type=lambda text: text.split(","), help="some of the tables")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # MLPs that have not converged say so; a run keeps it as hit_max_iter
    tables = args.tables or [table for table in ALL if args.uci or table not in UCI]
    spec = {"seed": args.seed, "folds": NUM_FOLDS, "uci_splits": UCI, "defaults_chosen_on": TUNED_ON}
    runs: list[dict[str, Any]] = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    done = {(run["table"], run["split"], run["method"], run["seed"]) for run in runs}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    todo = [(t, n, m, args.seed) for t in tables for n in range(UCI.get(t, NUM_FOLDS)) for m in methods(t, args.seed)]
    versions = origin("cpu") | {"scikit-learn": sklearn.__version__}
    for key in track([key for key in todo if key not in done], "fits"):
        table, number, method, seed = key
        data = list(splits(table, args))[number]
        start = time.process_time()
        found = methods(table, seed)[method](data)
        times = {"cpu_s": time.process_time() - start, "origin": versions}
        run = {"table": table, "split": number, "method": method, "seed": seed, "training_rows": len(data[0])}
        runs.append(run | found | times)
        runs.sort(key=lambda run: (run["seed"], ALL.index(run["table"]), run["split"]))
        result = {"spec": spec, "summary": summary(runs, args.seed), "runs": runs}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(summary(runs, args.seed)))


if __name__ == "__main__":
    main()
