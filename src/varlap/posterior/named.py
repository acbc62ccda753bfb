"""Tensors kept under the dotted names of a network's parameters."""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn


class NamedTensors(nn.Module, Mapping[str, Tensor]):
    """A module that maps a network's parameter names to tensors: `named["layer.0.weight"]`.

    Parameters stay parameters and other tensors become buffers. The tree of submodules mirrors the names, so
    that the state dict's keys are the network's own. Everything is looked up by name, never by order.

    >>> import torch
    >>> named = NamedTensors({"0.weight": torch.ones(2), "keys": torch.zeros(1)})
    >>> list(named), named["keys"], sorted(named.state_dict())
    (['0.weight', 'keys'], tensor([0.]), ['0.weight', 'keys'])
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._places: dict[str, tuple[nn.Module, str]] = {}
        for name, tensor in tensors.items():
            *path, attribute = name.split(".")
            holder: nn.Module = self
            for part in path:
                # The tables are written directly: a network may call its parts `keys` or `training`, which
                # `register_module` would refuse because the module has attributes of those names.
                holder = holder._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
            if isinstance(tensor, nn.Parameter):
                holder._parameters[attribute] = tensor
            else:
                holder._buffers[attribute] = tensor
            self._places[name] = holder, attribute

    def __getitem__(self, name: str) -> Tensor:
        holder, attribute = self._places[name]
        tensor = holder._parameters.get(attribute)
        tensor = holder._buffers.get(attribute) if tensor is None else tensor
        assert tensor is not None
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    # As all modules, and unlike other mappings, it is equal to itself alone.
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]
