"""PreactResNet-18 for 32×32 images, the network of the paper's experiments."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from varlap.models.checks import check_sizes, new_activation

SMALLEST_IMAGE = 32
"""Images smaller than this are padded to it, so that the last stage still sees 4×4 positions."""


class PreactBlock(nn.Module):
    """Two rounds of batch norm → activation → 3×3 convolution, added to the input (He et al. 2016).

    Where the shape changes, the shortcut is a 1×1 convolution of the pre-activated input.

    >>> import torch
    >>> PreactBlock(4, 8, stride=2)(torch.zeros(1, 4, 6, 6)).shape
    torch.Size([1, 8, 3, 3])
    """

    def __init__(
        self, channels: int, out_channels: int, stride: int, activation: Callable[[], nn.Module] = nn.Softplus
    ) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.activation1 = new_activation("PreactBlock", activation)
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.activation2 = new_activation("PreactBlock", activation)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.shortcut = None
        if stride != 1 or channels != out_channels:
            self.shortcut = nn.Conv2d(channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's residual to its input."""
        preactivated = self.activation1(self.norm1(x))
        shortcut = x if self.shortcut is None else self.shortcut(preactivated)
        residual = self.conv2(self.activation2(self.norm2(self.conv1(preactivated))))
        return residual + shortcut


class PreactResNet(nn.Module):
    """The network that `preact_resnet18` builds.

    >>> import torch
    >>> network = PreactResNet(num_classes=10, num_channels=1, width=2)
    >>> network(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        num_classes: int,
        num_channels: int,
        width: int,
        activation: Callable[[], nn.Module] = nn.Softplus,
        blocks_per_stage: int = 2,
    ) -> None:
        super().__init__()
        sizes = {"num_classes": num_classes, "num_channels": num_channels, "width": width}
        check_sizes("preact_resnet18", **sizes, blocks_per_stage=blocks_per_stage)
        self.stem = nn.Conv2d(num_channels, width, 3, padding=1, bias=False)
        blocks: list[nn.Module] = []
        channels = width
        for stage, stride in enumerate((1, 2, 2, 2)):
            out_channels = width * 2**stage
            blocks.append(PreactBlock(channels, out_channels, stride, activation))
            blocks += [PreactBlock(out_channels, out_channels, 1, activation) for _ in range(blocks_per_stage - 1)]
            channels = out_channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, one row an image."""
        features = self.blocks(self.stem(_pad_to_smallest(images)))
        # At 32×32 this is the average over the 4×4 positions that are left; larger images have more.
        return self.head(features.mean(dim=(2, 3)))


def preact_resnet18(
    num_classes: int = 10,
    num_channels: int = 3,
    width: int = 64,
    activation: Callable[[], nn.Module] = nn.Softplus,
) -> PreactResNet:
    """Build the PreactResNet-18 of the paper's section 5, for 32×32 images.

    This is the variant in wide use for CIFAR, of 11,171,146 parameters at the default width: the average pool
    follows the last block directly. He et al. (2016) put one more batch norm and activation between them.

    Smaller images, such as 28×28, are padded with zeros to 32×32; after normalising, zero is the mean pixel.

    Args:
        num_classes: number of outputs.
        num_channels: channels of the images.
        width: channels of the first stage; each of the three later stages doubles them.
        activation: what makes an activation module. Softplus is the paper's.

    >>> import torch
    >>> network = preact_resnet18(num_classes=5, width=4)
    >>> network(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 5])
    """
    return PreactResNet(num_classes, num_channels, width, activation)


def _pad_to_smallest(images: Tensor) -> Tensor:
    missing_rows = max(0, SMALLEST_IMAGE - images.shape[-2])
    missing_columns = max(0, SMALLEST_IMAGE - images.shape[-1])
    if not missing_rows and not missing_columns:
        return images
    top, left = missing_rows // 2, missing_columns // 2
    return F.pad(images, (left, missing_columns - left, top, missing_rows - top))
