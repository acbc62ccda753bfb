"""Where training batches come from: arrays on the device, a Dataset, or a loader, in an order that can be repeated."""

import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from varlap import tree
from varlap.data import as_batches, as_tensors, collate_fn, count_items
from varlap.data.batches import SHUFFLING, PairBatches, is_arrays, samplers_of
from varlap.errors import BatchError, ConfigError
from varlap.posterior.batch import require_divisible
from varlap.streams import Streams, derive_seed

log = logging.getLogger(__name__)

IN_ORDER = (BatchSampler, SequentialSampler, list, tuple)  # these give all items, and on every rank the same
NUM_FINGERPRINTED = 256  # items that tell one data set from another

Augmentation = Callable[[Tensor, torch.Generator], Tensor]
Weighted = tuple[Any, Any, Tensor | None]


class Source(Protocol):
    """Batches of an epoch, the same whenever they are asked for."""

    num_items: int
    steps_per_epoch: int

    @property
    def batch_size(self) -> int | None:
        """Items of all batches but a smaller last one, where that is known."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return what tells these data from others, as far as that is cheap."""
        ...

    def epoch(self, epoch: int, first: int) -> Iterator[Weighted]:
        """Yield an epoch's batches from number `first` on: inputs, targets and, where given, a weight for each item."""
        ...


def as_source(
    train: Any,
    *,
    batch_size: int,
    seed: int,
    device: torch.device,
    dtype: torch.dtype | None = None,
    num_workers: int = 0,
    share: slice = slice(None),
    weights: Tensor | None = None,
    resumable: bool = False,
) -> Source:
    """Choose how to read training data.

    Args:
        train: a tuple (x, y) of tensors or arrays, a map-style Dataset, or a DataLoader.
        batch_size: items a step; a DataLoader has its own.
        seed: of the order.
        device: where arrays are put, whole and once.
        dtype: of the weights, which numpy's floating-point numbers take.
        num_workers: processes that read a Dataset.
        share: which items of each batch this rank takes.
        weights: one for each item of a tuple (x, y).
        resumable: whether the run is kept, so that its order should be one that can be repeated.

    >>> source = as_source((torch.zeros(5, 2), torch.arange(5)), batch_size=2, seed=0, device=torch.device("cpu"))
    >>> source.steps_per_epoch, [len(y) for _, y, _ in source.epoch(0, first=1)]
    (3, [2, 1])
    """
    if is_arrays(train):
        x, y = as_tensors(train, dtype)
        return Arrays((x, y), batch_size, seed, device, share, _checked_weights(weights, y))
    if weights is not None:
        raise ConfigError(
            "fit(weights=...) goes with a tuple (x, y) of arrays, whose items it counts; for other data pass weights "
            "to the objective in a loop of your own: objective(bnn, x, y, weights=w)"
        )
    if isinstance(train, Dataset):
        count_items(train)  # refuses what has no length
        return _Items(train, batch_size, seed, num_workers, share, dtype)
    return _Loader(train, seed, share, resumable, dtype)


def _checked_weights(weights: Tensor | None, y: Any) -> Tensor | None:
    num_items = tree.leading_size(y) or 0
    if weights is not None and weights.shape != (num_items,):
        raise BatchError(f"fit(weights=...) must have shape ({num_items},), one per item, got {tuple(weights.shape)}")
    return weights


class Arrays:
    """Tensors on the device, in an order drawn for each epoch."""

    def __init__(
        self,
        pair: Any,
        batch_size: int,
        seed: int,
        device: torch.device,
        share: slice,
        weights: Tensor | None = None,
    ) -> None:
        self._x, self._y = (tree.to_device(part, device) for part in pair)
        self._weights = None if weights is None else weights.to(device)
        self.num_items = count_items((self._x, self._y))
        self.steps_per_epoch = -(-self.num_items // batch_size)
        self.num_items_of_last = self.num_items - batch_size * (self.steps_per_epoch - 1)
        self.batch_size = min(batch_size, self.num_items)
        self._seed, self._device, self._share = seed, device, share

    def first(self) -> Any:
        """Return the inputs of one item, as a batch."""
        return tree.take(self._x, slice(0, 1))

    def describe(self) -> dict[str, Any]:
        """Return the number of items and a hash of some of them."""
        some = torch.linspace(0, self.num_items - 1, min(self.num_items, NUM_FINGERPRINTED)).long().to(self._device)
        digest = hashlib.sha256()
        data = (self._x, self._y) if self._weights is None else (self._x, self._y, self._weights)
        for name, tensor in tree.named_tensors(data, "data"):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor[some].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return {"num_items": self.num_items, "fingerprint": digest.hexdigest()[:16]}

    @property
    def targets(self) -> Any:
        """All targets, in the order they were given."""
        return self._y

    def epoch(self, epoch: int, first: int) -> Iterator[Weighted]:
        """Yield an epoch's batches from number `first` on."""
        order = epoch_order(self.num_items, self._seed, epoch).to(self._device)
        for items in order.split(self.batch_size)[first:]:
            part = items[self._share]
            weights = None if self._weights is None else self._weights[part]
            yield tree.take(self._x, part), tree.take(self._y, part), weights


class _Items:
    """A map-style Dataset, read by torch's DataLoader in an order drawn for each epoch."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        seed: int,
        num_workers: int,
        share: slice,
        dtype: torch.dtype | None,
    ) -> None:
        self._dataset, self._seed, self._dtype = dataset, seed, dtype
        self._num_workers, self._share = num_workers, share
        self.num_items = len(dataset)
        self.steps_per_epoch = -(-self.num_items // batch_size)
        self.num_items_of_last = self.num_items - batch_size * (self.steps_per_epoch - 1)
        self.batch_size = min(batch_size, self.num_items)

    def describe(self) -> dict[str, Any]:
        return {"num_items": self.num_items, "data_set": type(self._dataset).__name__}

    def epoch(self, epoch: int, first: int) -> Iterator[Weighted]:
        batches = epoch_order(self.num_items, self._seed, epoch).split(self.batch_size)[first:]
        shares = [batch[self._share].tolist() for batch in batches]
        for share, (x, y) in zip(shares, self._read([share or [0] for share in shares], epoch, first), strict=True):
            pair = (x, y) if share else tree.take((x, y), slice(0, 0))  # a rank without items still takes part
            yield *pair, None

    def _read(self, batches: list[list[int]], epoch: int, first: int) -> Iterator[tuple[Any, Any]]:
        loader = DataLoader(
            self._dataset, batch_sampler=batches, num_workers=self._num_workers, collate_fn=collate_fn(self._dtype)
        )
        return iter(PairBatches(loader, seed=derive_seed(self._seed, epoch), first=first))


class _Loader:
    """A loader, or any other list of batches; what it draws in an epoch follows from the seed."""

    def __init__(self, loader: Any, seed: int, share: slice, resumable: bool, dtype: torch.dtype | None) -> None:
        batches: Any = as_batches(loader, 1, dtype)
        self.num_items = count_items(loader)
        self.batch_size: int | None = getattr(loader, "batch_size", None)
        try:
            self.steps_per_epoch = len(batches)
        except TypeError:
            self.steps_per_epoch = sum(1 for _ in batches)
        self._loader, self._seed, self._share, self._dtype = loader, seed, share, dtype
        self._samplers = samplers_of(loader)
        sampler = self._samplers[-1] if self._samplers else None
        choosing = [type(one).__name__ for one in self._samplers if type(one) not in IN_ORDER]
        if share != slice(None) and choosing:
            raise ConfigError(
                f"the loader's {choosing[0]} chooses the items of each rank, and fit shares batches out "
                "among the ranks by itself: some items would never be trained on; give fit the Dataset instead"
            )
        if isinstance(sampler, SHUFFLING):
            if resumable and sampler.generator is not None:
                log.warning(
                    "the DataLoader shuffles by a generator of its own, so a run that was stopped cannot be carried on "
                    "exactly: leave generator=... out, and fit's seed decides the order"
                )
        elif isinstance(sampler, SequentialSampler) and self.steps_per_epoch > 1:
            log.warning(
                "the DataLoader gives its items in the same order in every epoch; sorted ones train badly: give "
                "fit its Dataset, which fit shuffles, or use DataLoader(..., shuffle=True)"
            )

    def describe(self) -> dict[str, Any]:
        return {"num_items": self.num_items, "steps_per_epoch": self.steps_per_epoch}

    def epoch(self, epoch: int, first: int) -> Iterator[Weighted]:
        for sampler in self._samplers:
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)
        batches = as_batches(self._loader, 1, self._dtype, seed=derive_seed(self._seed, epoch))
        for index, (x, y) in enumerate(batches):
            if index < first:
                continue
            if self._share != slice(None):
                num_items = tree.leading_size(y) or 0
                require_divisible(x, num_items, purpose="training on several ranks", instead="train in one process")
                x, y = tree.take(x, self._share), tree.take(y, self._share)
            yield x, y, None


def epoch_order(num_items: int, seed: int, epoch: int) -> Tensor:
    """Return the numbers of the items in the order of an epoch.

    >>> epoch_order(4, seed=0, epoch=0).sort().values
    tensor([0, 1, 2, 3])
    """
    return torch.randperm(num_items, generator=Streams(seed, epoch).generator("order", "cpu"))
