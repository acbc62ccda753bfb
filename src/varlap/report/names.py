"""What the pages of reports call data sets, networks, recipes and settings."""

from collections.abc import Callable
from typing import Any

from varlap.experiments import RunSpec

_NAMES = {
    **{"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "fashion_mnist": "Fashion-MNIST", "mnist": "MNIST"},
    **{"svhn": "SVHN", "preact-resnet-18": "PreactResNet-18", "mlp": "MLP"},
}
_SAID: dict[str, Callable[[Any], str]] = {
    "model": lambda value: called(value),
    "lr": lambda value: f"learning rate {value:g}",
    "schedule": lambda value: "cosine" if value == "cosine" else "rate ÷ 10 twice",
    "clip_norm": lambda value: f"gradients clipped at {value:g}" if value else "gradients not clipped",
    "batch_size": lambda value: f"batches of {value}",
    "curvature": lambda value: "exact curvature" if value == "exact" else "curvature of a sixteenth of the images",
    "gradient": lambda value: f"curvature's gradient {value}",
    "variances": lambda value: "variances in closed form" if value == "closed-form" else "learnt variances",
    "beta_warmup": lambda value: f"β rises over {value or 0:.0%}",
    "augment": lambda value: "augmentation" if value else "no augmentation",
    "validation": lambda value: f"{value:.0%} of the training images held out" if value else "no held-out images",
    "num_train": lambda value: f"{value:,} training images" if value else "all training images",
    **dict.fromkeys(("optimizer", "precision"), str),
}


def called(identifier: str) -> str:
    """Return what people call a data set, other images or a network; one without such a name as it is.

    >>> called("fashion_mnist"), called("letters")
    ('Fashion-MNIST', 'letters')
    """
    return _NAMES.get(identifier, identifier)


def setting(key: str, value: Any) -> str:
    """Say a setting of a run in words.

    >>> setting("validation", 0.0), setting("batch_size", 256), setting("width", 32)
    ('no held-out images', 'batches of 256', 'width 32')
    """
    return _SAID.get(key, lambda other: f"{key.replace('_', ' ')} {other}")(value)


def recipe(spec: RunSpec) -> str:
    """Name a recipe by what it is.

    >>> [recipe(RunSpec("digits", "vl", 0.1, recipe=label)) for label in ("paper", "ours", "my-own")]
    ["paper's recipe", 'Adam 1e-4', 'my-own recipe']
    """
    if spec.recipe == "ours":  # told by its learning rate, whatever it was set to
        mantissa, exponent = f"{spec.lr:e}".split("e")
        return f"Adam {float(mantissa):g}e{int(exponent)}"
    return {"paper": "paper's recipe", "sgd": "SGD"}.get(spec.recipe, f"{spec.recipe} recipe")


def epochs(number: int) -> str:
    """Say how long a training is.

    >>> epochs(1), epochs(50)
    ('1 epoch', '50 epochs')
    """
    return f"{number} epoch{'s' * (number > 1)}"
