"""What a classifier of two inputs says about the plane."""

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from varlap.errors import BatchError, ConfigError
from varlap.likelihoods import Prediction
from varlap.plot import style
from varlap.plot.inputs import Values, as_tensor, predict
from varlap.posterior import BNN
from varlap.predict import How
from varlap.seeds import checked_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

What = Literal["probability", "entropy", "mutual_information"]
_MARGIN = 0.25  # of the training data's width, on each side


def decision_2d(
    bnn: BNN,
    train: tuple[Values, Values] | None = None,
    what: What = "probability",
    *,
    how: How = "mean",
    limits: tuple[float, float, float, float] | None = None,
    resolution: int = 150,
    ax: "Axes | None" = None,
    **options: Any,
) -> "Axes":
    """Draw the class probabilities, or how uncertain they are, over a plane of two inputs, with the boundaries.

    Args:
        bnn: a classifier of inputs [N, 2].
        train: inputs and labels to draw as points.
        what: "probability" (of class 1, or of the most probable class if there are more than two), "entropy" (in all),
            or "mutual_information" (what comes from the weights; not for the mean network).
        how: how the network predicts, as for `bnn.predict`.
        limits: left, right, bottom, top; by default the training data and a margin.
        resolution: grid points on each side.
        ax: where to draw; a new figure if None.
        options: further arguments of `bnn.predict`, such as `num_samples`.

    >>> ax = decision_2d(BNN(torch.nn.Linear(2, 2)), limits=(-1, 1, -1, 1), resolution=20)
    >>> ax.images[0].get_array().shape
    (20, 20)
    """
    if what not in ("probability", "entropy", "mutual_information"):
        raise ConfigError(f"plot.decision_2d(what={what!r}): choose 'probability', 'entropy' or 'mutual_information'")
    resolution = checked_count("plot.decision_2d", "resolution", resolution, least=2)
    points, labels = (None, None) if train is None else _points(*train)
    extent = limits or _limits(points)
    horizontal = torch.linspace(extent[0], extent[1], resolution)
    vertical = torch.linspace(extent[2], extent[3], resolution)
    y, x = torch.meshgrid(vertical, horizontal, indexing="ij")
    prediction = predict(bnn, torch.stack([x.flatten(), y.flatten()], 1), how, options)
    probs = _class_probs(prediction)
    values, highest, label = _shown(prediction, probs, what)
    ax = style.axes_for(ax, "decision_2d")
    lowest = 1 / probs.shape[1] if what == "probability" and probs.shape[1] > 2 else 0.0
    two_sided = what == "probability" and probs.shape[1] == 2
    dark = what != "entropy" and not two_sided  # what lies under the boundaries
    image = ax.imshow(
        values.reshape(resolution, resolution).numpy(),
        extent=extent,
        origin="lower",
        aspect="auto",
        interpolation="bilinear",
        cmap=style.diverging() if two_sided else style.SEQUENTIAL,
        vmin=lowest,
        vmax=highest,
    )
    ax.figure.colorbar(image, ax=ax, label=label)
    _boundaries(ax, probs, horizontal, vertical, colour="white" if dark else "black")
    if points is not None and labels is not None:
        for index in labels.unique().tolist():
            chosen = points[labels == index].numpy()
            ax.scatter(
                *chosen.T,
                s=16,
                color=style.colour(index),
                marker=style.marker(index),
                edgecolors="white",
                linewidths=0.5,
                label=f"class {index}",
            )
        style.legend(ax, ncols=1 + len(labels.unique()) // 6)
    ax.set_xlabel("$x_1$")
    ax.set_ylabel("$x_2$")
    ax.set_xlim(extent[0], extent[1])
    ax.set_ylim(extent[2], extent[3])
    return ax


def _points(x: Values, y: Values) -> tuple[Tensor, Tensor]:
    points, labels = as_tensor(x), as_tensor(y).flatten().long()
    if points.ndim != 2 or points.shape[1] != 2 or len(points) != len(labels):
        raise BatchError(
            f"plot.decision_2d: train has inputs of shape {tuple(points.shape)} and {len(labels)} labels; give inputs "
            "[N, 2] and as many labels"
        )
    return points, labels


def _limits(points: Tensor | None) -> tuple[float, float, float, float]:
    if points is None:
        raise ConfigError("plot.decision_2d needs train=(x, y), or limits=(left, right, bottom, top)")
    low, high = points.amin(0), points.amax(0)
    margin = _MARGIN * (high - low).clamp(min=1e-6)
    (left, bottom), (right, top) = (low - margin).tolist(), (high + margin).tolist()
    return left, right, bottom, top


def _class_probs(prediction: Prediction) -> Tensor:
    """Return probabilities [M, K]; a single yes or no is two classes."""
    if prediction.probs is None:
        raise ConfigError("plot.decision_2d is for classes, and this network predicts a mean and a variance")
    probs = as_tensor(prediction.probs)
    if not prediction.exclusive and probs.flatten(1).shape[1] == 1:
        probs = torch.cat([1 - probs.flatten(1), probs.flatten(1)], 1)
    elif not prediction.exclusive or probs.ndim != 2:
        raise BatchError(
            f"plot.decision_2d draws one label an input, and the probabilities have shape {tuple(probs.shape)}"
        )
    return probs


def _shown(prediction: Prediction, probs: Tensor, what: What) -> tuple[Tensor, float | None, str]:
    """Return what is drawn, the top of its scale and its name."""
    if what == "entropy":
        return as_tensor(prediction.entropy), math.log(probs.shape[1]), "entropy (nats)"
    if what == "mutual_information":
        if prediction.mutual_information is None:
            raise ConfigError(
                "plot.decision_2d: a prediction by one network has no mutual information; pass how='sampled' or "
                "another mode that averages over weights"
            )
        return as_tensor(prediction.mutual_information), None, "mutual information (nats)"
    if probs.shape[1] == 2:
        return probs[:, 1], 1.0, "probability of class 1"
    return probs.amax(1), 1.0, "probability of the most probable class"


def _boundaries(ax: "Axes", probs: Tensor, horizontal: Tensor, vertical: Tensor, colour: str) -> None:
    """Draw where the most probable class changes: where one class's lead over the best other is zero."""
    best = probs.topk(2, 1).values
    num_classes = probs.shape[1]
    for index in range(1 if num_classes == 2 else 0, num_classes):
        lead = probs[:, index] - torch.where(probs[:, index] == best[:, 0], best[:, 1], best[:, 0])
        if (lead > 0).any() and (lead < 0).any():  # otherwise there is no boundary, of which matplotlib warns
            grid = lead.reshape(len(vertical), len(horizontal)).numpy()
            ax.contour(horizontal.numpy(), vertical.numpy(), grid, levels=[0.0], colors=colour, linewidths=1)
