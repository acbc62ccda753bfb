"""Scores of predictions that come batch by batch: items are reduced to a few numbers each, probabilities are let go."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from varlap import tree
from varlap.errors import BatchError, ConfigError, did_you_mean
from varlap.likelihoods import Prediction
from varlap.likelihoods.protocol import sum_over_positions
from varlap.metrics import bootstrap as resampling
from varlap.metrics.calibration import (
    BINS,
    area_under_risk,
    classwise_gaps,
    ece_gaps,
    equal_mass_error,
    equal_width_error,
)
from varlap.metrics.detection import ranked_aupr, ranked_auroc, ranked_fpr, ranks
from varlap.metrics.regression import check_moments, gaussian_crps, gaussian_log_probs, half_width
from varlap.metrics.rows import ALL_IGNORED, IGNORED_LABEL, Rows, as_rows, wide
from varlap.metrics.scores import briers, nlls, top_k_hits

TOP = 5
CLASS_SCORES = ("nll", "accuracy", "top5_accuracy", "brier", "ece", "adaptive_ece", "classwise_ece", "aurc")
REGRESSION_SCORES = ("nll", "log_likelihood", "rmse", "coverage", "width", "crps")
DETECTORS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "auroc": ranked_auroc,
    "aupr": ranked_aupr,
    "fpr95": ranked_fpr,
}
UNCERTAINTIES = ("entropy", "mutual_information", "variance", "epistemic_variance")
OOD_SCORES = tuple(f"ood_{detector}_{name}" for name in UNCERTAINTIES for detector in DETECTORS)
ALL_SCORES = tuple(dict.fromkeys(CLASS_SCORES + REGRESSION_SCORES + OOD_SCORES))
NEED_OOD = set(DETECTORS) | {f"ood_{name}" for name in DETECTORS}  # what others call them

Columns = dict[str, Tensor]


class Scores:
    """Takes predictions with their targets, batch by batch, and gives the scores of all of them.

    What is kept is a few numbers for each item; for `adaptive_ece` and `aurc`, and for the bootstrap of `ece`, two for
    each position. `add` does not wait for the device where the predictions are `trusted`.

    Args:
        only: names of the scores that are wanted; those that do not apply (accuracy in regression, say) are left out.
        level: of the predictive intervals that `coverage` and `width` judge, and of the bootstrap's intervals.
        bootstrap: how often items are drawn anew for `NAME_low` and `NAME_high`; 0 for no intervals.
        seed: of these draws.
        trusted: whether the values were checked before; shapes are looked at always.

    >>> scores = Scores()
    >>> scores.add(Prediction(probs=torch.tensor([[0.9, 0.1]])), torch.tensor([0]))
    >>> scores.add(Prediction(probs=torch.tensor([[0.8, 0.2]])), torch.tensor([1]))
    >>> scores.compute()["accuracy"]
    0.5
    """

    def __init__(
        self,
        only: Iterable[str] | None = None,
        *,
        level: float = 0.95,
        bootstrap: int = 0,
        seed: int = 0,
        trusted: bool = False,
    ) -> None:
        self._only = None if only is None else _checked_names(only)
        if not 0 < level < 1:
            raise ConfigError(f"level={level} must be between 0 and 1; 0.95 is usual")
        self._bootstrap = resampling.checked_bootstrap("Scores", bootstrap)
        self._level, self._seed, self._trusted = level, seed, trusted
        self._items: list[Columns] = []  # one value for each item
        self._labels: list[Columns] = []  # one value for each label
        self._outside: list[Columns] = []  # uncertainties of out-of-distribution items
        self._gaps: Columns = {}  # sums in bins, over all batches
        self._num_items, self._is_regression = 0, False

    @torch.no_grad()
    def add(self, prediction: Prediction, targets: Any) -> None:
        """Score a batch.

        A prediction made by hand, without outputs, has the NLL of its probabilities, or of a Gaussian with its
        moments.
        """
        given = prediction.probs if prediction.probs is not None else prediction.mean
        if given is not None:
            targets = tree.to_device(targets, given.device)
        log_probs, columns = None, {}
        if prediction.probs is not None and isinstance(targets, Tensor):
            ignored = getattr(prediction.likelihood, "ignored_label", IGNORED_LABEL)
            rows = as_rows(prediction.probs, targets, prediction.exclusive, ignored, check=not self._trusted)
            columns = self._class_columns(rows)
            log_probs = -rows.per_item(nlls(rows)) if not prediction.outputs else None
        elif prediction.mean is not None and isinstance(targets, Tensor):
            self._is_regression = True
            columns = self._regression_columns(prediction.mean, prediction.variance, targets)
            if prediction.variance is not None and not prediction.outputs:
                log_probs = sum_over_positions(gaussian_log_probs(prediction.mean, prediction.variance, targets))
        if prediction.outputs or not columns:
            log_probs = _log_prob(prediction, targets)
        if log_probs is not None:
            columns["nll"] = -log_probs
        if self._wants(*OOD_SCORES):
            columns |= uncertainties(prediction)
        self._items.append(columns)
        self._num_items += len(next(iter(columns.values())))

    @torch.no_grad()
    def add_ood(self, prediction: Prediction) -> None:
        """Take a batch from outside the distribution, whose uncertainty should exceed that of the others."""
        found = uncertainties(prediction)
        if not found:
            raise ConfigError(
                "ood needs predictions with probabilities or a variance, to tell inside from outside by their "
                "uncertainty; have the likelihood's predict return Prediction(probs=...) or (mean=..., variance=...)"
            )
        self._outside.append(found)

    def gather(self) -> None:
        """Take in what the other ranks of torch.distributed have scored, so that each computes the scores of all."""
        from torchmetrics.utilities.distributed import gather_all_tensors

        if self._bootstrap:
            raise ConfigError("Scores(bootstrap=...) cannot be gathered from several ranks; leave out the bootstrap")
        names = [sorted(parts[0]) if parts else [] for parts in (self._items, self._labels, self._outside)]
        of_all: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(of_all, names)
        if not names[0] or any(others != names for others in of_all):
            raise BatchError(
                "a rank has scored nothing, or something else than another; give each the same kinds of items"
            )
        for parts in (self._items, self._labels, self._outside):
            own = _concatenated(parts)
            parts[:] = [{name: torch.cat(gather_all_tensors(column)) for name, column in own.items()}] if own else []
        self._gaps = {name: torch.stack(gather_all_tensors(gaps)).sum(0) for name, gaps in self._gaps.items()}

    def compute(self) -> dict[str, float]:
        """Return the scores of everything so far; with a bootstrap, each followed by its NAME_low and NAME_high.

        The interval is that of the percentiles, over items drawn with replacement: an item brings all its positions.
        That of a calibration error lies high, since drawing anew adds noise to each bin. `classwise_ece` has none: it
        would need all probabilities.
        """
        if not self._items:
            raise BatchError("the data hold no items; give at least one")
        items, labels, outside = _joined(self._items), _joined(self._labels), _joined(self._outside)
        if labels:
            counted = labels.pop("counted") > 0
            labels = {name: column[counted] for name, column in labels.items()}
        for name in outside.keys() & items.keys():
            items[name], outside[name] = ranks(items[name], outside[name])
        found = self._values(items, labels, outside)
        if "labels" in items:
            num_labels = float(items["labels"].sum())
            if not num_labels:
                raise BatchError(ALL_IGNORED)
            for name, gaps in self._gaps.items():
                found[name] = float(gaps.abs().sum(-1).mean()) / num_labels
        intervals = {}
        if self._bootstrap:
            intervals = resampling.intervals(
                self._values, items, labels, outside, self._bootstrap, self._level, self._seed
            )
        ordered: dict[str, float] = {}
        for name in ALL_SCORES:
            if name in found and self._wants(name):
                ordered[name] = found[name]
                if name in intervals:
                    ordered[f"{name}_low"], ordered[f"{name}_high"] = intervals[name]
        return ordered

    def _wants(self, *names: str) -> bool:
        return self._only is None or not self._only.isdisjoint(names)

    def _class_columns(self, rows: Rows) -> Columns:
        """Return sums over the labels of each item, and note what is needed of each label."""
        columns = {"labels": rows.counted.sum(1)}
        if self._wants("accuracy"):
            columns["accuracy"] = rows.per_item(rows.hits)
        if self._wants("top5_accuracy") and rows.exclusive and rows.probs.shape[-1] > TOP:
            columns["top5_accuracy"] = rows.per_item(top_k_hits(rows, TOP))
        if self._wants("brier"):
            columns["brier"] = rows.per_item(briers(rows))
        if self._wants("ece"):
            self._add_gaps("ece", ece_gaps(rows, BINS))
        if self._wants("classwise_ece") and rows.exclusive:
            self._add_gaps("classwise_ece", classwise_gaps(rows, BINS))
        if self._wants("adaptive_ece", "aurc") or (self._bootstrap and self._wants("ece")):
            claimed, came_true = rows.claims
            kept = {"counted": rows.counted, "claimed": claimed, "came_true": came_true}
            if not rows.exclusive:  # for classes these are the same
                kept |= {"confidence": rows.confidence, "hit": rows.hits}
            if self._bootstrap:
                number = torch.arange(self._num_items, self._num_items + rows.num_items, device=claimed.device)
                kept["item"] = number[:, None].expand_as(claimed)
            self._labels.append({name: column.flatten() for name, column in kept.items()})
        return columns

    def _regression_columns(self, mean: Tensor, variance: Tensor | None, targets: Tensor) -> Columns:
        """Return sums over the outputs of each item."""
        check_moments(mean, targets, variance, shapes_only=self._trusted)
        mean, targets = wide(mean), wide(targets)  # sums in half precision would overflow
        variance = None if variance is None else wide(variance)
        columns = {"labels": sum_over_positions(torch.ones_like(mean))}
        if self._wants("rmse"):
            columns["rmse"] = sum_over_positions((mean - targets).square())
        if variance is not None and self._wants("coverage", "width", "crps"):
            half = half_width(variance, self._level)
            columns["coverage"] = sum_over_positions(((targets - mean).abs() <= half).to(mean.dtype))
            columns["width"] = sum_over_positions(2 * half)
            columns["crps"] = sum_over_positions(gaussian_crps(mean, variance, targets))
        return columns

    def _add_gaps(self, name: str, gaps: Tensor) -> None:
        self._gaps[name] = gaps if name not in self._gaps else self._gaps[name] + gaps

    def _values(self, items: Columns, labels: Columns, outside: Columns) -> dict[str, float]:
        """Compute all scores that single items and labels determine."""
        found: dict[str, float] = {}
        if "nll" in items:
            found["nll"] = float(wide(items["nll"]).mean())
            if self._is_regression:
                found["log_likelihood"] = -found["nll"]
        for name in items.keys() & set(ALL_SCORES) - {"nll"}:
            mean = float(wide(items[name]).sum() / wide(items["labels"]).sum())
            found[name] = math.sqrt(mean) if name == "rmse" else mean
        if labels:
            claimed, came_true = labels["claimed"], labels["came_true"]
            if self._bootstrap and self._wants("ece"):
                found["ece"] = equal_width_error(claimed, came_true, BINS)
            if self._wants("adaptive_ece"):
                found["adaptive_ece"] = equal_mass_error(claimed, came_true, BINS)
            if self._wants("aurc"):
                found["aurc"] = area_under_risk(labels.get("confidence", claimed), labels.get("hit", came_true))
        for uncertainty in outside.keys() & items.keys():
            for detector, measure in DETECTORS.items():
                name = f"ood_{detector}_{uncertainty}"
                if self._wants(name):
                    found[name] = measure(items[uncertainty], outside[uncertainty])
        return found


def score(
    prediction: Prediction,
    targets: Any,
    *,
    ood: Prediction | None = None,
    only: Iterable[str] | None = None,
    level: float = 0.95,
    bootstrap: int = 0,
    seed: int = 0,
) -> dict[str, float]:
    """Score one prediction, whoever made it, by the names that `varlap.evaluate` uses.

    Args:
        prediction: class probabilities, or a mean and a variance.
        targets: what was observed.
        ood: a prediction for inputs from elsewhere, to be told apart by its uncertainty.
        only: as in `Scores`.
        level: as in `Scores`.
        bootstrap: as in `Scores`.
        seed: as in `Scores`.

    >>> found = score(Prediction(probs=torch.tensor([[0.9, 0.1], [0.8, 0.2]])), torch.tensor([0, 1]))
    >>> {name: round(value, 3) for name, value in found.items() if name in ("nll", "accuracy", "ece")}
    {'nll': 0.857, 'accuracy': 0.5, 'ece': 0.45}
    """
    scores = Scores(only, level=level, bootstrap=bootstrap, seed=seed)
    scores.add(prediction, targets)
    if ood is not None:
        scores.add_ood(ood)
    return scores.compute()


def uncertainties(prediction: Prediction) -> Columns:
    """Return what a prediction is unsure of, averaged over the positions of each item."""
    if prediction.probs is not None:
        found = {"entropy": prediction.entropy, "mutual_information": prediction.mutual_information}
    else:
        found = {"variance": prediction.variance, "epistemic_variance": prediction.epistemic_variance}
    return {
        name: value.flatten(1).mean(1) if value.ndim > 1 else value
        for name, value in found.items()
        if value is not None
    }


def _log_prob(prediction: Prediction, targets: Any) -> Tensor:
    values, size = prediction.log_prob(targets), tree.leading_size(targets)
    if values.shape != (size,):
        raise BatchError(
            f"the likelihood's log_prob returned shape {tuple(values.shape)} for {size} items; it must return one "
            f"value per item, shape ({size},), summed over all other dimensions"
        )
    return values


def _joined(parts: list[Columns]) -> Columns:
    """Join the batches on the CPU, where sorting and drawing are repeatable."""
    return {name: column.cpu() for name, column in _concatenated(parts).items()}


def _concatenated(parts: list[Columns]) -> Columns:
    """Join the batches; names that not all have are left out."""
    names = set.intersection(*(set(part) for part in parts)) if parts else set()
    return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ()) if name in names}


def _checked_names(only: Iterable[str]) -> frozenset[str]:
    names = [only] if isinstance(only, str) else list(only)
    for name in names:
        if name not in ALL_SCORES:
            raise ConfigError(f"only={names!r}: there is no score {name!r}; {_instead_of(name)}")
    return frozenset(names)


def _instead_of(name: object) -> str:
    if name in NEED_OOD:
        detector = str(name).removeprefix("ood_")
        ours = [score for score in OOD_SCORES if score.startswith(f"ood_{detector}_")]
        return (
            f"{detector} tells items of another distribution by their uncertainty: {', '.join(ours)}, with "
            "evaluate(..., ood=inputs)"
        )
    return did_you_mean(name, ALL_SCORES, f"there are {', '.join(ALL_SCORES)}")
