"""A training's numbers on disk, one JSON object a line, and the loggers that may get them too."""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, final

from varlap.errors import CheckpointError, ConfigError, needs_extra
from varlap.files import replace_file

Value = float | int | str

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@final
class Records:
    """Rows of plain numbers and strings in a JSON-lines file.

    JSON has no NaN and no infinity. They are written as the strings "NaN", "Infinity" and "-Infinity" and come back
    as floats. A last line without its end, of a program that was killed while writing, is not a row.

    Args:
        path: the file; it and its folder are made with the first row.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> records = Records(f"{folder.name}/epochs.jsonl")
    >>> records.append({"step": 10, "elbo": -0.5})
    >>> records.append({"step": 20, "elbo": float("nan")})
    >>> records.rows()
    [{'step': 10, 'elbo': -0.5}, {'step': 20, 'elbo': nan}]
    >>> records.truncate_after(10)
    1
    >>> records.path.read_text()
    '{"step": 10, "elbo": -0.5}\\n'
    >>> folder.cleanup()
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._tail_is_whole = False

    def append(self, row: Mapping[str, Value]) -> None:
        """Write a row as one line with one call, so that readers see whole lines and kills cost one at most.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Records(f"{folder}/epochs.jsonl").append({"epoch": 0, "elbo": -0.5})
        """
        line = json.dumps({name: _encoded(name, value) for name, value in row.items()}, allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._tail_is_whole:
            self._mend_tail()
        self._tail_is_whole = False  # a full disk may take half a row
        with self.path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())  # a checkpoint must not outlive the rows before it
        self._tail_is_whole = True

    def rows(self) -> list[dict[str, Any]]:
        """Read all rows; there are none where there is no file.

        >>> Records("no-such-file.jsonl").rows()
        []
        """
        return [row for _, row in self._parsed()]

    def truncate_after(self, step: int) -> int:
        """Drop the rows with a larger "step", and a torn last line; return how many rows were dropped.

        A training that is carried on from a checkpoint does these steps again. Rows without a step stay. The file
        is replaced as a whole: a kill leaves the old one or the new one.

        >>> Records("no-such-file.jsonl").truncate_after(100)
        0
        """
        parsed = self._parsed()
        kept = []
        for index, (line, row) in enumerate(parsed, start=1):
            row_step = row.get("step", step)
            if not isinstance(row_step, int | float):
                raise CheckpointError(f"{self.path}, line {index}: step {row_step!r} is no number; mend or delete it")
            if not row_step > step:
                kept.append(line)
        content = b"".join(line + b"\n" for line in kept)
        if self.path.exists() and self.path.read_bytes() != content:
            replace_file(self.path, content)
        return len(parsed) - len(kept)

    def _parsed(self) -> list[tuple[bytes, dict[str, Any]]]:
        """Return each line with its row, less a torn last line."""
        try:
            # not splitlines, which would also split at characters that JSON allows within a string
            *lines, last = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        parsed = []
        for index, line in enumerate(lines, start=1):
            try:
                parsed.append((line, _decoded(line)))
            except ValueError as error:
                raise CheckpointError(
                    f"{self.path}, line {index} is not a JSON object ({error}): {line[:40]!r}; mend or delete that line"
                ) from None
        with contextlib.suppress(ValueError):  # torn; but an editor may have left only the line's end away
            parsed.append((last, _decoded(last)))
        return parsed

    def _mend_tail(self) -> None:
        """Take a torn last line away, onto which the next row would be written otherwise."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole, end, last = content.rpartition(b"\n")
        if not last:
            return
        try:
            _decoded(last)
        except ValueError:
            replace_file(self.path, whole + end)
        else:
            replace_file(self.path, content + b"\n")


class LoggerLike(Protocol):
    """What `fit` asks of a logger; Lightning's have it.

    >>> class Printed:
    ...     def log_metrics(self, metrics, step):
    ...         print(step, metrics)
    >>> logger: LoggerLike = Printed()
    >>> logger.log_metrics({"elbo": -0.5}, step=10)
    10 {'elbo': -0.5}
    """

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Take in the values after so many steps."""
        ...


@final
class TensorBoardLogger:
    """Writes values for TensorBoard; it needs varlap[tensorboard].

    Args:
        folder: what to give to `tensorboard --logdir`.

    >>> import contextlib, tempfile
    >>> from varlap.errors import MissingExtraError
    >>> with contextlib.suppress(MissingExtraError), tempfile.TemporaryDirectory() as folder:
    ...     logger = TensorBoardLogger(folder)
    ...     logger.log_metrics({"elbo": -0.5}, step=10)
    ...     logger.close()
    """

    def __init__(self, folder: Path | str) -> None:
        with needs_extra("tensorboard", "TensorBoardLogger", "tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self._writer = SummaryWriter(str(folder))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Write each value as a curve of its name, and flush, since a training may be killed at any time."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _encoded(name: str, value: object) -> Value:
    if isinstance(value, str):
        if value in _NON_FINITE:
            raise ConfigError(f"row[{name!r}] is the string {value!r}, which would be read as a number; rename it")
        return value
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)  # NumPy's doubles are floats of another kind
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    raise ConfigError(
        f"row[{name!r}] is a {type(value).__name__}; rows hold plain numbers and strings: use value.item()"
    )


def _decoded(line: bytes) -> dict[str, Any]:
    row = json.loads(line, parse_constant=_refuse_constant)
    if not isinstance(row, dict):
        raise ValueError("it is something else")
    return {
        name: _NON_FINITE[value] if isinstance(value, str) and value in _NON_FINITE else value
        for name, value in row.items()
    }


def _refuse_constant(name: str) -> float:
    raise ValueError(f"it holds a bare {name}")
