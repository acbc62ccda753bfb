"""A user's mistake on the command line: one clear line and exit status 2."""

import contextlib
from collections.abc import Iterator

import typer

from varlap.errors import VarlapError


@contextlib.contextmanager
def user_mistakes() -> Iterator[None]:
    """Print varlap's own errors as one line and exit with 2."""
    try:
        yield
    except VarlapError as error:
        typer.echo(f"varlap: {error}", err=True)
        raise typer.Exit(2) from None
