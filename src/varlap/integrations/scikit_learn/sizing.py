"""What is chosen where the user chose nothing: by the size of the table."""

import math
from dataclasses import dataclass, replace

import torch

from varlap.curvature import Curvature, ExactFisher
from varlap.curvature.exact_fisher import takes_items_at_once
from varlap.posterior import BNN, EmpiricalBayesPrior, FanInPrior, Prior

FEWEST_LARGE = 2000  # rows of a table that is never trained on all of them in every step
FEWEST_VERY_LARGE = 20_000  # rows, of which MOST_STEPS show each a few dozen times
MOST_EXACT_ENTRIES = 2**21  # items × outputs × weights: gradients that are held at once, 16 MB
EXACT = ExactFisher(every=10, memory=0.5)
NOISE_HIDDEN, NOISE_BETA, NOISE_LR = (20,), 0.5, 0.02  # of the network that says how large a regressor's noise is
FEWEST_STEPS, MOST_STEPS = 80, 4000
STEPS_PER_ROW, STEPS_PER_ROOT = 1.5, 30.0


@dataclass(frozen=True)
class Defaults:
    """What a table of one size gets.

    Chosen on other splits of the tables that the documentation reports. Their rows overlap, and earlier defaults had
    been judged by several of the splits reported, so those are no independent test.
    """

    hidden: tuple[int, ...]
    beta: float
    prior: Prior
    lr: float
    batch_size: int
    warmup: float
    """part of the steps over which β rises: a learnt prior would prune weights that have not learnt yet"""
    lr_of_batches: float = 0.01
    """where a step does not see the whole table"""


@dataclass(frozen=True)
class BySize:
    """Defaults for small tables, for large ones, and for very large ones where they differ.

    >>> CLASSES.of(100).hidden, CLASSES.of(10_000).hidden
    ((50,), (100,))
    """

    small: Defaults
    large: Defaults
    fewest_large: int
    very_large: Defaults | None = None

    def of(self, num_data: float) -> Defaults:
        """Return the defaults for so many rows."""
        if self.very_large is not None and num_data >= FEWEST_VERY_LARGE:
            return self.very_large
        return self.large if num_data >= self.fewest_large else self.small


@dataclass(frozen=True)
class Sizing:
    """What the size of a table decides."""

    defaults: Defaults
    small: bool
    """whether it is trained on all its rows in every step"""


CLASSES = BySize(
    Defaults(hidden=(50,), beta=0.1, prior=FanInPrior(), lr=0.01, batch_size=128, warmup=0.0),
    Defaults(hidden=(100,), beta=0.03, prior=FanInPrior(), lr=0.01, batch_size=128, warmup=0.0),
    fewest_large=1000,
)
_LARGE_OF_NUMBERS = Defaults(hidden=(50, 50), beta=0.1, prior=FanInPrior(), lr=0.01, batch_size=256, warmup=0.3)
NUMBERS = BySize(
    Defaults(hidden=(50,), beta=0.6, prior=EmpiricalBayesPrior(), lr=0.03, batch_size=128, warmup=0.3),
    _LARGE_OF_NUMBERS,
    fewest_large=FEWEST_LARGE,
    very_large=replace(_LARGE_OF_NUMBERS, hidden=(100, 100), lr_of_batches=0.03),
)
AGAIN = (  # for a small table of numbers whose fit came out flat; first what lets the weights learn most
    replace(NUMBERS.small, beta=0.1, warmup=0.6, prior=FanInPrior()),
    replace(NUMBERS.small, beta=0.3, warmup=0.6),
)
FEWEST_STEPS_AGAIN = 1000


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
    noise_epochs: int
    """of the network of the noise"""
    curvature: Curvature | None
    dtype: torch.dtype


def num_steps(num_data: float) -> int:
    """Return how many steps to take for so many rows: in proportion at first, then to their square root.

    >>> num_steps(10), num_steps(100), num_steps(1000), num_steps(1_000_000)
    (80, 150, 950, 4000)
    """
    wanted = min(STEPS_PER_ROW * num_data, STEPS_PER_ROOT * math.sqrt(num_data))
    return min(max(FEWEST_STEPS, 10 * round(wanted / 10)), MOST_STEPS)


def steps_again(num_data: float) -> int:
    """Return how many steps a network takes that is trained again.

    >>> steps_again(100), steps_again(1900)
    (1000, 1310)
    """
    return max(FEWEST_STEPS_AGAIN, num_steps(num_data))


def is_small(bnn: BNN, num_rows: int, num_data: float, num_outputs: int) -> bool:
    """Whether a table is small enough for the exact Fisher of all its rows, and its network plain enough.

    >>> from torch import nn
    >>> is_small(BNN(nn.Linear(4, 3)), 150, 150, 3), is_small(BNN(nn.Linear(4, 3)), 10**6, 10**6, 3)
    (True, False)
    """
    few = num_data < FEWEST_LARGE and num_rows * num_outputs * bnn.num_weights() <= MOST_EXACT_ENTRIES
    return few and takes_items_at_once(bnn.network)


def plan(
    num_rows: int,
    num_data: float,
    small: bool,
    defaults: Defaults,
    *,
    batch_size: int | None = None,
    epochs: int | None = None,
    lr: float | None = None,
    device: str = "cpu",
) -> Plan:
    """Choose how to train a table, around what the user has chosen.

    >>> plan(150, 150, True, CLASSES.small).epochs
    220
    >>> plan(10_000, 10_000, False, CLASSES.large, epochs=3).batch_size
    128
    """
    whole = small and (batch_size is None or batch_size >= num_rows)
    size = num_rows if whole else defaults.batch_size if batch_size is None else batch_size
    steps_per_epoch = math.ceil(num_rows / size)
    passes = max(1, round(num_steps(num_data) / steps_per_epoch)) if epochs is None else epochs
    double = whole and not device.startswith("mps")  # which has no double precision
    return Plan(
        batch_size=size,
        epochs=passes,
        lr=(defaults.lr if whole else defaults.lr_of_batches) if lr is None else lr,
        warmup_steps=round(defaults.warmup * passes * steps_per_epoch),
        noise_epochs=math.ceil(passes / 2),
        curvature=EXACT if whole else None,
        dtype=torch.float64 if double else torch.float32,
    )
