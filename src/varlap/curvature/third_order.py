"""Normalisations written out, for objectives that need a third derivative: torch's own is silently wrong there.

torch's second derivatives of layer norm, instance norm and batch norm treat statistics that they saved as constants,
so that differentiating them once more loses terms. VL needs two derivatives; VLHessian and VLDeterminant need three.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class ThirdOrder(TorchFunctionMode):
    """Give normalisations that are called inside the `with` block right derivatives of any order.

    >>> x = torch.randn(4, 3)
    >>> with ThirdOrder():
    ...     written_out = F.layer_norm(x, (3,))
    >>> torch.allclose(written_out, F.layer_norm(x, (3,)), atol=1e-5)
    True
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, route = kwargs or {}, _ROUTES.get(func)
        y = None if route is None else route(*args, **kwargs)
        return func(*args, **kwargs) if y is None else y


def _normalised(x: Tensor, dims: list[int], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int]) -> Tensor:
    x = x if weight is None else x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


def _layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5, *_: Any) -> Tensor:
    dims = range(-len(normalized_shape), 0)
    return _affine(_normalised(input, list(dims), eps), weight, bias, list(normalized_shape))


def _instance_norm(
    input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5
) -> Tensor | None:
    if not use_input_stats:
        return None
    with torch.no_grad(), torch._C.DisableTorchFunction():  # for the running statistics alone
        F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    channels = [-1] + [1] * (input.dim() - 2)
    return _affine(_normalised(input, list(range(2, input.dim())), eps), weight, bias, channels)


def _batch_norm(
    input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
) -> Tensor | None:
    if not training or (weight is not None and bias is not None):
        return None  # with weight and bias, `second_order` has a rule of its own that is right
    with torch.no_grad(), torch._C.DisableTorchFunction():
        F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    dims = [0, *range(2, input.dim())]
    return _affine(_normalised(input, dims, eps), weight, bias, [-1] + [1] * (input.dim() - 2))


_ROUTES: dict[Any, Callable[..., Tensor | None]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.instance_norm: _instance_norm,
    F.batch_norm: _batch_norm,
}
