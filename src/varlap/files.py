"""Files that are whole or not there, and values as JSON can hold them."""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


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


@contextmanager
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
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    if os.name == "posix":  # the rename itself is on disk when the folder is
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def finite(value: Any) -> Any:
    """Return what JSON can hold: NaN and infinities become None, and anything it does not know its text.

    >>> finite({"a": float("nan"), 1: (2, Path("b"))})
    {'a': None, '1': [2, 'b']}
    """
    if isinstance(value, Mapping):
        return {str(name): finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if isinstance(value, bool | int | str | None) else str(value)
