"""Progress bars on a terminal, by rich, which is slow to import."""

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TextIO, final

from rich import progress as rich_progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

from varlap.training.pace import Clock, Pace, Speed
from varlap.training.progress_text import duration, is_terminal, short, terms, validation

REFRESH_S = 0.1
"""The shortest time between two drawings of the bars."""
LONGEST_REFRESH_S = 2.0
"""The longest that a slow terminal delays the next drawing."""
DRAWING_SHARE = 0.005
"""The part of the training's time that drawing may take."""

_log = logging.getLogger(__name__)


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
        self._console = GuardedConsole(stderr=True) if console is None else console
        self._pace = Pace(clock)
        self._speed = Speed()
        self._values: Mapping[str, float] = {}
        self._row: Mapping[str, float] = {}
        self._due = 0.0
        self._label_width = 0
        self._bar = rich_progress.BarColumn()
        self._progress: rich_progress.Progress | None = None
        self._epochs = self._steps = rich_progress.TaskID(0)

    def start(self, *, num_epochs: int, steps_per_epoch: int, first_step: int) -> None:
        """Draw the empty bars, or those of a training that is carried on."""
        self.close()
        self._pace.start(num_epochs, steps_per_epoch, first_step)
        self._speed = Speed()
        self._values, self._row = {}, {}
        longest = f"epoch {num_epochs}/{num_epochs}", f"step {steps_per_epoch}/{steps_per_epoch}"
        self._label_width = max(map(len, longest))
        redirect = self._console.file is sys.stderr  # a console on a file must not swallow what others print
        self._progress = rich_progress.Progress(
            _Field("label"),
            self._bar,
            _Field("text"),
            console=self._console,
            auto_refresh=False,
            get_time=self._pace.clock,
            # stdout that goes to a file or a pipe is left alone: what is printed there is a result
            redirect_stdout=redirect and is_terminal(sys.stdout),
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
            self._console.quiet = True  # in a next training too
            if self._progress is not None:
                stop_unseen(self._progress)
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
            parts = [_Part(f"took {duration(now - pace.started)}", style="progress.elapsed")]
            parts += [_Part(text) for text in (*validation(self._row), *terms(self._row))]
        else:
            left = pace.seconds_left(now)
            parts = [_Part(text) for text in validation(self._row)]
            if left is not None:
                parts.insert(0, _Part(f"{duration(left)} left", style="progress.remaining"))
        self._progress.update(
            self._epochs,
            total=pace.num_steps,
            completed=pace.steps_done,
            label=self._label("epoch", pace.present_epoch, pace.num_epochs),
            text=_fitted(parts, room),
        )
        parts = [_Part(text) for text in terms(self._values)]
        speed = self._speed.items_per_s
        if speed is not None:
            parts.append(_Part(f"{speed:,.0f} items/s", f"{short(speed)}/s", style="progress.data.speed"))
        self._progress.update(
            self._steps,
            total=pace.steps_per_epoch,
            completed=pace.steps_in_epoch,
            visible=not finished,
            label=self._label("step", pace.steps_in_epoch, pace.steps_per_epoch),
            text=_fitted(parts, room),
        )

    def _label(self, what: str, done: int, total: int) -> Text:
        return Text(f"{what} {f'{done}/{total}':>{self._label_width - len(what) - 1}}", style="progress.description")


def bars_on(stream: TextIO | None) -> Bars:
    """Draw on a stream, stderr unless told."""
    return Bars(GuardedConsole(stderr=True) if stream is None else GuardedConsole(file=stream))


def stop_unseen(progress: rich_progress.Progress) -> None:
    """Stop where nothing can be written any more, so that stdout and stderr are given back."""
    progress.console.quiet = True
    with contextlib.suppress(IndexError):  # of a rich that failed before it had begun
        progress.stop()


class GuardedConsole(Console):
    """A console whose broken pipe is an error for its user to see; rich's own ends the program and closes stdout."""

    def on_broken_pipe(self) -> None:
        """Raise the error that rich is handling."""
        raise


class _Field(rich_progress.ProgressColumn):
    """A column with one of a task's texts."""

    def __init__(self, name: str) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._name = name

    def render(self, task: rich_progress.Task) -> Text:
        return task.fields[self._name]


class _Part(NamedTuple):
    """A text of a bar, and what to say where there is little room."""

    wide: str
    short: str = ""
    style: str = ""


def _fitted(parts: list[_Part], room: int) -> Text:
    """Join as many parts as fit, the first ones first; a part is shown whole or not at all."""
    for num_parts in range(len(parts), 0, -1):
        shown = parts[:num_parts]
        for texts, gap in (([p.wide for p in shown], "  "), ([p.short or p.wide for p in shown], " ")):
            if len(gap.join(texts)) <= room:
                styled = [Text(text, style=part.style) for text, part in zip(texts, shown, strict=True)]
                return Text(gap).join(styled)
    return Text()
