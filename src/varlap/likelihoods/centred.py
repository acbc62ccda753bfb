"""Residuals, whose scale depends on the input: the network gives the log scale alone."""

import math

import torch
from torch import Tensor, nn

from varlap.likelihoods.gaussian import gaussian_log_prob
from varlap.likelihoods.protocol import (
    Prediction,
    normal_like,
    require_same_shape,
    require_tensor,
    sum_over_positions,
)


class Centred(nn.Module):
    """p(y | outputs) = N(y; 0, exp(outputs)²); targets have the outputs' shape.

    >>> Centred().log_prob(torch.zeros(1, 1), torch.ones(1, 1))
    tensor([-1.4189])
    """

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the log-density of each item, summed over its outputs."""
        log_scale = require_same_shape(outputs, targets, "centred")
        return sum_over_positions(gaussian_log_prob(targets, torch.zeros_like(log_scale), log_scale))

    def sample(self, outputs: Tensor, generator: torch.Generator, targets: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Draw exp(outputs) · ε."""
        log_scale = require_tensor(outputs, "centred")
        return log_scale.exp() * normal_like(log_scale, generator)

    def score(self, outputs: Tensor, noise: Tensor, targets: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return u = √2 ε: the Fisher information of a log scale is 2."""
        return math.sqrt(2) * noise

    def predict(self, outputs: Tensor) -> Prediction:
        """Return the mean, which is zero, and the variance that the network gives."""
        log_scale = require_tensor(outputs, "centred")
        return Prediction(mean=torch.zeros_like(log_scale), variance=(2 * log_scale).exp())

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse targets of another shape."""
        require_same_shape(outputs, targets, "centred")
