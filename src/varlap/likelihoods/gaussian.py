"""Regression with one noise level, known or learnt."""

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from varlap.errors import BatchError, ConfigError
from varlap.likelihoods.protocol import (
    Prediction,
    normal_like,
    require_same_shape,
    require_tensor,
    sum_over_positions,
    variances_of,
)
from varlap.seeds import checked_count

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def gaussian_log_prob(targets: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """Return log N(targets; mean, exp(log_scale)²), entry by entry."""
    standardised = (targets - mean) * (-log_scale).exp()
    return -0.5 * standardised.square() - log_scale - LOG_SQRT_2PI


class CorrelatedGaussian:
    """p(y | outputs) = N(y; mean, covariance) for the flattened outputs of each item: a linearised predictive.

    >>> outputs = {"mean": torch.zeros(1, 2), "covariance": torch.eye(2)[None]}
    >>> CorrelatedGaussian().log_prob(outputs, torch.ones(1, 2))
    tensor([-2.8379])
    """

    def log_prob(self, outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        """Return the log-density of each item."""
        mean = require_same_shape(outputs["mean"], targets, "gaussian")
        return self._distribution(outputs).log_prob((targets - mean).reshape(len(mean), -1))

    def sample(self, outputs: dict[str, Tensor], generator: torch.Generator, targets: Any = None) -> Tensor:  # noqa: ARG002
        """Draw all outputs of each item jointly."""
        mean, factor = outputs["mean"], self._distribution(outputs).scale_tril
        noise = normal_like(factor[..., 0], generator)
        return mean + (factor @ noise[..., None]).reshape(mean.shape)

    def predict(self, outputs: dict[str, Tensor]) -> Prediction:
        """Return the mean and each output's variance."""
        return Prediction(mean=outputs["mean"], variance=variances_of(outputs["covariance"], outputs["mean"]))

    def _distribution(self, outputs: dict[str, Tensor]) -> torch.distributions.MultivariateNormal:
        covariance = outputs["covariance"]
        centre = torch.zeros_like(covariance[..., 0])
        return torch.distributions.MultivariateNormal(centre, covariance, validate_args=False)


class Gaussian(nn.Module):
    """p(y | outputs) = N(y; outputs, noise²); targets have the outputs' shape.

    The noise is learnt as a point estimate (`log_noise`, in the state dict) unless `learnt=False`.
    `num_outputs` gives each of so many outputs (dimension 1) its own noise.

    >>> Gaussian(noise=1.0, learnt=False).log_prob(torch.zeros(1, 2), torch.ones(1, 2))
    tensor([-2.8379])
    """

    log_noise: Tensor

    canonical = True

    def __init__(self, noise: float = 1.0, learnt: bool = True, num_outputs: int | None = None) -> None:
        super().__init__()
        if not (isinstance(noise, Real) and 0 < noise < math.inf):
            raise ConfigError(f"Gaussian(noise={noise!r}) must be positive and finite; it is a standard deviation")
        shape = () if num_outputs is None else (checked_count("Gaussian", "num_outputs", num_outputs),)
        log_noise = torch.full(shape, math.log(noise))
        if learnt:
            self.log_noise = nn.Parameter(log_noise)
        else:
            self.register_buffer("log_noise", log_noise)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the log-density of each item, summed over its outputs."""
        outputs = require_same_shape(outputs, targets, "gaussian")
        return sum_over_positions(gaussian_log_prob(targets, outputs, self._log_noise_for(outputs)))

    def sample(self, outputs: Tensor, generator: torch.Generator, targets: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Draw outputs + noise · ε, differentiable in the noise."""
        outputs = require_tensor(outputs, "gaussian")
        return outputs + self._log_noise_for(outputs).exp() * normal_like(outputs, generator)

    def score(self, outputs: Tensor, noise: Tensor, targets: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return u = ε / noise."""
        return noise * (-self._log_noise_for(outputs)).exp()

    def predict(self, outputs: Tensor) -> Prediction:
        """Return the mean and the noise's variance."""
        outputs = require_tensor(outputs, "gaussian")
        return Prediction(mean=outputs, variance=(2 * self._log_noise_for(outputs)).exp().expand_as(outputs))

    def predict_from_gaussian(self, mean: Tensor, covariance: Tensor) -> Prediction:
        """Return the exact predictive N(mean, covariance + noise²), whose `log_prob` is that of all outputs jointly."""
        noise = self.predict(mean).variance
        assert noise is not None
        noise = noise.to(covariance.dtype)
        total = covariance + torch.diag_embed(noise.flatten(1) if noise.ndim > 1 else noise[:, None])
        of_mean = variances_of(covariance, mean)
        return Prediction(
            mean=mean,
            variance=of_mean + noise,
            noise_variance=noise,
            epistemic_variance=of_mean,
            outputs=[{"mean": mean, "covariance": total}],
            likelihood=CorrelatedGaussian(),
        )

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse targets of another shape."""
        require_same_shape(outputs, targets, "gaussian")

    def _log_noise_for(self, outputs: Tensor) -> Tensor:
        """Return log noise in a shape that lines up with the outputs' dimension 1."""
        if not self.log_noise.ndim:
            return self.log_noise
        if outputs.ndim < 2 or outputs.shape[1] != len(self.log_noise):
            raise BatchError(
                f"Gaussian(num_outputs={len(self.log_noise)}) needs outputs of shape [S, {len(self.log_noise)}, ...], "
                f"got {tuple(outputs.shape)}; leave num_outputs out for one noise for all"
            )
        return self.log_noise.reshape(-1, *[1] * (outputs.ndim - 2))
