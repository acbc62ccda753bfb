"""Optimizers whose log σ learns at a pace of its own: Adam for all, or SGD for the means."""

import math
from collections.abc import Callable
from typing import Any

import torch

from varlap.errors import ConfigError, NetworkError
from varlap.posterior import BNN
from varlap.training.settings import ADAM_LR, SGD_LR, SGD_MOMENTUM, FitSettings

FUSED_ON = ("cuda", "cpu")  # a fused step updates all weights by one kernel, and skips by itself what is not sound
FUSED = ("Adam", "AdamW")


def adam(bnn: BNN, lr: float = ADAM_LR, log_sigma_lr_multiplier: float = 10.0, **options: Any) -> torch.optim.Adam:
    """Return Adam over the means at `lr` and over log σ at a multiple of it (paper, section 5.1).

    It is short for `torch.optim.Adam(bnn.parameter_groups(lr, log_sigma_lr_multiplier), **options)`, on CUDA and on
    a CPU with `fused=True` unless you say otherwise: a gradient that you set yourself must be laid out in memory as its
    parameter is, since a fused step goes by neither's strides.

    >>> optimizer = adam(BNN(torch.nn.Linear(2, 1)), lr=1e-4)
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.0001, 0.001]
    """
    _require_bnn("adam", bnn)
    if options.get("weight_decay"):
        raise ConfigError(
            f"adam(weight_decay={options['weight_decay']}): the prior is the weight decay, and a second one would "
            "count twice; set its strength by beta, or by BNN(prior=varlap.FanInPrior(gain=...))"
        )
    if bnn.device.type in FUSED_ON and not options.keys() & {"fused", "foreach", "differentiable"}:
        options["fused"] = True
    return torch.optim.Adam(bnn.parameter_groups(lr, log_sigma_lr_multiplier), **options)


def sgd(
    bnn: BNN,
    lr: float = SGD_LR,
    momentum: float = SGD_MOMENTUM,
    log_sigma_lr: float = 1e-2,
    fused: bool | None = None,
) -> "SGD":
    """Return SGD with Nesterov's momentum over the means, and Adam over log σ.

    Convolutional networks often predict better by SGD than by Adam. The gradient in log σ is of the size β/N, far too
    small for SGD at any rate that suits the means, so log σ has Adam, and a rate of its own.

    Args:
        bnn: the network with its posterior.
        lr: of the means. For more than this default wide softplus networks want a warm-up and clipped gradients, as by
            `fit(lr=0.2, warmup_epochs=..., clip_norm=1.0)` at batches of 256.
        momentum: of the means; 0 is plain SGD.
        log_sigma_lr: Adam's, for log σ.
        fused: whether both are torch's fused ones; by default on CUDA and on a CPU.

    >>> optimizer = sgd(BNN(torch.nn.Linear(2, 1)), lr=0.1)
    >>> [(group["name"], group["lr"]) for group in optimizer.param_groups]
    [('means', 0.1), ('log_sigma', 0.01)]
    """
    _require_bnn("sgd", bnn)
    for name, value in (("lr", lr), ("log_sigma_lr", log_sigma_lr)):
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"sgd({name}={value!r}) must be positive and finite")
    if not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        raise ConfigError(f"sgd(momentum={momentum!r}) must be in [0, 1); 0.9 is usual, 0 is plain SGD")
    means, log_sigma = bnn.parameter_groups(lr, log_sigma_lr / lr)
    log_sigma["capturable"] = bnn.device.type == "cuda"
    return SGD(means, log_sigma, momentum=momentum, fused=bnn.device.type in FUSED_ON if fused is None else fused)


class SGD(torch.optim.Optimizer):
    """SGD for the means and Adam for log σ, as one optimizer of torch: what `sgd` returns.

    Both halves are torch's own; they share this optimizer's groups and state, so that schedulers, checkpoints and
    gradient scalers see one. Groups that are added later are SGD's.

    >>> weight, log_sigma = (torch.nn.Parameter(torch.tensor([value])) for value in (1.0, 0.0))
    >>> optimizer = SGD({"params": [weight], "lr": 0.5}, {"params": [log_sigma], "lr": 0.01}, momentum=0, fused=False)
    >>> (weight.square() + 1e-6 * log_sigma).sum().backward()
    >>> optimizer.step()
    >>> weight.item(), round(log_sigma.item(), 4)
    (0.0, -0.0099)
    """

    def __init__(self, means: dict[str, Any], log_sigma: dict[str, Any], *, momentum: float, fused: bool) -> None:
        self._halves: tuple[torch.optim.Optimizer, ...] = ()
        usual = {"lr": means["lr"], "momentum": momentum, "nesterov": momentum > 0, "fused": fused or None}
        super().__init__([means, log_sigma], usual)
        self._halve()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._halve()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters by SGD."""
        super().add_param_group(param_group)
        if self._halves:
            self._halve()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Move all groups."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin_momentum()
        for half in self._halves:
            for name in ("found_inf", "grad_scale"):  # of a gradient scaler
                setattr(half, name, getattr(self, name, None))
            half.step()
        return loss

    def _begin_momentum(self) -> None:
        """Make the buffers of a fused step: torch leaves those of a skipped first step uninitialised."""
        for group in self._halves[0].param_groups:
            for parameter in group["params"] if group["fused"] and group["momentum"] else ():
                if parameter.grad is not None and "momentum_buffer" not in self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def _halve(self) -> None:
        means, log_sigma, *later = self.param_groups
        self._halves = torch.optim.SGD([means, *later]), torch.optim.Adam([log_sigma])
        for half in self._halves:
            half.state = self.state
        self._step_supports_amp_scaling = bool(means["fused"])  # a gradient scaler leaves it to them to skip a step


def make_optimizer(bnn: BNN, settings: FitSettings, *, fused: bool = True) -> torch.optim.Optimizer:
    """Return the optimizer that the settings name, a fused one where torch has it unless that is not wanted.

    >>> type(make_optimizer(BNN(torch.nn.Linear(2, 1)), FitSettings(epochs=1, optimizer="SGD"))).__name__
    'SGD'
    """
    lr, momentum = settings.lr, settings.momentum
    assert lr is not None
    assert momentum is not None
    fused = fused and bnn.device.type in FUSED_ON
    if settings.optimizer == "SGD":
        return sgd(bnn, lr, momentum, settings.log_sigma_lr_multiplier * ADAM_LR, fused)
    on_cuda = bnn.device.type == "cuda"
    options = {"fused": True, "capturable": on_cuda} if fused and settings.optimizer in FUSED else {}
    kind = getattr(torch.optim, settings.optimizer)
    return kind(bnn.parameter_groups(lr, settings.log_sigma_lr_multiplier), **options)


def _require_bnn(function: str, bnn: Any) -> None:
    if not isinstance(bnn, BNN):
        raise NetworkError(f"{function} needs a BNN, got {type(bnn).__name__}; wrap the network: varlap.BNN(network)")
