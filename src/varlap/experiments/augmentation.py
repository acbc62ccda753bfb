"""Which random changes leave an image what it is, by data set."""

from collections.abc import Callable

import torch
from torch import Tensor

from varlap.data import ArrayData, Normaliser, crop_and_flip

MIRRORED = ("cifar10", "cifar100", "fashion_mnist")
"""Data whose mirror images belong to the same class. Writing, and house numbers, are none; garments are, though shoes
all point to the left, and published results on them are with flips."""
SHARE_OF_THE_SIDE = 8
"""An image may shift by an eighth of its side: the usual 4 pixels of 28 or 32, and 1 of the digits' 8."""


def augmentation(data: ArrayData, normalise: Normaliser) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Return random crops, with flips for `MIRRORED` data, of normalised images; what comes in from outside is black.

    >>> from varlap.data import load
    >>> digits = load("digits")
    >>> normalise = Normaliser.of(digits.train_images)
    >>> images = normalise(torch.zeros(2, 1, 8, 8))
    >>> augment = augmentation(digits, normalise)
    >>> torch.allclose(augment(images, torch.Generator().manual_seed(0)), images)  # black stays black
    True
    """
    flip = data.name in MIRRORED
    padding = max(1, round(data.image_shape[1] / SHARE_OF_THE_SIDE))
    black = normalise(torch.zeros(data.image_shape[0], 1, 1))

    def crop(images: Tensor, generator: torch.Generator) -> Tensor:
        nonlocal black
        black = black.to(images)
        # Zeros are what is filled in, so that is what black has to be meanwhile.
        return crop_and_flip(images - black, generator, padding=padding, flip=flip) + black

    return crop
