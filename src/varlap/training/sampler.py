"""The order in which `fit` reads its items, for loaders of other training loops."""

from collections.abc import Iterator, Sized

import torch
from torch.utils.data.distributed import DistributedSampler

from varlap.errors import ConfigError
from varlap.training.source import epoch_order


class FitSampler(DistributedSampler[int]):
    """Shuffles as `varlap.fit(seed=...)` does: the order follows from the seed and the epoch.

    A run that is stopped after an epoch thus carries on exactly, without any random state in its checkpoint. Under
    torch.distributed each rank gets its share, by turns as in `fit`; where the items cannot be shared evenly, the first
    ones of the epoch come twice, as in torch's `DistributedSampler`. Lightning calls `set_epoch`. Not
    for accelerate, which shares batches out by itself: of a share it would share again.

    Args:
        data: the data set, or anything else of its length.
        seed: of the order; `fit`'s own.

    >>> sampler = FitSampler(range(5), seed=1)
    >>> first = list(sampler)
    >>> sampler.set_epoch(1)
    >>> sorted(first), list(sampler) == first
    ([0, 1, 2, 3, 4], False)
    """

    def __init__(self, data: Sized, seed: int = 0) -> None:
        if not len(data):
            raise ConfigError("FitSampler needs data with at least one item")
        super().__init__(data, num_replicas=1, rank=0, seed=seed)  # type: ignore[arg-type]  # only its length is read
        self._num_items = len(data)

    def __len__(self) -> int:
        return -(-self._num_items // _share()[1])

    def __iter__(self) -> Iterator[int]:
        rank, size = _share()
        order = epoch_order(self._num_items, self.seed, self.epoch)
        padded = order.repeat(size)[: len(self) * size]
        return iter(padded[rank::size].tolist())


def _share() -> tuple[int, int]:
    """Return this rank and how many there are, when it is asked: a loader is often made before the ranks meet."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
