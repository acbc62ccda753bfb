"""β chosen by held-out images, and beside it the β that the test images would have chosen."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from varlap.errors import ConfigError
from varlap.experiments.spec import RunSpec
from varlap.experiments.store import Result, Store
from varlap.experiments.ways import PAPERS, Way


@dataclass(frozen=True)
class Choice:
    """What a sweep over β says about one way of predicting."""

    by_validation: tuple[Result, ...]
    """the runs, one for each seed, at the β of the best held-out NLL"""
    by_test: tuple[Result, ...]
    """those at the β of the best test NLL: what looking at the test images would have given"""
    num_trials: int
    """how many β were tried"""

    @property
    def beta(self) -> float:
        """The chosen β."""
        return self.by_validation[0].spec.beta


def choose(results: Iterable[Result], way: Way) -> Choice | None:
    """Choose β of one method by the NLL of held-out images, averaged over seeds; None where nothing was held out.

    >>> def result(beta, held_out, test):
    ...     return Result(RunSpec("digits", "vl", beta), {"mean": {"nll": test}}, {"mean": {"nll": held_out}}, {}, 1.0)
    >>> choice = choose([result(0.01, 0.30, 0.20), result(0.1, 0.25, 0.22)], "mean")
    >>> choice.beta, choice.by_test[0].spec.beta, choice.num_trials
    (0.1, 0.01, 2)
    """
    by_beta: dict[float, list[Result]] = {}
    for result in sorted(results, key=lambda result: (result.spec.beta, result.spec.seed)):
        if way in result.validation and way in result.test:
            by_beta.setdefault(result.spec.beta, []).append(result)
    if not by_beta:
        return None

    def mean_nll(part: str, runs: Sequence[Result]) -> float:
        nlls = [getattr(run, part)[way]["nll"] for run in runs]
        return statistics.fmean(nlls) if all(map(math.isfinite, nlls)) else math.inf

    trials = list(by_beta.values())
    return Choice(
        tuple(min(trials, key=lambda runs: mean_nll("validation", runs))),
        tuple(min(trials, key=lambda runs: mean_nll("test", runs))),
        len(trials),
    )


@dataclass(frozen=True)
class Final:
    """The runs of the final line, and which sweep chose their β."""

    specs: tuple[RunSpec, ...]
    chosen: tuple[str, ...]
    """in words, a line for each data set"""


def final_runs(specs: Sequence[RunSpec], store: Store) -> Final:
    """Return those runs of a grid whose β a finished sweep in the store has chosen for one of the paper's four rows.

    A sweep is the whole grid of one seed, for any number of epochs: every method has had the same number of trials. Of
    several the one with the most epochs chooses.
    """
    done: dict[RunSpec, dict[int, list[Result]]] = {}
    for result in store:
        done.setdefault(_apart_from_length(result.spec), {}).setdefault(result.spec.epochs, []).append(result)
    final: list[RunSpec] = []
    words = []
    for data in dict.fromkeys(spec.data for spec in specs):
        grid = [spec for spec in specs if spec.data == data]
        trials = {_apart_from_length(spec) for spec in grid}
        finished = set.intersection(*(set(done.get(trial, {})) for trial in trials))
        if not finished:
            missing = len([trial for trial in trials if trial not in done])
            raise ConfigError(
                f"{data}: no sweep over β is finished, of which {len(trials) - missing} of {len(trials)} runs are in "
                f"{store.folder}; run it without --final first, with fewer --epochs if you like"
            )
        epochs = max(finished)
        told = []
        for method, way in PAPERS:
            found = [result for trial in trials if trial.method == method for result in done[trial][epochs]]
            choice = choose(found, way)
            if choice is None:
                if any(spec.method == method for spec in grid):
                    raise ConfigError(f"{data}: the sweep held no images out, so none can choose β; set validation")
                continue
            told.append(f"{method} ({way}) β = {choice.beta:g}")
            final += [spec for spec in grid if spec.method == method and spec.beta == choice.beta]
        words.append(f"{data}: the sweep of {epochs} epochs chooses {', '.join(told)}")
    return Final(tuple(dict.fromkeys(final)), tuple(words))


def _apart_from_length(spec: RunSpec) -> RunSpec:
    return dataclasses.replace(spec, epochs=1, seed=0, linearised=True)
