"""What plots are given, in one form: on the CPU, without gradients, one row a label."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from varlap import tree
from varlap.errors import BatchError, ConfigError
from varlap.likelihoods import Prediction
from varlap.metrics.rows import IGNORED_LABEL
from varlap.posterior import BNN
from varlap.predict import How

Values = Tensor | np.ndarray


def as_tensor(values: Any) -> Tensor:
    """Return values as a tensor on the CPU, of single precision at least where they are floating point.

    >>> as_tensor(np.array([1, 2])), as_tensor(torch.ones(1, dtype=torch.bfloat16, requires_grad=True))
    (tensor([1, 2]), tensor([1.]))
    """
    return tree.at_least_single(torch.as_tensor(values).detach().cpu())


def by_name(predictions: Any) -> dict[str, Any]:
    """Return predictions by name: a single one has none.

    >>> by_name({"MAP": 1}), by_name(1)
    ({'MAP': 1}, {'': 1})
    """
    if not isinstance(predictions, Mapping):
        return {"": predictions}
    if not predictions:
        raise ConfigError("there is nothing to draw: give at least one prediction, as in {'VL': prediction}")
    return {str(name): prediction for name, prediction in predictions.items()}


def probabilities(prediction: Any, function: str) -> tuple[Tensor, bool]:
    """Return probabilities, and whether their classes exclude each other; an array [N] holds those of a yes."""
    if isinstance(prediction, Prediction) and prediction.probs is None:
        raise ConfigError(f"plot.{function} is for classes, and this prediction has no probabilities")
    given = torch.as_tensor(prediction.probs if isinstance(prediction, Prediction) else prediction)
    probs = as_tensor(given)
    exclusive = prediction.exclusive if isinstance(prediction, Prediction) else probs.ndim > 1
    if exclusive and probs.dtype != given.dtype:  # in half precision they need not add up to 1
        probs = probs / probs.sum(1, keepdim=True)
    return probs, exclusive


def rows(prediction: Any, labels: Any, function: str) -> tuple[Tensor, Tensor]:
    """Return probabilities [M, K] and labels [M], a row for each position or yes-or-no label, without ignored ones.

    >>> rows(np.array([0.25, 0.75]), [0, 1], "reliability")
    (tensor([[0.7500, 0.2500],
            [0.2500, 0.7500]], dtype=torch.float64), tensor([0, 1]))
    """
    probs, exclusive = probabilities(prediction, function)
    labels = as_tensor(labels)
    if not exclusive:
        probs = torch.stack([1 - probs, probs], 1)
    expected = probs.shape[:1] + probs.shape[2:]
    if labels.shape != expected:
        raise BatchError(
            f"plot.{function} needs labels of shape {tuple(expected)} for these probabilities, got "
            f"{tuple(labels.shape)}; labels are class numbers, one for each item and position"
        )
    labels = labels.long().flatten()
    counted = labels != getattr(getattr(prediction, "likelihood", None), "ignored_label", IGNORED_LABEL)
    probs, labels = probs.movedim(1, -1).flatten(0, -2)[counted], labels[counted]
    if len(labels) == 0:
        raise BatchError(f"plot.{function} has no items to count")
    if int(labels.min()) < 0 or int(labels.max()) >= probs.shape[1]:
        wrong = labels.min() if int(labels.min()) < 0 else labels.max()
        raise BatchError(
            f"plot.{function}: label {wrong.item()} is out of range for probabilities of {probs.shape[1]} classes, "
            f"whose labels go from 0 to {probs.shape[1] - 1}"
        )
    return probs, labels


def predict(bnn: BNN, x: Tensor, how: How, options: Mapping[str, Any]) -> Prediction:
    """Predict where the network is, in its precision."""
    return bnn.predict(x.to(bnn.device, bnn.dtype), how=how, **options)
