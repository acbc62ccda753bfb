"""The cache key of a compiled evaluation: all that was taken for granted when it was traced."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from varlap.objectives.objective import Objective
from varlap.posterior.bnn import BNN

SIMPLE = (bool, int, float, str, type(None))
INPUTS = {"beta", "seed", "beta_warmup_steps", "num_calls", "last_step", "compiled", "gradient_scale"}
"""what an objective may change without another trace: β and the seed are inputs of the graph"""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}  # torch's own bookkeeping


def situation(objective: Objective, bnn: BNN, step: int) -> Hashable:
    """Return a key that changes with all that a traced evaluation has taken for granted.

    That is whether this step has curvature; what is remembered; the objective's settings; autocast; which modules,
    parameters and buffers there are, and which of them are trained; and every other attribute of the modules, the
    likelihood and the prior: numbers, words and switches (`training`, a dropout's `p`) by value, other things by
    identity. Who keeps a key must keep those things too (`kept_alive`), so that no other can take their identity.

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
    running = objective.running_means().values()
    remembered = tuple(id(total) for mean in running for total in mean.sums.values())
    kind = bnn.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    settings = tuple(_frozen(v) for n, v in vars(objective).items() if n[0] != "_" and n not in INPUTS)
    return with_curvature, remembered, autocast, settings, _parts(bnn)


def shape_of(x: Any, y: Any, weights: Any) -> Hashable:
    """Return what has to be the same in two batches for one compiled evaluation to serve both."""
    return tuple(_form(part) for part in (x, y, weights))


def is_ready(objective: Objective) -> bool:
    """Whether all that the objective remembers exists: a graph writes into tensors that are there."""
    return all(objective.running_means().values())


def runs_own_code(bnn: BNN) -> bool:
    """Whether a user's function is called with modules or gradients: a compiled evaluation would not call it again."""
    return (
        any(getattr(torch_module, kind) for kind in GLOBAL_HOOKS)
        or any("forward" in vars(m) or any(getattr(m, kind) for kind in HOOKS) for m in bnn.network.modules())
        or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in bnn.parameters())
    )


def kept_alive(objective: Objective, bnn: BNN) -> list[Any]:
    """Return all things whose identity is part of a key."""
    things: list[Any] = [dict(vars(holder)) for holder in (objective, bnn.prior, bnn.likelihood, *bnn.modules())]
    things += [*bnn.modules(), *bnn.parameters(), *bnn.buffers()]
    return things + [dict(mean.sums) for mean in objective.running_means().values()]


def _parts(bnn: BNN) -> Hashable:
    """List modules, their tensors and other attributes in one quick walk, since every step takes it.

    Of what mirrors the network, log σ, s and the prior's mean, the tensors are enough.
    """
    parts: list[Hashable] = []
    likelihood = bnn.likelihood.modules() if isinstance(bnn.likelihood, nn.Module) else ()
    for module in (bnn, *bnn.network.modules(), *likelihood):
        attributes = module.__dict__
        parts.append(id(module))
        parts.append(type(module))
        for tensors in (attributes["_parameters"], attributes["_buffers"]):
            parts += _identities(tensors)
        for name in attributes.keys() - OF_EVERY_MODULE:
            value = attributes[name]
            parts.append(value if type(value) in SIMPLE else _frozen(value))
    for mirrored in (bnn.log_sigma, bnn.prior_scale, bnn.prior_mean):
        parts += _identities(mirrored)
    for holder in (bnn.prior, bnn.likelihood):
        if not isinstance(holder, nn.Module):
            parts += [v if type(v) in SIMPLE else _frozen(v) for v in getattr(holder, "__dict__", {}).values()]
    return tuple(parts)


def _identities(tensors: Mapping[str, Tensor | None]) -> list[Hashable]:
    found: list[Hashable] = []
    for tensor in tensors.values():
        if tensor is not None:
            found += (id(tensor), tensor.data_ptr(), tensor.requires_grad)
    return found


def _frozen(value: Any) -> Hashable:
    if type(value) in SIMPLE:
        return value
    if isinstance(value, tuple | list):
        return type(value), tuple(_frozen(entry) for entry in value)
    if isinstance(value, Mapping):
        return tuple((_frozen(key), _frozen(entry)) for key, entry in value.items())
    return type(value), id(value)


def _form(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.stride(), value.device
    if isinstance(value, tuple | list):
        return type(value), tuple(_form(entry) for entry in value)
    if isinstance(value, Mapping):
        return tuple((_frozen(key), _form(entry)) for key, entry in value.items())
    return _frozen(value)
