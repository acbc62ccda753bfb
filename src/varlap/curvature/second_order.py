"""Convolutions and batch norms with a cheap second derivative, for networks that know nothing of it.

torch's own double backward of a convolution runs convolutions with the image as the kernel. None is needed:
y = x ∗ w is linear in x and in w, so all comes from one trilinear form T(g, x, w) = ⟨g, x ∗ w⟩, whose partial
derivatives are the convolution y = ∂T/∂g, its input gradient I(g, w) = ∂T/∂x and its weight gradient
W(g, x) = ∂T/∂w. With cx and cw the cotangents of these two gradients, the backward of the backward is

    in g:  cx ∗ w + x ∗ cw        in x:  I(g, cw)        in w:  W(g, cx)

where the last two are one backward call again, of (g, cx, cw). Hence two functions that name each other are
closed under differentiation, to any order.

Batch norm in training mode, y = w x̂ + b with x̂ = (x − mean) r and r = 1/√(var + ε), has dx̂ = p(dx) with

    p(a) = r (a − avg a − x̂ avg(a x̂)),     symmetric: ⟨c, p(g)⟩ = ⟨g, p(c)⟩,
    ∂⟨c, p(g)⟩/∂x = q(g, c) = −(r/M) (⟨g, x̂⟩ p(c) + ⟨c, x̂⟩ p(g) + ⟨g, p(c)⟩ x̂)

where avg and ⟨·,·⟩ run over the M values of a channel. torch's fused backward kernel computes p, so the
backward of its backward, gx = w p(g), gw = ⟨g, x̂⟩, gb = ⟨g, 1⟩, is short too:

    in g:  w p(cx) + cw x̂ + cb        in x:  w q(g, cx) + cw p(g)        in w:  ⟨g, p(cx)⟩
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # pyright: ignore


def fast_second_order() -> TorchFunctionMode:
    """Give the convolutions and batch norms called inside the `with` block a cheap double backward.

    Values and derivatives are torch's, to rounding; only the route to higher derivatives differs. It has to be
    active during the forward pass, and serves what `nn.Conv*`, `nn.ConvTranspose*` and `nn.BatchNorm*` call.
    All else goes to torch untouched: unbatched or complex inputs, tensor subclasses with rules of their own,
    batch norm in evaluation mode or without weight and bias, and forward-mode differentiation.

    >>> network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Softplus(), torch.nn.Conv2d(4, 2, 3))
    >>> with fast_second_order():
    ...     loss = network(torch.randn(5, 3, 8, 8)).square().mean()
    >>> grads = torch.autograd.grad(loss, network.parameters(), create_graph=True)
    >>> sum(g.square().sum() for g in grads).backward()
    >>> network[0].weight.grad.shape
    torch.Size([4, 3, 3, 3])
    """
    return _FastSecondOrder()


class _FastSecondOrder(TorchFunctionMode):
    """Sends a call along its route, if it has one; torch and the user's modules stay as they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, route = kwargs or {}, _ROUTES.get(func)
        y = None if route is None or _is_torchs(types) else route(*args, **kwargs)
        return func(*args, **kwargs) if y is None else y


def _is_torchs(types: Sequence[type]) -> bool:
    return (
        any(t is not Tensor for t in types)  # subclasses have rules of their own
        or forward_ad._current_level >= 0  # torch's rules for forward mode are good
        or torch.compiler.is_dynamo_compiling()  # Dynamo traces torch's rules only
        or top_saved_tensors_hooks(True) is not None  # a checkpoint, which repeats the call outside of the mode
    )


class _Function(torch.autograd.Function):
    generate_vmap_rule = True

    @classmethod
    def call(cls, *args: Any) -> Any:
        """The last backward records nothing, and need not pay for the record."""
        return cls.apply(*args) if torch.is_grad_enabled() else cls.forward(*args)


class _Conv(_Function):
    """y = x ∗ w + b. `geometry` is what `aten::convolution` takes besides, in its order."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple) -> Tensor:
        cast = _autocast_dtype(x)  # as a derivative too it keeps the dtype that the forward pass chose
        with torch.autocast(x.device.type, enabled=False) if cast not in (None, x.dtype) else nullcontext():
            return _aten.convolution.default(x, weight, bias, *geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:  # noqa: ARG004
        x, weight, _, ctx.geometry = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple:
        (g,), (x, weight) = cotangents, ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        gx, gw = _conv_gradients(g, x, weight, ctx.geometry, needs_x, needs_weight)
        return gx, gw, g.sum(_all_but_channels(g)) if needs_bias else None, None


class _ConvBackward(_Function):
    """I(g, w) and W(g, x), one of them None if not wanted. I needs only the shape of x, and W that of w."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, weight: Tensor, geometry: tuple, *want: bool) -> tuple:
        return _aten.convolution_backward.default(g, x, weight, None, *geometry, [*want, False])[:2]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:  # noqa: ARG004
        g, x, weight, ctx.geometry, *_ = inputs
        ctx.save_for_backward(g, x, weight)
        ctx.set_materialize_grads(False)  # an absent cotangent costs nothing

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple:
        (cx, cw), (g, x, weight) = cotangents, ctx.saved_tensors
        needs_g, needs_x, needs_weight, *_ = ctx.needs_input_grad
        cg = _Conv.call(cx, weight, None, ctx.geometry) if needs_g and cx is not None else None
        if needs_g and cw is not None:
            by_weight = _Conv.call(x, cw, None, ctx.geometry)
            cg = by_weight if cg is None else cg + by_weight
        want = needs_x and cw is not None, needs_weight and cx is not None
        cx, cw = x if cx is None else cx, weight if cw is None else cw
        return cg, *_conv_gradients(g, cx, cw, ctx.geometry, *want), None, None, None


def _conv_gradients(g: Tensor, x: Tensor, weight: Tensor, geometry: tuple, *want: bool) -> Any:
    return _ConvBackward.call(g, x, weight, geometry, *want) if any(want) else (None, None)


class _BatchNorm(_Function):
    """y = w x̂ + b; also the batch's mean and r, for the backward. Moves the running mean and var as torch does."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, mean: Any, var: Any, *rates: float) -> tuple:
        if mean is None:
            return _aten._native_batch_norm_legit.no_stats(x, weight, bias, True, *rates)
        return _aten._native_batch_norm_legit.default(x, weight, bias, mean, var, True, *rates)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        (x, weight, *_, ctx.eps), (_, mean, r) = inputs, output
        ctx.mark_non_differentiable(mean, r)
        ctx.save_for_backward(x, weight, mean, r)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple:
        return *_BatchNormBackward.call(cotangents[0], *ctx.saved_tensors, ctx.eps), None, None, None, None


class _BatchNormBackward(_Function):
    """w p(g), ⟨g, x̂⟩ and ⟨g, 1⟩, as functions of g, x and w; mean and r are known to be those of x."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, weight: Tensor, mean: Tensor, r: Tensor, eps: float) -> tuple:
        statistics = (None, None, mean, r, True, eps)
        return _aten.native_batch_norm_backward.default(g, x, weight, *statistics, [True, True, True])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:  # noqa: ARG004
        *tensors, ctx.eps = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple:
        (cx, cw, cb), (g, x, weight, mean, r) = cotangents, ctx.saved_tensors
        dims, channels = _all_but_channels(x), [-1] + [1] * (x.dim() - 2)
        p = _BatchNormBackward.call
        one = torch.ones_like(mean)  # p itself, since w p(g) cannot be divided by w where w is zero
        pg, g_x_hat, _ = p(g, x, one, mean, r, ctx.eps)
        pc, c_x_hat, _ = p(cx, x, one, mean, r, ctx.eps)
        if torch.is_grad_enabled():  # a third derivative may follow; to autograd the saved mean and r are constants
            var, mean = torch.var_mean(x.to(mean.dtype), dims, correction=0)
            r = torch.rsqrt(var + ctx.eps)
        x_hat = (x - mean.view(channels)) * r.view(channels)
        g_pc = (g * pc).sum(dims, dtype=mean.dtype)
        scale = -weight * r * (x.shape[1] / x.numel())
        in_g = weight.view(channels) * pc + cw.view(channels) * x_hat + cb.view(channels)
        in_x = (
            (scale * g_x_hat).view(channels) * pc
            + (scale * c_x_hat + cw).view(channels) * pg
            + (scale * g_pc).view(channels) * x_hat
        )
        return in_g.to(g.dtype), in_x.to(x.dtype), g_pc, None, None, None


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    active = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if active else None


def _conv(n, input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) -> Any:
    return _route(n, input, weight, bias, stride, padding, dilation, False, 0, groups)


def _conv_transpose(n, input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1) -> Any:
    return _route(n, input, weight, bias, stride, padding, dilation, True, output_padding, groups)


def _route(n, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups) -> Any:
    if not (x.dim() == weight.dim() == n + 2 and x.is_floating_point() and weight.is_floating_point()):
        return None
    stride, dilation, output_padding = _each(n, stride), _each(n, dilation), _each(n, output_padding)
    if padding == "same" and all(s == 1 for s in stride):
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        padding = [t // 2 for t in total]
        if any(t % 2 for t in total):  # the odd one goes to the right; F.pad counts from the last dimension
            x = F.pad(x, [side for t in reversed(total) for side in (0, t % 2)])
    elif isinstance(padding, str) and padding != "valid":
        return None
    padding = _each(n, 0 if padding == "valid" else padding)
    dtype = _autocast_dtype(x)
    if dtype is not None:  # torch would cast only below this mode; like torch, leave double precision alone
        x, weight, bias = (t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in (x, weight, bias))
    return _Conv.call(x, weight, bias, (stride, padding, dilation, transposed, output_padding, groups))


def _each(n: int, value: Any) -> list[int]:
    """One value per spatial dimension; torch takes a lone one for all of them."""
    values = list(value) if isinstance(value, Sequence) else [value]
    return values * n if len(values) == 1 else values


def _batch_norm(x, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5) -> Any:
    several = x.dim() > 1 and x.numel() > x.shape[1]
    if not (training and several) or weight is None or bias is None or (mean is None) != (var is None):
        return None
    return _BatchNorm.call(x, weight, bias, mean, var, momentum, eps)[0]


# A route has the signature of what it stands for, and returns None where torch is to answer, or to refuse.
_ROUTES: dict[Any, Callable] = (
    {F.batch_norm: _batch_norm}
    | {getattr(torch, f"conv{n}d"): partial(_conv, n) for n in (1, 2, 3)}
    | {getattr(torch, f"conv_transpose{n}d"): partial(_conv_transpose, n) for n in (1, 2, 3)}
)
