"""What `varlap reproduce` leaves behind when it is stopped."""

import contextlib
import shlex
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import typer

from varlap.errors import Interrupted, VarlapError
from varlap.experiments import Store
from varlap.report.reproduction import write_reproduction


@contextlib.contextmanager
def page_if_stopped(store: Store) -> Iterator[None]:
    """Where Ctrl-C or SIGTERM stops what is inside, write the page of what is done before the error goes on."""
    try:
        with _sigterm_raises():
            yield
    except (Interrupted, KeyboardInterrupt, SystemExit):
        typer.echo(f"varlap: {_written(store)}; the same command carries on", err=True)
        raise


def _written(store: Store) -> str:
    if not Store.is_one(store.folder):
        return "no run is done yet"
    try:
        return f"the page of what is done is {write_reproduction(store, store.folder / 'report')}"
    except VarlapError:
        return f"`varlap report {shlex.quote(str(store.folder))}` writes the page of what is done"


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise outside of a training too, which has a handler of its own: by default it ends all at once."""
    usual = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if usual:
        signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        if usual:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
