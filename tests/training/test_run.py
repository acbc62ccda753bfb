"""A run that is stopped, poisoned or starved of disk ends as one that was left alone."""

import copy
import functools
import gc
import itertools
import json
import logging
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import varlap
from varlap.errors import CheckpointError, ConfigError, Interrupted, NonFiniteError, OutOfTime
from varlap.objectives import compiled
from varlap.training import TrainingStep, loop, run_folder
from varlap.training.run_folder import newest
from varlap.training.state import _give_back_types, _lay_out_as_parameters

VOLATILE = {"seconds", "memory_mb"}
SETTINGS: dict[str, Any] = {"epochs": 4, "batch_size": 8, "lr": 1e-2, "progress": "none"}
STEPS = 20  # 5 an epoch


class Stopped(Exception):
    pass


def _data(num_items: int = 37) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_items, 4, generator=generator), torch.arange(num_items) % 3


def _bnn() -> varlap.BNN:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Softplus(), nn.Dropout(0.1), nn.Linear(8, 3)
    return varlap.BNN(nn.Sequential(*layers))


def _convolutional_bnn() -> varlap.BNN:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(1, 3, 2, padding=1), nn.BatchNorm2d(3), nn.Softplus(), nn.Conv2d(3, 2, 2)
    network = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *convolutions, nn.Flatten(), nn.Linear(8, 3))
    return varlap.BNN(network.to(memory_format=torch.channels_last))


def _objective(**options: Any) -> varlap.VL:
    return varlap.VL(37, 0.1, **options)


def _noise(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x + 0.1 * torch.randn(x.shape, generator=generator, device=x.device)


def _at(step: int, do: Callable[[torch.Tensor], Any]) -> Callable[..., torch.Tensor]:
    """An augmentation that does something in one step."""
    calls: list[int] = []

    def augment(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        x = _noise(x, generator)
        calls.extend([0] * (len(x) > 1))  # before the first step, one item is tried
        if len(x) > 1 and len(calls) == step + 1:
            do(x)
        return x

    augment.__qualname__ = _noise.__qualname__  # to the run's spec it is the same function
    return augment


def _stop(_: torch.Tensor) -> None:
    raise Stopped


def _fit(bnn: varlap.BNN, augment: Any = _noise, objective: Any = None, **settings: Any) -> varlap.History:
    return varlap.fit(bnn, objective or _objective(), _data(), augment=augment, **(SETTINGS | settings))


def _rows(history: varlap.History) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if key not in VOLATILE} for row in history.epochs]


def _same_bits(one: varlap.BNN, other: varlap.BNN) -> bool:
    states = one.state_dict(), other.state_dict()
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("stop_at", [1, 7, 12, 15, 19])
@pytest.mark.parametrize(
    "objective",
    [
        _objective,
        lambda: _objective(curvature=varlap.Fisher(every=2)),
        lambda: _objective(variances="closed-form", beta_warmup_steps=6),
        lambda: varlap.VI(37, 0.1),
        lambda: varlap.MAP(37, 0.1),
    ],
    ids=["default", "every", "closed-form", "vi", "map"],
)
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(tmp_path: Path, objective: Any, stop_at: int):
    settings = {"save_every": 2, "validation": _data(20), "keep": "best"}
    alone, stopped = _bnn(), _bnn()
    rows = _rows(_fit(alone, objective=objective(), out=tmp_path / "alone", **settings))
    with pytest.raises(Stopped):
        _fit(stopped, _at(stop_at, _stop), objective(), out=tmp_path / "run", **settings)
    carried_on = _bnn()
    history = _fit(carried_on, objective=objective(), out=tmp_path / "run", **settings)
    assert _rows(history) == rows
    assert _same_bits(alone, carried_on)
    ends = [newest(tmp_path / name) for name in ("alone", "run")]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].documents == ends[1].documents
    for group, tensors in ends[0].tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, ends[1].tensors[group][name]), f"{group}/{name}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make_bnn", [_bnn, _convolutional_bnn])
@pytest.mark.parametrize("stop_at", [7, 9])  # in the middle of an epoch, and before its smaller last batch
@pytest.mark.parametrize("settings", [{}, {"optimizer": "SGD", "momentum": 0.9}], ids=["Adam", "SGD"])
def test_a_compiled_run_on_a_gpu_is_bitwise_equal_to_an_uninterrupted_one(
    tmp_path: Path, stop_at: int, make_bnn: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # else its kernels are chosen by their times
    alone, carried_on = make_bnn().cuda(), make_bnn().cuda()
    rows = _rows(_fit(alone, out=tmp_path / "alone", save_every=1, **settings))
    with pytest.raises(Stopped):
        _fit(make_bnn().cuda(), _at(stop_at, _stop), out=tmp_path / "run", save_every=1, **settings)
    assert _rows(_fit(carried_on, out=tmp_path / "run", save_every=1, **settings)) == rows
    assert _same_bits(alone, carried_on)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_nan_on_a_gpu_ends_the_training_with_the_state_of_the_step_before(tmp_path: Path):
    poisoned, expected = _bnn().cuda(), _bnn().cuda()
    with pytest.raises(NonFiniteError, match="step 8"):
        _fit(poisoned, _at(8, lambda x: x.fill_(float("nan"))), out=tmp_path / "nan", save_every=1)
    with pytest.raises(Stopped):
        _fit(expected, _at(8, _stop), out=tmp_path / "stopped", save_every=1)
    assert _same_bits(poisoned, expected)


def test_what_a_file_holds_comes_back_in_the_memory_format_it_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    seen: list[tuple[Any, Any]] = []

    def step(*args: Any, **options: Any) -> TrainingStep:
        seen.append(args[1:])
        return TrainingStep(*args, **options)

    monkeypatch.setattr(loop, "TrainingStep", step)
    alone, carried_on = _convolutional_bnn(), _convolutional_bnn()
    _fit(alone)
    with pytest.raises(Stopped):
        _fit(_convolutional_bnn(), _at(8, _stop), out=tmp_path, save_every=1)
    _fit(carried_on, out=tmp_path)
    assert _same_bits(alone, carried_on)
    (objective, optimizer), (objective_again, optimizer_again) = seen[0], seen[-1]
    moments = [m for o in (optimizer, optimizer_again) for s in o.state.values() for m in s.values() if m.ndim == 4]
    sums = [t for o in (objective, objective_again) for r in o.running_means().values() for t in r.sums.values()]
    for tensors in (moments, sums):
        strides = [tensor.stride() for tensor in tensors]
        half = len(strides) // 2
        assert strides[:half] == strides[half:]
        assert not all(tensor.is_contiguous() for tensor in tensors)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "RMSprop", "Adagrad"])
def test_any_optimizer_is_carried_on(tmp_path: Path, optimizer: str):
    alone, carried_on = _bnn(), _bnn()
    settings = {"optimizer": optimizer, "lr": 1e-3, "log_sigma_lr_multiplier": 2.0, "save_every": 1}
    _fit(alone, **settings)
    with pytest.raises(Stopped):
        _fit(_bnn(), _at(8, _stop), out=tmp_path, **settings)
    _fit(carried_on, out=tmp_path, **settings)
    assert _same_bits(alone, carried_on)


def test_a_data_set_is_carried_on(tmp_path: Path):
    x, y = _data()
    train = torch.utils.data.TensorDataset(x, y)
    alone, carried_on = _bnn(), _bnn()
    varlap.fit(alone, _objective(), train, augment=_noise, **SETTINGS)
    with pytest.raises(Stopped):
        varlap.fit(_bnn(), _objective(), train, augment=_at(8, _stop), out=tmp_path, save_every=3, **SETTINGS)
    varlap.fit(carried_on, _objective(), train, augment=_noise, out=tmp_path, save_every=3, **SETTINGS)
    assert _same_bits(alone, carried_on)


def test_a_setting_that_a_later_version_has_added_does_not_keep_a_run_from_being_carried_on(tmp_path: Path):
    alone, carried_on = _bnn(), _bnn()
    _fit(alone)
    with pytest.raises(Stopped):
        _fit(_bnn(), _at(8, _stop), out=tmp_path, save_every=1)
    spec = json.loads((tmp_path / "spec.json").read_text())
    del spec["settings"]["momentum"], spec["settings"]["validate_every"]
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    with pytest.raises(ConfigError, match=r"it has momentum=0\.0, not 0\.9"):
        _fit(_bnn(), out=tmp_path, optimizer="SGD")
    _fit(carried_on, out=tmp_path, save_every=1, validate_every=2)  # which nobody goes by here
    assert _same_bits(alone, carried_on)


def test_an_epoch_that_was_carried_on_has_the_seconds_of_both_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    clocks = SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic)
    monkeypatch.setattr(loop, "time", clocks)

    def each_step(stop_at: int | None = None) -> Callable[..., torch.Tensor]:
        steps = itertools.count()

        def augment(x: torch.Tensor, _: torch.Generator) -> torch.Tensor:
            if len(x) > 1:
                if next(steps) == stop_at:
                    raise Stopped
                now[0] += 10.0
            return x

        augment.__qualname__ = _noise.__qualname__
        return augment

    with pytest.raises(Stopped):
        _fit(_bnn(), each_step(stop_at=7), out=tmp_path / "run", save_every=1)
    shutil.copytree(tmp_path / "run", tmp_path / "earlier")
    history = _fit(_bnn(), each_step(), out=tmp_path / "run", save_every=1)
    assert [row["seconds"] for row in history.epochs] == [50.0, 50.0, 50.0, 50.0]

    found = newest(tmp_path / "earlier")  # as an earlier version has written it
    assert found is not None
    assert found.documents["state"].pop("epoch_seconds") == 20.0
    monkeypatch.setattr(run_folder.RunFolder, "newest", lambda _: found)
    history = _fit(_bnn(), each_step(), out=tmp_path / "earlier")
    assert [row["seconds"] for row in history.epochs] == [50.0, 30.0, 50.0, 50.0]


def test_where_the_system_does_not_tell_the_memory_a_training_does_without():
    code = """
import sys
sys.modules["resource"] = None  # as on Windows
import math, torch, varlap
bnn, data = varlap.BNN(torch.nn.Linear(2, 3)), (torch.ones(4, 2), torch.zeros(4).long())
(row,) = varlap.fit(bnn, varlap.MAP(4), data, epochs=1, progress="none").epochs
print(math.isnan(row["memory_mb"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_a_finished_run_is_only_read(tmp_path: Path):
    first, again = _bnn(), _bnn()
    rows = _fit(first, out=tmp_path).epochs
    assert _fit(again, _at(0, _stop), out=tmp_path).epochs == rows
    assert _same_bits(first, again)


def test_fit_leaves_the_callers_random_state_alone(tmp_path: Path):
    bnn = _bnn()
    before = torch.get_rng_state()
    _fit(bnn, out=tmp_path, validation=_data(20))
    varlap.fit(bnn, _objective(), torch.utils.data.TensorDataset(*_data()), **SETTINGS)
    assert torch.equal(torch.get_rng_state(), before)


# -- guards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_nan_ends_the_training_with_the_state_of_the_step_before(tmp_path: Path, accumulate: int):
    poisoned, before = _bnn(), _bnn()
    objectives = _objective(), _objective()
    settings = {"accumulate": accumulate, "save_every": 1}

    def poison(x: torch.Tensor) -> None:
        x[-1, 0] = float("nan")

    with pytest.raises(NonFiniteError, match="step 8: x holds NaN; nothing was changed"):
        _fit(poisoned, _at(8, poison), objectives[0], **settings)
    with pytest.raises(Stopped):
        _fit(before, _at(8, _stop), objectives[1], **settings)
    assert _same_bits(poisoned, before)
    for name, tensor in objectives[0].state_dict()["fisher"].items():
        assert torch.equal(tensor, objectives[1].state_dict()["fisher"][name])


def test_a_nan_can_be_skipped_and_is_counted(caplog: pytest.LogCaptureFixture):
    def poison(x: torch.Tensor) -> None:
        x[0, 0] = float("inf")

    history = _fit(_bnn(), _at(8, poison), on_nonfinite="skip")
    assert [row["skipped"] for row in history.epochs] == [0, 1, 0, 0]
    assert all(torch.isfinite(torch.tensor(row["elbo"])) for row in history.epochs)
    assert "skipped a step: step 8: x holds Inf" in caplog.text


def test_a_folder_of_another_run_is_refused_with_what_differs(tmp_path: Path):
    _fit(_bnn(), out=tmp_path)
    with pytest.raises(ConfigError, match=r"belongs to another run: it has lr=0.01, not 0.02; choose another folder"):
        _fit(_bnn(), out=tmp_path, lr=2e-2)
    with pytest.raises(ConfigError, match=r"it has beta=0.1, not 0.3"):
        _fit(_bnn(), objective=varlap.VL(37, 0.3), out=tmp_path)
    with pytest.raises(ConfigError, match="holds a run already"):
        _fit(_bnn(), out=tmp_path, resume="never")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"augment": None}, "it has augment='_noise', not None"),
        ({"validation": _data(20)}, "it has validation=False, not True"),
        ({"objective": varlap.VL(37, 0.1, fisher_decay=0.5, variances="closed-form", beta_warmup_steps=0)}, "decay of"),
        ({"label": {"data": "other"}}, "it has data=None, not 'other'"),
    ],
    ids=["augment", "validation", "decay", "label"],
)
def test_whatever_decides_what_a_run_computes_tells_it_from_others(tmp_path: Path, change: Any, message: str):
    _fit(_bnn(), out=tmp_path)
    with pytest.raises(ConfigError, match=message):
        _fit(_bnn(), out=tmp_path, **change)


class Shifted:
    """An augmentation that is an object."""

    def __call__(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return x + 1


def _scaled(x: torch.Tensor, generator: torch.Generator, by: Any = 1, **_: Any) -> torch.Tensor:
    return x


AUGMENTATIONS = {
    "none": (None, None),
    "function": (_noise, "_noise"),
    "object": (Shifted(), "Shifted"),
    "partial": (functools.partial(_scaled, by=2), "_scaled(by=2)"),
    "partial of other numbers": (functools.partial(_scaled, by=(2, 0.5)), "_scaled(by=(2, 0.5))"),
    "partial of words": (functools.partial(_scaled, mode="same", flip=True), "_scaled(flip=True, mode='same')"),
    "partial of a tensor": (functools.partial(_scaled, by=torch.zeros(2)), "_scaled(by=Tensor)"),
    "partial of a function": (functools.partial(_scaled, then=_noise), "_scaled(then=_noise)"),
    "partial of an object": (functools.partial(Shifted()), "Shifted()"),
}


@pytest.mark.parametrize(("augment", "name"), AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_a_run_is_carried_on_only_with_the_augmentation_it_was_begun_with(tmp_path: Path, augment: Any, name: Any):
    settings = {"epochs": 1}
    _fit(_bnn(), augment, out=tmp_path, **settings)
    assert json.loads((tmp_path / "spec.json").read_text())["data"]["augment"] == name
    _fit(_bnn(), copy.deepcopy(augment), out=tmp_path, **settings)
    for other, its_name in AUGMENTATIONS.values():
        if its_name != name:
            with pytest.raises(ConfigError, match=re.escape(f"it has augment={name!r}, not {its_name!r}")):
                _fit(_bnn(), other, out=tmp_path, **settings)


def test_other_data_or_another_network_of_the_same_size_are_another_run(tmp_path: Path):
    _fit(_bnn(), out=tmp_path)
    x, y = _data()
    with pytest.raises(ConfigError, match="it has data of fingerprint="):
        varlap.fit(_bnn(), _objective(), (x, y.flip(0)), augment=_noise, out=tmp_path, **SETTINGS)
    other = _bnn()
    other.network[2] = nn.Tanh()
    with pytest.raises(ConfigError, match="network"):
        _fit(other, out=tmp_path)


def test_own_priors_and_curvatures_are_carried_on(tmp_path: Path):
    class Tight:
        centre, learnt = "zero", False

        def scale(self, weight: Any) -> float:
            return 0.3

    def bnn() -> varlap.BNN:
        return varlap.BNN(_bnn().network, prior=Tight())

    alone, carried_on = bnn(), bnn()
    _fit(alone)
    with pytest.raises(Stopped):
        _fit(bnn(), _at(8, _stop), out=tmp_path, save_every=1)
    _fit(carried_on, out=tmp_path, save_every=1)
    assert _same_bits(alone, carried_on)


def test_a_refused_folder_is_not_locked(tmp_path: Path):
    _fit(_bnn(), out=tmp_path)
    with pytest.raises(ConfigError) as refusal:
        _fit(_bnn(), out=tmp_path, lr=2e-2)
    assert refusal  # and kept alive
    _fit(_bnn(), out=tmp_path)


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_a_nan_in_a_later_part_of_the_first_step_is_named(on_nonfinite: str):
    def poison(x: torch.Tensor) -> None:
        x[-1, 0] = float("nan")

    if on_nonfinite == "skip":
        assert _fit(_bnn(), _at(0, poison), accumulate=2, on_nonfinite="skip").epochs[0]["skipped"] == 1
    else:
        with pytest.raises(NonFiniteError, match="step 0: x holds NaN"):
            _fit(_bnn(), _at(0, poison), accumulate=2)


def test_a_compiled_step_that_is_not_sound_is_never_in_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, _: graph)

    def poison(x: torch.Tensor) -> None:
        x[0, 0] = float("nan")

    with pytest.raises(NonFiniteError, match="step 7"):
        _fit(_bnn(), _at(7, poison), out=tmp_path, save_every=1, compiled=True)
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.documents["state"]["step"] == 7
    assert all(tensor.isfinite().all() for tensor in checkpoint.tensors["model"].values())


def test_an_exhausted_loader_is_named():
    class Once:
        def __init__(self) -> None:
            self.passes = 0

        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Any:
            self.passes += 1
            x, y = _data(32)
            return iter([] if self.passes > 3 else list(zip(x.split(8), y.split(8), strict=True)))

    with pytest.raises(varlap.errors.BatchError, match=r"epoch \d had 0 batches, not 4"):
        varlap.fit(_bnn(), _objective(), Once(), epochs=9, progress="none")


def test_a_nan_batch_does_not_spoil_the_scale_of_half_precision():
    bnn = _bnn()
    step = varlap.TrainingStep(bnn, _objective(), varlap.adam(bnn), precision="fp16", on_nonfinite="skip")
    x, y = _data(10)
    step(x, y, number=0)
    scale = step.gradient_scale.value
    step(x * float("nan"), y, number=1)
    assert step.gradient_scale.value == scale
    assert step.objective.gradient_scale == 1


def test_a_logger_that_fails_does_not_end_the_training(caplog: pytest.LogCaptureFixture):
    class Down:
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            raise RuntimeError("server down")

    assert len(_fit(_bnn(), loggers=[Down()]).epochs) == 4
    assert "Down failed, the training goes on: server down" in caplog.text


def test_a_nan_in_the_validation_data_is_said_to_be_there():
    x, y = _data(20)
    x[3, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="after epoch 0, in the validation data"):
        _fit(_bnn(), validation=(x, y))


@pytest.mark.parametrize(
    "change",
    [
        {"lr": "0.1"},
        {"milestones": 0.5},
        {"optimizer": "sgd"},
        {"optimizer": "SparseAdam"},
        {"compiled": "yes"},
        {"seed": 1.5},
        {"progress": False},
        {"loggers": [print]},
    ],
    ids=repr,
)
def test_misuse_gets_our_message(change: Any):
    with pytest.raises(ConfigError, match="fit"):
        _fit(_bnn(), **change)


def test_a_folder_with_other_files_is_refused(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="is not empty and holds no run; choose another folder"):
        _fit(_bnn(), out=tmp_path)


def test_a_folder_is_one_processes_at_a_time(tmp_path: Path):
    def meanwhile(_: torch.Tensor) -> None:
        with pytest.raises(ConfigError, match="another process is writing to"):
            _fit(_bnn(), out=tmp_path)

    _fit(_bnn(), _at(3, meanwhile), out=tmp_path)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    alone, carried_on = _bnn(), _bnn()
    _fit(alone)
    with pytest.raises(Stopped):
        _fit(_bnn(), _at(12, _stop), out=tmp_path, save_every=2)
    *_, last = sorted((tmp_path / "checkpoints").iterdir())
    damaged = last / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    _fit(carried_on, out=tmp_path, save_every=2)
    assert str(damaged.name) in caplog.text
    assert last.name in caplog.text
    assert _same_bits(alone, carried_on)


def test_a_step_whose_checkpoint_was_damaged_is_written_again(tmp_path: Path):
    with pytest.raises(Stopped):
        _fit(_bnn(), _at(12, _stop), out=tmp_path, save_every=2)
    last = sorted((tmp_path / "checkpoints").iterdir())[-1]
    (last / "state.json").write_bytes(b"{}")
    with pytest.raises(Stopped):
        _fit(_bnn(), _at(3, _stop), out=tmp_path, save_every=2)
    again = newest(tmp_path)
    assert again is not None
    assert again.documents["state"]["step"] == 12


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew_in_silence(tmp_path: Path):
    _fit(_bnn(), out=tmp_path)
    for path in (tmp_path / "checkpoints").iterdir():
        (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints can be read"):
        _fit(_bnn(), out=tmp_path)


def test_a_checkpoint_is_a_model_too(tmp_path: Path):
    bnn = _bnn()
    _fit(bnn, out=tmp_path)
    last = sorted((tmp_path / "checkpoints").iterdir())[-1]
    assert _same_bits(varlap.load(last, _bnn().network), bnn)
    with pytest.raises(CheckpointError, match=r"is a run; give one of its models: .*/checkpoints/step-"):
        varlap.load(tmp_path, _bnn().network)


def test_a_full_disk_does_not_end_the_training_but_is_told_at_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any) -> None:
        raise CheckpointError("no space left on device")

    bnn, alone = _bnn(), _bnn()
    _fit(alone)
    monkeypatch.setattr(run_folder, "write_checkpoint", full)
    with pytest.raises(CheckpointError, match="no space left"):
        _fit(bnn, out=tmp_path)
    assert caplog.text.count("the training goes on: no space left") == 3
    assert _same_bits(alone, bnn)


def test_a_last_batch_of_one_item_is_refused_for_batch_norm_before_training():
    with pytest.raises(varlap.errors.BatchError, match=r"the last batch of an epoch has 1 item, .*batch_size=37"):
        _fit(_bnn(), batch_size=36)


def test_variances_that_run_away_are_named(caplog: pytest.LogCaptureFixture):
    bnn = _bnn()
    with torch.no_grad():
        bnn.log_sigma["0.bias"].fill_(7.0)
    _fit(bnn, epochs=1, objective=varlap.VL(37, 1e-6), lr=1e-6)
    assert "the largest σ is" in caplog.text


# -- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("stop_at", [7, 9])  # in the middle and at the end of an epoch
def test_a_signal_saves_and_raises_and_the_same_call_carries_on(tmp_path: Path, number: int, status: int, stop_at: int):
    handlers = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)]
    alone, carried_on = _bnn(), _bnn()
    rows = _rows(_fit(alone))
    with pytest.raises(Interrupted, match=f"a checkpoint was saved at step {stop_at + 1}") as caught:
        _fit(_bnn(), _at(stop_at, lambda _: os.kill(os.getpid(), number)), out=tmp_path)
    assert caught.value.exit_status == status
    assert [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert _rows(_fit(carried_on, out=tmp_path)) == rows
    assert _same_bits(alone, carried_on)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_command_exits_with_the_signals_status_and_carries_on(tmp_path: Path, number: int, status: int):
    command = [sys.executable, "-m", "varlap", "train", "digits", "--epochs", "400", "--out", str(tmp_path / "run")]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    for line in child.stderr:
        if re.match(r"epoch +2/400", line):
            break
    child.send_signal(number)
    said = child.stderr.read()
    assert child.wait(60) == status
    assert "the same command carries on from there" in " ".join(said.split())
    assert newest(tmp_path / "run") is not None


@pytest.mark.parametrize("stop_at", [7, 9, 19])  # within an epoch, at its end, at the end of all
def test_when_the_time_is_over_it_saves_and_raises_and_the_same_call_carries_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr("varlap.training.loop.time", clock)
    alone, carried_on = _bnn(), _bnn()
    rows = _rows(_fit(alone))
    late = _at(stop_at, lambda _: now.__setitem__(0, 10.0))
    if stop_at == STEPS - 1:
        assert _rows(_fit(carried_on, late, out=tmp_path, time_limit_s=10.0)) == rows
    else:
        with pytest.raises(OutOfTime, match=f"the time was over after step {stop_at + 1}; a checkpoint was saved"):
            _fit(_bnn(), late, out=tmp_path, time_limit_s=10.0)
        assert _rows(_fit(carried_on, out=tmp_path)) == rows
    assert _same_bits(alone, carried_on)


def test_a_time_that_is_over_without_a_folder_says_that_all_is_lost():
    with pytest.raises(OutOfTime, match="its steps are lost"):
        _fit(_bnn(), time_limit_s=1e-9)
    again = pickle.loads(pickle.dumps(OutOfTime(3, saved=True)))
    assert (again.step, again.saved, str(again)) == (3, True, str(OutOfTime(3, saved=True)))


def test_checkpoints_after_epochs_keep_their_pause_but_the_last_is_always_written(tmp_path: Path):
    _fit(_bnn(), out=tmp_path, num_checkpoints=9, save_pause_s=1e6)
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert [int(name.removeprefix("step-")) for name in saved] == [5, STEPS]


def test_a_checkpoint_that_is_due_at_the_end_of_an_epoch_needs_no_pause(tmp_path: Path):
    _fit(_bnn(), out=tmp_path, num_checkpoints=99, save_pause_s=1e6, save_every=5)
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert [int(name.removeprefix("step-")) for name in saved] == list(range(5, STEPS + 1, 5))


def test_a_run_that_stops_early_just_in_time_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr("varlap.training.loop.time", clock)
    settings: dict[str, Any] = {"validation": _data(20), "epochs": 60, "patience": 3, "keep": "best", "lr": 0.1}
    alone, stopped = _bnn(), _bnn()
    history = _fit(alone, **settings)
    last = int(history.epochs[-1]["step"])
    assert last < 60 * history.epochs[0]["step"]
    late = _at(last - 1, lambda _: now.__setitem__(0, 10.0))
    assert _rows(_fit(stopped, late, out=tmp_path, time_limit_s=10.0, **settings)) == _rows(history)
    assert _same_bits(alone, stopped)


# -- what else fit does -----------------------------------------------------------------------------------------------


def test_early_stopping_keeps_the_best_weights(tmp_path: Path):
    bnn = _bnn()
    history = _fit(bnn, validation=_data(20), epochs=60, patience=3, keep="best", lr=0.1, out=tmp_path)
    nlls = [row["validation_nll"] for row in history.epochs]
    best = min(range(len(nlls)), key=nlls.__getitem__)
    assert len(nlls) == best + 4 < 60
    assert varlap.evaluate(bnn, _data(20))["nll"] == pytest.approx(nlls[best], rel=1e-6)


def test_best_weights_need_validation_data():
    with pytest.raises(ConfigError, match="need validation data"):
        _fit(_bnn(), keep="best")


def test_parts_of_a_batch_add_up_to_its_gradient():
    results = []
    for accumulate in (1, 4):
        torch.manual_seed(0)
        bnn = varlap.BNN(varlap.models.mlp(4, 3).double())
        x, y = _data(10)
        step = varlap.TrainingStep(bnn, varlap.MAP(37, 0.1), varlap.adam(bnn, 1e-9), accumulate=accumulate)
        values = step(x.double(), y, number=0)
        results.append([values, *(p.grad for p in bnn.parameters() if p.grad is not None)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_each_part_of_a_batch_draws_its_own_labels():
    bnn, drawn = _bnn(), []
    sample = bnn.likelihood.sample
    bnn.likelihood.sample = lambda outputs, generator, targets=None: (
        drawn.append(generator.initial_seed()) or sample(outputs, generator, targets)
    )
    _fit(bnn, objective=_objective(curvature=varlap.Fisher()), epochs=1, accumulate=4)
    assert len(drawn) == len(set(drawn)) == 4 * 4 + 2  # parts of a smaller last batch have two items or more


def test_large_gradients_are_clipped_together():
    bnn = _bnn()
    step = varlap.TrainingStep(bnn, _objective(), torch.optim.SGD(bnn.parameter_groups(1e-6)), clip_norm=0.01)
    step(*_data(10), number=0)
    norm = torch.stack([p.grad.norm() for p in bnn.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-4)


def test_a_scale_of_the_gradients_changes_nothing_but_their_range():
    results = []
    for scale in (1.0, 1024.0):
        bnn, objective = _bnn().double().train(), _objective(curvature=varlap.Fisher())
        objective.gradient_scale = scale
        x, y = _data(10)
        objective(bnn, x.double(), y, step=0).loss.backward()
        results.append([p.grad for p in bnn.parameters() if p.grad is not None])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def test_half_precision_trains_like_single_and_is_carried_on(tmp_path: Path):
    single, half, carried_on = _bnn(), _bnn(), _bnn()
    expected = _fit(single).epochs
    rows = _fit(half, precision="fp16").epochs
    assert [row["elbo"] for row in rows] == pytest.approx([row["elbo"] for row in expected], rel=0.05)
    with pytest.raises(Stopped):
        _fit(_bnn(), _at(11, _stop), out=tmp_path, precision="fp16", save_every=1)
    _fit(carried_on, out=tmp_path, precision="fp16", save_every=1)
    assert _same_bits(half, carried_on)
    assert not _same_bits(half, single)


def test_a_scale_halves_where_gradients_overflow_and_grows_again():
    bnn = _bnn()
    step = varlap.TrainingStep(bnn, _objective(), varlap.adam(bnn), precision="fp16")
    step.gradient_scale.value = 2.0**40  # far beyond half precision
    step(*_data(10), number=0)
    assert 1 < step.gradient_scale.value < 2.0**40
    value = step.gradient_scale.value
    step.gradient_scale.num_sound = 999
    step(*_data(10), number=1)
    assert step.gradient_scale.value == min(2 * value, 2.0**16)


def test_the_rate_rises_over_the_warm_up():
    settings = varlap.FitSettings(epochs=10, warmup_epochs=2, schedule="constant")
    assert [settings.lr_factor(progress) for progress in (0.0, 0.1, 0.2, 0.9)] == pytest.approx([0, 0.5, 1, 1])


def test_each_epoch_logs_rates_variances_and_memory_to_every_logger(tmp_path: Path):
    logged = []

    class Logger:
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            logged.append((step, metrics))

    history = _fit(_bnn(), out=tmp_path, loggers=[Logger()], validation=_data(20))
    assert [step for step, _ in logged] == [5, 10, 15, 20]
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == history.epochs
    row = history.epochs[-1]
    assert row["lr_log_sigma"] == pytest.approx(10 * row["lr"])
    assert row["log_sigma_over_s_q05"] <= row["log_sigma_over_s_median"] <= row["log_sigma_over_s_q95"]
    assert 0 <= row["share_at_prior"] <= 1
    assert row["memory_mb"] > 0
    assert {"validation_nll", "validation_accuracy", "validation_ece"} <= row.keys()


def test_only_the_newest_checkpoints_stay(tmp_path: Path):
    _fit(_bnn(), out=tmp_path, save_every=2, num_checkpoints=3)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [f"step-{step:012d}" for step in (16, 18, 20)]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory in use from /proc")
def test_many_short_epochs_do_not_grow_in_memory_or_time():
    memory, clock = [], []

    class Resident:
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            clock.append(time.process_time())  # of this process alone, whatever else the machine does
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            memory.append(pages * resource.getpagesize() / 2**20)

    _fit(_bnn(), epochs=200, loggers=[Resident()])
    seconds = [after - before for before, after in itertools.pairwise(clock)]
    early, late = sorted(seconds[20:60]), sorted(seconds[159:])
    assert len(memory) == 200
    assert memory[-1] - memory[20] < 5
    assert late[len(late) // 4] < 3 * early[len(early) // 4]


def test_a_few_kills_leave_a_run_that_ends_with_the_same_bits():
    script = Path(__file__).parents[2] / "benchmarks" / "kills.py"
    subprocess.run([sys.executable, str(script), "--kills", "2"], check=True, capture_output=True, timeout=300)


@pytest.fixture(autouse=True)
def _logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def test_a_carried_on_optimizer_keeps_the_precision_of_what_it_remembers():
    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.NAdam([nn.Parameter(torch.ones(2, dtype=torch.float64))])

    first, again = optimizer(), optimizer()
    first.param_groups[0]["params"][0].sum().backward()
    first.step()
    saved = copy.deepcopy(first.state_dict())
    again.load_state_dict(saved)
    (own,) = again.state.values()
    assert own["mu_product"].dtype == torch.float64  # torch's cast, which loses nothing but rounds otherwise from here
    _give_back_types(again, saved["state"])
    for name, value in saved["state"][0].items():
        assert own[name].dtype == value.dtype
        assert torch.equal(own[name], value)


def test_training_works_whatever_the_default_type_is():
    torch.set_default_dtype(torch.float64)
    try:
        bnn = varlap.BNN(nn.Linear(2, 3))
        history = varlap.fit(bnn, varlap.VL(12), (torch.randn(12, 2), torch.arange(12) % 3), epochs=1, progress="none")
    finally:
        torch.set_default_dtype(torch.float32)
    assert history.epochs[0]["log_sigma_over_s_median"] == pytest.approx(-3.0, abs=0.1)


def test_a_carried_on_optimizer_keeps_its_step_and_moments_on_the_device_they_were_loaded_to():
    """A parameter that is a number has the shape of Adam's step, which must stay on the CPU without `capturable`."""
    parameter = nn.Parameter(torch.zeros((), device="meta"))  # stands for another device
    optimizer = torch.optim.Adam([parameter])
    loaded = {"step": torch.tensor(3.0), "exp_avg": torch.tensor(2.0, dtype=torch.float64)}
    optimizer.state[parameter] = dict(loaded)
    _lay_out_as_parameters(optimizer)
    assert optimizer.state[parameter]["step"] is loaded["step"]
    assert optimizer.state[parameter]["exp_avg"].device == torch.device("cpu")
    assert torch.equal(optimizer.state[parameter]["exp_avg"], loaded["exp_avg"])
