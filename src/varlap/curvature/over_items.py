"""Results item by item: by torch.vmap, or in a loop where vmap fails."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from varlap import tree

log = logging.getLogger(__name__)

RowFn = Callable[..., dict[str, Tensor]]


def over_items(row_fn: RowFn, columns: tuple[Any, ...], *, alone_fn: RowFn | None = None) -> dict[str, Tensor]:
    """Return the rows of all items by name, [S, ...], by `torch.vmap`, or by a loop where that refuses the network.

    Args:
        row_fn: from an item's entry of each column, without the dimension of the items, to its named row.
        columns: inputs, and what belongs to them item by item: tensors in any structure, each with S rows.
        alone_fn: what the loop calls in place of a `row_fn` that itself needs vmap.

    >>> over_items(lambda x: {"square": x.square()}, (torch.tensor([1.0, 2.0]),))
    {'square': tensor([1., 4.])}
    """
    try:
        return torch.vmap(row_fn)(*columns)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:  # what vmap cannot trace: recurrent kernels, inputs beside tensors
        log.info("items in a loop, since torch.vmap refused the network: %s", error)
    num_items = len(next(iter(tree.tensors(columns))))
    rows = [(alone_fn or row_fn)(*tree.take(columns, torch.tensor(item))) for item in range(num_items)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
