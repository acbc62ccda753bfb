"""Other tensors in the place of a module's own, for as long as a computation lasts."""

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn


@contextlib.contextmanager
def installed(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Put tensors in the place of parameters and buffers by name, shared ones everywhere, and put those back.

    Backward passes inside the `with` block see them too, also where a checkpoint repeats a forward pass.

    >>> import torch
    >>> linear = nn.Linear(1, 1, bias=False)
    >>> with installed(linear, {"weight": torch.tensor([[2.0]])}):
    ...     linear(torch.tensor([3.0]))
    tensor([6.])
    >>> type(linear.weight).__name__
    'Parameter'
    """
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    substitutes = {id(own[name]): tensor for name, tensor in tensors.items()}
    changed = []
    try:
        for name, original in own.items():
            if id(original) in substitutes:
                path, _, attribute = name.rpartition(".")
                holder = module.get_submodule(path)
                table = holder._parameters if attribute in holder._parameters else holder._buffers
                changed.append((table, attribute, original))
                table[attribute] = substitutes[id(original)]  # type: ignore[assignment]
        yield
    finally:
        for table, attribute, original in changed:
            table[attribute] = original
