"""What the UCI experiment found: means and standard errors over splits."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from varlap.experiments.uci.run import WAYS, Choice, UCIExperiment
from varlap.experiments.uci.spec import NUM_SPLITS, TRAINED, TableRecipe
from varlap.experiments.uci.store import TableResult

LABELS = {"map": "MAP", "laplace": "Laplace", "vi": "VI", "vl": "VL"}
"""what a table calls the methods, in its order"""
BETTER = {"log_likelihood": max, "rmse": min}
CLEAR = 2.0  # standard errors of a paired difference, beyond which the best is said to be better


@dataclass(frozen=True)
class Estimate:
    """The mean over splits with its standard error.

    >>> Estimate.of([1.0, 3.0])
    Estimate(mean=2.0, standard_error=1.0)
    """

    mean: float
    standard_error: float | None
    """None for one split"""

    @staticmethod
    def of(values: Sequence[float]) -> "Estimate":
        """Return the mean and s/√n, with n − 1 in the variance s²."""
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return Estimate(statistics.fmean(values), error)


@dataclass(frozen=True)
class TableSummary:
    """One table's result: what was chosen, and the scores of each method on the test rows of the splits.

    >>> values = {"MAP": [1.0, 2.0, 3.0], "VL": [2.0, 3.1, 4.0]}
    >>> TableSummary("boston", 20, {}, {"log_likelihood": values}).best("log_likelihood")
    ['VL']
    """

    data: str
    num_splits: int
    """how many splits the table has; `values` may have fewer"""
    choices: Mapping[str, Choice]
    """by held-out rows, of map, laplace, vi and vl"""
    values: Mapping[str, Mapping[str, Sequence[float]]]
    """`log_likelihood` and `rmse`, by method, a value for each split"""
    ways: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    """the same by a fixed way of predicting, such as "VL, linearised", at the chosen β"""
    num_failed: int = 0
    """trainings that diverged: their splits are left out, for all methods"""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """mean time to train, by method"""

    @property
    def num_done(self) -> int:
        """How many splits the scores are of."""
        return len(next(iter(self.values["log_likelihood"].values()), ()))

    def estimate(self, score: str, method: str) -> Estimate:
        """Return a method's mean score with its standard error over splits."""
        return Estimate.of(self.values[score][method])

    def best(self, score: str) -> list[str]:
        """Return the method of the best mean, and those whose difference from it is less than two standard errors.

        The difference is paired, split by split.
        """
        values = self.values[score]
        best = BETTER[score](values, key=lambda method: statistics.fmean(values[method]))
        return [method for method in values if method == best or not self.differ(score, method, best)]

    def difference(self, score: str, method: str, other: str) -> Estimate:
        """Return the mean difference of two methods, split by split: most of what varies between splits cancels."""
        pairs = zip(self.values[score][method], self.values[score][other], strict=True)
        return Estimate.of([one - another for one, another in pairs])

    def differ(self, score: str, method: str, other: str) -> bool:
        """Whether two methods differ by more than two standard errors; of one split nothing can be said."""
        found = self.difference(score, method, other)
        return found.standard_error is None or abs(found.mean) > CLEAR * found.standard_error


def summarise(experiment: UCIExperiment) -> list[TableSummary]:
    """Summarise what the store holds of each recipe; tables without a complete split are left out."""
    found = [_summary(experiment, recipe) for recipe in experiment.recipes]
    return sorted((one for one in found if one is not None), key=lambda one: one.data)


def _summary(experiment: UCIExperiment, recipe: TableRecipe) -> TableSummary | None:
    chosen = experiment.choices(recipe)
    if chosen is None:
        return None
    betas = {method: choice.beta for method, choice in chosen.items()}
    num_splits = NUM_SPLITS[recipe.data]
    last = min(num_splits, experiment.num_splits or num_splits)
    splits: list[dict[str, TableResult]] = []
    num_failed = 0
    for split in range(last):
        results = [experiment.store.get(run) for run in recipe.final_runs(betas, range(split, split + 1))]
        present = [one for one in results if one is not None]
        if len(present) < len(TRAINED):
            continue
        if any(one.failure for one in present):
            num_failed += sum(one.failure is not None for one in present)
            continue
        splits.append({one.run.method: one for one in present})
    if not splits:
        return None
    ways = {LABELS[name]: (_trained(name), chosen[name].way) for name in LABELS}
    fixed = {f"{LABELS[name]}, {way}": (name, way) for name in ("vi", "vl") for way in WAYS[name]}
    return TableSummary(
        recipe.data,
        num_splits,
        {name: chosen[name] for name in LABELS},
        {score: _values(splits, ways, score) for score in BETTER},
        {score: _values(splits, fixed, score) for score in BETTER},
        num_failed,
        {LABELS[name]: statistics.fmean(split[name].seconds for split in splits) for name in TRAINED},
    )


def _values(
    splits: Sequence[Mapping[str, TableResult]], ways: Mapping[str, tuple[str, str]], score: str
) -> dict[str, list[float]]:
    return {label: [split[method].scores[way][score] for split in splits] for label, (method, way) in ways.items()}


def _trained(name: str) -> str:
    return "map" if name == "laplace" else name
