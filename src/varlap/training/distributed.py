"""Data-parallel training: each rank evaluates its share of a batch, and one all-reduce a step averages the results."""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from varlap.errors import ConfigError
from varlap.posterior.bnn import BNN


@dataclass(frozen=True)
class World:
    """The ranks that train together.

    >>> World(rank=1, size=2, device=torch.device("cpu")).share
    slice(1, None, 2)
    """

    rank: int
    size: int
    device: torch.device

    @property
    def share(self) -> slice:
        """Which items of a batch are this rank's."""
        return slice(self.rank, None, self.size)

    def summed(
        self, tensors: Sequence[Tensor], weight: float, numbers: Sequence[float] = ()
    ) -> tuple[Sequence[Tensor], list[float]]:
        """Return the sum of each tensor over the ranks, weighted by its rank's weight, and of each number.

        All of it is one all-reduce.
        """
        widest = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        flat = torch.cat([tensor.detach().to(widest).flatten() for tensor in tensors]) * weight
        flat = torch.cat([flat, torch.tensor(numbers, dtype=widest, device=self.device)])
        dist.all_reduce(flat)
        *sums, further = flat.split([*(tensor.numel() for tensor in tensors), len(numbers)])
        return [total.view(tensor.shape) for total, tensor in zip(sums, tensors, strict=True)], further.tolist()

    def average(self, tensors: Sequence[Tensor], weight: float) -> None:
        """Replace tensors, in place, by their sum over the ranks, each weighted by its rank's; one all-reduce."""
        for tensor, averaged in zip(tensors, self.summed(tensors, weight)[0], strict=True):
            tensor.detach().copy_(averaged)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give every rank the first one's values."""
        for tensor in tensors:
            values = tensor.detach().contiguous()
            dist.broadcast(values, src=0)
            tensor.detach().copy_(values)

    def largest(self, number: float) -> float:
        """Return the largest of the ranks' numbers."""
        found = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.item()


def join_world(bnn: BNN) -> World | None:
    """Return the ranks that torchrun started, joined if they were not yet, or None for a process of its own.

    >>> join_world(BNN(torch.nn.Linear(1, 1))) is None
    True
    """
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return None
        dist.init_process_group("nccl" if bnn.device.type == "cuda" else "gloo")
    if bnn.device.type == "cuda" and bnn.device.index != torch.cuda.current_device():
        raise ConfigError(
            f"the network is on {bnn.device} but this rank's device is cuda:{torch.cuda.current_device()}; call "
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) first, and put the network there'
        )
    world = World(dist.get_rank(), dist.get_world_size(), bnn.device)
    return world if world.size > 1 else None
