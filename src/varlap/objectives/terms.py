"""What an objective returns: the ELBO's terms per datum, and the loss to call `backward()` on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Terms:
    """The terms of an objective, per datum. All but `loss` are for reading.

    The loss holds its gradients until it is freed: keep numbers (`terms.elbo.item()`), not terms, in a history.
    A gradient scaler scales them after they were computed, so it does not save half-precision gradients from
    underflow: use bfloat16, or set `objective.gradient_scale`, as `fit(precision="fp16")` does.

    >>> terms = Terms(torch.tensor(-1.0), torch.tensor(0.5), torch.tensor(2.0), beta=0.1, loss=torch.tensor(1.7))
    >>> terms.elbo
    tensor(-1.7000)
    """

    log_likelihood: Tensor
    """(1/S) Σ log p(y|x, μ); for VI its average over weight samples"""
    curvature: Tensor
    """the penalty ½ Σ σ² f; 0 for MAP and VI and in steps without curvature; VLHessian's may be negative"""
    kl: Tensor
    """KL(posterior ‖ prior)/N, untempered; for MAP its quadratic part"""
    beta: float
    """the β of this step, smaller than the objective's while it warms up"""
    loss: Tensor
    """−elbo, differentiable: `loss.backward()` reaches the means, log σ and all other trainable parameters"""

    @property
    def elbo(self) -> Tensor:
        """log_likelihood − curvature − β·kl: higher is better."""
        return combine(self.log_likelihood, self.curvature, self.kl, self.beta)


def combine(log_likelihood: Tensor, curvature: Tensor, kl: Tensor, beta: float) -> Tensor:
    """Return the ELBO per datum."""
    return log_likelihood - curvature - beta * kl


class _Precomputed(torch.autograd.Function):
    """A scalar whose gradients are known already: backward only scales them."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Sequence[Tensor], *_leaves: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)  # which torch frees after backward, and then refuses a second one
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (scale,) = grad_outputs
        return None, None, *scaled(ctx.saved_tensors, scale)


def scaled(gradients: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
    """Return each gradient times a scalar, in few launches for many gradients.

    >>> scaled([torch.ones(2)], torch.tensor(3.0))
    [tensor([3., 3.])]
    """
    results: dict[int, Tensor] = {}
    for dtype in {gradient.dtype for gradient in gradients}:
        numbers = [number for number, gradient in enumerate(gradients) if gradient.dtype == dtype]
        chosen = [gradients[number] for number in numbers]
        products = torch._foreach_mul(chosen, scale.to(dtype))  # pyright: ignore[reportPrivateImportUsage]
        results |= dict(zip(numbers, products, strict=True))
    return [results[number] for number in range(len(gradients))]


def with_gradients(value: Tensor, leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return the value as a scalar on which `backward()` gives each leaf its gradient.

    >>> leaf = torch.zeros(2, requires_grad=True)
    >>> (3 * with_gradients(torch.tensor(1.0), [leaf], [torch.ones(2)])).backward()
    >>> leaf.grad
    tensor([3., 3.])
    """
    return _Precomputed.apply(value, list(gradients), *leaves)  # type: ignore[return-value]
