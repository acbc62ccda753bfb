"""A warning for `Adam(bnn.parameters())`, which gives log σ the learning rate of the means."""

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from varlap.errors import warn

if TYPE_CHECKING:
    from varlap.posterior.bnn import BNN

_watched: "weakref.WeakSet[BNN]" = weakref.WeakSet()
_seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def watch_optimizers(bnn: "BNN") -> None:
    """Look once at each optimizer that steps, and warn if it trains means and log σ in one group."""
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
        if log_sigma:
            _seen.add(optimizer)
        means = {id(p) for p in bnn.means().values()}
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            members = {id(p) for p in group["params"]}
            if members & log_sigma and members & means:
                warn(
                    f"{name} trains log σ and the means at one learning rate, so the variances may not converge "
                    f"(paper, section 5.1); use {name}(bnn.parameter_groups(lr=...)) or varlap.adam(bnn, lr=...), "
                    "whose log σ learns 10 times faster"
                )
                return
            if members & log_sigma and group.get("weight_decay"):
                warn(
                    f"{name} decays log σ by weight_decay={group['weight_decay']}, which pulls every σ towards 1; the "
                    "prior is the weight decay here: leave it at 0, as bnn.parameter_groups(lr=...) does"
                )
                return
