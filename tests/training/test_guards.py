"""Claims about what a training is guarded against: NaN, other runs of the same folder, damaged files, full disks."""

import copy
import functools
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import (
    SETTINGS,
    Stopped,
    at_step,
    fit_small,
    made_bnn,
    made_data,
    made_objective,
    noise,
    same_bits,
    stop,
)
from torch import nn

import varlap
from varlap.errors import CheckpointError, ConfigError, NonFiniteError
from varlap.objectives import compiled
from varlap.training import run_folder
from varlap.training.run_folder import newest


@pytest.fixture(autouse=True)
def _logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_nan_ends_the_training_with_the_state_of_the_step_before(tmp_path: Path, accumulate: int):
    poisoned, before = made_bnn(), made_bnn()
    objectives = made_objective(), made_objective()
    settings = {"accumulate": accumulate, "save_every": 1}

    def poison(x: torch.Tensor) -> None:
        x[-1, 0] = float("nan")

    with pytest.raises(NonFiniteError, match="step 8: x holds NaN; nothing was changed"):
        fit_small(poisoned, at_step(8, poison), objectives[0], **settings)
    with pytest.raises(Stopped):
        fit_small(before, at_step(8, stop), objectives[1], **settings)
    assert same_bits(poisoned, before)
    for name, tensor in objectives[0].state_dict()["fisher"].items():
        assert torch.equal(tensor, objectives[1].state_dict()["fisher"][name])


def test_a_nan_can_be_skipped_and_is_counted(caplog: pytest.LogCaptureFixture):
    def poison(x: torch.Tensor) -> None:
        x[0, 0] = float("inf")

    history = fit_small(made_bnn(), at_step(8, poison), on_nonfinite="skip")
    assert [row["skipped"] for row in history.epochs] == [0, 1, 0, 0]
    assert all(torch.isfinite(torch.tensor(row["elbo"])) for row in history.epochs)
    assert "skipped a step: step 8: x holds Inf" in caplog.text


def test_a_folder_of_another_run_is_refused_with_what_differs(tmp_path: Path):
    fit_small(made_bnn(), out=tmp_path)
    with pytest.raises(ConfigError, match=r"belongs to another run: it has lr=0.01, not 0.02; choose another folder"):
        fit_small(made_bnn(), out=tmp_path, lr=2e-2)
    with pytest.raises(ConfigError, match=r"it has beta=0.1, not 0.3"):
        fit_small(made_bnn(), objective=varlap.VL(37, 0.3), out=tmp_path)
    with pytest.raises(ConfigError, match="holds a run already"):
        fit_small(made_bnn(), out=tmp_path, resume="never")


def test_a_run_with_another_fixed_noise_is_refused(tmp_path: Path):
    def fit(noise: float) -> varlap.training.History:
        torch.manual_seed(0)
        bnn = varlap.BNN(torch.nn.Linear(2, 1), varlap.Gaussian(noise=noise, learnt=False))
        train = torch.randn(20, 2), torch.randn(20, 1)
        return varlap.fit(bnn, varlap.VL(20), train, epochs=1, out=tmp_path / "run", progress="none")

    fit(0.3)
    with pytest.raises(ConfigError, match=r"belongs to another run: it has noise=0\.3, not 1\.0"):
        fit(1.0)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_folder_whose_run_kept_nothing_is_taken_over(tmp_path: Path, resume: Any):
    with pytest.raises(Stopped):
        fit_small(made_bnn(), at_step(2, stop), out=tmp_path, lr=3e-2)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["spec.json"]
    fit_small(made_bnn(), out=tmp_path, lr=2e-2, resume=resume)
    assert json.loads((tmp_path / "spec.json").read_text())["settings"]["lr"] == 2e-2


@pytest.mark.parametrize("kept", ["metrics.jsonl", "checkpoints", "result.json"])
def test_a_folder_whose_run_kept_something_is_not_taken_over(tmp_path: Path, kept: str):
    with pytest.raises(Stopped):
        fit_small(made_bnn(), at_step(2, stop), out=tmp_path, lr=3e-2)
    (tmp_path / kept).mkdir() if kept == "checkpoints" else (tmp_path / kept).write_text("{}\n")
    with pytest.raises(ConfigError, match=r"belongs to another run: it has lr=0.03, not 0.02"):
        fit_small(made_bnn(), out=tmp_path, lr=2e-2)


def test_a_spec_of_something_else_is_not_written_over(tmp_path: Path):
    (tmp_path / "spec.json").write_text('{"name": "mine"}')
    with pytest.raises(ConfigError, match="belongs to another run"):
        fit_small(made_bnn(), out=tmp_path)
    assert (tmp_path / "spec.json").read_text() == '{"name": "mine"}'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"augment": None}, "it has augment='noise', not None"),
        ({"validation": made_data(20)}, "it has validation=False, not True"),
        ({"objective": varlap.VL(37, 0.1, fisher_decay=0.5, variances="closed-form", beta_warmup_steps=0)}, "decay of"),
        ({"label": {"data": "other"}}, "it has data=None, not 'other'"),
    ],
    ids=["augment", "validation", "decay", "label"],
)
def test_whatever_decides_what_a_run_computes_tells_it_from_others(tmp_path: Path, change: Any, message: str):
    fit_small(made_bnn(), out=tmp_path)
    with pytest.raises(ConfigError, match=message):
        fit_small(made_bnn(), out=tmp_path, **change)


class Shifted:
    """An augmentation that is an object."""

    def __call__(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return x + 1


def _scaled(x: torch.Tensor, generator: torch.Generator, by: Any = 1, **_: Any) -> torch.Tensor:
    return x


AUGMENTATIONS = {
    "none": (None, None),
    "function": (noise, "noise"),
    "object": (Shifted(), "Shifted"),
    "partial": (functools.partial(_scaled, by=2), "_scaled(by=2)"),
    "partial of other numbers": (functools.partial(_scaled, by=(2, 0.5)), "_scaled(by=(2, 0.5))"),
    "partial of words": (functools.partial(_scaled, mode="same", flip=True), "_scaled(flip=True, mode='same')"),
    "partial of a tensor": (functools.partial(_scaled, by=torch.zeros(2)), "_scaled(by=Tensor)"),
    "partial of a function": (functools.partial(_scaled, then=noise), "_scaled(then=noise)"),
    "partial of an object": (functools.partial(Shifted()), "Shifted()"),
}


@pytest.mark.parametrize(("augment", "name"), AUGMENTATIONS.values(), ids=AUGMENTATIONS)
def test_a_run_is_carried_on_only_with_the_augmentation_it_was_begun_with(tmp_path: Path, augment: Any, name: Any):
    settings = {"epochs": 1}
    fit_small(made_bnn(), augment, out=tmp_path, **settings)
    assert json.loads((tmp_path / "spec.json").read_text())["data"]["augment"] == name
    fit_small(made_bnn(), copy.deepcopy(augment), out=tmp_path, **settings)
    for other, its_name in AUGMENTATIONS.values():
        if its_name != name:
            with pytest.raises(ConfigError, match=re.escape(f"it has augment={name!r}, not {its_name!r}")):
                fit_small(made_bnn(), other, out=tmp_path, **settings)


def test_other_data_or_another_network_of_the_same_size_are_another_run(tmp_path: Path):
    fit_small(made_bnn(), out=tmp_path)
    x, y = made_data()
    with pytest.raises(ConfigError, match="it has data of fingerprint="):
        varlap.fit(made_bnn(), made_objective(), (x, y.flip(0)), augment=noise, out=tmp_path, **SETTINGS)
    other = made_bnn()
    other.network[2] = nn.Tanh()
    with pytest.raises(ConfigError, match="network"):
        fit_small(other, out=tmp_path)


def test_own_priors_and_curvatures_are_carried_on(tmp_path: Path):
    class Tight:
        centre, learnt = "zero", False

        def scale(self, weight: Any) -> float:
            return 0.3

    def bnn() -> varlap.BNN:
        return varlap.BNN(made_bnn().network, prior=Tight())

    alone, carried_on = bnn(), bnn()
    fit_small(alone)
    with pytest.raises(Stopped):
        fit_small(bnn(), at_step(8, stop), out=tmp_path, save_every=1)
    fit_small(carried_on, out=tmp_path, save_every=1)
    assert same_bits(alone, carried_on)


def test_a_refused_folder_is_not_locked(tmp_path: Path):
    fit_small(made_bnn(), out=tmp_path)
    with pytest.raises(ConfigError) as refusal:
        fit_small(made_bnn(), out=tmp_path, lr=2e-2)
    assert refusal  # and kept alive
    fit_small(made_bnn(), out=tmp_path)


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_a_nan_in_a_later_part_of_the_first_step_is_named(on_nonfinite: str):
    def poison(x: torch.Tensor) -> None:
        x[-1, 0] = float("nan")

    if on_nonfinite == "skip":
        assert fit_small(made_bnn(), at_step(0, poison), accumulate=2, on_nonfinite="skip").epochs[0]["skipped"] == 1
    else:
        with pytest.raises(NonFiniteError, match="step 0: x holds NaN"):
            fit_small(made_bnn(), at_step(0, poison), accumulate=2)


def test_a_compiled_step_that_is_not_sound_is_never_in_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, _: graph)

    def poison(x: torch.Tensor) -> None:
        x[0, 0] = float("nan")

    with pytest.raises(NonFiniteError, match="step 7"):
        fit_small(made_bnn(), at_step(7, poison), out=tmp_path, save_every=1, compiled=True)
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
            x, y = made_data(32)
            return iter([] if self.passes > 3 else list(zip(x.split(8), y.split(8), strict=True)))

    with pytest.raises(varlap.errors.BatchError, match=r"epoch \d had 0 batches, not 4"):
        varlap.fit(made_bnn(), made_objective(), Once(), epochs=9, progress="none")


def test_a_nan_batch_does_not_spoil_the_scale_of_half_precision():
    bnn = made_bnn()
    step = varlap.TrainingStep(bnn, made_objective(), varlap.adam(bnn), precision="fp16", on_nonfinite="skip")
    x, y = made_data(10)
    step(x, y, number=0)
    scale = step.gradient_scale.value
    step(x * float("nan"), y, number=1)
    assert step.gradient_scale.value == scale
    assert step.objective.gradient_scale == 1


def test_a_logger_that_fails_does_not_end_the_training(caplog: pytest.LogCaptureFixture):
    class Down:
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            raise RuntimeError("server down")

    assert len(fit_small(made_bnn(), loggers=[Down()]).epochs) == 4
    assert "Down failed, the training goes on: server down" in caplog.text


def test_a_nan_in_the_validation_data_is_said_to_be_there():
    x, y = made_data(20)
    x[3, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="after epoch 0, in the validation data"):
        fit_small(made_bnn(), validation=(x, y))


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
        fit_small(made_bnn(), **change)


def test_a_folder_with_other_files_is_refused(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="is not empty and holds no run; choose another folder"):
        fit_small(made_bnn(), out=tmp_path)


def test_a_folder_is_one_processes_at_a_time(tmp_path: Path):
    def meanwhile(_: torch.Tensor) -> None:
        with pytest.raises(ConfigError, match="another process is writing to"):
            fit_small(made_bnn(), out=tmp_path)

    fit_small(made_bnn(), at_step(3, meanwhile), out=tmp_path)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    alone, carried_on = made_bnn(), made_bnn()
    fit_small(alone)
    with pytest.raises(Stopped):
        fit_small(made_bnn(), at_step(12, stop), out=tmp_path, save_every=2)
    *_, last = sorted((tmp_path / "checkpoints").iterdir())
    damaged = last / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    fit_small(carried_on, out=tmp_path, save_every=2)
    assert str(damaged.name) in caplog.text
    assert last.name in caplog.text
    assert same_bits(alone, carried_on)


def test_a_step_whose_checkpoint_was_damaged_is_written_again(tmp_path: Path):
    with pytest.raises(Stopped):
        fit_small(made_bnn(), at_step(12, stop), out=tmp_path, save_every=2)
    last = sorted((tmp_path / "checkpoints").iterdir())[-1]
    (last / "state.json").write_bytes(b"{}")
    with pytest.raises(Stopped):
        fit_small(made_bnn(), at_step(3, stop), out=tmp_path, save_every=2)
    again = newest(tmp_path)
    assert again is not None
    assert again.documents["state"]["step"] == 12


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew_in_silence(tmp_path: Path):
    fit_small(made_bnn(), out=tmp_path)
    for path in (tmp_path / "checkpoints").iterdir():
        (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints can be read"):
        fit_small(made_bnn(), out=tmp_path)


def test_a_checkpoint_is_a_model_too(tmp_path: Path):
    bnn = made_bnn()
    fit_small(bnn, out=tmp_path)
    last = sorted((tmp_path / "checkpoints").iterdir())[-1]
    assert same_bits(varlap.load(last, made_bnn().network), bnn)
    with pytest.raises(CheckpointError, match=r"is a run; give one of its models: .*/checkpoints/step-"):
        varlap.load(tmp_path, made_bnn().network)


def test_a_full_disk_does_not_end_the_training_but_is_told_at_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any) -> None:
        raise CheckpointError("no space left on device")

    bnn, alone = made_bnn(), made_bnn()
    fit_small(alone)
    monkeypatch.setattr(run_folder, "write_checkpoint", full)
    with pytest.raises(CheckpointError, match="no space left"):
        fit_small(bnn, out=tmp_path)
    assert caplog.text.count("the training goes on: no space left") == 3
    assert same_bits(alone, bnn)


def test_a_last_batch_of_one_item_is_refused_for_batch_norm_before_training():
    with pytest.raises(varlap.errors.BatchError, match=r"the last batch of an epoch has 1 item, .*batch_size=37"):
        fit_small(made_bnn(), batch_size=36)


def test_variances_that_run_away_are_named(caplog: pytest.LogCaptureFixture):
    bnn = made_bnn()
    with torch.no_grad():
        bnn.log_sigma["1.bias"].fill_(7.0)
    fit_small(bnn, epochs=1, objective=varlap.VL(37, 1e-6), lr=1e-6)
    assert "the largest σ is" in caplog.text
