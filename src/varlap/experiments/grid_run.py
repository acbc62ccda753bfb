"""A grid of runs, one after the other: what the store has is not computed again, and a budget of time is kept."""

import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from varlap.data import data_folder
from varlap.data.store import num_training_images
from varlap.errors import ConfigError, NonFiniteError, OutOfTime
from varlap.experiments.evaluation import origin
from varlap.experiments.grid_progress import GridProgress
from varlap.experiments.image_task import check_num_train
from varlap.experiments.run import RUNNING, claim, epochs_done, forget, run
from varlap.experiments.spec import RunSpec
from varlap.experiments.store import Result, Store


@dataclass
class Outcome:
    """What became of a grid."""

    results: list[Result] = field(default_factory=list)
    num_computed: int = 0
    """how many of them this call has finished; the others were in the store"""
    left: list[RunSpec] = field(default_factory=list)
    """runs that are not done: the budget left them for the next call, or another process is at them"""
    failed: dict[str, str] = field(default_factory=dict)
    """runs that diverged, with what was said, now or before"""


def run_grid(
    specs: Sequence[RunSpec],
    store: Store,
    *,
    device: torch.device | str = "cpu",
    budget_s: float | None = None,
    again: bool = False,
    progress: GridProgress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run what the store lacks, in order.

    With a budget, a run that is not expected to fit is left for the next call; one that takes longer than expected is
    stopped at a checkpoint, from which the next call carries on. The first run is started whatever is expected of it,
    so that every call gets on. A run that diverges is told of and stored as such, and the others go on; `again` runs
    those anew that diverged before. A run that another process is at is left to it, so that several can share a store;
    what that process has finished by the end of this call is among the results.

    >>> import tempfile
    >>> spec = RunSpec("digits", "map", 0.1, model="mlp", epochs=1, precision="fp32", linearised=False)
    >>> store = Store(tempfile.mkdtemp())
    >>> [run_grid([spec], store).num_computed for _ in range(2)]
    [1, 0]
    """
    check_data(specs, store, again)
    shown = GridProgress(quiet=True) if progress is None else progress
    began, outcome = clock(), Outcome()
    known = {spec: found for spec in specs if (found := _known(spec, store, again)) is not None}
    for spec in known:
        _clean(spec, store)
    expected = Expectation(list(store), str(torch.device(device)))
    pending = [spec for spec in specs if spec not in known]
    shown.begin(len(specs), len(known))
    try:
        while pending:
            spec, others = pending[0], pending[1:]
            left_s = None if budget_s is None else budget_s - (clock() - began)
            done = epochs_done(spec, store)
            if left_s is not None:
                needed = expected.seconds(spec, done)
                too_long = needed is not None and needed > left_s
                if left_s <= 0 or (too_long and outcome.num_computed):
                    break
            with claim(spec, store) as mine:
                if not mine:
                    outcome.left.append(spec)
                    shown.say(f"{name(spec)}: another process is at it, so it is left")
                elif (found := _known(spec, store, again)) is not None:  # another process was at it
                    known[spec] = found
                    shown.end_of_run(name(spec), None, expected.sum(spec, 1.0, others), "by another process")
                else:
                    store.delete(spec)
                    shown.begin_run(name(spec), lambda share, s=spec, o=others: expected.sum(s, share, o))
                    start = clock()
                    try:
                        known[spec] = run(spec, store, device=device, progress=shown, time_limit_s=left_s)
                    except OutOfTime:
                        break
                    except NonFiniteError as error:
                        known[spec] = _diverged(spec, store, str(device), clock() - start, str(error))
                        shown.end_of_run(name(spec), None, expected.sum(spec, 1.0, others), f"diverged: {error}")
                    else:
                        took = clock() - start
                        expected.learn_from(known[spec], took, done)
                        shown.end_of_run(name(spec), took, expected.sum(spec, 1.0, others), _told(known[spec]))
                    outcome.num_computed += 1
            pending = others
    finally:
        shown.end()
    for spec in [*outcome.left, *pending]:
        if (found := _known(spec, store, again)) is not None:  # another process has finished it meanwhile
            known[spec] = found
    outcome.left = [spec for spec in specs if spec not in known]
    outcome.results = [known[spec] for spec in specs if spec in known]
    outcome.failed = {name(run.spec): run.failure for run in outcome.results if run.failure is not None}
    return outcome


def _known(spec: RunSpec, store: Store, again: bool) -> Result | None:
    found = store.get(spec)
    return None if again and found is not None and found.failure is not None else found


def _clean(spec: RunSpec, store: Store) -> None:
    """Delete what a kill between result and checkpoints has left."""
    if any((store.folder / RUNNING).glob(f"{spec.key()}*")):
        with claim(spec, store) as mine:
            if mine:
                forget(spec, store)


def _diverged(spec: RunSpec, store: Store, device: str, seconds: float, why: str) -> Result:
    """Store that a run has failed: a trial like others, which the same command would only repeat."""
    result = Result(spec, {}, {}, origin() | {"device": device}, seconds, failure=why)
    store.put(result)
    forget(spec, store)
    return result


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
        """Take in how long a run took to train and to evaluate, as far as it is known."""
        for what, seconds in (("epoch", seconds_per_epoch), ("evaluation", evaluation_s)):
            if seconds is not None:
                for key in self._keys(what, spec):
                    self._times.setdefault(key, []).append(seconds)

    def learn_from(self, result: Result, took_s: float, epochs_before: int) -> None:
        """Take in a run that this process has seen, some epochs of which were done before."""
        num_epochs = result.spec.epochs - epochs_before
        training_s = took_s - (result.evaluation_seconds or 0.0)
        self.learn(result.spec, training_s / num_epochs if num_epochs > 0 else None, result.evaluation_seconds)

    def seconds(self, spec: RunSpec, epochs_done: float = 0) -> float | None:
        """Return the time that the rest of a run and its evaluation take, by runs of its method, or else of others.

        None where no such run is known.
        """
        epoch = self._mean("epoch", spec)
        if epoch is None:
            return None
        return epoch * max(0.0, spec.epochs - epochs_done) + (self._mean("evaluation", spec) or 0.0)

    def _mean(self, what: str, spec: RunSpec) -> float | None:
        found = (self._times[key] for key in self._keys(what, spec) if key in self._times)
        return next((statistics.fmean(times[-5:]) for times in found), None)

    def sum(self, spec: RunSpec, share_done: float, others: Sequence[RunSpec]) -> float | None:
        """Return the time of the rest of a run and of all others; None if one of them is unknown."""
        rest = 0.0 if share_done == 1 else self.seconds(spec, share_done * spec.epochs)
        times = [rest, *map(self.seconds, others)]
        return None if any(time is None for time in times) else sum(time for time in times if time is not None)

    @staticmethod
    def _keys(what: str, spec: RunSpec) -> list[tuple[object, ...]]:
        size = (what, spec.data, spec.model, spec.width, spec.num_train, spec.batch_size, spec.precision)
        if what == "evaluation":
            size = (*size, spec.linearised)  # which can take longer than all the rest
        return [(*size, spec.method, spec.curvature), size]


def check_data(specs: Sequence[RunSpec], store: Store, again: bool = False) -> None:
    """Refuse a grid whose data are not all there, or too few, before anything runs; what the store has needs none."""
    pending = [spec for spec in specs if _known(spec, store, again) is None]
    wanted = dict.fromkeys(spec.data for spec in pending)
    missing = [data for data in wanted if data != "digits" and not (data_folder() / f"{data}.npz").is_file()]
    if missing:
        it, file = ("it", f"{missing[0]}.npz") if len(missing) == 1 else ("them", "a NAME.npz of each")
        num_missing = sum(spec.data in missing for spec in pending)
        num_stored = len(specs) - len(pending)
        command = f"varlap report {shlex.quote(str(store.folder))}"
        page = f"; the store has {num_stored}, and `{command}` writes the page of what is there"
        here = [data for data in wanted if data not in missing]
        choose = f", or run what is there: {' '.join(f'--data {data}' for data in here)}" if here else ""
        raise ConfigError(
            f"{', '.join(missing)}: no such data in {data_folder()}, needed by {num_missing} of {len(specs)} runs"
            f"{page if num_stored else ''}. Fetch {it} with `varlap data get {' '.join(missing)}`, put {file} "
            f"there, or set VARLAP_DATA to the folder that holds {it}{choose}"
        )
    for data in wanted:
        sizes = {(spec.validation, spec.num_train) for spec in pending if spec.data == data and spec.num_train}
        if sizes and (num_images := num_training_images(data)) is not None:
            for validation, num_train in sizes:
                check_num_train(data, num_images, validation, num_train)


def name(spec: RunSpec) -> str:
    """Return what a line calls a run.

    >>> name(RunSpec("digits", "vl", 0.1))
    'digits vl β 0.1'
    """
    words = f"{spec.data} {spec.method} β {spec.beta:g}"
    words += f" multiplier {spec.log_sigma_lr_multiplier:g}" if spec.log_sigma_lr_multiplier != 10 else ""
    return words + (f" seed {spec.seed}" if spec.seed else "")


def _told(result: Result) -> str:
    if result.failure is not None:
        return f"diverged: {result.failure}"
    scores = result.validation.get("mean") or result.test["mean"]
    where = "held-out" if result.validation else "test"
    return f"{where} NLL {scores['nll']:.4f}, {result.seconds_per_epoch:.2g} s an epoch"
