"""Priors, Eq. 1: which N(m, s²) each weight has before any data was seen."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from varlap.errors import ConfigError

Centre = Literal["zero", "network"]

ELEMENTWISE = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.PReLU)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
MATRIX_HOLDERS = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)


@dataclass(frozen=True)
class Weight:
    """A parameter in its place: what a prior may look at.

    >>> linear = nn.Linear(5, 3)
    >>> [(weight.attribute, weight.fan_in) for weight in weights_of(linear)]
    [('weight', 5.0), ('bias', 0.0)]
    """

    name: str
    """the dotted name in the network"""
    value: Tensor
    """the parameter itself"""
    module: nn.Module
    """the module that holds it"""
    attribute: str
    """its name there"""

    @property
    def fan_in(self) -> float:
        """How many products are summed into one number by this weight; 0 for what acts element by element.

        >>> linear = nn.Linear(5, 3)
        >>> Weight("weight", linear.weight, linear, "weight").fan_in
        5.0
        """
        shape, module = self.value.shape, self.module
        if len(shape) < 2 or isinstance(module, ELEMENTWISE):
            return 0.0
        if isinstance(module, nn.MultiheadAttention) and self.attribute in ("bias_k", "bias_v"):
            return 0.0
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return 1.0  # a look-up is a product with a one-hot vector
        if isinstance(module, TRANSPOSED):
            # [in, out/groups, k...]: with a stride, an output meets only every stride-th tap of the kernel.
            taps = math.prod(max(1.0, k / s) for k, s in zip(module.kernel_size, module.stride, strict=True))
            return shape[0] / module.groups * taps
        if not isinstance(module, MATRIX_HOLDERS) and (shape[0] == 1 or sum(size > 1 for size in shape) <= 1):
            return 0.0  # shaped to be added or multiplied by broadcasting: a class token, positions [1, T, D]
        return self.value.numel() / shape[0]


def weights_of(network: nn.Module) -> Iterator[Weight]:
    """Yield a network's parameters in their places, shared ones once, under the name torch gives them."""
    named = dict(network.named_parameters())
    for name, value in named.items():
        path, _, attribute = name.rpartition(".")
        if attribute == "original" and isinstance(network.get_submodule(path), ParametrizationList):
            path, _, attribute = path.rpartition("parametrizations.")  # it is used in the place of what is made of it
        yield Weight(name, value, network.get_submodule(path.removesuffix(".")), attribute)


@runtime_checkable
class Prior(Protocol):
    """What a prior is: a scale for each weight, a centre, and whether the scale follows the weights.

    >>> class Tight:
    ...     centre = "zero"
    ...     learnt = False
    ...     def scale(self, weight):
    ...         return 0.1
    >>> isinstance(Tight(), Prior)
    True
    """

    centre: Centre
    """"zero", or "network" for a prior centred on the weights that the network has when it is wrapped"""
    learnt: bool
    """True for empirical Bayes: s² of each tensor is set in closed form to the mean of σ² + (μ − m)²"""

    def scale(self, weight: Weight) -> float:
        """Return the prior's standard deviation s for one parameter tensor."""
        ...


def checked_scale(prior: Prior, weight: Weight) -> float:
    """Ask a prior for a weight's scale, and refuse what cannot be one: users write their own priors.

    >>> linear = nn.Linear(8, 3)
    >>> checked_scale(OneScalePrior(0.1), Weight("weight", linear.weight, linear, "weight"))
    0.1
    """
    name, scale = type(prior).__name__, float(prior.scale(weight))
    _check_centre(name, prior.centre)
    if not (scale > 0 and math.isfinite(scale)):
        raise ConfigError(
            f"{name}.scale says {scale} for {weight.name!r}; it must be a positive finite number, a standard deviation"
        )
    return scale


def _check_centre(name: str, centre: str) -> None:
    if centre not in ("zero", "network"):
        raise ConfigError(f"{name}(centre={centre!r}): choose 'zero' or 'network' (the weights at wrapping time)")


@dataclass
class FanInPrior:
    """s² = gain/fan-in for matrices and kernels, 1 for vectors and scalars (the default).

    >>> prior = FanInPrior()
    >>> linear = nn.Linear(8, 3)
    >>> [prior.scale(weight) for weight in weights_of(linear)]
    [0.5, 1.0]
    """

    gain: float = 2.0
    centre: Centre = "zero"
    learnt: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not (self.gain > 0 and math.isfinite(self.gain)):
            raise ConfigError(f"FanInPrior(gain={self.gain}) must be positive and finite: s² = gain/fan-in")
        _check_centre("FanInPrior", self.centre)

    def scale(self, weight: Weight) -> float:
        """Return √(gain/fan-in), or 1 where there is no fan-in."""
        return math.sqrt(self.gain / weight.fan_in) if weight.fan_in else 1.0


@dataclass
class OneScalePrior:
    """One s for all weights.

    >>> OneScalePrior(0.1).value
    0.1
    """

    value: float = 1.0
    centre: Centre = "zero"
    learnt: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not (self.value > 0 and math.isfinite(self.value)):
            raise ConfigError(f"OneScalePrior({self.value}) must be positive and finite; it is a standard deviation")
        _check_centre("OneScalePrior", self.centre)

    def scale(self, weight: Weight) -> float:  # noqa: ARG002
        """Return the one scale."""
        return self.value


@dataclass
class EmpiricalBayesPrior:
    """s² of each tensor is the one that maximises the ELBO, in closed form: the mean of σ² + (μ − m)².

    The ELBO's gradient needs nothing more, since at the optimum its derivative in s vanishes. For MAP the
    objective would be unbounded (s → 0), so MAP refuses it.

    >>> EmpiricalBayesPrior().learnt
    True
    """

    start: Prior = field(default_factory=FanInPrior)
    centre: Centre = "zero"
    learnt: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        _check_centre("EmpiricalBayesPrior", self.centre)

    def scale(self, weight: Weight) -> float:
        """Return the scale before the first update, which sets where log σ starts."""
        return self.start.scale(weight)
