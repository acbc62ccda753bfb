"""Prediction by a network that is linear in its weights around their means: f(x, μ) + J(x)(w − μ)."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from varlap import tree
from varlap.curvature.differentiable import twice_differentiable
from varlap.errors import NetworkError
from varlap.likelihoods.protocol import normal_like, one_tensor
from varlap.posterior import BNN
from varlap.posterior.installed import installed
from varlap.predict.draws import deviations
from varlap.predict.inputs import Inputs
from varlap.streams import Streams

log = logging.getLogger(__name__)

DRAWS_AT_ONCE = 5  # share one pass at the means; more save little, and each holds its own activations


def linearised_outputs(bnn: BNN, inputs: Inputs, num_samples: int, seed: int) -> list[Tensor]:
    """Return f(x, μ) + J(x)(w − μ) for each of `num_samples` draws w ~ N(μ, σ²), one draw for all inputs.

    No Jacobian is built: each draw is one Jacobian-vector product, by forward-mode differentiation of several draws at
    once, or by differentiating a backward pass where the network does not allow that.

    >>> bnn = BNN(nn.Linear(2, 1), likelihood="gaussian")
    >>> len(linearised_outputs(bnn, Inputs(bnn, torch.zeros(3, 2), None), num_samples=4, seed=0))
    4
    """
    outputs: list[Tensor] = []
    products = Products(bnn)
    with differentiable(bnn.network):
        primal = [tensor_of_outputs(bnn, x) for x in inputs]
        for start in range(0, num_samples, DRAWS_AT_ONCE):
            numbers = range(start, min(start + DRAWS_AT_ONCE, num_samples))
            draws = [deviations(bnn, seed, number) for number in numbers]
            tangents = {name: torch.stack([draw.pop(name) for draw in draws]) for name in list(draws[0])}
            changes = [products.of(x, tangents) for x in inputs]
            for row in range(len(numbers)):
                # A bfloat16 sum would lose what is smaller than a hundredth of the output.
                rows = [
                    tree.at_least_single(f) + tree.at_least_single(change[row])
                    for f, change in zip(primal, changes, strict=True)
                ]
                outputs.append(torch.cat(rows))
    return outputs


class Products:
    """Products J(x) v of the outputs' Jacobian at the means with vectors v in weight space.

    >>> bnn = BNN(nn.Linear(2, 1, bias=False), likelihood="gaussian")
    >>> Products(bnn).of(torch.tensor([[1.0, 2.0]]), {"weight": torch.tensor([[[1.0, 1.0]]])})
    tensor([[[3.]]])
    """

    def __init__(self, bnn: BNN) -> None:
        self._bnn = bnn
        self._means = {name: mean.detach() for name, mean in bnn.means().items()}
        self._forward = True

    def of(self, x: Any, vectors: dict[str, Tensor]) -> Tensor:
        """Return one product for each entry of the vectors' first dimension."""
        if self._forward:
            try:
                return self._by_forward_mode(x, vectors)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError) as error:  # recurrent kernels, own autograd functions, ...
                log.info("linearised by double backward, since forward-mode differentiation failed: %s", error)
                self._forward = False
        try:
            return self._by_double_backward(x, vectors)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise NetworkError(
                "how='linearised' needs a network that can be differentiated forwards, or backwards twice, and this "
                f"one allows neither ({error}); give its autograd.Function a jvp or a backward that can be "
                "differentiated, or use how='sampled'"
            ) from error

    def _by_forward_mode(self, x: Any, vectors: dict[str, Tensor]) -> Tensor:
        def outputs(weights: dict[str, Tensor]) -> Tensor:
            with installed(self._bnn.network, weights):
                return self._bnn.outputs(x)

        def product(vector: dict[str, Tensor]) -> Tensor:
            return torch.func.jvp(outputs, (self._means,), (vector,))[1]

        return torch.vmap(product)(vectors)

    def _by_double_backward(self, x: Any, vectors: dict[str, Tensor]) -> Tensor:
        """J v is the derivative of ⟨Jᵀu, v⟩ in u, at any u."""
        with torch.enable_grad():
            weights = {name: mean.clone().requires_grad_() for name, mean in self._means.items()}
            with installed(self._bnn.network, weights):
                outputs = self._bnn.outputs(x)
                if not outputs.requires_grad:
                    raise RuntimeError("the outputs do not depend on any Bayesian weight that autograd could see")
                u = normal_like(outputs.detach(), Streams(0, 0).generator("outputs", outputs.device)).requires_grad_()
                pulled = torch.autograd.grad(outputs, list(weights.values()), u, create_graph=True, allow_unused=True)
                used = {n: g for n, g in zip(weights, pulled, strict=True) if g is not None}
                traced = {name: gradient for name, gradient in used.items() if gradient.requires_grad}
                rows = []
                for row in range(len(next(iter(vectors.values())))):
                    vector = {name: vectors[name][row] for name in used}
                    sources = list(traced.values()), u, [vector[name] for name in traced]
                    rows.append(torch.autograd.grad(*sources, retain_graph=True)[0].detach())
                    _check_product(u.detach(), rows[-1], {n: g.detach() for n, g in used.items()}, vector)
        return torch.stack(rows)


def _check_product(u: Tensor, product: Tensor, pulled: dict[str, Tensor], vector: dict[str, Tensor]) -> None:
    """Check ⟨u, J v⟩ = ⟨Jᵀu, v⟩: a backward that torch cannot differentiate drops out of J v without a word."""
    terms = [(gradient * vector[name]).flatten().to(tree.at_least_single(product)) for name, gradient in pulled.items()]
    expected = torch.stack([term.sum() for term in terms]).sum()
    size = torch.stack([term.square().sum() for term in terms]).sum().sqrt()
    half = product.dtype.itemsize < 4
    tolerance = (0.2 if half else 1e-2) * torch.maximum(size, expected.abs())
    if bool(((tree.at_least_single(u) * tree.at_least_single(product)).sum() - expected).abs() > tolerance):
        raise RuntimeError("a backward pass of it, such as a once_differentiable one, has no derivative")


@contextlib.contextmanager
def differentiable(network: nn.Module) -> Iterator[None]:
    """Choose kernels that can be differentiated; what is differentiated says so itself."""
    with torch.no_grad(), twice_differentiable(network, num_derivatives=1):
        yield


def tensor_of_outputs(bnn: BNN, x: Any) -> Tensor:
    """Return f(x, μ), to which a change of the outputs can be added."""
    return one_tensor(bnn.outputs(x), "how='linearised'", ", or use how='sampled'")
