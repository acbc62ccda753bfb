"""Runs a grid one run after the other, within a budget of time; what the store has is not computed again."""

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from varlap.data import data_folder, load
from varlap.errors import ConfigError, NonFiniteError, OutOfTime
from varlap.experiments.evaluation import origin
from varlap.experiments.expectation import Expectation
from varlap.experiments.grid_progress import GridProgress
from varlap.experiments.image_task import check_held_out, check_num_train
from varlap.experiments.known_runs import SAME_RUN, KnownRuns
from varlap.experiments.names import names
from varlap.experiments.run import RUNNING, claim, epochs_done, epochs_told, forget, run
from varlap.experiments.spec import RunSpec
from varlap.experiments.store import Result, Store


@dataclass
class Outcome:
    """What became of a grid."""

    results: list[Result] = field(default_factory=list)
    num_computed: int = 0
    """how many of them this call has finished; the others were in the store"""
    left: list[RunSpec] = field(default_factory=list)
    """runs that are not done: the budget left them for the next call, another process is at them, or the device has too
    little memory"""
    failed: dict[str, str] = field(default_factory=dict)
    """runs that diverged, by name, with what was said, now or before"""
    out_of_memory: list[str] = field(default_factory=list)
    """the names of those that are left since the device had too little memory for them"""


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

    Where the store has the same training under another spec, which differs in what the method does not use, a copy is
    kept under the spec that is asked for.

    With a budget, a run that is not expected to fit is left for the next call. A run that takes longer than expected
    stops at a checkpoint, and the next call carries on from there. The first run always starts, so that every call
    makes progress. A run that diverges is stored as such, and the others go on; `again` reruns those that diverged
    before. A run for which the device has too little memory is left, and the others go on. A run that another process
    is at is left to it, so that several can share a store; what that process has finished by the end of this call is
    among the results.

    >>> import tempfile
    >>> spec = RunSpec("digits", "map", 0.1, model="mlp", epochs=1, precision="fp32", linearised=False)
    >>> store = Store(tempfile.mkdtemp())
    >>> [run_grid([spec], store).num_computed for _ in range(2)]
    [1, 0]
    """
    runs = KnownRuns(store, again)
    check_data(specs, store, runs)
    shown = GridProgress(quiet=True) if progress is None else progress
    grid = _Grid(specs, store, runs, torch.device(device), budget_s, again, shown, clock)
    shown.begin(len(specs), len(grid.known))
    try:
        grid.run()
    finally:
        shown.end()
    return grid.outcome()


class _Grid:
    """What a call of `run_grid` knows, and how far it is."""

    def __init__(
        self,
        specs: Sequence[RunSpec],
        store: Store,
        runs: KnownRuns,
        device: torch.device,
        budget_s: float | None,
        again: bool,
        shown: GridProgress,
        clock: Callable[[], float],
    ) -> None:
        self.specs, self.store, self.device, self.again = specs, store, device, again
        self.runs = runs
        self.shown, self.clock = shown, clock
        self.names = names(specs)
        self.deadline = None if budget_s is None else clock() + budget_s
        self.known = {spec: runs.keep(found) for spec in specs if (found := runs.find(spec)) is not None}
        for spec, result in self.known.items():
            if result.failure is None:  # else the checkpoints are those of a rerun, to be carried on
                _clean(spec, store)
        self.expected = Expectation(runs.results, str(device))
        self.num_computed = 0
        self.out_of_memory: list[str] = []

    def run(self) -> None:
        """Go through the runs that are not known, until the budget ends."""
        pending = [spec for spec in self.specs if spec not in self.known]
        for number, spec in enumerate(pending):
            if not self._fits(spec):
                return
            with claim(spec, self.store) as mine:
                if not mine:
                    self.shown.say(f"{self.names[spec]}: another process is at it, so it is left")
                    continue
                try:
                    self._run_one(spec, pending[number + 1 :])
                except OutOfTime:
                    return
                except torch.OutOfMemoryError as error:
                    self.out_of_memory.append(self.names[spec])
                    self.shown.say(f"{self.names[spec]}: out of memory, so it is left ({str(error).splitlines()[0]})")
            if self.out_of_memory and self.device.type == "cuda":
                torch.cuda.empty_cache()  # what the run that failed has held

    def outcome(self) -> Outcome:
        """Return what is known now, also what other processes have finished meanwhile."""
        for spec in self.specs:
            if spec not in self.known and (found := self.runs.find_now(spec)) is not None:
                self.known[spec] = self.runs.keep(found)
        results = [self.known[spec] for spec in self.specs if spec in self.known]
        return Outcome(
            results,
            self.num_computed,
            left=[spec for spec in self.specs if spec not in self.known],
            failed={self.names[run.spec]: run.failure for run in results if run.failure is not None},
            out_of_memory=self.out_of_memory,
        )

    def _left_s(self) -> float | None:
        return None if self.deadline is None else self.deadline - self.clock()

    def _fits(self, spec: RunSpec) -> bool:
        left_s = self._left_s()
        if left_s is None:
            return True
        needed = self.expected.seconds(spec, epochs_done(spec, self.store))
        too_long = needed is not None and needed > left_s
        return left_s > 0 and not (too_long and self.num_computed)

    def _limit_s(self, spec: RunSpec) -> float | None:
        """Return the time that a training may take: half of what is left, or more if its evaluation needs less."""
        left_s = self._left_s()
        return None if left_s is None else max(left_s - self.expected.evaluation(spec), left_s / 2)

    def _run_one(self, spec: RunSpec, others: Sequence[RunSpec]) -> None:
        """Do a run that is this process's, unless another one has done it just before."""
        took, known = None, self.runs.find_now(spec)
        if known is not None:
            self.runs.keep(known)
            same = known.origin.get(SAME_RUN)
            words = "by another process" if same is None else f"the same training as {same}"
        else:
            self.shown.begin_run(self.names[spec], lambda share: self.expected.sum(spec, share, others))
            done, start = epochs_done(spec, self.store), self.clock()
            try:
                known = run(
                    spec,
                    self.store,
                    again=self.again,
                    device=self.device,
                    progress=self.shown,
                    time_limit_s=self._limit_s(spec),
                    clock=self.clock,
                )
                took, words = self.clock() - start, _told(known)
                self.expected.learn_from(known, took, done)
            except NonFiniteError as error:
                known = _diverged(spec, self.store, str(self.device), self.clock() - start, str(error))
                words = f"diverged: {error}"
            self.runs.learn(known)
            self.num_computed += 1
        self.known[spec] = known
        self.shown.end_of_run(self.names[spec], took, self.expected.sum(spec, 1.0, others), words)


def _clean(spec: RunSpec, store: Store) -> None:
    """Delete what a kill between result and checkpoints has left."""
    if any((store.folder / RUNNING).glob(f"{spec.key()}*")):
        with claim(spec, store) as mine:
            if mine:
                forget(spec, store)


def _diverged(spec: RunSpec, store: Store, device: str, seconds: float, why: str) -> Result:
    """Store a run that diverged, as a trial like others: the same command would only diverge again."""
    history = epochs_told(spec, store)
    trained_s = max(seconds, sum(row["seconds"] for row in history))  # this call's, or with those of calls before
    result = Result(spec, {}, {}, origin(device) | {"device": device}, trained_s, history, failure=why)
    forget(spec, store)  # first, since a rerun that is stopped leaves checkpoints beside a failure
    store.put(result)
    return result


def check_data(specs: Sequence[RunSpec], store: Store, runs: KnownRuns) -> None:
    """Refuse a grid before anything runs if data are missing, damaged or too few; runs that the store has need none."""
    pending = [spec for spec in specs if runs.find(spec) is None]
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
        num_images = len(load(data).train_labels)  # read whole, since later it would stop the grid midway
        for validation, num_train in {(spec.validation, spec.num_train) for spec in pending if spec.data == data}:
            check_held_out(data, num_images, validation)
            check_num_train(data, num_images, validation, num_train)


def _told(result: Result) -> str:
    if result.failure is not None:
        return f"diverged: {result.failure}"
    scores = result.validation.get("mean") or result.test["mean"]
    where = "held-out" if result.validation else "test"
    return f"{where} NLL {scores['nll']:.4f}, {result.seconds_per_epoch:.2g} s an epoch"
