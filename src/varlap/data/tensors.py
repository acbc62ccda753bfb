"""Arrays as tensors, in the precision of the network that reads them."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from varlap import tree
from varlap.errors import BatchError

NUMBERS = "biufc"  # kinds of numpy's types that torch has too


def as_tensors(pair: Any, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """Turn a pair (x, y) of tensors or arrays into tensors; both may be dicts or tuples of them.

    Arrays of floating-point numbers take `dtype`, that of the weights (targets in at least single precision): numpy
    makes doubles whatever the network is made of. Tensors keep their own.

    >>> x, y = as_tensors((np.zeros((5, 2)), np.zeros(5)), torch.float32)
    >>> x.shape, x.dtype, y.shape
    (torch.Size([5, 2]), torch.float32, torch.Size([5]))
    """

    def converted(name: str, leaf: Any, wanted: torch.dtype | None) -> Tensor:
        if not is_array(leaf):
            raise BatchError(
                f"{name} is a {type(leaf).__name__}; give a tensor or an array, or a dict or tuple of them"
            )
        return _as_tensor(name, leaf, wanted)

    if isinstance(pair[0], list):  # more often numbers than a list of arrays
        raise BatchError("x is a list; give a tensor or an array, or a dict or tuple of them")
    return _converted_pair(pair, dtype, converted)


def inputs_as_tensors(x: Any, dtype: torch.dtype) -> Any:
    """Turn the arrays among a network's inputs into tensors, by the rule of `as_tensors`; what is no array stays.

    >>> inputs_as_tensors({"a": np.zeros(2), "flag": True}, torch.float32)
    {'a': tensor([0., 0.]), 'flag': True}
    """
    return tree.map_leaves(lambda name, leaf: _as_tensor(name, leaf, dtype) if is_array(leaf) else leaf, x, "x")


def batch_as_tensors(pair: Any, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """Turn the numbers that numpy holds in a batch into tensors, by the rule of `as_tensors`; all else stays.

    >>> batch_as_tensors((np.zeros(1), ["text"]), torch.float32)
    (tensor([0.]), ['text'])
    """

    def converted(name: str, leaf: Any, wanted: torch.dtype | None) -> Any:
        numbers = isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in NUMBERS
        return _as_tensor(name, leaf, wanted) if numbers else leaf

    return _converted_pair(pair, dtype, converted)


def collate_fn(dtype: torch.dtype | None) -> Callable[[list[Any]], Any]:
    """Return how the items of a Dataset become a batch: torch's way, after numpy's numbers became tensors.

    >>> collate_fn(torch.float32)([(np.zeros(1), 0), (np.ones(1), 1)])
    [tensor([[0.],
            [1.]]), tensor([0, 1])]
    """
    return functools.partial(_collated, dtype)  # which, unlike a closure, reaches workers that are spawned


def is_array(value: Any) -> bool:
    """Whether a value is a tensor or can be one.

    >>> is_array(np.zeros(1)), is_array([0.0])
    (True, False)
    """
    return isinstance(value, Tensor) or hasattr(value, "__array__")


def _collated(dtype: torch.dtype | None, items: list[Any]) -> Any:
    pairs = all(isinstance(item, tuple | list) and len(item) == 2 for item in items)  # others are refused later
    return default_collate([batch_as_tensors(item, dtype) for item in items] if pairs else items)


def _converted_pair(pair: Any, dtype: torch.dtype | None, fn: Callable[..., Any]) -> tuple[Any, Any]:
    x, y = pair
    # A likelihood compares targets with outputs, and need not do that in half precision.
    of_targets = None if dtype is None else torch.promote_types(dtype, torch.float32)
    return (
        tree.map_leaves(functools.partial(fn, wanted=dtype), x, "x"),
        tree.map_leaves(functools.partial(fn, wanted=of_targets), y, "y"),
    )


def _as_tensor(name: str, value: Any, dtype: torch.dtype | None) -> Tensor:
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value, order="C")
    try:
        # torch cannot mark a tensor read-only, so an array that is must be copied.
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    except TypeError as error:
        raise BatchError(f"{name} is an array of {array.dtype}; give numbers, such as float32 or int64") from error
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
