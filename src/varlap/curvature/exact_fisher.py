"""The Fisher's diagonal without sampling, one gradient for each item and output: for small networks (Eq. 25)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from varlap import tree
from varlap.curvature.fisher import Gradients, SquaredGradients, check_settings, require_score, score_gradient
from varlap.curvature.protocol import Pass, check_differentiable, forward, weight_of_every
from varlap.likelihoods.protocol import one_tensor
from varlap.posterior.batch import Batch
from varlap.posterior.bnn import BNN
from varlap.posterior.installed import installed
from varlap.streams import Streams

ACTIVATIONS = (nn.Softplus, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.ReLU, nn.Identity)
VMAPPED = (nn.Sequential, nn.Linear, nn.Flatten, *ACTIVATIONS)  # whose double derivative under vmap was checked


@dataclass(frozen=True)
class ItemGradients:
    """f = Σᵢ Σ_c Gᵢ_c² / S for the gradients of single items in directions of their outputs, [S, C, ...]."""

    rows: Gradients
    num_items: int

    def diagonal(self) -> dict[str, Tensor]:
        """Return f for each Bayesian parameter, without a graph."""
        wide = {name: g.detach().to(torch.promote_types(g.dtype, torch.float32)) for name, g in self.rows.items()}
        return {name: g.square().sum((0, 1)) / self.num_items for name, g in wide.items()}

    def pull_back(self, variance: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor G with ∂(½ Σ σ² f)/∂G = σ² G / S."""
        for name, rows in self.rows.items():
            yield rows, (variance[name] * rows.detach() / self.num_items).to(rows.dtype)


@dataclass(frozen=True)
class ExactFisher:
    """The Fisher without sampling: one gradient for each item and each direction of its outputs.

    It takes S × K gradients, so it is for small networks and small data, where it leaves nothing to chance: at once
    for a plain stack of linear layers and smooth activations, one by one for others. Its gradient is the whole one. It
    needs a likelihood with a `score`.

    Args:
        every: evaluate it every k-th step, with weight k.
        memory: 0, or the decay of a running mean over evaluations that serves in every step, as in `Fisher`.

    >>> ExactFisher().weight(step=3)
    1
    """

    every: int = 1
    memory: float = 0.0
    num_derivatives: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_settings("ExactFisher", self.every, memory=self.memory)

    def weight(self, step: int) -> float:
        """Return `every` in the steps with curvature and 0 in the others."""
        return weight_of_every(self.every, step)

    def estimate(
        self,
        bnn: BNN,
        batch: Batch,
        streams: Streams,  # noqa: ARG002
        create_graph: bool,
    ) -> tuple[Tensor, SquaredGradients | ItemGradients]:
        """Return the mean log-likelihood and Σᵢ Σ_c (Jᵢᵀ u_c)² / S, where Σ_c u_c u_cᵀ is the outputs' Fisher."""
        part = forward(bnn, batch)
        log_likelihood = part.log_likelihood_sum(bnn) / batch.size
        outputs = one_tensor(part.outputs, "ExactFisher", ", or use Fisher(gradient='held')")
        check_differentiable(outputs)
        alone = isinstance(batch.x, Tensor) and len(batch.x) == batch.size
        if alone and takes_items_at_once(bnn.network):
            return log_likelihood, ItemGradients(_item_gradients(bnn, part), batch.size)
        noise = torch.zeros_like(outputs)
        columns = []
        for entry in range(noise.numel()):
            unit = noise.clone().flatten()
            unit[entry] = 1
            columns.append(score_gradient(bnn, part, unit.reshape(noise.shape), create_graph))
        return log_likelihood, SquaredGradients(columns, batch.size)


def takes_items_at_once(network: nn.Module) -> bool:
    """Whether a network's items can have their gradients by vmap, twice differentiated: a plain stack of layers.

    Others are not trusted: under vmap torch takes fused attention, whatever backend was asked for, and gives a wrong
    second derivative without a word.

    >>> takes_items_at_once(nn.Sequential(nn.Linear(2, 2), nn.Tanh())), takes_items_at_once(nn.GRU(2, 2))
    (True, False)
    """
    return all(type(module) in VMAPPED for module in network.modules())


def _item_gradients(bnn: BNN, part: Pass) -> Gradients:
    """Return √wᵢ Jᵢᵀ u_c for each item and direction, [S, C, ...] by parameter."""
    score_fn, batch = require_score(bnn), part.batch
    means: dict[str, Tensor] = dict(bnn.means())
    shape = part.outputs.shape[1:]
    units = torch.eye(math.prod(shape), dtype=part.outputs.dtype, device=part.outputs.device).reshape(-1, *shape)

    def rows(x: Any, y: Any) -> Gradients:
        x, y = (tree.map_tensors(lambda t: t[None], one) for one in (x, y))

        def outputs(weights: Gradients) -> Tensor:
            with installed(bnn.network, weights):
                return bnn.outputs(x)

        value, pull_back = torch.func.vjp(outputs, means)[:2]
        return torch.vmap(lambda unit: pull_back(score_fn(value, unit[None], y))[0])(units)

    found = torch.vmap(rows)(batch.x, batch.y)
    if batch.weights is None:
        return found
    root = batch.weights.sqrt()
    return {name: g * root.reshape(-1, *[1] * (g.ndim - 1)) for name, g in found.items()}
