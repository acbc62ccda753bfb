"""How good the scikit-learn estimators are without tuning, beside scikit-learn's own MLPs with their defaults.

    python benchmarks/estimators.py --uci FOLDER --out results/quality/estimators.json

Classes: iris, wine, breast cancer and digits; numbers: diabetes and the nine UCI tables (FOLDER holds their folders,
each with `data/data.txt`, `index_features.txt`, `index_target.txt`, `index_train_K.txt` and `index_test_K.txt`). The
bundled tables have five folds, the UCI ones the first of their standard splits. The estimators' defaults were chosen on
splits 10 to 12 of the UCI tables (protein: 3) and on folds of another seed. Both sides see standardised inputs and
targets. MLPRegressor has no variance. It is given one in two ways: "MLP" the mean squared residual of its own training
rows; "MLP, held out" that of a tenth of them that a first fit does not see, before a second fit sees all, which is the
stronger rival and costs a fit more. What the file has is not run again.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from rich.progress import track
from sklearn import datasets
from sklearn.compose import TransformedTargetRegressor
from sklearn.metrics import log_loss
from sklearn.model_selection import KFold, StratifiedKFold, train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import varlap
from varlap.experiments import origin

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
TUNED_ON = "UCI splits 10 to 12 (protein: 3), and folds of seed 1 of the bundled tables"
SMALLEST_PROBABILITY = 1e-15
HELD_OUT = "MLP, held out"


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
    X, y = (CLASSES.get(table) or datasets.load_diabetes)(return_X_y=True)
    folds = (StratifiedKFold if table in CLASSES else KFold)(NUM_FOLDS, shuffle=True, random_state=args.seed)
    for train, test in folds.split(X, y):
        yield X[train], y[train], X[test], y[test]


def class_scores(model: Any, data: Split) -> dict[str, float]:
    X, y, X_test, y_test = data
    model.fit(X, y)
    probs = np.clip(model.predict_proba(X_test), SMALLEST_PROBABILITY, None)
    labels = np.unique(y)
    nll = float(log_loss(y_test, probs / probs.sum(1, keepdims=True), labels=labels))
    return {"accuracy": float(np.mean(labels[probs.argmax(1)] == y_test)), "nll": nll}


def gaussian_scores(y: np.ndarray, mean: np.ndarray, std: np.ndarray | float) -> dict[str, float]:
    nll = 0.5 * np.square((y - mean) / std) + np.log(std) + 0.5 * np.log(2 * np.pi)
    return {"rmse": float(np.sqrt(np.mean(np.square(y - mean)))), "nll": float(np.mean(nll))}


def vl_regressor(seed: int, data: Split) -> dict[str, float]:
    X, y, X_test, y_test = data
    return gaussian_scores(y_test, *varlap.VLRegressor(random_state=seed).fit(X, y).predict(X_test, return_std=True))


def mlp_regressor(seed: int, data: Split, held_out: bool) -> dict[str, float]:
    X, y, X_test, y_test = data
    inner = make_pipeline(StandardScaler(), MLPRegressor(random_state=seed))
    model = TransformedTargetRegressor(inner, transformer=StandardScaler())
    X_rest, y_rest = X, y
    if held_out:
        X_fit, X_rest, y_fit, y_rest = train_test_split(X, y, test_size=0.1, random_state=seed)
        model.fit(X_fit, y_fit)
    else:
        model.fit(X, y)
    std = float(np.sqrt(np.mean(np.square(model.predict(X_rest) - y_rest))))
    return gaussian_scores(y_test, (model.fit(X, y) if held_out else model).predict(X_test), std)


def methods(table: str, seed: int) -> dict[str, Callable[[Split], dict[str, float]]]:
    if table in CLASSES:
        mlp = make_pipeline(StandardScaler(), MLPClassifier(random_state=seed))
        return {
            "VL": partial(class_scores, varlap.VLClassifier(random_state=seed)),
            "MLP": partial(class_scores, mlp),
        }
    ways = {"MLP": False, HELD_OUT: True}
    mlps = {name: partial(mlp_regressor, seed, held_out=held_out) for name, held_out in ways.items()}
    return {"VL": partial(vl_regressor, seed)} | mlps


def mean_and_error(values: list[float]) -> dict[str, float]:
    return {"mean": statistics.mean(values), "standard_error": statistics.stdev(values) / len(values) ** 0.5}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Average over splits, with standard errors; differences are taken split by split."""
    result: dict[str, Any] = {}
    for table in dict.fromkeys(run["table"] for run in runs):
        names = list(methods(table, seed=0))
        own = {name: [r for r in runs if r["table"] == table and r["method"] == name] for name in names}
        if len({len(rows) for rows in own.values()}) > 1 or len(own["VL"]) < 2:  # not all are done yet
            continue
        entry: dict[str, Any] = {"splits": len(own["VL"]), "training_rows": own["VL"][0]["training_rows"]}
        for score in own["VL"][0]["scores"]:
            values = {method: [run["scores"][score] for run in rows] for method, rows in own.items()}
            entry[score] = {method: mean_and_error(numbers) for method, numbers in values.items()}
            for rival in [name for name in names if name != "VL"]:
                paired = [vl - other for vl, other in zip(values["VL"], values[rival], strict=True)]
                entry[score][f"VL minus {rival}"] = mean_and_error(paired)
        entry["cpu_s"] = {method: statistics.mean(run["cpu_s"] for run in rows) for method, rows in own.items()}
        result[table] = entry
    return result


def markdown(result: dict[str, Any]) -> str:
    """Return the table of the documentation: VL, MLP and the difference, with a second one where MLP has two ways."""
    lines = ["| table | rows | VL | MLP | NLL: VL | MLP | VL minus MLP | minus MLP, held out |", "|" + " --- |" * 8]
    for table, entry in result.items():
        score = "accuracy" if "accuracy" in entry else "rmse"
        cells = [f"{table} ({score})", f"{entry['training_rows']:,}"]
        cells += [shown(entry[name][method], 3) for name in (score, "nll") for method in ("VL", "MLP")]
        for rival in ("MLP", HELD_OUT):
            difference = entry["nll"].get(f"VL minus {rival}")
            cells.append(shown(difference, 2, "+") if difference else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shown(value: dict[str, float], digits: int, sign: str = "") -> str:
    return f"{value['mean']:{sign}.{digits}g} ± {value['standard_error']:.1g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uci", type=Path, help="folder of the UCI tables; without it they are left out")
    parser.add_argument("--tables", type=lambda text: text.split(","), help="some of the tables")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # MLPs that have not converged say so
    tables = args.tables or [table for table in ALL if args.uci or table not in UCI]
    spec = {"seed": args.seed, "folds": NUM_FOLDS, "uci_splits": UCI, "defaults_chosen_on": TUNED_ON}
    runs: list[dict[str, Any]] = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    done = {(run["table"], run["split"], run["method"]) for run in runs}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    todo = [(t, n, m) for t in tables for n in range(UCI.get(t, NUM_FOLDS)) for m in methods(t, args.seed)]
    for table, number, method in track([key for key in todo if key not in done], "fits"):
        data = list(splits(table, args))[number]
        start = time.process_time()
        scores = methods(table, args.seed)[method](data)
        run = {"table": table, "split": number, "method": method, "scores": scores, "training_rows": len(data[0])}
        runs.append(run | {"cpu_s": time.process_time() - start})
        runs.sort(key=lambda run: (ALL.index(run["table"]), run["split"]))
        versions = origin() | {"scikit-learn": sklearn.__version__}
        result = {"spec": spec, "origin": versions, "summary": summary(runs), "runs": runs}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(summary(runs)))


if __name__ == "__main__":
    main()
