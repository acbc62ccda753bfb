"""How far a training is, how fast, and how long the rest will take."""

import math
from collections.abc import Callable, Mapping

Clock = Callable[[], float]


class Pace:
    """What is done of the whole training, and how long the rest takes at the mean pace so far."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.num_epochs, self.steps_per_epoch = 1, None
        self._reset(0)

    def start(self, num_epochs: int, steps_per_epoch: int | None, first_step: int) -> None:
        """Begin, or carry on before `first_step`."""
        self.num_epochs, self.steps_per_epoch = num_epochs, steps_per_epoch
        self._reset(first_step)
        self.started = self.clock()

    def _reset(self, first_step: int) -> None:
        self.started = 0.0
        self.steps_done = self._first_step = self._epoch_start = first_step
        self.epochs_done: int | None = 0 if first_step == 0 else None
        if self.steps_per_epoch is not None:
            self.epochs_done = first_step // self.steps_per_epoch
        self._step_mark: tuple[float, int] | None = None
        self._epoch_marks: list[tuple[float, int]] = []  # the first and the last

    def step(self, number: int) -> float:
        """Count a step and return the time."""
        now = self.clock()
        self.steps_done = number + 1
        if self._step_mark is None:
            self._step_mark = now, self.steps_done  # after the first step, which may have compiled for a minute
        return now

    def epoch(self, row: Mapping[str, float]) -> float:
        """Count an epoch and return the time."""
        now = self.clock()
        self.epochs_done = int(row["epoch"]) + 1
        self._epoch_start = self.steps_done
        self._epoch_marks = [*self._epoch_marks[:1], (now, self.epochs_done)]
        return now

    @property
    def complete(self) -> bool:
        """Whether the last epoch is done."""
        return self.epochs_done is not None and self.epochs_done >= self.num_epochs

    @property
    def whole(self) -> tuple[int, int]:
        """What is done and what there is to do: steps where their number is known, else epochs."""
        if self.steps_per_epoch is None:
            return self.epochs_done or 0, self.num_epochs
        return self.steps_done, self.num_epochs * self.steps_per_epoch

    @property
    def present_epoch(self) -> int | None:
        """The epoch of the last step, counted from 1, as people do."""
        if self.steps_per_epoch is not None:
            last = self.steps_done - (self.steps_done > self._first_step)
            return min(last // self.steps_per_epoch + 1, self.num_epochs)
        if self.epochs_done is None:
            return None
        return min(max(self.epochs_done + (self.steps_done > self._epoch_start), 1), self.num_epochs)

    @property
    def steps_in_epoch(self) -> tuple[int, int | None]:
        """The steps done in the present epoch, and all of them where their number is known."""
        if self.steps_per_epoch is None:
            return self.steps_done - self._epoch_start, None
        assert self.present_epoch is not None
        return self.steps_done - (self.present_epoch - 1) * self.steps_per_epoch, self.steps_per_epoch

    def seconds_left(self, now: float) -> float | None:
        """Return None as long as nothing can be said."""
        done, total = self.whole
        if self.steps_per_epoch is not None:
            if self._step_mark is None or done <= self._step_mark[1]:
                return None
            since, before = self._step_mark
            return (now - since) / (done - before) * (total - done)
        if not self._epoch_marks:
            return None
        last, _ = self._epoch_marks[-1]
        if len(self._epoch_marks) == 1:
            mean = last - self.started
        else:
            since, before = self._epoch_marks[0]
            mean = (last - since) / (done - before)
        return max(mean * (total - done) - (now - last), 0.0)


class Speed:
    """Items a second, smoothed over about two seconds of training."""

    SMOOTHED_OVER_S = 2.0

    def __init__(self) -> None:
        self.num_items = 0
        self.items_per_s: float | None = None
        self._since: float | None = None

    def update(self, now: float) -> None:
        """Take in the items since the last call; the first call only begins, since it may follow a compilation."""
        if self._since is not None and now > self._since:
            recent = self.num_items / (now - self._since)
            old = 0.0 if self.items_per_s is None else math.exp((self._since - now) / self.SMOOTHED_OVER_S)
            self.items_per_s = old * (self.items_per_s or 0.0) + (1 - old) * recent
        self._since, self.num_items = now, 0

    def pause(self, now: float) -> None:
        """Leave out the time and the items since the last call."""
        self.num_items = 0
        if self._since is not None:
            self._since = now
