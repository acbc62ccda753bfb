"""What `varlap reproduce --dry-run` prints."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from varlap.experiments.plan import PlannedRun
from varlap.training.progress_text import duration

WORDS = {"stored": "stored", "diverged": "diverged", "held": "held by another process", "pending": "pending"}


def show_plan(planned: Sequence[PlannedRun], told: Mapping[str, Any], as_json: bool) -> None:
    """Print a table of runs, or one JSON object with what else is told."""
    count = Counter(run.state for run in planned)
    times = [run.expected_s for run in planned if run.state == "pending"]
    known = [time for time in times if time is not None]
    if as_json:
        plan = [
            {
                "name": run.name,
                "key": run.spec.key(),
                "state": run.state,
                "epochs": run.spec.epochs,
                "epochs_done": run.epochs_done,
                "expected_s": run.expected_s,
            }
            for run in planned
        ]
        counts = {"runs": len(planned), **{state: count[state] for state in WORDS}}
        whole = sum(known) if len(known) == len(times) else None
        typer.echo(json.dumps({**told, **counts, "expected_s": whole, "plan": plan}, allow_nan=False))
        return
    table = Table("run", "", "epochs", "expected", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for run in planned:
        is_left = run.state in ("held", "pending")
        time = duration(run.expected_s) if is_left and run.expected_s is not None else ""
        table.add_row(run.name, WORDS[run.state], f"{run.epochs_done}/{run.spec.epochs}", time)
    console = Console(highlight=False)
    console.print(table)
    words = [f"{count[state]} {WORDS[state]}" for state in WORDS if count[state]]
    number = f"{len(planned)} run{'s' * (len(planned) != 1)}"
    console.print(f"{number}: {', '.join(words)}{_whole(times, known)}")


def _whole(times: Sequence[float | None], known: Sequence[float]) -> str:
    if not known:
        return ""
    unknown = len(times) - len(known)
    besides = f", besides {unknown} of unknown length" if unknown else ""
    return f"; expected to take {duration(sum(known))}{besides}"
