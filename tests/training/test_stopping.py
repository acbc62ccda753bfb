"""Claims about signals and time limits: what was computed is saved, and the same call carries on."""

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import at_step, fit_small, made_bnn, made_data, rows_of, same_bits

from varlap.errors import Interrupted, OutOfTime
from varlap.training.run_folder import newest

STEPS = 20  # 5 an epoch


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("stop_at", [7, 9])  # in the middle and at the end of an epoch
def test_a_signal_saves_and_raises_and_the_same_call_carries_on(tmp_path: Path, number: int, status: int, stop_at: int):
    handlers = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)]
    alone, carried_on = made_bnn(), made_bnn()
    rows = rows_of(fit_small(alone))
    with pytest.raises(Interrupted, match=f"a checkpoint was saved at step {stop_at + 1}") as caught:
        fit_small(made_bnn(), at_step(stop_at, lambda _: os.kill(os.getpid(), number)), out=tmp_path)
    assert caught.value.exit_status == status
    assert [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert rows_of(fit_small(carried_on, out=tmp_path)) == rows
    assert same_bits(alone, carried_on)


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
    alone, carried_on = made_bnn(), made_bnn()
    rows = rows_of(fit_small(alone))
    late = at_step(stop_at, lambda _: now.__setitem__(0, 10.0))
    if stop_at == STEPS - 1:
        assert rows_of(fit_small(carried_on, late, out=tmp_path, time_limit_s=10.0)) == rows
    else:
        with pytest.raises(OutOfTime, match=f"the time was over after step {stop_at + 1}; a checkpoint was saved"):
            fit_small(made_bnn(), late, out=tmp_path, time_limit_s=10.0)
        assert rows_of(fit_small(carried_on, out=tmp_path)) == rows
    assert same_bits(alone, carried_on)


def test_a_time_that_is_over_without_a_folder_says_that_nothing_carries_on():
    with pytest.raises(OutOfTime, match="its weights are in the network alone"):
        fit_small(made_bnn(), time_limit_s=1e-9)
    again = pickle.loads(pickle.dumps(OutOfTime(3, saved=True)))
    assert (again.step, again.saved, str(again)) == (3, True, str(OutOfTime(3, saved=True)))


def test_checkpoints_after_epochs_keep_their_pause_but_the_last_is_always_written(tmp_path: Path):
    fit_small(made_bnn(), out=tmp_path, num_checkpoints=9, save_pause_s=1e6)
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert [int(name.removeprefix("step-")) for name in saved] == [5, STEPS]


def test_a_checkpoint_that_is_due_at_the_end_of_an_epoch_needs_no_pause(tmp_path: Path):
    fit_small(made_bnn(), out=tmp_path, num_checkpoints=99, save_pause_s=1e6, save_every=5)
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert [int(name.removeprefix("step-")) for name in saved] == list(range(5, STEPS + 1, 5))


def test_a_run_that_stops_early_just_in_time_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr("varlap.training.loop.time", clock)
    settings: dict[str, Any] = {"validation": made_data(20), "epochs": 60, "patience": 3, "keep": "best", "lr": 0.1}
    alone, stopped = made_bnn(), made_bnn()
    history = fit_small(alone, **settings)
    last = int(history.epochs[-1]["step"])
    assert last < 60 * history.epochs[0]["step"]
    late = at_step(last - 1, lambda _: now.__setitem__(0, 10.0))
    assert rows_of(fit_small(stopped, late, out=tmp_path, time_limit_s=10.0, **settings)) == rows_of(history)
    assert same_bits(alone, stopped)
