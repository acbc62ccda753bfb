"""Results of `varlap reproduce`, grouped by what may be compared."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from varlap.experiments import Result, RunSpec
from varlap.experiments.choice import Choice, choose, shared_seeds
from varlap.experiments.comparison import folder_name
from varlap.experiments.final_line import FinalLine
from varlap.experiments.grid import paper_numbers, recipe_settings
from varlap.experiments.ways import NAMES, Key
from varlap.report import names

Compared = Literal["beta", "log_sigma_lr_multiplier"]
PAPERS_MULTIPLIER = 10.0
METHODS = {"vl": "VL", "vi": "VI", "map": "MAP"}


@dataclass(frozen=True)
class Sweep:
    """Runs that differ in method, β, seed, the speed of log σ and linearised predictions alone."""

    title: str
    file_name: str
    """what the names of its pictures begin with"""
    spec: RunSpec
    """one of them, for what they share"""
    results: tuple[Result, ...]
    """those that came to their end"""
    diverged: tuple[Result, ...] = ()
    lines: tuple[FinalLine, ...] = ()
    """what was recorded as chosen for final runs"""

    @property
    def multipliers(self) -> list[float]:
        """What log σ's learning rate was multiplied by."""
        return sorted({result.spec.log_sigma_lr_multiplier for result in (*self.results, *self.diverged)})

    @property
    def multiplier(self) -> float:
        """The paper's multiplier of log σ's learning rate, or the lowest where no run has the paper's."""
        return PAPERS_MULTIPLIER if PAPERS_MULTIPLIER in self.multipliers else self.multipliers[0]

    @property
    def final(self) -> FinalLine | None:
        """What was recorded as chosen for the main runs."""
        shared = dataclasses.replace(self.spec, log_sigma_lr_multiplier=self.multiplier)
        found = [line for line in self.lines if line.is_about(shared)]
        return max(found, key=lambda line: line.spec.linearised, default=None)  # the one with more rows

    def of(self, method: str) -> list[Result]:
        """Return the main runs of a method."""
        return [result for result in self.results if self._is_main(result.spec, method)]

    def of_several_multipliers(self) -> dict[float, dict[str, list[Result]]]:
        """Return by β and method, VL's and VI's, what Figure 2 compares: runs of more than one multiplier."""
        found: dict[float, dict[str, list[Result]]] = {}
        for result in in_order(self.results):
            if result.spec.method != "map" and result.history:
                found.setdefault(result.spec.beta, {}).setdefault(result.spec.method, []).append(result)

        def is_compared(runs: Sequence[Result]) -> bool:
            return len({run.spec.log_sigma_lr_multiplier for run in runs}) > 1

        several = {
            beta: {method: runs for method, runs in found[beta].items() if is_compared(runs)}
            for beta in sorted(found, reverse=True)
        }
        return {beta: methods for beta, methods in several.items() if methods}

    @property
    def is_figure_2(self) -> bool:
        """Whether every run has its like at another multiplier, so that there is no β to choose among them."""
        specs = [result.spec for result in (*self.results, *self.diverged)]
        others = {(s.method, s.beta) for s in specs if s.log_sigma_lr_multiplier != self.multiplier}
        return bool(self.of_several_multipliers()) and all((s.method, s.beta) in others for s in specs)

    def name(self, spec: RunSpec) -> str:
        """Return what the page calls a run.

        >>> (sweep,) = sweeps([Result(RunSpec("digits", "vl", 0.1), {}, {}, {}, 1.0)])
        >>> sweep.name(sweep.results[0].spec)
        'VL, β 0.1, seed 0'
        """
        words = f"{METHODS[spec.method]}, β {spec.beta:g}"
        if self.multipliers != [PAPERS_MULTIPLIER]:
            words += f", × {spec.log_sigma_lr_multiplier:g}"
        return f"{words}, seed {spec.seed}"

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

    @property
    def papers_scores(self) -> dict[str, list[float]]:
        """The paper's test NLL, accuracy and ECE by row, where they may stand beside."""
        return paper_numbers("table-1").get(self.spec.data, {}) if self.is_the_papers and not self.is_figure_2 else {}

    @property
    def after(self) -> str:
        """What to add to the paper's scores where its runs, whose length is the default, are of another than these."""
        return "" if self.spec.epochs == RunSpec.epochs else f" after {RunSpec.epochs} epochs"


def sweeps(results: Iterable[Result], lines: Iterable[FinalLine] = ()) -> list[Sweep]:
    """Group results by what they share, in the order of data and recipe, the paper's and the longest first.

    Runs with and without linearised predictions are the same training; of one that is there both ways the result with
    more scores is shown.

    Args:
        results: all that may be shown.
        lines: what was recorded as chosen for final runs.

    >>> def result(beta, epochs):
    ...     return Result(RunSpec("digits", "vl", beta, epochs=epochs), {"mean": {"nll": 0.3}}, {}, {}, 1.0)
    >>> [(sweep.title, len(sweep.results)) for sweep in sweeps([result(0.1, 50), result(1.0, 50), result(0.1, 200)])]
    [("digits, paper's recipe, 200 epochs", 1), ("digits, paper's recipe, 50 epochs", 2)]
    """
    groups: dict[RunSpec, list[Result]] = {}
    for result in _once_each(results):
        shared = dataclasses.replace(
            result.spec, method="vl", beta=1.0, seed=0, log_sigma_lr_multiplier=PAPERS_MULTIPLIER, linearised=True
        )
        groups.setdefault(shared, []).append(result)
    groups = {
        dataclasses.replace(spec, linearised=any(run.spec.linearised for run in runs)): runs
        for spec, runs in groups.items()
    }
    specs = sorted(groups, key=lambda spec: (spec.data, spec.recipe != "paper", spec.recipe, -spec.epochs, spec.key()))
    lines = tuple(lines)
    found = []
    for spec in specs:
        ended = tuple(result for result in groups[spec] if result.failure is None)
        diverged = tuple(result for result in groups[spec] if result.failure is not None)
        found.append(Sweep(*_named(spec, specs), spec, ended, diverged, lines))
    return found


def _once_each(results: Iterable[Result]) -> list[Result]:
    found: dict[RunSpec, Result] = {}
    for result in results:
        training = dataclasses.replace(result.spec, linearised=True)
        other = found.setdefault(training, result)
        if (len(result.test), result.spec.linearised) > (len(other.test), other.spec.linearised):
            found[training] = result
    return list(found.values())


def in_order(results: Iterable[Result]) -> list[Result]:
    """Sort runs by method, speed of log σ, β and seed.

    >>> found = [Result(RunSpec("digits", method, 0.1), {}, {}, {}, 1.0) for method in ("map", "vl")]
    >>> [result.spec.method for result in in_order(found)]
    ['vl', 'map']
    """

    def place(spec: RunSpec) -> tuple[Any, ...]:
        return list(METHODS).index(spec.method), spec.log_sigma_lr_multiplier, spec.beta, spec.seed

    return sorted(results, key=lambda result: place(result.spec))


def comparable(results: Iterable[Result], setting: Compared) -> dict[float, list[Result]]:
    """Return runs by the values of a setting, over the seeds common to all values: a seed can be a lucky one.

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


def _named(spec: RunSpec, specs: Sequence[RunSpec]) -> tuple[str, str]:
    """Name a group in words and for its files, with what differs from its recipe and tells it from others like it."""
    same = [
        other for other in specs if (other.data, other.recipe, other.epochs) == (spec.data, spec.recipe, spec.epochs)
    ]
    usual = recipe_settings(spec.recipe)
    told = {
        key: value
        for key, value in dataclasses.asdict(spec).items()
        if (value != usual[key] if key in usual else len({getattr(other, key) for other in same}) > 1)
    }
    files = [spec.data, f"{spec.recipe} recipe", names.epochs(spec.epochs), *(f"{k} {v}" for k, v in told.items())]
    if spec.recipe == "ours":
        told.pop("lr", None)  # its name says it
    words = [names.setting(key, value) for key, value in told.items()]
    title = [names.called(spec.data), names.recipe(spec), names.epochs(spec.epochs), *words]
    return ", ".join(title), folder_name(", ".join(files))
