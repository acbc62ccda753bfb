"""What is done to images on the device: normalising, and random crops and flips."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from varlap.errors import BatchError, ConfigError, DataError

_CHUNK = 4096


@dataclass(frozen=True)
class Normaliser:
    """Subtracts a mean and divides by a standard deviation, channel by channel.

    Attributes:
        mean: one value a channel, in the units of the images (0 to 255 for uint8).
        std: likewise; a channel that never varies has 1.

    >>> images = torch.tensor([0, 200], dtype=torch.uint8).reshape(2, 1, 1, 1)
    >>> normalise = Normaliser.of(images)
    >>> normalise
    Normaliser(mean=(100.0,), std=(100.0,))
    >>> normalise(images).flatten()
    tensor([-1.,  1.])
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, images: Tensor) -> "Normaliser":
        """Take mean and standard deviation from images [N, C, H, W]; give those of the training set.

        >>> Normaliser.of(torch.ones(4, 2, 8, 8))
        Normaliser(mean=(1.0, 1.0), std=(1.0, 1.0))
        """
        _check_images("Normaliser.of", images)
        if images.numel() == 0:
            raise BatchError(f"Normaliser.of: images of shape {list(images.shape)} have no pixels to average")
        # In chunks and in float64: a whole set in float64 would take eight times the memory of its bytes.
        chunks = images.split(_CHUNK)
        per_channel = images.numel() // images.shape[1]
        mean = torch.stack([_channel_sums(chunk) for chunk in chunks]).sum(0) / per_channel
        centre = mean[:, None, None]
        square = torch.stack([_channel_sums(chunk, centre) for chunk in chunks]).sum(0) / per_channel
        if not bool(square.isfinite().all()):
            raise DataError("Normaliser.of: the images hold a NaN or an infinity; remove those images first")
        std = square.sqrt()
        varies = std > 1e-7 * mean.abs()  # less is rounding, and would be blown up
        return cls(tuple(mean.tolist()), tuple(torch.where(varies, std, 1).tolist()))

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise images [..., C, H, W] to float32, on their device."""
        if images.dim() < 3 or images.shape[-3] != len(self.mean):
            raise BatchError(
                f"Normaliser of {len(self.mean)} channels got images of shape {list(images.shape)}; "
                f"give [N, {len(self.mean)}, H, W]"
            )
        # Python numbers, not a tensor of them: nothing is copied to the device, so nothing waits for it.
        channels = images.float().unbind(-3)
        return torch.stack([(c - m) / s for c, m, s in zip(channels, self.mean, self.std, strict=True)], dim=-3)


def crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4, flip: bool = True) -> Tensor:
    """Shift each image at random, filling with zeros, and mirror half of them: the usual augmentation.

    Each image is padded on all sides and cut out again at its own offset, on the images' device. On a GPU,
    give a generator of that device: random numbers of another one have to be copied there.

    Args:
        images: [N, C, H, W], of any type.
        generator: where the random numbers come from; the global generators are never touched.
        padding: how far an image may shift in each direction.
        flip: whether to mirror left and right, each image with probability one half.

    >>> images = torch.arange(9.0).reshape(1, 1, 3, 3)
    >>> crop_and_flip(images, torch.Generator().manual_seed(0), padding=1, flip=False)
    tensor([[[[0., 3., 4.],
              [0., 6., 7.],
              [0., 0., 0.]]]])
    """
    _check_images("crop_and_flip", images)
    if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
        raise ConfigError(f"crop_and_flip: padding is {padding!r}; give a whole number of at least 0")
    num_images, num_channels, height, width = images.shape
    device = images.device

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, device=generator.device).to(device)

    top, left = draw(2 * padding + 1, 2, num_images)
    rows = top[:, None] + torch.arange(height, device=device)
    columns = left[:, None] + torch.arange(width, device=device)
    if flip:
        columns = torch.where(draw(2, num_images, 1).bool(), columns.flip(1), columns)
    padded = F.pad(images, (padding, padding, padding, padding))
    image = torch.arange(num_images, device=device)[:, None, None, None]
    channel = torch.arange(num_channels, device=device)[:, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def _channel_sums(images: Tensor, centre: Tensor | None = None) -> Tensor:
    values = (images.cpu() if images.is_mps else images).double()  # MPS has no float64
    return values.sum((0, 2, 3)) if centre is None else (values - centre).square().sum((0, 2, 3))


def _check_images(where: str, images: Tensor) -> None:
    if images.dim() != 4:
        raise BatchError(f"{where}: images have shape {list(images.shape)}; give [N, C, H, W]")
