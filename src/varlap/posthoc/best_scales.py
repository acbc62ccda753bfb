"""The scales of an empirical-Bayes prior that fit the variances that fit them, for a given curvature.

A tensor's s² is the mean of σ² + (μ − m)², and σ² = β/(N f + β/s²). With a = N f/β and q the mean of (μ − m)², both
hold where the mean of s⁴ a/(1 + a s²) is q. To set the two in turn leads there too, but may take thousands of rounds.
Where both a and q are next to nothing any s will nearly do, and the present one is kept.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from varlap.posterior import BNN

SMALLEST = 1e-9  # s of weights that are pruned, which would be zero
LARGEST = 100.0  # times what s or the means are: beyond it the data leave s open
SETTLED = 1e-3  # of s²: what setting σ² and s² in turn may still change
TOLERANCE = 1e-6  # of s², where it is searched for


@torch.no_grad()
def set_best_scales(bnn: BNN, curvature: Mapping[str, Tensor], num_data: float, beta: float) -> list[str]:
    """Set the scales of an empirical-Bayes prior, and name those that the data leave open, which stay.

    Where the curvature is negative there may be no best scale; then one is set with which some weights have no σ².

    >>> from torch import nn
    >>> from varlap.posterior import EmpiricalBayesPrior
    >>> bnn = BNN(nn.Linear(1, 1, bias=False), prior=EmpiricalBayesPrior())
    >>> _ = nn.init.constant_(bnn.network.weight, 1.0)
    >>> set_best_scales(bnn, {"weight": torch.tensor([[0.5]])}, 1, 1.0)
    []
    >>> round(bnn.prior_scale["weight"].item() ** 2, 4)  # which is 1 / (0.5 + 1/2) + 1
    2.0
    """
    pulls = {name: curvature[name].to(scale.dtype) * (num_data / beta) for name, scale in bnn.prior_scale.items()}
    spreads = {name: _spread(bnn, name) for name in pulls}
    most = {name: LARGEST**2 * max(spreads[name], scale.item() ** 2) for name, scale in bnn.prior_scale.items()}
    if len({id(log_sigma) for log_sigma in bnn.log_sigma.values()}) == len(pulls):
        best = {
            name: _best_square(pull, bnn.prior_scale[name].item() ** 2, spreads[name], most[name])
            for name, pull in pulls.items()
        }
    else:
        variance = _best_shared_variance(pulls, spreads, max(most.values()))
        best = {name: variance + spread for name, spread in spreads.items()}
    for name, square in best.items():
        if square < math.inf:
            bnn.prior_scale[name].fill_(math.sqrt(square))
    return [name for name, square in best.items() if square == math.inf]


def _spread(bnn: BNN, name: str) -> float:
    mean = bnn.means()[name]
    return (mean - bnn.prior_mean_of(name)).to(bnn.prior_scale[name].dtype).square().mean().item()


def _best_square(pull: Tensor, present: float, spread: float, most: float) -> float:
    """Return one tensor's s², each of whose weights has its own variance."""
    lowest = pull.min().item()

    def has_variances(square: float) -> bool:
        return 1 / square + lowest > 0

    def growth(square: float) -> float:
        """Return what setting σ² and then s² adds to s²."""
        return spread - square * (pull / (1 / square + pull)).mean().item()

    if has_variances(present) and abs(growth(present)) <= SETTLED * present:
        return present
    square = _first_not(lambda one: has_variances(one) and growth(one) > 0, max(spread, SMALLEST**2), most)
    return square if has_variances(square) else 2 * square  # clearly none, however it is rounded


def _best_shared_variance(pulls: Mapping[str, Tensor], spreads: Mapping[str, float], most: float) -> float:
    """Return the one σ² of all weights, the inverse mean of a + 1/s², where each tensor's s² is σ² + q."""
    num_weights = sum(pull.numel() for pull in pulls.values())
    pull = sum(pull.sum().item() for pull in pulls.values()) / num_weights
    parts = [(pulls[name].numel() / num_weights, spread) for name, spread in spreads.items()]

    def is_below(variance: float) -> bool:
        return pull * variance < sum(part * spread / (variance + spread) for part, spread in parts)

    return _first_not(is_below, SMALLEST**2, most)


def _first_not(is_below: Callable[[float], bool], start: float, most: float) -> float:
    """Return the first number from `start` on that is not below what is sought; infinity where none is up to `most`.

    >>> round(_first_not(lambda number: number**2 < 2, 0.1, 100.0), 4)
    1.4142
    """
    number, factor = start, 2.0
    while factor > 1 + TOLERANCE:
        if not is_below(number * factor):
            factor = math.sqrt(factor)
        elif number > most:
            return math.inf
        else:
            number *= factor
    return number * factor
