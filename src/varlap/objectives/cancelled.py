"""A warning about weights that batch norm cancels in training, as the bias in front of it: nothing holds their σ."""

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from varlap import tree
from varlap.errors import warn
from varlap.likelihoods.protocol import normal_like
from varlap.objectives.objective import Context, Gradients, prepared
from varlap.posterior.batch import is_divisible
from varlap.posterior.bnn import BNN, LOG_SIGMA_START
from varlap.predict.statistics import Layers, layers_with_statistics, moving

FEWEST_ITEMS, MOST_ITEMS = 4, 16  # batch norm of two has ±1 as its result, whatever the weights
OF_ANY_SIZE = 1e-5  # of the largest gradient; smaller ones may be rounding themselves
MOST_NAMES = 8

_inspected: "weakref.WeakSet[BNN]" = weakref.WeakSet()


def warn_about_cancelled(context: Context) -> None:
    """Look at each network once, by forward passes that leave no trace."""
    bnn, batch = context.bnn, context.batch
    if bnn in _inspected:
        return
    layers = [layer for layer in layers_with_statistics(bnn.network) if layer.training]
    if not layers or batch.size < FEWEST_ITEMS:  # perhaps another time
        return
    found = []
    with prepared(context), bnn.buffers_restored(), contextlib.suppress(Exception):  # the evaluation says it better
        found = _cancelled(context, layers)
    _inspected.add(bnn)
    if found:
        more = ["..."] if len(found) > MOST_NAMES else []
        names = ", ".join([*map(repr, found[:MOST_NAMES]), *more])
        warn(
            f"batch norm cancels in training: {names}. Nothing then holds the variances of these weights, which go to "
            "the prior's, and in evaluation mode they count again, so that draws of the weights may predict far worse "
            "than the mean network. Use bias=False in front of batch norm, or leave the weights out: "
            f"varlap.BNN(network, select=lambda name, parameter: name not in {{{names}}})"
        )


def _cancelled(context: Context, layers: Layers) -> list[str]:
    """Name the means of which the outputs depend with fixed statistics, and not with those of the batch itself.

    The statistics that are fixed are the batch's too, so that both gradients are of one size where nothing cancels.
    """
    bnn, batch = context.bnn, context.batch
    x = tree.take(batch.x, slice(0, MOST_ITEMS)) if is_divisible(batch.x, batch.size) else batch.x
    if all(bool((tensor == tensor[:1]).all()) for tensor in tree.tensors(x)):  # of equal items nothing is left
        return []
    with bnn.perturbed(_noise_of_the_start(context)):
        with moving(layers, momentum=1.0):
            with_own = _gradients(context, x)
        with _fixed(layers):
            with_fixed = _gradients(context, x)
    smallest = OF_ANY_SIZE * max(map(_size, with_fixed.values()))
    return [
        name
        for name, gradient in with_fixed.items()
        if _size(gradient) > smallest and _size(with_own[name]) < _to_rounding(gradient) * _size(gradient)
    ]


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


def _gradients(context: Context, x: object) -> Gradients:
    """Pull a random vector back to the means that enter."""
    bnn, generator = context.bnn, context.streams.generator("outputs", context.bnn.device)
    outputs = [tensor for tensor in tree.tensors(bnn.outputs(tree.copied(x))) if tensor.requires_grad]
    us = [normal_like(tensor.detach(), generator) for tensor in outputs]
    means = bnn.means()
    found = torch.autograd.grad(outputs, list(means.values()), us, allow_unused=True)
    return {name: gradient for name, gradient in zip(means, found, strict=True) if gradient is not None}


def _size(gradient: Tensor) -> float:
    return float(gradient.detach().double().square().mean().sqrt())
