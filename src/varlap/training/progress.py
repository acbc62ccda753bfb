"""What people watch while `fit` trains: bars on a terminal, a line an epoch in a log, or nothing.

All of it goes to stderr, so that the output of a program stays free for its results.
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Literal, Protocol, TextIO, final, get_args

from rich import progress as rich_progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

from varlap.errors import ConfigError
from varlap.training.pace import Clock, Pace, Speed
from varlap.training.progress_text import Part, duration, fitted, short, terms, validation

ProgressKind = Literal["auto", "bars", "lines", "none"]
"""What `choose_progress` knows."""

REFRESH_S = 0.1
"""The shortest time between two drawings of the bars."""
LONGEST_REFRESH_S = 2.0
"""The longest that a slow terminal delays the next drawing."""
DRAWING_SHARE = 0.005
"""The part of the training's time that drawing may take."""

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

    def start(self, *, num_epochs: int, steps_per_epoch: int | None, first_step: int) -> None:
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

    def start(self, *, num_epochs: int, steps_per_epoch: int | None, first_step: int) -> None:
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

    def start(self, *, num_epochs: int, steps_per_epoch: int | None, first_step: int) -> None:
        """Begin to count; nothing is written yet."""
        self._pace.start(num_epochs, steps_per_epoch, first_step)
        self._num_items = 0
        self._broken = False

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


@final
class Bars:
    """Draws two bars: one over the epochs with the time left, one over the steps of the present epoch.

    No thread draws, since one that holds a lock while data workers are forked could stop them for ever. A call of
    `step` draws if the last drawing is `REFRESH_S` ago, and drawing is allowed `DRAWING_SHARE` of the time.

    Args:
        console: where to draw; stderr unless told.
        clock: seconds that only grow.

    >>> import io
    >>> from rich.console import Console
    >>> console = Console(file=io.StringIO(), width=60)
    >>> bars = Bars(console)
    >>> bars.start(num_epochs=1, steps_per_epoch=1, first_step=0)
    >>> bars.step(0, num_items=128, values={"elbo": -0.412, "nll": 0.398})
    >>> bars.epoch({"epoch": 0, "elbo": -0.412, "log_likelihood": -0.398, "validation_nll": 0.41})
    >>> bars.close()
    >>> print(console.file.getvalue().strip())
    epoch 1/1 ━━━━━━ took 0 s  val nll 0.410  elbo -0.412
    """

    def __init__(self, console: Console | None = None, *, clock: Clock = time.monotonic) -> None:
        self._console = _Console(stderr=True) if console is None else console
        self._pace = Pace(clock)
        self._speed = Speed()
        self._values: Mapping[str, float] = {}
        self._row: Mapping[str, float] = {}
        self._due = 0.0
        self._label_width = 0
        self._bar = rich_progress.BarColumn()
        self._progress: rich_progress.Progress | None = None
        self._epochs = self._steps = rich_progress.TaskID(0)

    def start(self, *, num_epochs: int, steps_per_epoch: int | None, first_step: int) -> None:
        """Draw the empty bars, or those of a training that is carried on."""
        self.close()
        self._pace.start(num_epochs, steps_per_epoch, first_step)
        self._speed = Speed()
        self._values, self._row = {}, {}
        steps = "123456" if steps_per_epoch is None else f"{steps_per_epoch}/{steps_per_epoch}"
        self._label_width = max(len(f"epoch {num_epochs}/{num_epochs}"), len(f"step {steps}"))
        redirect = self._console.file is sys.stderr  # a console on a file must not swallow what others print
        self._progress = rich_progress.Progress(
            _Field("label"),
            self._bar,
            _Field("text"),
            console=self._console,
            auto_refresh=False,
            get_time=self._pace.clock,
            # stdout that goes to a file or a pipe is left alone: what is printed there is a result
            redirect_stdout=redirect and _is_terminal(sys.stdout),
            redirect_stderr=redirect,
        )
        self._epochs, self._steps = (
            self._progress.add_task("", total=None, label=Text(), text=Text()) for _ in ("epochs", "steps")
        )
        self._update(self._pace.started)
        self._guarded(self._progress.start)
        self._due = self._pace.started + REFRESH_S

    def step(self, number: int, num_items: int, values: Mapping[str, float] | None) -> None:
        """Count the step, and draw if it is time to."""
        now = self._pace.step(number)
        self._speed.num_items += num_items
        if values is not None:
            self._values = dict(values)
        if now >= self._due:
            self._draw(now)

    def epoch(self, row: Mapping[str, float]) -> None:
        """Keep the epoch's row, and draw if it is time to."""
        now = self._pace.epoch(row)
        self._row = dict(row)
        self._speed.pause(now)  # what came before was the validation, in which no step is done
        if now >= self._due:
            self._draw(now)

    def close(self) -> None:
        """Leave the bars as they are, or one line on the whole training if it is complete."""
        if self._progress is None:
            return
        self._update(self._pace.clock(), closing=True)
        progress, self._progress = self._progress, None
        self._guarded(progress.stop)

    def _draw(self, now: float) -> None:
        if self._progress is None:
            return
        self._speed.update(now)
        self._update(now)
        self._guarded(self._progress.refresh)
        spent = self._pace.clock() - now
        self._due = now + spent + min(max(REFRESH_S, spent / DRAWING_SHARE), LONGEST_REFRESH_S)

    def _guarded(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except OSError as error:  # a closed terminal must not end a training
            self._console.quiet = True  # so that stopping gives stdout and stderr back and writes nothing
            if self._progress is not None:
                with contextlib.suppress(IndexError):  # of a rich that failed before it had begun
                    self._progress.stop()
                self._progress = None
            _log.warning("progress is no longer shown, training goes on: %s", error)

    def _update(self, now: float, *, closing: bool = False) -> None:
        """Tell rich what to draw, without drawing."""
        assert self._progress is not None
        pace, width = self._pace, self._console.width
        # The text has the 50 columns that it needs before the bars grow, and widths stay as they are between
        # drawings: bars that change their length cannot be read.
        beside = width - self._label_width - 2
        self._bar.bar_width = max(min(6, beside), min(40, beside - 50), 1)
        room = beside - self._bar.bar_width
        finished = closing and pace.complete
        if finished:
            parts = [Part(f"took {duration(now - pace.started)}", style="progress.elapsed")]
            parts += [Part(text) for text in (*validation(self._row), *terms(self._row))]
        else:
            left = pace.seconds_left(now)
            parts = [Part(text) for text in validation(self._row)]
            if left is not None:
                parts.insert(0, Part(f"{duration(left)} left", style="progress.remaining"))
        done, total = pace.whole
        self._progress.update(
            self._epochs,
            total=total,
            completed=done,
            label=self._label("epoch", pace.present_epoch, pace.num_epochs),
            text=fitted(parts, room),
        )
        in_epoch, total = pace.steps_in_epoch
        parts = [Part(text) for text in terms(self._values)]
        speed = self._speed.items_per_s
        if speed is not None:
            parts.append(Part(f"{speed:,.0f} items/s", f"{short(speed)}/s", style="progress.data.speed"))
        self._progress.update(
            self._steps,
            total=total,
            completed=in_epoch,
            visible=not finished,
            label=self._label("step", in_epoch, total),
            text=fitted(parts, room),
        )

    def _label(self, what: str, done: int | None, total: int | None) -> Text:
        count = f"{'?' if done is None else done}" + ("" if total is None else f"/{total}")
        return Text(f"{what} {count:>{self._label_width - len(what) - 1}}", style="progress.description")


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
    able = _is_terminal(target) and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    if kind == "bars" or (kind == "auto" and able):
        return Bars(_Console(stderr=True) if stream is None else _Console(file=stream))
    return Lines(stream)


class _Console(Console):
    """A console whose broken pipe is an error for `Bars` to see; rich's own ends the program and closes stdout."""

    def on_broken_pipe(self) -> None:
        raise


class _Field(rich_progress.ProgressColumn):
    """A column with one of a task's texts."""

    def __init__(self, name: str) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._name = name

    def render(self, task: rich_progress.Task) -> Text:
        return task.fields[self._name]


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()
