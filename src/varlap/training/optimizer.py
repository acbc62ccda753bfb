"""Optimizers whose log σ learns at a pace of its own: Adam for all, or SGD for the means."""

from collections.abc import Callable
from typing import Any

import torch

from varlap.errors import ConfigError, NetworkError
from varlap.posterior import BNN
from varlap.training.settings import FitSettings

USUAL_ADAM_LR = 1e-3
FUSED_OPTIONS = {"Adam": ("fused", "capturable"), "AdamW": ("fused", "capturable")}


def adam(bnn: BNN, lr: float = 1e-3, log_sigma_lr_multiplier: float = 10.0, **options: Any) -> torch.optim.Adam:
    """Return Adam over the means at `lr` and over log σ at a multiple of it (paper, section 5.1).

    It is short for `torch.optim.Adam(bnn.parameter_groups(lr, log_sigma_lr_multiplier), **options)`, on CUDA with
    `fused=True` unless you say otherwise.

    >>> optimizer = adam(BNN(torch.nn.Linear(2, 1)), lr=1e-4)
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.0001, 0.001]
    """
    _require_bnn("adam", bnn)
    if bnn.device.type == "cuda" and not options.keys() & {"fused", "foreach"}:
        options["fused"] = True
    return torch.optim.Adam(bnn.parameter_groups(lr, log_sigma_lr_multiplier), **options)


def sgd(
    bnn: BNN, lr: float = 0.03, momentum: float = 0.9, log_sigma_lr: float = 1e-2, fused: bool | None = None
) -> "SGD":
    """Return SGD with Nesterov's momentum over the means, and Adam over log σ.

    Convolutional networks often predict better by SGD than by Adam. The gradient in log σ is of the size β/N, far too
    small for SGD at any rate that suits the means, so log σ has Adam, and a rate of its own.

    Args:
        bnn: the network with its posterior.
        lr: of the means. Softplus networks bear less than the 0.1 that is common for ReLU.
        momentum: of the means; 0 is plain SGD.
        log_sigma_lr: Adam's, for log σ.
        fused: whether both are torch's fused ones; by default on CUDA.

    >>> optimizer = sgd(BNN(torch.nn.Linear(2, 1)), lr=0.1)
    >>> [(group["name"], group["lr"]) for group in optimizer.param_groups]
    [('means', 0.1), ('log_sigma', 0.01)]
    """
    _require_bnn("sgd", bnn)
    if not 0 <= momentum < 1:
        raise ConfigError(f"sgd(momentum={momentum}) must be in [0, 1); 0.9 is usual, 0 is plain SGD")
    means, log_sigma = bnn.parameter_groups(lr, log_sigma_lr / lr if lr > 0 else 1.0)
    on_cuda = bnn.device.type == "cuda"
    return SGD(means | {"momentum": momentum, "nesterov": momentum > 0}, log_sigma, on_cuda if fused is None else fused)


class SGD(torch.optim.Optimizer):
    """SGD for one group of parameters and Adam for another, as one optimizer of torch: what `sgd` returns.

    Both halves are torch's own; they share this optimizer's groups and state, so that schedulers, checkpoints and
    gradient scalers see one.

    >>> weight, log_sigma = (torch.nn.Parameter(torch.tensor([value])) for value in (1.0, 0.0))
    >>> optimizer = SGD({"params": [weight], "lr": 0.5}, {"params": [log_sigma], "lr": 0.01}, fused=False)
    >>> (weight.square() + 1e-6 * log_sigma).sum().backward()
    >>> optimizer.step()
    >>> weight.item(), round(log_sigma.item(), 4)
    (0.0, -0.0099)
    """

    def __init__(self, means: dict[str, Any], log_sigma: dict[str, Any], fused: bool) -> None:
        self._halves: tuple[torch.optim.Optimizer, ...] = ()
        super().__init__([means | {"fused": fused}, log_sigma | {"fused": fused, "capturable": fused}], {})
        self._halve()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._halve()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Move both groups."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for half in self._halves:
            for name in ("found_inf", "grad_scale"):  # of a gradient scaler
                setattr(half, name, getattr(self, name, None))
            half.step()
        return loss

    def _halve(self) -> None:
        means, log_sigma = self.param_groups
        self._halves = torch.optim.SGD([means]), torch.optim.Adam([log_sigma])
        for half in self._halves:
            half.state = self.state
        self._step_supports_amp_scaling = means["fused"]  # a gradient scaler leaves it to the halves to skip a step


def make_optimizer(bnn: BNN, settings: FitSettings, *, fused: bool = False) -> torch.optim.Optimizer:
    """Return the optimizer that the settings name; `fused` where torch can.

    >>> settings = FitSettings(epochs=1, optimizer="SGD", momentum=0.9)
    >>> type(make_optimizer(BNN(torch.nn.Linear(2, 1)), settings)).__name__
    'SGD'
    """
    if settings.optimizer == "SGD":
        return sgd(bnn, settings.lr, settings.momentum, settings.log_sigma_lr_multiplier * USUAL_ADAM_LR, fused)
    options = dict.fromkeys(FUSED_OPTIONS.get(settings.optimizer, ()), True) if fused else {}
    kind = getattr(torch.optim, settings.optimizer)
    return kind(bnn.parameter_groups(settings.lr, settings.log_sigma_lr_multiplier), **options)


def _require_bnn(function: str, bnn: Any) -> None:
    if not isinstance(bnn, BNN):
        raise NetworkError(f"{function} needs a BNN, got {type(bnn).__name__}; wrap the network: varlap.BNN(network)")
