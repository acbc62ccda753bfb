"""The mean-field Gaussian posterior: drawing from it (Eq. 4) and its best variances (Eq. 23)."""

from collections.abc import Mapping

import torch
from torch import Tensor


def reparameterise(mean: Tensor, log_sigma: Tensor, noise: Tensor) -> Tensor:
    """Eq. 4: w = μ + σ ε.

    >>> reparameterise(torch.tensor(1.0), torch.tensor(0.0), torch.tensor(2.0))
    tensor(3.)
    """
    return mean + (log_sigma.exp() * noise).to(mean.dtype)


def optimal_log_sigma(precision: Tensor, beta: float | Tensor) -> Tensor:
    """Eq. 23 with tempering: σ² = β / (N f + β/s²), given that denominator, the precision of the tempered posterior.

    >>> optimal_log_sigma(torch.tensor(4.0), beta=1.0).exp()
    tensor(0.5000)
    """
    log_beta = torch.as_tensor(beta, dtype=precision.dtype, device=precision.device).log()
    return 0.5 * (log_beta - precision.log())


@torch.no_grad()
def optimal_log_sigmas(
    log_sigma: Mapping[str, Tensor],
    curvature: Mapping[str, Tensor],
    prior_scale: Mapping[str, Tensor],
    num_data: float,
    beta: float | Tensor,
) -> dict[str, Tensor]:
    """Return the best value of every log σ, in its shape, for a diagonal curvature per datum.

    Weights that share one log σ share one variance, whose precision is the mean of theirs.
    """
    precisions: dict[int, Tensor] = {}
    counts: dict[int, int] = {}
    for name, parameter in log_sigma.items():
        precision = num_data * curvature[name] + beta / prior_scale[name].square()
        share = precision.numel() // parameter.numel()
        precision = precision.sum_to_size(parameter.shape)
        key = id(parameter)
        precisions[key] = precisions[key] + precision if key in precisions else precision
        counts[key] = counts.get(key, 0) + share
    return {
        name: optimal_log_sigma(precisions[id(parameter)] / counts[id(parameter)], beta)
        for name, parameter in log_sigma.items()
    }
