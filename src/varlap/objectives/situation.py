"""What a compiled evaluation depends on besides its batch: a change calls for another one."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from varlap import tree
from varlap.objectives.objective import Objective
from varlap.posterior.bnn import BNN

SIMPLE = (bool, int, float, str, type(None))


def situation(objective: Objective, bnn: BNN, step: int) -> Hashable:
    """Return a key that changes with all that a traced evaluation has taken for granted.

    That is whether this step has curvature, and something remembered; the numbers, words and switches among the
    modules' attributes (`training`, a dropout's `p`); autocast; which tensors the parameters and buffers are, and
    which of them are trained.

    >>> import torch, varlap
    >>> objective = varlap.VL(num_data=10)
    >>> bnn = varlap.BNN(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.1)))
    >>> before = situation(objective, bnn, step=0)
    >>> bnn.network[1].p = 0.2
    >>> situation(objective, bnn, step=0) == before
    False
    """
    curvature = getattr(objective, "curvature", None)
    with_curvature = curvature is not None and bool(curvature.weight(step))
    remembered = tuple(map(bool, objective.running_means().values()))
    kind = bnn.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return with_curvature, with_curvature or remembered, curvature, autocast, _parts(bnn)


def shape_of(x: Any, y: Any, weights: Any) -> Hashable:
    """Return what has to be the same in two batches for one compiled evaluation to serve both."""
    return tuple((name, t.shape, t.dtype, t.stride()) for name, t in tree.named_tensors((x, y, weights), "batch"))


def has_hooks(network: nn.Module) -> bool:
    """Whether a user's function is called with the modules: a compiled evaluation would not call it again."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for module in network.modules() for kind in kinds)


def _parts(bnn: BNN) -> Hashable:
    """List simple attributes and tensors in one walk over the modules, since every step takes it."""
    parts: list[Hashable] = []
    for module in bnn.modules():
        attributes = vars(module)
        parts += [value for value in attributes.values() if type(value) in SIMPLE]
        for tensors in (attributes["_parameters"], attributes["_buffers"]):
            parts += [(id(t), t.data_ptr(), t.requires_grad) for t in tensors.values() if t is not None]
    return tuple(parts)
