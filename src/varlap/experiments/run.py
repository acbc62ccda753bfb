"""One run of an experiment, from data to result; a run that was stopped is carried on."""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from varlap.curvature import DEFAULT, Fisher
from varlap.experiments.augmentation import augmentation
from varlap.experiments.evaluation import origin
from varlap.experiments.image_task import ImageTask
from varlap.experiments.outside import partner
from varlap.experiments.spec import WARMUP_OF_CLOSED_FORM, RunSpec
from varlap.experiments.store import Result, Store
from varlap.experiments.ways import evaluate_ways
from varlap.files import locked
from varlap.objectives import MAP, VI, VL, Objective
from varlap.posterior import BNN, OneScalePrior
from varlap.training import fit
from varlap.training.records import Records

log = logging.getLogger(__name__)

RUNNING = "running"
"""The folder in a store in which unfinished runs keep their checkpoints."""
SAVE_PAUSE_S = 30.0  # a checkpoint of PreactResNet-18 takes as long as an epoch on a fast GPU
NUM_VALIDATIONS = 50  # of a long training: more would tell no more
USUAL_BATCH = 128  # whose curvature the library's default is about
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
    task = _task(spec.data, spec.model, spec.validation, spec.num_train, spec.width)
    bnn = _network(spec, task).to(device)
    folder = store.folder / RUNNING / spec.key()
    history = fit(
        bnn,
        _objective(spec, len(task.training[1])),
        task.training,
        validation=task.held_out,
        augment=augmentation(task.images, task.normalise) if spec.augment else None,
        out=folder,
        label=spec.stated(),
        progress=progress,
        time_limit_s=None if time_limit_s is None else time_limit_s - (clock() - began),
        epochs=spec.epochs,
        batch_size=spec.batch_size,
        lr=spec.lr,
        schedule=spec.schedule,
        optimizer=spec.optimizer,
        momentum=spec.momentum,
        warmup_epochs=spec.warmup * spec.epochs,
        clip_norm=spec.clip_norm,
        log_sigma_lr_multiplier=spec.log_sigma_lr_multiplier,
        precision=spec.precision,
        seed=spec.seed,
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
    held = _held(path)
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


@functools.lru_cache(maxsize=1)  # the runs of a grid share their data, and it takes a while to read
def _task(data: str, model: str, validation: float, num_train: int | None, width: int) -> ImageTask:
    """Return the task of a run. The same images are held out whatever the run's seed is, so that runs compare."""
    return ImageTask(data, model, validation, seed=0, num_train=num_train, width=width)


def _network(spec: RunSpec, task: ImageTask) -> BNN:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)  # all methods start from the same weights
        network = task.network()
    return BNN(network, prior=None if spec.prior_scale is None else OneScalePrior(spec.prior_scale))


def _objective(spec: RunSpec, num_data: int) -> Objective:
    usual = WARMUP_OF_CLOSED_FORM if (spec.method, spec.variances) == ("vl", "closed-form") else 0.0
    rising = usual if spec.beta_warmup is None else spec.beta_warmup
    num_steps = spec.epochs * math.ceil(num_data / spec.batch_size)
    told: dict[str, Any] = {"seed": spec.seed, "beta_warmup_steps": round(rising * num_steps)}
    if spec.method == "vl":
        return VL(num_data, spec.beta, curvature=_curvature(spec), variances=spec.variances, **told)
    kind = {"map": MAP, "vi": VI}[spec.method]
    return kind(num_data, spec.beta, **told)


def _curvature(spec: RunSpec) -> Fisher:
    """Return the paper's curvature, or the library's: of a sixteenth of the images, whatever the batch size is.

    More at a time would hardly be more precise: S ḡ² has the noise of one squared gradient, whatever S is.
    """
    if spec.curvature == "exact":
        return Fisher(gradient=spec.gradient)
    most = round(DEFAULT.every / DEFAULT.fraction)  # steps, of which then one is evaluated as a whole
    every = min(most, max(1, round(DEFAULT.every * USUAL_BATCH / spec.batch_size)))
    return dataclasses.replace(DEFAULT, every=every, fraction=every / most, gradient=spec.gradient)


def _kept(row: Mapping[str, float]) -> dict[str, float]:
    return {name: row[name] for name in KEPT if name in row}
