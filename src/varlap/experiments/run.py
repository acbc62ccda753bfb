"""One run of an experiment, from data to result; a run that was stopped is carried on."""

import contextlib
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from varlap.errors import CheckpointError
from varlap.experiments.augmentation import augmentation
from varlap.experiments.evaluation import origin
from varlap.experiments.outside import partner
from varlap.experiments.spec import RunSpec
from varlap.experiments.store import Result, Store
from varlap.experiments.training_setup import network_of, objective_of, settings_of, task_of
from varlap.experiments.ways import evaluate_ways
from varlap.files import locked
from varlap.training import fit
from varlap.training.records import Records

log = logging.getLogger(__name__)

RUNNING = "running"
"""The folder in a store in which unfinished runs keep their checkpoints."""
SAVE_PAUSE_S = 30.0  # a checkpoint of PreactResNet-18 takes as long as an epoch on a fast GPU
SHORTEST_S = 1e-6  # a limit that was over before the training began lets it take a step
NUM_VALIDATIONS = 50  # of a long training: more would tell no more
KEPT = (
    *("epoch", "elbo", "log_likelihood", "curvature", "kl", "lr", "log_sigma_over_s_median", "sigma_over_s_max"),
    *("share_at_prior", "validation_nll", "validation_accuracy", "validation_ece", "seconds", "memory_mb"),
)
"""What is kept of each epoch."""


def run(
    spec: RunSpec,
    store: Store,
    *,
    again: bool = False,
    device: torch.device | str = "cpu",
    progress: Any = "none",
    time_limit_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """Return the result of a spec: from the store, or by training and evaluating, and then it is in the store.

    Args:
        spec: what to run.
        store: where results are. While a run trains, its checkpoints are in the store's folder `running`.
        again: train also where the store has a run that diverged, which stays until the new result replaces it.
        device: where to compute.
        progress: of the training, as in `varlap.fit`.
        time_limit_s: stop the training with `varlap.errors.OutOfTime` once so many seconds are over, the loading of the
            data included; the same call carries on.
        clock: seconds that only grow.

    >>> import tempfile
    >>> spec = RunSpec("digits", "map", 0.1, model="mlp", epochs=1, precision="fp32", linearised=False)
    >>> store = Store(tempfile.mkdtemp())
    >>> result = run(spec, store)
    >>> sorted(result.test), result.ood, [path.suffix for path in store.folder.iterdir()]
    (['mean', 'scaled'], 'letters', ['.json'])
    """
    known = store.get(spec)
    if known is not None and not (again and known.failure is not None):
        return known
    began = clock()
    task = task_of(spec)
    bnn = network_of(spec, task).to(device)
    folder = store.folder / RUNNING / spec.key()
    history = fit(
        bnn,
        objective_of(spec, len(task.training[1])),
        task.training,
        validation=task.held_out,
        augment=augmentation(task.images, task.normalise) if spec.augment else None,
        out=folder,
        label=spec.stated(),
        progress=progress,
        time_limit_s=None if time_limit_s is None else max(time_limit_s - (clock() - began), SHORTEST_S),
        **settings_of(spec),
        validate_every=math.ceil(spec.epochs / NUM_VALIDATIONS),
        save_pause_s=SAVE_PAUSE_S,
    )
    found = partner(task.images)
    trained = clock()
    scores = evaluate_ways(bnn, spec, task, None if found is None else task.normalise(found[1]))
    result = Result(
        spec,
        scores.test,
        scores.validation,
        origin(bnn.device) | {"device": str(bnn.device), "num_threads": torch.get_num_threads()},
        seconds=sum(row["seconds"] for row in history.epochs),
        history=tuple(_kept(row) for row in history.epochs),
        ood=None if found is None else found[0],
        evaluation_seconds=clock() - trained,
    )
    if result.failure is not None:  # else a rerun would begin at the end of this one
        forget(spec, store)
    store.put(result)
    forget(spec, store)
    return store.get(spec) or result  # as every later reader sees it, to the same digits


def epochs_done(spec: RunSpec, store: Store) -> int:
    """Return how many epochs of an unfinished run its folder tells of.

    >>> epochs_done(RunSpec("digits", "map", 0.1), Store("no-such-folder"))
    0
    """
    with contextlib.suppress(OSError):
        return (store.folder / RUNNING / spec.key() / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def epochs_told(spec: RunSpec, store: Store) -> tuple[dict[str, float], ...]:
    """Return what the folder of an unfinished run tells of each epoch.

    >>> epochs_told(RunSpec("digits", "map", 0.1), Store("no-such-folder"))
    ()
    """
    with contextlib.suppress(OSError):  # also a damaged line
        return tuple(map(_kept, Records(store.folder / RUNNING / spec.key() / "metrics.jsonl").rows()))
    return ()


def forget(spec: RunSpec, store: Store) -> None:
    """Delete the checkpoints of a run, which its result replaces."""
    shutil.rmtree(store.folder / RUNNING / spec.key(), ignore_errors=True)
    with contextlib.suppress(OSError):  # others are running, or there was none
        (store.folder / RUNNING).rmdir()


@contextlib.contextmanager
def claim(spec: RunSpec, store: Store) -> Iterator[bool]:
    """Hold a run from its training to its result, or tell that another process does; a claim ends with its process.

    >>> import tempfile
    >>> spec, store = RunSpec("digits", "map", 0.1), Store(tempfile.mkdtemp())
    >>> with claim(spec, store) as mine, claim(spec, store) as others:
    ...     mine, others
    (True, False)
    >>> list(store.folder.iterdir())
    []
    """
    path = store.folder / RUNNING / f"{spec.key()}.lock"
    try:
        held = _held(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror or error}); choose another folder") from error
    try:
        yield held is not None
    finally:
        if held is not None:
            with contextlib.suppress(OSError):  # Windows deletes no open file
                path.unlink()
            held.close()
            with contextlib.suppress(OSError):
                path.parent.rmdir()


def _held(path: Path) -> BinaryIO | None:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as unless_held, contextlib.suppress(FileNotFoundError):
            file = locked(path)
            if file is None:
                return None
            unless_held.enter_context(file)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                unless_held.pop_all()
                return file
        # Its holder has just deleted the file or the empty folder, and another one may hold what replaced it.


def _kept(row: Mapping[str, float]) -> dict[str, float]:
    return {name: row[name] for name in KEPT if name in row}
