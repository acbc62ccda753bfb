"""Independent yes-or-no answers (multi-label), from logits."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varlap.errors import BatchError
from varlap.likelihoods.protocol import (
    Prediction,
    probit_scaled,
    require_same_shape,
    require_tensor,
    sum_over_positions,
    uniform,
)


class Bernoulli(nn.Module):
    """p(y = 1 | outputs) = sigmoid(outputs), independently for each entry; targets have the outputs' shape.

    >>> Bernoulli().log_prob(torch.zeros(2, 3), torch.ones(2, 3))
    tensor([-2.0794, -2.0794])
    """

    canonical = True

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probability of each item, summed over its labels."""
        outputs = require_same_shape(outputs, targets, "bernoulli")
        losses = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")
        return -sum_over_positions(losses)

    def sample(self, outputs: Tensor, generator: torch.Generator, targets: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Draw every label."""
        outputs = require_tensor(outputs, "bernoulli").detach()
        level = uniform(outputs.shape, outputs, generator)
        return (level < outputs.to(level.dtype).sigmoid()).to(outputs.dtype)

    def score(self, outputs: Tensor, noise: Tensor, targets: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return u = √(p (1 − p)) ε."""
        return noise * (0.5 * (F.logsigmoid(outputs) + F.logsigmoid(-outputs))).exp()

    def predict(self, outputs: Tensor) -> Prediction:
        """Return the probability of a yes for each label."""
        return Prediction(probs=require_tensor(outputs, "bernoulli").sigmoid(), exclusive=False)

    def predict_from_gaussian(self, mean: Tensor, covariance: Tensor) -> Prediction:
        """Return the probability of a yes under Gaussian logits, by MacKay's approximation."""
        scaled = probit_scaled(mean, covariance)
        return replace(self.predict(scaled), outputs=[scaled], likelihood=self)

    def tempered(self, outputs: Tensor, temperature: float) -> Tensor:
        """Divide the logits."""
        return require_tensor(outputs, "bernoulli") / temperature

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse targets other than 0 and 1."""
        require_same_shape(outputs, targets, "bernoulli")
        wrong = (targets != 0) & (targets != 1)
        if wrong.any():
            raise BatchError(
                f"target {targets[wrong][0].item()} is no yes or no: the bernoulli likelihood needs 0 and 1; "
                "for class numbers use likelihood='categorical'"
            )
