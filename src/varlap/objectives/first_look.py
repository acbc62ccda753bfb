"""What a network is looked at for once, before it is trained, by passes that leave no trace."""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from varlap import tree
from varlap.errors import warn
from varlap.likelihoods.protocol import normal_like
from varlap.objectives.objective import Context, Gradients, Objective
from varlap.posterior.batch import is_divisible
from varlap.posterior.bnn import BNN

Look = Callable[[Objective, Context], list[str] | None]
"""returns warnings, or None where it had nothing to go by and should be asked again"""
MOST_NAMES = 8

_done: "weakref.WeakKeyDictionary[BNN, set[Look]]" = weakref.WeakKeyDictionary()


def first_look(objective: Objective, context: Context, *looks: Look) -> None:
    """Warn of what these looks find, each once for a network."""
    done = _done.setdefault(context.bnn, set())
    for look in looks:
        found = None if look in done else look(objective, context)
        if found is not None:
            done.add(look)  # only now: a batch that does not fit must not swallow the warning
            for message in found:
                warn(message)


def listed(names: Iterable[str]) -> str:
    """Join the names, the first ones of many.

    >>> listed("abcdefghijk")
    'a, b, c, d, e, f, g, h and 3 more'
    """
    names = list(names)
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def first_items(context: Context, number: int) -> object:
    """Return the inputs of so many items, or all where they cannot be told apart."""
    batch = context.batch
    return tree.take(batch.x, slice(0, number)) if is_divisible(batch.x, batch.size) else batch.x


def pulled_back(context: Context, x: object, *, create_graph: bool = False) -> tuple[Gradients, list[Tensor]]:
    """Pull random vectors u at the outputs back to the means that enter: Jᵀu, and u."""
    bnn, generator = context.bnn, context.streams.generator("outputs", context.bnn.device)
    outputs = [tensor for tensor in tree.tensors(bnn.outputs(tree.copied(x))) if tensor.requires_grad]
    us = [normal_like(tensor.detach(), generator).requires_grad_(create_graph) for tensor in outputs]
    means = bnn.means()
    found = torch.autograd.grad(outputs, list(means.values()), us, create_graph=create_graph, allow_unused=True)
    return {name: gradient for name, gradient in zip(means, found, strict=True) if gradient is not None}, us
