"""A run that diverged is run again without losing what is known of it, and a rerun that is stopped is carried on."""

import dataclasses
import logging
from pathlib import Path

import pytest

from varlap.experiments import Result, RunSpec, Store, run_grid
from varlap.experiments.run import RUNNING

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
