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
from varlap.seeds import checked_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GAP = 0.06  # around an image, in units of its width
_LINE = 0.25  # room for a line of words above it
_LARGEST, _SMALLEST = 8.5, 5.0  # points


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
    ['1 60%\\nnot 0', '0 90%\\n']
    """
    count = checked_count("plot.least_sure", "count", count)
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
    room = _LINE * (1 if truth is None else 2)
    height = pictures.shape[1] / pictures.shape[2] + 2 * _GAP + room
    ax = style.axes_for(ax, "least_sure", size=(4.2, 4.2 * num_rows * height / columns))
    words = _words(probs[order], None if truth is None else truth[order], names)
    size = _font_size(ax, columns, max(len(line) for text, _ in words for line in text.split("\n")))
    for place, (picture, (text, wrong)) in enumerate(zip(pictures, words, strict=True)):
        row, left = divmod(place, columns)
        bottom = -(row + 1) * height
        extent = (left + _GAP, left + 1 - _GAP, bottom + _GAP, bottom + height - room - _GAP)
        ax.imshow(picture, extent=extent, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        red = {"color": style.DARK_RED} if wrong else None
        ax.text(left + 0.5, bottom + height - room, text, red, ha="center", va="bottom", fontsize=size, linespacing=1.1)
    ax.set_xlim(0, columns)
    ax.set_ylim(-num_rows * height, 0)
    ax.set_aspect("equal")
    ax.set_axis_off()
    return ax


def _words(probs: Tensor, truth: Tensor | None, names: Sequence[str] | None) -> list[tuple[str, bool]]:
    """Return what is said of each image, and whether its prediction is wrong."""
    called = [str(index) for index in range(probs.shape[1])] if names is None else names
    words = []
    for place, row in enumerate(probs):
        guess = int(row.argmax())
        text = f"{called[guess]} {row[guess]:.0%}"
        wrong = truth is not None and int(truth[place]) != guess
        if truth is not None:
            text += f"\nnot {called[int(truth[place])]}" if wrong else "\n"
        words.append((text, wrong))
    return words


def _font_size(ax: "Axes", columns: int, num_letters: int) -> float:
    """Return a size at which so many letters fit over one image; a letter is about 0.6 as wide as it is high."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    points = ax.get_window_extent().width / figure.dpi * 72 / columns
    return min(_LARGEST, max(_SMALLEST, points / (0.6 * num_letters)))


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
