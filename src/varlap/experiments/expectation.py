"""How long runs will take, by those that were done."""

import statistics
from collections.abc import Sequence

from varlap.experiments.spec import RunSpec
from varlap.experiments.store import Result


class Expectation:
    """How long runs take, from those that were done on the same kind of device.

    >>> spec = RunSpec("digits", "map", 0.1, epochs=10)
    >>> expected = Expectation([], "cpu")
    >>> expected.seconds(spec) is None
    True
    >>> expected.learn(spec, seconds_per_epoch=2.0, evaluation_s=5.0)
    >>> expected.seconds(spec, epochs_done=4), expected.seconds(RunSpec("digits", "vl", 0.1, epochs=1))
    (17.0, 7.0)
    """

    def __init__(self, results: Sequence[Result], device: str) -> None:
        self._times: dict[tuple[object, ...], list[float]] = {}
        for result in results:
            if str(result.origin.get("device", "")).split(":")[0] == device.split(":")[0] and result.history:
                self.learn(result.spec, result.seconds_per_epoch, result.evaluation_seconds)

    def learn(self, spec: RunSpec, seconds_per_epoch: float | None, evaluation_s: float | None) -> None:
        """Take in the seconds per epoch and of the evaluation of a run; None where one is not known."""
        for what, seconds in (("epoch", seconds_per_epoch), ("evaluation", evaluation_s)):
            if seconds is not None:
                for key in self._keys(what, spec):
                    self._times.setdefault(key, []).append(seconds)

    def learn_from(self, result: Result, took_s: float, epochs_before: int) -> None:
        """Take in a run of this process, which took so long; some of its epochs were done before."""
        num_epochs = result.spec.epochs - epochs_before
        training_s = took_s - (result.evaluation_seconds or 0.0)
        self.learn(result.spec, training_s / num_epochs if num_epochs > 0 else None, result.evaluation_seconds)

    def seconds(self, spec: RunSpec, epochs_done: float = 0) -> float | None:
        """Return the time that the rest of a run takes, with its evaluation; None where it is not known.

        It is known from runs of the same size by the same method, or else by other methods.
        """
        epoch = self._mean("epoch", spec)
        if epoch is None:
            return None
        return epoch * max(0.0, spec.epochs - epochs_done) + self.evaluation(spec)

    def evaluation(self, spec: RunSpec) -> float:
        """Return the time to evaluate a run; 0 where it is not known."""
        return self._mean("evaluation", spec) or 0.0

    def _mean(self, what: str, spec: RunSpec) -> float | None:
        found = (self._times[key] for key in self._keys(what, spec) if key in self._times)
        return next((statistics.fmean(times[-5:]) for times in found), None)

    def sum(self, spec: RunSpec, share_done: float, others: Sequence[RunSpec]) -> float | None:
        """Return the time of the rest of a run and of other runs; None if one of them is unknown."""
        rest = 0.0 if share_done == 1 else self.seconds(spec, share_done * spec.epochs)
        times = [rest, *map(self.seconds, others)]
        return None if any(time is None for time in times) else sum(time for time in times if time is not None)

    @staticmethod
    def _keys(what: str, spec: RunSpec) -> list[tuple[object, ...]]:
        size = (what, spec.data, spec.model, spec.width, spec.num_train, spec.batch_size, spec.precision)
        if what == "evaluation":
            size = (*size, spec.linearised)  # which can take longer than all the rest
        return [(*size, spec.method, spec.curvature), size]
