"""Running means: of the curvature, for variances in closed form, and of its gradient, for steps without curvature."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from varlap.errors import ConfigError

WEIGHT = "weight of the sums"


class RunningMean:
    """An exponential moving average of named tensors, free of the bias of starting at zero.

    `including` computes the mean with one more value without changing anything; what it returns besides is written by
    `write`, once the step is known to be sound.

    >>> running = RunningMean(decay=0.9)
    >>> means, sums = running.including({"w": torch.tensor([2.0])})
    >>> bool(running)
    False
    >>> write([(running, sums)])
    >>> means["w"], running.mean()["w"]
    (tensor([2.]), tensor([2.]))
    """

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(
                f"the decay of a running mean (VL's fisher_decay, Fisher's memory) is {decay}; it must be "
                "in [0, 1), and 0.99 averages about 100 values"
            )
        self.decay = decay
        self.sums: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self.sums)

    def including(self, values: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the mean that includes these values, and the sums that make it the present one."""
        known = self.sums.keys() == {*values, WEIGHT}  # else a parameter was frozen or unfrozen: begin again
        old = self.sums if known else zero_sums(values)
        new = {name: torch.lerp(old[name].to(value), value, 1 - self.decay) for name, value in values.items()}
        new[WEIGHT] = self.decay * old[WEIGHT].to(next(iter(values.values())).device) + (1 - self.decay)
        return _normalised(new), new

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

    def move_to(self, device: torch.device) -> None:
        """Put the sums on the device of the network, if they were loaded from elsewhere."""
        if self.sums and self.sums[WEIGHT].device != device:
            self.sums = {name: tensor.to(device) for name, tensor in self.sums.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the sums."""
        return {name: tensor.clone() for name, tensor in self.sums.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state that `state_dict` returned."""
        write([(self, {n: t.to(self.sums[n]) if n in self.sums else t for n, t in state.items()})])


Updates = list[tuple[RunningMean, dict[str, Tensor]]]


def zero_sums(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return sums of nothing, for values of these shapes."""
    sums = {name: torch.zeros_like(value) for name, value in values.items() if name != WEIGHT}
    first = next(iter(sums.values()))
    sums[WEIGHT] = torch.zeros((), dtype=torch.promote_types(first.dtype, torch.float32), device=first.device)
    return sums


def _normalised(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: (total / sums[WEIGHT]).to(total.dtype) for name, total in sums.items() if name != WEIGHT}


@torch.no_grad()
def write(updates: Updates) -> None:
    """Make new sums the present ones, in place where there are some, since a compiled step reads them there."""
    for running, new in updates:
        old = running.sums
        if not new:
            running.sums = {}
            continue
        if old.keys() != new.keys() or any(
            (old[n].dtype, old[n].device) != (t.dtype, t.device) for n, t in new.items()
        ):
            running.sums = zero_sums(new)
        for name, tensor in new.items():
            running.sums[name].copy_(tensor)
