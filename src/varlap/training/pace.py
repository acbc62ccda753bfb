"""How far a training is, how fast, and how long the rest will take."""

import math
from collections.abc import Callable, Mapping

Clock = Callable[[], float]


class Pace:
    """What is done of the whole training, and how long the rest takes at the mean pace so far."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.started = clock, 0.0
        self._reset(1, 1, 0)

    def start(self, num_epochs: int, steps_per_epoch: int, first_step: int) -> None:
        """Begin, or carry on before `first_step`."""
        self._reset(num_epochs, steps_per_epoch, first_step)
        self.started = self.clock()

    def _reset(self, num_epochs: int, steps_per_epoch: int, first_step: int) -> None:
        self.num_epochs, self.steps_per_epoch = num_epochs, steps_per_epoch
        self.steps_done = self._first_step = first_step
        self.epochs_done = first_step // steps_per_epoch
        self._mark: tuple[float, int] | None = None

    def step(self, number: int) -> float:
        """Count a step and return the time."""
        now = self.clock()
        self.steps_done = number + 1
        if self._mark is None:
            self._mark = now, self.steps_done  # after the first step, which may have compiled for a minute
        return now

    def epoch(self, row: Mapping[str, float]) -> float:
        """Count an epoch and return the time."""
        self.epochs_done = int(row["epoch"]) + 1
        return self.clock()

    @property
    def complete(self) -> bool:
        """Whether the last epoch is done."""
        return self.epochs_done >= self.num_epochs

    @property
    def num_steps(self) -> int:
        """The steps of the whole training."""
        return self.num_epochs * self.steps_per_epoch

    @property
    def present_epoch(self) -> int:
        """The epoch of the last step, counted from 1, as people do."""
        last = self.steps_done - (self.steps_done > self._first_step)
        return min(last // self.steps_per_epoch + 1, self.num_epochs)

    @property
    def steps_in_epoch(self) -> int:
        """The steps done in the present epoch."""
        return self.steps_done - (self.present_epoch - 1) * self.steps_per_epoch

    def seconds_left(self, now: float) -> float | None:
        """Return None as long as nothing can be said."""
        if self._mark is None or self.steps_done <= self._mark[1]:
            return None
        since, before = self._mark
        return (now - since) / (self.steps_done - before) * (self.num_steps - self.steps_done)


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
