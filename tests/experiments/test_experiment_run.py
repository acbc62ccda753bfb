"""A run is carried on where it was stopped, scores every way of its method, and tells its time left."""

import dataclasses
import io
import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from small_runs import SPEC

from varlap.curvature import DEFAULT, Fisher
from varlap.data import ArrayData, Normaliser, load
from varlap.errors import ConfigError, NonFiniteError
from varlap.experiments import ImageTask, Result, RunSpec, Store
from varlap.experiments.augmentation import augmentation
from varlap.experiments.grid import Experiment
from varlap.experiments.grid_progress import GridProgress
from varlap.experiments.outside import partner
from varlap.experiments.run import RUNNING, epochs_done, run
from varlap.experiments.ways import variances_at_an_end
from varlap.metrics import evaluate
from varlap.objectives import Objective
from varlap.posterior import BNN
from varlap.training import FitSettings


class Watched:
    """A progress that raises in one step, and knows where the training began."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at, self.steps = stop_at, []

    def start(self, *, num_epochs: int, steps_per_epoch: int, first_step: int) -> None:
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


# -- a run -----------------------------------------------------------------------------------------------------------


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


class ClosedStream(io.StringIO):
    """A terminal, or a pipe, that went away after some characters."""

    def __init__(self, error: OSError, room: int, terminal: bool) -> None:
        super().__init__()
        self.error, self.room, self.isatty = error, room, lambda: terminal  # type: ignore[method-assign]

    def write(self, text: str) -> int:
        self.room -= len(text)
        if self.room < 0:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error")])
@pytest.mark.parametrize("room", [0, 70, 500])
@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_that_goes_away_does_not_end_the_grid(terminal, room, error, caplog, monkeypatch):
    monkeypatch.setattr("varlap.experiments.grid_progress.LINE_PAUSE_S", 0.0)
    monkeypatch.setattr("varlap.experiments.grid_progress.REFRESH_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    before = sys.stdout, sys.stderr
    monkeypatch.setattr(sys, "stderr", ClosedStream(error, room, terminal))
    with caplog.at_level(logging.WARNING, logger="varlap"):
        shown = GridProgress()
        shown.begin(num_runs=3, num_done=0)
        for _ in range(3):
            shown.begin_run("digits vl β 0.1", lambda share: None)
            shown.start(num_epochs=10, steps_per_epoch=1, first_step=0)
            for epoch in range(10):
                shown.step(epoch, 128, None)
                shown.epoch({"epoch": epoch})
            shown.close()
            shown.end_of_run("digits vl β 0.1", 60.0, left_s=120.0)
        shown.end()
    assert [record.message for record in caplog.records] == [f"progress is no longer shown, the grid goes on: {error}"]
    monkeypatch.undo()
    assert (sys.stdout, sys.stderr) == before


def test_without_a_console_nothing_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)  # a program without a console
    shown = GridProgress()
    shown.begin(num_runs=3, num_done=1)
    shown.say("a line")
    shown.end()
    assert capsys.readouterr().out == ""


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


# -- task ------------------------------------------------------------------------------------------------------------


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
