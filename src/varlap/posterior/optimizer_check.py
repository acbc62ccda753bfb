"""A warning for `Adam(bnn.parameters())`, which gives log σ the learning rate of the means."""

import functools
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from varlap.errors import VarlapWarning

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
        for group in optimizer.param_groups:
            members = {id(p) for p in group["params"]}
            if members & log_sigma and members & means:
                warnings.warn(
                    f"{type(optimizer).__name__} trains log σ and the means at one learning rate, so the variances may "
                    f"not converge (paper, section 5.1); use {type(optimizer).__name__}(bnn.parameter_groups(lr=...)) "
                    "or varlap.adam(bnn, lr=...), whose log σ learns 10 times faster",
                    VarlapWarning,
                    stacklevel=3,
                )
                return
