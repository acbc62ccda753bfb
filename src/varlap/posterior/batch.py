"""One batch, checked: inputs, targets and weights that belong together."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from varlap import tree
from varlap.errors import BatchError, NonFiniteError

CLEAN = "clean the data or the transform that made it"


@dataclass(frozen=True)
class Batch:
    """Inputs x, targets y and, where given, a weight for each of the `size` items."""

    x: Any
    y: Any
    weights: Tensor | None
    size: int
    trusted: bool = False
    """whether the targets' values were checked before: a traced computation cannot look at them"""

    def take(self, items: Tensor) -> "Batch":
        """Return the batch of those items; it must be divisible."""
        return replace(self.take_targets(items), x=tree.take(self.x, items))

    def take_targets(self, items: Tensor) -> "Batch":
        """Return those items' targets and weights beside all of x, for outputs that are there already."""
        weights = None if self.weights is None else self.weights[items]
        return replace(self, y=tree.take(self.y, items), weights=weights, size=len(items))


def is_divisible(x: Any, num_items: int) -> bool:
    """Whether the inputs of a batch can be divided among its items: every tensor has a row for each.

    >>> is_divisible((torch.zeros(4, 2), torch.zeros(4)), 4), is_divisible((torch.zeros(4, 2), torch.zeros(9)), 4)
    (True, False)
    """
    return tree.leading_size(x) == num_items


def require_divisible(x: Any, num_items: int, *, purpose: str, instead: str) -> None:
    """Refuse to divide a batch among whose inputs is one that all items share: its rows are not theirs.

    >>> require_divisible(torch.zeros(4, 2), 4, purpose="accumulate=2", instead="use accumulate=1")
    """
    if is_divisible(x, num_items):
        return
    wrong = [
        f"{name} has shape {tuple(tensor.shape)}"
        for name, tensor in tree.named_tensors(x, "x")
        if not tensor.ndim or len(tensor) != num_items
    ]
    raise BatchError(
        f"{purpose} divides a batch of {num_items} items along the first dimension, but "
        f"{', '.join(wrong) or 'x holds no tensor'}; give it a row for each item, keep what items share in the network "
        f"(register_buffer), or {instead}"
    )


def checked_batch(x: Any, y: Any, weights: Tensor | None = None, *, num_data: int | None = None, step: int) -> Batch:
    """Make a batch of what the user passed to a step, or say what is wrong with it.

    >>> checked_batch(torch.zeros(4, 2), torch.zeros(4), None, num_data=100, step=0).size
    4
    """
    batch = shaped_batch(x, y, weights, num_data=num_data)
    named = [
        *tree.named_tensors(x, "x"),
        *tree.named_tensors(y, "y"),
        *tree.named_tensors(weights, "weights"),
    ]
    check_finite(named, step=step, advice=CLEAN)
    return batch


def shaped_batch(x: Any, y: Any, weights: Tensor | None = None, *, num_data: int | None = None) -> Batch:
    """Make a batch whose shapes fit, whatever its numbers are.

    >>> shaped_batch(torch.zeros(4, 2), torch.zeros(4)).size
    4
    """
    for name, value in (("x", x), ("y", y)):
        if hasattr(value, "__array__") and not isinstance(value, Tensor):
            raise BatchError(f"{name} is a {type(value).__name__}; give a tensor, such as torch.as_tensor({name})")
    size = tree.leading_size(y)
    if not size:
        raise BatchError(
            "the targets y need a first dimension of at least one item, the same for each of their tensors; got "
            + (", ".join(f"{n} {tuple(t.shape)}" for n, t in tree.named_tensors(y, "y")) or f"{type(y).__name__}")
        )
    if isinstance(x, Tensor) and (not x.ndim or x.shape[0] != size):
        raise BatchError(
            f"x has shape {tuple(x.shape)} but y has {size} items; their first dimensions must be the same"
        )
    if num_data is not None and size > num_data:
        raise BatchError(
            f"the batch has {size} items but num_data={num_data}; num_data is the size of the whole training set, "
            "for example VL(num_data=len(train_set))"
        )
    if weights is not None and not isinstance(weights, Tensor):
        raise BatchError(f"weights must be a tensor of shape ({size},), one per item, got {type(weights).__name__}")
    if weights is not None and weights.shape != (size,):
        raise BatchError(f"weights must have shape ({size},), one per item, got {tuple(weights.shape)}")
    if weights is not None and bool((weights < 0).any()):
        raise BatchError("weights must not be negative: their square root weighs each item's sampled gradient")
    if any(tensor.requires_grad for tensor in tree.tensors(y)):  # as of those drawn from a learnt noise
        y = tree.map_tensors(Tensor.detach, y)
    return Batch(x, y, weights, size)


def check_finite(named: list[tuple[str, Tensor]], *, step: int, advice: str) -> None:
    """Refuse NaN and infinities, naming the step and the first tensor that has one. One synchronisation."""
    if found := find_nonfinite(named):
        raise NonFiniteError(f"step {step}: {found}; nothing was changed; {advice}")


def find_nonfinite(named: list[tuple[str, Tensor]]) -> str | None:
    """Say which is the first tensor with a NaN or an infinity, if one has. One synchronisation.

    >>> find_nonfinite([("x", torch.zeros(2)), ("y", torch.tensor([0.0, torch.inf]))])
    'y holds Inf'
    """
    floating = [(name, tensor.detach()) for name, tensor in named if tensor.is_floating_point() and tensor.numel()]
    if not floating:
        return None
    first = floating[0][1]
    device = first.device
    # A sum is cheap and cannot hide them; that of large numbers may overflow, so a second look decides.
    if bool(torch.stack([tensor.sum().to(first) for _, tensor in floating]).isfinite().all()):
        return None
    sound = torch.stack([tensor.abs().amax().isfinite().to(device) for _, tensor in floating])
    if bool(sound.all()):
        return None
    name, tensor = floating[int((~sound).nonzero()[0])]
    kind = "NaN" if bool(tensor.isnan().any()) else "Inf"
    return f"{name} holds {kind}"
