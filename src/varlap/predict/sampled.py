"""Prediction by an average over networks whose weights are drawn from the posterior."""

from typing import Any

from varlap.posterior import BNN
from varlap.predict.draws import weight_noise
from varlap.predict.inputs import Inputs, join
from varlap.predict.statistics import reestimate


def sampled_outputs(bnn: BNN, inputs: Inputs, num_samples: int, seed: int, statistics: Any = None) -> list[Any]:
    """Return f(x, w) for each of `num_samples` draws w ~ N(μ, σ²), one draw for all inputs.

    With `statistics` the running statistics of batch norm are moved to those of each draw, by a pass over these data;
    the caller puts them back.

    >>> import torch
    >>> bnn = BNN(torch.nn.Linear(2, 1), likelihood="gaussian")
    >>> len(sampled_outputs(bnn, Inputs(bnn, torch.zeros(3, 2), None), num_samples=4, seed=0))
    4
    """
    draws = []
    for number in range(num_samples):
        with bnn.perturbed(weight_noise(bnn, seed, number)):
            if statistics is not None:
                reestimate(bnn, statistics)
            draws.append(join([bnn.outputs(x) for x in inputs]))
    return draws
