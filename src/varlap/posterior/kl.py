"""The KL divergence between posterior and prior, Eq. 12, and its gradients, in closed form."""

import torch
from torch import Tensor


def kl_divergence(mean: Tensor, log_sigma: Tensor, prior_mean: Tensor | float, prior_scale: Tensor) -> Tensor:
    """Eq. 12 summed over weights: Σ ½ [(σ² + (μ − m)²)/s² − 1 + log(s²/σ²)].

    A log σ with fewer entries than the mean (one variance for all weights) is shared by broadcasting.

    >>> import torch
    >>> one = torch.tensor(1.0)
    >>> kl_divergence(torch.ones(2), torch.zeros(2), 0.0, one)
    tensor(1.)
    """
    log_ratio = log_sigma - prior_scale.log()
    shrunk = ((mean - prior_mean) / prior_scale).square()
    return 0.5 * ((2 * log_ratio).exp() + shrunk - 1 - 2 * log_ratio).sum()


def quadratic_part(mean: Tensor, prior_mean: Tensor | float, prior_scale: Tensor) -> Tensor:
    """Return the part of Eq. 12 that the mean alone enters, Σ ½ (μ − m)²/s²: −log P(μ) of Eq. 6 up to a constant."""
    shrunk = ((mean - prior_mean) / prior_scale).square()
    return 0.5 * shrunk.sum(dtype=torch.promote_types(shrunk.dtype, torch.float32))  # in half it overflows


def kl_gradient_in_mean(mean: Tensor, prior_mean: Tensor | float, prior_scale: Tensor) -> Tensor:
    """∂KL/∂μ = (μ − m)/s²."""
    return (mean - prior_mean) / prior_scale.square()


def kl_gradient_in_log_sigma(mean: Tensor, log_sigma: Tensor, prior_scale: Tensor) -> Tensor:
    """∂KL/∂log σ = σ²/s² − 1, summed over the weights that share a log σ."""
    gradient = (2 * (log_sigma - prior_scale.log())).exp() - 1
    return gradient.expand_as(mean).sum_to_size(log_sigma.shape)
