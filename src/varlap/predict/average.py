"""From the outputs of several networks to one prediction: the average, and what they disagree on."""

from collections.abc import Sequence
from typing import Any

import torch

from varlap import tree
from varlap.errors import ConfigError
from varlap.likelihoods import Likelihood, Prediction
from varlap.likelihoods.prediction import entropy


def predicted(likelihood: Likelihood, outputs: Any) -> Prediction:
    """Return what a likelihood makes of a network's outputs, or say that it is no prediction.

    >>> import varlap
    >>> predicted(varlap.Categorical(), torch.zeros(1, 2)).probs
    tensor([[0.5000, 0.5000]])
    """
    found = likelihood.predict(outputs)
    if isinstance(found, Prediction):
        return found
    raise ConfigError(
        f"{type(likelihood).__name__}.predict returned a {type(found).__name__}; it must return "
        "varlap.Prediction(probs=...) or varlap.Prediction(mean=..., variance=...)"
    )


def average(likelihood: Likelihood, draws: Sequence[Any]) -> Prediction:
    """Return the equal mixture of the networks whose outputs these are.

    Probabilities are averaged, and the mean of the entropies is kept beside them; of means and variances the law
    of total variance gives Var y = E[noise variance] + Var[mean], the latter over these very networks (divided by
    their number, so it is the mixture's own).

    >>> import varlap
    >>> both = average(varlap.Gaussian(noise=1.0, learnt=False), [torch.tensor([[0.0]]), torch.tensor([[2.0]])])
    >>> both.mean, both.variance, both.epistemic_variance
    (tensor([[1.]]), tensor([[2.]]), tensor([[1.]]))
    """
    # In half precision the small differences between networks would be lost.
    draws = [tree.at_least_single(outputs) for outputs in draws]
    predictions = [predicted(likelihood, outputs) for outputs in draws]
    first = predictions[0]
    common = {"exclusive": first.exclusive, "outputs": list(draws), "likelihood": likelihood}
    if first.probs is not None:
        probs = torch.stack([p.probs for p in predictions if p.probs is not None])
        entropies = torch.stack([entropy(one, first.exclusive) for one in probs])
        return Prediction(probs=probs.mean(0), expected_entropy=entropies.mean(0), **common)
    if first.mean is None:
        raise ConfigError(
            f"the likelihood {type(likelihood).__name__} predicts neither probs nor a mean, so its draws cannot be "
            "averaged; have its predict return varlap.Prediction(probs=...) or Prediction(mean=..., variance=...)"
        )
    means = torch.stack([p.mean for p in predictions if p.mean is not None])
    if first.variance is None:
        return Prediction(mean=means.mean(0), **common)
    noise_variance = torch.stack([p.variance for p in predictions if p.variance is not None]).mean(0)
    of_means = means.var(0, correction=0)
    return Prediction(
        mean=means.mean(0),
        variance=noise_variance + of_means,
        noise_variance=noise_variance,
        epistemic_variance=of_means,
        **common,
    )
