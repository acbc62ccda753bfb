"""The UCI experiment: β chosen on held-out rows of the first splits, then every split at the chosen β."""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from varlap.data import UCI_SETS, TableData, load_uci
from varlap.data.tables import uci_name
from varlap.errors import ConfigError, NonFiniteError, without_warnings
from varlap.experiments.evaluation import origin
from varlap.experiments.training_setup import OBJECTIVES
from varlap.experiments.uci.spec import NUM_SPLITS, SHARED, TRAINED, TableRecipe, TableRun
from varlap.experiments.uci.store import TableResult, TableStore
from varlap.experiments.uci.task import TableTask
from varlap.likelihoods import Gaussian
from varlap.models import mlp
from varlap.posterior import BNN
from varlap.posthoc import laplace
from varlap.training import fit

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "softplus": nn.Softplus}
WAY = {"map": "mean", "vi": "linearised", "vl": "linearised"}
"""how a trained method predicts: MAP has no variances, and the others, as Laplace on MAP's mean, go through them alike;
β is all that is chosen"""
OTHER_WAYS = ("mean", "sampled", "linearised")
"""what VI and VL are scored by as well"""
COST = {"map": 1.0, "vi": 1.4, "vl": 1.7}
"""of a step, as a multiple of MAP's, to tell the time left"""
SPLITS_AT_ONCE = 5  # of each table in turn, so that a run that is stopped has some of all
NUM_DRAWS = 20  # of weights, for "sampled"
SMALLEST_FIRST = ("yacht", "boston", "energy", "concrete", "wine", "power", "kin8nm", "naval", "protein")


class AllDivergedError(ConfigError):
    """A method whose training diverged for every β on a table, so that none can be chosen."""


@dataclass(frozen=True)
class Tuned:
    """What held-out rows chose for a method.

    >>> Tuned.of({0.1: -2.7, 1.0: -2.5})
    Tuned(beta=1.0, log_likelihood=-2.5, num_trials=2, edge='largest')
    """

    beta: float
    """of the objective, or of Laplace's variances"""
    log_likelihood: float
    """of the held-out rows, averaged over the tuning splits"""
    num_trials: int
    """how many β were tried"""
    edge: Literal["", "smallest", "largest"] = ""
    """where the chosen β is the smallest or the largest that was tried, so that others might be better"""

    @staticmethod
    def of(trials: Mapping[float, float]) -> "Tuned":
        """Choose the β of the best log-likelihood."""
        beta = max(trials, key=lambda beta: trials[beta])
        edge = "smallest" if beta == min(trials) else "largest" if beta == max(trials) else ""
        return Tuned(beta, trials[beta], len(trials), edge)


@dataclass(frozen=True)
class Progress:
    """Where the experiment is, and what is computed next.

    >>> Progress(1.0, 4.0, "boston").total
    4.0
    """

    done: float
    """in steps of MAP, what was there before included"""
    total: float
    text: str
    seconds_left: float | None = None
    """at the pace of the runs computed so far; None before the first"""


@dataclass(frozen=True)
class UCIExperiment:
    """MAP, VI, VL and Laplace on UCI tables; what the store holds is not computed again.

    Args:
        store: where results are kept.
        recipes: one for each table.
        num_splits: the first so many splits of each; None for all.
        folder: the data folder; default `varlap.data.data_folder()`.

    >>> UCIExperiment.of("results", data=["boston", "yacht"]).recipes[0].data
    'yacht'
    """

    store: TableStore
    recipes: tuple[TableRecipe, ...]
    num_splits: int | None = None
    folder: str | Path | None = None

    @staticmethod
    def of(
        out: str | Path,
        data: Sequence[str] = (),
        num_splits: int | None = None,
        folder: str | Path | None = None,
        **changes: Any,
    ) -> "UCIExperiment":
        """Take the shipped recipes of some tables, or of all; `changes` replace settings in each of them."""
        if num_splits is not None and num_splits < 1:
            raise ConfigError(f"{num_splits} splits are none; give at least 1, or leave it out for all")
        names = {uci_name(name) for name in data} or set(UCI_SETS)
        recipes = tuple(TableRecipe.named(name, **changes) for name in SMALLEST_FIRST if name in names)
        return UCIExperiment(TableStore(out), recipes, num_splits, folder)

    @staticmethod
    def stored(out: str | Path) -> "UCIExperiment":
        """Take the recipes of all that a folder holds: one for all runs that share their settings.

        How many splits have chosen β is told by the runs, so of two recipes that differ in nothing else, only the one
        with more is there. A recipe that has not tried all β on its first split is not there yet.

        >>> UCIExperiment.stored("nowhere").recipes
        ()
        """
        store = TableStore(out)
        found: dict[TableRecipe, None] = {}
        for result in (one for name in store.tables() for one in store.results(name)):
            if result.run.tuning and result.run.method == "map":  # whose runs hold all β, for Laplace's variances
                settings = {name: getattr(result.run, name) for name in SHARED}
                found[TableRecipe(**settings, betas=result.run.laplace_betas, tuning_splits=1)] = None
        return UCIExperiment(store, tuple(_with_all_splits(one, store) for one in found if _is_tried(one, store)))

    def run(self, budget_s: float | None = None, tell: Callable[[Progress], None] = lambda _: None) -> bool:
        """Compute what is missing, within the time if there is one; return whether all is there.

        A table on which a method diverged for every β does not hold the others up: `AllDivergedError` comes at the end.
        """
        start = time.monotonic()
        needed = dict.fromkeys(recipe.data for recipe in self.recipes if not self._is_done(recipe))
        tables = {data: load_uci(data, self.folder) for data in needed}  # all, before any work
        done, total = 0.0, sum(_cost(run) for runs in self._estimated(tables) for run in runs)
        computed, seconds = 0.0, 0.0
        for run in self._runs(tables):
            text = f"{run.data}, {run.method}, {'choosing β' if run.tuning else f'split {run.split}'}"
            tell(Progress(done, total, text, seconds / computed * (total - done) if computed else None))
            done += _cost(run)
            if self.store.get(run) is not None:
                continue
            begun = time.monotonic()
            if budget_s is not None and begun - start >= budget_s:
                return False
            self.store.put(compute(tables[run.data], run))
            computed, seconds = computed + _cost(run), seconds + time.monotonic() - begun
        tell(Progress(total, total, "done", 0.0))
        for recipe in self.recipes:
            self.tuned(recipe)  # says so where all diverged
        return True

    def tuned(self, recipe: TableRecipe) -> dict[str, Tuned] | None:
        """Return what held-out rows choose for map, vi, vl and laplace; None where they are not all there yet.

        Raises:
            AllDivergedError: a method diverged for every β.
        """
        found = [self.store.get(run) for run in recipe.tuning_runs()]
        return None if None in found else choose_betas(recipe, [one for one in found if one is not None])

    def _runs(self, tables: dict[str, TableData]) -> Iterator[TableRun]:
        for recipe in self.recipes:
            yield from recipe.tuning_runs()
        most = max(self._count(recipe, tables) for recipe in self.recipes)
        for first, recipe in itertools.product(range(0, most, SPLITS_AT_ONCE), self.recipes):
            yield from self._final(recipe, range(first, first + SPLITS_AT_ONCE), tables)

    def _is_done(self, recipe: TableRecipe) -> bool:
        """Tell whether the store has all runs of a table, which then needs not be read."""
        if not _is_tried(recipe, self.store):
            return False
        return all(self.store.get(run) is not None for run in self._final(recipe, range(NUM_SPLITS[recipe.data]), {}))

    def _final(self, recipe: TableRecipe, splits: range, tables: dict[str, TableData]) -> list[TableRun]:
        try:
            chosen = self.tuned(recipe)
        except AllDivergedError:
            return []  # the others go on
        assert chosen is not None
        last = min(splits.stop, self._count(recipe, tables))
        betas = {method: one.beta for method, one in chosen.items()}
        return recipe.final_runs(betas, range(splits.start, last))

    def _estimated(self, tables: dict[str, TableData]) -> Iterator[list[TableRun]]:
        """Yield runs that take as long as those to come, whatever β will be chosen."""
        for recipe in self.recipes:
            any_beta: dict[str, float] = dict.fromkeys(TRAINED, recipe.betas[0])
            yield recipe.tuning_runs()
            yield recipe.final_runs(any_beta, range(self._count(recipe, tables)))

    def _count(self, recipe: TableRecipe, tables: dict[str, TableData]) -> int:
        """Return how many splits of a table are wanted; one that was not read has the usual number."""
        num_splits = len(tables[recipe.data].splits) if recipe.data in tables else NUM_SPLITS[recipe.data]
        return min(num_splits, self.num_splits or num_splits)


def _is_tried(recipe: TableRecipe, store: TableStore) -> bool:
    return all(store.get(run) is not None for run in recipe.tuning_runs())


def _with_all_splits(recipe: TableRecipe, store: TableStore) -> TableRecipe:
    """Return the recipe with as many tuning splits as the store has whole."""
    while _is_tried(more := dataclasses.replace(recipe, tuning_splits=recipe.tuning_splits + 1), store):
        recipe = more
    return recipe


def compute(table: TableData, run: TableRun) -> TableResult:
    """Train a run's network and score each way of predicting."""
    task = TableTask.of(table, run.split, held_out=run.validation if run.tuning else 0.0, seed=run.seed)
    seed = 1000 * run.seed + run.split  # another network for each split, the same one for each method
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = mlp(task.training[0].shape[1], 1, (run.hidden,), ACTIVATIONS[run.activation])
    bnn = BNN(network, Gaussian())
    objective = OBJECTIVES[run.method](len(task.training[0]), beta=run.beta, seed=seed)
    start = time.monotonic()
    settings = {"epochs": run.epochs, "batch_size": run.batch_size, "lr": run.lr, "seed": seed}
    scores, failure = {}, None
    try:
        fit(bnn, objective, task.training, progress="none", **settings)
        seconds = time.monotonic() - start
        scores = _scores(bnn, task, run)
    except NonFiniteError as error:
        seconds, failure = time.monotonic() - start, str(error)
    if any(not math.isfinite(value) for way in scores.values() for value in way.values()):
        scores, failure = {}, "a score is not finite"
    return TableResult(run, scores, seconds, origin("cpu"), failure)


def choose_betas(recipe: TableRecipe, found: Sequence[TableResult]) -> dict[str, Tuned]:
    """Choose β by the log-likelihood of held-out rows, averaged over the tuning splits, out of as many for each method.

    Laplace's variances are chosen on the means that MAP chose. A β that diverged in one of the splits is not chosen.
    """
    chosen = {
        method: _best(recipe, method, {beta: _held_out(found, method, beta, way) for beta in recipe.betas})
        for method, way in WAY.items()
    }
    mean = chosen["map"].beta
    trials = {beta: _held_out(found, "map", mean, laplace_way(beta)) for beta in recipe.betas}
    return chosen | {"laplace": _best(recipe, "laplace", trials)}


def laplace_way(beta: float) -> str:
    """Return the name of Laplace's predictions for a β of its variances.

    >>> laplace_way(0.1)
    'laplace-0.1'
    """
    return f"laplace-{beta:g}"


def _held_out(found: Sequence[TableResult], method: str, beta: float, way: str) -> float:
    runs = [one for one in found if (one.run.method, one.run.beta) == (method, beta)]
    return statistics.mean(one.scores[way]["log_likelihood"] if one.scores else -math.inf for one in runs)


def _best(recipe: TableRecipe, method: str, trials: dict[float, float]) -> Tuned:
    best = Tuned.of(trials)
    if best.log_likelihood == -math.inf:
        raise AllDivergedError(
            f"{recipe.data}, {method}: the training diverged for every β at the learning rate {recipe.lr:g}; try a "
            f'smaller one: UCIExperiment.of(out, data=["{recipe.data}"], lr={recipe.lr / 4:g})'
        )
    return best


def _scores(bnn: BNN, task: TableTask, run: TableRun) -> dict[str, dict[str, float]]:
    x = task.scored[0]
    with without_warnings():  # samples may collapse; then they are not chosen
        found = {"mean": task.score(bnn.predict(x))}
        if run.method != "map":
            found["sampled"] = task.score(bnn.predict(x, how="sampled", num_samples=NUM_DRAWS, seed=run.seed))
            found["linearised"] = task.score(bnn.predict(x, how="linearised", closed_form=True))
        elif run.laplace_betas:
            fisher = laplace(bnn, task.training, batch_size=1024)
            for beta in run.laplace_betas:
                bnn.set_optimal_variances(fisher, len(task.training[0]), beta)
                found[laplace_way(beta)] = task.score(bnn.predict(x, how="linearised", closed_form=True))
    return found


def _cost(run: TableRun) -> float:
    return COST[run.method] * run.num_steps * (1 + run.batch_size * run.hidden / 100_000)
