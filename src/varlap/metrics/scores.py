"""Scores of class probabilities: likelihood, accuracy, Brier.

All take probs [S, K, ...] with class numbers [S, ...] (−100 is ignored), or probabilities of a yes in the shape of
labels that are 0 or 1.
"""

import torch
from torch import Tensor

from varlap.errors import ConfigError
from varlap.metrics.rows import Rows, checked_rows, wide
from varlap.seeds import checked_count


def nll(probs: Tensor, labels: Tensor) -> float:
    """Return the mean over items of −log p(label), summed over an item's positions or labels, in nats.

    >>> round(nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1])), 4)
    0.4904
    """
    rows = checked_rows(probs, labels)
    return float(wide(rows.per_item(nlls(rows))).mean())


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """Return the share of labels whose most probable class, or more probable answer, is right.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
    0.5
    """
    rows = checked_rows(probs, labels)
    return rows.mean(rows.hits)


def top_k_accuracy(probs: Tensor, labels: Tensor, k: int = 5) -> float:
    """Return the share of labels that are among the k most probable classes.

    >>> top_k_accuracy(torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]), torch.tensor([1, 2]), k=2)
    0.5
    """
    checked_count("top_k_accuracy", "k", k)
    rows = checked_rows(probs, labels)
    num_classes = rows.probs.shape[-1] if rows.exclusive else 2
    if num_classes <= k:
        raise ConfigError(
            f"top_k_accuracy(k={k}) is 1 whatever the probs are, since there are {num_classes} classes; use a smaller k"
        )
    return rows.mean(top_k_hits(rows, k))


def brier(probs: Tensor, labels: Tensor) -> float:
    """Return the mean of Σₖ (pₖ − 1[label = k])², from 0 to 2; for yes or no of (p − label)², from 0 to 1.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([0])), brier(torch.tensor([0.5]), torch.tensor([1]))
    (0.5, 0.25)
    """
    rows = checked_rows(probs, labels)
    return rows.mean(briers(rows))


def label_probs(rows: Rows) -> Tensor:
    """Return the probability [n, P] of each label."""
    if rows.exclusive:
        return rows.probs.gather(-1, rows.labels[..., None]).squeeze(-1)
    return torch.where(rows.labels == 1, rows.probs, 1 - rows.probs)


def nlls(rows: Rows) -> Tensor:
    """Return −log p of each label, 0 where ignored."""
    return torch.where(rows.counted > 0, -label_probs(rows).log(), 0.0)


def top_k_hits(rows: Rows, k: int) -> Tensor:
    """Return 1 for each label among the k most probable classes."""
    return (rows.probs.topk(k, -1).indices == rows.labels[..., None]).any(-1).to(rows.probs.dtype)


def briers(rows: Rows) -> Tensor:
    """Return each label's Brier score."""
    if not rows.exclusive:
        return (rows.probs - rows.labels).square()
    # Σ pₖ² − 2 p_label + 1, without a one-hot copy
    return rows.probs.square().sum(-1) - 2 * label_probs(rows) + 1
