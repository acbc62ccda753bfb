"""How to train: one frozen dataclass, which is also the help text and the spec of a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from varlap.errors import ConfigError, did_you_mean
from varlap.seeds import checked_count, checked_seed
from varlap.training.step import Precision

ELSEWHERE = {  # words of other libraries
    "device": "training is where the network is: move it by bnn.to(device), and fit takes the data there",
    "learning_rate": "did you mean 'lr'?",
    "random_state": "did you mean 'seed'?",
    "early_stopping": "did you mean 'patience'?",
    "weight_decay": "the prior does what weight decay does: varlap.BNN(network, prior=...), and the objective's beta",
    "shuffle": "arrays and Datasets are shuffled in every epoch",
}
ADAM_LR, SGD_LR, SGD_MOMENTUM = 1e-3, 0.03, 0.9


@dataclass(frozen=True)
class FitSettings:
    """How to train. Each field is an argument of `fit`.

    >>> FitSettings(epochs=3).batch_size
    128
    """

    epochs: int
    """passes over the training data"""
    batch_size: int = 128
    """items a step, over all ranks; the last batch of an epoch may have fewer"""
    accumulate: int = 1
    """parts that a batch is computed in, one after the other, to save memory"""
    optimizer: str = "Adam"
    """the name of an optimizer in torch.optim; with "SGD" log σ learns by Adam, since SGD would hardly move it"""
    momentum: float | None = None
    """of SGD, Nesterov's, 0.9 if it is not given; other optimizers have none"""
    lr: float | None = None
    """learning rate of the means, before the schedule; if it is not given 1e-3, and 0.03 for SGD"""
    log_sigma_lr_multiplier: float = 10.0
    """how much faster log σ learns; with SGD, than at Adam's usual 1e-3"""
    schedule: Literal["constant", "cosine", "milestones"] = "cosine"
    """cosine to zero, or ÷ 10 after each of `milestones`, or neither"""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """where the rate drops, as parts of the whole training (the paper's: epochs 100 and 150 of 200)"""
    warmup_epochs: float = 0.0
    """epochs over which the rate rises from zero"""
    clip_norm: float | None = None
    """the largest norm that all gradients may have together; larger ones are scaled down"""
    precision: Precision = "fp32"
    """"bf16" computes the network in bfloat16, "fp16" in half precision, for devices without it; weights and their
    updates stay in single precision"""
    compiled: bool | Literal["auto"] = "auto"
    """whether to compile the step; "auto" does on CUDA"""
    validate_every: int = 1
    """epochs between validations; the last epoch always has one"""
    patience: int | None = None
    """stop after so many epochs, validated or not, without a better validation NLL; None never stops early"""
    keep: Literal["last", "best"] = "last"
    """which weights to end with: the last, or those of the best validation NLL"""
    on_nonfinite: Literal["raise", "skip"] = "raise"
    """what a NaN or Inf in a batch, a loss or a gradient does: end the training, or skip the step and count it"""
    save_every: int | None = None
    """steps between checkpoints, besides the one after each epoch"""
    save_pause_s: float = 0.0
    """seconds between the checkpoints after epochs, at least: short epochs of a large network need no more; the last
    epoch always has one"""
    num_checkpoints: int = 2
    """how many of the newest checkpoints stay on disk"""
    num_workers: int = 0
    """processes that read a Dataset"""
    seed: int = 0
    """of the order of the batches and of the augmentation"""

    def __post_init__(self) -> None:
        by_sgd = self.optimizer == "SGD"
        for name, usual in (("lr", SGD_LR if by_sgd else ADAM_LR), ("momentum", SGD_MOMENTUM if by_sgd else 0.0)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual)
        counts = {"epochs": 1, "batch_size": 1, "accumulate": 1, "num_checkpoints": 1, "num_workers": 0}
        counts["validate_every"] = 1
        counts |= {name: 1 for name in ("patience", "save_every") if getattr(self, name) is not None}
        for name, least in counts.items():
            object.__setattr__(self, name, checked_count("fit", name, getattr(self, name), least))
        for name in ("lr", "log_sigma_lr_multiplier", "clip_norm"):
            value = getattr(self, name)
            if value is None and name == "clip_norm":
                continue
            if not isinstance(value, int | float) or not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"fit({name}={value!r}) must be positive and finite")
        if not isinstance(self.momentum, int | float) or not 0 <= self.momentum < 1:
            raise ConfigError(f"fit(momentum={self.momentum!r}) must be in [0, 1); 0.9 is usual")
        if not isinstance(self.save_pause_s, int | float) or not 0 <= self.save_pause_s < math.inf:
            raise ConfigError(f"fit(save_pause_s={self.save_pause_s}) must be a number of seconds, at least 0")
        object.__setattr__(self, "seed", checked_seed(self.seed, "fit"))
        if self.compiled not in (True, False, "auto"):
            raise ConfigError(f"fit(compiled={self.compiled!r}): choose True, False or 'auto'")
        if not isinstance(self.milestones, tuple | list) or not all(
            isinstance(part, int | float) and 0 <= part <= 1 for part in self.milestones
        ):
            raise ConfigError(f"fit(milestones={self.milestones}) must be parts of the training, such as (0.5, 0.75)")
        if not isinstance(self.warmup_epochs, int | float) or not 0 <= self.warmup_epochs <= self.epochs:
            raise ConfigError(f"fit(warmup_epochs={self.warmup_epochs}) must be between 0 and epochs={self.epochs}")
        for name, allowed in choices_of(FitSettings).items():
            if getattr(self, name) not in allowed:
                listed = f"{', '.join(map(repr, allowed[:-1]))} or {allowed[-1]!r}"
                raise ConfigError(f"fit({name}={getattr(self, name)!r}): choose {listed}")
        unfit = ("Optimizer", "LBFGS", "SparseAdam", "Muon")  # they want a closure, sparse gradients or matrices alone
        kinds = {name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)}.difference(unfit)
        if not isinstance(self.optimizer, str):
            raise ConfigError(
                f"fit(optimizer={type(self.optimizer).__name__}) must be the name of an optimizer of torch.optim, such "
                "as 'Adam' or 'SGD', which fit makes by itself with lr and log_sigma_lr_multiplier; one that is made "
                "already, as by varlap.adam, belongs to a loop of your own"
            )
        if self.optimizer not in kinds:
            raise ConfigError(
                f"fit(optimizer={self.optimizer!r}) is no optimizer of torch.optim that takes a step at a time; "
                + did_you_mean(self.optimizer, kinds, "for example 'Adam' or 'SGD'")
            )
        if self.momentum and self.optimizer != "SGD":
            raise ConfigError(f"fit(momentum={self.momentum}) is SGD's, not {self.optimizer}'s; leave it out")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "FitSettings":
        """Make settings of keyword arguments, or say which one is unknown.

        >>> FitSettings.of({"epochs": 3, "batchsize": 7})
        Traceback (most recent call last):
        varlap.errors.ConfigError: fit has no setting 'batchsize'; did you mean 'batch_size'?
        """
        known = [f.name for f in fields(cls)]
        for name in settings:
            if name not in known:
                hint = ELSEWHERE.get(name) or did_you_mean(name, known, f"it has {', '.join(known)}")
                raise ConfigError(f"fit has no setting {name!r}; {hint}")
        if "epochs" not in settings:
            raise ConfigError("fit needs epochs, the number of passes over the training data: fit(..., epochs=20)")
        return cls(**settings)

    def lr_factor(self, progress: float) -> float:
        """Return what the schedule multiplies the learning rate with after a part of the training, from 0 to 1.

        >>> FitSettings(epochs=200, schedule="milestones").lr_factor(0.6)
        0.1
        """
        warmup = self.warmup_epochs / self.epochs
        rising = min(1.0, progress / warmup) if warmup else 1.0
        if self.schedule == "cosine":
            return rising * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        if self.schedule == "milestones":
            return rising * 0.1 ** sum(progress >= milestone for milestone in self.milestones)
        return rising


def choices_of(settings: type) -> dict[str, tuple[str, ...]]:
    """Return the values that a field may have, for each field of a dataclass whose type lists them.

    >>> choices_of(FitSettings)["keep"]
    ('last', 'best')
    """
    return {name: get_args(kind) for name, kind in get_type_hints(settings).items() if get_origin(kind) is Literal}
