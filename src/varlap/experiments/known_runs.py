"""What a store has, found by spec or by another spec that is the same training."""

import dataclasses
from typing import final

from varlap.experiments.spec import RunSpec
from varlap.experiments.store import Result, Store

SAME_RUN = "same_run_as"
"""In the origin of a copy: the key of the run that was trained."""


@final
class KnownRuns:
    """The results of a store, read once.

    A run is the same training as another where they differ in nothing that their method uses, see `RunSpec.effective`;
    one that was scored by linearised predictions too serves a spec that asks for none.

    Args:
        store: where results are.
        again: whether runs that diverged count as not there.

    >>> import tempfile
    >>> store, by_map = Store(tempfile.mkdtemp()), RunSpec("digits", "map", 0.1)
    >>> store.put(Result(by_map, {"mean": {"nll": 0.3}}, {}, {}, seconds=1.0))
    >>> found = KnownRuns(store).find(RunSpec("digits", "map", 0.1, gradient="quiet"))
    >>> found.spec.gradient, found.test["mean"]["nll"], found.origin[SAME_RUN] == by_map.key()
    ('quiet', 0.3, True)
    """

    def __init__(self, store: Store, again: bool = False) -> None:
        self._store = store
        self._by_spec: dict[RunSpec, Result] = {}
        self._by_training: dict[RunSpec, Result] = {}
        self.results = list(store)
        self._diverged_before = [result for result in self.results if again and result.failure is not None]
        for result in filter(self._counts, self.results):
            self.learn(result)

    def learn(self, result: Result) -> None:
        """Take in a result that has just been put into the store, also of a run that diverged again."""
        self._by_spec[result.spec] = result
        training = result.spec.effective()
        if training not in self._by_training or self._by_training[training].failure is not None:
            self._by_training[training] = result

    def find(self, spec: RunSpec) -> Result | None:
        """Return the result of a spec, or a copy of that of the same training, which is not in the store yet."""
        own = self._by_spec.get(spec)
        if own is not None and (own.failure is None or SAME_RUN not in own.origin):
            return own
        training = spec.effective()
        keys = training, dataclasses.replace(training, linearised=True)
        same = [self._by_training[key] for key in keys if key in self._by_training]
        ended = [result for result in same if result.failure is None]
        if not ended and own is not None:  # a copy of a failure, which no rerun has replaced
            return own
        found = next(iter(ended or same), None)
        return found if found is None or found.spec == spec else _copy(found, spec)

    def find_now(self, spec: RunSpec) -> Result | None:
        """Like `find`, after looking into the store again."""
        if (found := self._store.get(spec)) is not None and self._counts(found):
            self.learn(found)
        return self.find(spec)

    def keep(self, result: Result) -> Result:
        """Put what was found into the store, if it is not there."""
        if self._by_spec.get(result.spec) is not result:
            self._store.put(result)
            self.learn(result)
        return result

    def _counts(self, result: Result) -> bool:
        return result not in self._diverged_before


def _copy(result: Result, spec: RunSpec) -> Result:
    """Return what a training by this spec would have left."""
    origin = dict(result.origin) | {SAME_RUN: result.origin.get(SAME_RUN, result.spec.key())}
    if spec.linearised == result.spec.linearised or spec.method == "vi":
        return dataclasses.replace(result, spec=spec, origin=origin)
    parts = {
        part: {way: scores for way, scores in getattr(result, part).items() if way != "linearised"}
        for part in ("test", "validation")
    }
    return dataclasses.replace(result, spec=spec, origin=origin, evaluation_seconds=None, **parts)
