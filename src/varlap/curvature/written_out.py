"""Normalisations written out, where torch's own derivatives of a higher order are silently wrong.

torch's second derivatives of layer norm, instance norm and batch norm treat statistics that they saved as constants,
so that differentiating them once more loses terms. That of weight norm loses them itself: it treats the norms as
constants. VL needs two derivatives; VLHessian and VLDeterminant need three.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from varlap.curvature.second_order import top_saved_tensors_hooks
from varlap.errors import NetworkError


class WrittenOut(TorchFunctionMode):
    """Give normalisations that are called inside the `with` block right derivatives of as many orders as are asked for.

    >>> x = torch.randn(4, 3)
    >>> with WrittenOut(num_derivatives=3):
    ...     written_out = F.layer_norm(x, (3,))
    >>> torch.allclose(written_out, F.layer_norm(x, (3,)), atol=1e-5)
    True
    """

    def __init__(self, num_derivatives: int) -> None:
        super().__init__()
        self._routes = (_WRONG_SECOND if num_derivatives > 1 else {}) | (_WRONG_THIRD if num_derivatives > 2 else {})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, route = kwargs or {}, self._routes.get(func)
        y = None if route is None else route(*args, **kwargs)
        if y is None:
            return func(*args, **kwargs)
        _refuse_in_checkpoint(func)
        return y


def _refuse_in_checkpoint(func: Any) -> None:
    """A checkpoint repeats the call inside `torch.autograd.grad`, where torch leaves this mode out."""
    hooks = top_saved_tensors_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", None) == torch.utils.checkpoint.__name__:
        raise NetworkError(
            f"torch's own derivatives of {func.__name__.strip('_')} are wrong in the order that curvature needs, and "
            "varlap's cannot be used inside torch.utils.checkpoint; take this layer out of the checkpoint, or use an "
            "objective without curvature: varlap.VI or varlap.MAP"
        )


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
    if not training:
        return None
    if weight is not None and bias is not None and top_saved_tensors_hooks(True) is None:
        # `second_order` has a rule for it, which is right and cheaper.
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    with torch.no_grad(), torch._C.DisableTorchFunction():
        F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    dims = [0, *range(2, input.dim())]
    return _affine(_normalised(input, dims, eps), weight, bias, [-1] + [1] * (input.dim() - 2))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


_Routes = dict[Any, Callable[..., Tensor | None]]
_WRONG_SECOND: _Routes = {torch._weight_norm: _weight_norm}  # pyright: ignore[reportPrivateImportUsage]
_WRONG_THIRD: _Routes = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.instance_norm: _instance_norm,
    F.batch_norm: _batch_norm,
}
