"""What a command says besides its result: warnings, and a user's mistake in one clear line with exit status 2."""

import contextlib
import logging
from collections.abc import Iterator

import typer

from varlap.errors import Interrupted, VarlapError


@contextlib.contextmanager
def user_mistakes() -> Iterator[None]:
    """Print varlap's own errors as one line and exit with 2; a signal's exit status is its own."""
    try:
        yield
    except Interrupted as stop:
        typer.echo(f"varlap: {stop}", err=True)
        raise typer.Exit(stop.exit_status) from None
    except VarlapError as error:
        typer.echo(f"varlap: {error}", err=True)
        raise typer.Exit(2) from None


def log_to_stderr(quiet: bool) -> None:
    """Let people hear of warnings, and of a run that is carried on."""
    logging.basicConfig(format="varlap: %(message)s")
    logging.getLogger("varlap.training.loop").setLevel(logging.WARNING if quiet else logging.INFO)
