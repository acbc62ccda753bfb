"""What one run of an experiment computes: a frozen dataclass that checks itself, and the key that its result has."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from varlap.curvature.fisher import Gradient
from varlap.data import KNOWN_NAMES
from varlap.errors import ConfigError, did_you_mean
from varlap.objectives.vl import Variances
from varlap.seeds import checked_seed
from varlap.training.settings import choices_of
from varlap.training.step import Precision

Method = Literal["map", "vi", "vl"]
Schedule = Literal["milestones", "cosine"]
Optimizer = Literal["Adam", "SGD"]
Model = Literal["preact-resnet-18", "convnet", "mlp"]
Curvature = Literal["exact", "default"]

WARMUP_OF_CLOSED_FORM = 0.3
"""Part of the training over which β rises, without which σ in closed form jumps to its prior's."""
USUAL_WIDTH = 64

_BELOW_ONE = {
    "momentum": "at least 0 and below 1; 0.9 is usual",
    "beta_warmup": "the part of the training over which β rises, such as 0.3",
    "warmup": "the part of the training over which the learning rate rises, such as 0.05",
    "validation": "a part of the training images, such as 0.1",
}
_ALWAYS = ("data", "method", "beta", "seed", "recipe")  # what a run is called by


@dataclass(frozen=True)
class RunSpec:
    """One network, trained by one method on one data set. Defaults are the paper's recipe where it states one.

    >>> spec = RunSpec(data="cifar10", method="vl", beta=0.1)
    >>> spec.epochs, spec.lr, spec.schedule
    (200, 0.0001, 'milestones')
    """

    data: str
    """digits, fashion_mnist, mnist, cifar10, cifar100 or svhn"""
    method: Method
    """map, vi or vl"""
    beta: float
    """tempering of the KL; for MAP of the prior's quadratic part"""
    seed: int = 0
    """of weights, batches, augmentation and drawn labels"""
    recipe: str = "paper"
    """name of the recipe; a label only"""
    model: Model = "preact-resnet-18"
    """preact-resnet-18, the paper's; convnet, a small one; mlp"""
    width: int = USUAL_WIDTH
    """channels of PreactResNet-18's first stage"""
    epochs: int = 200
    """passes over the training images; the schedule scales with them"""
    lr: float = 1e-4
    """learning rate of the means"""
    schedule: Schedule = "milestones"
    """'milestones': ÷ 10 after half and after three quarters of the training; 'cosine': to zero"""
    optimizer: Optimizer = "Adam"
    """of the means; with SGD log σ learns by Adam, `log_sigma_lr_multiplier` times as fast as its usual 1e-3"""
    momentum: float = 0.0
    """Nesterov's; SGD needs one, other optimizers have none"""
    warmup: float = 0.0
    """part of the training over which the learning rate rises from zero"""
    clip_norm: float | None = None
    """the largest norm that all gradients may have together"""
    batch_size: int = 128
    """images a step"""
    log_sigma_lr_multiplier: float = 10.0
    """how much faster log σ learns than the means"""
    curvature: Curvature = "exact"
    """of VL. 'exact': of all images (the paper); 'default': of a sixteenth of them, whatever the batch size is"""
    gradient: Gradient = "held"
    """of VL's curvature. 'held': labels as constants, as we read the paper; 'quiet': same expectation, less
    noise; 'whole': through the labels too"""
    variances: Variances = "learnt"
    """of VL: learnt by the optimizer (the paper), or set in closed form"""
    beta_warmup: float | None = None
    """part of the training over which β rises from zero; by default 0.3 for VL with variances in closed form, else 0"""
    prior_scale: float | None = None
    """one scale for all weights; None scales by fan-in"""
    augment: bool = True
    """random crops, and flips where the images have a left and a right"""
    validation: float = 0.1
    """part of the training images that is held out, to choose β by"""
    num_train: int | None = None
    """use only so many training images"""
    precision: Precision = "bf16"
    """fp32, bf16 or fp16: of the network's computations; weights are in single precision"""
    linearised: bool = True
    """whether MAP and VL are scored by linearised predictions too, which takes as long as a few epochs"""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(f"{name} = {value!r}: {did_you_mean(value, allowed)}")
        for name in ("beta", "lr", "log_sigma_lr_multiplier", "prior_scale", "clip_norm"):
            value = getattr(self, name)
            if value is None and name in ("prior_scale", "clip_norm"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{name} = {value!r} must be a positive, finite number")
            object.__setattr__(self, name, float(value))  # 1 and 1.0 are the same run
        for name, meaning in _BELOW_ONE.items():
            part = getattr(self, name)
            if part is None and name == "beta_warmup":
                continue
            if isinstance(part, bool) or not isinstance(part, int | float) or not 0 <= part < 1:
                raise ConfigError(f"{name} = {part} must be {meaning}")
            object.__setattr__(self, name, float(part))
        for name in ("epochs", "batch_size", "width", "num_train"):
            value = getattr(self, name)
            if (value is None and name == "num_train") or (type(value) is int and value > 0):
                continue
            raise ConfigError(f"{name} = {value!r} must be a whole number of at least 1")
        for name in ("augment", "linearised"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} = {getattr(self, name)!r} must be true or false")
        if type(self.seed) is not int or self.seed < 0:
            raise ConfigError(f"seed = {self.seed!r} must be a whole number of at least 0")
        checked_seed(self.seed)
        if not isinstance(self.recipe, str) or not self.recipe.replace("-", "").isalnum():
            raise ConfigError(f"recipe = {self.recipe!r} becomes part of a file's name; use letters, digits and -")
        if self.momentum and self.optimizer != "SGD":
            raise ConfigError(f"momentum = {self.momentum:g} is SGD's; set optimizer = 'SGD' too")
        if self.optimizer == "SGD" and not self.momentum:  # which `fit` would take 0.9 for
            raise ConfigError("optimizer = 'SGD' without momentum; set momentum too; 0.9 is usual")
        if self.width != USUAL_WIDTH and self.model != "preact-resnet-18":
            raise ConfigError(f"width = {self.width} is PreactResNet-18's, and {self.model} has none; leave it out")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "RunSpec":
        """Make a spec of named settings, or say which one is unknown or missing.

        >>> RunSpec.of({"data": "cifar10", "metod": "vl", "beta": 0.1})
        Traceback (most recent call last):
        varlap.errors.ConfigError: a run has no setting 'metod'; did you mean 'method'?
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in settings:
            if name not in known:
                raise ConfigError(f"a run has no setting {name!r}; {did_you_mean(name, known)}")
        for name in ("data", "method", "beta"):
            if name not in settings:
                raise ConfigError(f"a run needs {name}")
        return cls(**settings)

    def stated(self) -> dict[str, Any]:
        """Return the settings that name a run and those that are not the defaults.

        A setting that is added later, with a default that means what was done before, changes none of this.

        >>> RunSpec(data="cifar10", method="vl", beta=0.1, epochs=50).stated()
        {'data': 'cifar10', 'method': 'vl', 'beta': 0.1, 'seed': 0, 'recipe': 'paper', 'epochs': 50}
        """
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {name: value for name, (value, default) in values.items() if name in _ALWAYS or value != default}

    @property
    def beta_rise(self) -> float:
        """The part of the training over which β rises: `beta_warmup`, or where that is None what it stands for."""
        if self.beta_warmup is not None:
            return self.beta_warmup
        return WARMUP_OF_CLOSED_FORM if self._sets_variances else 0.0

    @property
    def _sets_variances(self) -> bool:
        return (self.method, self.variances) == ("vl", "closed-form")

    def effective(self) -> "RunSpec":
        """Return the spec with what its method does not use at the defaults: if two are equal, so are the trainings.

        For such a training, runs that ask for linearised predictions differ from others in their scores alone.

        >>> plain, quiet = (RunSpec("digits", "map", 0.1, gradient=gradient) for gradient in ("held", "quiet"))
        >>> plain.effective() == quiet.effective(), plain.key() == quiet.key()
        (True, False)
        """
        usual = {field.name: field.default for field in dataclasses.fields(RunSpec)}
        unused = ["recipe"]
        if self.method != "vl":
            unused += ["curvature", "gradient", "variances"]
        if self.method == "map" or self._sets_variances:  # no log σ is learnt
            unused.append("log_sigma_lr_multiplier")
        if self.method == "vi" or not self.validation:  # held-out images choose the variances
            unused.append("linearised")
        return dataclasses.replace(self, beta_warmup=self.beta_rise, **{name: usual[name] for name in unused})

    def key(self) -> str:
        """Return a name for the result: readable, and different for every different spec.

        >>> RunSpec(data="cifar10", method="vl", beta=0.1).key().startswith("cifar10-vl-beta0.1-seed0-paper-")
        True
        """
        content = json.dumps(self.stated(), sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:10]
        return f"{self.data}-{self.method}-beta{self.beta:g}-seed{self.seed}-{self.recipe}-{digest}"


_CHOICES: dict[str, Sequence[str]] = {"data": KNOWN_NAMES, **choices_of(RunSpec)}
