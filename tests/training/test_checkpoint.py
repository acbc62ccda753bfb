"""Claims about checkpoints: what is written comes back, and is whole or absent."""

import errno
import functools
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same_bits, write_small
from torch import nn

from varlap.errors import CheckpointError, ConfigError
from varlap.training import checkpoint as module, encoding
from varlap.training.checkpoint import (
    checkpoint_path,
    newest_checkpoint,
    prune,
    read_checkpoint,
    write_checkpoint,
)

slow = pytest.mark.slow


# -- round trips -----------------------------------------------------------------------------------------------------


def awkward_tensors() -> dict[str, torch.Tensor]:
    base = torch.randn(4, 6)
    return {
        "zero-dimensional": torch.tensor(2.5),
        "z first, a last": torch.randn(2),
        "bf16": torch.randn(3, 5).bfloat16(),
        "float64": torch.randn(7, dtype=torch.float64),
        "int64": torch.tensor([-(2**63), 2**63 - 1]),
        "bool": torch.tensor([True, False]),
        "not a number": torch.tensor([float("nan"), float("inf"), -0.0]),
        "payload of a nan": torch.tensor([0x7FC00123], dtype=torch.int32).view(torch.float32),
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "shares memory": base[0],
        "the same": base,
        "expanded": torch.ones(1, 3).expand(4, 3),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "no entries": torch.zeros(0, 3),
        "parameter": nn.Parameter(torch.randn(2)),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "µ.weight/0": torch.randn(1),
        "": torch.randn(1),
    }


def test_tensors_of_every_kind_come_back_bit_for_bit_and_in_order(tmp_path):
    tensors = awkward_tensors()
    expected = {name: t.detach().resolve_conj().resolve_neg() for name, t in tensors.items()}
    write_checkpoint(tmp_path / "c", {"all": tensors, "none": {}}, {})
    found = read_checkpoint(tmp_path / "c")
    assert list(found.tensors) == ["all", "none"]
    assert found.tensors["none"] == {}
    assert_same_bits(found.tensors["all"], expected)
    for tensor in found.tensors["all"].values():
        assert tensor.is_contiguous()
        assert tensor.device.type == "cpu"
        assert not tensor.requires_grad
    found.tensors["all"]["the same"].zero_()
    assert found.tensors["all"]["shares memory"].any(), "what was read shares no memory"


@pytest.mark.parametrize("dtype", sorted(encoding.DTYPES, key=str), ids=str)
def test_every_dtype_that_is_taken_comes_back(tmp_path, dtype):
    tensor = torch.arange(16, dtype=torch.uint8).view(torch.uint8)
    tensor = tensor % 2 == 0 if dtype == torch.bool else tensor.view(dtype)
    write_checkpoint(tmp_path / "c", {"t": {"x": tensor}}, {})
    assert_same_bits(read_checkpoint(tmp_path / "c").tensors["t"], {"x": tensor})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_come_back_on_the_cpu(tmp_path):
    tensor = torch.randn(3, device="cuda")
    write_checkpoint(tmp_path / "c", {"t": {"x": tensor}}, {})
    assert_same_bits(read_checkpoint(tmp_path / "c").tensors["t"], {"x": tensor})


def test_documents_come_back_as_they_were(tmp_path):
    documents = {
        "a": {"z": 0.1, "a": [1, [2, {"µ": "é\n\ud800"}], None, True, -0.0, 5e-324, 2**80, 1e308], "": {}},
        "list": [],
        "text": "x",
        "tuple": (1, 2),
        "none": None,
    }
    write_checkpoint(tmp_path / "c", {}, documents)
    found = read_checkpoint(tmp_path / "c").documents
    assert found == documents | {"tuple": [1, 2]}
    assert repr(found["a"]) == repr(documents["a"]), "order, types and signs of zero as well"


def test_an_empty_checkpoint_is_one(tmp_path):
    write_checkpoint(tmp_path / "c", {}, {})
    assert read_checkpoint(tmp_path / "c") == module.Checkpoint({}, {})


def test_paths_may_be_text_and_missing_parents_are_made(tmp_path):
    write_checkpoint(str(tmp_path / "a" / "b" / "c"), {}, {"d": 1})
    assert read_checkpoint(str(tmp_path / "a" / "b" / "c")).documents == {"d": 1}


# -- what cannot be written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"loss": [1.0, float("nan")]}, r"documents\['d'\]\['loss'\]\[1\] is nan, which JSON has no number for; write"),
        (float("-inf"), r"documents\['d'\] is -inf"),
        ({3: 1}, r"documents\['d'\] has the key 3, but JSON's keys are text; use '3'"),
        ({"w": torch.ones(1)}, r"documents\['d'\]\['w'\] is a Tensor, which JSON cannot hold; .* among the tensors"),
        ({"f": print}, "is a builtin_function_or_method, which JSON cannot hold"),
        (functools.reduce(lambda inner, _: [inner], range(5000), []), r"documents\['d'\] cannot be written as JSON"),
        ([10**5000], r"documents\['d'\] cannot be written as JSON: .*digits"),
    ],
)
def test_a_document_that_json_would_change_is_refused_by_its_place(tmp_path, document, message):
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path / "c", {}, {"d": document})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": 3}, r"tensors\['t'\]\['x'\] is a int, which safetensors cannot hold; convert it"),
        ({"x": torch.ones(2, dtype=torch.complex128)}, r"is torch.complex128, torch.strided, which safetensors cannot"),
        ({"x": torch.ones(2, 2).to_sparse()}, r"is torch.float32, torch.sparse_coo"),
        ({"__metadata__": torch.ones(2)}, r"has the name '__metadata__', which safetensors cannot hold"),
        ({3: torch.ones(2)}, r"has the name 3, which"),
        ({"\ud800": torch.ones(2)}, r"tensors\['t'\] cannot be written as safetensors"),
        ({"x": torch.ones(2, device="meta")}, r"tensors\['t'\] cannot be written as safetensors.*tensors with data"),
    ],
)
def test_a_tensor_that_safetensors_cannot_hold_is_refused_by_its_place(tmp_path, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path / "c", {"before": {"x": torch.ones(1)}, "t": tensors}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a.b", "a b", "-a", "a\n", "x" * 101, "ä"])
def test_names_that_could_leave_the_folder_are_refused(tmp_path, name):
    for tensors, documents in (({name: {}}, {}), ({}, {name: 1})):
        with pytest.raises(CheckpointError, match="cannot be a file of a checkpoint; use a name of"):
            write_checkpoint(tmp_path / "c", tensors, documents)
    with pytest.raises(CheckpointError, match=r"'manifest.json' cannot be a file"):
        write_checkpoint(tmp_path / "c", {}, {"manifest": 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "checkpoint", "dangling link"])
def test_what_exists_already_is_never_replaced(tmp_path, kind):
    path = tmp_path / "c"
    if kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("mine")
    elif kind == "checkpoint":
        write_small(path)
    else:
        path.symlink_to("nowhere")
    before = os.lstat(path)
    with pytest.raises(CheckpointError, match=r"exists already; delete it first, or choose another path"):
        write_small(path)
    assert os.lstat(path) == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_parent_that_is_a_file_is_a_checkpoint_error_with_the_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/c cannot be written: .*; choose an `out` that can be written"):
        write_small(tmp_path / "file" / "c")


# -- whole or absent -------------------------------------------------------------------------------------------------


CALLS = ("_write", "_fsync", "_rename")


class Failure:
    """Makes the n-th call to the disk fail, before it does anything, half-way, or just after it is done."""

    def __init__(self, monkeypatch, at: int, when: str, error: BaseException) -> None:
        self.calls, self.at, self.when, self.error = 0, at, when, error
        for name in CALLS:
            monkeypatch.setattr(module, name, functools.partial(self.call, name, getattr(module, name)))

    def call(self, name, original, *arguments):
        self.calls += 1
        if self.calls - 1 != self.at:
            return original(*arguments)
        if self.when == "after":
            original(*arguments)
        elif self.when == "half-way" and name == "_write":
            file, data = arguments
            original(file, data[: len(data) // 2])
        raise self.error


def test_a_checkpoint_is_brought_to_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    order = []
    for name in CALLS:
        original = getattr(module, name)

        def record(*arguments, name=name, original=original):
            target = arguments[0]
            if name == "_fsync":
                target = os.readlink(f"/proc/self/fd/{target}") if os.path.exists("/proc/self/fd") else ""
            order.append((name, Path(getattr(target, "name", target)).name))
            return original(*arguments)

        monkeypatch.setattr(module, name, record)
    write_checkpoint(tmp_path / "c", {"model": {}}, {"d": 1})
    assert [name for name, _ in order] == ["_write", "_fsync"] * 3 + ["_fsync", "_rename", "_fsync"]
    if Path("/proc/self/fd").exists():
        synced = [target for name, target in order if name == "_fsync"]
        assert synced[:3] == ["model.safetensors", "d.json", "manifest.json"]
        assert synced[3].startswith(f".c.{os.getpid()}-")
        assert synced[4] == tmp_path.name


@pytest.mark.parametrize("when", ["before", "half-way", "after"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()], ids=["disk full", "interrupt"]
)
def test_a_failure_at_any_call_leaves_the_checkpoint_before_and_no_trace(tmp_path, when, error):
    write_small(checkpoint_path(tmp_path, 1), 1)
    kind = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
    for at in range(100):
        with pytest.MonkeyPatch.context() as patched:
            failure = Failure(patched, at, when, error)
            try:
                write_small(checkpoint_path(tmp_path, 2), 2)
            except kind as caught:
                if kind is CheckpointError:
                    assert re.search(  # noqa: PT017
                        r"step-000000000002 cannot be written: No space left on device; free some space, or choose",
                        str(caught),
                    )
        if failure.calls <= at:
            break
        assert [path.name for path in tmp_path.iterdir()] == ["step-000000000001"], (at, failure.calls)
        assert newest_checkpoint(tmp_path)[1].documents["progress"]["step"] == 1
    assert at == 2 * 5 + 3, "every write, fsync and rename had its turn"
    assert newest_checkpoint(tmp_path)[1].documents["progress"]["step"] == 2


@pytest.mark.parametrize(
    ("at", "newest"),
    [
        pytest.param(2, 1, marks=slow, id="in a file"),
        pytest.param(4, 1, marks=slow, id="in the manifest"),
        pytest.param(6, 1, id="before the rename"),
        pytest.param(7, 2, marks=slow, id="after the rename"),
        pytest.param(8, 2, marks=slow, id="before the one before is deleted"),
        pytest.param(9, 2, marks=slow, id="while the one before is deleted"),
        pytest.param(10, 2, marks=slow, id="never"),
    ],
)
def test_a_process_killed_at_any_call_leaves_the_newest_checkpoint_whole(tmp_path, at, newest):
    program = """
import os, sys, torch
from varlap.training import checkpoint as module
calls = 0
def dying(original):
    def call(*arguments):
        global calls
        calls += 1
        if calls == int(sys.argv[2]):
            os._exit(9)
        return original(*arguments)
    return call
for name in ("_write", "_fsync", "_rename"):
    setattr(module, name, dying(getattr(module, name)))
module.write_checkpoint(module.checkpoint_path(sys.argv[1], 2), {"model": {"w": torch.ones(9)}}, {})
module.prune(sys.argv[1], keep=1)
"""
    write_checkpoint(checkpoint_path(tmp_path, 1), {}, {})
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path), str(at)], timeout=60)
    assert done.returncode == (0 if at == 10 else 9)
    assert newest_checkpoint(tmp_path)[0] == checkpoint_path(tmp_path, newest)
    left = [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")]
    assert all(re.fullmatch(r"\.step-0{11}[12]\.\d+-[0-9a-f]{8}-\d+\.(tmp|gone)", name) for name in left)
    prune(tmp_path, keep=5)
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")], "leftovers of the dead go"


def test_an_interrupt_never_removes_a_folder_that_another_process_put_there(tmp_path, monkeypatch):
    def overtaken(source, target):
        target.mkdir()
        (target / "theirs").write_text("")
        os.rename(source, target)

    monkeypatch.setattr(module, "_rename", overtaken)
    with pytest.raises(CheckpointError, match="cannot be written: Directory not empty"):
        write_small(tmp_path / "c")
    assert [path.name for path in tmp_path.rglob("*")] == ["c", "theirs"]


def test_a_failure_before_the_first_file_spares_a_folder_that_came_meanwhile(tmp_path, monkeypatch):
    def overtaken(where, tensors):
        write_small(tmp_path / "c")
        raise KeyboardInterrupt

    original = module.tensor_bytes
    monkeypatch.setattr(module, "tensor_bytes", lambda *a: overtaken(*a) if a[1] == {"x": 0} else original(*a))
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "c", {"t": {"x": 0}}, {})
    assert read_checkpoint(tmp_path / "c").documents["progress"]["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


# -- choosing and deleting -------------------------------------------------------------------------------------------


def test_newest_is_by_step_and_only_exact_names_count(tmp_path):
    assert newest_checkpoint(tmp_path / "absent") is None
    assert newest_checkpoint(tmp_path) is None
    for step in (9, 10, 2):
        write_small(checkpoint_path(tmp_path, step), step)
    for name in ("step-11", "step-0000000000011", ".step-000000000099.1-00000000-0.tmp", "step-٠٠٠٠٠٠٠٠٠٠٩٩", "best"):
        write_small(tmp_path / name, 99)
    (tmp_path / "step-000000000077").write_text("a file")
    (tmp_path / "step-000000000078").symlink_to("best")
    path, found = newest_checkpoint(tmp_path)
    assert path == checkpoint_path(tmp_path, 10)
    assert found.documents["progress"]["step"] == 10


def test_damaged_ones_are_named_in_a_warning_and_skipped(tmp_path, caplog):
    for step in (1, 2, 3):
        write_small(checkpoint_path(tmp_path, step), step)
    (checkpoint_path(tmp_path, 3) / "manifest.json").unlink()
    (checkpoint_path(tmp_path, 2) / "model.safetensors").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        path, _ = newest_checkpoint(tmp_path)
    assert path == checkpoint_path(tmp_path, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert re.search(r"step-000000000003 is skipped: .*manifest\.json does not exist", caplog.messages[0])
    assert re.search(r"step-000000000002 is skipped: .*model\.safetensors is damaged: it has 0", caplog.messages[1])


def test_prune_keeps_the_newest_and_clears_what_the_dead_left(tmp_path):
    for step in range(5):
        write_small(checkpoint_path(tmp_path, step), step)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    ours = f".step-000000000009.{os.getpid()}-{module._RUN}-0.tmp"
    kept = [
        *(ours, ".step-000000000009.1-0123abcd-0.tmp", ".hidden", "best"),
        ".step-000000000001.1-0123abcd-0.old",  # process 1 is always running
        f".model.{dead.pid}-0123abcd-0.old",  # all that is left of it
    ]
    gone = [
        f".step-000000000009.{dead.pid}-0123abcd-0.tmp",
        f".step-000000000009.{os.getpid()}-0123abcd-0.tmp",  # of an earlier process that had this one's pid
        f".step-000000000001.{dead.pid}-0123abcd-0.old",
        ".step-000000000000.1-0123abcd-0.gone",
    ]
    for name in kept + gone:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("")
    prune(tmp_path, keep=2)
    assert {path.name for path in tmp_path.iterdir()} == {"step-000000000003", "step-000000000004", *kept}
    prune(tmp_path / "absent", keep=2)
    with pytest.raises(ConfigError, match=r"prune\(keep=0\) must be at least 1"):
        prune(tmp_path, keep=0)


def test_prune_does_not_let_damaged_checkpoints_push_out_whole_ones(tmp_path, monkeypatch):
    for step in (1, 2, 3, 4):
        write_small(checkpoint_path(tmp_path, step), step)
    for step in (2, 4):
        (checkpoint_path(tmp_path, step) / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(module, "_known_whole", set())  # as in the process that carries the run on
    prune(tmp_path, keep=3)
    assert [step for step in range(6) if checkpoint_path(tmp_path, step).exists()] == [1, 2, 3, 4]
    prune(tmp_path, keep=1)
    assert [step for step in range(6) if checkpoint_path(tmp_path, step).exists()] == [3, 4]
    write_small(checkpoint_path(tmp_path, 5), 5)
    prune(tmp_path, keep=1)
    assert [step for step in range(6) if checkpoint_path(tmp_path, step).exists()] == [5]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=repr)
def test_prune_interrupted_anywhere_leaves_no_half_folder_with_a_steps_name(tmp_path, monkeypatch, error):
    def half_removed(path, ignore_errors):
        next(iter(Path(path).iterdir())).unlink()
        raise error

    for step in range(4):
        write_small(checkpoint_path(tmp_path, step), step)
    monkeypatch.setattr(module.shutil, "rmtree", half_removed)
    with pytest.raises(type(error)):
        prune(tmp_path, keep=1)
    steps = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    for path in steps:
        read_checkpoint(path)
    monkeypatch.undo()
    prune(tmp_path, keep=1)
    assert list(tmp_path.iterdir()) == [checkpoint_path(tmp_path, 3)]


@pytest.mark.parametrize("step", [-1, 10**12])
def test_steps_without_a_name_are_refused(tmp_path, step):
    with pytest.raises(ConfigError, match=rf"step={step}\) must be between 0 and 999999999999"):
        checkpoint_path(tmp_path, step)
