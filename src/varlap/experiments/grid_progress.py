"""What people watch while a grid runs: one bar for the whole on a terminal, a few lines a run in a log, or nothing."""

import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO, final

from varlap.training.progress_text import duration, is_terminal

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

REFRESH_S = 0.2
LINE_PAUSE_S = 10.0  # without a terminal: a short run needs no line but its last

_log = logging.getLogger(__name__)

LeftFn = Callable[[float], float | None]
"""From the share of the present run that is done to the seconds that the whole will still take."""


@final
class GridProgress:
    """Tells how far a grid is, on stderr.

    Args:
        quiet: show nothing.
        stream: where to write; stderr unless told.

    >>> shown = GridProgress(stream=sys.stdout)
    >>> shown.begin(num_runs=3, num_done=1)
    3 runs, 1 stored
    >>> shown.end_of_run("digits vl β 0.1", 65.0, left_s=70.0)
    2/3  digits vl β 0.1  1 min  left 1 min
    >>> shown.end()
    """

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._quiet = quiet or self._stream is None  # no stderr in a program without a console
        self._bar: RichProgress | None = None
        self._num_runs = self._num_done = 0
        self._name = ""
        self._left_fn: LeftFn = lambda _: None
        self._steps, self._steps_done = 1, 0
        self._first_step, self._began = 0, 0.0
        self._due = self._line_due = 0.0
        self._num_epochs, self._epochs_done = 1, 0

    def begin(self, num_runs: int, num_done: int) -> None:
        """Begin with so many runs, of which some are done already."""
        self._num_runs, self._num_done = num_runs, num_done
        if self._quiet:
            return
        if not is_terminal(self._stream):
            if num_done < num_runs:
                self.say(f"{num_runs} run{'s' * (num_runs > 1)}, {num_done} stored")
            return
        from rich.progress import BarColumn, Progress, TextColumn  # slow to import

        from varlap.training.bars import GuardedConsole

        columns = TextColumn("{task.fields[label]}"), BarColumn(), TextColumn("{task.fields[text]}")
        # No thread draws, since one that holds a lock while data workers are forked could stop them for ever.
        self._bar = Progress(*columns, console=GuardedConsole(file=self._stream), auto_refresh=False)
        self._bar.add_task("", total=num_runs, completed=num_done, label="", text="")
        self._guarded(self._bar.start)

    def begin_run(self, name: str, left_fn: LeftFn) -> None:
        """Tell which run comes; then this object is the progress of its training."""
        self._name, self._left_fn = name, left_fn

    def end_of_run(self, name: str, seconds: float | None, left_s: float | None, words: str = "") -> None:
        """Tell that a run is done, in how many seconds, and how long the others will take."""
        self._num_done += 1
        parts = [f"{self._num_done}/{self._num_runs}", name, words, "" if seconds is None else duration(seconds)]
        if left_s is not None and self._num_done < self._num_runs:
            parts.append(f"left {duration(left_s)}")
        self.say("  ".join(filter(None, parts)))

    def say(self, line: str) -> None:
        """Write a line, above the bar where there is one."""
        if self._quiet:
            return
        if self._bar is not None:
            self._guarded(functools.partial(self._bar.console.print, line, highlight=False, markup=False))
        else:
            self._guarded(functools.partial(print, line, file=self._stream, flush=True))

    # What `fit` calls.

    def start(self, *, num_epochs: int, steps_per_epoch: int, first_step: int) -> None:
        """Begin a training."""
        self._steps = num_epochs * steps_per_epoch
        self._steps_done = self._first_step = first_step
        self._began = time.monotonic()
        self._line_due = self._began + LINE_PAUSE_S
        self._num_epochs = num_epochs
        self._epochs_done = first_step * num_epochs // self._steps
        self._draw(first_step)

    def step(self, number: int, num_items: int, values: Mapping[str, float] | None) -> None:  # noqa: ARG002
        """Draw if it is time to."""
        self._steps_done = number + 1
        if time.monotonic() >= self._due:
            self._draw(number + 1)

    def epoch(self, row: Mapping[str, float]) -> None:  # noqa: ARG002
        """Without a terminal, write a line at each tenth of the epochs."""
        before, self._epochs_done = self._epochs_done, self._epochs_done + 1
        a_tenth = 10 * self._epochs_done // self._num_epochs > 10 * before // self._num_epochs
        if self._bar is None and a_tenth and time.monotonic() >= self._line_due:
            left = self._left(self._steps_done)
            told = [self._name, f"epoch {self._epochs_done}/{self._num_epochs}", left]
            self.say("  ".join(filter(None, told)))
            self._line_due = time.monotonic() + LINE_PAUSE_S

    def close(self) -> None:
        """End a training: what comes is its evaluation, unless it was stopped."""
        self._draw(self._steps_done, doing="evaluating " if self._steps_done == self._steps else "")

    def end(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._guarded(self._bar.stop)
            self._bar = None

    def _guarded(self, show: Callable[[], None]) -> None:
        try:
            show()
        except OSError as error:  # a closed terminal or a full disk must not end a grid
            self._quiet = True
            if self._bar is not None:
                from varlap.training.bars import stop_unseen

                stop_unseen(self._bar)
                self._bar = None
            _log.warning("progress is no longer shown, the grid goes on: %s", error)

    def _draw(self, steps_done: int, doing: str = "") -> None:
        if self._bar is None:
            return
        share = steps_done / self._steps
        self._bar.update(
            self._bar.task_ids[0],
            completed=self._num_done + share,
            label=f"run {min(self._num_done + 1, self._num_runs)}/{self._num_runs}  {doing}{self._name}",
            text=self._left(steps_done),
        )
        self._guarded(self._bar.refresh)
        self._due = time.monotonic() + REFRESH_S

    def _left(self, steps_done: int) -> str:
        """Say how long all runs will still take, or, where that is not known, this run's training."""
        left = self._left_fn(steps_done / self._steps)
        if left is not None:
            return f"{duration(left)} left"
        if not self._first_step < steps_done < self._steps:
            return ""
        pace = (time.monotonic() - self._began) / (steps_done - self._first_step)
        return f"{duration(pace * (self._steps - steps_done))} left of this run"
