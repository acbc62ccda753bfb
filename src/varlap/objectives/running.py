"""A running mean of the curvature, from which closed-form variances are made."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from varlap.errors import ConfigError


class RunningCurvature:
    """An exponential moving average of f, corrected for its start at zero.

    >>> running = RunningCurvature(decay=0.9)
    >>> running.add({"w": torch.tensor([2.0])})
    >>> running.mean()["w"]
    tensor([2.])
    """

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"fisher_decay={decay} must be in [0, 1); 0.99 averages over about 100 steps")
        self.decay = decay
        self.count = 0
        self.beta = 1.0
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, diagonal: Mapping[str, Tensor]) -> None:
        """Take in one estimate; its weight in a schedule that skips steps never enters."""
        self.count += 1
        for name, f in diagonal.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(f)
            self._sums[name].lerp_(f, 1 - self.decay)

    def mean(self) -> dict[str, Tensor]:
        """Return the average, free of the bias of starting at zero."""
        correction = 1 - self.decay**self.count
        return {name: total / correction for name, total in self._sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return count, β and sums."""
        return {"count": self.count, "beta": self.beta, "sums": dict(self._sums)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state that `state_dict` returned."""
        self.count, self.beta = int(state["count"]), float(state["beta"])
        self._sums = {name: tensor.clone() for name, tensor in state["sums"].items()}
