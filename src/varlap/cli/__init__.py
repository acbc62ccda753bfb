"""The command line: one file a verb."""

import typer

from varlap.cli.demo import demo

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Variational Laplace: Bayesian neural networks without sampling."
)
app.command()(demo)


@app.callback()
def _main() -> None:
    """Keep `demo` a verb while it is the only one."""


if __name__ == "__main__":
    app()
