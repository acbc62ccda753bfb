"""Stand-ins for scores that belong to `varlap.metrics`: probabilities are [N, K], labels [N]."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ReliabilityBins:
    """What is in each bin of confidence."""

    edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor


def reliability_bins(probs: Tensor, labels: Tensor, bins: int = 15) -> ReliabilityBins:
    """Return mean confidence, accuracy and number of items in bins of equal width (0 where a bin is empty)."""
    confidence, guess = probs.max(1)
    edges = torch.linspace(0, 1, bins + 1, dtype=probs.dtype)
    index = torch.bucketize(confidence, edges[1:-1])
    count = torch.bincount(index, minlength=bins)
    mean_confidence, accuracy = (
        torch.bincount(index, weights=values.to(probs.dtype), minlength=bins) / count.clamp(min=1)
        for values in (confidence, guess == labels)
    )
    return ReliabilityBins(edges, mean_confidence, accuracy, count)


def ece(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Return the expected calibration error."""
    found = reliability_bins(probs, labels, bins)
    return float((found.count * (found.confidence - found.accuracy).abs()).sum() / found.count.sum())


def risk_coverage(confidence: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Return the shares of items answered, surest first, and the error rate among them."""
    wrong = (~correct)[confidence.argsort(descending=True, stable=True)].double()
    answered = torch.arange(1, len(wrong) + 1)
    return answered / len(wrong), wrong.cumsum(0) / answered


def auroc(inside_scores: Tensor, outside_scores: Tensor) -> float:
    """Return the probability that an item from outside has the higher score."""
    above = (outside_scores[:, None] > inside_scores).double() + 0.5 * (outside_scores[:, None] == inside_scores)
    return float(above.mean())
