"""Which networks can be wrapped: those with a second derivative, and with parameters of which a draw can be made."""

import torch
from torch import nn

from varlap.errors import NetworkError


def check_network(network: nn.Module) -> None:
    """Refuse a network that cannot be wrapped.

    >>> check_network(nn.Linear(2, 3))
    >>> check_network(nn.LazyLinear(3))
    Traceback (most recent call last):
    varlap.errors.NetworkError: parameter 'weight' has no shape yet (a lazy module); call the network once on a batch, \
then wrap it
    """
    if not isinstance(network, nn.Module):
        raise NetworkError(f"BNN needs an nn.Module, got {type(network).__name__}; wrap a function in a module")
    for name, module in network.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"the network's part {name!r}" if name else "the network"
            raise NetworkError(
                f"{where} is TorchScript, in which draws cannot take the weights' place; wrap the Python module that "
                "it was made of, before torch.jit.script or torch.jit.trace"
            )
    refuse_compiled(network)
    for name, parameter in network.named_parameters():
        if hasattr(parameter, "placements"):  # a DTensor
            raise NetworkError(
                f"parameter {name!r} is sharded over ranks, and torch frees such weights before a second derivative "
                "can use them; wrap the whole network and train data-parallel with torchrun instead"
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise NetworkError(
                f"parameter {name!r} has no shape yet (a lazy module); call the network once on a batch, then wrap it"
            )


def refuse_compiled(network: nn.Module) -> None:
    """Refuse a network of which torch.compile has made another that has no second derivative.

    >>> refuse_compiled(nn.Linear(2, 3))
    """
    for name, module in network.named_modules():
        original = hasattr(module, "_orig_mod")
        if original or getattr(module, "_compiled_call_impl", None) is not None:
            where = f"its part {name!r}" if name else "it"
            how = "pass the module as it was, its ._orig_mod" if original else "leave out .compile()"
            raise NetworkError(
                f"the network cannot be used: {where} was compiled by torch.compile and has no second derivative; "
                f"{how}: varlap compiles the whole step itself"
            )
