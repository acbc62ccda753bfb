"""What a curvature is: an estimate of the log-likelihood's diagonal curvature that can be differentiated."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from varlap import tree
from varlap.errors import BatchError, ConfigError, NetworkError
from varlap.posterior.batch import Batch
from varlap.posterior.bnn import BNN
from varlap.streams import Streams


class Estimate(Protocol):
    """A diagonal curvature f per datum, as made of tensors that depend on the weights."""

    def diagonal(self) -> dict[str, Tensor]:
        """Return f for each Bayesian parameter, without a graph."""
        ...

    def pull_back(self, variance: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (tensor, cotangent) pairs, through which the gradient of the penalty ½ Σ σ² f reaches the weights."""
        ...


@runtime_checkable
class Curvature(Protocol):
    """Evaluates a batch's log-likelihood and, from the same forward pass, its diagonal curvature."""

    num_derivatives: ClassVar[int]
    """how often the network is differentiated in all: 2 for a Fisher, 3 for a Hessian"""

    @property
    def memory(self) -> float:
        """Decay of a running mean over evaluations that serves in every step; 0 for none."""
        ...

    def weight(self, step: int) -> float:
        """Return the weight of the curvature in this step: 0 where it is left out."""
        ...

    def estimate(self, bnn: BNN, batch: Batch, streams: Streams, create_graph: bool) -> tuple[Tensor, Estimate]:
        """Return the mean log-likelihood and the curvature, both per datum."""
        ...


def checked_curvature(owner: str, curvature: Any) -> Curvature:
    """Return the curvature, or say that it is none."""
    if isinstance(curvature, type) or not isinstance(curvature, Curvature):
        raise ConfigError(
            f"{owner}(curvature={curvature!r}) does not follow varlap.Curvature; pass an object such as varlap.Fisher()"
        )
    return curvature


def weight_of_every(every: int, step: int) -> int:
    """Return k in every k-th step and 0 in the others: 1 on average."""
    return every if step % every == 0 else 0


def sum_tensors(tensors: Iterable[Tensor]) -> Tensor:
    """Add tensors one by one, without holding them all."""
    return functools.reduce(torch.add, tensors)


@dataclass(frozen=True)
class Pass:
    """A batch after its forward pass."""

    batch: Batch
    outputs: Any

    def log_likelihoods(self, bnn: BNN, targets: Any) -> Tensor:
        """Return log p(target | x, μ) of each item."""
        values = bnn.likelihood.log_prob(self.outputs, targets)
        if values.shape != (self.batch.size,):
            raise BatchError(
                f"the likelihood's log_prob returned shape {tuple(values.shape)} for {self.batch.size} items; it must "
                f"return one value per item, shape ({self.batch.size},), summed over all other dimensions"
            )
        return values

    def drawn_targets(self, bnn: BNN, generator: torch.Generator) -> Any:
        """Draw targets from the model at these outputs, a row for each item."""
        outputs = tree.map_tensors(Tensor.detach, self.outputs)
        drawn = bnn.likelihood.sample(outputs, generator, self.batch.y)
        observed = [tensor.shape for tensor in tree.tensors(self.batch.y)]
        shapes = [tensor.shape for tensor in tree.tensors(drawn)]
        if any(shape[:1] != (self.batch.size,) for shape in shapes) or _squeezed(shapes, observed):
            raise BatchError(
                f"the likelihood's sample returned {_listed(shapes)} where the targets have {_listed(observed)}, which "
                "would be broadcast; it must draw a row for each item, as log_prob takes them"
            )
        return drawn

    def log_likelihood_sum(self, bnn: BNN) -> Tensor:
        """Return Σᵢ wᵢ log p(yᵢ | xᵢ, μ)."""
        values = self.log_likelihoods(bnn, self.batch.y)
        return (values if self.batch.weights is None else values * self.batch.weights).sum()


def forward(bnn: BNN, batch: Batch) -> Pass:
    """Run the network on a batch and check that the targets fit what comes out."""
    outputs = bnn.outputs(batch.x)
    check = getattr(bnn.likelihood, "check", None)
    if check is not None and not batch.trusted:
        check(outputs, batch.y)
    return Pass(batch, outputs)


def _squeezed(shapes: Sequence[torch.Size], others: Sequence[torch.Size]) -> bool:
    """Whether shapes differ in dimensions of size 1 alone: [S] and [S, 1] make [S, S] of a difference."""
    pairs = zip(shapes, others, strict=False)
    return any(one != other and [n for n in one if n > 1] == [n for n in other if n > 1] for one, other in pairs)


def _listed(shapes: Sequence[torch.Size]) -> str:
    return f"shape {' and '.join(str(tuple(shape)) for shape in shapes)}"


def check_targets(bnn: BNN, outputs: Any, targets: Any, num_items: int) -> None:
    """Check that targets fit, given the outputs of some of the items, whose first stands for all."""
    check = getattr(bnn.likelihood, "check", None)
    if check is not None:
        check(tree.map_tensors(lambda t: t[:1].expand(num_items, *t.shape[1:]), outputs), targets)


def gradients(
    outputs: Sequence[Tensor],
    inputs: Mapping[str, Tensor],
    cotangents: Sequence[Tensor] | None = None,
    *,
    create_graph: bool = False,
    retain_graph: bool = False,
) -> dict[str, Tensor]:
    """Pull cotangents of the outputs back to named inputs; what no output depends on gets zeros."""
    computed: Sequence[Tensor | None] = [None] * len(inputs)
    if outputs:
        computed = torch.autograd.grad(
            outputs,
            list(inputs.values()),
            cotangents,
            create_graph=create_graph,
            retain_graph=retain_graph or create_graph,
            allow_unused=True,
        )
    return {
        name: torch.zeros_like(tensor) if gradient is None else gradient
        for (name, tensor), gradient in zip(inputs.items(), computed, strict=True)
    }


def mean_gradients(
    bnn: BNN, output: Tensor, *, create_graph: bool, cotangent: Tensor | None = None
) -> dict[str, Tensor]:
    """Differentiate what came out of a forward pass in the Bayesian parameters, and keep its graph for more."""
    check_differentiable(output)
    cotangents = None if cotangent is None else [cotangent]
    return gradients([output], bnn.means(), cotangents, create_graph=create_graph, retain_graph=True)


def check_differentiable(output: Tensor) -> None:
    """Refuse what came out of a forward pass that no parameter enters."""
    if not output.requires_grad:
        raise NetworkError(
            "the network's outputs do not depend on any parameter that could be differentiated; does the network "
            "detach its result, or was it called under torch.inference_mode? (use torch.no_grad)"
        )
