"""Making a forward pass differentiable twice: some of torch's fused kernels are not."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from varlap.curvature.second_order import fast_second_order
from varlap.curvature.third_order import ThirdOrder


@contextlib.contextmanager
def twice_differentiable(network: nn.Module, num_derivatives: int = 2) -> Iterator[None]:
    """Choose kernels that have a second derivative, and the fast one for convolutions.

    Fused attention has none, so attention runs on the MATH backend; cuDNN's recurrent layers have
    none, so networks with such layers run without them.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if any(isinstance(module, nn.RNNBase) for module in network.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if num_derivatives > 2 or _may_convolve(network):  # ThirdOrder leaves affine batch norm to it
            stack.enter_context(fast_second_order())
        if num_derivatives > 2:
            stack.enter_context(ThirdOrder())
        yield


def _may_convolve(network: nn.Module) -> bool:
    """Whether there is something to be faster at: each call of torch is looked at, which a small network would feel."""
    return any(parameter.ndim > 2 for parameter in network.parameters()) or any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules()
    )
