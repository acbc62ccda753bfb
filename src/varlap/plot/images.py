"""The images that a network is least sure about."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from varlap.errors import BatchError, ConfigError
from varlap.likelihoods import Prediction
from varlap.likelihoods.prediction import entropy
from varlap.plot import style
from varlap.plot.inputs import Values, as_tensor, probabilities

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GAP = 0.06  # around an image, in units of its width
_WORDS = 0.34  # room for the words above it


def least_sure(
    prediction: Prediction | Values,
    images: Values,
    labels: Values | None = None,
    *,
    count: int = 12,
    names: Sequence[str] | None = None,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw the images of the highest entropy, the least sure first, with the predicted class and its probability.

    With labels, wrong predictions are red and name the true class as well.

    Args:
        prediction: a prediction, or class probabilities [N, K].
        images: grey or RGB, [N, C, H, W], [N, H, W] or [N, H, W, C].
        labels: the true classes, [N].
        count: how many images.
        names: what the classes are called; by default their numbers.
        ax: where to draw; a new figure if None.

    >>> probs = torch.tensor([[0.9, 0.1], [0.4, 0.6]])
    >>> ax = least_sure(probs, torch.rand(2, 1, 8, 8), torch.tensor([0, 0]))
    >>> [text.get_text() for text in ax.texts]
    ['1, not 0  60%', '0  90%']
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"plot.least_sure(count={count}) must be a whole number, at least 1")
    probs, exclusive = probabilities(prediction, "least_sure")
    if not exclusive or probs.ndim != 2:
        raise BatchError(
            f"plot.least_sure needs probabilities [N, K] of classes that exclude each other, got {tuple(probs.shape)}"
        )
    truth = None if labels is None else as_tensor(labels).long()
    for what, number in (("images", len(images)), ("labels", len(probs) if truth is None else len(truth))):
        if number != len(probs):
            raise BatchError(f"plot.least_sure: {number} {what} for {len(probs)} predictions; give one for each")
    if names is not None and len(names) < probs.shape[1]:
        raise ConfigError(f"plot.least_sure: {len(names)} names for {probs.shape[1]} classes; name each of them")
    order = entropy(probs).argsort(descending=True, stable=True)[:count]
    pictures = _pictures(images, order)
    columns = math.ceil(math.sqrt(len(order) * 4 / 3))
    num_rows = math.ceil(len(order) / columns)
    height = pictures.shape[1] / pictures.shape[2] + _WORDS
    ax = style.axes_for(ax, "least_sure", size=(4.2, 4.2 * num_rows * height / columns))
    called = [str(index) for index in range(probs.shape[1])] if names is None else names
    for place, (item, picture) in enumerate(zip(order.tolist(), pictures, strict=True)):
        row, column = divmod(place, columns)
        bottom, left = -(row + 1) * height, column
        extent = (left + _GAP, left + 1 - _GAP, bottom + _GAP, bottom + height - _WORDS - _GAP)
        ax.imshow(picture, extent=extent, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        guess = int(probs[item].argmax())
        right = truth is None or int(truth[item]) == guess
        words = called[guess] if truth is None or right else f"{called[guess]}, not {called[int(truth[item])]}"
        ax.text(
            left + 0.5,
            bottom + height - _WORDS,
            f"{words}  {probs[item, guess]:.0%}",
            ha="center",
            va="bottom",
            fontsize=style.SMALL,
            color=None if right else style.DARK_RED,
        )
    ax.set_xlim(0, columns)
    ax.set_ylim(-num_rows * height, 0)
    ax.set_aspect("equal")
    ax.set_axis_off()
    return ax


def _pictures(images: Values, order: Tensor) -> np.ndarray:
    """Return the chosen images as [M, H, W] or [M, H, W, 3] with values in [0, 1]."""
    # Chosen before they are moved: there may be many, on another device.
    chosen = as_tensor(
        images[order.to(images.device)] if isinstance(images, Tensor) else np.asarray(images)[order.numpy()]
    )
    if chosen.ndim == 4 and chosen.shape[1] in (1, 3):
        chosen = chosen.movedim(1, -1)
    if chosen.ndim not in (3, 4) or (chosen.ndim == 4 and chosen.shape[3] not in (1, 3)):
        raise BatchError(
            f"plot.least_sure: images have shape {tuple(images.shape)}; give [N, H, W], or "
            "[N, C, H, W] with 1 or 3 channels"
        )
    if chosen.ndim == 4 and chosen.shape[3] == 1:
        chosen = chosen[..., 0]
    if chosen.dtype == torch.uint8:
        return (chosen.double() / 255).numpy()
    chosen = chosen.double()
    low, high = float(chosen.min()), float(chosen.max())
    if low < 0 or high > 1:  # normalised ones: the range of those shown becomes black to white
        chosen = (chosen - low) / (high - low)
    return chosen.numpy()
