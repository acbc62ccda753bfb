"""Results of `varlap reproduce`, grouped by what may be compared, and their tables beside the paper's own numbers."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from varlap.experiments import Evaluated, Result, RunSpec
from varlap.experiments.choice import Choice, choose
from varlap.experiments.final_line import FinalLine
from varlap.experiments.grid import paper_numbers, recipe_settings
from varlap.experiments.ways import NAMES, PAPERS, Key
from varlap.report.sections import Method
from varlap.report.sources import Entry
from varlap.report.tables import KNOWN, Cell, Column, Row, Table, comparison, printed

PAPERS_MULTIPLIER = 10.0
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

        Where a choice for final runs was recorded, the rows are these runs, and nothing is chosen again.
        """
        found = {key: self._chosen_here(key) if self.final is None else self._final(key, self.final) for key in NAMES}
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
        return Choice(by_validation, by_test, found.num_trials)

    def _final(self, key: Key, line: FinalLine) -> Choice | None:
        runs = tuple(run for run in line.runs(key, self.results) if key[1] in run.test)
        if not runs:
            return None
        is_here = line.sweep_epochs[key[0]] == self.spec.epochs  # the sweep as well
        here = self._chosen_here(key) if is_here else None
        return Choice(runs, runs, 1) if here is None else Choice(runs, here.by_test, here.num_trials)

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
    if any(choice.num_trials > 1 for choice in choices.values()):
        columns.append(Column("test_beta", "best-on-test β"))
        columns.append(Column("test_nll", "best-on-test NLL"))
    rows = []
    on_test = {
        NAMES[key]: Cell(statistics.fmean(run.test[key[1]]["nll"] for run in choice.by_test))
        for key, choice in choices.items()
    }
    on_test = printed(Column("test_nll", ""), on_test)
    for row, (key, choice) in zip(ours.rows, choices.items(), strict=True):
        cells = dict(row.cells) | {"beta": _beta(choice.beta), "test_beta": _beta(choice.by_test[0].spec.beta)}
        cells["test_nll"] = on_test[row.name]
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
    for row, choice in zip(table.rows, choices.values(), strict=True):
        # What was fitted has no better end, and no more digits than it deserves.
        cells = {
            key: dataclasses.replace(cell, shown=f"{cell.value:.3g}", shown_range="") if key in _FITTED else cell
            for key, cell in row.cells.items()
        }
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
    theirs = paper_numbers("table-2").get(sweep.spec.data, {}) if sweep.is_the_papers else {}
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
    for result in sorted(sweep.results, key=lambda result: _order(result.spec)):
        scores: dict[str, float] = {name: result.test["mean"][name] for name in ("nll", "accuracy", "ece")}
        scores["seconds"] = result.seconds
        if "mean" in result.validation:
            scores["validation_nll"] = result.validation["mean"]["nll"]
        if result.history:
            scores["elbo"] = result.history[-1]["elbo"]
        found[_run_name(result.spec)] = scores
    for result in sorted(sweep.diverged, key=lambda result: _order(result.spec)):
        found[f"{_run_name(result.spec)} (diverged)"] = {"validation_nll": math.inf, "nll": math.inf}
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


def how_beta_was_chosen(sweep: Sweep) -> str:
    """Say in words how honest the tables are."""
    words = [_chosen_before(sweep.final) if sweep.final is not None else _chosen_here(sweep)]
    if sweep.diverged:
        named = ", ".join(_run_name(run.spec) for run in sorted(sweep.diverged, key=lambda run: _order(run.spec)))
        words.append(f"Diverged, and so without scores: {named}.")
    return " ".join(words)


def _chosen_before(line: FinalLine) -> str:
    sweeps = {
        method: f"a sweep of {_epochs(line.sweep_epochs[method])} over {{}} with {_seeds(line.sweep_seeds[method])}"
        for method in line.sweep_betas
    }
    tried = {method: ", ".join(f"{beta:g}" for beta in betas) for method, betas in line.sweep_betas.items()}
    if len(set(sweeps.values())) > 1:  # one call chose for some methods, and another for others
        by = "; ".join(f"{words.format(tried[method])} ({method.upper()})" for method, words in sweeps.items())
    else:
        same = len(set(tried.values())) == 1
        listed = [betas if same else f"{betas} ({method.upper()})" for method, betas in tried.items()]
        by = next(iter(sweeps.values())).format("; ".join(dict.fromkeys(listed)))
    counts = {method.upper(): len(betas) for method, betas in line.sweep_betas.items()}
    same = len(set(counts.values())) == 1
    trials = f"{next(iter(counts.values()))} trials for every row" if same else f"unequal numbers of trials, {counts}"
    words = (
        f"The β of each row was chosen before, by the NLL of held-out images in {by}: {trials}. Nothing here was "
        "chosen by the test images; the paper's are the best values over its β, as its caption says."
    )
    if not line.borrowed:
        return words
    named = " and ".join(f"‘{row}’" for row in line.borrowed)
    return f"{words} The sweep has not scored {named}: the β there is that of the method's mean network."


def _chosen_here(sweep: Sweep) -> str:
    trials = {key: choice.num_trials for key, choice in sweep.choices().items()}
    if set(trials.values()) == {1}:
        return (
            "One β for each method, which no sweep in this store has chosen. The paper's are the best values over its "
            "β, as its caption says."
        )
    share = f"{sweep.spec.validation:.0%} of the training images"
    words = (
        f"β is chosen by the NLL of {share}, which were held out. Best on test is what choosing by the test images "
        "would have given, as the paper seems to have done: it is no fair score, and stands here for comparison."
    )
    if len(set(trials.values())) > 1:
        told = "; ".join(f"{NAMES[key]} {number}" for key, number in trials.items())
        return f"{words} Mind that the rows have not had the same number of trials: {told}."
    return f"{words} Every row has had {next(iter(trials.values()))} trials."


def _method(key: Key, runs: Sequence[Result]) -> Method:
    name, way = NAMES[key], key[1]
    entries = [Entry(Evaluated(name, run.test[way], {"seed": run.spec.seed, "ood": run.ood}, {})) for run in runs]
    return Method(name, tuple(entries))


def _beta(value: float) -> Cell:
    return Cell(value, shown=f"{value:g}")


def _paper_cell(score: str, value: float) -> Cell:
    shown = {"nll": f"{value:.2f}", "accuracy": f"{100 * value:.1f}", "ece": f"{value:.3f}"}
    return Cell(value, shown=shown[score])


def _order(spec: RunSpec) -> tuple[Any, ...]:
    return list(_METHODS).index(spec.method), spec.log_sigma_lr_multiplier, spec.beta, spec.seed


def _run_name(spec: RunSpec) -> str:
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
    return ", ".join([spec.data, f"{spec.recipe} recipe", _epochs(spec.epochs), *told])


def _epochs(number: int) -> str:
    return f"{number} epoch{'s' * (number > 1)}"


def _seeds(numbers: Sequence[int]) -> str:
    return f"seed{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
