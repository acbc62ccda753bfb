"""What a command says besides its result: warnings, and a user's mistake in one clear line with exit status 2."""

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from varlap.errors import Interrupted, VarlapError, VarlapWarning, did_you_mean

UsageError: Any = typer.BadParameter.__base__  # click's, or that of typer's own copy of click


@contextlib.contextmanager
def user_mistakes() -> Iterator[None]:
    """Print varlap's own errors as one line and exit with 2; a signal's exit status is its own."""
    try:
        yield
    except Interrupted as stop:
        typer.echo(f"varlap: {stop}", err=True)
        raise typer.Exit(stop.exit_status) from None
    except KeyboardInterrupt:  # outside of a training, such as in an evaluation
        typer.echo("varlap: stopped by Ctrl-C; what a command has stored is kept", err=True)
        raise typer.Exit(130) from None
    except VarlapError as error:
        typer.echo(f"varlap: {error}", err=True)
        raise typer.Exit(2) from None


class OneLine(TyperGroup):
    """Says in one line what is wrong with the arguments, as commands do with what they find wrong themselves."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Read the arguments of the program."""
        with _in_one_line():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Read those of a command, and run it."""
        with _in_one_line(), _warnings_in_one_line():
            return super().invoke(ctx)


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        said = error.format_message()
        if not said.strip() or "\n" in said:  # the help of a command that was called without arguments
            raise
        where = error.ctx.command_path if error.ctx else "varlap"
        said = _with_hint(said.replace("Value error, ", ""))  # which typer puts before what it says of a choice
        said = said if said.endswith("?") else f"{said.rstrip('.')};"
        typer.echo(f"varlap: {said} see {where} --help", err=True)
        raise typer.Exit(2) from None


def _with_hint(said: str) -> str:
    """Say which of the choices that are listed a mistaken one looks like.

    >>> _with_hint("'sdg' is not one of 'paper', 'ours', 'sgd'.")
    "'sdg' is not one of 'paper', 'ours', 'sgd'; did you mean 'sgd'?"
    """
    found = re.search("'([^']+)' is not one of (.+)", said)
    hint = did_you_mean(found[1], re.findall("'([^']+)'", found[2]), otherwise="") if found else ""
    return f"{said.rstrip('.')}; {hint}" if hint else said


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print varlap's own warnings without the line of code that led to them: here it is none of the user's."""

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, VarlapWarning):
            typer.echo(f"varlap: warning: {message}", err=True)
        else:
            usual(message, category, *where, **more)

    with warnings.catch_warnings():
        usual, warnings.showwarning = warnings.showwarning, show
        yield


def log_to_stderr(quiet: bool) -> None:
    """Let people hear of warnings and, unless `quiet`, of runs that are carried on where no progress says so."""
    logging.basicConfig(format="varlap: %(message)s")
    logging.getLogger("varlap.training.loop").setLevel(logging.WARNING if quiet else logging.INFO)
