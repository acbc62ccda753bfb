"""How a network is called with a batch's inputs."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from varlap import tree
from varlap.errors import BatchError


def call(network: nn.Module, x: Any) -> Any:
    """Call the network with `x` spread over its arguments where that fits, else with `x` as one argument.

    >>> import torch
    >>> call(nn.Bilinear(2, 2, 3), (torch.ones(4, 2), torch.ones(4, 2))).shape
    torch.Size([4, 3])
    >>> call(nn.Linear(2, 3), torch.ones(4, 2, dtype=torch.uint8))
    Traceback (most recent call last):
    varlap.errors.BatchError: x holds torch.uint8, and the weights are torch.float32; give it as x.to(torch.float32)
    """
    try:
        return _spread(network, x)
    except Exception as error:
        error.add_note(f"varlap called {type(network).__name__}.forward({_arguments(network)}) with {_described(x)}")
        if not isinstance(error, RuntimeError):
            raise
        weights = next((p.dtype for p in network.parameters() if p.is_floating_point()), None)
        others = [tensor.dtype for tensor in tree.tensors(x) if tensor.dtype != weights]
        if weights is None or not others or not any(word in str(error) for word in ("dtype", "type (", "scalar type")):
            raise
        raise BatchError(f"x holds {others[0]}, and the weights are {weights}; give it as x.to({weights})") from error


def _arguments(network: nn.Module) -> str:
    try:
        return ", ".join(inspect.signature(network.forward).parameters)
    except (TypeError, ValueError):  # a function of torch's own has no signature
        return "..."


def _described(x: Any) -> str:
    parts = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tree.named_tensors(x, "x"))
    return parts or f"x, a {type(x).__name__}"


def _spread(network: nn.Module, x: Any) -> Any:
    if isinstance(x, Mapping) and all(isinstance(key, str) for key in x) and _fits(network, (), x):
        return network(**x)
    if isinstance(x, tuple) and _fits(network, x, {}):
        return network(*x)
    # torch's loaders make lists of tuples; a network that takes one list has one required argument.
    if isinstance(x, list) and len(x) > 1 and _num_required(network) == len(x):
        return network(*x)
    return network(x)


def _num_required(network: nn.Module) -> int:
    parameters = inspect.signature(network.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


def _fits(network: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(network.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    return True
