"""Classes, from logits."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varlap.errors import BatchError
from varlap.likelihoods.protocol import (
    Prediction,
    probit_scaled,
    require_tensor,
    require_tensor_targets,
    sum_over_positions,
    uniform,
)


class Categorical(nn.Module):
    """p(y | outputs) = softmax(outputs)_y, for outputs of shape [S, K] or [S, K, ...] and targets [S] or [S, ...].

    Positions (pixels, tokens) after the class dimension are independent given the outputs and are summed: an
    item of the batch is one image or sequence. Positions labelled `ignored_label` count for nothing.

    >>> logits = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    >>> Categorical().log_prob(logits, torch.tensor([0, 1]))
    tensor([-0.6931, -0.3133])
    """

    canonical = True

    def __init__(self, ignored_label: int = -100) -> None:
        super().__init__()
        self.ignored_label = ignored_label

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probability of each item, summed over its positions."""
        labels = self._labels(outputs, targets)
        return -sum_over_positions(F.cross_entropy(outputs, labels, reduction="none", ignore_index=self.ignored_label))

    def sample(self, outputs: Tensor, generator: torch.Generator, targets: Tensor | None = None) -> Tensor:
        """Draw one class a position by inverting the cumulative distribution."""
        outputs = require_tensor(outputs, "categorical").detach()
        probs = outputs.movedim(1, -1).to(torch.promote_types(outputs.dtype, torch.float32)).softmax(-1)
        cumulative = probs.cumsum(-1)
        # Scaled to the last entry, which rounding leaves near 1, so that no class beyond it can be drawn.
        level = uniform(probs.shape[:-1], outputs, generator)[..., None] * cumulative[..., -1:]
        drawn = torch.searchsorted(cumulative, level, right=True).squeeze(-1).clamp(max=probs.shape[-1] - 1)
        return drawn if targets is None else torch.where(self._ignored(targets), self.ignored_label, drawn)

    def score(self, outputs: Tensor, noise: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return u = √p ∘ ε − p (√p · ε), whose covariance is diag(p) − p pᵀ, differentiable in the outputs."""
        log_probs = outputs.log_softmax(1)
        scaled = (0.5 * log_probs).exp() * noise  # √p by its logarithm: the root itself has no derivative at 0
        score = scaled - log_probs.exp() * scaled.sum(1, keepdim=True)
        return score if targets is None else score * ~self._ignored(targets).unsqueeze(1)

    def predict(self, outputs: Tensor) -> Prediction:
        """Return class probabilities along dimension 1."""
        return Prediction(probs=self._logits(outputs).softmax(1))

    def predict_from_gaussian(self, mean: Tensor, covariance: Tensor) -> Prediction:
        """Return class probabilities under Gaussian logits, by MacKay's approximation from their variances alone."""
        scaled = probit_scaled(mean, covariance)
        return replace(self.predict(scaled), outputs=[scaled], likelihood=self)

    def tempered(self, outputs: Tensor, temperature: float) -> Tensor:
        """Divide the logits."""
        return require_tensor(outputs, "categorical") / temperature

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse labels that are not integers or not in 0..K-1."""
        labels = self._labels(outputs, targets)
        num_classes = outputs.shape[1]
        if num_classes == 1:
            raise BatchError(
                "the network has one output, and of one class the categorical likelihood is always certain; use "
                "likelihood='bernoulli' for yes or no, or give the network an output for each class"
            )
        if 0 <= self.ignored_label < num_classes:
            raise BatchError(
                f"ignored_label={self.ignored_label} is also one of the network's {num_classes} classes, so a label "
                "drawn from the model could not be told from an ignored one; mark ignored positions otherwise, as by "
                f"targets.masked_fill(targets == {self.ignored_label}, -100), and leave ignored_label at -100"
            )
        wrong = (labels < 0) | (labels >= num_classes)
        if wrong.any() and (wrong := wrong & ~self._ignored(labels)).any():
            raise BatchError(
                f"label {labels[wrong][0].item()} is out of range: the network has {num_classes} outputs, so labels "
                f"go from 0 to {num_classes - 1} (ignored: {self.ignored_label}); fix the labels, the number of "
                "outputs, or pass likelihood=varlap.Categorical(ignored_label=...)"
            )

    def _ignored(self, targets: Tensor) -> Tensor:
        return targets.long() == self.ignored_label  # in 8 bits, 156 would equal −100

    def _logits(self, outputs: Tensor) -> Tensor:
        outputs = require_tensor(outputs, "categorical")
        if outputs.ndim < 2:
            raise BatchError(
                f"the categorical likelihood needs outputs of shape [S, K] or [S, K, ...], got {tuple(outputs.shape)}; "
                "for one item give x[None], for one logit per item use likelihood='bernoulli'"
            )
        return outputs

    def _labels(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the labels as the 64-bit integers that torch wants, after checking shapes and type."""
        outputs, targets = self._logits(outputs), require_tensor_targets(targets, "categorical")
        expected = outputs.shape[:1] + outputs.shape[2:]
        if targets.shape != expected and outputs.ndim > 2 and targets.shape == outputs.shape[:-1]:
            raise BatchError(
                f"the classes must be dimension 1 of the outputs, as in F.cross_entropy, but in {tuple(outputs.shape)} "
                f"they seem to be the last one, since the targets are {tuple(targets.shape)}; let the network return "
                f"outputs.{'transpose(1, 2)' if outputs.ndim == 3 else 'movedim(-1, 1)'}"
            )
        if targets.shape != expected:
            raise BatchError(
                f"the categorical likelihood needs targets of shape {tuple(expected)} for outputs of shape "
                f"{tuple(outputs.shape)}, got {tuple(targets.shape)}; targets are class numbers, not one-hot rows "
                "(for regression pass likelihood='gaussian')"
            )
        if targets.dtype.is_floating_point or targets.dtype == torch.bool:
            raise BatchError(
                f"the categorical likelihood needs integer labels, got {targets.dtype}; use targets.long()"
            )
        return targets.long()
