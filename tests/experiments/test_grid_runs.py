"""A grid computes nothing twice, keeps its budget, and outlives a failure."""

import dataclasses
import importlib
import io
import math
import os
from pathlib import Path

import numpy as np
import pytest
from small_runs import QUICK, Clocked, grid_by_its_clock

from made_results import made_result
from varlap.errors import ConfigError, DataError, OutOfTime
from varlap.experiments import ImageTask, Result, RunSpec, Store, run_grid
from varlap.experiments.expectation import Expectation
from varlap.experiments.grid_progress import GridProgress
from varlap.experiments.run import RUNNING

# -- a grid ----------------------------------------------------------------------------------------------------------


def test_a_grid_computes_nothing_twice(tmp_path: Path):
    store = Store(tmp_path)
    specs = [dataclasses.replace(QUICK, beta=beta, epochs=1) for beta in (0.01, 0.1)]
    first = run_grid(specs[:1], store)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    left_by_a_kill = tmp_path / RUNNING / specs[0].key()
    left_by_a_kill.mkdir(parents=True)
    second = run_grid(specs, store)
    assert not left_by_a_kill.exists()
    assert (first.num_computed, second.num_computed, len(second.results)) == (1, 1, 2)
    assert run_grid(specs, store).num_computed == 0
    assert all((tmp_path / name).stat().st_mtime_ns == time for name, time in before.items())


def test_a_run_that_is_not_expected_to_fit_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clocked = Clocked({0.01: 40.0, 0.03: 40.0, 0.1: 40.0})
    outcome = grid_by_its_clock(tmp_path, monkeypatch, clocked, budget_s=100.0)
    assert clocked.limits == [100.0, 60.0]
    assert [spec.beta for spec in outcome.left] == [0.1]
    assert clocked.now == 80.0


def test_a_run_that_takes_longer_than_the_budget_is_stopped_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    outcome = grid_by_its_clock(tmp_path, monkeypatch, Clocked({0.01: 40.0, 0.03: 90.0, 0.1: 1.0}), budget_s=100.0)
    assert [spec.beta for spec in outcome.left] == [0.03, 0.1]
    assert outcome.num_computed == 1


def test_the_first_run_is_started_whatever_is_expected_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    grid_by_its_clock(tmp_path, monkeypatch, Clocked({0.01: 40.0}), budget_s=None)
    clocked = Clocked({0.01: 40.0, 0.03: 40.0})
    assert grid_by_its_clock(tmp_path, monkeypatch, clocked, budget_s=5.0).left
    assert clocked.limits == [5.0]


def test_a_run_that_diverges_is_stored_as_such_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    betas = {0.01: 1.0, 0.1: 1.0}
    outcome = grid_by_its_clock(tmp_path, monkeypatch, Clocked(betas, fails=0.01), budget_s=None)
    assert outcome.failed == {"digits map β 0.01": "step 3: the loss is NaN"}
    assert outcome.num_computed == 2
    assert [(run.spec.beta, run.failure) for run in outcome.results] == [(0.01, "step 3: the loss is NaN"), (0.1, None)]
    assert [run.failure for run in Store(tmp_path)] == ["step 3: the loss is NaN", None]
    assert next(run.nll("validation", "mean") for run in Store(tmp_path)) == float("inf")

    clocked = Clocked(betas)
    outcome = grid_by_its_clock(tmp_path, monkeypatch, clocked, budget_s=None)
    assert (clocked.limits, outcome.num_computed) == ([], 0)  # nothing was run
    assert outcome.failed == {"digits map β 0.01": "step 3: the loss is NaN"}

    outcome = grid_by_its_clock(tmp_path, monkeypatch, clocked, budget_s=None, again=True)
    assert (len(clocked.limits), outcome.num_computed, outcome.failed) == (1, 1, {})
    assert [run.failure for run in Store(tmp_path)] == [None, None]


def test_failures_of_runs_that_differ_in_any_setting_are_told_apart(tmp_path: Path):
    store = Store(tmp_path)
    specs = [dataclasses.replace(QUICK, lr=lr, clip_norm=clip) for lr in (1e-3, 1e-2) for clip in (None, 1.0)]
    for number, spec in enumerate(specs):
        store.put(Result(spec, {}, {}, {}, 1.0, failure=f"failure {number}"))
    assert run_grid(specs, store).failed == {
        "digits map β 0.1 lr 0.001 clip_norm None": "failure 0",
        "digits map β 0.1 lr 0.001 clip_norm 1": "failure 1",
        "digits map β 0.1 lr 0.01 clip_norm None": "failure 2",
        "digits map β 0.1 lr 0.01 clip_norm 1": "failure 3",
    }


def test_a_training_that_diverges_leaves_a_failure_and_no_checkpoints(tmp_path: Path):
    store, spec = Store(tmp_path), dataclasses.replace(QUICK, lr=1e36)
    outcome = run_grid([spec], store)
    found = store.get(spec)
    assert found is not None
    assert found.failure
    assert list(outcome.failed.values()) == [found.failure]
    assert "device" in found.origin
    assert not (tmp_path / RUNNING).exists()


def test_a_network_far_worse_than_a_guess_has_diverged_though_all_its_numbers_are_finite(tmp_path: Path):
    store, spec, told = Store(tmp_path), dataclasses.replace(QUICK, lr=100.0), io.StringIO()
    outcome = run_grid([spec], store, progress=GridProgress(stream=told))
    found = store.get(spec)
    assert found is not None
    nll = found.validation["mean"]["nll"]
    assert math.isfinite(nll)
    why = f"its mean network has an NLL of {nll:.3g} on held-out images, far worse than a guess"
    assert list(outcome.failed.values()) == [found.failure] == [why]
    assert f"diverged: {why}" in told.getvalue()
    assert found.nll("validation", "mean") == found.nll("test", "scaled") == math.inf
    assert run_grid([spec], store).num_computed == 0
    assert run_grid([spec], store, again=True).num_computed == 1


def test_a_result_of_a_network_far_worse_than_a_guess_has_diverged_whatever_its_file_says(tmp_path: Path):
    made = made_result("vl", 0.1)
    worse = {"mean": dict(made.validation["mean"]) | {"nll": 50.1}}
    found = dataclasses.replace(made, validation=worse)
    assert found.failure == "its mean network has an NLL of 50.1 on held-out images, far worse than a guess"
    without = dataclasses.replace(made, validation={}, test=worse)
    assert without.failure == "its mean network has an NLL of 50.1 on test images, far worse than a guess"
    store = Store(tmp_path)
    store.put(found)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text().replace(f'"failure": "{found.failure}"', '"failure": null'))
    assert '"failure": null' in path.read_text()
    assert [result.failure for result in store] == [found.failure]


# -- times -----------------------------------------------------------------------------------------------------------


def test_times_are_expected_by_method_and_device():
    results = [made_result(method, 0.1, num_epochs=10) for method in ("map", "vl")]
    expected = Expectation(results, "cuda")
    assert expected.seconds(RunSpec("cifar10", "vl", 1.0, epochs=100)) == 600.0
    assert expected.seconds(RunSpec("cifar10", "vi", 1.0, epochs=100)) == 400.0  # of both, on average
    assert expected.seconds(RunSpec("svhn", "vl", 1.0)) is None
    assert Expectation(results, "cpu").seconds(RunSpec("cifar10", "vl", 1.0)) is None


def test_the_time_to_evaluate_is_expected_too():
    def result(linearised: bool, seconds: float) -> Result:
        made = made_result("vl", 0.1, num_epochs=10, linearised=linearised)
        return dataclasses.replace(made, evaluation_seconds=seconds)

    expected = Expectation([result(True, 50.0), result(False, 3.0)], "cuda")
    spec = RunSpec("cifar10", "vl", 1.0, epochs=10)
    assert expected.seconds(spec) == 10 * 6.0 + 50.0
    assert expected.seconds(dataclasses.replace(spec, linearised=False)) == 10 * 6.0 + 3.0
    assert expected.seconds(spec, epochs_done=10) == 50.0
    expected.learn_from(dataclasses.replace(result(True, 70.0), spec=spec), took_s=130.0, epochs_before=0)
    assert expected.seconds(spec) == 60.0 + 60.0
    expected.learn_from(dataclasses.replace(result(True, 60.0), spec=spec), took_s=60.0, epochs_before=10)
    assert expected.seconds(spec) == 60.0 + 60.0  # of which no epoch was seen


def test_a_run_whose_evaluation_would_not_fit_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Evaluated(Clocked):
        """Of every run 30 seconds are its evaluation."""

        def __call__(self, spec: RunSpec, store: Store, **options) -> Result:
            return dataclasses.replace(super().__call__(spec, store, **options), evaluation_seconds=30.0)

    clocked = Evaluated({0.01: 40.0, 0.1: 31.0})
    monkeypatch.setattr("varlap.experiments.grid_run.run", clocked)
    specs = [RunSpec("digits", "map", beta, epochs=epochs) for beta, epochs in ((0.01, 10), (0.1, 1))]
    outcome = run_grid(specs, Store(tmp_path), budget_s=60.0, clock=lambda: clocked.now)
    assert [spec.beta for spec in outcome.left] == [0.1]  # of 20 s, its epoch takes 1 and its evaluation 30


@pytest.mark.parametrize(("expected_s", "limit_s"), [(30.0, 100.0 - 30.0), (80.0, 100.0 / 2), (None, 100.0)])
def test_a_training_leaves_time_for_its_evaluation_and_for_what_was_loaded_before_it(
    expected_s: float | None, limit_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now, limits, store = [0.0], [], Store(tmp_path)
    known = dataclasses.replace(QUICK, beta=0.2)
    made = Result(known, {"mean": {"nll": 0.3}}, {}, {"device": "cpu"}, 3.0, ({"seconds": 1.0},))
    store.put(dataclasses.replace(made, evaluation_seconds=expected_s))

    def load_slowly(*of_the_task: object) -> ImageTask:
        now[0] += 7.0
        return original(*of_the_task)

    def out_of_time(*_: object, time_limit_s: float, **__: object):
        limits.append(time_limit_s)
        raise OutOfTime(3, saved=True)

    original = importlib.import_module("varlap.experiments.run").task_of
    monkeypatch.setattr("varlap.experiments.run.task_of", load_slowly)
    monkeypatch.setattr("varlap.experiments.run.fit", out_of_time)
    assert run_grid([QUICK], store, budget_s=100.0, clock=lambda: now[0]).left == [QUICK]
    assert limits == [limit_s - 7.0]


def test_data_that_are_not_there_are_named_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VARLAP_DATA", str(tmp_path))
    specs = [RunSpec(data, "map", 0.1) for data in ("digits", "svhn", "mnist")]
    with pytest.raises(ConfigError) as caught:
        run_grid(specs, Store(tmp_path / "store"))
    assert str(caught.value) == (
        f"svhn, mnist: no such data in {tmp_path}, needed by 2 of 3 runs. Fetch them with `varlap data get svhn "
        "mnist`, put a NAME.npz of each there, or set VARLAP_DATA to the folder that holds them, or run what is there: "
        "--data digits"
    )
    assert not os.path.exists(tmp_path / "store")


def test_more_training_images_than_a_later_data_set_has_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VARLAP_DATA", str(tmp_path))
    images, labels = np.zeros((50, 8, 8), np.uint8), np.zeros(50, int)
    np.savez(tmp_path / "mnist", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    specs = [RunSpec(data, "map", 0.1, num_train=46) for data in ("digits", "mnist")]
    with pytest.raises(ConfigError, match=r"^num_train = 46, but mnist has 45 images to train on$"):
        run_grid(specs, Store(tmp_path / "store"))
    assert not os.path.exists(tmp_path / "store")
    with pytest.raises(ConfigError, match=r"^num_train = 1294, but digits has 1293 images to train on$"):
        run_grid([RunSpec("digits", "map", 0.1, num_train=1294)], Store(tmp_path / "store"))


def test_a_later_data_set_that_is_damaged_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VARLAP_DATA", str(tmp_path))
    images, labels = np.zeros((50, 8, 8), np.uint8), np.zeros(50, int)
    np.savez(tmp_path / "mnist", train_images=images, train_labels=labels, test_images=images, test_labels=labels[1:])
    specs = [RunSpec(data, "map", 0.1) for data in ("digits", "mnist")]
    with pytest.raises(DataError, match=r"mnist.npz: 50 test_images but 49 test_labels; they must agree$"):
        run_grid(specs, Store(tmp_path / "store"))
    assert not os.path.exists(tmp_path / "store")


def test_a_held_out_part_that_is_no_image_is_refused_before_anything_runs(tmp_path: Path):
    specs = [RunSpec("digits", "map", 0.1, validation=part) for part in (0.1, 0.0003)]
    with pytest.raises(ConfigError, match=r"^validation = 0.0003 of 1437 images of digits is none; hold out more"):
        run_grid(specs, Store(tmp_path / "store"))
    assert not os.path.exists(tmp_path / "store")


def test_a_grid_that_the_store_has_needs_no_data_unless_a_diverged_run_is_to_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VARLAP_DATA", str(tmp_path))
    store, specs = Store(tmp_path / "store"), [RunSpec("svhn", "map", beta) for beta in (0.1, 1.0)]
    store.put(made_result("map", 0.1, data="svhn", epochs=200))
    with pytest.raises(
        ConfigError, match=r"svhn: no such data in .*, needed by 1 of 2 runs; the store has 1"
    ) as caught:
        run_grid(specs, store)
    assert f"`varlap report {store.folder}` writes the page of what is there" in str(caught.value)
    store.put(Result(specs[1], {}, {}, {}, 1.0, failure="the loss is NaN"))
    outcome = run_grid(specs, store)
    assert (len(outcome.results), outcome.num_computed, outcome.left) == (2, 0, [])
    with pytest.raises(ConfigError, match="svhn: no such data in"):
        run_grid(specs, store, again=True)
