"""Claims about runs that are carried on: they end with the bits of a run that was never stopped."""

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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
    rows_of,
    same_bits,
    stop,
)
from torch import nn

import varlap
from varlap.errors import ConfigError, NonFiniteError
from varlap.training import TrainingStep, loop
from varlap.training.run_folder import newest


def _convolutional_bnn() -> varlap.BNN:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(1, 3, 2, padding=1, bias=False), nn.BatchNorm2d(3), nn.Softplus(), nn.Conv2d(3, 2, 2)
    network = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *convolutions, nn.Flatten(), nn.Linear(8, 3))
    return varlap.BNN(network.to(memory_format=torch.channels_last))


@pytest.mark.parametrize("stop_at", [1, 7, 12, 15, 19])
@pytest.mark.parametrize(
    "objective",
    [
        made_objective,
        lambda: made_objective(curvature=varlap.Fisher(every=2)),
        lambda: made_objective(variances="closed-form", beta_warmup_steps=6),
        lambda: varlap.VI(37, 0.1),
        lambda: varlap.MAP(37, 0.1),
    ],
    ids=["default", "every", "closed-form", "vi", "map"],
)
def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(tmp_path: Path, objective: Any, stop_at: int):
    settings = {"save_every": 2, "validation": made_data(20), "keep": "best"}
    alone, stopped = made_bnn(), made_bnn()
    rows = rows_of(fit_small(alone, objective=objective(), out=tmp_path / "alone", **settings))
    with pytest.raises(Stopped):
        fit_small(stopped, at_step(stop_at, stop), objective(), out=tmp_path / "run", **settings)
    carried_on = made_bnn()
    history = fit_small(carried_on, objective=objective(), out=tmp_path / "run", **settings)
    assert rows_of(history) == rows
    assert same_bits(alone, carried_on)
    ends = [newest(tmp_path / name) for name in ("alone", "run")]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].documents == ends[1].documents
    for group, tensors in ends[0].tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, ends[1].tensors[group][name]), f"{group}/{name}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("make_bnn", [made_bnn, _convolutional_bnn])
@pytest.mark.parametrize("stop_at", [7, 9])  # in the middle of an epoch, and before its smaller last batch
@pytest.mark.parametrize("settings", [{}, {"optimizer": "SGD", "momentum": 0.9}], ids=["Adam", "SGD"])
def test_a_compiled_run_on_a_gpu_is_bitwise_equal_to_an_uninterrupted_one(
    tmp_path: Path, stop_at: int, make_bnn: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # else its kernels are chosen by their times
    alone, carried_on = make_bnn().cuda(), make_bnn().cuda()
    rows = rows_of(fit_small(alone, out=tmp_path / "alone", save_every=1, **settings))
    with pytest.raises(Stopped):
        fit_small(make_bnn().cuda(), at_step(stop_at, stop), out=tmp_path / "run", save_every=1, **settings)
    assert rows_of(fit_small(carried_on, out=tmp_path / "run", save_every=1, **settings)) == rows
    assert same_bits(alone, carried_on)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_nan_on_a_gpu_ends_the_training_with_the_state_of_the_step_before(tmp_path: Path):
    poisoned, expected = made_bnn().cuda(), made_bnn().cuda()
    with pytest.raises(NonFiniteError, match="step 8"):
        fit_small(poisoned, at_step(8, lambda x: x.fill_(float("nan"))), out=tmp_path / "nan", save_every=1)
    with pytest.raises(Stopped):
        fit_small(expected, at_step(8, stop), out=tmp_path / "stopped", save_every=1)
    assert same_bits(poisoned, expected)


def test_what_a_file_holds_comes_back_in_the_memory_format_it_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    seen: list[tuple[Any, Any]] = []

    def step(*args: Any, **options: Any) -> TrainingStep:
        seen.append(args[1:])
        return TrainingStep(*args, **options)

    monkeypatch.setattr(loop, "TrainingStep", step)
    alone, carried_on = _convolutional_bnn(), _convolutional_bnn()
    fit_small(alone)
    with pytest.raises(Stopped):
        fit_small(_convolutional_bnn(), at_step(8, stop), out=tmp_path, save_every=1)
    fit_small(carried_on, out=tmp_path)
    assert same_bits(alone, carried_on)
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
    alone, carried_on = made_bnn(), made_bnn()
    settings = {"optimizer": optimizer, "lr": 1e-3, "log_sigma_lr_multiplier": 2.0, "save_every": 1}
    fit_small(alone, **settings)
    with pytest.raises(Stopped):
        fit_small(made_bnn(), at_step(8, stop), out=tmp_path, **settings)
    fit_small(carried_on, out=tmp_path, **settings)
    assert same_bits(alone, carried_on)


def test_a_run_by_nadam_in_double_precision_is_carried_on_bitwise(tmp_path: Path):
    """NAdam remembers a product of momenta in single precision, whatever that of the parameters is."""
    alone, carried_on = made_bnn().double(), made_bnn().double()
    settings = {"optimizer": "NAdam", "lr": 1e-3, "save_every": 1}
    fit_small(alone, **settings)
    with pytest.raises(Stopped):
        fit_small(made_bnn().double(), at_step(8, stop), out=tmp_path, **settings)
    fit_small(carried_on, out=tmp_path, **settings)
    assert same_bits(alone, carried_on)


def test_a_data_set_is_carried_on(tmp_path: Path):
    x, y = made_data()
    train = torch.utils.data.TensorDataset(x, y)
    alone, carried_on = made_bnn(), made_bnn()
    varlap.fit(alone, made_objective(), train, augment=noise, **SETTINGS)
    with pytest.raises(Stopped):
        varlap.fit(
            made_bnn(), made_objective(), train, augment=at_step(8, stop), out=tmp_path, save_every=3, **SETTINGS
        )
    varlap.fit(carried_on, made_objective(), train, augment=noise, out=tmp_path, save_every=3, **SETTINGS)
    assert same_bits(alone, carried_on)


def test_a_setting_without_consequence_does_not_keep_a_run_from_being_carried_on(tmp_path: Path):
    alone, carried_on = made_bnn(), made_bnn()
    fit_small(alone)
    with pytest.raises(Stopped):
        fit_small(made_bnn(), at_step(8, stop), out=tmp_path, save_every=1)
    with pytest.raises(ConfigError, match=r"it has momentum=0\.0, not 0\.9"):
        fit_small(made_bnn(), out=tmp_path, optimizer="SGD")
    fit_small(carried_on, out=tmp_path, save_every=1, validate_every=2)  # which nobody goes by here
    assert same_bits(alone, carried_on)


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

        augment.__qualname__ = noise.__qualname__
        return augment

    with pytest.raises(Stopped):
        fit_small(made_bnn(), each_step(stop_at=7), out=tmp_path / "run", save_every=1)
    history = fit_small(made_bnn(), each_step(), out=tmp_path / "run", save_every=1)
    assert [row["seconds"] for row in history.epochs] == [50.0, 50.0, 50.0, 50.0]


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
    first, again = made_bnn(), made_bnn()
    rows = fit_small(first, out=tmp_path).epochs
    assert fit_small(again, at_step(0, stop), out=tmp_path).epochs == rows
    assert same_bits(first, again)


def test_fit_leaves_the_callers_random_state_alone(tmp_path: Path):
    bnn = made_bnn()
    before = torch.get_rng_state()
    fit_small(bnn, out=tmp_path, validation=made_data(20))
    varlap.fit(bnn, made_objective(), torch.utils.data.TensorDataset(*made_data()), **SETTINGS)
    assert torch.equal(torch.get_rng_state(), before)
