"""What is chosen where the user chose nothing: by the size of the table."""

import math
from dataclasses import dataclass

import torch

from varlap.curvature import DEFAULT, Curvature, ExactFisher
from varlap.curvature.fisher import takes_items_at_once
from varlap.posterior import BNN

MOST_EXACT_ENTRIES = 2**21  # items × outputs × weights: gradients that are held at once, 16 MB
EXACT = ExactFisher(every=10, memory=0.5)
BATCH_SIZE = 128
LR_OF_BATCHES = 0.01
WARMUP = 0.3  # part of the steps
FEWEST_STEPS, MOST_STEPS = 80, 4000
STEPS_PER_ROW, STEPS_PER_ROOT = 1.0, 25.0


@dataclass(frozen=True)
class Plan:
    """How a table is trained.

    A small one has all items in every step and the exact Fisher, in double precision: nothing is drawn, so that the
    order of the rows does not matter and a weight of 2 is a row given twice.
    """

    batch_size: int
    epochs: int
    lr: float
    warmup_steps: int
    """over which β rises"""
    curvature: Curvature
    dtype: torch.dtype


def hidden_units(num_data: float) -> tuple[int, ...]:
    """Return the sizes of the hidden layers for so many rows.

    >>> hidden_units(100), hidden_units(10_000)
    ((50,), (100,))
    """
    return (50,) if num_data < 1000 else (100,)


def num_steps(num_data: float) -> int:
    """Return how many steps to take for so many rows: in proportion at first, then to their square root.

    >>> num_steps(10), num_steps(100), num_steps(1000), num_steps(1_000_000)
    (80, 100, 790, 4000)
    """
    wanted = min(STEPS_PER_ROW * num_data, STEPS_PER_ROOT * math.sqrt(num_data))
    return min(max(FEWEST_STEPS, 10 * round(wanted / 10)), MOST_STEPS)


def is_small(bnn: BNN, num_rows: int, num_outputs: int) -> bool:
    """Whether a table is small enough for the exact Fisher of all its rows, and its network plain enough.

    >>> from torch import nn
    >>> is_small(BNN(nn.Linear(4, 3)), 150, 3), is_small(BNN(nn.Linear(4, 3)), 10**6, 3)
    (True, False)
    """
    return takes_items_at_once(bnn.network) and num_rows * num_outputs * bnn.num_weights() <= MOST_EXACT_ENTRIES


def plan(
    num_rows: int,
    num_data: float,
    small: bool,
    lr_of_all_rows: float,
    *,
    batch_size: int | None = None,
    epochs: int | None = None,
    lr: float | None = None,
    device: str = "cpu",
) -> Plan:
    """Choose how to train a table, around what the user has chosen.

    >>> plan(150, 150, True, 0.01).epochs
    150
    >>> plan(10_000, 10_000, False, 0.01, epochs=3).batch_size
    128
    """
    whole = small and (batch_size is None or batch_size >= num_rows)
    size = num_rows if whole else batch_size or BATCH_SIZE
    passes = epochs or max(1, round(num_steps(num_data) / math.ceil(num_rows / size)))
    double = whole and not device.startswith("mps")  # which has no double precision
    return Plan(
        batch_size=size,
        epochs=passes,
        warmup_steps=round(WARMUP * passes * math.ceil(num_rows / size)),
        lr=lr or (lr_of_all_rows if whole else LR_OF_BATCHES),
        curvature=EXACT if whole else DEFAULT,
        dtype=torch.float64 if double else torch.float32,
    )
