"""Regression whose noise depends on the input: the network gives mean and log scale."""

import math

import torch
from torch import Tensor, nn

from varlap.errors import BatchError
from varlap.likelihoods.gaussian import gaussian_log_prob
from varlap.likelihoods.protocol import (
    Prediction,
    normal_like,
    require_tensor,
    require_tensor_targets,
    sum_over_positions,
    variances_of,
)


class Heteroscedastic(nn.Module):
    """p(y | outputs) = N(y; m, exp(r)²): outputs [S, 2D, ...] hold m first and then r, targets are [S, D, ...].

    >>> outputs = torch.tensor([[0.0, 0.0]])  # mean 0, log scale 0
    >>> Heteroscedastic().log_prob(outputs, torch.tensor([[1.0]]))
    tensor([-1.4189])
    """

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the log-density of each item, summed over its outputs."""
        mean, log_scale = self._split(outputs)
        self.check(outputs, targets)
        return sum_over_positions(gaussian_log_prob(targets, mean, log_scale))

    def sample(self, outputs: Tensor, generator: torch.Generator, targets: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Draw m + exp(r) · ε."""
        mean, log_scale = self._split(outputs)
        return mean + log_scale.exp() * normal_like(mean, generator)

    def score(self, outputs: Tensor, noise: Tensor, targets: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return u = (ε / exp(r), √2 ε′): the Fisher information of m is exp(−2r), that of r is 2."""
        _, log_scale = self._split(outputs)
        for_mean, for_log_scale = noise.chunk(2, 1)
        return torch.cat([for_mean * (-log_scale).exp(), math.sqrt(2) * for_log_scale], 1)

    def predict(self, outputs: Tensor) -> Prediction:
        """Return the mean and the variance that the network gives."""
        mean, log_scale = self._split(outputs)
        return Prediction(mean=mean, variance=(2 * log_scale).exp())

    def predict_from_gaussian(self, mean: Tensor, covariance: Tensor) -> Prediction:
        """Return the exact moments under Gaussian m and r: Var y = Var m + E exp(2r) = Var m + exp(2 E r + 2 Var r)."""
        centre, log_scale = self._split(mean)
        of_centre, of_log_scale = self._split(variances_of(covariance, mean))
        noise = (2 * log_scale + 2 * of_log_scale).exp()
        return Prediction(mean=centre, variance=of_centre + noise, noise_variance=noise, epistemic_variance=of_centre)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse targets whose shape is not that of the means."""
        mean, _ = self._split(outputs)
        if mean.shape != require_tensor_targets(targets, "heteroscedastic").shape:
            raise BatchError(
                f"the heteroscedastic likelihood needs targets of shape {tuple(mean.shape)}, half of the outputs' "
                f"{tuple(outputs.shape)}, got {tuple(targets.shape)}; reshape them, for example targets.unsqueeze(1)"
            )

    def _split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        outputs = require_tensor(outputs, "heteroscedastic")
        if outputs.ndim < 2 or outputs.shape[1] % 2:
            raise BatchError(
                f"the heteroscedastic likelihood needs outputs of shape [S, 2D, ...] (means, then log scales), got "
                f"{tuple(outputs.shape)}; give the last layer twice as many outputs as there are targets"
            )
        mean, log_scale = outputs.chunk(2, 1)
        return mean, log_scale
