"""Counts, from log rates."""

import torch
from torch import Tensor, nn

from varlap.errors import BatchError
from varlap.likelihoods.protocol import Prediction, require_same_shape, require_tensor, sum_over_positions, variances_of

LARGEST_RATE = 2.0**62  # beyond, torch's 64-bit counts overflow and come out negative


class Poisson(nn.Module):
    """p(y | outputs) = Poisson(y; exp(outputs)); targets have the outputs' shape.

    >>> Poisson().log_prob(torch.zeros(1, 2), torch.tensor([[0.0, 2.0]]))
    tensor([-2.6931])
    """

    canonical = True
    least = 0.0
    """no target is below, nor is the end of an interval"""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probability of each item, summed over its counts."""
        outputs = require_same_shape(outputs, targets, "poisson")
        counts = targets.to(outputs.dtype)
        return sum_over_positions(counts * outputs - outputs.exp() - torch.lgamma(counts + 1))

    def sample(self, outputs: Tensor, generator: torch.Generator, targets: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Draw every count."""
        outputs = require_tensor(outputs, "poisson").detach()
        # torch refuses NaN here; the check of the finished step says where it came from.
        rate = outputs.exp().to(torch.promote_types(outputs.dtype, torch.float32)).nan_to_num(nan=0.0)
        rate = rate.clamp(max=LARGEST_RATE)
        return torch.poisson(rate.to(generator.device), generator).to(outputs)

    def score(self, outputs: Tensor, noise: Tensor, targets: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return u = √rate ε."""
        return (0.5 * outputs).exp() * noise

    def predict(self, outputs: Tensor) -> Prediction:
        """Return the rate as mean and variance."""
        rate = require_tensor(outputs, "poisson").exp()
        return Prediction(mean=rate, variance=rate)

    def predict_from_gaussian(self, mean: Tensor, covariance: Tensor) -> Prediction:
        """Return the moments under a log rate N(m, v), exactly: E y = exp(m + v/2), Var y = E y + (eᵛ − 1)(E y)²."""
        variance = variances_of(covariance, mean)
        rate = (mean + variance / 2).exp()
        of_rate = variance.expm1() * rate.square()
        return Prediction(mean=rate, variance=rate + of_rate, noise_variance=rate, epistemic_variance=of_rate)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse targets that are no counts."""
        require_same_shape(outputs, targets, "poisson")
        wrong = (targets < 0) | (targets != targets.round())
        if wrong.any():
            raise BatchError(
                f"target {targets[wrong][0].item()} is no count: the poisson likelihood needs 0, 1, 2, ...; "
                "for real numbers use likelihood='gaussian'"
            )
