"""`varlap demo`: the main job on data that needs no download."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from varlap.cli.mistakes import log_to_stderr, user_mistakes
from varlap.cli.table import comparison_table
from varlap.errors import MissingExtraError
from varlap.experiments import ImageTask
from varlap.experiments.comparison import Comparison, folder_name
from varlap.files import finite
from varlap.report import write

VALIDATION = 0.2  # of the training images, to choose β and the temperature by


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="passes over the training images, for every method")] = 40,
    seed: Annotated[int, typer.Option(help="of weights, batches, drawn labels and held-out images")] = 0,
    ood: Annotated[str, typer.Option(help="images from elsewhere: letters or rotated")] = "letters",
    out: Annotated[Path, typer.Option(help="where scores, predictions and pictures go")] = Path("runs/demo"),
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Compare MAP, temperature scaling, Laplace, VI and VL on scikit-learn's digits, in about a minute.

    Held-out training images choose each method's β; the test images are looked at once.

    Example: varlap demo --out runs/demo
    """
    log_to_stderr(quiet=as_json)
    console = Console(stderr=as_json, highlight=False)
    with user_mistakes():
        task = ImageTask("digits", "mlp", validation=VALIDATION, seed=seed)
        progress = "bars" if sys.stderr.isatty() and not as_json else "none"
        comparison = Comparison(task, epochs=epochs, ood=ood, progress=progress)
        methods = comparison.run(out, console.print)
        counts = [len(y) for y in (task.training[1], task.images.train_labels, task.test[1])]
        held_out = counts[1] - counts[0]
        console.print(f"digits: {counts[0]} images to train on, {held_out} held out, {counts[2]} to test on")
        found = list(methods)
        page = _report([out / folder_name(each.name) for each in found], out, console)
    if as_json:
        scores = {each.name: {"scores": each.scores, "spec": each.spec, "seconds": each.seconds} for each in found}
        found = {"data": "digits", "out": str(out), "report": page and str(page), "methods": scores}
        typer.echo(json.dumps(finite(found)))
        return
    console.print(comparison_table(found, title=f"digits, {counts[2]} test images; best of each column in green"))
    console.print(f"Out of distribution: {ood}, told apart by entropy. Seconds: of the training that was kept.")
    console.print(f"Scores, predictions and pictures: {out}" + (f"; the report: {page}" if page else ""))


def _report(folders: list[Path], out: Path, console: Console) -> Path | None:
    """Write the page that shows it all, where there is what draws it."""
    try:
        return write(folders, out, title="varlap demo: digits")
    except MissingExtraError as error:
        console.print(f"no report was written: {error}")
        return None
