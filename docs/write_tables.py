"""Write the tables of the pages anew from the committed results.

`python docs/write_tables.py` replaces what stands between `<!-- table: NAME ARGUMENTS -->` and `<!-- end of table -->`
on README.md and the pages of this folder. A test holds that this changes nothing.
"""

import ast
import dataclasses
import itertools
import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from varlap.experiments import Result, RunSpec
from varlap.experiments.grid import paper_numbers
from varlap.experiments.ways import NAMES, Key
from varlap.report.reproduction import read_sweeps
from varlap.report.sweep_tables import table_2
from varlap.report.sweeps import METHODS, Sweep

ROOT = Path(__file__).resolve().parent.parent
SPEC = ROOT / "src" / "varlap" / "experiments" / "spec.py"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARKED = re.compile(
    r"(?P<begin>^(?P<indent> *)<!-- table: (?P<name>[^\n]*) -->\n).*?(?P<end>^ *<!-- end of table -->$)", re.M | re.S
)

DATA = {"cifar10": "CIFAR-10", "fashion_mnist": "Fashion-MNIST"}
RECIPES = {"paper": "paper's recipe", "sgd": "SGD", "ours": "Adam at 1e-3"}
OTHER_IMAGES = {"rotated": "rotated images", "mnist": "MNIST"}
COLUMNS = NAMES | {("map", "linearised"): "MAP + diagonal linearised Laplace"}
CURVATURES = {
    "VL's own for labels": "VL's default for classification (held)",
    "VL's own for numbers": "VL's default for regression (whole)",
}
Sign = Callable[[Sequence[float]], float]


def main() -> None:
    """Write what has changed."""
    for page in PAGES:
        text = page.read_text()
        if (new := with_tables(text)) != text:
            page.write_text(new)
            print(f"{page.relative_to(ROOT)} was changed")


def with_tables(text: str) -> str:
    """Return a page with its tables made anew."""

    def replaced(match: re.Match[str]) -> str:
        name, *arguments = match["name"].split()
        lines = ["", *TABLES[name](*arguments), ""]
        made = "".join(f"{match['indent']}{line}".rstrip() + "\n" for line in lines)
        return match["begin"] + made + match["end"]

    return MARKED.sub(replaced, text)


def ways(data: str, recipe: str, epochs: str) -> list[str]:
    """A row for each way of predicting, beside the paper's numbers."""
    sweep = _sweep("paper", data, recipe, int(epochs))
    theirs = paper_numbers("table-1")[data]
    rows, scores = [], {key: _scores(key, choice.by_validation) for key, choice in sweep.choices().items()}
    best = {
        score: _best([row[score] for row in scores.values()], sign, digits)
        for score, sign, digits in (("nll", min, 3), ("accuracy", max, 3), ("ece", min, 3), ("ood", max, 3))
    }
    for key, choice in sweep.choices().items():
        own = scores[key]
        temperature = choice.by_validation[0].test[key[1]].get("temperature")
        name = COLUMNS[key] + ("" if temperature is None else f" (T = {temperature:.2f})")
        paper = theirs.get(COLUMNS[key])
        shown = ("", "", "") if paper is None else (f"{paper[0]:.2f}", f"{100 * paper[1]:.1f} %", f"{paper[2]:.3f}")
        rows.append(
            _row(
                name,
                f"{choice.beta:g}",
                *(_bold(f"{own['nll']:.3f}", own["nll"], best["nll"]), shown[0]),
                *(_bold(f"{100 * own['accuracy']:.1f} %", own["accuracy"], best["accuracy"]), shown[1]),
                *(_bold(f"{own['ece']:.3f}", own["ece"], best["ece"]), shown[2]),
                _bold(f"{own['ood']:.3f}", own["ood"], best["ood"]),
            )
        )
    (outside,) = {run.ood for run in sweep.results}
    auroc = f"AUROC, {OTHER_IMAGES[str(outside)]}"
    return [*_head("", "β", "test NLL", "paper's", "accuracy", "paper's", "ECE", "paper's", auroc), *rows]


def long_trainings() -> list[str]:
    """Test NLL of every training of 200 epochs, by method and way of predicting."""
    keys: tuple[Key, ...] = (("vl", "mean"), ("map", "mean"), ("map", "scaled"), ("map", "linearised"))
    keys += (("vi", "sampled"), ("vi", "scaled"))
    rows = []
    for data, recipe in itertools.product(DATA, RECIPES):
        if (sweep := _sweep_or_none("paper", data, recipe, 200)) is None:
            continue
        choices = sweep.choices()
        nlls = [_scores(key, choices[key].by_validation)["nll"] for key in keys]
        cells = [_bold(f"{nll:.3f}", nll, _best(nlls, min, 3)) for nll in nlls]
        paper = paper_numbers("table-1")[data]["VL"][0]
        rows.append(_row(_name(sweep), *cells, f"{paper:.2f}"))
    return [*_head("test NLL", *(COLUMNS[key] for key in keys), "paper's VL"), *rows]


def studies() -> list[str]:
    """Test NLL / ECE of VL, MAP and VI in every sweep that has VL and temperature-scaled MAP."""
    keys: tuple[Key, ...] = (("vl", "mean"), ("map", "mean"), ("map", "scaled"), ("vi", "sampled"), ("vi", "scaled"))
    rows = []
    found = [sweep for sweep in read_sweeps(ROOT / "results" / "paper") if set(keys[:3]) <= set(sweep.choices())]
    order = {recipe: number for number, recipe in enumerate(RECIPES)}
    for sweep in sorted(found, key=lambda one: (one.spec.data, -one.spec.epochs, order[one.spec.recipe])):
        choices = sweep.choices()
        scores = [_scores(key, choices[key].by_validation) if key in choices else None for key in keys]
        there = [each for each in scores if each is not None]
        best = {score: _best([each[score] for each in there], min, 3) for score in ("nll", "ece")}
        cells = [
            "" if each is None else " / ".join(_bold(f"{each[s]:.3f}", each[s], best[s]) for s in ("nll", "ece"))
            for each in scores
        ]
        betas = {METHODS[key[0]]: choice.num_trials for key, choice in choices.items() if key[1] == "mean"}
        counts = set(betas.values())
        told = f"{counts.pop()} β each" if len(counts) == 1 else ", ".join(f"{name} {n} β" for name, n in betas.items())
        rows.append(_row(f"{_name(sweep)}, {sweep.spec.epochs} epochs ({told})", *cells))
    return [*_head("test NLL / ECE", *(COLUMNS[key] for key in keys)), *rows]


def out_of_distribution() -> list[str]:
    """AUROC of detecting other images after every training of 200 epochs, by method and measure of uncertainty."""
    keys: tuple[Key, ...] = (("vl", "mean"), ("vl", "linearised"), ("map", "mean"), ("map", "scaled"))
    keys += (("map", "linearised"), ("vi", "scaled"))
    measures = {key: "mutual_information" if key[1] == "linearised" else "entropy" for key in keys}
    rows = []
    for data, recipe in itertools.product(DATA, RECIPES):
        if (sweep := _sweep_or_none("paper", data, recipe, 200)) is None:
            continue
        (outside,) = {str(run.ood) for run in sweep.results}
        runs = {key: sweep.choices()[key].by_validation[0] for key in keys}
        values = [runs[key].test[key[1]][f"ood_auroc_{measures[key]}"] for key in keys]
        cells = [_bold(f"{value:.3f}", value, _best(values, max, 3)) for value in values]
        rows.append(_row(f"{_name(sweep)}, vs {OTHER_IMAGES[outside]}", *cells))
    heads = (f"{COLUMNS[key]}: {measures[key].replace('_', ' ')}" for key in keys)
    return [*_head("AUROC", *heads), *rows]


def early_stopping(data: str, epochs: str) -> list[str]:
    """Figure 2 as a table: final scores by β and by the multiplier of log σ's learning rate."""
    found = read_sweeps(ROOT / "results" / "figure-2")
    (sweep,) = [sweep for sweep in found if (sweep.spec.data, sweep.spec.epochs) == (data, int(epochs))]
    runs = {_where(run): run for run in (*sweep.results, *sweep.diverged)}
    rows = []
    for beta, multiplier in itertools.product((1.0, 0.1), (1.0, 3.0, 10.0, 30.0)):
        cells: list[str] = []
        for method in ("vl", "vi"):
            run = runs.get((beta, multiplier, method))
            if run is None or run.failure is not None:
                cells += ["not run" if run is None else "diverged", "", ""]
            else:
                elbo = f"{run.history[-1]['elbo']:.3f}".replace("-", "−")
                scores = run.test["mean"]
                cells += [elbo, f"{scores['nll']:.3f}", f"{100 * scores['accuracy']:.1f} %"]
        rows.append(_row(f"{beta:g}", f"× {multiplier:g}", *cells))
    return [
        *_head("β", "multiplier", *(f"{m}{s}" for m in ("VL: ", "VI: ") for s in ("ELBO", "test NLL", "accuracy"))),
        *rows,
    ]


def times_of_an_epoch() -> list[str]:
    """Table 2: seconds an epoch beside the paper's."""
    (sweep,) = read_sweeps(ROOT / "results" / "table-2")
    return table_2(sweep).to_markdown().splitlines()


def curvature_costs() -> list[str]:
    """What a step takes by how often, and on how much of the batch, VL evaluates its curvature."""
    methods = json.loads((ROOT / "results" / "bench" / "curvatures-h200.json").read_text())["methods"]
    rows = [_row(name, f"{row['median_ms']:.2f}", f"{row['ratio_to_map']:.2f}") for name, row in methods.items()]
    return [*_head("curvature", "ms", "× MAP"), *rows]


def held_labels() -> list[str]:
    """Test NLL of small trainings by VL's curvature, learning rate and β."""
    runs = json.loads((ROOT / "results" / "quality" / "held_labels.json").read_text())["runs"]
    found: dict[tuple[Any, ...], dict[str, list[float | None]]] = {}
    for run in runs:
        where = found.setdefault((run["task"], run["lr"], run["beta"]), {})
        where.setdefault(run["curvature"], []).append(run["test_nll"])
    curvatures = list(dict.fromkeys(run["curvature"] for run in runs))
    rows = [
        _row(task, f"{lr:g}", f"{beta:g}", *(_mean_or_failures(nlls[curvature]) for curvature in curvatures))
        for (task, lr, beta), nlls in found.items()
    ]
    shown = (CURVATURES.get(curvature, curvature) for curvature in curvatures)
    return [*_head("task", "learning rate", "β", *shown), *rows]


def _mean_or_failures(nlls: list[float | None]) -> str:
    sound = [nll for nll in nlls if nll is not None]
    lost = "" if len(sound) == len(nlls) else f"NaN in {len(nlls) - len(sound)} of {len(nlls)}"
    mean = f"{statistics.fmean(sound):.3f}".replace("-", "−") if sound else ""
    return "; ".join(filter(None, [mean, lost]))


def activations() -> list[str]:
    """Test scores of ordinary networks by what stands for ReLU, the mean of the seeds."""
    runs = json.loads((ROOT / "results" / "quality" / "activations.json").read_text())["runs"]
    found: dict[tuple[str, str], dict[str, list[dict[str, float]]]] = {}
    for run in runs:
        found.setdefault((run["network"], run["method"]), {}).setdefault(run["activation"], []).append(run)
    names = list(dict.fromkeys(run["activation"] for run in runs))
    rows = [
        _row(network, method, *(_means(ones[name], ("nll", "accuracy", "ece")) for name in names))
        for (network, method), ones in found.items()
    ]
    return [*_head("network", "method", *names), *rows]


def _means(runs: Sequence[dict[str, float]], scores: Sequence[str]) -> str:
    return " / ".join(f"{statistics.fmean(run[score] for run in runs):.3f}" for score in scores)


def settings() -> list[str]:
    """The settings of a run with their defaults, from the words in the code."""
    (spec,) = (node for node in ast.parse(SPEC.read_text()).body if isinstance(node, ast.ClassDef))
    words = {
        field.target.id: text.value.value
        for field, text in itertools.pairwise(spec.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    rows = []
    for field in dataclasses.fields(RunSpec):
        default = "" if field.default is dataclasses.MISSING else f"`{_as_typed(field.default)}`"
        rows.append(_row(f"`{field.name}`", default, " ".join(words.get(field.name, "").split())))
    return [*_head("setting", "default", "meaning"), *rows]


def _as_typed(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


TABLES: dict[str, Callable[..., list[str]]] = {
    "ways": ways,
    "long-trainings": long_trainings,
    "studies": studies,
    "out-of-distribution": out_of_distribution,
    "early-stopping": early_stopping,
    "times-of-an-epoch": times_of_an_epoch,
    "curvature-costs": curvature_costs,
    "held-labels": held_labels,
    "activations": activations,
    "settings": settings,
}


def _name(sweep: Sweep) -> str:
    """Call a sweep by data and recipe, with what is not as the recipe has it."""
    spec = sweep.spec
    differs = ", default curvature" if (spec.recipe, spec.curvature) == ("paper", "default") else ""
    return f"{DATA[spec.data]}, {RECIPES[spec.recipe]}{differs}"


def _where(run: Result) -> tuple[float, float, str]:
    return run.spec.beta, run.spec.log_sigma_lr_multiplier, run.spec.method


def _sweep(store: str, data: str, recipe: str, epochs: int) -> Sweep:
    found = _sweep_or_none(store, data, recipe, epochs)
    assert found is not None, (store, data, recipe, epochs)
    return found


def _sweep_or_none(store: str, data: str, recipe: str, epochs: int) -> Sweep | None:
    wanted = data, recipe, epochs
    found = [s for s in read_sweeps(ROOT / "results" / store) if (s.spec.data, s.spec.recipe, s.spec.epochs) == wanted]
    assert len(found) < 2, wanted
    return found[0] if found else None


def _scores(key: Key, runs: Sequence[Result]) -> dict[str, float]:
    (run,) = runs  # one seed; with several the page would have to show their spread
    scores = run.test[key[1]]
    return {name: scores[name] for name in ("nll", "accuracy", "ece")} | {"ood": scores["ood_auroc_entropy"]}


def _best(values: Sequence[float], sign: Sign, digits: int) -> float:
    """Return the best as it is shown, so that all that look the same are bold."""
    return round(sign(values), digits)


def _bold(shown: str, value: float, best: float) -> str:
    return f"**{shown}**" if round(value, 3) == best else shown


def _head(*cells: str) -> Iterator[str]:
    yield _row(*cells)
    yield _row(*(["---"] * len(cells)))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


if __name__ == "__main__":
    main()
