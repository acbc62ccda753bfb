"""A run that diverged is run again without losing what is known of it, and a rerun that is stopped is carried on."""

import dataclasses
import errno
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from varlap.errors import CheckpointError, NonFiniteError
from varlap.experiments import Result, RunSpec, Store, run_grid
from varlap.experiments.grid_progress import GridProgress
from varlap.experiments.run import RUNNING, epochs_done, run
from varlap.training.records import Records

SPEC = RunSpec(
    "digits", "map", 0.1, model="mlp", epochs=3, precision="fp32", lr=3e-3, validation=0.2, num_train=100, batch_size=50
)
SPEC = dataclasses.replace(SPEC, linearised=False)


def test_a_rerun_that_is_stopped_keeps_the_old_failure_and_is_carried_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    store = Store(tmp_path)
    store.put(Result(SPEC, {}, {}, {}, 1.0, failure="the loss is NaN"))
    outcome = run_grid([SPEC], store, again=True, budget_s=1e-6, clock=lambda: 0.0)  # ends after a step
    assert outcome.left == [SPEC]
    known = store.get(SPEC)
    assert known is not None
    assert known.failure == "the loss is NaN"
    assert run_grid([SPEC], store).failed  # nor does a call without `again` touch what the rerun has done
    assert list((tmp_path / RUNNING / SPEC.key() / "checkpoints").iterdir())
    with caplog.at_level(logging.INFO, "varlap.training.loop"):
        outcome = run_grid([SPEC], store, again=True)
    assert "carrying on at step 1" in caplog.text
    assert (outcome.num_computed, outcome.failed, outcome.results) == (1, {}, [store.get(SPEC)])
    assert not (tmp_path / RUNNING).exists()


def test_a_diverged_run_leaves_no_checkpoints_that_a_rerun_would_begin_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    put, left = Store.put, []

    def put_and_look(store: Store, result: Result) -> None:
        left.append((result.failure is not None, (store.folder / RUNNING / result.spec.key()).exists()))
        put(store, result)

    monkeypatch.setattr(Store, "put", put_and_look)
    for lr in (1e36, 100.0):  # NaN, and far worse than a guess
        run_grid([dataclasses.replace(SPEC, lr=lr)], Store(tmp_path))
    assert left == [(True, False), (True, False)]


def test_a_diverged_run_keeps_its_curve_and_the_seconds_of_all_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def diverge_in_the_third_epoch(*_: object, out: Path, **__: object):
        records = Records(out / "metrics.jsonl")
        for epoch in range(2):
            records.append({"epoch": epoch, "step": epoch, "elbo": -0.5 / (1 + epoch), "seconds": 100.0})
        raise NonFiniteError("step 5: the loss is NaN")

    monkeypatch.setattr("varlap.experiments.run.fit", diverge_in_the_third_epoch)
    run_grid([SPEC], Store(tmp_path))
    found = Store(tmp_path).get(SPEC)
    assert found is not None
    assert (found.failure, found.seconds) == ("step 5: the loss is NaN", 200.0)
    assert found.history == tuple({"epoch": e, "elbo": -0.5 / (1 + e), "seconds": 100.0} for e in range(2))


def test_a_run_that_diverges_at_once_has_the_seconds_of_its_call(tmp_path: Path):
    (found,) = run_grid([dataclasses.replace(SPEC, lr=1e36)], Store(tmp_path)).results
    assert found.failure is not None
    assert found.seconds > 0


def test_a_run_that_is_out_of_memory_is_left_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run_or_fail(spec: RunSpec, store: Store, **options: Any) -> Result:
        if spec.beta == 0.2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore advice")
        return run(spec, store, **options)

    specs, told = [dataclasses.replace(SPEC, beta=beta, epochs=1) for beta in (0.2, 0.1)], io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr("varlap.experiments.grid_run.run", run_or_fail)
        outcome = run_grid(specs, Store(tmp_path), progress=GridProgress(stream=told))
    assert (outcome.left, outcome.num_computed, outcome.failed) == (specs[:1], 1, {})
    assert outcome.out_of_memory == ["digits map β 0.2"]
    assert "digits map β 0.2: out of memory, so it is left (CUDA out of memory. Tried to" in told.getvalue()
    assert run_grid(specs, Store(tmp_path)).num_computed == 1


def test_a_full_disk_is_named_and_the_training_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object):
        raise OSError(errno.ENOSPC, "No space left on device")

    store = Store(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("varlap.experiments.store.replace_file", full)
        with pytest.raises(CheckpointError) as caught:
            run_grid([SPEC], store)
    assert str(caught.value) == (
        f"the result {store._path(SPEC)} cannot be written (No space left on device); make room there, and the same "
        "command carries on"
    )
    assert epochs_done(SPEC, store) == SPEC.epochs
    assert run_grid([SPEC], store).num_computed == 1
