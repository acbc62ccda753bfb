"""Atomic writes, file locks, and values as JSON can hold them."""

import contextlib
import errno
import glob
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from varlap.errors import ConfigError

try:
    import fcntl
except ImportError:  # there is none on Windows
    fcntl = None

LONGER_THAN_A_WRITE_S = 3600


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: a kill or a power cut leaves the old content or the new one.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "result.json")
    >>> replace_file(path, b"{}")
    >>> path.read_bytes(), len(list(path.parent.iterdir()))
    (b'{}', 1)
    """
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside a path; when it is written, bring it to the disk and rename it.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "array.bin")
    >>> with replacing(path) as file:
    ...     file.write(b"1234")
    4
    >>> path.read_bytes()
    b'1234'
    """
    path = path.resolve()  # a link stays a link
    for left in path.parent.glob(f"{glob.escape(f'.{path.name}.')}{'[0-9a-f]' * 8}.tmp"):
        with contextlib.suppress(OSError):  # what cannot be removed does no harm
            if time.time() - left.stat().st_mtime > LONGER_THAN_A_WRITE_S:
                left.unlink()  # of a process that was killed while it wrote
    # Process numbers would not do: containers and hosts that share a volume count each their own.
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)  # the rename itself is on disk when the folder is


def sync_folder(path: Path, fsync: Callable[[int], None] = os.fsync) -> None:
    """Bring a folder's list of names to the disk, where the system has that notion."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # what some network file systems say to folders
            raise
    finally:
        os.close(descriptor)


def locked(path: Path) -> BinaryIO | None:
    """Open a file that one holder at a time has, until it is closed or its process ends; None if another has it.

    There are no such locks on Windows, where every caller gets the file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), ".lock")
    >>> mine = locked(path)
    >>> locked(path) is None
    True
    >>> mine.close()
    >>> locked(path) is None
    False
    """
    file = path.open("wb")
    try:
        _flock(file, path, wait=False)
    except BlockingIOError:
        file.close()
        return None
    return file


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process is in such a block for this file, which stays there empty; on Windows do not.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), ".lock")
    >>> with alone(path):
    ...     locked(path) is None
    True
    """
    with path.open("wb") as file:
        _flock(file, path, wait=True)
        yield


def _flock(file: BinaryIO, path: Path, wait: bool) -> None:
    """Take the lock, which closing the file or the end of the process gives back; BlockingIOError if another has it."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        file.close()
        raise ConfigError(
            f"files in {path.parent} cannot be locked ({error.strerror or error}), which keeps two processes from "
            "writing there at once; choose a folder on another file system, such as a local disk"
        ) from error


def finite(value: Any, digits: int | None = None) -> Any:
    """Return what JSON can hold: NaN and infinities become None, and anything it does not know its text.

    Args:
        value: anything.
        digits: round numbers to so many significant ones.

    >>> finite({"a": float("nan"), 1: (2, Path("b"))}), finite(2 / 3, digits=6)
    ({'a': None, '1': [2, 'b']}, 0.666667)
    """
    if isinstance(value, Mapping):
        return {str(name): finite(entry, digits) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry, digits) for entry in value]
    if isinstance(value, float):
        return (float(value) if digits is None else float(f"{value:.{digits}g}")) if math.isfinite(value) else None
    return value if isinstance(value, bool | int | str | None) else str(value)
