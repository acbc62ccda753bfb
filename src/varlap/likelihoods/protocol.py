"""What a likelihood is: the protocol that built-in and users' own likelihoods follow."""

import math
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from varlap.errors import BatchError
from varlap.likelihoods.prediction import Prediction
from varlap.streams import draw


@runtime_checkable
class Likelihood(Protocol):
    """p(y | outputs), where `outputs` is what the network returns for a batch.

    Three methods are required. A module's own parameters (a learnt noise, say) are trained as point estimates;
    `sample` must then be differentiable in them, as `mean + noise * epsilon` is, because the curvature's
    gradient goes through the draw.

    Optional:
    - `score(outputs, noise, targets=None)`: a cotangent u at the outputs, linear in `noise` (standard normal,
      shaped like the outputs), whose covariance is the Fisher information of the outputs. It makes the
      whole gradient and the exact Fisher available.
    - `canonical`: True where ∂² log p/∂outputs² does not depend on the targets, as for logits or a Gaussian's mean.
      `Fisher(gradient="quiet")` then has less noise.
    - `check(outputs, targets)`: raise `BatchError` for targets that cannot be right.
    - `predict_from_gaussian(mean, covariance)`: the `Prediction` where the outputs of each item are Gaussian with this
      mean, shaped like outputs, and covariance [S, D, D] of its D flattened outputs; for linearised prediction
      in closed form. If it sets no `outputs` by which `log_prob` could be computed, draws of the outputs serve
      that; without the method they serve for all.
    - `tempered(outputs, temperature)`: the outputs with their logits divided by a temperature.

    A subclass with a `log_prob` of its own does not inherit `score`, `canonical` and `predict_from_gaussian`, which are
    about another one: where they hold for it too it must say so, as by `score = varlap.Gaussian.score`.

    >>> class Exponential:
    ...     def log_prob(self, outputs, targets):
    ...         return (outputs - outputs.exp() * targets).sum(1)
    ...     def sample(self, outputs, generator, targets=None):
    ...         return torch.empty_like(outputs).exponential_(generator=generator) / outputs.exp()
    ...     def predict(self, outputs):
    ...         return Prediction(mean=(-outputs).exp(), variance=(-2 * outputs).exp())
    >>> isinstance(Exponential(), Likelihood)
    True
    """

    def log_prob(self, outputs: Any, targets: Any) -> Tensor:
        """Return log p(y | outputs), one value per item of the leading dimension, summed over the others."""
        ...

    def sample(self, outputs: Any, generator: torch.Generator, targets: Any = None) -> Any:
        """Draw targets from the model, a row for each item; the given ones only tell which positions are ignored."""
        ...

    def predict(self, outputs: Any) -> Prediction:
        """Turn outputs into probabilities, or a mean and a variance."""
        ...


def of_log_prob(likelihood: Any, name: str) -> Any:
    """Return what a likelihood says of its own `log_prob`, or None: what it inherits is about that of another.

    >>> from varlap import Bernoulli
    >>> class Probit(Bernoulli):
    ...     def log_prob(self, outputs, targets):
    ...         return torch.special.log_ndtr(outputs * (2 * targets - 1)).sum(1)
    >>> of_log_prob(Bernoulli(), "canonical"), of_log_prob(Probit(), "canonical")
    (True, None)
    """
    for holder in (getattr(likelihood, "__dict__", {}), *map(vars, type(likelihood).__mro__)):
        if name in holder:
            return getattr(likelihood, name)
        if "log_prob" in holder:
            return None
    return getattr(likelihood, name, None)  # handed on by `__getattr__`


def variances_of(covariance: Tensor, mean: Tensor) -> Tensor:
    """Return the diagonal of each item's covariance [S, D, D] in the shape of the mean.

    >>> variances_of(torch.eye(4).expand(3, 4, 4), torch.zeros(3, 2, 2)).shape
    torch.Size([3, 2, 2])
    """
    return covariance.diagonal(dim1=-2, dim2=-1).reshape(mean.shape)


def probit_scaled(mean: Tensor, covariance: Tensor) -> Tensor:
    """Return m / √(1 + π v / 8): the logits whose sigmoid is near the mean sigmoid of N(m, v) (MacKay 1992).

    >>> probit_scaled(torch.ones(1, 1), torch.zeros(1, 1, 1))
    tensor([[1.]])
    """
    return mean / (1 + math.pi / 8 * variances_of(covariance, mean)).sqrt()


def sum_over_positions(values: Tensor) -> Tensor:
    """Sum all dimensions but the first: one value per item."""
    return values.flatten(1).sum(1) if values.ndim > 1 else values


def one_tensor(outputs: Any, purpose: str, instead: str = "") -> Tensor:
    """Refuse structured outputs; say what needs one tensor, how to choose an entry, and what would do instead."""
    if isinstance(outputs, Tensor):
        return outputs
    kind, example = f"a {type(outputs).__name__}", "0"
    if hasattr(outputs, "keys"):
        keys = list(outputs.keys())
        kind = f"a dict with keys {sorted(map(str, keys))}"
        example = repr(keys[0] if keys and "logits" not in keys else "logits")
    raise BatchError(
        f"{purpose} needs one tensor, but the network returned {kind}; "
        f"say which entry it is, for example BNN(network, ..., output={example}){instead}"
    )


def require_tensor(outputs: Any, likelihood: str) -> Tensor:
    """Refuse structured outputs, which only a user's own likelihood could read."""
    return one_tensor(outputs, f"the {likelihood} likelihood")


def require_tensor_targets(targets: Any, likelihood: str) -> Tensor:
    """Refuse structured targets, which only a user's own likelihood could read."""
    if isinstance(targets, Tensor):
        return targets
    raise BatchError(
        f"the {likelihood} likelihood needs targets that are one tensor, got a {type(targets).__name__}; for several "
        "targets an item write a likelihood of your own"
    )


def require_same_shape(outputs: Any, targets: Any, likelihood: str) -> Tensor:
    """Return the outputs after checking that the targets have their shape: broadcasting would hide a mistake."""
    outputs, targets = require_tensor(outputs, likelihood), require_tensor_targets(targets, likelihood)
    if outputs.shape != targets.shape:
        advice = "reshape them, for example targets.reshape(outputs.shape)"
        if outputs.numel() != targets.numel():
            advice = "the network must return one number for each target"
            advice += ", or two for likelihood='heteroscedastic'" if likelihood == "gaussian" else ""
        elif outputs.ndim == 1:
            advice = "inputs of one feature are a column too, x.unsqueeze(1)"
        raise BatchError(
            f"the {likelihood} likelihood needs targets of the outputs' shape {tuple(outputs.shape)}, "
            f"got {tuple(targets.shape)}; {advice}"
        )
    return outputs


def normal_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Draw standard normal noise of a tensor's shape, type and device."""
    return draw("normal", tensor.shape, tensor.dtype, generator).to(tensor.device)


def uniform(shape: torch.Size, like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw uniform noise in at least single precision, since half precision has only 2,048 values there."""
    return draw("uniform", shape, torch.promote_types(like.dtype, torch.float32), generator).to(like.device)
