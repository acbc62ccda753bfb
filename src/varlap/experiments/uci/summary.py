"""What the UCI experiment found: means and standard errors over splits."""

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from varlap.experiments.uci.run import OTHER_WAYS, WAY, AllDivergedError, Tuned, UCIExperiment, laplace_way
from varlap.experiments.uci.spec import NUM_SPLITS, TRAINED, TableRecipe
from varlap.experiments.uci.store import TableResult

LABELS = {"map": "MAP", "laplace": "Laplace", "vi": "VI", "vl": "VL"}
"""what a table calls the methods, in its order"""
BETTER = {"log_likelihood": max, "rmse": min}
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
"""97.5 % of Student's t with 1 to 19 degrees of freedom: so many standard errors make a difference clear at 5 %"""


@dataclass(frozen=True)
class Estimate:
    """The mean over splits with its standard error.

    >>> Estimate.of([1.0, 3.0])
    Estimate(mean=2.0, standard_error=1.0, num_values=2)
    """

    mean: float
    standard_error: float | None
    """None for one split"""
    num_values: int = 1

    @staticmethod
    def of(values: Sequence[float]) -> "Estimate":
        """Return the mean and s/√n, with n − 1 in the variance s²."""
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return Estimate(statistics.fmean(values), error, len(values))

    @property
    def is_clear(self) -> bool:
        """Whether the mean is not 0 by a two-sided t test at 5 %; of one value nothing can be said.

        >>> Estimate.of([1.0, 3.0]).is_clear, Estimate.of([1.0, 1.1]).is_clear
        (False, True)
        """
        if self.standard_error is None:
            return False
        quantile = T_QUANTILES[min(self.num_values - 1, len(T_QUANTILES)) - 1]
        return abs(self.mean) > quantile * self.standard_error


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
    tuned: Mapping[str, Tuned]
    """by held-out rows, of map, laplace, vi and vl"""
    values: Mapping[str, Mapping[str, Sequence[float]]]
    """`log_likelihood` and `rmse`, by method, a value for each split"""
    ways: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    """the same by a fixed way of predicting, such as "VL, linearised", at the chosen β"""
    num_failed: int = 0
    """trainings that diverged: their splits are left out, for all methods"""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """mean time to train, by method"""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """settings that are others than the shipped recipe's"""

    @property
    def name(self) -> str:
        """What a table calls the row.

        >>> TableSummary("boston", 20, {}, {}, changes={"epochs": 3, "lr": 0.005}).name
        'boston, 3 epochs, lr 0.005'
        """
        return ", ".join([self.data, *(_told(name, value) for name, value in self.changes.items())])

    @property
    def num_done(self) -> int:
        """How many splits the scores are of."""
        return len(next(iter(self.values["log_likelihood"].values()), ()))

    def estimate(self, score: str, method: str) -> Estimate:
        """Return a method's mean score with its standard error over splits."""
        return Estimate.of(self.values[score][method])

    def best(self, score: str) -> list[str]:
        """Return the method of the best mean, and those that do not clearly differ from it."""
        values = self.values[score]
        best = BETTER[score](values, key=lambda method: statistics.fmean(values[method]))
        return [method for method in values if method == best or not self.difference(score, method, best).is_clear]

    def difference(self, score: str, method: str, other: str) -> Estimate:
        """Return the mean difference of two methods, split by split: most of what varies between splits cancels."""
        pairs = zip(self.values[score][method], self.values[score][other], strict=True)
        return Estimate.of([one - another for one, another in pairs])


def summarise(experiment: UCIExperiment) -> list[TableSummary]:
    """Summarise what the store holds of each recipe.

    Tables without a complete split are left out, and so are those that `all_diverged` names.
    """
    found = []
    for recipe in experiment.recipes:
        with contextlib.suppress(AllDivergedError):
            found.append(_summary(experiment, recipe))
    return sorted((one for one in found if one is not None), key=lambda one: (one.data, len(one.changes), one.name))


def all_diverged(experiment: UCIExperiment) -> list[str]:
    """Say for which tables no β could be chosen, since all of a method diverged, and what to do.

    >>> all_diverged(UCIExperiment.stored("nowhere"))
    []
    """
    found = []
    for recipe in experiment.recipes:
        try:
            experiment.tuned(recipe)
        except AllDivergedError as error:
            found.append(str(error))
    return sorted(found)


def _changes(recipe: TableRecipe) -> dict[str, Any]:
    shipped = dataclasses.asdict(TableRecipe.named(recipe.data))
    return {name: value for name, value in dataclasses.asdict(recipe).items() if value != shipped[name]}


def _told(name: str, value: Any) -> str:
    if name == "epochs":
        return f"{value} epoch{'s' * (value > 1)}"
    words = " ".join(f"{one:g}" for one in value) if isinstance(value, tuple) else f"{value}"
    return f"{name.replace('_', ' ')} {words}"


def _summary(experiment: UCIExperiment, recipe: TableRecipe) -> TableSummary | None:
    chosen = experiment.tuned(recipe)
    if chosen is None:
        return None
    betas = {method: one.beta for method, one in chosen.items()}
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
    by_method = WAY | {"laplace": laplace_way(chosen["laplace"].beta)}
    ways = {label: ("map" if name == "laplace" else name, by_method[name]) for name, label in LABELS.items()}
    fixed = {f"{LABELS[name]}, {way}": (name, way) for name in ("vi", "vl") for way in OTHER_WAYS}
    return TableSummary(
        recipe.data,
        num_splits,
        {name: chosen[name] for name in LABELS},
        {score: _values(splits, ways, score) for score in BETTER},
        {score: _values(splits, fixed, score) for score in BETTER},
        num_failed,
        {LABELS[name]: statistics.fmean(split[name].seconds for split in splits) for name in TRAINED},
        _changes(recipe),
    )


def _values(
    splits: Sequence[Mapping[str, TableResult]], ways: Mapping[str, tuple[str, str]], score: str
) -> dict[str, list[float]]:
    return {label: [split[method].scores[way][score] for split in splits] for label, (method, way) in ways.items()}
