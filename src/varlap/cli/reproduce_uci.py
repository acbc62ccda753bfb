"""`varlap reproduce uci`: regression on the nine UCI tables with their standard splits."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from varlap.cli.mistakes import user_mistakes
from varlap.errors import Interrupted
from varlap.experiments.uci import AllDivergedError, Progress, UCIExperiment
from varlap.experiments.uci.summary import TableSummary, all_diverged, summarise
from varlap.report.uci import TITLES, estimate_text, uci_json, write_uci
from varlap.training.progress_text import duration


def reproduce_uci(
    out: Path,
    *,
    data: Sequence[str],
    splits: int | None,
    epochs: int | None,
    budget: float | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Compare MAP, Laplace, VI and VL on UCI regression: test log-likelihood and RMSE, beside published figures.

    The tables are read from `uci` or `uci.tar.xz` in the data folder. Writes a JSON file a table, report.md and
    report.json, which show all that the folder holds; what is there is not computed again.
    """
    with user_mistakes():
        changes: dict[str, Any] = {} if epochs is None else {"epochs": epochs}
        experiment = UCIExperiment.of(out, data, splits, **changes)
        complete = True
        try:
            with _bar(silent=quiet or as_json) as tell:
                complete = experiment.run(None if budget is None else 60 * budget, tell)
        except AllDivergedError:
            pass  # the others are done and shown; the end says which is not
        except Interrupted as stop:
            typer.echo(f"varlap: stopped; what is finished is in {out}, and the same command carries on", err=True)
            raise typer.Exit(stop.exit_status) from None
        found, left_out = summarise(experiment), all_diverged(experiment)
        stored = UCIExperiment.stored(out)
        path = write_uci(summarise(stored), out, all_diverged(stored))
    if as_json:
        content = {"complete": complete and not left_out, "page": str(path), **uci_json(found, left_out)}
        typer.echo(json.dumps(content, allow_nan=False))
    else:
        _show(found, complete, path)
    for words in left_out:
        typer.echo(f"varlap: {words}", err=True)
    if left_out:
        raise typer.Exit(1)  # as for images that diverged


def _show(found: list[TableSummary], complete: bool, path: Path) -> None:
    console = Console()
    for score, title in TITLES.items():
        console.print(_table(found, score, title))
    if not complete:
        console.print("The budget is spent; the same command carries on.")
    console.print(f"[bold]{path.resolve().as_uri()}[/]", soft_wrap=True, highlight=False)


def _table(found: list[TableSummary], score: str, title: str) -> Table:
    methods = list(found[0].values[score]) if found else []
    table = Table("data", "splits", title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for method in methods:
        table.add_column(method, justify="right")
    for one in found:
        cells = []
        for method in methods:
            text = estimate_text(one, score, method)
            cells.append(f"[bold green]{text}[/]" if method in one.best(score) else text)
        table.add_row(one.name, f"{one.num_done}/{one.num_splits}", *cells)
    return table


@contextlib.contextmanager
def _bar(silent: bool) -> Iterator[Callable[[Progress], None]]:
    """Draw one bar over all runs with the time left, on standard error; lines where that is no terminal."""
    if silent:
        yield lambda _: None
        return
    from rich import progress as bars

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda where: typer.echo(f"{where.done / where.total:4.0%} {where.text}{_left(where)}", err=True)
        return
    columns = (bars.BarColumn(), bars.TaskProgressColumn(), "{task.description}")
    with bars.Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=None)
        yield lambda where: progress.update(
            task, completed=where.done, total=where.total, description=f"{where.text}{_left(where)}"
        )


def _left(where: Progress) -> str:
    return f", {duration(where.seconds_left)} left" if where.seconds_left else ""
