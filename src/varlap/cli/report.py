"""`varlap report`: one page that compares the evaluations below folders."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from varlap.cli.mistakes import user_mistakes
from varlap.experiments import Store
from varlap.report.build import as_json as plain, write_parts
from varlap.report.reproduction import (
    NOTED,
    as_json as plain_sweeps,
    read_sweeps,
    remark,
    tables,
    write_sweeps,
)
from varlap.report.sections import sections
from varlap.report.sources import collect
from varlap.report.sweeps import Sweep
from varlap.report.tables import Column, Table, comparison

_MOST_PARTS = 3  # of a table that is too wide: more of them are worse to read than a list


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="folders of runs, or with runs below, or the store of `varlap reproduce`")
    ],
    out: Annotated[Path | None, typer.Option(help="where to write; `report` in the first folder by default")] = None,
    title: Annotated[str | None, typer.Option(help="of the page; by default the methods and the data")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Compare evaluated runs on one page: scores with their uncertainty, plots, specs. Nothing is trained.

    Writes report.html, which needs no network and no other file, and the same numbers as report.md and report.json.

    Example: varlap report runs --title "MAP and VL on digits"
    """
    with user_mistakes():
        if len(runs) == 1 and Store.is_one(runs[0]):
            _reproduction(Store(runs[0]), runs[0] / "report" if out is None else out, title, as_json)
            return
        parts = sections(collect(runs))
        path = write_parts(parts, runs[0] / "report" if out is None else out, title)
    if as_json:
        typer.echo(json.dumps({"page": str(path), **plain(parts, title)}, allow_nan=False))
        return
    console = Console()
    for section in parts:
        console.print(fitting(console, comparison(section.methods).short(), section.title))
    console.print(f"[bold]{path.resolve().as_uri()}[/]", soft_wrap=True, highlight=False)


def _reproduction(store: Store, out: Path, title: str | None, as_json: bool) -> None:
    """Report what `varlap reproduce` has left behind."""
    parts = read_sweeps(store)
    path = write_sweeps(parts, out, title)
    if as_json:
        typer.echo(json.dumps({"page": str(path), **plain_sweeps(parts, title)}, allow_nan=False))
        return
    console = Console()
    show_parts(console, parts)
    console.print(f"[bold]{path.resolve().as_uri()}[/]", soft_wrap=True, highlight=False)


def show_parts(console: Console, parts: Sequence[Sweep]) -> None:
    """Print the tables of `varlap reproduce`, with the notes that they need."""
    for part in parts:
        if words := remark(part):
            console.print(Text(f"{part.title}: {words}"))
        for heading, (table, words) in tables(part).items():
            console.print(fitting(console, table, f"{heading}: {part.title}"))
            if heading in NOTED:
                console.print(Text(words))


def fitting(console: Console, table: Table, title: str) -> RichTable | Group | Text:
    """Return the fullest form of a table that the terminal is wide enough for; the last ones are parts, and a list."""
    wide = console.options.update(max_width=10_000)

    def fits(form: RichTable) -> bool:
        return Measurement.get(console, wide, form).maximum <= console.width

    for ranges, turned in itertools.product((True, False), (False, True)):
        if fits(form := table.to_rich(title, ranges=ranges, turned=turned)):
            return form
    for ranges in (True, False):
        parts = _parts(table, lambda part, ranges=ranges: fits(part.to_rich(title, ranges=ranges)))
        forms = [part.to_rich("continued" if number else title, ranges=ranges) for number, part in enumerate(parts)]
        if len(forms) <= _MOST_PARTS and all(map(fits, forms)):
            return Group(*forms)
    lines = [title]
    for row in table.rows:
        found = [
            f"{column.heading} {row.cells[column.key].shown}" for column in table.columns if column.key in row.cells
        ]
        lines.append(f"{row.name}: {', '.join(found)}")
    return Text("\n".join(lines))


def _parts(table: Table, fits: Callable[[Table], bool]) -> list[Table]:
    """Cut a table between its columns where it becomes too wide; a row that has nothing in a part is not there."""
    parts: list[tuple[Column, ...]] = []
    for column in table.columns:
        if parts and fits(Table((*parts[-1], column), table.rows)):
            parts[-1] = (*parts[-1], column)
        else:
            parts.append((column,))
    return [Table(part, tuple(row for row in table.rows if {c.key for c in part} & row.cells.keys())) for part in parts]
