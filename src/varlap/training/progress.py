"""What people watch while `fit` trains: bars on a terminal, a line an epoch in a log, or nothing.

All of it goes to stderr, so that the output of a program stays free for its results.
"""

import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Literal, Protocol, TextIO, final, get_args

from varlap.errors import ConfigError
from varlap.training.pace import Clock, Pace
from varlap.training.progress_text import duration, is_terminal, terms, validation

ProgressKind = Literal["auto", "bars", "lines", "none"]
"""What `choose_progress` knows."""

_log = logging.getLogger(__name__)


class Progress(Protocol):
    """What `fit` tells as it goes. It calls `start`, then `close` whatever happens in between.

    >>> class Dots:
    ...     def start(self, *, num_epochs, steps_per_epoch, first_step): self.text = ""
    ...     def step(self, number, num_items, values): self.text += "."
    ...     def epoch(self, row): self.text += "|"
    ...     def close(self): pass
    >>> dots: Progress = Dots()
    >>> dots.start(num_epochs=1, steps_per_epoch=2, first_step=0)
    >>> for number in range(2):
    ...     dots.step(number, 128, None)
    >>> dots.epoch({"epoch": 0, "elbo": -0.4})
    >>> dots.text
    '..|'
    """

    def start(self, *, num_epochs: int, steps_per_epoch: int, first_step: int) -> None:
        """Begin. `first_step` is the number of the step to come: 0, or that at which a training is carried on."""
        ...

    def step(self, number: int, num_items: int, values: Mapping[str, float] | None) -> None:
        """Tell that a step is done. Steps are counted from 0 over all epochs.

        Values (elbo, nll, and accuracy where there is one) come now and then only, since reading them waits for
        the device.
        """
        ...

    def epoch(self, row: Mapping[str, float]) -> None:
        """Tell that an epoch is done, counted from 0, with its row of `History.epochs`."""
        ...

    def close(self) -> None:
        """End, after the last epoch or after an error. Closing again, or before the start, does nothing."""
        ...


@final
class Silent:
    """Shows nothing.

    >>> silent = Silent()
    >>> silent.start(num_epochs=1, steps_per_epoch=1, first_step=0)
    >>> silent.close()
    """

    def start(self, *, num_epochs: int, steps_per_epoch: int, first_step: int) -> None:
        """Do nothing."""

    def step(self, number: int, num_items: int, values: Mapping[str, float] | None) -> None:
        """Do nothing."""

    def epoch(self, row: Mapping[str, float]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@final
class Lines:
    """Writes one plain line an epoch, for logs and pipes.

    Args:
        stream: where to write; stderr unless told.
        clock: seconds that only grow.

    >>> import sys
    >>> lines = Lines(sys.stdout, clock=iter([0.0, 1.0, 7.0, 12.3]).__next__)
    >>> lines.start(num_epochs=20, steps_per_epoch=2, first_step=4)
    carrying on after 4 steps
    >>> for number in (4, 5):
    ...     lines.step(number, num_items=25_000, values=None)
    >>> lines.epoch({"epoch": 2, "elbo": -0.412, "log_likelihood": -0.398, "lr": 8.5e-4, "seconds": 12.3})
    epoch  3/20  elbo -0.412  nll 0.398  lr 8.5e-04  12.3 s  4,065 items/s  left 6 min
    >>> lines.close()
    """

    def __init__(self, stream: TextIO | None = None, *, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._pace = Pace(clock)
        self._num_items = 0
        self._broken = False

    def start(self, *, num_epochs: int, steps_per_epoch: int, first_step: int) -> None:
        """Begin to count, and say so where a training is carried on."""
        self._pace.start(num_epochs, steps_per_epoch, first_step)
        self._num_items = 0
        self._broken = False
        if first_step:
            done = first_step == num_epochs * steps_per_epoch
            self._write(
                "finished before: nothing is left to train\n" if done else f"carrying on after {first_step} steps\n"
            )

    def step(self, number: int, num_items: int, values: Mapping[str, float] | None) -> None:  # noqa: ARG002
        """Count the step and its items."""
        self._num_items += num_items
        self._pace.step(number)

    def epoch(self, row: Mapping[str, float]) -> None:
        """Write the epoch's line with one call, so that lines of several processes do not mix."""
        now = self._pace.epoch(row)
        epoch, num_epochs = self._pace.epochs_done, self._pace.num_epochs
        parts = [f"epoch {epoch:>{len(str(num_epochs))}}/{num_epochs}", *terms(row), *validation(row)]
        if "lr" in row:
            parts.append(f"lr {row['lr']:.1e}")
        if "seconds" in row:
            parts.append(f"{row['seconds']:.1f} s")
            if self._num_items and row["seconds"] > 0:
                parts.append(f"{self._num_items / row['seconds']:,.0f} items/s")
        left = self._pace.seconds_left(now)
        if left is not None and not self._pace.complete:
            parts.append(f"left {duration(left)}")
        self._num_items = 0
        self._write("  ".join(parts) + "\n")

    def close(self) -> None:
        """Do nothing: every line is complete already."""

    def _write(self, line: str) -> None:
        stream = sys.stderr if self._stream is None else self._stream
        if self._broken or stream is None:  # no stderr in a program without a console
            return
        try:
            stream.write(line)
            stream.flush()
        except OSError as error:  # a closed terminal or a full disk must not end a training
            self._broken = True
            _log.warning("progress is no longer shown, training goes on: %s", error)


def choose_progress(kind: ProgressKind = "auto", stream: TextIO | None = None) -> Progress:
    """Return what shows the progress on a stream, stderr unless told.

    Args:
        kind: "bars", "lines", "none", or "auto" for bars on a terminal and lines elsewhere.
        stream: where to write.

    >>> import io
    >>> type(choose_progress("auto", io.StringIO())).__name__
    'Lines'
    """
    if kind not in get_args(ProgressKind):
        raise ConfigError(f"progress={kind!r}: choose 'auto', 'bars', 'lines' or 'none'")
    if kind == "none":
        return Silent()
    # Not what rich calls a terminal: FORCE_COLOR, set by many a CI, would fill its logs with bars.
    target = sys.stderr if stream is None else stream
    able = is_terminal(target) and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    if kind == "bars" or (kind == "auto" and able):
        from varlap.training.bars import bars_on  # slow to import

        return bars_on(stream)
    return Lines(stream)
