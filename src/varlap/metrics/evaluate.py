"""Score a network on held-out data."""

from typing import TYPE_CHECKING, Any

import torch

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
    """Return the mean network's NLL per item, and accuracy and ECE (15 equal-width bins) or RMSE.

    `data` is a tuple (x, y), a Dataset or a DataLoader; it is read in batches, so it need not fit on the device.

    >>> from torch import nn
    >>> scores = evaluate(BNN(nn.Linear(2, 3)), (torch.zeros(4, 2), torch.tensor([0, 1, 2, 0])))
    >>> sorted(scores)
    ['accuracy', 'ece', 'nll']
    """
    nll_sum, num_items = torch.zeros((), dtype=torch.float64, device=bnn.device), 0
    scores: dict[str, torchmetrics.Metric] = {}
    with bnn.evaluating():
        for number, (x, y) in enumerate(as_batches(data, batch_size)):
            x, y = tree.to_device(x, bnn.device), tree.to_device(y, bnn.device)
            part = forward(bnn, checked_batch(x, y, None, num_data=2**62, step=number))
            nll_sum -= part.log_likelihood_sum(bnn).double()
            num_items += part.batch.size
            prediction = bnn.likelihood.predict(part.outputs)
            if prediction.probs is not None and prediction.probs.ndim == 2 and y.ndim == 1:
                scores = scores or _class_scores(prediction.probs)
                for score in scores.values():
                    score.update(prediction.probs.float(), y)
            elif prediction.mean is not None:
                scores = scores or _regression_scores(bnn.device)
                for score in scores.values():
                    score.update(prediction.mean.flatten(), y.flatten())
    return {
        "nll": float(nll_sum / num_items),
        **{name: float(score.compute()) for name, score in scores.items()},
    }


def _class_scores(probs: torch.Tensor) -> dict[str, "torchmetrics.Metric"]:
    from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError  # slow to import

    num_classes = probs.shape[1]
    return {
        "accuracy": MulticlassAccuracy(num_classes, average="micro").to(probs.device),
        "ece": MulticlassCalibrationError(num_classes, n_bins=ECE_BINS, norm="l1").to(probs.device),
    }


def _regression_scores(device: torch.device) -> dict[str, "torchmetrics.Metric"]:
    from torchmetrics.regression import MeanSquaredError

    return {"rmse": MeanSquaredError(squared=False).to(device)}
