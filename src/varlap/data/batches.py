"""One way to read batches, whatever the data come as: arrays, a Dataset, or a loader."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from varlap import tree
from varlap.data.tensors import as_tensors, batch_as_tensors, collate_fn, is_array
from varlap.errors import BatchError, ConfigError
from varlap.streams import Streams

SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)  # samplers that mix the items
_FORMS = "a tuple (x, y) of tensors or arrays, a map-style Dataset, a DataLoader, or a list of batches (x, y)"


def as_batches(
    data: Any, batch_size: int, dtype: torch.dtype | None = None, *, seed: int = 0
) -> Iterable[tuple[Any, Any]]:
    """Give the batches (x, y) of the data, in order; they can be read as often as needed.

    Loaders and Datasets draw from torch's global generator of the CPU, for a shuffled order or a random transform.
    While they are read it holds numbers of the seed, the same in each pass, and the caller's are put back.

    Args:
        data: a tuple (x, y) of tensors or arrays, or of dicts or tuples of them (two tuples are two batches); a
            map-style torch Dataset; or a DataLoader or any other re-iterable of batches, which is used as it is.
        batch_size: items in a batch of arrays or of a Dataset; the last batch may have fewer.
        dtype: of the weights, which numpy's floating-point numbers take, as in `as_tensors`; by default they keep
            their own.
        seed: of what a loader or a Dataset draws; a loader's own generator is not touched.

    >>> x, y = torch.zeros(5, 2), torch.arange(5)
    >>> [len(y) for x, y in as_batches((x, y), 2)]
    [2, 2, 1]
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"as_batches: batch_size is {batch_size!r}; give a whole number of at least 1")
    _check_form(data)
    if is_arrays(data):
        x, y = as_tensors(data, dtype)
        return _ArrayBatches(x, y, _count_arrays(x, y), batch_size)
    if isinstance(data, Dataset):
        data = DataLoader(data, batch_size=batch_size, collate_fn=collate_fn(dtype))
    return PairBatches(data, dtype, seed)


def count_items(data: Any) -> int:
    """Count the items of the data: N of the ELBO, for any form that `as_batches` takes.

    A DataLoader counts its whole data set, whatever it drops or leaves to other ranks, except that a
    SubsetRandomSampler counts its subset. Batches of unknown number are read once and counted.

    >>> count_items((torch.zeros(5, 2), torch.zeros(5)))
    5
    """
    num_items = _count(data)
    if num_items == 0:
        raise BatchError("the data hold no items; give at least one")
    return num_items


def _count(data: Any) -> int:
    _check_form(data)
    if is_arrays(data):
        return _count_arrays(*as_tensors(data))
    if isinstance(data, DataLoader):
        innermost = samplers_of(data)[-1:]
        if innermost and isinstance(innermost[0], SubsetRandomSampler):
            return len(innermost[0])
        data_set: Any = data.dataset
        if hasattr(data_set, "__len__"):
            return len(data_set)
    if isinstance(data, Dataset):
        return len(data)  # pyright: ignore[reportArgumentType]  (_check_form has seen its __len__)
    return sum(_batch_length(x, y) for x, y in PairBatches(data))


class _ArrayBatches:
    """Slices of arrays, in order."""

    def __init__(self, x: Any, y: Any, num_items: int, batch_size: int) -> None:
        self._x, self._y, self._num_items, self._batch_size = x, y, num_items, batch_size

    def __len__(self) -> int:
        return -(-self._num_items // self._batch_size)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for start in range(0, self._num_items, self._batch_size):
            part = slice(start, start + self._batch_size)
            yield tree.take(self._x, part), tree.take(self._y, part)


class PairBatches:
    """The batches of a loader, each checked to be a pair; those before `first` are not among them.

    >>> [len(y) for x, y in PairBatches([(torch.zeros(3, 2), torch.arange(3))])]
    [3]
    """

    def __init__(self, source: Iterable[Any], dtype: torch.dtype | None = None, seed: int = 0, first: int = 0) -> None:
        self._source, self._dtype, self._seed, self._first = source, dtype, seed, first

    def __len__(self) -> int:
        return len(self._source)  # pyright: ignore[reportArgumentType]  (a source without length says so)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for index, batch in enumerate(read(self._source, self._seed, self._first), self._first):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
                raise BatchError(
                    f"batch {index} is a {type(batch).__name__}{size}, not a pair (x, y); have the data set "
                    "or the loader's collate_fn return (x, y), where both may be dicts or tuples"
                )
            yield batch_as_tensors(batch, self._dtype)


def read(source: Iterable[Any], seed: int = 0, first: int = 0) -> Iterator[Any]:
    """Yield a source's batches, each read among numbers of its own, and leave the global generator as it is.

    A source that leaves out the batches before number `first` gives the others the numbers that they would have had.

    >>> list(read(DataLoader([1, 2, 3], batch_size=2)))
    [tensor([1, 2]), tensor([3])]
    """
    end = object()
    with Streams(seed, 0).around_loader():
        iterator = iter(source)
    for number in itertools.count(first + 1):
        with Streams(seed, number).around_loader():  # between two batches the generator is the caller's
            batch = next(iterator, end)
        if batch is end:
            return
        yield batch


def _check_form(data: Any) -> None:
    kind = type(data).__name__
    if hasattr(data, "__next__"):
        raise BatchError(
            f"data is a {kind}, which can be read only once, but it is needed again every epoch; "
            f"give list(...) of it, or {_FORMS}"
        )
    if isinstance(data, IterableDataset):
        raise BatchError(f"data is the IterableDataset {kind}; wrap it in a DataLoader that makes its batches")
    if isinstance(data, Dataset) and not hasattr(data, "__len__"):
        raise BatchError(f"data is the Dataset {kind} without __len__; add it, or give {_FORMS}")
    if isinstance(data, Tensor | np.ndarray | Mapping | str) or not (
        isinstance(data, Dataset) or hasattr(data, "__iter__")
    ):
        raise BatchError(f"data is a {kind}; give {_FORMS}")


def samplers_of(loader: Any) -> list[Any]:
    """Return what a loader takes the numbers of its items from, the innermost last.

    >>> [type(sampler).__name__ for sampler in samplers_of(DataLoader([1, 2, 3], shuffle=True))]
    ['BatchSampler', 'RandomSampler']
    """
    if isinstance(getattr(loader, "dataset", None), IterableDataset) or not hasattr(loader, "sampler"):
        return []
    batches = getattr(loader, "batch_sampler", None)
    found: list[Any] = [loader.sampler if batches is None else batches]
    while (inner := getattr(found[-1], "sampler", None)) is not None:
        found.append(inner)
    return found


def is_arrays(data: Any) -> bool:
    """Whether data are a pair (x, y) of arrays, or of dicts or tuples of them; pairs, or dicts in a list, are batches.

    >>> x, y = torch.zeros(5, 2), torch.zeros(5)
    >>> is_arrays((x, y)), is_arrays((x, (y, y))), is_arrays(({"a": x}, {"b": y})), is_arrays([(x, y), (x, y)])
    (True, True, True, False)
    """
    if not isinstance(data, tuple | list) or len(data) != 2:
        return False
    x, y = data
    return is_array(y) or (
        isinstance(data, tuple) and (is_array(x) or isinstance(x, Mapping) or isinstance(y, Mapping))
    )


def _count_arrays(x: Any, y: Any) -> int:
    lengths = {
        name: len(leaf) if leaf.dim() else None
        for name, leaf in (*tree.named_tensors(x, "x"), *tree.named_tensors(y, "y"))
    }
    for name, length in lengths.items():
        if length is None:
            raise BatchError(f"{name} has no dimensions; the first one must count the items")
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise BatchError(f"x and y must have as many items as each other, but {listed}")
    num_items = next(iter(lengths.values()), None) or 0
    if num_items == 0:
        raise BatchError("the data hold no items; give at least one")
    return num_items


def _batch_length(x: Any, y: Any) -> int:
    for leaf in tree.tensors((y, x)):  # the targets first: among the inputs may be one that all items share
        if leaf.ndim:
            return len(leaf)
    raise BatchError("a batch holds no tensor whose first dimension counts its items; give num_data yourself")
