"""Biases that batch norm cancels in training, since they are in front of it: nothing holds their σ."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from varlap import tree
from varlap.objectives.first_look import first_items, listed, pulled_back
from varlap.objectives.objective import Context, Gradients, Objective, prepared
from varlap.posterior.bnn import LOG_SIGMA_START
from varlap.predict.collapse import note_cancelled
from varlap.predict.statistics import Layers, layers_with_statistics, moving

FEWEST_ITEMS, MOST_ITEMS = 4, 16  # batch norm of two has ±1 as its result, whatever the weights
OF_ANY_SIZE = 1e-5  # of the largest gradient; smaller ones may be rounding themselves


def cancelled(objective: Objective, context: Context) -> list[str] | None:  # noqa: ARG001
    """Warn of vectors that batch norm cancels, which is bad for every objective that learns variances."""
    bnn, found = context.bnn, []
    if not bnn.network.training or context.batch.size < FEWEST_ITEMS:
        return None
    layers = [layer for layer in layers_with_statistics(bnn.network) if layer.training]
    if layers:
        with prepared(context), bnn.buffers_restored(), contextlib.suppress(Exception):  # the evaluation says it better
            found = _cancelled(context, layers)
    if not found:
        return []
    names = listed(map(repr, found))
    note_cancelled(bnn, names)  # prediction tells of it again
    return [
        f"batch norm cancels in training: {names}. Nothing then holds the variances of these weights, which go to "
        "the prior's, and in evaluation mode they count again, so that draws of the weights may predict far worse "
        "than the mean network. Use bias=False in front of batch norm, or leave the weights out: "
        f"varlap.BNN(network, select=lambda name, parameter: name not in {{{names}}})"
    ]


def _cancelled(context: Context, layers: Layers) -> list[str]:
    """Name the vectors of which the outputs depend with fixed statistics, and not with those of the batch itself.

    The statistics that are fixed are the batch's too, so that both gradients are of one size where nothing cancels.
    Rows of a matrix or of an embedding may be cancelled in these items alone, so that only vectors are named.
    """
    x, means = first_items(context, MOST_ITEMS), context.bnn.means()
    with context.bnn.perturbed(_noise_of_the_start(context)):
        with moving(layers, momentum=1.0):
            with_own, _ = pulled_back(context, x)
        with _fixed(layers):
            with_fixed, _ = pulled_back(context, x)
        smallest = OF_ANY_SIZE * max(map(_size, with_fixed.values()))
        found = [
            name
            for name, gradient in with_fixed.items()
            if means[name].ndim == 1
            and _size(gradient) > smallest
            and _size(with_own[name]) < _to_rounding(gradient) * _size(gradient)
        ]
        return _seeing_different_items(context, x, found) if found else []


def _seeing_different_items(context: Context, x: object, names: list[str]) -> list[str]:
    """Keep the names whose module has inputs that differ: what is made of a constant is cancelled wherever it is."""
    network, seeing = context.bnn.network, set()

    def see(module: nn.Module, args: object, kwargs: object) -> None:
        if any(bool((tensor != tensor[:1]).any()) for tensor in tree.tensors((args, kwargs)) if tensor.ndim):
            seeing.add(module)

    modules = {name: network.get_submodule(name.rpartition(".")[0]) for name in names}
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for module in modules.values():
            hooks.callback(module.register_forward_pre_hook(see, with_kwargs=True).remove)
        context.bnn.outputs(tree.copied(x))
    return [name for name, module in modules.items() if module in seeing]


def _noise_of_the_start(context: Context) -> Gradients:
    """Draw ε for weights a little off the means: where a scale or a last layer is zero, no gradient arrives.

    As wide as σ is at the start: present ones may be so wide that a draw saturates all units.
    """
    bnn = context.bnn
    noise = bnn.draw_noise(context.streams.generator("weights", bnn.device))
    narrowing = {name: bnn.prior_scale[name].log() + LOG_SIGMA_START - bnn.log_sigma[name].detach() for name in noise}
    return {name: epsilon * narrowing[name].exp() for name, epsilon in noise.items()}


def _to_rounding(gradient: Tensor) -> float:
    return min(torch.finfo(gradient.dtype).eps ** 0.5, 1e-3)


@contextlib.contextmanager
def _fixed(layers: Layers) -> Iterator[None]:
    """Let these layers, which are in training mode, normalise as in evaluation mode."""
    try:
        for layer in layers:
            layer.training = False
        yield
    finally:
        for layer in layers:
            layer.training = True


def _size(gradient: Tensor) -> float:
    return float(gradient.detach().double().square().mean().sqrt())
