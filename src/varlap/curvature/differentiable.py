"""Making a forward pass differentiable twice: some of torch's fused kernels are not."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm

from varlap.curvature.second_order import fast_second_order
from varlap.curvature.written_out import WrittenOut
from varlap.errors import NetworkError


@contextlib.contextmanager
def twice_differentiable(network: nn.Module, num_derivatives: int = 2) -> Iterator[None]:
    """Choose kernels that have a second derivative, and a right one, and the fast one for convolutions.

    Fused attention has none, so attention runs on the MATH backend; cuDNN's recurrent layers have
    none, so networks with such layers run without them. With `num_derivatives=1` a second derivative may
    be taken in the cotangent alone, as for products with a Jacobian. Where there is no derivative that is
    needed, the error says so.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(module, nn.RNNBase) for module in network.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        # Each call of torch is looked at, which a small network would feel: only where there is something to find.
        if num_derivatives > 2 or _may_convolve(network):  # WrittenOut leaves affine batch norm's third one to it
            stack.enter_context(fast_second_order())
        if num_derivatives > 2 or (num_derivatives > 1 and _has_weight_norm(network)):
            stack.enter_context(WrittenOut(num_derivatives))
        try:
            yield
        except NotImplementedError as error:
            if "derivative" not in str(error):  # the network's own
                raise
            raise NetworkError(
                f"torch has no second derivative for a part of the network: {error} Use another layer there (for "
                "nn.EmbeddingBag: nn.Embedding and a mean), or an objective without curvature: varlap.VI or varlap.MAP"
            ) from error


def _may_convolve(network: nn.Module) -> bool:
    return any(parameter.ndim > 2 for parameter in network.parameters()) or any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules()
    )


def _has_weight_norm(network: nn.Module) -> bool:
    """Whether a layer has weight norm, new or old.

    A forward pass of the user's own that calls `torch._weight_norm` is not seen, and keeps torch's wrong derivative.
    """
    return any(
        isinstance(module, _WeightNorm)
        or any(isinstance(hook, WeightNorm) for hook in module._forward_pre_hooks.values())
        for module in network.modules()
    )
