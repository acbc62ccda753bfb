"""Images from outside the training distribution that need no download: the test images turned, and letters."""

import logging
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from varlap.data import ArrayData, data_folder, load
from varlap.errors import ConfigError, DataError, did_you_mean

MADE = ("letters", "rotated")
"""What `outside` makes by itself; any other name is a data set."""

PARTNERS = {
    "digits": ("letters",),
    "fashion_mnist": ("mnist", "letters"),
    "mnist": ("fashion_mnist", "letters"),
    "cifar10": ("svhn", "rotated"),
    "cifar100": ("svhn", "rotated"),
    "svhn": ("cifar10", "rotated"),
}
"""What a data set is told from: the first that is at hand. All have images of the same size and channels."""

log = logging.getLogger(__name__)

# Seven rows of five pixels. Letters that are easily taken for a digit (B, I, O, S, Z, ...) are not among them.
_GLYPHS = {
    "A": "01110 10001 10001 11111 10001 10001 10001",
    "E": "11111 10000 10000 11110 10000 10000 11111",
    "F": "11111 10000 10000 11110 10000 10000 10000",
    "H": "10001 10001 10001 11111 10001 10001 10001",
    "K": "10001 10010 10100 11000 10100 10010 10001",
    "M": "10001 11011 10101 10101 10001 10001 10001",
    "N": "10001 11001 10101 10011 10001 10001 10001",
    "P": "11110 10001 10001 11110 10000 10000 10000",
    "R": "11110 10001 10001 11110 10100 10010 10001",
    "T": "11111 00100 00100 00100 00100 00100 00100",
    "W": "10001 10001 10001 10101 10101 11011 10001",
    "X": "10001 10001 01010 00100 01010 10001 10001",
}


def outside(name: str, inside: ArrayData) -> Tensor:
    """Return images from elsewhere, in the form of the test images `inside`, before any normalising.

    Args:
        name: "letters", as many as there are test images; "rotated", the test images turned by 90 degrees; or a data
            set, whose test images must have the same size and channels.
        inside: the data that the network was trained on.

    >>> outside("rotated", load("digits")).shape
    torch.Size([360, 1, 8, 8])
    """
    if name == "letters":
        return letters(len(inside.test_images), inside.test_images)
    if name == "rotated":
        height, width = inside.image_shape[1:]
        if height != width:
            raise ConfigError(f"rotated images of {inside.name} would be {width}×{height}, not {height}×{width}")
        return inside.test_images.rot90(1, (2, 3))
    if name == inside.name:
        raise ConfigError(f"{name} is what the network was trained on; choose other data, or one of {', '.join(MADE)}")
    if (hint := did_you_mean(name, MADE)).startswith("did"):  # else it is the name of a data set
        raise ConfigError(f"no images are called {name!r}; {hint}")
    images = load(name)
    if images.image_shape != inside.image_shape:
        raise ConfigError(
            f"images of {name} are {_size(images)}, those of {inside.name} {_size(inside)}; choose data of the same "
            f"size and channels, or one of {', '.join(MADE)}"
        )
    return images.test_images


def partner(inside: ArrayData) -> tuple[str, Tensor] | None:
    """Return the images that a data set is usually told from, by name: the first of `PARTNERS` that is at hand.

    >>> partner(load("digits"))[0]
    'letters'
    """
    for name in PARTNERS.get(inside.name, ("rotated",)):
        if name in MADE or (data_folder() / f"{name}.npz").is_file():
            try:
                return name, outside(name, inside)
            except (ConfigError, DataError) as error:  # a damaged file, or images of another size
                log.warning("%s cannot serve as images from elsewhere: %s", name, error)
    return None


def letters(count: int, like: Tensor, seed: int = 0) -> Tensor:
    """Draw letters at random places, sizes, slants and strengths, in the size, channels and range of other images.

    >>> letters(3, like=torch.zeros(1, 1, 8, 8)).shape
    torch.Size([3, 1, 8, 8])
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    drawn = torch.stack([_bitmap(rows) for rows in _GLYPHS.values()])
    chosen = drawn[torch.arange(count) % len(drawn)]
    angle, height, width = uniform(-math.pi / 18, math.pi / 18), uniform(0.8, 1.0), uniform(0.6, 0.75)
    across, down, strength = uniform(-0.15, 0.15), uniform(-0.1, 0.1), uniform(0.75, 1.0)
    # Where on the glyph, from −1 to 1 each way, a pixel of the image lies.
    rows = [[angle.cos() / width, angle.sin() / width, across], [-angle.sin() / height, angle.cos() / height, down]]
    placed = torch.stack([torch.stack(row, -1) for row in rows], 1)
    grid = F.affine_grid(placed, [count, 1, *like.shape[2:]], align_corners=False)
    images = F.grid_sample(chosen, grid, align_corners=False) * strength[:, None, None, None]
    images = images.expand(-1, like.shape[1], -1, -1)
    return images.to(like.dtype) if like.is_floating_point() else (255 * images).round().to(like.dtype)


def _bitmap(rows: str) -> Tensor:
    return torch.tensor([[[float(pixel) for pixel in row] for row in rows.split()]])


def _size(data: ArrayData) -> str:
    channels, height, width = data.image_shape
    return f"{height}×{width} with {channels} channel{'s' * (channels > 1)}"
