"""Calibration: do things that are given the probability p happen with frequency p?

A class prediction is judged by the probability of its predicted class and whether it is right; yes-or-no labels by the
probability of a yes and whether it is one.

The bins are summed here and not by torchmetrics, since sums of gaps can be added over batches and drawn anew by item
for intervals, need no slow import in each validation, and have the same bits on every pass of a GPU. Tests hold the ECE
to torchmetrics' own.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from varlap.errors import BatchError, NonFiniteError
from varlap.metrics.rows import Rows, checked_rows, wide
from varlap.seeds import checked_count

BINS = 15  # equal-width bins, as in the paper's references
AT_ONCE = 2**22  # numbers that are worth holding to sum all bins in one go


@dataclass(frozen=True)
class ReliabilityBins:
    """What a reliability diagram draws: in each bin how sure, how often right, how many.

    >>> ReliabilityBins(torch.tensor([0.0, 1.0]), torch.tensor([0.9]), torch.tensor([0.8]), torch.tensor([10])).gap
    tensor([-0.1000])
    """

    edges: Tensor
    """[bins + 1]; a bin holds its upper edge, not its lower one"""
    confidence: Tensor
    """mean probability in each bin, NaN where it is empty"""
    accuracy: Tensor
    """how often it came true in each bin, NaN where it is empty"""
    count: Tensor
    """labels in each bin"""

    @property
    def gap(self) -> Tensor:
        """Accuracy minus confidence: below 0 is too sure."""
        return self.accuracy - self.confidence


def reliability_bins(probs: Tensor, labels: Tensor, bins: int = BINS) -> ReliabilityBins:
    """Sort predictions into equal-width bins of (0, 1] by their probability.

    Args:
        probs: [S, K, ...]; or confidences of any shape.
        labels: class numbers [S, ...]; or for confidences whether each was right, in the same shape.
        bins: how many.

    >>> found = reliability_bins(torch.tensor([0.7, 0.8, 0.2]), torch.tensor([1, 0, 0]), bins=2)
    >>> found.confidence, found.accuracy, found.count
    (tensor([0.2000, 0.7500]), tensor([0.0000, 0.5000]), tensor([1, 2]))
    """
    checked_count("reliability_bins", "bins", bins)
    rows = checked_rows(probs, labels)
    claimed, came_true = (column.flatten() for column in rows.claims)
    index, counted = bin_index(claimed, bins), rows.counted.flatten()
    count = sum_in_bins(index, counted, bins)
    confidence, accuracy = (sum_in_bins(index, values * counted, bins) / count for values in (claimed, came_true))
    return ReliabilityBins(
        _edges(claimed, bins), confidence.to(claimed.dtype), accuracy.to(claimed.dtype), count.round().long()
    )


def ece(probs: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """Return the expected calibration error: |accuracy − confidence|, averaged over labels by equal-width bins.

    >>> round(ece(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1])), 4)
    0.4
    """
    checked_count("ece", "bins", bins)
    rows = checked_rows(probs, labels)
    return float(ece_gaps(rows, bins).abs().sum() / rows.counted.sum())


def adaptive_ece(probs: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """Return the calibration error by bins that hold equally many labels each.

    Labels of the same probability are shared out evenly, so their order does not matter.

    >>> round(adaptive_ece(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1]), bins=1), 4)
    0.4
    """
    checked_count("adaptive_ece", "bins", bins)
    rows = checked_rows(probs, labels)
    counted = rows.counted.flatten() > 0
    claimed, came_true = (column.flatten()[counted] for column in rows.claims)
    return equal_mass_error(claimed, came_true, bins)


def classwise_ece(probs: Tensor, labels: Tensor, bins: int = BINS) -> float:
    """Return the calibration error of each class's probability, averaged over classes (equal-width bins).

    >>> round(classwise_ece(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([0, 1])), 4)
    0.4
    """
    checked_count("classwise_ece", "bins", bins)
    rows = checked_rows(probs, labels)
    if not rows.exclusive:
        raise BatchError("classwise_ece needs probs [S, K, ...] of classes; ece is the one for yes-or-no labels")
    return float(classwise_gaps(rows, bins).abs().sum(1).mean() / rows.counted.sum())


def risk_coverage(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Return the share of labels answered, surest first, and the error rate among them, for 1, 2, ... all labels.

    `confidence` may be anything that is larger for surer answers, such as the negative entropy. Labels of the same
    confidence are taken to come in random order, whose expected error counts is used.

    >>> coverage, risk = risk_coverage(torch.tensor([0.9, 0.6]), torch.tensor([True, False]))
    >>> coverage, risk
    (tensor([0.5000, 1.0000]), tensor([0.0000, 0.5000]))
    """
    if confidence.shape != correct.shape:
        raise BatchError(
            f"confidence of shape {tuple(confidence.shape)} does not fit correct of shape {tuple(correct.shape)}; give "
            "prediction.confidence and prediction.labels == y"
        )
    if not confidence.numel():
        raise BatchError("there is nothing to score: confidence is empty; give at least one item")
    if bool(confidence.isnan().any()):
        raise NonFiniteError("confidence holds NaN; did the network diverge?")
    coverage, risk = _risk_coverage(confidence.flatten(), correct.flatten())
    dtype = torch.promote_types(confidence.dtype, torch.float32)
    return coverage.to(dtype), risk.to(dtype)


def aurc(confidence: Tensor, correct: Tensor) -> float:
    """Return the area under the risk-coverage curve: the mean of its risks, from 0 to 1; lower is better.

    >>> aurc(torch.tensor([0.9, 0.6]), torch.tensor([True, False]))
    0.25
    """
    return float(wide(risk_coverage(confidence, correct)[1]).mean())


def bin_index(probs: Tensor, bins: int) -> Tensor:
    """Return the equal-width bin of (0, 1] that holds each probability; 0 goes into the first."""
    return torch.bucketize(probs.contiguous(), _edges(probs, bins)[1:-1])


def sum_in_bins(index: Tensor, values: Tensor, bins: int) -> Tensor:
    """Sum values [L, ...] over dimension 0 by bin: [..., bins]. Not scattered: on a GPU that changes the last bits."""
    values = wide(values)
    if values.numel() * bins <= AT_ONCE:
        return (values[..., None] * (index[..., None] == torch.arange(bins, device=index.device))).sum(0)
    return torch.stack([(values * (index == number)).sum(0) for number in range(bins)], -1)


def ece_gaps(rows: Rows, bins: int) -> Tensor:
    """Return Σ (came true − claimed) in each bin, whose sizes add up to the ECE times the number of labels."""
    claimed, came_true = rows.claims
    gaps = (wide(came_true) - wide(claimed)) * rows.counted
    return sum_in_bins(bin_index(claimed, bins).flatten(), gaps.flatten(), bins)


def classwise_gaps(rows: Rows, bins: int) -> Tensor:
    """Return the same for each class: [K, bins]."""
    probs = rows.probs.flatten(0, 1)
    came_true = rows.labels.flatten()[:, None] == torch.arange(probs.shape[1], device=probs.device)
    gaps = (came_true.to(wide(probs).dtype) - wide(probs)) * rows.counted.flatten()[:, None]
    return sum_in_bins(bin_index(probs, bins), gaps, bins)


def equal_width_error(claimed: Tensor, came_true: Tensor, bins: int) -> float:
    """Return the ECE of claims [L] by equal-width bins."""
    gaps = wide(came_true) - wide(claimed)
    return float(sum_in_bins(bin_index(claimed, bins), gaps, bins).abs().sum() / len(claimed))


def equal_mass_error(claimed: Tensor, came_true: Tensor, bins: int) -> float:
    """Return the ECE of claims [L] by bins of equally many."""
    claimed, came_true = _sorted_fairly(claimed, came_true)
    gaps = (came_true - wide(claimed)).cumsum(0)
    ends = torch.arange(1, bins + 1, device=gaps.device) * len(gaps) // bins
    up_to = torch.cat([gaps.new_zeros(1), gaps])[ends]
    return float(up_to.diff(prepend=gaps.new_zeros(1)).abs().sum() / len(gaps))


def area_under_risk(confidence: Tensor, correct: Tensor) -> float:
    """Return the AURC of labels [L]."""
    return float(_risk_coverage(confidence, correct)[1].mean())


def _risk_coverage(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    _, right = _sorted_fairly(confidence, correct, descending=True)
    answered = torch.arange(1, len(right) + 1, device=right.device, dtype=right.dtype)
    return answered / len(right), (1 - right).cumsum(0) / answered


def _sorted_fairly(score: Tensor, outcome: Tensor, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Sort by score and give labels of one score their mean outcome, as if averaged over their possible orders."""
    score, order = score.sort(descending=descending)
    _, group, size = score.unique_consecutive(return_inverse=True, return_counts=True)
    outcome = wide(outcome[order])
    if len(size) == len(score):
        return score, outcome
    ends = torch.cat([outcome.new_zeros(1), outcome.cumsum(0)])[size.cumsum(0)]
    return score, (ends.diff(prepend=ends.new_zeros(1)) / size)[group]


def _edges(like: Tensor, bins: int) -> Tensor:
    return torch.linspace(0, 1, bins + 1, dtype=like.dtype, device=like.device)
