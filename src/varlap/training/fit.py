"""`fit`: the training loop, by the fastest step that the network and the machine allow."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from varlap import tree
from varlap.curvature.protocol import check_targets
from varlap.data import as_tensors, count_items
from varlap.errors import BatchError, ConfigError
from varlap.objectives import Objective
from varlap.objectives.terms import combine
from varlap.posterior import BNN
from varlap.streams import Streams
from varlap.training.optimizer import adam
from varlap.training.step import Precision, TrainingStep

Augmentation = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class FitSettings:
    """How to train. Each field is an argument of `fit`.

    >>> FitSettings(epochs=3).batch_size
    128
    """

    epochs: int
    """passes over the training data"""
    batch_size: int = 128
    """items a step; the last batch of an epoch may have fewer"""
    lr: float = 1e-3
    """learning rate of the means, before the schedule"""
    log_sigma_lr_multiplier: float = 10.0
    """how much faster log σ learns"""
    schedule: Literal["constant", "cosine", "milestones"] = "cosine"
    """cosine to zero, or ÷ 10 after each of `milestones`, or neither"""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """where the rate drops, as parts of the whole training (the paper's: epochs 100 and 150 of 200)"""
    precision: Precision = "fp32"
    """"bf16" computes the network in bfloat16; weights and their updates stay in single precision"""
    compiled: bool | Literal["auto"] = "auto"
    """whether to compile the step; "auto" does on CUDA"""
    seed: int = 0
    """of the order of the batches and of the augmentation"""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"fit({name}={value}) must be a whole number, at least 1")
        if self.schedule not in ("constant", "cosine", "milestones"):
            raise ConfigError(f"fit(schedule={self.schedule!r}): choose 'constant', 'cosine' or 'milestones'")
        if self.precision not in ("fp32", "bf16"):
            raise ConfigError(f"fit(precision={self.precision!r}): choose 'fp32' or 'bf16'")

    def lr_factor(self, progress: float) -> float:
        """Return what the schedule multiplies the learning rate with after a part of the training, from 0 to 1.

        >>> FitSettings(epochs=200, schedule="milestones").lr_factor(0.6)
        0.1
        """
        if self.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        if self.schedule == "milestones":
            return 0.1 ** sum(progress >= milestone for milestone in self.milestones)
        return 1.0


@dataclass
class History:
    """What happened: one row of numbers an epoch.

    >>> History(FitSettings(epochs=3)).epochs
    []
    """

    settings: FitSettings
    epochs: list[dict[str, float]] = field(default_factory=list)


def fit(
    bnn: BNN,
    objective: Objective,
    train: tuple[Any, Any],
    *,
    augment: Augmentation | None = None,
    progress: Callable[[dict[str, float]], None] | None = None,
    **settings: Any,
) -> History:
    """Train with Adam on data in memory, and return the ELBO's terms epoch by epoch.

    Args:
        bnn: the network with its posterior, on the device to train on.
        objective: MAP, VI, VL or VLHessian.
        train: inputs and targets as tensors; they are moved to the device once.
        augment: a function of (inputs, generator) that is applied to each batch on the device, such as
            `varlap.data.crop_and_flip`.
        progress: called with each epoch's row.
        settings: the fields of `FitSettings`.

    >>> import torch, varlap
    >>> bnn = varlap.BNN(torch.nn.Linear(2, 3))
    >>> train = torch.randn(64, 2), torch.arange(64) % 3
    >>> history = fit(bnn, varlap.VL(num_data=64), train, epochs=2, batch_size=16)
    >>> sorted(history.epochs[-1])
    ['curvature', 'elbo', 'epoch', 'kl', 'log_likelihood', 'lr', 'seconds']
    """
    known = {f.name for f in fields(FitSettings)}
    unknown = set(settings) - known
    if unknown:
        raise ConfigError(f"fit has no setting {sorted(unknown)[0]!r}; it has {', '.join(sorted(known))}")
    if "epochs" not in settings:
        raise ConfigError("fit needs epochs, the number of passes over the training data: fit(..., epochs=20)")
    chosen = FitSettings(**settings)
    if not isinstance(train, tuple | list) or len(train) != 2:
        raise ConfigError(
            f"fit takes data in memory, a tuple (x, y) of tensors or arrays, not a {type(train).__name__}; with a "
            "Dataset or a DataLoader write the loop yourself"
        )
    x, y = (tree.to_device(part, bnn.device) for part in as_tensors(train))
    num_items = count_items((x, y))
    if objective.num_data < num_items:
        raise BatchError(f"the training data have {num_items} items but the objective's num_data={objective.num_data}")
    with torch.no_grad(), bnn.evaluating():  # once and for all, since a compiled step cannot look at its targets
        check_targets(bnn, bnn.outputs(tree.take(x, slice(0, 1))), y, num_items)
    on_cuda = bnn.device.type == "cuda"
    if on_cuda and any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in bnn.network.modules()):
        bnn.network.to(memory_format=torch.channels_last)  # the layout that tensor cores want; values stay  # type: ignore
    optimizer = adam(bnn, chosen.lr, chosen.log_sigma_lr_multiplier, fused=on_cuda, capturable=on_cuda)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    step = TrainingStep(bnn, objective, optimizer, precision=chosen.precision, compiled=chosen.compiled)
    history = History(chosen)
    per_epoch = math.ceil(num_items / chosen.batch_size)
    bnn.train()
    for epoch in range(chosen.epochs):
        started = time.perf_counter()
        sums = torch.zeros(4, dtype=torch.float32 if bnn.device.type == "mps" else torch.float64, device=bnn.device)
        order = torch.randperm(num_items, generator=Streams(chosen.seed, epoch).generator("order", "cpu")).to(
            bnn.device
        )
        for index, items in enumerate(order.split(chosen.batch_size)):
            number = epoch * per_epoch + index
            factor = chosen.lr_factor(number / (chosen.epochs * per_epoch))
            _set_rates(optimizer, [rate * factor for rate in rates])
            batch_x = tree.take(x, items)
            if augment is not None:
                batch_x = augment(batch_x, Streams(chosen.seed, number).generator("augment", bnn.device))
            log_likelihood, curvature, kl = step(batch_x, tree.take(y, items), number=number)
            elbo = combine(log_likelihood, curvature, kl, objective.beta_at(number))
            sums += len(items) * torch.stack([elbo, log_likelihood, curvature, kl])
        step.check()
        row: dict[str, float] = {"epoch": epoch}
        row |= dict(zip(("elbo", "log_likelihood", "curvature", "kl"), (sums / num_items).tolist(), strict=True))
        row |= {"lr": float(optimizer.param_groups[0]["lr"]), "seconds": time.perf_counter() - started}
        history.epochs.append(row)
        if progress is not None:
            progress(row)
    return history


def _set_rates(optimizer: torch.optim.Optimizer, rates: list[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)  # a captured step reads it there
        else:
            group["lr"] = rate
