"""Linearised prediction in closed form: outputs are Gaussian, of mean f(x, μ) and covariance J diag(σ²) Jᵀ."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from varlap import tree
from varlap.curvature.fisher import couples_items
from varlap.curvature.over_items import over_items
from varlap.errors import ConfigError, NetworkError
from varlap.likelihoods import Likelihood, Prediction
from varlap.likelihoods.protocol import of_log_prob
from varlap.posterior import BNN
from varlap.posterior.installed import installed
from varlap.predict.average import average, predicted
from varlap.predict.inputs import Inputs
from varlap.predict.linearised import differentiable, tensor_of_outputs
from varlap.streams import Streams

MOST_ENTRIES_OF_ONE_JACOBIAN = 2**30  # four gigabytes in single precision
ENTRIES_AT_ONCE = 2**27
NUM_OUTPUT_DRAWS = 100  # of the outputs, for what the likelihood has no formula of


def output_gaussian(bnn: BNN, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return for each item the mean f(x, μ) and the covariance J diag(σ²) Jᵀ of its D outputs, [S, D, D].

    >>> import varlap
    >>> bnn = BNN(torch.nn.Linear(2, 1, bias=False), "gaussian", prior=varlap.OneScalePrior(1.0))
    >>> _ = torch.nn.init.zeros_(bnn.log_sigma["weight"])
    >>> output_gaussian(bnn, Inputs(bnn, torch.tensor([[1.0, 2.0]]), None))[1]
    tensor([[[5.]]])
    """
    if couples_items(bnn.network):
        raise NetworkError(
            "closed_form=True needs each item's own Jacobian, which does not exist for this network: batch norm "
            "without running statistics makes each item's output depend on the others; leave closed_form out"
        )
    means, covariances = [], []
    with differentiable(bnn.network):
        for x in inputs:
            mean = tensor_of_outputs(bnn, x)
            _check_size(bnn, mean)
            _check_items_alone(bnn, x, mean)
            means.append(mean)
            covariances.append(torch.cat(list(_covariances(bnn, x, mean))) if len(mean) else mean.new_zeros(0, 0, 0))
    return torch.cat(means), torch.cat(covariances)


def closed_form(likelihood: Likelihood, mean: Tensor, covariance: Tensor, seed: int) -> Prediction:
    """Return the likelihood's predictive for Gaussian outputs, by its `predict_from_gaussian` where it has one.

    What that leaves out (the log-probability of a count, the expected entropy of a class) comes from draws of
    the outputs, the same noise for every item.

    >>> import varlap
    >>> likelihood = varlap.Gaussian(noise=1.0, learnt=False)
    >>> closed_form(likelihood, torch.zeros(1, 1), torch.full((1, 1, 1), 3.0), seed=0).variance
    tensor([[4.]])
    """
    predict_fn = of_log_prob(likelihood, "predict_from_gaussian")
    predicted(likelihood, mean)  # says so where that is no prediction, by which a formula may go
    found: Prediction | None = None if predict_fn is None else predict_fn(mean, covariance)
    if found is not None and found.outputs and found.probs is None:
        return found  # a Gaussian's, which leaves nothing out
    averaged = average(likelihood, drawn_outputs(mean, covariance, NUM_OUTPUT_DRAWS, seed))
    if found is None:
        return averaged
    prediction = found if found.outputs else replace(found, outputs=averaged.outputs, likelihood=likelihood)
    # What the weights leave open is a difference of entropies, so both come from the draws; the total is the formula's.
    if prediction.probs is not None and prediction.expected_entropy is None and averaged.expected_entropy is not None:
        epistemic = torch.minimum(averaged.entropy - averaged.expected_entropy, prediction.entropy)
        prediction = replace(prediction, expected_entropy=prediction.entropy - epistemic)
    return prediction


def drawn_outputs(mean: Tensor, covariance: Tensor, num_draws: int, seed: int) -> list[Tensor]:
    """Draw outputs from N(mean, covariance), with one noise for all items.

    >>> [draw.shape for draw in drawn_outputs(torch.zeros(4, 2), torch.zeros(4, 2, 2), 3, seed=0)]
    [torch.Size([4, 2]), torch.Size([4, 2]), torch.Size([4, 2])]
    """
    values, vectors = torch.linalg.eigh(covariance)  # not Cholesky's: a covariance may be singular
    root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    generator = Streams(seed, 0).generator("outputs", covariance.device)
    noise = torch.randn(
        num_draws, covariance.shape[-1], generator=generator, dtype=covariance.dtype, device=covariance.device
    )
    return [mean + (root @ one).reshape(mean.shape) for one in noise]


def _check_items_alone(bnn: BNN, x: Any, mean: Tensor) -> None:
    """Refuse a network whose output for an item depends on others: its Jacobian would not be the item's."""
    if not len(mean):
        return
    if tree.leading_size(x) == len(mean):
        alone = tensor_of_outputs(bnn, tree.take(x, slice(0, 1)))
        tolerance = 1e-3 if mean.dtype.itemsize >= 4 else 5e-2
        if alone.shape == mean[:1].shape and torch.allclose(alone, mean[:1], tolerance, tolerance):
            return
        if not torch.equal(tensor_of_outputs(bnn, x), mean):  # it draws numbers: nothing can be said
            return
    raise NetworkError(
        "closed_form=True needs each item's own Jacobian, which does not exist for this network: an item's output "
        "depends on other items, or on an input that they share; leave closed_form out"
    )


def _check_size(bnn: BNN, outputs: Tensor) -> None:
    num_outputs = outputs[0].numel() if len(outputs) else 0
    if num_outputs * bnn.num_weights() > MOST_ENTRIES_OF_ONE_JACOBIAN:
        raise ConfigError(
            f"closed_form=True builds a Jacobian of {num_outputs} outputs × {bnn.num_weights()} weights for each item, "
            "which is too large; leave closed_form out for draws, or make fewer weights Bayesian by select='head.*'"
        )


def _covariances(bnn: BNN, x: Any, outputs: Tensor) -> Iterator[Tensor]:
    num_items, num_outputs = len(outputs), outputs[0].numel()
    chunk = max(1, min(num_items, ENTRIES_AT_ONCE // (num_outputs * bnn.num_weights())))
    sigma = {name: value.detach().exp() for name, value in bnn.log_sigma.items()}
    dtype = torch.promote_types(outputs.dtype, torch.float32)
    for start in range(0, num_items, chunk):
        part = tree.take(x, slice(start, start + chunk))
        size = min(chunk, num_items - start)
        total = torch.zeros(size, num_outputs, num_outputs, dtype=dtype, device=outputs.device)
        for name, rows in _jacobians(bnn, part).items():
            scaled = (rows.to(dtype) * sigma[name].to(dtype)).reshape(size, num_outputs, -1)
            total += scaled @ scaled.mT
        yield total


def _jacobians(bnn: BNN, x: Any) -> dict[str, Tensor]:
    """Return ∂ outputs / ∂ weights of each item by parameter name, [S, D, ...]."""
    means = {name: mean.detach() for name, mean in bnn.means().items()}

    def outputs(weights: dict[str, Tensor], item: Any) -> Tensor:
        with installed(bnn.network, weights):
            return bnn.outputs(tree.map_tensors(lambda t: t[None], item)).flatten()

    def alone(item: Any) -> dict[str, Tensor]:
        weights = {name: mean.clone().requires_grad_() for name, mean in means.items()}
        return _rows(outputs(weights, item), weights)

    with torch.enable_grad():
        return over_items(functools.partial(torch.func.jacrev(outputs), means), (x,), alone_fn=alone)


def _rows(outputs: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    rows = [
        torch.autograd.grad(output, list(weights.values()), retain_graph=True, allow_unused=True) for output in outputs
    ]
    return {
        name: torch.stack([torch.zeros_like(weight) if row[i] is None else row[i] for row in rows])
        for i, (name, weight) in enumerate(weights.items())
    }
