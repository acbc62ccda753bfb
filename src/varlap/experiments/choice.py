"""β chosen by held-out images, and beside it the β that the test images would have chosen."""

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from varlap.errors import ConfigError
from varlap.experiments.final_line import FinalLine, FinalRow, shared_spec
from varlap.experiments.names import names
from varlap.experiments.spec import RunSpec
from varlap.experiments.store import Result, Store
from varlap.experiments.ways import NAMES, Way

MOST_NAMED = 6  # of missing runs that a message lists


@dataclass(frozen=True)
class Choice:
    """What a sweep over β says about one way of predicting."""

    by_validation: tuple[Result, ...]
    """the runs, one for each seed, at the β of the best held-out NLL"""
    by_test: tuple[Result, ...]
    """the runs at the β of the best test NLL, over the seeds common to all β: what choosing by test images would give;
    none for final runs, whose β another sweep chose"""
    betas: tuple[float, ...]
    """what was tried"""

    @property
    def beta(self) -> float:
        """The chosen β."""
        return self.by_validation[0].spec.beta

    @property
    def num_trials(self) -> int:
        """How many β were tried."""
        return len(self.betas)


def choose(results: Iterable[Result], way: Way) -> Choice | None:
    """Choose β of one method by the NLL of held-out images; None where nothing was held out, or all diverged.

    Each β is scored by its mean over the seeds common to all β, since a seed can be a lucky one. Without a common seed
    the commonest one is used, and a β that lacks it is left out. A β with fewer diverged runs comes first, then the
    one with the better mean of its other runs. Where all runs that are compared diverged, nothing is chosen.

    >>> def result(beta, held_out, test):
    ...     return Result(RunSpec("digits", "vl", beta), {"mean": {"nll": test}}, {"mean": {"nll": held_out}}, {}, 1.0)
    >>> choice = choose([result(0.01, 0.30, 0.20), result(0.1, 0.25, 0.22)], "mean")
    >>> choice.beta, choice.by_test[0].spec.beta, choice.num_trials
    (0.1, 0.01, 2)
    """
    by_beta: dict[float, list[Result]] = {}
    for result in sorted(results, key=lambda result: (result.spec.beta, result.spec.seed)):
        if result.failure is not None or (way in result.validation and way in result.test):
            by_beta.setdefault(result.spec.beta, []).append(result)
    seeds = shared_seeds(list(by_beta.values()))
    trials = [runs for runs in by_beta.values() if seeds <= {run.spec.seed for run in runs}]

    def compared(runs: Sequence[Result]) -> list[Result]:
        return [run for run in runs if run.spec.seed in seeds]

    if all(run.failure is not None for runs in trials for run in compared(runs)):
        return None

    def order(part: Literal["validation", "test"], runs: Sequence[Result]) -> tuple[int, float]:
        nlls = [run.nll(part, way) for run in compared(runs) if run.failure is None]
        return len(seeds) - len(nlls), statistics.fmean(nlls) if nlls else math.inf

    chosen, on_test = (min(trials, key=lambda runs, p=part: order(p, runs)) for part in ("validation", "test"))
    betas = tuple(runs[0].spec.beta for runs in trials)
    return Choice(tuple(chosen), tuple(chosen if on_test is chosen else compared(on_test)), betas)


def shared_seeds(trials: Sequence[Sequence[Result]]) -> set[int]:
    """Return the seeds common to all trials; without one, the commonest seed, and of several such the lowest.

    >>> runs = [Result(RunSpec("digits", "vl", 0.1, seed), {}, {}, {}, 1.0) for seed in (0, 1)]
    >>> shared_seeds([runs, runs[1:]])
    {1}
    """
    found = [{run.spec.seed for run in runs} for runs in trials]
    if not found:
        return set()
    if shared := set.intersection(*found):
        return shared
    count = Counter(seed for seeds in found for seed in sorted(seeds))
    return {min(count, key=lambda seed: (-count[seed], seed))}


@dataclass(frozen=True)
class Final:
    """The runs of the final line, and which sweep chose their β."""

    specs: tuple[RunSpec, ...]
    lines: tuple[FinalLine, ...]
    """what was chosen, to be recorded in the store"""
    chosen: tuple[str, ...]
    """the same in words, a line for each data set"""


def final_runs(specs: Sequence[RunSpec], store: Store) -> Final:
    """Return the runs of a grid at the β that a finished sweep in the store chose for some way of predicting.

    A sweep is finished when a seed has every run of the grid, for some number of epochs, so that every way has had as
    many trials. Of several sweeps the one with the most epochs chooses. A way that the sweep did not score, as by
    `--no-linearised`, takes the β of its method's mean network.
    """
    done: dict[RunSpec, dict[tuple[int, int], Result]] = {}
    for result in sorted(store, key=lambda result: result.spec.linearised):  # the one with more scores comes last
        where = result.spec.epochs, result.spec.seed
        done.setdefault(_training(result.spec), {})[where] = result
    final: list[RunSpec] = []
    lines, words = [], []
    for shared in dict.fromkeys(map(shared_spec, specs)):
        grid = [spec for spec in specs if shared_spec(spec) == shared]
        line = _line(shared, grid, done, store)
        betas = {(row.method, row.beta) for row in line.rows}
        final += [spec for spec in grid if (spec.method, spec.beta) in betas]
        told = [f"{row.method} ({row.way}) β = {row.beta:g}" for row in line.rows if row.own]
        epochs = max(line.sweep_epochs.values())  # one sweep for all of them
        words.append(f"{shared.data}: the sweep of {epochs} epochs chooses {', '.join(told)}")
        if line.borrowed:
            words[-1] += f"; it has not scored {', '.join(line.borrowed)}, with the β of the mean"
        lines.append(line)
    return Final(tuple(final), tuple(lines), tuple(words))


def _line(
    shared: RunSpec,
    grid: Sequence[RunSpec],
    done: Mapping[RunSpec, Mapping[tuple[int, int], Result]],
    store: Store,
) -> FinalLine:
    trials = dict.fromkeys(map(_apart_from_length, grid))
    finished = set.intersection(*(set(done.get(_training(trial), {})) for trial in trials))
    if not finished:
        raise ConfigError(_not_finished(list(trials), done, store))
    epochs: int = max(finished)[0]
    seeds = sorted(seed for length, seed in finished if length == epochs)
    rows = []
    methods = {spec.method for spec in grid}
    for key in (key for key in NAMES if key[0] in methods and (shared.linearised or key[1] != "linearised")):
        found = [done[_training(trial)][epochs, seed] for trial in trials if trial.method == key[0] for seed in seeds]
        if all(result.failure is not None for result in found):
            raise ConfigError(f"{shared.data}: every run of {key[0]} in the sweep of {epochs} epochs diverged")
        mean, own = choose(found, "mean"), choose(found, key[1])
        if mean is None:
            raise ConfigError(f"{shared.data}: the sweep held no images out, so none can choose β; set validation")
        if own is not None and own.num_trials == mean.num_trials:
            rows.append(FinalRow(*key, own.beta))
        else:
            rows.append(FinalRow(*key, mean.beta, own=False))
    in_order = sorted(methods)
    return FinalLine(
        shared,
        seeds={m: tuple(sorted({spec.seed for spec in grid if spec.method == m})) for m in in_order},
        sweep_epochs=dict.fromkeys(in_order, epochs),
        sweep_betas={m: tuple(sorted(trial.beta for trial in trials if trial.method == m)) for m in in_order},
        sweep_seeds=dict.fromkeys(in_order, tuple(seeds)),
        rows=tuple(rows),
    )


def _not_finished(
    trials: Sequence[RunSpec], done: Mapping[RunSpec, Mapping[tuple[int, int], Result]], store: Store
) -> str:
    """Say what the sweep that is nearest to its end still lacks."""
    count = Counter(where for trial in trials for where in done.get(_training(trial), {}))
    nearest = max(count, key=lambda where: (count[where], where), default=None)
    missing = [trial for trial in trials if nearest not in done.get(_training(trial), {})]
    which = "of it" if nearest is None else f"of the one of {nearest[0]} epochs with seed {nearest[1]}"
    by_name = names(trials)
    named = ", ".join(by_name[trial] for trial in missing[:MOST_NAMED]) + (
        " and others" if len(missing) > MOST_NAMED else ""
    )
    recipe = trials[0].recipe
    others = sorted({result.spec.recipe for result in store if result.spec.data == trials[0].data} - {recipe})
    hint = f"; there are runs of --recipe {' and '.join(others)} too" if others else ""
    return (
        f"{trials[0].data}: no sweep over β by the recipe {recipe} is finished; {which}, "
        f"{len(trials) - len(missing)} of {len(trials)} runs are in {store.folder}{hint}; missing: {named}; "
        "run it without --final first, with fewer --epochs if you like"
    )


def _apart_from_length(spec: RunSpec) -> RunSpec:
    return dataclasses.replace(spec, epochs=1, seed=0, linearised=True)


def _training(spec: RunSpec) -> RunSpec:
    """Return what a run of a recipe trains, whatever else its spec says, its length or its seed."""
    return _apart_from_length(dataclasses.replace(spec.effective(), recipe=spec.recipe))
