"""Checks that the model builders share, so that a wrong argument is named before a layer is built."""

import contextlib
from collections.abc import Callable

from torch import nn

from varlap.errors import ConfigError
from varlap.seeds import checked_count


def check_sizes(builder: str, **sizes: int) -> None:
    """Refuse a layer size that is not a positive whole number.

    >>> check_sizes("mlp", num_inputs=3)
    >>> check_sizes("mlp", num_inputs=0)
    Traceback (most recent call last):
    ...
    varlap.errors.ConfigError: mlp(num_inputs=0) must be a whole number of at least 1
    """
    for name, size in sizes.items():
        checked_count(builder, name, size)


def new_activation(builder: str, activation: Callable[[], nn.Module]) -> nn.Module:
    """Make one activation module; each place in a network gets its own, so that any one can be replaced.

    >>> from torch import nn
    >>> new_activation("mlp", nn.Tanh)
    Tanh()
    >>> new_activation("mlp", nn.Tanh())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    varlap.errors.ConfigError: mlp: activation is Tanh(); give what makes a module, such as nn.Softplus, ...
    """
    # An nn.Module is callable too, but it wants a tensor: the TypeError of calling it would not say why.
    module = None
    if callable(activation) and not isinstance(activation, nn.Module):
        with contextlib.suppress(TypeError):
            module = activation()
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"{builder}: activation is {activation!r}; give what makes a module, such as nn.Softplus, "
            "not a module nor a function of tensors"
        )
    return module
