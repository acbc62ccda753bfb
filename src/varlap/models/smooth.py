"""Swap piecewise-linear activations for smooth ones, which have the second derivative that VL needs."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varlap.errors import warn
from varlap.models.checks import new_activation
from varlap.models.kinks import TRANSFORMER_LAYERS, find_kinks


class SmoothLeakyReLU(nn.Module):
    """a·x + (1 − a)·softplus(x): slope a far below zero and 1 far above it.

    >>> import torch
    >>> SmoothLeakyReLU(0.1)(torch.tensor([-50.0, 0.0, 50.0]))
    tensor([-5.0000,  0.6238, 50.0000])
    """

    def __init__(self, negative_slope: float = 0.01) -> None:
        super().__init__()
        self.negative_slope = negative_slope

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to each element."""
        return self.negative_slope * x + (1 - self.negative_slope) * F.softplus(x)

    def extra_repr(self) -> str:
        """Show the slope in the module's printout."""
        return f"negative_slope={self.negative_slope}"


class SmoothPReLU(nn.Module):
    """`SmoothLeakyReLU` with a learnt slope for all channels, or one for each.

    >>> import torch
    >>> activation = SmoothPReLU(nn.Parameter(torch.tensor([0.1, 0.2])))
    >>> activation(torch.full((1, 2), -50.0))
    tensor([[ -5., -10.]], grad_fn=<AddBackward0>)
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to each element; channels are dimension 1, as for nn.PReLU."""
        weight = self.weight if self.weight.numel() == 1 else self.weight.view(-1, *[1] * (x.dim() - 2))
        return weight * x + (1 - weight) * F.softplus(x)

    def extra_repr(self) -> str:
        """Show the number of slopes in the module's printout."""
        return f"num_parameters={self.weight.numel()}"


class ScaledTanh(nn.Module):
    """Tanh between two limits, with slope 1 half-way: the smooth form of Hardtanh and ReLU6.

    >>> import torch
    >>> ScaledTanh(0.0, 6.0)(torch.tensor([-50.0, 3.0, 50.0]))
    tensor([0., 3., 6.])
    """

    def __init__(self, min_val: float = -1.0, max_val: float = 1.0) -> None:
        super().__init__()
        self.min_val, self.max_val = min_val, max_val

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to each element."""
        middle, half = (self.max_val + self.min_val) / 2, (self.max_val - self.min_val) / 2
        return middle + half * ((x - middle) / half).tanh()

    def extra_repr(self) -> str:
        """Show the limits in the module's printout."""
        return f"min_val={self.min_val}, max_val={self.max_val}"


class SmoothSELU(nn.Module):
    """SELU's two limits, joined by CELU, whose slope does not jump at zero.

    >>> import torch
    >>> SmoothSELU()(torch.tensor([-50.0, 0.0, 1.0]))
    tensor([-1.7581,  0.0000,  1.0507])
    """

    ALPHA, SCALE = 1.6732632423543772, 1.0507009873554805  # those of torch.selu

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation to each element."""
        return self.SCALE * F.celu(x, alpha=self.ALPHA)


_SMOOTH_FORMS: dict[type[nn.Module], Callable[..., nn.Module | None]] = {
    nn.ReLU: lambda _: nn.SiLU(),
    nn.ReLU6: lambda old: ScaledTanh(old.min_val, old.max_val),
    nn.Hardtanh: lambda old: ScaledTanh(old.min_val, old.max_val),
    nn.LeakyReLU: lambda old: SmoothLeakyReLU(old.negative_slope),
    nn.PReLU: lambda old: SmoothPReLU(old.weight),
    nn.RReLU: lambda old: SmoothLeakyReLU((old.lower + old.upper) / 2),
    nn.Hardswish: lambda _: nn.SiLU(),
    nn.Hardsigmoid: lambda _: nn.Sigmoid(),
    nn.SELU: lambda _: SmoothSELU(),
    nn.ELU: lambda old: nn.CELU(old.alpha) if old.alpha > 0 and old.alpha != 1 else None,
}
_HOOKS = tuple(name for name in vars(nn.Module()) if "hook" in name)


def smooth(
    network: nn.Module,
    call: Callable[[], object] | None = None,
    *,
    activation: Callable[[], nn.Module] = nn.SiLU,
) -> nn.Module:
    """Swap the network's kinked activations for smooth ones, in place, and return the network.

    ReLU becomes SiLU or another `activation`, also as a function inside torch's transformer layers; LeakyReLU and PReLU
    their softplus forms (PReLU keeps its parameter), Hardtanh and ReLU6 a scaled tanh, Hardswish SiLU, Hardsigmoid the
    sigmoid, SELU and ELU a form of CELU. The weights stay, but what they compute changes: train, or train on,
    afterwards. What cannot be swapped is left alone and named in a warning.

    Args:
        network: any module. If it is itself an activation, the module returned is a new one.
        call: runs a forward pass; with it, the warning names function calls such as `F.relu(x)` too.
        activation: makes what stands for ReLU. `nn.SiLU` and `nn.GELU` are close to it; `nn.Softplus`, which the paper
            trains with, is 0.7 at zero, and a network made for ReLU predicts worse with it.

    >>> smooth(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    Sequential(
      (0): Linear(in_features=2, out_features=2, bias=True)
      (1): SiLU()
    )
    """
    new_activation("smooth", activation)  # before anything is swapped
    # Modules used in several places are swapped for one module in all of them.
    swapped = {id(old): new for old in network.modules() if (new := _smooth_form(old, activation)) is not None}
    for path, old in list(network.named_modules(remove_duplicate=False)):
        if path and id(old) in swapped:
            parent, _, name = path.rpartition(".")
            network.get_submodule(parent).add_module(name, swapped[id(old)])
    network = swapped.get(id(network), network)
    _smooth_transformers(network, activation)
    if kinks := find_kinks(network, call):
        warn(
            f"smooth left these as they are: {', '.join(map(str, kinks))}. VL loses their curvature; "
            "write an activation with a second derivative there, such as nn.SiLU()"
        )
    return network


def _smooth_form(old: nn.Module, activation: Callable[[], nn.Module]) -> nn.Module | None:
    # A subclass is swapped only where it computes what its parent does; a parametrised PReLU has no parameter
    # of its own to hand on.
    base = next((kind for kind in type(old).__mro__ if kind in _SMOOTH_FORMS), None)
    if base is None or type(old).forward is not base.forward:
        return None
    if isinstance(old, nn.PReLU) and not isinstance(old.weight, nn.Parameter):
        return None
    new = activation() if base is nn.ReLU else _SMOOTH_FORMS[base](old)
    if new is not None:
        new.training = old.training
        for name in _HOOKS:  # the same dictionaries, so that the handles of hooks still remove them
            setattr(new, name, getattr(old, name))
    return new


def _smooth_transformers(network: nn.Module, activation: Callable[[], nn.Module]) -> None:
    # Without gradients torch takes a fused path that would still compute ReLU; two flags of its own guard it.
    for layer in network.modules():
        if isinstance(layer, TRANSFORMER_LAYERS) and layer.activation in (F.relu, torch.relu, Tensor.relu):
            layer.activation = activation()
        if isinstance(layer, nn.TransformerEncoderLayer) and not isinstance(layer.activation, nn.ReLU):
            is_gelu = layer.activation_relu_or_gelu == 2
            layer.activation_relu_or_gelu = 2 if is_gelu else 0
    for encoder in network.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(
            not getattr(layer, "activation_relu_or_gelu", 0) for layer in encoder.layers
        ):
            encoder.use_nested_tensor = False
