"""What a network says about a batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from varlap import tree
from varlap.errors import ConfigError


@dataclass(frozen=True)
class Prediction:
    """Class probabilities, or a mean and a variance; and, where several networks were averaged, what they disagree on.

    A prediction by the mean network knows nothing of the weights' uncertainty, so its `mutual_information` and
    `epistemic_variance` are None, not 0.

    >>> prediction = Prediction(probs=torch.tensor([[0.25, 0.75]]))
    >>> prediction.labels, prediction.confidence, prediction.mutual_information
    (tensor([1]), tensor([0.7500]), None)
    >>> prediction
    Prediction(probs (1, 2); 0 networks)
    """

    probs: Tensor | None = None
    """probabilities of the classes along dimension 1, or of a yes for each label where not `exclusive`"""
    mean: Tensor | None = None
    variance: Tensor | None = None
    """of the target: noise and the weights' uncertainty together"""
    exclusive: bool = True
    """whether the classes exclude each other; otherwise each label is a yes or no of its own"""
    expected_entropy: Tensor | None = None
    """aleatoric: mean entropy of the averaged networks"""
    noise_variance: Tensor | None = None
    """aleatoric: mean noise variance of the averaged networks"""
    outputs: Sequence[Any] = ()
    """what each of the averaged networks returned"""
    likelihood: Any = None
    """how to read these outputs"""
    epistemic_variance: Tensor | None = None
    """of the means, which the weights leave open: `variance` − `noise_variance` where it is not given, and None for a
    prediction by one network; beside a large noise it has digits only if it is given"""

    def __post_init__(self) -> None:
        if self.epistemic_variance is None and self.noise_variance is not None and self.variance is not None:
            object.__setattr__(self, "epistemic_variance", (self.variance - self.noise_variance).clamp(min=0))

    def __repr__(self) -> str:
        shapes = {f.name: tuple(v.shape) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        return f"Prediction({listed}; {len(self.outputs)} network{'s' * (len(self.outputs) != 1)})"

    @property
    def labels(self) -> Tensor:
        """The most probable class of each item, or the yes or no of each label."""
        return self._probs().argmax(1) if self.exclusive else (self._probs() > 0.5).long()

    @property
    def confidence(self) -> Tensor:
        """The probability of that label."""
        probs = self._probs()
        return probs.amax(1) if self.exclusive else torch.maximum(probs, 1 - probs)

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty of the label in nats, one value for each item and position, or for each label."""
        return entropy(self._probs(), self.exclusive)

    @property
    def mutual_information(self) -> Tensor | None:
        """Epistemic: what the label would tell about the weights; None for a prediction by one network."""
        return None if self.expected_entropy is None else (self.entropy - self.expected_entropy).clamp(min=0)

    @property
    def std(self) -> Tensor:
        """Standard deviation of the target."""
        if self.variance is None:
            raise ConfigError("this prediction has no variance: std and interval are for regression; see .entropy")
        return self.variance.sqrt()

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Return the ends of the central interval that holds a normal target with this probability.

        Where the likelihood has a `least` target, as that of counts has, neither end is below.

        >>> low, high = Prediction(mean=torch.zeros(1), variance=torch.ones(1)).interval(0.95)
        >>> high
        tensor([1.9600])
        """
        half = standard_half_width(level) * self.std
        assert self.mean is not None
        least = getattr(self.likelihood, "least", -math.inf)
        return (self.mean - half).clamp(min=least), self.mean + half

    def log_prob(self, targets: Any) -> Tensor:
        """Return log p(y) of each item under the average over networks, log (1/M) Σₘ p(y | outputsₘ).

        >>> import varlap
        >>> outputs = [torch.zeros(1, 2), torch.tensor([[0.0, math.log(3)]])]
        >>> Prediction(outputs=outputs, likelihood=varlap.Categorical()).log_prob(torch.tensor([1])).exp()
        tensor([0.6250])
        """
        if not self.outputs or self.likelihood is None:
            raise ConfigError("this prediction was made by hand, without outputs: it has no log_prob")
        # In at least single precision: a sum over many positions overflows in half.
        wide = [tree.at_least_single(outputs) for outputs in self.outputs]
        values = torch.stack([self.likelihood.log_prob(outputs, targets) for outputs in wide])
        return values.logsumexp(0) - math.log(len(values))

    @staticmethod
    def concatenate(parts: Sequence["Prediction"]) -> "Prediction":
        """Join the predictions of several batches, item after item.

        >>> part = Prediction(probs=torch.tensor([[0.25, 0.75]]))
        >>> Prediction.concatenate([part, part]).probs.shape
        torch.Size([2, 2])
        """
        joined: dict[str, Any] = {"exclusive": parts[0].exclusive, "likelihood": parts[0].likelihood}
        for field in fields(Prediction):
            if isinstance(getattr(parts[0], field.name), Tensor):
                joined[field.name] = torch.cat([getattr(part, field.name) for part in parts])
        joined["outputs"] = [tree.concatenate(draws) for draws in zip(*(part.outputs for part in parts), strict=True)]
        return Prediction(**joined)

    def _probs(self) -> Tensor:
        if self.probs is None:
            raise ConfigError("this prediction has no probabilities: labels and entropy are for classes")
        return self.probs


def entropy(probs: Tensor, exclusive: bool = True) -> Tensor:
    """Return −Σ p log p over the classes of dimension 1, or of each yes or no.

    >>> entropy(torch.tensor([[0.5, 0.5]]))
    tensor([0.6931])
    """
    if exclusive:
        return torch.special.entr(probs).sum(1)
    return torch.special.entr(probs) + torch.special.entr(1 - probs)


def standard_half_width(level: float) -> float:
    """Return the z for which a standard normal lies in [−z, z] with this probability.

    >>> round(standard_half_width(0.95), 4)
    1.96
    """
    if not 0 < level < 1:
        raise ConfigError(f"level={level} must be between 0 and 1; 0.95 is usual")
    return -NormalDist().inv_cdf((1 - level) / 2)
