"""Diagonal curvature over a whole data set at the present mean, item by item, in evaluation mode."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from varlap import tree
from varlap.curvature.differentiable import twice_differentiable
from varlap.curvature.fisher import couples_items, require_score
from varlap.curvature.hessian import hessian_product, random_signs
from varlap.curvature.over_items import over_items
from varlap.curvature.protocol import Pass, forward, gradients, mean_gradients
from varlap.data import as_batches
from varlap.errors import ConfigError, NetworkError
from varlap.likelihoods.protocol import normal_like, of_log_prob, one_tensor
from varlap.posterior.batch import checked_batch, require_divisible
from varlap.posterior.bnn import BNN
from varlap.posterior.installed import installed
from varlap.seeds import checked_count
from varlap.streams import Streams

MOST_WEIGHTS_FOR_EXACT_HESSIAN = 2_000
MOST_DIRECTIONS = 2_000
MOST_GRADIENT_ENTRIES = 2**27  # per-item gradients held at once: half a gigabyte in single precision


def fisher_diagonal(
    bnn: BNN,
    data: Any,
    *,
    labels: Literal["exact", "sampled"] = "exact",
    batch_size: int = 128,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return the Fisher's diagonal per datum, Eq. 25 averaged over the data, squared item by item.

    "exact" sums over the directions of the outputs (K backward passes for K outputs); "sampled" makes one draw an
    item: a random direction of the right covariance, or a label where the likelihood has no `score`. Items are taken
    one at a time by `torch.vmap`, or in a loop where the network does not allow that.

    >>> import torch, varlap
    >>> bnn = varlap.BNN(torch.nn.Linear(2, 1), varlap.Gaussian(noise=1.0, learnt=False))
    >>> fisher_diagonal(bnn, (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2, 1)))["weight"]
    tensor([[ 5., 10.]])
    """
    if labels not in ("exact", "sampled"):
        raise ConfigError(f"labels={labels!r}: choose 'exact' or 'sampled'")
    sums = _zeros(bnn.means())
    num_items = 0
    with bnn.evaluating():
        if couples_items(bnn.network):
            raise NetworkError(
                "the Fisher of single items does not exist for this network: batch norm without running statistics "
                "makes each item's output depend on the others; use track_running_stats=True"
            )
    with bnn.evaluating(), twice_differentiable(bnn.network, num_derivatives=1):
        for part in _passes(bnn, data, batch_size):
            streams = Streams(seed, num_items)
            with streams.around_network(bnn.device):
                for cotangent in _cotangents(bnn, part, labels, streams.generator("labels", bnn.device)):
                    for name, squares in _squared_item_gradients(bnn, part, cotangent).items():
                        sums[name] += squares
            num_items += part.batch.size
    return {name: total / num_items for name, total in sums.items()}


def hessian_diagonal(
    bnn: BNN, data: Any, *, num_probes: int | None = None, batch_size: int = 128, seed: int = 0
) -> dict[str, Tensor]:
    """Return the diagonal of the log-likelihood's Hessian per datum, Eq. 15 averaged over the data.

    Without `num_probes` it is exact, one product for each weight, for networks of up to 2,000 weights; with it,
    Hutchinson's estimate.

    >>> import torch, varlap
    >>> bnn = varlap.BNN(torch.nn.Linear(2, 1), varlap.Gaussian(noise=1.0, learnt=False))
    >>> hessian_diagonal(bnn, (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2, 1)))["weight"]
    tensor([[ -5., -10.]])
    """
    if num_probes is not None:
        checked_count("hessian_diagonal", "num_probes", num_probes)
    elif bnn.num_weights() > MOST_WEIGHTS_FOR_EXACT_HESSIAN:
        raise ConfigError(
            f"an exact Hessian diagonal takes one product for each of {bnn.num_weights()} weights; pass "
            "num_probes=100 for Hutchinson's estimate"
        )
    means = bnn.means()
    sums = _zeros(means)
    num_items = 0
    with bnn.evaluating(), bnn.means_differentiable(), twice_differentiable(bnn.network):
        for part in _passes(bnn, data, batch_size):
            first = mean_gradients(bnn, part.log_likelihood_sum(bnn), create_graph=True)
            generator = Streams(seed, num_items).generator("probes", bnn.device)
            for vector, share in _probes(means, num_probes, generator):
                for name, product in hessian_product(first, means, vector).items():
                    sums[name] += share * vector[name] * product
            num_items += part.batch.size
    return {name: total / num_items for name, total in sums.items()}


def _passes(bnn: BNN, data: Any, batch_size: int) -> Iterator[Pass]:
    for number, (x, y) in enumerate(as_batches(data, batch_size, bnn.dtype)):
        x, y = tree.to_device(x, bnn.device), tree.to_device(y, bnn.device)
        with torch.enable_grad():
            with Streams(0, number).around_network(bnn.device):
                one = forward(bnn, checked_batch(x, y, step=number))
            yield one


def _cotangents(bnn: BNN, part: Pass, labels: str, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield cotangents u of the outputs whose squares sum to the Fisher, one row for each item."""
    instead = ", or use hessian_diagonal (laplace: curvature='hessian')"
    outputs = one_tensor(part.outputs, "fisher_diagonal", instead).detach()
    if labels == "sampled" and of_log_prob(bnn.likelihood, "score") is None:
        with torch.enable_grad():
            outputs.requires_grad_(True)
            drawn = part.drawn_targets(bnn, generator)
            yield torch.autograd.grad(Pass(part.batch, outputs).log_likelihoods(bnn, drawn).sum(), outputs)[0]
        return
    score_fn = require_score(bnn)
    with torch.no_grad():
        if labels == "sampled":
            yield score_fn(outputs, normal_like(outputs, generator), part.batch.y)
            return
        num_directions = outputs[0].numel()
        if num_directions > MOST_DIRECTIONS:
            raise ConfigError(
                f"the exact Fisher takes one backward pass for each of {num_directions} outputs of an item; use "
                "labels='sampled' (laplace: curvature='sampled-fisher')"
            )
        for direction in range(num_directions):
            noise = torch.zeros(len(outputs), num_directions, dtype=outputs.dtype, device=outputs.device)
            noise[:, direction] = 1
            yield score_fn(outputs, noise.reshape(outputs.shape), part.batch.y)


def _squared_item_gradients(bnn: BNN, part: Pass, cotangent: Tensor) -> dict[str, Tensor]:
    """Return Σᵢ (Jᵢᵀ uᵢ)² for each Bayesian parameter."""
    require_divisible(
        part.batch.x,
        part.batch.size,
        purpose="the Fisher of single items",
        instead="use the Hessian's diagonal, which sees whole batches (laplace: curvature='hessian')",
    )
    means = {name: mean.detach() for name, mean in bnn.means().items()}

    def projected(weights: dict[str, Tensor], x: Any, u: Tensor) -> Tensor:
        # Not by torch's functional_call: where a module is registered under two names, it puts the wrong tensor back.
        with installed(bnn.network, weights):
            return (bnn.outputs(tree.map_tensors(lambda t: t[None], x)) * u[None]).sum()

    def alone(x: Any, u: Tensor) -> dict[str, Tensor]:
        weights = {name: mean.clone().requires_grad_() for name, mean in means.items()}
        with torch.enable_grad():
            return gradients([projected(weights, x, u)], weights)

    item_gradients = functools.partial(torch.func.grad(projected), means)
    chunk = max(1, min(part.batch.size, MOST_GRADIENT_ENTRIES // bnn.num_weights()))
    sums = _zeros(means)
    for start in range(0, part.batch.size, chunk):
        items = slice(start, start + chunk)
        columns = tree.take(part.batch.x, items), cotangent[items]
        for name, rows in over_items(item_gradients, columns, alone_fn=alone).items():
            sums[name] += rows.to(sums[name].dtype).square().sum(0)
    return sums


def _zeros(means: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make room for sums over the data, in at least single precision: half precision stops counting at 256."""
    dtypes = {name: torch.promote_types(mean.dtype, torch.float32) for name, mean in means.items()}
    return {name: torch.zeros_like(mean, dtype=dtypes[name], requires_grad=False) for name, mean in means.items()}


def _probes(
    means: dict[str, nn.Parameter], num_probes: int | None, generator: torch.Generator
) -> Iterator[tuple[dict[str, Tensor], float]]:
    if num_probes is not None:
        for _ in range(num_probes):
            yield {name: random_signs(mean, generator) for name, mean in means.items()}, 1 / num_probes
        return
    for name, mean in means.items():
        for entry in range(mean.numel()):
            unit = {other: torch.zeros_like(m, requires_grad=False).flatten() for other, m in means.items()}
            unit[name][entry] = 1
            yield {other: vector.reshape(means[other].shape) for other, vector in unit.items()}, 1.0
