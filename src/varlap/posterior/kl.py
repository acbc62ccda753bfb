"""The KL divergence between posterior and prior, Eq. 12, and its gradients, in closed form."""

from typing import NamedTuple

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
    widths = _of_widths((2 * log_ratio).exp() - 1, log_ratio, mean)
    return widths + quadratic_part(mean, prior_mean, prior_scale)


class KLWithGradients(NamedTuple):
    """Eq. 12 summed over weights, and its gradients."""

    value: Tensor
    in_mean: Tensor
    in_log_sigma: Tensor


def kl_with_gradients(
    mean: Tensor, log_sigma: Tensor, variance: Tensor, prior_mean: Tensor | float, prior_scale: Tensor
) -> KLWithGradients:
    """Return Eq. 12 with ∂KL/∂μ = (μ − m)/s² and ∂KL/∂log σ = σ²/s² − 1, summed over weights that share a log σ.

    The variance σ² is given besides, since its exponential is dear and serves elsewhere too.

    >>> import torch
    >>> kl_with_gradients(torch.ones(2), torch.zeros(2), torch.ones(2), 0.0, torch.tensor(1.0))
    KLWithGradients(value=tensor(1.), in_mean=tensor([1., 1.]), in_log_sigma=tensor([0., 0.]))
    """
    in_log_sigma = variance.div(prior_scale.square()).sub_(1)
    widths = _of_widths(in_log_sigma, log_sigma - prior_scale.log(), mean)
    value = widths + quadratic_part(mean, prior_mean, prior_scale)
    if log_sigma.shape != mean.shape:
        in_log_sigma = in_log_sigma.expand_as(mean).sum_to_size(log_sigma.shape)
    return KLWithGradients(value, kl_gradient_in_mean(mean, prior_mean, prior_scale), in_log_sigma)


def quadratic_part(mean: Tensor, prior_mean: Tensor | float, prior_scale: Tensor) -> Tensor:
    """Return the part of Eq. 12 that the mean alone enters, Σ ½ (μ − m)²/s²: −log P(μ) of Eq. 6 up to a constant."""
    return 0.5 * _sum(_offset(mean, prior_mean).square()) / prior_scale.square()


def kl_gradient_in_mean(mean: Tensor, prior_mean: Tensor | float, prior_scale: Tensor) -> Tensor:
    """∂KL/∂μ = (μ − m)/s²."""
    return _offset(mean, prior_mean) / prior_scale.square()


def _of_widths(excess: Tensor, log_ratio: Tensor, mean: Tensor) -> Tensor:
    """Return Σ ½ [σ²/s² − 1 − log(σ²/s²)] over the weights of `mean`, which may share one σ."""
    num_sharing = mean.numel() // log_ratio.numel()
    return 0.5 * num_sharing * _sum(torch.sub(excess, log_ratio, alpha=2))


def _offset(mean: Tensor, prior_mean: Tensor | float) -> Tensor:
    return mean - prior_mean if isinstance(prior_mean, Tensor) or prior_mean else mean


def _sum(tensor: Tensor) -> Tensor:
    """Sum in at least single precision: half overflows."""
    return tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
