"""A run is carried on where it was stopped, a grid computes nothing twice, keeps its budget, and outlives a failure."""

import contextlib
import dataclasses
import importlib
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from made_results import made_result
from varlap.curvature import DEFAULT, Fisher
from varlap.data import ArrayData, Normaliser, load
from varlap.errors import ConfigError, NonFiniteError, OutOfTime
from varlap.experiments import ImageTask, Result, RunSpec, Store, run_grid
from varlap.experiments.augmentation import augmentation
from varlap.experiments.expectation import Expectation
from varlap.experiments.grid import Experiment
from varlap.experiments.grid_progress import GridProgress
from varlap.experiments.outside import partner
from varlap.experiments.run import RUNNING, claim, epochs_done, run
from varlap.experiments.ways import variances_at_an_end
from varlap.files import locked
from varlap.metrics import evaluate
from varlap.objectives import Objective
from varlap.posterior import BNN
from varlap.training import FitSettings

SPEC = RunSpec(
    "digits", "vl", 0.1, model="mlp", epochs=3, precision="fp32", lr=3e-3, validation=0.2, num_train=300, batch_size=64
)
QUICK = dataclasses.replace(SPEC, method="map", linearised=False)


class Watched:
    """A progress that raises in one step, and knows where the training began."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at, self.steps = stop_at, []

    def start(self, *, num_epochs: int, steps_per_epoch: int | None, first_step: int) -> None:
        pass

    def step(self, number: int, num_items: int, values: Mapping[str, float] | None) -> None:
        self.steps.append(number)
        if number == self.stop_at:
            raise KeyboardInterrupt

    def epoch(self, row: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


def _without_times(result: Result) -> Result:
    rows = tuple(
        {name: value for name, value in row.items() if name not in ("seconds", "memory_mb")} for row in result.history
    )
    return dataclasses.replace(result, seconds=0.0, evaluation_seconds=None, history=rows)


def test_a_stopped_run_is_carried_on_and_ends_with_the_result_of_one_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("varlap.experiments.run.SAVE_PAUSE_S", 0.0)
    alone = run(SPEC, Store(tmp_path / "alone"))
    store, stopped, carried_on = Store(tmp_path / "stopped"), Watched(stop_at=7), Watched()
    with pytest.raises(KeyboardInterrupt):
        run(SPEC, store, progress=stopped)
    assert epochs_done(SPEC, store) == 1  # 5 steps each
    result = run(SPEC, store, progress=carried_on)
    assert carried_on.steps == list(range(5, 15))
    assert _without_times(result) == _without_times(alone)
    assert not (store.folder / RUNNING).exists()
    assert store.get(SPEC) is not None


def test_a_result_has_every_way_of_its_method_and_its_origin(tmp_path: Path):
    result = run(SPEC, Store(tmp_path))
    assert set(result.test) == set(result.validation) == {"mean", "scaled", "linearised"}
    assert result.ood == "letters"
    assert all("ood_auroc_entropy" in scores for scores in result.test.values())
    assert "temperature" in result.test["scaled"]
    assert result.test["scaled"]["accuracy"] == result.test["mean"]["accuracy"]
    assert result.validation["scaled"]["nll"] <= result.validation["mean"]["nll"]
    assert {"varlap", "torch", "hardware", "date", "device"} <= set(result.origin)
    assert [row["epoch"] for row in result.history] == [0, 1, 2]
    assert {"elbo", "log_likelihood", "curvature", "kl", "seconds", "validation_nll"} <= set(result.history[0])
    vi = run(dataclasses.replace(SPEC, method="vi", validation=0.0), Store(tmp_path))
    assert set(vi.test) == {"mean", "sampled"}
    assert vi.validation == {}


def test_vi_has_a_temperature_of_its_mean_network(tmp_path: Path):
    vi = run(dataclasses.replace(SPEC, method="vi"), Store(tmp_path))
    assert set(vi.test) == set(vi.validation) == {"mean", "sampled", "scaled"}
    assert vi.test["scaled"]["accuracy"] == vi.test["mean"]["accuracy"]
    assert vi.validation["scaled"]["nll"] <= vi.validation["mean"]["nll"]
    assert vi.test["scaled"]["temperature"] == vi.validation["scaled"]["temperature"]


def test_a_way_that_gives_nan_is_left_out_and_the_run_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def nan_by(how: str):
        def evaluated(bnn: BNN, data: tuple, **options: object):
            if options.get("how", "mean") == how and "temperature" not in options:
                raise NonFiniteError("the outputs hold NaN")
            return evaluate(bnn, data, **options)

        return evaluated

    monkeypatch.setattr("varlap.experiments.ways.evaluate", nan_by("sampled"))
    vi = run(dataclasses.replace(SPEC, method="vi"), Store(tmp_path))
    assert set(vi.test) == set(vi.validation) == {"mean", "scaled"}
    monkeypatch.setattr("varlap.experiments.ways.evaluate", nan_by("linearised"))
    assert set(run(dataclasses.replace(SPEC, method="map"), Store(tmp_path)).test) == {"mean", "scaled"}
    monkeypatch.setattr("varlap.experiments.ways.evaluate", nan_by("mean"))
    with pytest.raises(NonFiniteError):
        run(SPEC, Store(tmp_path))


def test_a_training_outlives_a_curvature_that_is_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def laplace(*_: object, **__: object):
        raise NonFiniteError("the Fisher diagonal holds NaN")

    monkeypatch.setattr("varlap.experiments.ways.laplace", laplace)
    kept = run(dataclasses.replace(SPEC, method="map"), Store(tmp_path))
    assert (set(kept.test), kept.failure) == ({"mean", "scaled"}, None)
    by_vl = run(SPEC, Store(tmp_path))  # which has variances of its own
    assert set(by_vl.test) == {"mean", "scaled", "linearised"}
    assert "laplace_beta" not in by_vl.test["linearised"]


def test_a_bar_tells_the_time_left_of_a_first_run_by_its_own_pace(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("varlap.experiments.grid_progress.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    shown = GridProgress(stream=stream)
    shown.begin(num_runs=2, num_done=0)
    shown.begin_run("digits vl β 0.1", lambda share: None)
    shown.start(num_epochs=10, steps_per_epoch=20, first_step=100)  # carried on in the middle
    now[0] = 60.0
    shown.step(119, 128, None)
    shown.end()
    assert "4 min left of this run" in stream.getvalue()  # 20 steps took a minute, and 80 are left


def test_a_log_has_a_line_at_each_tenth_of_a_long_run(monkeypatch: pytest.MonkeyPatch):
    def told(num_epochs: int, seconds: float, first: int = 0, quiet: bool = False) -> list[str]:
        now = [0.0]
        monkeypatch.setattr("varlap.experiments.grid_progress.time.monotonic", lambda: now[0])
        shown = GridProgress(stream=(stream := io.StringIO()), quiet=quiet)
        shown.begin(num_runs=12, num_done=3)
        shown.begin_run("digits vl β 0.1", lambda share: None)
        shown.start(num_epochs=num_epochs, steps_per_epoch=2, first_step=2 * first)
        for epoch in range(first, num_epochs):
            now[0] += seconds
            shown.step(2 * epoch + 1, 128, None)
            shown.epoch({"epoch": epoch})
        shown.close()
        return stream.getvalue().splitlines()

    lines = told(200, 60.0)
    assert lines[0] == "12 runs, 3 stored"
    assert [line.split("  ")[1] for line in lines[1:]] == [f"epoch {tenth}/200" for tenth in range(20, 201, 20)]
    assert lines[1] == "digits vl β 0.1  epoch 20/200  3 h 00 min left of this run"
    assert [line.split("  ")[1] for line in told(3, 60.0)[1:]] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert len(told(200, 60.0, first=100)) == 1 + 5
    assert len(told(10, 0.1)) == 1  # a second needs no lines
    assert told(200, 60.0, quiet=True) == []


def test_variances_of_training_stay_where_held_out_images_prefer_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("varlap.experiments.ways.LAPLACE_BETAS", (1e9,))  # σ = s drowns the network
    vl = run(SPEC, Store(tmp_path))
    assert "laplace_beta" not in vl.test["linearised"]
    assert vl.validation["linearised"]["nll"] < 2.3
    mean = run(dataclasses.replace(SPEC, method="map"), Store(tmp_path))
    assert mean.test["linearised"]["laplace_beta"] == 1e9
    assert variances_at_an_end(mean.test["linearised"])
    assert not variances_at_an_end(vl.test["linearised"])


class Begun(Exception):
    """What a training would have begun with."""


def _begun(spec: RunSpec, store: Store, monkeypatch: pytest.MonkeyPatch) -> dict:
    def begin(bnn: BNN, objective: Objective, training: tuple, *, validation: tuple, **settings: object):
        weights = torch.cat([value.detach().flatten() for value in bnn.parameters()])
        told = {"weights": weights, "training": training[0], "held_out": validation[0]}
        raise Begun(told | {"objective": objective, "settings": settings})

    monkeypatch.setattr("varlap.experiments.run.fit", begin)
    with pytest.raises(Begun) as begun:
        run(spec, store)
    return begun.value.args[0]


def test_what_a_spec_says_of_the_curvature_reaches_the_objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told = {"curvature": "default", "gradient": "whole", "variances": "closed-form"}
    spec = dataclasses.replace(SPEC, method="vl", epochs=10, batch_size=128, **told)
    objective = _begun(spec, Store(tmp_path), monkeypatch)["objective"]
    assert objective.curvature == dataclasses.replace(DEFAULT, gradient="whole")
    num_steps = 10 * math.ceil(objective.num_data / 128)
    assert (objective.variances, objective.beta_warmup_steps) == ("closed-form", round(0.3 * num_steps))
    for method in ("map", "vi", "vl"):
        slow = _begun(dataclasses.replace(spec, method=method, beta_warmup=0.5), Store(tmp_path), monkeypatch)
        assert slow["objective"].beta_warmup_steps == round(0.5 * num_steps)
    papers = _begun(dataclasses.replace(SPEC, method="vl"), Store(tmp_path), monkeypatch)["objective"]
    assert (papers.curvature, papers.variances, papers.beta_warmup_steps) == (Fisher(), "learnt", 0)


def test_what_a_spec_says_of_the_optimizer_reaches_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    by_sgd = Experiment.named("miniature", recipe="sgd", epochs=20).specs[0]
    settings = _begun(by_sgd, Store(tmp_path), monkeypatch)["settings"]
    FitSettings.of({name: value for name, value in settings.items() if name in FitSettings.__dataclass_fields__})
    named = ("optimizer", "momentum", "lr", "clip_norm", "warmup_epochs", "schedule", "batch_size")
    assert [settings[name] for name in named] == ["SGD", 0.9, 0.2, 1.0, 1.0, "cosine", 256]


@pytest.mark.parametrize(
    ("batch_size", "every", "fraction"),
    [(8, 16, 1.0), (64, 8, 0.5), (200, 3, 3 / 16), (256, 2, 0.125), (1024, 1, 1 / 16)],
)
def test_the_default_curvature_is_of_a_sixteenth_of_the_images_in_batches_of_any_size(
    batch_size: int, every: int, fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    spec = dataclasses.replace(SPEC, method="vl", curvature="default", batch_size=batch_size)
    found = _begun(spec, Store(tmp_path), monkeypatch)["objective"].curvature
    assert found == dataclasses.replace(DEFAULT, every=every, fraction=fraction)
    assert found.fraction / found.every == 1 / 16


@pytest.mark.parametrize(("epochs", "every"), [(1, 1), (50, 1), (99, 2), (200, 4)])
def test_a_long_training_is_validated_fifty_times_at_most(
    epochs: int, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = _begun(dataclasses.replace(SPEC, epochs=epochs), Store(tmp_path), monkeypatch)["settings"]
    assert settings["validate_every"] == every


def test_all_methods_start_from_the_same_weights_and_hold_the_same_images_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    specs = [dataclasses.replace(SPEC, method=method, seed=seed) for seed in (0, 1) for method in ("map", "vi", "vl")]
    found = [_begun(spec, Store(tmp_path), monkeypatch) for spec in specs]
    for one in found:
        assert torch.equal(one["held_out"], found[0]["held_out"])
        assert torch.equal(one["training"], found[0]["training"])
    assert len(found[0]["training"]) == 300
    assert all(torch.equal(one["weights"], found[0]["weights"]) for one in found[:3])
    assert all(torch.equal(one["weights"], found[3]["weights"]) for one in found[3:])
    assert not torch.equal(found[0]["weights"], found[3]["weights"])


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


class Clocked:
    """Stands in for `run`: a run takes as long as it says, by a clock of its own."""

    def __init__(self, seconds: Mapping[float, float], fails: float | None = None) -> None:
        self.now, self.seconds, self.fails, self.limits = 0.0, seconds, fails, []

    def __call__(self, spec: RunSpec, store: Store, *, time_limit_s: float | None, **_: object) -> Result:
        self.limits.append(time_limit_s)
        if spec.beta == self.fails:
            raise NonFiniteError("step 3: the loss is NaN")
        if time_limit_s is not None and self.seconds[spec.beta] > time_limit_s:
            self.now += time_limit_s
            raise OutOfTime(3, saved=True)
        self.now += self.seconds[spec.beta]
        result = made_result("map", spec.beta, data="digits", num_epochs=spec.epochs)
        result = dataclasses.replace(result, spec=spec)
        store.put(result)
        return result


def _clocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clocked: Clocked, budget_s: float | None, **options):
    monkeypatch.setattr("varlap.experiments.grid_run.run", clocked)
    specs = [RunSpec("digits", "map", beta, epochs=10) for beta in clocked.seconds]
    return run_grid(specs, Store(tmp_path), budget_s=budget_s, clock=lambda: clocked.now, **options)


def test_a_run_that_is_not_expected_to_fit_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clocked = Clocked({0.01: 40.0, 0.03: 40.0, 0.1: 40.0})
    outcome = _clocked(tmp_path, monkeypatch, clocked, budget_s=100.0)
    assert clocked.limits == [100.0, 60.0]
    assert [spec.beta for spec in outcome.left] == [0.1]
    assert clocked.now == 80.0


def test_a_run_that_takes_longer_than_the_budget_is_stopped_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    outcome = _clocked(tmp_path, monkeypatch, Clocked({0.01: 40.0, 0.03: 90.0, 0.1: 1.0}), budget_s=100.0)
    assert [spec.beta for spec in outcome.left] == [0.03, 0.1]
    assert outcome.num_computed == 1


def test_the_first_run_is_started_whatever_is_expected_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _clocked(tmp_path, monkeypatch, Clocked({0.01: 40.0}), budget_s=None)
    clocked = Clocked({0.01: 40.0, 0.03: 40.0})
    assert _clocked(tmp_path, monkeypatch, clocked, budget_s=5.0).left
    assert clocked.limits == [5.0]


def test_a_run_that_diverges_is_stored_as_such_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    betas = {0.01: 1.0, 0.1: 1.0}
    outcome = _clocked(tmp_path, monkeypatch, Clocked(betas, fails=0.01), budget_s=None)
    assert outcome.failed == {"digits map β 0.01": "step 3: the loss is NaN"}
    assert outcome.num_computed == 2
    assert [(run.spec.beta, run.failure) for run in outcome.results] == [(0.01, "step 3: the loss is NaN"), (0.1, None)]
    assert [run.failure for run in Store(tmp_path)] == ["step 3: the loss is NaN", None]
    assert next(run.nll("validation", "mean") for run in Store(tmp_path)) == float("inf")

    clocked = Clocked(betas)
    outcome = _clocked(tmp_path, monkeypatch, clocked, budget_s=None)
    assert (clocked.limits, outcome.num_computed) == ([], 0)  # nothing was run
    assert outcome.failed == {"digits map β 0.01": "step 3: the loss is NaN"}

    outcome = _clocked(tmp_path, monkeypatch, clocked, budget_s=None, again=True)
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


def test_a_run_that_another_process_is_at_is_left_until_that_process_ends(tmp_path: Path):
    store, other = Store(tmp_path), dataclasses.replace(QUICK, beta=0.2, epochs=1)
    spec = dataclasses.replace(QUICK, epochs=1)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), json.dumps(dataclasses.asdict(spec))],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        outcome = run_grid([spec, other], store)
        assert (outcome.left, outcome.num_computed) == ([spec], 1)
        assert store.get(spec) is None
    finally:
        holder.kill()
        holder.wait(60)
    outcome = run_grid([spec, other], store)
    assert (outcome.left, outcome.num_computed) == ([], 1)
    assert not (tmp_path / RUNNING).exists()


HOLD = """
import json, sys, time
from varlap.experiments import RunSpec, Store
from varlap.experiments.run import claim
with claim(RunSpec(**json.loads(sys.argv[2])), Store(sys.argv[1])) as mine:
    print(mine, flush=True)
    time.sleep(600)
"""


def test_a_run_that_another_process_has_finished_meanwhile_is_not_computed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Shared(Clocked):
        """While the first run is at work, another process does the second."""

        def __call__(self, spec: RunSpec, store: Store, **options) -> Result:
            second = RunSpec("digits", "map", 0.1, epochs=10)
            store.put(dataclasses.replace(made_result("map", 0.1, data="digits", num_epochs=10), spec=second))
            return super().__call__(spec, store, **options)

    outcome = _clocked(tmp_path, monkeypatch, clocked := Shared({0.01: 1.0, 0.1: 1.0}), budget_s=None)
    assert len(clocked.limits) == 1
    assert (outcome.num_computed, len(outcome.results), outcome.left) == (1, 2, [])


def test_a_run_that_another_process_finishes_after_it_was_left_to_it_is_among_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, second, third = (RunSpec("digits", "map", beta, epochs=10) for beta in (0.01, 0.1, 1.0))

    class Shared(Clocked):
        """While the second run is at work, another process ends the first, and begins the third."""

        def __call__(self, spec: RunSpec, store: Store, **options) -> Result:
            store.put(dataclasses.replace(made_result("map", 0.01, data="digits", num_epochs=10), spec=first))
            theirs.close()
            also_theirs.enter_context(claim(third, store))
            return super().__call__(spec, store, **options)

    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as also_theirs:
        assert theirs.enter_context(claim(first, Store(tmp_path)))
        outcome = _clocked(tmp_path, monkeypatch, Shared({0.01: 1.0, 0.1: 1.0, 1.0: 1.0}), budget_s=None)
    assert [result.spec for result in outcome.results] == [first, second]
    assert (outcome.num_computed, outcome.left) == (1, [third])


def test_a_claim_outlives_neither_its_block_nor_a_file_that_was_deleted_under_it(tmp_path: Path):
    store = Store(tmp_path)
    with claim(QUICK, store) as mine:
        assert mine
        with claim(QUICK, store) as again:
            assert not again
        assert (tmp_path / RUNNING / f"{QUICK.key()}.lock").exists()  # who does not have it deletes nothing
        with claim(SPEC, store) as another:
            assert another
    with claim(QUICK, store) as mine:
        assert mine
    assert not (tmp_path / RUNNING).exists()


def test_a_lock_whose_file_was_replaced_is_not_taken_for_the_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened = []

    def delete_before_the_first_lock(path: Path):
        found = locked(path)
        if not opened:
            path.unlink()  # as its former holder does
        opened.append(found)
        return found

    monkeypatch.setattr("varlap.experiments.run.locked", delete_before_the_first_lock)
    with claim(QUICK, Store(tmp_path)) as mine:
        assert mine
        assert [file.closed for file in opened] == [True, False]  # nor is its lock kept
        assert (tmp_path / RUNNING / f"{QUICK.key()}.lock").exists()


def test_a_result_that_another_process_deletes_while_it_is_read_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, results = Store(tmp_path), [made_result("vl", beta) for beta in (0.1, 1.0)]
    for result in results:
        store.put(result)
    original, deleted = Path.read_text, store._path(results[0].spec)

    def read_text(path: Path, *arguments, **options) -> str:
        if path == deleted:
            path.unlink()  # after it was listed
        return original(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert [result.spec for result in store] == [results[1].spec]
    store.put(results[0])
    assert store.get(results[0].spec) is None


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


def _images(name: str) -> tuple[ArrayData, Normaliser]:
    images = torch.zeros(64, 3, 16, 16, dtype=torch.uint8)
    images[..., :4] = 255  # bright on the left
    data = ArrayData(name, images, torch.zeros(64).long(), images, torch.zeros(64).long())
    return data, Normaliser.of(images)


@pytest.mark.parametrize(("name", "mirrored"), [("cifar10", True), ("fashion_mnist", True), ("svhn", False)])
def test_only_images_with_a_left_and_a_right_are_mirrored_and_edges_are_black(name: str, mirrored: bool):
    data, normalise = _images(name)
    x = normalise(data.train_images)
    out = augmentation(data, normalise)(x, torch.Generator().manual_seed(0))
    black, bright = x.min(), x.max()
    assert torch.isclose(out, black).logical_or(torch.isclose(out, bright)).all()  # nothing else comes in
    left = out[..., :8].mean((1, 2, 3)) > out[..., 8:].mean((1, 2, 3))
    assert (0.25 < left.float().mean() < 0.75) if mirrored else left.all()
    assert out[:, :, 0].amax(2).isclose(black).any()  # some were shifted down
    assert len(out.unique(dim=0)) > 9  # each has its own shift


def test_the_partner_is_the_first_at_hand_and_a_damaged_one_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("VARLAP_DATA", str(tmp_path))
    data, _ = _images("cifar10")
    found = partner(data)
    assert found is not None
    assert found[0] == "rotated"
    (tmp_path / "svhn.npz").write_bytes(b"no archive")
    found = partner(data)
    assert found is not None
    assert found[0] == "rotated"
    assert "svhn cannot serve as images from elsewhere" in caplog.text
    flat = torch.zeros(2, 1, 4, 6)
    assert partner(ArrayData("flat", flat, torch.zeros(2).long(), flat, torch.zeros(2).long())) is None


def test_a_task_trains_on_as_many_images_as_it_is_told():
    task, whole = ImageTask("digits", validation=0.2, num_train=100), ImageTask("digits", validation=0.2)
    assert torch.equal(task.training[0], whole.training[0][:100])
    assert torch.equal(task.held_out[0], whole.held_out[0])
    assert ImageTask.described(task.describe()) == ImageTask("digits", "convnet", validation=0.2, num_train=100)
    with pytest.raises(ConfigError, match="num_train = 2000, but digits has 1150 images to train on"):
        _ = ImageTask("digits", validation=0.2, num_train=2000).training
    assert len(load("digits").train_labels) == 1437
