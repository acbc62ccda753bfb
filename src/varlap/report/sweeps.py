"""Results of `varlap reproduce`, grouped by what may be compared, and their tables beside the paper's own numbers."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from varlap.experiments import Evaluated, Result, RunSpec
from varlap.experiments.choice import Choice, choose, shared_seeds
from varlap.experiments.final_line import FinalLine
from varlap.experiments.grid import paper_numbers, recipe_settings
from varlap.experiments.ways import LEAST, MOST, NAMES, PAPERS, Key
from varlap.plot.style import plain_number
from varlap.report.sections import Method
from varlap.report.sources import Entry
from varlap.report.tables import KNOWN, Cell, Column, Row, Table, comparison, printed

Compared = Literal["beta", "log_sigma_lr_multiplier"]
PAPERS_MULTIPLIER = 10.0
WORK = ("model", "width", "num_train", "batch_size", "optimizer", "clip_norm", "curvature", "gradient", "variances")
"""the settings that say what is computed in a step, and how many steps an epoch has"""
_METHODS = {"vl": "VL", "vi": "VI", "map": "MAP"}
_SCORES = {column.key: column for column in KNOWN if column.key in ("nll", "accuracy", "ece")}
_BESIDES = ("nll", "accuracy", "ece", "brier", "ood_auroc_entropy", "ood_auroc_mutual_information")
_FITTED = {
    "temperature": Column("temperature", "temperature", meaning="fitted on held-out images"),
    "laplace_beta": Column("laplace_beta", "β of variances", meaning="of Laplace's, chosen by held-out images"),
}
_OTHERS = Column("ood", "other images", meaning="what OOD scores are about; where rows differ in it, none is the best")
_BETA = Column("beta", "β", meaning="chosen by the NLL of held-out training images")


@dataclass(frozen=True)
class Sweep:
    """Runs that differ in method, β, seed and the speed of log σ alone."""

    title: str
    spec: RunSpec
    """one of them, for what they share"""
    results: tuple[Result, ...]
    """those that came to their end"""
    diverged: tuple[Result, ...] = ()
    lines: tuple[FinalLine, ...] = ()
    """what was recorded as chosen for final runs"""

    @property
    def multiplier(self) -> float:
        """The paper's multiplier of log σ's learning rate, or where no run has it the least."""
        found = sorted({result.spec.log_sigma_lr_multiplier for result in (*self.results, *self.diverged)})
        return PAPERS_MULTIPLIER if PAPERS_MULTIPLIER in found else found[0]

    @property
    def final(self) -> FinalLine | None:
        """What was recorded as chosen for the main runs."""
        shared = dataclasses.replace(self.spec, log_sigma_lr_multiplier=self.multiplier)
        return next((line for line in self.lines if line.spec == shared), None)

    def of(self, method: str) -> list[Result]:
        """Return the main runs of a method."""
        return [result for result in self.results if self._is_main(result.spec, method)]

    def choices(self) -> dict[Key, Choice]:
        """Return what was chosen for each method and way of predicting, in the order of the tables.

        Where a choice for a method's final runs was recorded, its rows are these runs, and nothing is chosen again.
        """
        line = self.final
        found = {
            key: self._chosen_here(key) if line is None or key[0] not in line.seeds else self._final(key, line)
            for key in NAMES
        }
        return {key: choice for key, choice in found.items() if choice is not None}

    def _is_main(self, spec: RunSpec, method: str) -> bool:
        return (spec.method, spec.log_sigma_lr_multiplier) == (method, self.multiplier)

    def _chosen_here(self, key: Key) -> Choice | None:
        found = choose([r for r in (*self.results, *self.diverged) if self._is_main(r.spec, key[0])], key[1])
        if found is None:
            return None
        by_validation, by_test = (
            tuple(run for run in runs if run.failure is None) for runs in (found.by_validation, found.by_test)
        )
        return Choice(by_validation, by_test, found.betas)

    def _final(self, key: Key, line: FinalLine) -> Choice | None:
        runs = tuple(run for run in line.runs(key, self.results) if key[1] in run.test)
        return Choice(runs, (), (runs[0].spec.beta,)) if runs else None

    @property
    def is_the_papers(self) -> bool:
        """Whether the network and the data are those of the paper, so that its numbers may stand beside."""
        spec = self.spec
        return (spec.model, spec.width, spec.num_train) == ("preact-resnet-18", 64, None)


def sweeps(results: Iterable[Result], lines: Iterable[FinalLine] = ()) -> list[Sweep]:
    """Group results by what they share, in the order of data and recipe, the longest first.

    Args:
        results: all that may be shown.
        lines: what was recorded as chosen for final runs.

    >>> def result(beta, epochs):
    ...     return Result(RunSpec("digits", "vl", beta, epochs=epochs), {"mean": {"nll": 0.3}}, {}, {}, 1.0)
    >>> [(sweep.title, len(sweep.results)) for sweep in sweeps([result(0.1, 50), result(1.0, 50), result(0.1, 200)])]
    [('digits, paper recipe, 200 epochs', 1), ('digits, paper recipe, 50 epochs', 2)]
    """
    groups: dict[RunSpec, list[Result]] = {}
    for result in results:
        shared = dataclasses.replace(
            result.spec, method="vl", beta=1.0, seed=0, log_sigma_lr_multiplier=PAPERS_MULTIPLIER
        )
        groups.setdefault(shared, []).append(result)
    specs = sorted(groups, key=lambda spec: (spec.data, spec.recipe, -spec.epochs, spec.key()))
    titles = [_title(spec, specs) for spec in specs]
    lines = tuple(lines)
    found = []
    for title, spec in zip(titles, specs, strict=True):
        ended = tuple(result for result in groups[spec] if result.failure is None)
        diverged = tuple(result for result in groups[spec] if result.failure is not None)
        found.append(Sweep(title, spec, ended, diverged, lines))
    return found


def table_1(sweep: Sweep) -> Table | None:
    """Return the paper's four rows with its numbers beside ours; None where no images could choose β.

    >>> scores = {"mean": {"nll": 0.25, "accuracy": 0.92, "ece": 0.02}}
    >>> (sweep,) = sweeps([Result(RunSpec("cifar10", "vl", 0.1), scores, scores, {}, 9.0)])
    >>> print(table_1(sweep).to_markdown().splitlines()[2])
    | VL | 0.1 | 0.2500 | 0.23 | 92.00 | 92.4 | 0.0200 | 0.017 |
    """
    choices = {key: choice for key, choice in sweep.choices().items() if key in PAPERS}
    if not choices:
        return None
    ours = comparison([_method(key, choice.by_validation) for key, choice in choices.items()])
    theirs = paper_numbers("table-1").get(sweep.spec.data, {}) if sweep.is_the_papers else {}
    columns = [_BETA]
    for score in _SCORES.values():
        columns.append(score)
        if theirs:
            columns.append(
                dataclasses.replace(score, key=f"paper_{score.key}", title=f"paper's {score.title}", direction="")
            )
    on_test: dict[str, Cell] = {}
    if sweep.final is None and any(choice.num_trials > 1 for choice in choices.values()):
        columns.append(Column("test_beta", "best-on-test β"))
        columns.append(best := Column("test_nll", "best-on-test NLL"))
        nlls = {key: statistics.fmean(run.test[key[1]]["nll"] for run in choices[key].by_test) for key in choices}
        on_test = printed(best, {NAMES[key]: Cell(nll) for key, nll in nlls.items()})
    rows = []
    for row, (key, choice) in zip(ours.rows, choices.items(), strict=True):
        cells = dict(row.cells) | {"beta": _beta(choice.beta)}
        if on_test:
            cells |= {"test_beta": _beta(choice.by_test[0].spec.beta), "test_nll": on_test[row.name]}
        for score, value in zip(_SCORES, theirs.get(NAMES[key], ()), strict=False):
            cells[f"paper_{score}"] = _paper_cell(score, value)
        rows.append(Row(row.name, row.num_runs, cells))
    return Table(tuple(columns), tuple(rows))


def table_of_all_ways(sweep: Sweep) -> Table | None:
    """Return all ways of predicting, baselines that the paper lacks among them, with detection of other images."""
    choices = sweep.choices()
    if not choices:
        return None
    table = comparison([_method(key, choice.by_validation) for key, choice in choices.items()])
    columns = [_BETA, *(column for column in table.columns if column.key in _BESIDES)]
    rows = []
    for row, (key, choice) in zip(table.rows, choices.items(), strict=True):
        fitted = {name: _fitted([run.test[key[1]].get(name) for run in choice.by_validation]) for name in _FITTED}
        cells = dict(row.cells) | {name: cell for name, cell in fitted.items() if name in row.cells}
        if others := ", ".join(dict.fromkeys(run.ood for run in choice.by_validation if run.ood)):
            cells["ood"] = Cell(math.nan, shown=others)
        rows.append(Row(row.name, row.num_runs, cells | {"beta": _beta(choice.beta)}))
    if any("ood" in row.cells for row in rows):
        columns.append(_OTHERS)
    columns += [column for key, column in _FITTED.items() if any(key in row.cells for row in rows)]
    return Table(tuple(columns), tuple(rows))


def table_2(sweep: Sweep) -> Table:
    """Return seconds an epoch and their ratio to MAP's.

    >>> scores, epoch = {"mean": {"nll": 0.25}}, {"seconds": 3.0}
    >>> (sweep,) = sweeps([Result(RunSpec("cifar10", "map", 0.1), scores, {}, {}, 3.0, (epoch,))])
    >>> print(table_2(sweep).to_markdown().splitlines()[2])
    | MAP | 3.00 | 1.00 | 41.8 | 1.00 |
    """
    found = {method: runs for method in _METHODS if (runs := sweep.of(method))}
    times = {method: statistics.median(run.seconds_per_epoch for run in runs) for method, runs in found.items()}
    theirs = papers_times(sweep)
    values: dict[str, dict[str, float]] = {"seconds": times}
    if "map" in times:
        values["ratio"] = {method: time / times["map"] for method, time in times.items()}
    if theirs:
        values["paper_seconds"] = {method: theirs[_METHODS[method]] for method in times}
        values["paper_ratio"] = {method: theirs[_METHODS[method]] / theirs["MAP"] for method in times}
    titles = {
        "seconds": "seconds an epoch",
        "ratio": "× MAP",
        "paper_seconds": "paper's seconds",
        "paper_ratio": "paper's × MAP",
    }
    columns = [Column(key, titles[key], "↓" if key == "seconds" else "") for key in values]
    cells: dict[str, dict[str, Cell]] = {method: {} for method in times}
    for column in columns:
        decimals = 1 if column.key == "paper_seconds" else 2
        for method, value in values[column.key].items():
            cells[method][column.key] = Cell(value, shown=f"{value:.{decimals}f}")
    return Table(tuple(columns), tuple(Row(_METHODS[method], len(found[method]), cells[method]) for method in times))


def papers_times(sweep: Sweep) -> Mapping[str, float]:
    """Return the paper's seconds an epoch by method; none beside steps that are not its own.

    >>> (ours,) = sweeps([Result(RunSpec("cifar10", "map", 0.1, curvature="default"), {}, {}, {}, 3.0)])
    >>> papers_times(ours)
    {}
    """
    return {} if unlike_the_papers(sweep) else paper_numbers("table-2").get(sweep.spec.data, {})


def unlike_the_papers(sweep: Sweep) -> dict[str, Any]:
    """Return those settings of the paper's steps that the runs have otherwise.

    >>> (ours,) = sweeps([Result(RunSpec("cifar10", "map", 0.1, epochs=3, batch_size=512), {}, {}, {}, 3.0)])
    >>> unlike_the_papers(ours)
    {'batch_size': 128}
    """
    usual = recipe_settings("paper")
    return {name: usual[name] for name in WORK if getattr(sweep.spec, name) != usual[name]}


def table_of_runs(sweep: Sweep) -> Table:
    """Return every run, with what it scored on held-out and on test images by its mean network."""
    keys = {
        "validation_nll": Column("validation_nll", "held-out NLL"),
        "nll": _SCORES["nll"],
        "accuracy": _SCORES["accuracy"],
        "ece": _SCORES["ece"],
        "elbo": Column("elbo", "ELBO", "↑"),
        "seconds": Column("seconds", "train seconds"),
    }
    found: dict[str, dict[str, float]] = {}
    for result in in_order(sweep.results):
        scores: dict[str, float] = {name: result.test["mean"][name] for name in ("nll", "accuracy", "ece")}
        scores["seconds"] = result.seconds
        if "mean" in result.validation:
            scores["validation_nll"] = result.validation["mean"]["nll"]
        if result.history:
            scores["elbo"] = result.history[-1]["elbo"]
        found[run_name(result.spec)] = scores
    for result in in_order(sweep.diverged):
        found[f"{run_name(result.spec)} (diverged)"] = {"validation_nll": math.inf, "nll": math.inf}
    columns = [
        dataclasses.replace(column, direction="")
        for key, column in keys.items()
        if any(key in s for s in found.values())
    ]
    cells: dict[str, dict[str, Cell]] = {name: {} for name in found}
    for column in columns:
        here = {name: Cell(scores[column.key]) for name, scores in found.items() if column.key in scores}
        for name, cell in printed(column, here).items():
            cells[name][column.key] = cell
    return Table(tuple(columns), tuple(Row(name, 1, cells[name]) for name in found))


def _method(key: Key, runs: Sequence[Result]) -> Method:
    name, way = NAMES[key], key[1]
    scores = [{name: value for name, value in run.test[way].items() if name not in (LEAST, MOST)} for run in runs]
    entries = [
        Entry(Evaluated(name, each, {"seed": run.spec.seed, "ood": run.ood}, {}))
        for run, each in zip(runs, scores, strict=True)
    ]
    return Method(name, tuple(entries))


def _fitted(values: Sequence[float | None]) -> Cell:
    """Show what the runs of a row have fitted, each value: their mean would be what none of them used."""
    shown = dict.fromkeys("as trained" if value is None else plain_number(float(f"{value:.3g}")) for value in values)
    first = values[0]
    value = first if first is not None and len(shown) == 1 else math.nan
    return Cell(value, num_runs=len(values), shown=", ".join(shown))


def _beta(value: float) -> Cell:
    return Cell(value, shown=f"{value:g}")


def _paper_cell(score: str, value: float) -> Cell:
    shown = {"nll": f"{value:.2f}", "accuracy": f"{100 * value:.1f}", "ece": f"{value:.3f}"}
    return Cell(value, shown=shown[score])


def in_order(results: Iterable[Result]) -> list[Result]:
    """Sort runs by method, speed of log σ, β and seed.

    >>> found = [Result(RunSpec("digits", method, 0.1), {}, {}, {}, 1.0) for method in ("map", "vl")]
    >>> [result.spec.method for result in in_order(found)]
    ['vl', 'map']
    """

    def place(spec: RunSpec) -> tuple[Any, ...]:
        return list(_METHODS).index(spec.method), spec.log_sigma_lr_multiplier, spec.beta, spec.seed

    return sorted(results, key=lambda result: place(result.spec))


def comparable(results: Iterable[Result], setting: Compared) -> dict[float, list[Result]]:
    """Return runs by the values of a setting, each with the seeds that all values have: a seed can be a lucky one.

    >>> found = [Result(RunSpec("digits", "vl", *run), {}, {}, {}, 1.0) for run in ((0.1, 0), (0.1, 1), (0.01, 1))]
    >>> {beta: [run.spec.seed for run in runs] for beta, runs in comparable(found, "beta").items()}
    {0.01: [1], 0.1: [1]}
    """
    by_value: dict[float, list[Result]] = {}
    for result in results:
        by_value.setdefault(getattr(result.spec, setting), []).append(result)
    seeds = shared_seeds(list(by_value.values()))
    kept = {value: [run for run in runs if run.spec.seed in seeds] for value, runs in sorted(by_value.items())}
    return {value: runs for value, runs in kept.items() if runs}


def run_name(spec: RunSpec) -> str:
    """Return what the page calls a run.

    >>> run_name(RunSpec("digits", "vl", 0.1))
    'VL, β 0.1, seed 0'
    """
    words = f"{_METHODS[spec.method]}, β {spec.beta:g}"
    if spec.log_sigma_lr_multiplier != PAPERS_MULTIPLIER:
        words += f", multiplier {spec.log_sigma_lr_multiplier:g}"
    return f"{words}, seed {spec.seed}"


def _title(spec: RunSpec, specs: Sequence[RunSpec]) -> str:
    """Name a group, with what differs from its recipe, and what tells it from others of the same data and epochs."""
    same = [
        other for other in specs if (other.data, other.recipe, other.epochs) == (spec.data, spec.recipe, spec.epochs)
    ]
    usual = recipe_settings(spec.recipe)
    told = [
        f"{name} {value}"
        for name, value in dataclasses.asdict(spec).items()
        if (value != usual[name] if name in usual else len({getattr(other, name) for other in same}) > 1)
    ]
    return ", ".join([spec.data, f"{spec.recipe} recipe", epochs_in_words(spec.epochs), *told])


def epochs_in_words(number: int) -> str:
    """Say how long a training is.

    >>> epochs_in_words(1), epochs_in_words(50)
    ('1 epoch', '50 epochs')
    """
    return f"{number} epoch{'s' * (number > 1)}"
