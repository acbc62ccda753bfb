"""Buffers, put back as they were: running statistics move only in steps that count."""

import torch
from torch import Tensor, nn


class KeptBuffers:
    """A copy of the buffers of some modules, for passes that must leave no trace.

    A forward pass may write into a buffer or assign another tensor in its place; both are undone.

    >>> norm = nn.BatchNorm1d(2)
    >>> kept = KeptBuffers(norm)
    >>> _ = norm(torch.randn(4, 2))
    >>> kept.put_back()
    >>> norm.num_batches_tracked
    tensor(0)
    """

    def __init__(self, *roots: nn.Module) -> None:
        self._kept: list[tuple[nn.Module, str, Tensor | None, Tensor | None]] = [
            (module, name, buffer, None if buffer is None else buffer.clone())
            for root in roots
            for module in root.modules()
            for name, buffer in module._buffers.items()
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give every buffer its own tensor and value again."""
        for module, name, buffer, value in self._kept:
            if buffer is not None and value is not None:
                buffer.copy_(value)
            module._buffers[name] = buffer
