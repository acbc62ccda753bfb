"""The Fisher information's diagonal from squared gradients of drawn labels, Eqs. 25 and 26."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from varlap import tree
from varlap.curvature.protocol import (
    Pass,
    check_differentiable,
    check_targets,
    forward,
    mean_gradients,
    sum_tensors,
    weight_of_every,
)
from varlap.errors import ConfigError
from varlap.likelihoods.protocol import normal_like, of_log_prob, one_tensor
from varlap.posterior.batch import Batch, is_divisible
from varlap.posterior.bnn import BNN
from varlap.seeds import checked_count
from varlap.streams import Streams, draw

Gradients = dict[str, Tensor]
Gradient = Literal["held", "quiet", "whole"]
FEWEST_WITH_STATISTICS = 16  # items; the mean and variance of fewer are too noisy to normalise by


@dataclass(frozen=True)
class SquaredGradients:
    """f = Σ_g G_g² / S for gradients G_g of sums over disjoint groups that hold S items together.

    With one group and ḡ = G/S this is S ḡ², the square in Eq. 30.
    """

    groups: list[Gradients]
    num_items: int

    def diagonal(self) -> dict[str, Tensor]:
        """Return f for each Bayesian parameter, without a graph."""
        # In at least single precision: a running mean of half-precision squares would stop moving.
        squares = [
            {name: g.detach().to(torch.promote_types(g.dtype, torch.float32)).square() for name, g in group.items()}
            for group in self.groups
        ]
        return {name: sum_tensors(group[name] for group in squares) / self.num_items for name in squares[0]}

    def pull_back(self, variance: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each G_g with ∂(½ Σ σ² f)/∂G_g = σ² G_g / S: one Hessian-vector product in all."""
        for group in self.groups:
            for name, gradient in group.items():
                yield gradient, (variance[name] * gradient.detach() / self.num_items).to(gradient.dtype)


@dataclass(frozen=True)
class Fisher:
    """The Fisher of labels that are drawn from the model, never the observed ones (Eqs. 25-26).

    Args:
        every: evaluate the curvature every k-th step, with weight k: right on average over the steps.
        fraction: evaluate it on a random part of the batch, which saves the rest's share of the work, except with batch
            norm in training mode, which couples the items (see `batch_norm`), and with other buffers that a pass may
            move, for which the whole batch has a pass of its own.
        groups: square the gradients of that many groups separately: same expectation, less variance.
        memory: 0, or the decay of a running mean of the evaluations. Every step then uses that mean with weight 1,
            instead of every k-th step using the newest value with weight k: less noise, a little staleness. A new
            evaluation counts from the next step on, the first one at once. Calling such a step again evaluates again.
        batch_norm: whose statistics normalise a part of the batch in training mode: "whole" takes the part after a
            forward pass of the whole batch, which saves nothing; "part" gives it a pass of its own, which costs only
            its share (of at least 16 items), and is the Fisher of a smaller batch: another quantity.
        gradient: "held" differentiates with the drawn labels as constants, as we read the paper; "quiet" has the same
            expectation and far less noise, since it leaves out a part whose mean is zero (where the likelihood is
            `canonical` and the outputs are one tensor; else it is "held"); "whole" also counts how the labels'
            distribution moves with the weights, the true gradient of the Fisher term (it needs a likelihood with a
            `score`). Parameters of the likelihood always get the true gradient.

    >>> Fisher(every=4).weight(step=8), Fisher(every=4).weight(step=9)
    (4, 0)
    """

    every: int = 1
    fraction: float = 1.0
    groups: int = 1
    memory: float = 0.0
    batch_norm: Literal["whole", "part"] = "whole"
    gradient: Gradient = "held"
    num_derivatives: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_settings("Fisher", self.every, self.fraction, self.groups, self.memory)
        if self.batch_norm not in ("whole", "part"):
            raise ConfigError(f"Fisher(batch_norm={self.batch_norm!r}): choose 'whole' or 'part'")
        if self.gradient not in get_args(Gradient):
            raise ConfigError(f"Fisher(gradient={self.gradient!r}): choose 'held' (the paper's), 'quiet' or 'whole'")

    def weight(self, step: int) -> float:
        """Return `every` in the steps with curvature and 0 in the others."""
        return weight_of_every(self.every, step)

    def estimate(self, bnn: BNN, batch: Batch, streams: Streams, create_graph: bool) -> tuple[Tensor, SquaredGradients]:
        """Return the mean log-likelihood and S ḡ² for labels drawn from the same forward pass.

        With a memory the evaluation is beside the step's own pass, so that the log-likelihood is only that of the part.
        """
        gradient_fn, generator = _BY_NAME[self.gradient], streams.generator("labels", bnn.device)
        passes = _split(
            bnn,
            batch,
            streams,
            self.fraction,
            self.groups,
            part_alone=self.memory > 0,
            own_statistics=self.batch_norm == "part",
        )
        return _estimate(bnn, *passes, lambda part: gradient_fn(bnn, part, generator, create_graph))


@dataclass(frozen=True)
class EmpiricalFisher:
    """Squared gradients of the **observed** labels (paper, section 4.2), to compare with: not the Fisher.

    >>> EmpiricalFisher(every=2).weight(step=1)
    0
    """

    every: int = 1
    fraction: float = 1.0
    groups: int = 1
    memory = 0.0  # no setting
    num_derivatives: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_settings("EmpiricalFisher", self.every, self.fraction, self.groups)

    def weight(self, step: int) -> float:
        """Return `every` in the steps with curvature and 0 in the others."""
        return weight_of_every(self.every, step)

    def estimate(self, bnn: BNN, batch: Batch, streams: Streams, create_graph: bool) -> tuple[Tensor, SquaredGradients]:
        """Return the mean log-likelihood and S ḡ² for the observed labels."""
        passes = _split(bnn, batch, streams, self.fraction, self.groups)
        return _estimate(bnn, *passes, lambda part: _label_gradient(bnn, part, part.batch.y, create_graph))


def drawn_label_gradient(bnn: BNN, part: Pass, generator: torch.Generator, create_graph: bool) -> Gradients:
    """Eq. 26: ∂/∂w Σᵢ √wᵢ log p(ỹᵢ | xᵢ, w) with ỹ drawn from the model at this forward pass.

    The outputs are detached in the draw, the likelihood's own parameters are not: weights see held labels, a
    learnt noise sees the reparameterised draw.
    """
    return _label_gradient(bnn, part, part.drawn_targets(bnn, generator), create_graph)


def quiet_label_gradient(bnn: BNN, part: Pass, generator: torch.Generator, create_graph: bool) -> Gradients:
    """Eq. 26 as Jᵀu, whose derivative leaves u = ∂ log p(ỹ | outputs)/∂outputs as it is.

    With held labels the derivative of Jᵀu has two parts. That of u is −JᵀΛJ, with Λ = −∂² log p/∂outputs²: where Λ does
    not depend on the label, its product with σ² Jᵀu has mean zero, since u has, and only adds noise. That of Jᵀ is
    all that counts.
    """
    if of_log_prob(bnn.likelihood, "canonical") is not True or not isinstance(part.outputs, Tensor):
        return drawn_label_gradient(bnn, part, generator, create_graph)
    check_differentiable(part.outputs)
    outputs = part.outputs.detach().requires_grad_()
    detached = Pass(part.batch, outputs)
    labels = part.drawn_targets(bnn, generator)
    with torch.enable_grad():  # u depends on the likelihood's own parameters, which get the true gradient
        (score,) = torch.autograd.grad(_weighted_sum(bnn, detached, labels), outputs, create_graph=create_graph)
    return mean_gradients(bnn, part.outputs, create_graph=create_graph, cotangent=score)


def reparameterised_gradient(bnn: BNN, part: Pass, generator: torch.Generator, create_graph: bool) -> Gradients:
    """Jᵀu with u = F(outputs)^½ ε, which has the Fisher's expectation and whose derivative is the whole one."""
    outputs = one_tensor(part.outputs, "Fisher(gradient='whole')", ", or use Fisher(gradient='held')")
    return score_gradient(bnn, part, normal_like(outputs, generator), create_graph)


def couples_items(network: nn.Module) -> bool:
    """Whether an item's output depends on the rest of the batch: batch norm that uses the batch's statistics.

    Coupling by other means cannot be seen from outside; for such a network leave `fraction` and `groups` at 1.
    """
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)
        for module in network.modules()
    )


def _label_gradient(bnn: BNN, part: Pass, labels: Tensor, create_graph: bool) -> Gradients:
    return mean_gradients(bnn, _weighted_sum(bnn, part, labels), create_graph=create_graph)


def _weighted_sum(bnn: BNN, part: Pass, labels: Tensor) -> Tensor:
    values = part.log_likelihoods(bnn, labels)
    return (values if part.batch.weights is None else values * part.batch.weights.sqrt()).sum()


def require_score(bnn: BNN) -> Callable[..., Tensor]:
    """Return the likelihood's `score`, or say what needs it."""
    score_fn = of_log_prob(bnn.likelihood, "score")
    if score_fn is None:
        raise ConfigError(
            f"the likelihood {type(bnn.likelihood).__name__} has no `score`, which the whole gradient and the exact "
            "Fisher need; add score(outputs, noise, targets=None) to it, or use Fisher(gradient='held'), "
            "fisher_diagonal(labels='sampled') or laplace(curvature='sampled-fisher')"
        )
    return score_fn


def score_gradient(bnn: BNN, part: Pass, noise: Tensor, create_graph: bool) -> Gradients:
    """Return Jᵀu for the likelihood's score u of this noise, weighted by √w."""
    score = require_score(bnn)(part.outputs, noise, part.batch.y)
    if part.batch.weights is not None:
        score = score * part.batch.weights.sqrt().reshape(-1, *[1] * (score.ndim - 1))
    return mean_gradients(bnn, part.outputs, create_graph=create_graph, cotangent=score)


def _estimate(
    bnn: BNN, for_likelihood: list[Pass], for_curvature: list[Pass], gradient_fn: Callable[[Pass], Gradients]
) -> tuple[Tensor, SquaredGradients]:
    total = torch.stack([part.log_likelihood_sum(bnn) for part in for_likelihood]).sum()
    num_items = sum(part.batch.size for part in for_curvature)
    num_seen = sum(part.batch.size for part in for_likelihood)
    return total / num_seen, SquaredGradients([gradient_fn(part) for part in for_curvature], num_items)


def _split(
    bnn: BNN,
    batch: Batch,
    streams: Streams,
    fraction: float,
    num_groups: int,
    *,
    part_alone: bool = False,
    own_statistics: bool = False,
) -> tuple[list[Pass], list[Pass]]:
    """Return the passes that make up the batch (or the part, if it is alone), and those to be squared, one a group."""
    if fraction == 1 and num_groups == 1:
        whole = [forward(bnn, batch)]
        return whole, whole
    divisible, coupled = is_divisible(batch.x, batch.size), couples_items(bnn.network)
    num_items = max(1, round(fraction * batch.size))
    if coupled and own_statistics:
        num_items = max(num_items, min(num_groups * FEWEST_WITH_STATISTICS, batch.size))
    order = draw("permutation", (batch.size,), torch.int64, streams.generator("subset", "cpu")).to(bnn.device)
    groups = order[:num_items].tensor_split(min(num_groups, num_items))
    own_pass = not coupled or (own_statistics and min(map(len, groups)) > 1)  # one item has no variance
    moves = coupled or bnn.has_moving_buffers()  # buffers move by a pass over the whole batch
    if divisible and own_pass and (part_alone or not moves):
        rest = [order[num_items:]] if num_items < batch.size and not part_alone else []
        trusted = replace(batch, trusted=True)
        passes = [_forward_part(bnn, trusted, items) for items in (*groups, *rest)]
        if not batch.trusted:
            check_targets(bnn, passes[0].outputs, batch.y, batch.size)  # a message has the shapes of the whole batch
        return passes, passes[: len(groups)]
    whole = forward(bnn, batch)
    if divisible and own_pass:
        with bnn.spare_buffers():
            return [whole], [_forward_part(bnn, batch, items) for items in groups]
    return [whole], [Pass(batch.take_targets(items), tree.take(whole.outputs, items)) for items in groups]


def _forward_part(bnn: BNN, batch: Batch, items: Tensor) -> Pass:
    try:
        return forward(bnn, batch.take(items))
    except RuntimeError as error:
        error.add_note(
            "The curvature had taken a part of the batch. Where the network needs all items at once, as the nodes of a "
            "graph, take the whole: VL(curvature=varlap.Fisher())"
        )
        raise


def check_settings(name: str, every: int, fraction: float = 1.0, groups: int = 1, memory: float = 0.0) -> None:
    """Refuse settings that say nothing."""
    checked_count(name, "every", every)
    if not (isinstance(fraction, Real) and 0 < fraction <= 1):
        raise ConfigError(f"{name}(fraction={fraction!r}) must be in (0, 1]: the part of the batch that is used")
    checked_count(name, "groups", groups)
    if not (isinstance(memory, Real) and 0 <= memory < 1):
        raise ConfigError(f"{name}(memory={memory!r}) must be in [0, 1); 0.9 averages about 10 evaluations")


_BY_NAME = {"held": drawn_label_gradient, "quiet": quiet_label_gradient, "whole": reparameterised_gradient}
DEFAULT = Fisher(every=4, fraction=0.25, memory=0.9, batch_norm="part")
"""VL's own for labels: a quarter of the batch in every fourth step, remembered in between"""
DEFAULT_FOR_NUMBERS = replace(DEFAULT, gradient="whole")
"""VL's own for numbers: held labels would push a noise that the network puts out up twice as hard as they should, or
harder"""
