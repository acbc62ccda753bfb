"""A small run, and ways to stop it, for the claims about `fit`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import varlap

VOLATILE = {"seconds", "memory_mb"}
SETTINGS: dict[str, Any] = {"epochs": 4, "batch_size": 8, "lr": 1e-2, "progress": "none"}


class Stopped(Exception):
    pass


def made_data(num_items: int = 37) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_items, 4, generator=generator), torch.arange(num_items) % 3


def made_bnn() -> varlap.BNN:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Softplus(), nn.Dropout(0.1), nn.Linear(8, 3)
    return varlap.BNN(nn.Sequential(*layers))


def made_objective(**options: Any) -> varlap.VL:
    return varlap.VL(37, 0.1, **options)


def noise(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x + 0.1 * torch.randn(x.shape, generator=generator, device=x.device)


def at_step(step: int, do: Callable[[torch.Tensor], Any]) -> Callable[..., torch.Tensor]:
    """An augmentation that does something in one step."""
    calls: list[int] = []

    def augment(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        x = noise(x, generator)
        calls.extend([0] * (len(x) > 1))  # before the first step, one item is tried
        if len(x) > 1 and len(calls) == step + 1:
            do(x)
        return x

    augment.__qualname__ = noise.__qualname__  # to the run's spec it is the same function
    return augment


def stop(_: torch.Tensor) -> None:
    raise Stopped


def fit_small(bnn: varlap.BNN, augment: Any = noise, objective: Any = None, **settings: Any) -> varlap.History:
    x, y = made_data()
    data = x.to(bnn.dtype), y
    return varlap.fit(bnn, objective or made_objective(), data, augment=augment, **(SETTINGS | settings))


def rows_of(history: varlap.History) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if key not in VOLATILE} for row in history.epochs]


def same_bits(one: varlap.BNN, other: varlap.BNN) -> bool:
    states = one.state_dict(), other.state_dict()
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])
