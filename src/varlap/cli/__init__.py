"""The command line: one file a verb."""

import typer

from varlap.cli.bench import app as bench
from varlap.cli.data import app as data
from varlap.cli.demo import demo
from varlap.cli.evaluate import evaluate
from varlap.cli.report import report
from varlap.cli.reproduce import reproduce
from varlap.cli.train import train

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Variational Laplace: Bayesian neural networks without sampling."
)
app.command()(demo)
app.command()(train)
app.command()(evaluate)
app.command()(reproduce)
app.command()(report)

app.add_typer(bench, name="bench")
app.add_typer(data, name="data")
