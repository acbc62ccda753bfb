"""Warnings about what has no second derivative: activations with a kink (paper, section 4.3), some backward passes."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from varlap import tree
from varlap.curvature.differentiable import twice_differentiable
from varlap.errors import warn
from varlap.likelihoods.protocol import normal_like
from varlap.models import find_kinks
from varlap.objectives.cancelled import warn_about_cancelled
from varlap.objectives.objective import Context, Objective, prepared
from varlap.posterior.batch import is_divisible
from varlap.posterior.bnn import BNN
from varlap.posterior.network_check import refuse_compiled

_inspected: "weakref.WeakSet[BNN]" = weakref.WeakSet()
MOST_NAMES = 8


def warn_about_kinks(objective: Objective, context: Context) -> None:
    """Look at each network once, functional calls included, by forward passes that leave no trace.

    Here also what batch norm cancels is named, which is bad for every objective with variances.
    """
    if context.bnn not in _inspected:
        _look(objective, context)
    warn_about_cancelled(context)


def _look(objective: Objective, context: Context) -> None:
    bnn = context.bnn
    with prepared(context), bnn.buffers_restored():
        refuse_compiled(bnn.network)
        with _means_alone_differentiable(bnn):  # what no mean reaches needs no second derivative
            kinks = find_kinks(bnn.network, lambda: bnn.outputs(tree.copied(context.batch.x)))
        undifferentiable = _undifferentiable_gradients(context)
    _inspected.add(bnn)  # only now: a batch that does not fit must not swallow the warning
    if kinks:
        warn(
            f"{type(objective).__name__} needs second derivatives, and the network has activations without one: "
            f"{_listed(f'{kink.kind} at {kink.where}' for kink in kinks)}. The means' gradient then loses the "
            "activations' curvature (variances are unaffected). "
            "Before training, swap modules by network = varlap.smooth(network), and write functional calls as F.silu, "
            "F.gelu or F.softplus"
        )
    if undifferentiable:
        warn(
            f"{type(objective).__name__} needs second derivatives, and a backward pass in the network has none, such "
            "as that of a once_differentiable function or of a kernel of its own. The means' gradient then loses the "
            f"curvature behind it, that of {_listed(undifferentiable)} wholly. Write that backward pass in operations "
            "of torch"
        )


@contextlib.contextmanager
def _means_alone_differentiable(bnn: BNN) -> Iterator[None]:
    others = list(bnn.point_estimates().values())
    try:
        for parameter in others:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _undifferentiable_gradients(context: Context) -> list[str]:
    """Name the means whose gradient Jᵀu autograd takes for independent of u: torch drops such parts without a word."""
    bnn, batch = context.bnn, context.batch
    # Batch norm needs two items, and more would need the memory of a whole step.
    x = tree.take(batch.x, slice(0, 2)) if is_divisible(batch.x, batch.size) else batch.x
    generator = context.streams.generator("outputs", bnn.device)
    with (
        contextlib.suppress(Exception),
        twice_differentiable(bnn.network, num_derivatives=1),
    ):  # the evaluation itself says it better
        outputs = [tensor for tensor in tree.tensors(bnn.outputs(tree.copied(x))) if tensor.requires_grad]
        us = [normal_like(tensor.detach(), generator).requires_grad_() for tensor in outputs]
        means = bnn.means()
        found = torch.autograd.grad(outputs, list(means.values()), us, create_graph=True, allow_unused=True)
        gradients = {name: g for name, g in zip(means, found, strict=True) if g is not None}
        dependent = _leading_to(us, gradients.values())
        return [name for name, g in gradients.items() if g.grad_fn not in dependent and bool(g.any())]
    return []


def _leading_to(leaves: Iterable[Tensor], results: Iterable[Tensor]) -> set[Node | None]:
    """Return the nodes of the results' graph from which some leaf is reached."""
    users: dict[Node, list[Node]] = {}
    seen: set[Node] = set()
    stack = [result.grad_fn for result in results if result.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for used, _ in node.next_functions:
            if used is not None:
                users.setdefault(used, []).append(node)
                stack.append(used)
    found: set[Node | None] = set()
    leading = [get_gradient_edge(leaf).node for leaf in leaves]
    while leading:
        node = leading.pop()
        if node not in found:
            found.add(node)
            leading += users.get(node, [])
    return found
