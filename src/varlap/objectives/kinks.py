"""What has no second derivative: activations with a kink (paper, section 4.3), some backward passes."""

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from varlap import tree
from varlap.curvature.differentiable import twice_differentiable
from varlap.models import find_kinks
from varlap.objectives.first_look import first_items, listed, pulled_back
from varlap.objectives.objective import Context, Objective, prepared
from varlap.posterior.bnn import BNN
from varlap.posterior.network_check import refuse_compiled


def without_second_derivative(objective: Objective, context: Context) -> list[str]:
    """Warn of activations, functional calls included, and of backward passes."""
    bnn, warnings = context.bnn, []
    with prepared(context), bnn.buffers_restored():
        refuse_compiled(bnn.network)
        with _means_alone_differentiable(bnn):  # what no mean reaches needs no second derivative
            kinks = find_kinks(bnn.network, lambda: bnn.outputs(tree.copied(context.batch.x)))
        undifferentiable = _undifferentiable_gradients(context)
    if kinks:
        warnings.append(
            f"{type(objective).__name__} needs second derivatives, and the network has activations without one: "
            f"{listed(f'{kink.kind} at {kink.where}' for kink in kinks)}. The means' gradient then loses the "
            "activations' curvature (variances are unaffected). "
            "Before training, swap modules by network = varlap.smooth(network), and write functional calls as F.silu, "
            "F.gelu or F.softplus"
        )
    if undifferentiable:
        warnings.append(
            f"{type(objective).__name__} needs second derivatives, and a backward pass in the network has none, such "
            "as that of a once_differentiable function or of a kernel of its own. The means' gradient then loses the "
            f"curvature behind it, that of {listed(undifferentiable)} wholly. Write that backward pass in operations "
            "of torch"
        )
    return warnings


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


def _undifferentiable_gradients(context: Context) -> list[str]:
    """Name the means whose gradient Jᵀu autograd takes for independent of u: torch drops such parts without a word."""
    x = first_items(context, 2)  # batch norm needs two, and more would need the memory of a whole step
    with (
        contextlib.suppress(Exception),  # the evaluation itself says it better
        twice_differentiable(context.bnn.network, num_derivatives=1),
    ):
        gradients, us = pulled_back(context, x, create_graph=True)
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
