"""The small networks and data on which the peer libraries' diagonal Fishers were computed.

Nothing is drawn at random: every number comes from a sine, so every version of torch builds the same cases.
Shared by `make_peer_values.py`, which asks the peers, and by the tests, which compare with what they said.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """One network in evaluation mode (float64) with its likelihood and its data."""

    network: nn.Sequential
    likelihood: Literal["categorical", "gaussian"]  # gaussian: unit noise, log p = −½ Σ (y − f)² + const
    x: Tensor
    y: Tensor


def cases() -> dict[str, Case]:
    """Build all cases afresh, by name."""
    return {
        "mlp_classification": Case(
            network=_filled(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))),
            likelihood="categorical",
            x=2.0 * _wave((6, 3), offset=0.3),
            y=torch.arange(6) % 4,
        ),
        "mlp_regression": Case(
            network=_filled(nn.Sequential(nn.Linear(3, 5), nn.Softplus(), nn.Linear(5, 2))),
            likelihood="gaussian",
            x=2.0 * _wave((6, 3), offset=0.3),
            y=_wave((6, 2), offset=0.9),
        ),
        "convnet_classification": Case(
            network=_filled(
                nn.Sequential(
                    nn.Conv2d(1, 3, kernel_size=3, padding=1),
                    nn.BatchNorm2d(3),
                    nn.Softplus(),
                    nn.Flatten(),
                    nn.Linear(3 * 16, 3),
                )
            ),
            likelihood="categorical",
            x=2.0 * _wave((5, 1, 4, 4), offset=0.3),
            y=torch.arange(5) % 3,
        ),
    }


def _wave(shape: Sequence[int], offset: float) -> Tensor:
    """Fixed numbers between −½ and ½ that look irregular."""
    n = torch.Size(shape).numel()
    return (0.5 * torch.sin(1.7 * torch.arange(n, dtype=torch.float64) + offset)).reshape(tuple(shape))


def _filled(network: nn.Sequential) -> nn.Sequential:
    """Fill the parameters and batch norm statistics with waves, each with its own offset; evaluation mode."""
    network = network.double().eval()
    with torch.no_grad():
        for i, parameter in enumerate(network.parameters()):
            parameter.copy_(_wave(parameter.shape, offset=1.0 + 0.6 * i))
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight += 1.0
                module.running_mean = _wave((module.num_features,), offset=5.0)
                module.running_var = 1.0 + _wave((module.num_features,), offset=6.0)
    return network
