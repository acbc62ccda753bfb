"""How far scores would move with another test set: items drawn anew, with replacement."""

from collections.abc import Callable

import torch
from torch import Tensor

from varlap import tree
from varlap.errors import ConfigError
from varlap.seeds import checked_count
from varlap.streams import derive_seed

Columns = dict[str, Tensor]

FEWEST_DRAWS = 20


def checked_bootstrap(owner: str, times: int) -> int:
    """Refuse so few draws that an interval may leave out its own estimate; 0 is for no intervals.

    >>> checked_bootstrap("evaluate", 1)
    Traceback (most recent call last):
    varlap.errors.ConfigError: evaluate(bootstrap=1): an interval of so few draws may leave out the score itself; ...
    """
    if 0 < checked_count(owner, "bootstrap", times, least=0) < FEWEST_DRAWS:
        raise ConfigError(
            f"{owner}(bootstrap={times}): an interval of so few draws may leave out the score itself; "
            f"give at least {FEWEST_DRAWS}, of which 1000 are usual, or 0 for none"
        )
    return times


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
        parts = (items, drawn), (labels, _labels_of(drawn, labels)), (outside, _draw(outside, generator))
        for name, value in values(*(tree.take(columns, index) for columns, index in parts)).items():
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
