"""Images to be classified by one of varlap's networks: what `varlap train`, `varlap evaluate` and the demo share."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from varlap.data import ArrayData, Normaliser, load
from varlap.errors import ConfigError
from varlap.experiments.outside import outside
from varlap.models import convnet, mlp, preact_resnet18
from varlap.seeds import checked_seed

MODELS = ("preact-resnet-18", "convnet", "mlp")

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ImageTask:
    """A data set, a network for it, and which training images are held out; the same values give the same task.

    >>> task = ImageTask("digits", "mlp", validation=0.2)
    >>> [len(y) for _, y in (task.training, task.held_out, task.test)]
    [1150, 287, 360]
    """

    data: str
    """the data set's name"""
    model: str = "auto"
    """one of `MODELS`; "auto" is a small convnet for images below 28×28, else PreactResNet-18"""
    validation: float = 0.0
    """part of the training images to hold out"""
    seed: int = 0
    """of the choice of these"""
    normaliser: Normaliser | None = field(default=None, compare=False)
    """what a trained network was used to; None takes it from the training images"""
    num_train: int | None = None
    """train on so many of the images that are not held out; None on all"""
    width: int = 64
    """channels of PreactResNet-18's first stage"""

    def __post_init__(self) -> None:
        if self.model not in ("auto", *MODELS):
            raise ConfigError(f"unknown model {self.model!r}; choose one of auto, {', '.join(MODELS)}")
        checked_seed(self.seed)

    @cached_property
    def images(self) -> ArrayData:
        """The data as they are stored."""
        return load(self.data)

    @property
    def chosen_model(self) -> str:
        """The model's name, where it is left to the data too."""
        if self.model != "auto":
            return self.model
        return "convnet" if self.images.image_shape[1] < 28 else "preact-resnet-18"

    def network(self) -> nn.Module:
        """Build the network, with weights from torch's global generator."""
        channels, height, width = self.images.image_shape
        num_classes = self.images.num_classes
        if self.chosen_model == "mlp":
            return nn.Sequential(nn.Flatten(), mlp(channels * height * width, num_classes, hidden=(100, 100)))
        if self.chosen_model == "convnet":
            return convnet(channels, num_classes, image_size=height)
        return preact_resnet18(num_classes, channels, width=self.width)

    @cached_property
    def normalise(self) -> Normaliser:
        """What every image goes through first."""
        return self.normaliser or Normaliser.of(self.images.train_images)

    @property
    def training(self) -> Pair:
        """Normalised images to train on, and their labels."""
        return self._split[0]

    @property
    def held_out(self) -> Pair | None:
        """Those to choose by, if any."""
        return self._split[1]

    @cached_property
    def test(self) -> Pair:
        """Those to be judged by."""
        return self.normalise(self.images.test_images), self.images.test_labels

    def outside(self, name: str) -> Tensor:
        """Normalised images from elsewhere: "letters", "rotated", or the test images of another data set."""
        return self.normalise(outside(name, self.images))

    def describe(self) -> dict[str, Any]:
        """Say in plain words and numbers which task it is; `ImageTask.described` makes it again."""
        return {
            "data": self.data,
            "model": self.chosen_model,
            "validation": self.validation,
            "seed": self.seed,
            "normaliser": {"mean": list(self.normalise.mean), "std": list(self.normalise.std)},
            **({} if self.num_train is None else {"num_train": self.num_train}),
            **({} if self.width == 64 else {"width": self.width}),
        }

    @classmethod
    def described(cls, text: dict[str, Any]) -> "ImageTask":
        """Make the task that `describe` told of; other entries are ignored.

        >>> task = ImageTask("digits", validation=0.2)
        >>> ImageTask.described(task.describe()) == ImageTask("digits", "convnet", validation=0.2)
        True
        """
        normaliser = Normaliser(**{name: tuple(values) for name, values in text["normaliser"].items()})
        size = {name: text[name] for name in ("num_train", "width") if name in text}
        return cls(text["data"], text["model"], text["validation"], text["seed"], normaliser, **size)

    @cached_property
    def _split(self) -> tuple[Pair, Pair | None]:
        x, y = self.normalise(self.images.train_images), self.images.train_labels
        num_held_out = round(self.validation * len(y))
        check_held_out(self.data, len(y), self.validation)
        if not num_held_out and self.num_train is None:
            return (x, y), None
        if num_held_out >= len(y):
            raise ConfigError(f"--validation {self.validation} leaves no training images; hold out less")
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(self.seed))
        held_out, kept = order[:num_held_out], order[num_held_out:]
        check_num_train(self.data, len(y), self.validation, self.num_train)
        kept = kept[: self.num_train]
        return (x[kept], y[kept]), (x[held_out], y[held_out]) if num_held_out else None


def check_held_out(data: str, num_images: int, validation: float) -> None:
    """Refuse a part that is no image at all, since nothing would be held out in silence.

    >>> check_held_out("digits", 1437, 0.0003)
    Traceback (most recent call last):
    varlap.errors.ConfigError: validation = 0.0003 of 1437 images of digits is none; hold out more, such as 0.1, or 0
    """
    if validation and not round(validation * num_images):
        raise ConfigError(
            f"validation = {validation:g} of {num_images} images of {data} is none; hold out more, such as 0.1, or 0"
        )


def check_num_train(data: str, num_images: int, validation: float, num_train: int | None) -> None:
    """Refuse to train on more images than there are besides those that are held out.

    >>> check_num_train("digits", 1437, 0.2, 1200)
    Traceback (most recent call last):
    varlap.errors.ConfigError: num_train = 1200, but digits has 1150 images to train on
    """
    num_left = num_images - round(validation * num_images)
    if num_train is not None and num_train > num_left:
        raise ConfigError(f"num_train = {num_train}, but {data} has {num_left} images to train on")
