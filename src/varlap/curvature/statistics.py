"""Batch norm with the statistics of an earlier pass, held fixed, so that items no longer depend on each other."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class BatchStatistics:
    """The mean and variance that each batch norm saw in a forward pass, in the order of the calls.

    >>> norm = nn.BatchNorm1d(2)
    >>> x, statistics = torch.randn(8, 2), BatchStatistics()
    >>> with statistics.recorded():
    ...     whole = norm(x)
    >>> with statistics.held(norm):
    ...     part = norm(x[:3])
    >>> torch.allclose(whole[:3], part, atol=1e-6)
    True
    """

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, Tensor]] = []

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Note the statistics of every batch norm in training mode."""
        self._seen.clear()
        with _Recording(self._seen):
            yield

    @contextlib.contextmanager
    def held(self, network: nn.Module) -> Iterator[None]:
        """Use the noted statistics as constants, and leave the network's running ones and counts alone."""
        counts = [(name, b) for name, b in network.named_buffers() if not b.is_floating_point()]
        kept = [b.clone() for _, b in counts]
        with _Holding(self._seen):
            yield
        with torch.no_grad():
            for (_, buffer), value in zip(counts, kept, strict=True):
                buffer.copy_(value)


def _uses_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("training", args[5] if len(args) > 5 else False))


class _Recording(TorchFunctionMode):
    def __init__(self, seen: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm and _uses_batch(args, kwargs):
            x = args[0].detach()
            dims = [0, *range(2, x.dim())]
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            variance, mean = torch.var_mean(x, dims, correction=0)
            self._seen.append((mean, variance))
        return func(*args, **kwargs)


class _Holding(TorchFunctionMode):
    def __init__(self, seen: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._left = iter(seen)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm and _uses_batch(args, kwargs):
            mean, variance = next(self._left)
            names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
            given = dict(zip(names, args, strict=False)) | kwargs
            return func(**(given | {"running_mean": mean, "running_var": variance, "training": False}))
        return func(*args, **kwargs)
