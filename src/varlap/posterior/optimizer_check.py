"""A warning for optimizers that log σ does not get far by: at the learning rate of the means, by SGD, or decayed."""

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from varlap.errors import warn

if TYPE_CHECKING:
    from varlap.posterior.bnn import BNN

NOT_ADAPTIVE = (torch.optim.SGD, torch.optim.ASGD)

_watched: "weakref.WeakSet[BNN]" = weakref.WeakSet()
_seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def watch_optimizers(bnn: "BNN") -> None:
    """Look once at each optimizer that steps, and warn if log σ does not get far by it."""
    _watched.add(bnn)
    _install_hook()


@functools.cache
def _install_hook() -> None:
    register_optimizer_step_pre_hook(_check_groups)


def _check_groups(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    if optimizer in _seen:
        return
    for bnn in list(_watched):
        # Without a gradient log σ is not trained here at all: MAP, or variances in closed form.
        log_sigma = {id(p) for p in bnn.log_sigma.values() if p.grad is not None}
        if not log_sigma:
            continue
        _seen.add(optimizer)
        means = {id(p) for p in bnn.means().values()}
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            members = {id(p) for p in group["params"]}
            if members & log_sigma and members & means:
                warn(
                    f"{name} trains log σ and the means at one learning rate, so the variances may not converge "
                    f"(paper, section 5.1); use {_better_than(optimizer)}"
                )
                return
            if members & log_sigma and isinstance(optimizer, NOT_ADAPTIVE):
                warn(
                    f"{name} leaves log σ where it starts, unless the data are few: its gradient is of the size β/N; "
                    f"use {_better_than(optimizer)}"
                )
                return
            if members & log_sigma and group.get("weight_decay"):
                warn(
                    f"{name} decays log σ by weight_decay={group['weight_decay']}, which pulls every σ towards 1; the "
                    "prior is the weight decay here: leave it at 0, as bnn.parameter_groups(lr=...) does"
                )
                return


def _better_than(optimizer: torch.optim.Optimizer) -> str:
    if isinstance(optimizer, NOT_ADAPTIVE):
        return "varlap.sgd(bnn, lr=...), whose log σ has Adam"
    takes_groups = not isinstance(optimizer, torch.optim.LBFGS)
    groups = f"{type(optimizer).__name__}(bnn.parameter_groups(lr=...)) or " if takes_groups else ""
    return f"{groups}varlap.adam(bnn, lr=...), whose log σ learns 10 times faster"
