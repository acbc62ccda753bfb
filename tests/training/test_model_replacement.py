"""A saved model that is replaced is the old one or the new one, wherever the process is stopped."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import varlap
from varlap.errors import CheckpointError
from varlap.training import checkpoint as module
from varlap.training.model_file import beside, load, save

KILLED = """
import os, sys
from torch import nn
import varlap
from varlap.training import checkpoint as module

original, calls = module._rename, 0

def dying(source, target):
    global calls
    calls += 1
    if calls == int(sys.argv[2]):
        os._exit(9)
    original(source, target)

module._rename = dying
varlap.BNN(nn.Linear(2, 1)).save(sys.argv[1])
"""


def model(value: float) -> varlap.BNN:
    bnn = varlap.BNN(nn.Linear(2, 1), "gaussian")
    nn.init.constant_(bnn.network.weight, value)
    return bnn


def value(path: Path) -> float:
    weight = load(path, nn.Linear(2, 1)).network.weight.detach()
    assert torch.equal(weight, weight[0, 0].expand_as(weight))
    return float(weight[0, 0])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("call", [1, pytest.param(2, id="2: between the renames")])
def test_after_a_kill_the_old_model_loads_and_the_next_save_clears_up(tmp_path: Path, call: int):
    path = tmp_path / "model"
    save(model(1.0), path)
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(call)], timeout=120)
    assert done.returncode == 9
    assert path.exists() == (call == 1)
    assert value(path) == 1.0
    save(model(2.0), path)
    assert value(path) == 2.0
    assert names(tmp_path) == ["model"]


def test_a_model_beside_a_file_of_lightning_survives_as_well(tmp_path: Path):
    file = tmp_path / "last.ckpt"
    file.write_text("")
    save(model(3.0), beside(file))
    beside(file).rename(tmp_path / ".last.model.1-0123abcd-0.old")
    assert value(file) == 3.0


def test_of_several_that_were_left_the_last_one_is_taken(tmp_path: Path):
    for number in (1, 2):
        save(model(number), tmp_path / f".model.1-0123abcd-{number}.old")
        os.utime(tmp_path / f".model.1-0123abcd-{number}.old", (number, number))
    assert value(tmp_path / "model") == 2.0


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), KeyboardInterrupt()], ids=["disk", "^C"])
def test_a_failure_at_a_rename_puts_the_old_model_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, call: int, when: str
):
    path = tmp_path / "model"
    save(model(1.0), path)
    calls = 0

    def failing(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls != call or when == "after":
            os.rename(source, target)
        if calls == call:
            raise error

    monkeypatch.setattr(module, "_rename", failing)
    with pytest.raises(CheckpointError if isinstance(error, OSError) else KeyboardInterrupt):
        save(model(2.0), path)
    assert names(tmp_path) == ["model"]
    assert value(path) == 1.0


def test_a_leftover_of_an_earlier_process_with_our_pid_is_no_obstacle(tmp_path: Path):
    path = tmp_path / "model"
    save(model(1.0), path)
    for kind in ("tmp", "old"):
        (tmp_path / f".model.{os.getpid()}-0123abcd-0.{kind}").mkdir()
    others = {
        f".model.new.{os.getpid()}",
        ".model.b.1-0123abcd-0.old",
    }  # the second is all that is left of another model
    for name in others:
        (tmp_path / name).mkdir()
    save(model(2.0), path)
    assert value(path) == 2.0
    assert set(names(tmp_path)) == {"model", *others}


def test_a_link_to_a_model_stays_a_link(tmp_path: Path):
    save(model(1.0), tmp_path / "model")
    (tmp_path / "link").symlink_to("model")
    save(model(2.0), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert value(tmp_path / "model") == value(tmp_path / "link") == 2.0
    assert names(tmp_path) == ["link", "model"]


def test_a_link_to_a_model_that_was_killed_between_the_renames_loads_and_is_saved_to(tmp_path: Path):
    (tmp_path / "models").mkdir()
    (tmp_path / "link").symlink_to("models/model")
    save(model(1.0), tmp_path / "models" / ".model.1-0123abcd-0.old")
    assert value(tmp_path / "link") == value(tmp_path / "models" / "model") == 1.0
    save(model(2.0), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert value(tmp_path / "link") == value(tmp_path / "models" / "model") == 2.0


def test_links_in_a_ring_are_named(tmp_path: Path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(CheckpointError):
        value(tmp_path / "a")
    with pytest.raises(CheckpointError):
        save(model(1.0), tmp_path / "a")


def test_the_old_model_of_a_process_that_is_between_its_renames_is_left_to_it(tmp_path: Path):
    path, others = tmp_path / "model", tmp_path / ".model.1-0123abcd-0.old"  # process 1 is always running
    save(model(1.0), others)
    assert value(path) == 1.0  # what is being replaced can be read
    save(model(2.0), path)
    assert value(others) == 1.0
    assert names(tmp_path) == [others.name, "model"]


def test_prune_leaves_a_model_that_can_still_be_found(tmp_path: Path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    hidden = tmp_path / f".model.{dead.pid}-0123abcd-0.old"
    save(model(1.0), hidden)
    module.prune(tmp_path, keep=1)
    assert value(tmp_path / "model") == 1.0
    save(model(2.0), tmp_path / "model")  # which clears up
    assert names(tmp_path) == ["model"]
