"""Running means: of the curvature, for variances in closed form, and of its gradient, for steps without curvature."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from varlap.errors import ConfigError

WEIGHT = "weight of the sums"
Updates = list[tuple[Tensor, Tensor]]


class RunningMean:
    """An exponential moving average of named tensors, free of the bias of starting at zero.

    `including` computes the mean with one more value without changing anything; the updates that it returns are
    written by `write`, once the step is known to be sound.

    >>> running = RunningMean(decay=0.9)
    >>> means, updates = running.including({"w": torch.tensor([2.0])})
    >>> write(updates)
    >>> means["w"], running.mean()["w"]
    (tensor([2.]), tensor([2.]))
    """

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(
                f"the decay of a running mean must be in [0, 1), got {decay}; 0.99 averages about 100 values"
            )
        self.decay = decay
        self.sums: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self.sums)

    def including(self, values: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Updates]:
        """Return the mean that includes these values, and the updates that make it the present one."""
        if not self.sums:
            self.sums = {name: torch.zeros_like(value) for name, value in values.items()}
            first = next(iter(values.values()))
            self.sums[WEIGHT] = torch.zeros((), dtype=torch.float64, device=first.device)
        new = {name: torch.lerp(self.sums[name], value, 1 - self.decay) for name, value in values.items()}
        new[WEIGHT] = self.decay * self.sums[WEIGHT] + (1 - self.decay)
        return _normalised(new), [(self.sums[name], tensor) for name, tensor in new.items()]

    def mean(self) -> dict[str, Tensor]:
        """Return the present mean."""
        return _normalised(self.sums)

    @contextlib.contextmanager
    def standing_in(self, tensors: dict[str, Tensor]) -> Iterator[None]:
        """Use other tensors for the sums, for as long as a computation is traced."""
        own, self.sums = self.sums, tensors
        try:
            yield
        finally:
            self.sums = own

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the sums."""
        return {name: tensor.clone() for name, tensor in self.sums.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state that `state_dict` returned."""
        if self.sums.keys() != state.keys():
            self.sums = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        write([(self.sums[name], tensor) for name, tensor in state.items()])  # a compiled step reads them in place


def _normalised(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: (total / sums[WEIGHT]).to(total.dtype) for name, total in sums.items() if name != WEIGHT}


@torch.no_grad()
def write(updates: Updates) -> None:
    """Put new values into their places."""
    for place, value in updates:
        place.copy_(value)
