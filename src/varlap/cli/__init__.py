"""The command line: one file a verb."""

from typing import Annotated

import typer

from varlap.cli.bench import app as bench
from varlap.cli.data import app as data
from varlap.cli.demo import demo
from varlap.cli.evaluate import evaluate
from varlap.cli.mistakes import OneLine
from varlap.cli.report import report
from varlap.cli.reproduce import reproduce
from varlap.cli.train import train

app = typer.Typer(cls=OneLine, no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")


def _print_version(wanted: bool) -> None:
    if wanted:
        import varlap

        typer.echo(f"varlap {varlap.__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print the version and exit")
    ] = False,
) -> None:
    """Variational Laplace: Bayesian neural networks without sampling.

    Example: varlap demo

    Train, score and compare: varlap train digits --out runs/vl, then varlap evaluate runs/vl, then varlap report runs.

    Every command has --help with an example, and --json: one object on stdout.

    A mistake in the arguments is one line on stderr and exit status 2.
    """


app.command()(demo)
app.command()(train)
app.command()(evaluate)
app.command()(reproduce)
app.command()(report)

app.add_typer(bench, name="bench")
app.add_typer(data, name="data")
