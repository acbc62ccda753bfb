"""A fully connected network."""

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from varlap.models.checks import check_sizes, new_activation


def mlp(
    num_inputs: int,
    num_outputs: int,
    hidden: int | Sequence[int] = (50,),
    activation: Callable[[], nn.Module] = nn.Softplus,
) -> nn.Sequential:
    """Build a multilayer perceptron: linear layers with an activation between them.

    Args:
        num_inputs: size of the last dimension of the input.
        num_outputs: size of the last dimension of the output; there is no activation after it.
        hidden: sizes of the hidden layers, or the size of one; `()` gives a linear model.
        activation: what makes an activation module. Softplus has the second derivative that VL needs.

    >>> import torch
    >>> network = mlp(3, 2, hidden=(8, 8))
    >>> network(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """
    hidden = tuple(hidden) if isinstance(hidden, Iterable) else (hidden,)
    check_sizes("mlp", num_inputs=num_inputs, num_outputs=num_outputs)
    check_sizes("mlp", **{f"hidden[{i}]": size for i, size in enumerate(hidden)})
    layers: list[nn.Module] = []
    size = num_inputs
    for next_size in hidden:
        layers += [nn.Linear(size, next_size), new_activation("mlp", activation)]
        size = next_size
    return nn.Sequential(*layers, nn.Linear(size, num_outputs))
