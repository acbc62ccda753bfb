"""What a grid would do, without doing it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from varlap.experiments.expectation import Expectation
from varlap.experiments.known_runs import KnownRuns
from varlap.experiments.names import names
from varlap.experiments.run import RUNNING, claim, epochs_done
from varlap.experiments.spec import RunSpec
from varlap.experiments.store import Store


@dataclass(frozen=True)
class PlannedRun:
    """What is known of a run before the grid goes on."""

    spec: RunSpec
    name: str
    state: Literal["stored", "diverged", "held", "pending"]
    """`stored` too where the store has the same training under another spec; `held` where another process is at it"""
    epochs_done: int
    expected_s: float | None
    """what is left of it, where that is known; 0 for what is stored"""


def plan(
    specs: Sequence[RunSpec], store: Store, *, device: torch.device | str = "cpu", again: bool = False
) -> list[PlannedRun]:
    """Say what `run_grid` would find in a store; nothing is trained or written.

    >>> (planned,) = plan([RunSpec("digits", "map", 0.1)], Store("no-such-folder"))
    >>> planned.name, planned.state, planned.epochs_done, planned.expected_s
    ('digits map β 0.1', 'pending', 0, None)
    """
    runs = KnownRuns(store, again)
    expected = Expectation(runs.results, str(torch.device(device)))
    planned = []
    for spec, name in names(specs).items():
        if (found := runs.find(spec)) is not None:
            state = "stored" if found.failure is None else "diverged"
            planned.append(PlannedRun(spec, name, state, spec.epochs if state == "stored" else len(found.history), 0.0))
        else:
            done = epochs_done(spec, store)
            state = "held" if _is_held(spec, store) else "pending"
            planned.append(PlannedRun(spec, name, state, done, expected.seconds(spec, done)))
    return planned


def _is_held(spec: RunSpec, store: Store) -> bool:
    if not (store.folder / RUNNING / f"{spec.key()}.lock").exists():
        return False
    with claim(spec, store) as mine:
        return not mine
