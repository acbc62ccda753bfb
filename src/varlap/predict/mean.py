"""Prediction by the mean network: what the paper reports for VL."""

from typing import Any

import torch

from varlap import tree
from varlap.posterior import BNN
from varlap.predict.inputs import Inputs, join
from varlap.streams import Streams


def mean_outputs(bnn: BNN, inputs: Inputs) -> Any:
    """Return f(x, μ).

    >>> import torch
    >>> bnn = BNN(torch.nn.Linear(2, 1), likelihood="gaussian")
    >>> mean_outputs(bnn, Inputs(bnn, torch.zeros(3, 2), None)).shape
    torch.Size([3, 1])
    """
    return join([bnn.outputs(x) for x in inputs])


@torch.no_grad()
def probed_outputs(bnn: BNN, x: Any) -> Any:
    """Return f(x, μ) in evaluation mode, to look at: inputs, mode, buffers and generators stay as they were.

    >>> bnn = BNN(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout()), likelihood="gaussian")
    >>> probed_outputs(bnn, torch.zeros(3, 2)).shape, bnn.training
    (torch.Size([3, 1]), True)
    """
    with Streams(0, 0).around_network(bnn.device), bnn.evaluating(), bnn.spare_buffers():
        return bnn.outputs(tree.copied(x))  # a network may work in place
