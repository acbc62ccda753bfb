"""Prediction by the mean network: what the paper reports for VL."""

from dataclasses import replace
from typing import Any

import torch

from varlap.likelihoods import Prediction
from varlap.posterior import BNN


@torch.no_grad()
def predict(bnn: BNN, x: Any) -> Prediction:
    """Predict a batch with the mean network, in evaluation mode, and put each module's mode back.

    >>> from torch import nn
    >>> bnn = BNN(nn.Linear(2, 1), likelihood="gaussian")
    >>> prediction = predict(bnn, torch.zeros(3, 2))
    >>> prediction.mean.shape, prediction.variance.shape
    (torch.Size([3, 1]), torch.Size([3, 1]))
    """
    with bnn.evaluating():
        outputs = bnn.outputs(x)
        return replace(bnn.likelihood.predict(outputs), outputs=[outputs], likelihood=bnn.likelihood)
