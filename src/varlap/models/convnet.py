"""A small convolutional network for small images, quick enough for a CPU."""

from collections.abc import Callable

from torch import nn

from varlap.models.checks import check_sizes, new_activation


def convnet(
    num_channels: int = 1,
    num_classes: int = 10,
    width: int = 16,
    image_size: int = 28,
    activation: Callable[[], nn.Module] = nn.Softplus,
    batch_norm: bool = False,
) -> nn.Sequential:
    """Build three 3×3 convolutions of stride 2 and a linear layer; 33,546 weights for 28×28 images.

    It shrinks by stride, not by max pooling, whose kinks VL would not see.

    Args:
        num_channels: channels of the images.
        num_classes: number of outputs.
        width: channels of the first convolution; the next two have twice and four times as many.
        image_size: height and width of the images, such as 8 (digits), 28 or 32.
        activation: what makes an activation module. Softplus has the second derivative that VL needs.
        batch_norm: normalise after each convolution, which then has no bias of its own.

    >>> import torch
    >>> network = convnet(image_size=8)
    >>> network(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """
    check_sizes("convnet", num_channels=num_channels, num_classes=num_classes, width=width, image_size=image_size)
    layers: list[nn.Module] = []
    channels, size = num_channels, image_size
    for next_channels in (width, 2 * width, 4 * width):
        layers.append(nn.Conv2d(channels, next_channels, 3, stride=2, padding=1, bias=not batch_norm))
        if batch_norm:
            layers.append(nn.BatchNorm2d(next_channels))
        layers.append(new_activation("convnet", activation))
        channels, size = next_channels, (size + 1) // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * size * size, num_classes))
