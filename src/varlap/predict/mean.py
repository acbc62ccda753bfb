"""Prediction by the mean network: what the paper reports for VL."""

from typing import Any

from varlap.posterior import BNN
from varlap.predict.inputs import Inputs, join


def mean_outputs(bnn: BNN, inputs: Inputs) -> Any:
    """Return f(x, μ).

    >>> import torch
    >>> bnn = BNN(torch.nn.Linear(2, 1), likelihood="gaussian")
    >>> mean_outputs(bnn, Inputs(bnn, torch.zeros(3, 2), None)).shape
    torch.Size([3, 1])
    """
    return join([bnn.outputs(x) for x in inputs])
