"""`varlap data`: fetch, list and verify the data sets."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from varlap.cli.mistakes import user_mistakes
from varlap.data import SOURCES, Source, Stored, data_folder, find_stored, get as get_one, verify as verify_one
from varlap.data.store import find_source
from varlap.errors import DataError

app = typer.Typer(no_args_is_help=True, help="Fetch, list and verify the data sets.\n\nExample: varlap data list")

AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]


@app.command()
def get(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NAME", help=", ".join(SOURCES))],
    archives: Annotated[
        Path | None, typer.Option("--from", help="a folder that holds the archives already; nothing is downloaded")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="fetch it even if it is there")] = False,
    tries: Annotated[int, typer.Option(min=1, help="how often to try each download")] = 4,
    as_json: AsJson = False,
) -> None:
    """Download the original archives, check them, and store NAME.npz in the data folder.

    Example: varlap data get fashion_mnist mnist
    """
    sources = _sources(context)
    fetched = []
    with user_mistakes():
        failed = []
        for source in [find_source(name, sources) for name in names]:  # all names first, then the first download
            try:
                with _progress(silent=as_json) as progress:
                    path = get_one(source, archives=archives, force=force, progress=progress, tries=tries)
            except DataError as error:
                if archives is None:  # a network that fails once would fail again, after as many tries
                    raise
                failed.append(str(error))
                continue
            fetched.append({"name": source.name, "path": str(path)})
            if not as_json:
                typer.echo(
                    f"{source.name}: {source.num_train:,} training and {source.num_test:,} test images "
                    f"of {_times(source.image_shape)} in {path}"
                )
        if failed:
            stored = f"; stored: {', '.join(one['name'] for one in fetched)}" if fetched else ""
            raise DataError("; ".join(failed) + stored)
    if as_json:
        typer.echo(json.dumps({"folder": str(data_folder()), "data": fetched}))


@app.command(name="list")
def list_data(context: typer.Context, as_json: AsJson = False) -> None:
    """List what is in the data folder, and what could be.

    Example: varlap data list
    """
    sources = _sources(context)
    stored = {one.name: one for one in find_stored()}
    rows = [_row(name, sources.get(name), stored.get(name)) for name in dict.fromkeys([*sources, *stored])]
    if as_json:
        typer.echo(json.dumps({"folder": str(data_folder()), "data": rows, "bundled": ["digits"]}))
        return
    table = Table("name", "state", "training images", "test images")
    table.add_row("digits", "comes with scikit-learn", "1437×8×8", "360×8×8")
    for row in rows:
        shapes = (_times(row["shapes"].get(f"{part}_images", ())) for part in ("train", "test"))
        table.add_row(escape(row["name"]), escape(_state(row)), *shapes)
    typer.echo(f"data in {data_folder()}; varlap data get NAME fetches what is missing")
    Console().print(table)


@app.command()
def verify(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="default: every data set in the data folder")] = None,
    as_json: AsJson = False,
) -> None:
    """Read data sets whole and compare them with what they should be; exit status 1 if one is not.

    Example: varlap data verify cifar10
    """
    sources = _sources(context)
    with user_mistakes():
        names = [one.name for one in find_stored()] if name is None else [name]
        results = [verify_one(sources.get(one, one)) for one in names]
    if as_json:
        rows = [
            {
                "name": one.name,
                "path": str(one.path),
                "ok": one.problem is None,
                "problem": one.problem,
                "content_known": one.known,
                "sha256": dict(one.sha256),
            }
            for one in results
        ]
        typer.echo(json.dumps({"folder": str(data_folder()), "data": rows}))
    else:
        for one in results:
            looked_at = "shapes and labels; no SHA-256 is known" if one.name in sources else "it can be loaded"
            good = f"good ({'SHA-256 of every array' if one.known else looked_at})"
            typer.echo(f"{one.name}: {one.problem or good}")
        if not results:
            typer.echo(f"no data sets in {data_folder()}")
    if any(one.problem for one in results):
        raise typer.Exit(1)


def _sources(context: typer.Context) -> Mapping[str, Source]:
    """Give the data sets to choose from: the caller's own, or the published ones."""
    return SOURCES if context.obj is None else context.obj


def _row(name: str, source: Source | None, stored: Stored | None) -> dict[str, Any]:
    return {
        "name": name,
        "present": stored is not None,
        "path": None if stored is None else str(stored.path),
        "bytes": None if stored is None else stored.num_bytes,
        "download_bytes": None if source is None else source.num_bytes,
        "shapes": {} if stored is None else {key: list(shape) for key, shape in stored.shapes.items()},
        "problem": None if stored is None else stored.problem,
    }


def _state(row: dict[str, Any]) -> str:
    if row["problem"]:
        return f"damaged: {row['problem']}"
    return (
        f"{row['bytes'] / 1e6:,.1f} MB"
        if row["present"]
        else f"missing, {row['download_bytes'] / 1e6:,.1f} MB to fetch"
    )


def _times(shape: tuple[int, ...] | list[int]) -> str:
    return "×".join(map(str, shape))


@contextlib.contextmanager
def _progress(silent: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """Draw one bar a file, on standard error."""
    if silent:
        yield None
        return
    from rich import progress as bars

    columns = (bars.DownloadColumn(), bars.TransferSpeedColumn(), bars.TimeRemainingColumn())
    progress = bars.Progress("{task.description}", bars.BarColumn(), *columns, console=Console(stderr=True))
    tasks: dict[str, bars.TaskID] = {}

    def update(name: str, done: int, total: int) -> None:
        if not tasks:
            progress.start()  # only now: without a download not even an empty line is drawn
        if name not in tasks:
            tasks[name] = progress.add_task(name, total=total)
        progress.update(tasks[name], completed=done)

    try:
        yield update
    finally:
        if tasks:
            progress.stop()
