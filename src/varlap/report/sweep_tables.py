"""The tables of `varlap reproduce`, beside the paper's own numbers."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from varlap.experiments import Evaluated, Result
from varlap.experiments.grid import Experiment, paper_numbers, recipe_settings
from varlap.experiments.ways import LEAST, MOST, NAMES, PAPERS, Key
from varlap.plot.style import plain_number
from varlap.report import names
from varlap.report.sections import Method
from varlap.report.sources import Entry
from varlap.report.sweeps import METHODS, Sweep, comparable, in_order
from varlap.report.tables import KNOWN, Cell, Column, Row, Table, comparison, printed

WORK = ("model", "width", "num_train", "batch_size", "optimizer", "clip_norm", "curvature", "gradient", "variances")
"""the settings that say what is computed in a step, and how many steps an epoch has"""
SCORES = {column.key: column for column in KNOWN if column.key in ("nll", "accuracy", "ece")}
"""what the paper has, in its order"""
_BESIDES = ("brier", "ood_auroc_entropy", "ood_auroc_mutual_information")
_IN_SHORT: tuple[Key, ...] = (
    *(("vl", "mean"), ("map", "mean"), ("map", "scaled")),
    *(("map", "linearised"), ("vi", "sampled"), ("vi", "scaled")),
)
_FITTED = {
    "temperature": Column("temperature", "temperature", meaning="fitted on held-out images"),
    "laplace_beta": Column("laplace_beta", "β of variances", meaning="of Laplace's, chosen by held-out images"),
}
_OTHERS = Column("ood", "OOD images")
_ELBO = Column("elbo", "ELBO", meaning="tempered, per datum, of the last epoch; by another β another quantity")
_BETA = Column("beta", "β", meaning="chosen by the NLL of held-out training images")


def table_1(sweep: Sweep) -> Table | None:
    """Return the paper's four rows with its numbers beside ours; None where no images could choose β.

    >>> from varlap.experiments import RunSpec
    >>> from varlap.report.sweeps import sweeps
    >>> scores = {"mean": {"nll": 0.25, "accuracy": 0.92, "ece": 0.02}}
    >>> (sweep,) = sweeps([Result(RunSpec("cifar10", "vl", 0.1), scores, scores, {}, 9.0)])
    >>> print(table_1(sweep).to_markdown().splitlines()[2])
    | VL | 0.250 | 92.0 | 0.020 | 0.1 | 0.23 | 92.4 | 0.017 |
    """
    choices = {key: choice for key, choice in sweep.choices().items() if key in PAPERS}
    if not choices:
        return None
    ours = comparison([_chosen(key, choice.by_validation) for key, choice in choices.items()])
    theirs = sweep.papers_scores
    columns = [*SCORES.values(), _BETA]
    if theirs:
        columns += [_renamed(score, "paper", "paper's") for score in SCORES.values()]
    on_test: dict[str, Mapping[str, Cell]] = {}
    if sweep.final is None and any(choice.num_trials > 1 for choice in choices.values()):
        columns.append(Column("test_beta", "best-on-test β"))
        columns += [_renamed(score, "test", "best-on-test") for score in SCORES.values()]
        best = comparison([_chosen(key, choice.by_test) for key, choice in choices.items()])
        on_test = {row.name: row.cells for row in best.rows}
    rows = []
    for row, (key, choice) in zip(ours.rows, choices.items(), strict=True):
        cells = dict(row.cells) | {"beta": _beta(choice.beta)}
        if on_test:
            cells["test_beta"] = _beta(choice.by_test[0].spec.beta)
            cells |= {f"test_{score}": dataclasses.replace(on_test[row.name][score], best=False) for score in SCORES}
        for score, value in zip(SCORES, theirs.get(NAMES[key], ()), strict=False):
            cells[f"paper_{score}"] = _paper_cell(score, value)
        rows.append(Row(row.name, row.num_runs, cells))
    return Table(tuple(columns), tuple(rows))


def table_of_all_trainings(sweeps: Sequence[Sweep]) -> Table | None:
    """Return the test NLL of every training by method, beside the paper's VL; None where there are not several.

    >>> from varlap.experiments import RunSpec
    >>> from varlap.report.sweeps import sweeps
    >>> scores = {"mean": {"nll": 0.25, "accuracy": 0.92, "ece": 0.02}}
    >>> specs = [RunSpec("cifar10", "vl", 0.1, epochs=number) for number in (50, 200)]
    >>> found = sweeps([Result(spec, scores, scores, {}, 9.0) for spec in specs])
    >>> print(table_of_all_trainings(found).to_markdown().splitlines()[2])
    | CIFAR-10, paper's recipe, 200 epochs | 0.250 | 0.23 |
    """
    rows = []
    for sweep in sweeps:
        choices = {} if sweep.is_figure_2 else sweep.choices()
        ours = comparison([_chosen(key, choices[key].by_validation) for key in _IN_SHORT if key in choices])
        cells = {row.name: row.cells["nll"] for row in ours.rows}
        if cells and sweep.papers_scores and not sweep.after:
            cells["paper"] = _paper_cell("nll", sweep.papers_scores["VL"][0])
        if cells:
            rows.append(Row(sweep.title, max(row.num_runs for row in ours.rows), cells))
    columns = [*(Column(NAMES[key], NAMES[key]) for key in _IN_SHORT), Column("paper", "paper's VL")]
    shown = tuple(column for column in columns if any(column.key in row.cells for row in rows))
    return Table(shown, tuple(rows), of="training") if len(rows) > 1 else None


def table_of_all_ways(sweep: Sweep) -> Table | None:
    """Return all ways of predicting, baselines that the paper lacks among them, with out-of-distribution detection."""
    choices = sweep.choices()
    if not choices:
        return None
    table = comparison([_chosen(key, choice.by_validation) for key, choice in choices.items()])
    columns = [*SCORES.values(), _BETA, *(column for column in table.columns if column.key in _BESIDES)]
    rows = []
    for row, (key, choice) in zip(table.rows, choices.items(), strict=True):
        fitted = {name: _fitted([run.test[key[1]].get(name) for run in choice.by_validation]) for name in _FITTED}
        cells = dict(row.cells) | {name: cell for name, cell in fitted.items() if name in row.cells}
        if others := ", ".join(dict.fromkeys(names.called(run.ood) for run in choice.by_validation if run.ood)):
            cells["ood"] = Cell(math.nan, shown=others)
        rows.append(Row(row.name, row.num_runs, cells | {"beta": _beta(choice.beta)}))
    if any("ood" in row.cells for row in rows):
        columns.append(_OTHERS)
    columns += [column for key, column in _FITTED.items() if any(key in row.cells for row in rows)]
    return Table(tuple(columns), tuple(rows))


def table_2(sweep: Sweep) -> Table:
    """Return seconds an epoch and their ratio to MAP's.

    >>> from varlap.experiments import RunSpec
    >>> from varlap.report.sweeps import sweeps
    >>> scores, epoch = {"mean": {"nll": 0.25}}, {"seconds": 3.0}
    >>> spec = RunSpec("cifar10", "map", 0.1, validation=0.0, linearised=False)
    >>> (sweep,) = sweeps([Result(spec, scores, {}, {}, 3.0, (epoch,))])
    >>> print(table_2(sweep).to_markdown().splitlines()[2])
    | MAP | 3.00 | 1.00 | 41.8 | 1.00 |
    """
    found = {method: runs for method in METHODS if (runs := sweep.of(method))}
    times = {method: statistics.median(run.seconds_per_epoch for run in runs) for method, runs in found.items()}
    theirs = papers_times(sweep)
    values: dict[str, dict[str, float]] = {"seconds": times}
    if "map" in times:
        values["ratio"] = {method: time / times["map"] for method, time in times.items()}
    if theirs:
        values["paper_seconds"] = {method: theirs[METHODS[method]] for method in times}
        values["paper_ratio"] = {method: theirs[METHODS[method]] / theirs["MAP"] for method in times}
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
    return Table(tuple(columns), tuple(Row(METHODS[method], len(found[method]), cells[method]) for method in times))


def papers_times(sweep: Sweep) -> Mapping[str, float]:
    """Return the paper's seconds an epoch by method; none beside steps that are not its own, or not run to be timed.

    >>> from varlap.experiments import RunSpec
    >>> from varlap.report.sweeps import sweeps
    >>> (ours,) = sweeps([Result(RunSpec("cifar10", "map", 0.1, curvature="default"), {}, {}, {}, 3.0)])
    >>> papers_times(ours)
    {}
    """
    timed = Experiment.named("table-2").specs[0]
    if (sweep.spec.validation, sweep.spec.linearised) != (timed.validation, timed.linearised):
        return {}
    return {} if unlike_the_papers(sweep) else paper_numbers("table-2").get(sweep.spec.data, {})


def unlike_the_papers(sweep: Sweep) -> dict[str, Any]:
    """Return those settings of the paper's steps that the runs have otherwise.

    >>> from varlap.experiments import RunSpec
    >>> from varlap.report.sweeps import sweeps
    >>> (ours,) = sweeps([Result(RunSpec("cifar10", "map", 0.1, epochs=3, batch_size=512), {}, {}, {}, 3.0)])
    >>> unlike_the_papers(ours)
    {'batch_size': 128}
    """
    usual = recipe_settings("paper")
    return {name: usual[name] for name in WORK if getattr(sweep.spec, name) != usual[name]}


def table_of_multipliers(sweep: Sweep) -> Table | None:
    """Return Figure 2 as numbers; None where nothing has several multipliers.

    None is marked as the best, since held-out images have chosen nothing here.

    >>> from varlap.experiments import RunSpec
    >>> from varlap.report.sweeps import sweeps
    >>> scores, last = {"mean": {"nll": 0.25, "accuracy": 0.92}}, {"elbo": -0.5}
    >>> specs = [RunSpec("digits", "vl", 0.1, log_sigma_lr_multiplier=times) for times in (1, 10)]
    >>> (sweep,) = sweeps([Result(spec, scores, {}, {}, 9.0, (last,)) for spec in specs])
    >>> print(table_of_multipliers(sweep).to_markdown().splitlines()[3])
    | VL, β 0.1, × 10 | -0.500 | 0.250 | 92.0 |
    """
    compared = []
    for beta, methods in sweep.of_several_multipliers().items():
        for method, found in methods.items():
            for multiplier, runs in comparable(found, "log_sigma_lr_multiplier").items():
                scores = [{"elbo": run.history[-1]["elbo"], **run.test["mean"]} for run in runs]
                compared.append(_method(f"{METHODS[method]}, β {beta:g}, × {multiplier:g}", runs, scores))
    if not compared:
        return None
    columns = (_ELBO, *(dataclasses.replace(SCORES[key], direction="") for key in ("nll", "accuracy")))
    rows = [
        dataclasses.replace(row, cells={key: dataclasses.replace(cell, best=False) for key, cell in row.cells.items()})
        for row in comparison(compared).rows
    ]
    return Table(columns, tuple(rows))


def table_of_runs(sweep: Sweep) -> Table:
    """Return every run, with what it scored on held-out and on test images by its mean network."""
    keys = {
        "validation_nll": Column("validation_nll", "held-out NLL"),
        "nll": SCORES["nll"],
        "accuracy": SCORES["accuracy"],
        "ece": SCORES["ece"],
        "elbo": _ELBO,
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
        found[sweep.name(result.spec)] = scores
    for result in in_order(sweep.diverged):
        found[f"{sweep.name(result.spec)} (diverged)"] = {"validation_nll": math.inf, "nll": math.inf}
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


def _chosen(key: Key, runs: Sequence[Result]) -> Method:
    scores = [{name: value for name, value in run.test[key[1]].items() if name not in (LEAST, MOST)} for run in runs]
    return _method(NAMES[key], runs, scores)


def _method(name: str, runs: Sequence[Result], scores: Sequence[Mapping[str, float]]) -> Method:
    if len({run.ood for run in runs}) > 1:  # scores against different images have no mean
        scores = [{key: value for key, value in each.items() if not key.startswith("ood_")} for each in scores]
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


def _renamed(score: Column, prefix: str, whose: str) -> Column:
    """Return the column of scores among which none is marked as the best."""
    return dataclasses.replace(score, key=f"{prefix}_{score.key}", title=f"{whose} {score.title}", direction="")


def _beta(value: float) -> Cell:
    return Cell(value, shown=f"{value:g}")


def _paper_cell(score: str, value: float) -> Cell:
    shown = {"nll": f"{value:.2f}", "accuracy": f"{100 * value:.1f}", "ece": f"{value:.3f}"}
    return Cell(value, shown=shown[score])
