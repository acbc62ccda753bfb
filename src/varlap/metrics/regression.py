"""Scores of real-valued predictions, given as a mean and a variance.

Likelihood, intervals and CRPS take the prediction for a Gaussian with these moments. For an average over networks, a
mixture, and for counts that is an approximation; only the NLL of `evaluate` goes by the exact density.
"""

import math

import torch
from torch import Tensor

from varlap.errors import BatchError, NonFiniteError
from varlap.likelihoods.prediction import standard_half_width
from varlap.likelihoods.protocol import sum_over_positions
from varlap.metrics.rows import wide


def rmse(mean: Tensor, targets: Tensor) -> float:
    """Return the root of the mean squared error, over all items and outputs.

    >>> rmse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])) == math.sqrt(2)
    True
    """
    check_moments(mean, targets)
    return math.sqrt(float(wide((mean - targets).square()).mean()))


def log_likelihood(mean: Tensor, variance: Tensor, targets: Tensor) -> float:
    """Return the mean over items of log N(target; mean, variance), summed over an item's outputs.

    >>> round(log_likelihood(torch.zeros(1), torch.ones(1), torch.zeros(1)), 4)
    -0.9189
    """
    check_moments(mean, targets, variance)
    return float(sum_over_positions(wide(gaussian_log_probs(mean, variance, targets))).mean())


def coverage(mean: Tensor, variance: Tensor, targets: Tensor, level: float = 0.95) -> float:
    """Return the share of targets inside their central interval of this level; `level` itself would be perfect.

    >>> coverage(torch.zeros(2), torch.ones(2), torch.tensor([1.9, 2.0]), level=0.95)
    0.5
    """
    check_moments(mean, targets, variance)
    return float(wide(((targets - mean).abs() <= half_width(variance, level)).float()).mean())


def width(variance: Tensor, level: float = 0.95) -> float:
    """Return the mean width of the central intervals of this level.

    >>> round(width(torch.ones(3), level=0.95), 4)
    3.9199
    """
    check_moments(variance, variance, variance)
    return float(wide(2 * half_width(variance, level)).mean())


def crps(mean: Tensor, variance: Tensor, targets: Tensor) -> float:
    """Return the mean continuous ranked probability score of a Gaussian, in the target's unit; lower is better.

    For one target it is ∫ (F(t) − 1[t ≥ target])² dt; without variance it is the absolute error.

    >>> round(crps(torch.zeros(1), torch.ones(1), torch.zeros(1)), 4)
    0.2337
    """
    check_moments(mean, targets, variance)
    return float(wide(gaussian_crps(mean, variance, targets)).mean())


def gaussian_log_probs(mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    """Return log N(target; mean, variance), entry by entry."""
    return -0.5 * ((targets - mean).square() / variance + variance.log() + math.log(2 * math.pi))


def half_width(variance: Tensor, level: float) -> Tensor:
    """Return half the width of each central interval."""
    return standard_half_width(level) * variance.sqrt()


def gaussian_crps(mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
    """Return σ [z (2Φ(z) − 1) + 2φ(z) − 1/√π] with z = (target − mean) / σ, entry by entry."""
    std, error = variance.sqrt(), targets - mean
    z = error / std.clamp(min=torch.finfo(std.dtype).tiny)  # without variance, z = 0 or infinite: the absolute error
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    return error * torch.erf(z / math.sqrt(2)) + std * (2 * density - 1 / math.sqrt(math.pi))


def check_moments(mean: Tensor, targets: Tensor, variance: Tensor | None = None, *, shapes_only: bool = False) -> None:
    """Refuse other shapes than the mean's, nothing at all, NaN, and negative variances."""
    named = {"mean": mean, "targets": targets} | ({} if variance is None else {"variance": variance})
    for name, tensor in named.items():
        if tensor.shape != mean.shape:
            raise BatchError(
                f"{name} has shape {tuple(tensor.shape)} but mean has {tuple(mean.shape)}; reshape it, for example "
                f"{name}.reshape(mean.shape): broadcasting would hide a mistake"
            )
    if not mean.numel():
        raise BatchError("there is nothing to score: mean and targets are empty; give at least one item")
    if shapes_only:
        return
    for name, tensor in named.items():
        if not bool(tensor.isfinite().all()):
            raise NonFiniteError(f"{name} holds NaN or Inf; did the network diverge, or are the data unclean?")
    if variance is not None and bool((variance < 0).any()):
        raise BatchError(f"variance holds {float(variance.min()):.4g}; give variances, such as std.square()")
