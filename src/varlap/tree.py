"""Tensors in nested dicts, lists and tuples: what networks take and return."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree, depth first.

    >>> len(list(tensors({"a": torch.zeros(2), "b": (torch.ones(1), "text")})))
    2
    """
    for _, tensor in named_tensors(tree, ""):
        yield tensor


def named_tensors(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tree with the expression that reaches each, for messages.

    >>> [name for name, _ in named_tensors({"a": (torch.zeros(2), torch.ones(1))}, "x")]
    ["x['a'][0]", "x['a'][1]"]
    """
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, f"{name}[{key!r}]")
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from named_tensors(value, f"{name}[{index}]")


def map_leaves(fn: Callable[[str, Any], Any], tree: Any, name: str) -> Any:
    """Apply a function to the name and value of each leaf, tensor or not, and keep the structure.

    >>> map_leaves(lambda name, leaf: f"{name} is {leaf}", {"a": (1, None)}, "x")
    {'a': ("x['a'][0] is 1", "x['a'][1] is None")}
    """
    if isinstance(tree, Mapping):
        return {key: map_leaves(fn, value, f"{name}[{key!r}]") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = (map_leaves(fn, value, f"{name}[{index}]") for index, value in enumerate(tree))
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return fn(name, tree)


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to each tensor and keep the structure; what is no tensor stays as it is.

    >>> map_tensors(lambda t: t.shape[0], {"a": torch.zeros(2), "b": "text"})
    {'a': 2, 'b': 'text'}
    """
    return map_leaves(lambda _, leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, tree, "")


def copied(tree: Any) -> Any:
    """Return copies of the tensors without their history, for a network that may work in place.

    >>> x = torch.ones(1)
    >>> copied((x,))[0].mul_(2), x
    (tensor([2.]), tensor([1.]))
    """
    return map_tensors(lambda tensor: tensor.detach().clone(), tree)


def leading_size(tree: Any) -> int | None:
    """Return the length that all tensors of a tree share in their first dimension, or None.

    >>> leading_size((torch.zeros(4, 2), torch.zeros(4)))
    4
    >>> leading_size((torch.zeros(4, 2), torch.zeros(3))) is None
    True
    """
    sizes = {tensor.shape[0] if tensor.ndim else None for tensor in tensors(tree)}
    return sizes.pop() if len(sizes) == 1 else None


def take(tree: Any, items: Tensor | slice) -> Any:
    """Index the first dimension of every tensor.

    >>> take({"a": torch.arange(4)}, slice(1, 3))
    {'a': tensor([1, 2])}
    """
    return map_tensors(lambda tensor: tensor[items], tree)


def concatenate(trees: Sequence[Any]) -> Any:
    """Join the tensors of trees of one structure along their first dimension.

    >>> concatenate([{"a": torch.zeros(2)}, {"a": torch.ones(1)}])
    {'a': tensor([0., 0., 1.])}
    """
    parts = [iter(list(tensors(tree))) for tree in trees]
    return map_tensors(lambda _: torch.cat([next(part) for part in parts]), trees[0])


def at_least_single(tree: Any) -> Any:
    """Return floating-point tensors in at least single precision; others stay as they are.

    >>> at_least_single([torch.zeros(1, dtype=torch.bfloat16)])
    [tensor([0.])]
    """

    def widened(tensor: Tensor) -> Tensor:
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32)) if tensor.is_floating_point() else tensor

    return map_tensors(widened, tree)


def to_device(tree: Any, device: torch.device) -> Any:
    """Move every tensor of a tree to a device."""
    return map_tensors(lambda tensor: tensor.to(device), tree)
