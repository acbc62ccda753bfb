"""A function of one variable, and how sure the network is of it."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from varlap.errors import BatchError, ConfigError
from varlap.likelihoods import Prediction
from varlap.plot import style
from varlap.plot.inputs import Values, as_tensor, predict
from varlap.posterior import BNN
from varlap.predict import How

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def regression_band(
    prediction: BNN | Prediction,
    x: Values,
    train: tuple[Values, Values] | None = None,
    *,
    how: How = "mean",
    ax: "Axes | None" = None,
    **options: Any,
) -> "Axes":
    """Draw the predicted mean with bands of one and two standard deviations, and the training points.

    The bands are those of a new target: noise and the weights' uncertainty together. Where a prediction tells them
    apart, dashed lines show two standard deviations of the noise alone; what lies beyond is the weights'. The mean
    network knows of no such uncertainty: its bands are noise.

    Args:
        prediction: a network, which is asked about `x`, or what it said about `x`.
        x: inputs, [N] or [N, 1], in any order.
        train: inputs and targets to draw as points.
        how: how the network predicts, with its options, as for `bnn.predict`.
        ax: where to draw; a new figure if None.
        options: further arguments of `bnn.predict`, such as `num_samples`.

    >>> import torch
    >>> prediction = Prediction(mean=torch.zeros(2), variance=torch.ones(2))
    >>> ax = regression_band(prediction, torch.tensor([1.0, 0.0]))
    >>> ax.lines[0].get_xydata().tolist()
    [[0.0, 0.0], [1.0, 0.0]]
    """
    inputs = _column(x, "x")
    if isinstance(prediction, BNN):
        prediction = predict(prediction, inputs[:, None], how, options)
    elif options or how != "mean":
        raise ConfigError(
            "plot.regression_band: how= and its options are for a network; this prediction was made already"
        )
    if prediction.mean is None or prediction.variance is None:
        raise ConfigError("plot.regression_band needs a mean and a variance, and this prediction is of classes")
    order = inputs.argsort()
    at, mean, std = inputs[order].numpy(), _column(prediction.mean, "mean"), _column(prediction.std, "std")
    if len(mean) != len(inputs):
        raise BatchError(f"plot.regression_band: the prediction has {len(mean)} items and x has {len(inputs)}")
    ax = style.axes_for(ax, "regression_band")
    mean, std = mean[order].numpy(), std[order].numpy()
    ax.plot(at, mean, color=style.BLUE, label="mean", zorder=2)
    for times, alpha in ((1, 0.35), (2, 0.18)):
        low, high = mean - times * std, mean + times * std
        ax.fill_between(at, low, high, color=style.BLUE, alpha=alpha, linewidth=0, label=f"±{times} std", zorder=1)
    if prediction.noise_variance is not None:
        noise = 2 * _column(prediction.noise_variance, "noise_variance")[order].sqrt().numpy()
        for edge, label in ((mean - noise, "±2 std of the noise"), (mean + noise, None)):
            ax.plot(at, edge, color=style.PURPLE, linestyle="--", linewidth=1, label=label, zorder=2)
    if train is not None:
        points = _column(train[0], "train[0]").numpy(), _column(train[1], "train[1]").numpy()
        ax.scatter(*points, s=10, color=style.RED, label="training data", zorder=3, linewidths=0)
    style.tidy(ax, "x", "y")
    style.legend(ax)
    return ax


def _column(values: Values, what: str) -> Tensor:
    """Return values [N] or [N, 1] as [N]."""
    tensor = as_tensor(values)
    if tensor.ndim > 2 or tensor.ndim == 0 or (tensor.ndim == 2 and tensor.shape[1] != 1):
        raise BatchError(
            f"plot.regression_band: {what} has shape {tuple(tensor.shape)}; it draws one output against one input: "
            "give [N] or [N, 1]"
        )
    return tensor.flatten()
