"""Score a network on held-out data."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from varlap import tree
from varlap.curvature.protocol import forward
from varlap.data import as_batches
from varlap.posterior import BNN
from varlap.posterior.batch import checked_batch

if TYPE_CHECKING:
    import torchmetrics

ECE_BINS = 15  # equal-width bins, as in the paper's references


@torch.no_grad()
def evaluate(bnn: BNN, data: Any, *, batch_size: int = 512) -> dict[str, float]:
    """Return the mean network's NLL per item, with accuracy and ECE (15 equal-width bins) for classes, or RMSE.

    `data` is a tuple (x, y), a Dataset or a DataLoader; it is read in batches, so it need not fit on the device. For
    positions (pixels, tokens) and several labels accuracy and ECE count each of them, except for ignored ones.

    >>> from torch import nn
    >>> scores = evaluate(BNN(nn.Linear(2, 3)), (torch.zeros(4, 2), torch.tensor([0, 1, 2, 0])))
    >>> sorted(scores)
    ['accuracy', 'ece', 'nll']
    """
    nll_sum, num_items = 0.0, 0
    scores: dict[str, torchmetrics.Metric] = {}
    with bnn.evaluating():
        for number, (x, y) in enumerate(as_batches(data, batch_size)):
            x, y = tree.to_device(x, bnn.device), tree.to_device(y, bnn.device)
            part = forward(bnn, checked_batch(x, y, step=number))
            nll_sum -= float(part.log_likelihood_sum(bnn))
            num_items += part.batch.size
            prediction = bnn.likelihood.predict(part.outputs)
            if prediction.probs is not None:
                probs, labels = _one_row_a_label(prediction.probs, y, getattr(bnn.likelihood, "ignored_label", None))
                scores = scores or _class_scores(probs)
                for score in scores.values():
                    score.update(probs.float(), labels)
            elif prediction.mean is not None:
                scores = scores or _regression_scores(bnn.device)
                for score in scores.values():
                    score.update(prediction.mean.flatten(), y.flatten())
    return {"nll": nll_sum / num_items, **{name: float(score.compute()) for name, score in scores.items()}}


def _one_row_a_label(probs: Tensor, y: Tensor, ignored_label: int | None) -> tuple[Tensor, Tensor]:
    """Return probabilities [M, K] with labels [M], or [M] with [M] for yes or no, without ignored positions."""
    if probs.shape == y.shape:
        return probs.flatten(), y.flatten().long()
    rows, labels = probs.movedim(1, -1).flatten(0, -2), y.flatten()
    counted = torch.ones_like(labels, dtype=torch.bool) if ignored_label is None else labels != ignored_label
    return rows[counted], labels[counted]


def _class_scores(probs: Tensor) -> dict[str, "torchmetrics.Metric"]:
    from torchmetrics import classification  # slow to import

    if probs.ndim == 1:
        accuracy = classification.BinaryAccuracy()
        ece = classification.BinaryCalibrationError(n_bins=ECE_BINS, norm="l1")
    else:
        accuracy = classification.MulticlassAccuracy(probs.shape[1], average="micro")
        ece = classification.MulticlassCalibrationError(probs.shape[1], n_bins=ECE_BINS, norm="l1")
    return {"accuracy": accuracy.to(probs.device), "ece": ece.to(probs.device)}


def _regression_scores(device: torch.device) -> dict[str, "torchmetrics.Metric"]:
    from torchmetrics.regression import MeanSquaredError

    return {"rmse": MeanSquaredError(squared=False).to(device)}
