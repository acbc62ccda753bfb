"""The Hessian's diagonal, Eq. 15, by Hutchinson's estimate."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from varlap.curvature.protocol import forward, gradients, mean_gradients, sum_tensors, weight_of_every
from varlap.posterior.batch import Batch
from varlap.posterior.bnn import BNN
from varlap.seeds import checked_count
from varlap.streams import Streams, draw


@dataclass(frozen=True)
class ProbedDiagonal:
    """f = −mean(v ∘ H v) over probes v of random signs: minus the Hessian's diagonal, so that it is a penalty."""

    probes: list[dict[str, Tensor]]
    products: list[dict[str, Tensor]]

    def diagonal(self) -> dict[str, Tensor]:
        """Return f = −h for each Bayesian parameter, without a graph."""
        pairs = list(zip(self.probes, self.products, strict=True))
        return {
            name: -sum_tensors(probe[name] * product[name].detach() for probe, product in pairs) / len(pairs)
            for name in self.probes[0]
        }

    def pull_back(self, variance: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each H v with ∂(½ Σ σ² f)/∂(H v) = −½ σ² v / (number of probes)."""
        for probe, product in zip(self.probes, self.products, strict=True):
            for name, tensor in product.items():
                yield tensor, (-0.5 / len(self.probes) * variance[name] * probe[name]).to(tensor.dtype)


@dataclass(frozen=True)
class Hessian:
    """The diagonal of the Hessian of the observed labels' log-likelihood, which may have either sign.

    Args:
        every: evaluate it every k-th step, with weight k.
        num_probes: how many random sign vectors to average over.

    >>> Hessian(num_probes=4).weight(step=0)
    1
    """

    every: int = 1
    num_probes: int = 1
    memory = 0.0  # no setting
    num_derivatives: ClassVar[int] = 3

    def __post_init__(self) -> None:
        checked_count("Hessian", "every", self.every)
        checked_count("Hessian", "num_probes", self.num_probes)

    def weight(self, step: int) -> float:
        """Return `every` in the steps with curvature and 0 in the others."""
        return weight_of_every(self.every, step)

    def estimate(self, bnn: BNN, batch: Batch, streams: Streams, create_graph: bool) -> tuple[Tensor, ProbedDiagonal]:
        """Return the mean log-likelihood and minus its Hessian's diagonal, per datum."""
        log_likelihood = forward(bnn, batch).log_likelihood_sum(bnn) / batch.size
        means = bnn.means()
        generator = streams.generator("probes", bnn.device)
        probes = [{name: random_signs(mean, generator) for name, mean in means.items()} for _ in range(self.num_probes)]
        first = mean_gradients(bnn, log_likelihood, create_graph=True)
        products = [hessian_product(first, means, probe, create_graph) for probe in probes]
        return log_likelihood, ProbedDiagonal(probes, products)


def hessian_product(
    first: Mapping[str, Tensor],
    means: Mapping[str, Tensor],
    vector: Mapping[str, Tensor],
    create_graph: bool = False,
) -> dict[str, Tensor]:
    """Return H v from a gradient that still has its graph."""
    dependent = {name: tensor for name, tensor in first.items() if tensor.requires_grad}
    cotangents = [vector[name] for name in dependent]
    return gradients(list(dependent.values()), means, cotangents, create_graph=create_graph, retain_graph=True)


def random_signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a vector of ±1 with equal chances."""
    heads = draw("uniform", like.shape, torch.float32, generator).to(like.device) < 0.5
    return torch.where(heads, 1.0, -1.0).to(like.dtype)
