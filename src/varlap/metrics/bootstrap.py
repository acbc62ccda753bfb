"""How far scores would move with another test set: items drawn anew, with replacement."""

from collections.abc import Callable

import torch
from torch import Tensor

from varlap.streams import derive_seed

Columns = dict[str, Tensor]


def intervals(
    values: Callable[[Columns, Columns, Columns], dict[str, float]],
    items: Columns,
    labels: Columns,
    outside: Columns,
    times: int,
    level: float,
    seed: int,
) -> dict[str, tuple[float, float]]:
    """Return each score's central percentile interval over so many sets of items drawn with replacement.

    Items and out-of-distribution items are drawn apart. `labels` holds a column "item" with the number of the item that
    each label belongs to, and follows its item.
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, "bootstrap"))
    found: dict[str, list[float]] = {}
    for _ in range(times):
        drawn = _draw(items, generator)
        for name, value in values(
            _take(items, drawn), _take(labels, _labels_of(drawn, labels)), _take(outside, _draw(outside, generator))
        ).items():
            found.setdefault(name, []).append(value)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    # Where most labels are ignored, a draw may hold none, and have no score.
    ends = {name: torch.tensor(each, dtype=torch.float64).nanquantile(tails).tolist() for name, each in found.items()}
    return {name: (low, high) for name, (low, high) in ends.items()}


def _draw(columns: Columns, generator: torch.Generator) -> Tensor:
    size = len(next(iter(columns.values()))) if columns else 0
    return torch.randint(max(size, 1), (size,), generator=generator)


def _labels_of(drawn: Tensor, labels: Columns) -> Tensor:
    """Return the labels of the drawn items, each as often as its item."""
    if not labels:
        return drawn
    item = labels["item"]
    times = drawn.bincount(minlength=len(drawn))[item]
    return torch.arange(len(item)).repeat_interleave(times)


def _take(columns: Columns, index: Tensor) -> Columns:
    return {name: column[index] for name, column in columns.items()}
