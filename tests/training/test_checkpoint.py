"""Claims about checkpoints: whole or absent, every byte vouched for, nothing that is read can run code."""

import errno
import functools
import hashlib
import io
import json
import logging
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import varlap
from figures import record
from varlap.errors import CheckpointError, ConfigError, NetworkError, VarlapError, VarlapWarning
from varlap.likelihoods.choose import BUILT_IN
from varlap.training import checkpoint as module, encoding, model_file
from varlap.training.checkpoint import (
    checkpoint_path,
    newest_checkpoint,
    prune,
    read_checkpoint,
    write_checkpoint,
)
from varlap.training.model_file import load, save

GOLDEN = Path(__file__).parents[1] / "golden"
slow = pytest.mark.slow


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        assert bits(tensor) == bits(other[name]), name


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().clone(memory_format=torch.contiguous_format).untyped_storage())


def write_small(path: Path, step: int = 3) -> None:
    tensors = {
        "model": {"w": torch.arange(6.0).reshape(2, 3) + step, "b": torch.zeros(2, dtype=torch.bfloat16)},
        "optimizer": {"step": torch.tensor(step)},
        "empty": {},
    }
    write_checkpoint(path, tensors, {"progress": {"step": step, "losses": [0.5, None, True]}})


def sign_again(path: Path) -> None:
    """Make a manifest that vouches for whatever the files hold now."""
    files = {}
    for file in sorted(path.iterdir()):
        if file.name != "manifest.json":
            data = file.read_bytes()
            files[file.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    seal(path, {"format": "varlap checkpoint", "version": 1, "files": files})


def seal(path: Path, manifest: dict) -> None:
    (path / "manifest.json").write_bytes(module._sealed(manifest))


def refused(path: Path, match: str) -> CheckpointError:
    with pytest.raises(CheckpointError, match=match) as caught:
        read_checkpoint(path)
    assert str(path) in str(caught.value)
    return caught.value


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write_small(tmp_path / "small")
    return tmp_path / "small"


# -- round trips ----------------------------------------------------------------------------------------------------


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


# -- what cannot be written -----------------------------------------------------------------------------------------


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


# -- whole or absent ------------------------------------------------------------------------------------------------

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


# -- choosing and deleting ------------------------------------------------------------------------------------------


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


# -- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_trials", [100, pytest.param(1000, marks=slow)])
def test_a_flipped_byte_or_a_truncation_anywhere_is_found(tmp_path, num_trials, caplog):
    chance = random.Random(0)
    write_small(checkpoint_path(tmp_path, 1), 1)
    newest = checkpoint_path(tmp_path, 2)
    write_small(newest, 2)
    files = sorted(newest.iterdir())
    for trial in range(num_trials):
        file = files[trial % len(files)]
        good = file.read_bytes()
        place = chance.randrange(len(good))
        changed = bytes([good[place] ^ chance.randrange(1, 256)])
        bad = good[:place] if trial % 3 == 0 else good[:place] + changed + good[place + 1 :]
        file.write_bytes(bad)
        error = refused(newest, ".")
        # A manifest may be at fault by naming a file that is not there.
        assert file.name in str(error) or "manifest.json" in str(error), (file.name, place)
        found = newest_checkpoint(tmp_path)
        assert found[0] == checkpoint_path(tmp_path, 1), (file.name, place)
        file.write_bytes(good)
    assert newest_checkpoint(tmp_path)[0] == newest
    record("flipped bytes and truncations", tried=num_trials, found=num_trials, loaded_silently=0)


def test_every_single_byte_of_the_manifest_matters(small):
    file = small / "manifest.json"
    good = file.read_bytes()
    for place in range(len(good)):
        for other in {good[place] ^ 1, good[place] ^ 32, ord(" "), ord("\t")} - {good[place]}:
            file.write_bytes(good[:place] + bytes([other]) + good[place + 1 :])
            refused(small, r"manifest\.json")
    file.write_bytes(good + b"\n")
    refused(small, r"manifest\.json is damaged")


def test_files_that_the_manifest_does_not_know_are_ignored(small):
    expected = read_checkpoint(small).documents
    (small / "other.json").write_text("not json")
    (small / "evil.pkl").write_bytes(b"")
    assert read_checkpoint(small).documents == expected


def test_missing_things_are_named(small, tmp_path):
    refused(tmp_path / "absent", r"absent/manifest\.json does not exist; give the folder of a whole varlap checkpoint")
    (small / "model.safetensors").unlink()
    refused(small, r"model\.safetensors does not exist")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", r"file/manifest\.json cannot be read: .*Not a directory")
    with pytest.raises(CheckpointError, match="cannot be read: embedded null byte"):
        read_checkpoint("a\0b")


@pytest.mark.parametrize("name", ["model.safetensors", "progress.json", "manifest.json"])
def test_only_regular_files_are_read(small, tmp_path, name):
    file, elsewhere = small / name, tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    refused(small, rf"{name} cannot be read: it is a symbolic link")
    file.unlink()
    os.mkfifo(file)
    refused(small, rf"{name} is damaged: it is not a regular file")
    file.unlink()
    file.mkdir()
    refused(small, rf"{name} (is damaged: it is not a regular file|cannot be read: .*Is a directory)")


def test_a_newer_version_asks_for_an_upgrade(small):
    seal(small, {"format": "varlap checkpoint", "version": 2, "files": {}})
    refused(
        small,
        r"has version 2, but this varlap reads up to 1; upgrade it: git pull, then pip install \. in the checkout",
    )


@pytest.mark.parametrize(
    "manifest",
    [[], 3, None, {}, {"format": "zip"}, {"format": "varlap checkpoint"},
     {"format": "varlap checkpoint", "version": "1"}, {"format": "varlap checkpoint", "version": True}],
    ids=str,
)  # fmt: skip
def test_another_format_is_not_taken_for_a_checkpoint(small, manifest):
    (small / "manifest.json").write_text(json.dumps(manifest))
    refused(small, "is not the manifest of a varlap checkpoint; give a folder that varlap wrote")


GOOD_ENTRY = {"bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        *[
            ({name: GOOD_ENTRY}, "is no file name of a checkpoint")
            for name in ("../secret.json", "/etc/secret.json", "..", "", "a/b.json", "..json", ".json", "a.pkl",
                         "manifest.json", "a.json\n", "a\0.json", "a\\b.json", "C:a.json", "a" * 101 + ".json")
        ],
        *[
            ({"progress.json": entry}, r"it gives no size and SHA-256 for progress\.json")
            for entry in (None, [], {}, {"bytes": 2}, {"sha256": ""}, {"bytes": "2", "sha256": ""},
                          {"bytes": True, "sha256": ""}, {"bytes": 2.0, "sha256": ""}, {"bytes": 2, "sha256": 3})
        ],
        *[
            ({"progress.json": GOOD_ENTRY | {"bytes": size}}, rf"progress\.json .* has \d+ bytes instead of {size}")
            for size in (2, -1, 0, 2**62, 10**30)
        ],
        (None, "it has no list of files"),
        ([], "it has no list of files"),
    ],
    ids=str,
)  # fmt: skip
def test_a_well_signed_manifest_is_not_believed_either(small, tmp_path, files, message):
    (tmp_path / "secret.json").write_text("{}")
    seal(small, {"format": "varlap checkpoint", "version": 1, "files": files})
    refused(small, message)


@pytest.mark.parametrize("depth", [50, 300, 900, 5000])
def test_a_manifest_nested_so_deep_that_it_cannot_be_written_again_is_refused(small, depth):
    nested = "[" * depth + "]" * depth
    (small / "manifest.json").write_text(f'{{"format": "varlap checkpoint", "version": 1, "files": {nested}}}')
    refused(small, r"manifest\.json is damaged")


def test_a_huge_manifest_is_not_read_into_memory(small):
    with (small / "manifest.json").open("r+b") as file:
        file.truncate(2**40)  # a hole, which takes no space on disk
    refused(small, "1099511627776 bytes are too many for a manifest")


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"{", b"NaN", b"Infinity", b"-1e999", b"[" * 99999, b"1" * 9999, b"\xef\xbb\xbf{}", b"3\x00"],
    ids=range(10),
)
def test_well_signed_text_that_is_no_json_is_refused(small, data):
    (small / "progress.json").write_bytes(data)
    sign_again(small)
    refused(small, r"progress\.json is damaged: it is no JSON document")


def safetensors_file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list, start: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (2**63).to_bytes(8, "little"),
        safetensors_file({"x": entry("F32", [2**61], 0, 4)}, b"1234"),
        safetensors_file({"x": entry("F32", [2**40, 2**40], 0, 4)}, b"1234"),
        safetensors_file({"x": entry("F32", [1], 0, 2**40)}, b"1234"),
        safetensors_file({"x": entry("F32", [-1], 0, 4)}, b"1234"),
        safetensors_file({"x": entry("F8_E8M0", [4], 0, 4), "__metadata__": {"order": '["x"]'}}, b"1234"),
        safetensors_file({"x": entry("F32", [1], 0, 4)}, b"1234"),
        safetensors_file({"x": entry("F32", [1], 0, 4), "__metadata__": {"order": "[]"}}, b"1234"),
        safetensors_file({"x": entry("F32", [1], 0, 4), "__metadata__": {"order": '["x", "x"]'}}, b"1234"),
        safetensors_file({"x": entry("F32", [1], 0, 4), "__metadata__": {"order": "3"}}, b"1234"),
        safetensors_file({"x": entry("F32", [1], 0, 4), "__metadata__": {"order": '["x"]'}}, b"12345"),
        safetensors_file(b"[" * 100_000),
    ],
    ids=range(14),
)
def test_well_signed_bytes_that_are_no_safetensors_are_refused(small, data):
    (small / "model.safetensors").write_bytes(data)
    sign_again(small)
    refused(small, r"model\.safetensors is damaged: it is no safetensors file")


# -- foreign files --------------------------------------------------------------------------------------------------


class Reduced:
    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def zipped(data: bytes) -> bytes:
    """As `torch.save` writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3")
    return buffer.getvalue()


def malicious_files(marker: Path) -> dict[str, bytes]:
    touch = f"touch {marker}"
    write = f"open({str(marker)!r}, 'w').close()"
    header = pickle.dumps(Reduced(os.system, touch))
    tensors = safetensors_file({"x": entry("U8", [len(header)], 0, len(header))}, header)
    return {
        "os.system": pickle.dumps(Reduced(os.system, touch)),
        "eval": pickle.dumps(Reduced(eval, write), protocol=0),
        "zip": zipped(pickle.dumps({"state_dict": Reduced(exec, write)}, protocol=2)),
        "subprocess": pickle.dumps([Reduced(subprocess.check_call, ["touch", str(marker)])]),
        "pickle as the header of safetensors": safetensors_file(header),
        "pickle as the data of safetensors": tensors,
    }


def test_the_malicious_pickles_would_work(tmp_path):
    marker = tmp_path / "marker"
    for name in ("os.system", "eval", "subprocess"):
        pickle.loads(malicious_files(marker)[name])
        assert marker.exists()
        marker.unlink()
    torch.load(io.BytesIO(malicious_files(marker)["zip"]), weights_only=False)
    assert marker.exists()


@pytest.mark.parametrize("name", malicious_files(Path("marker")))
@pytest.mark.parametrize("signed", [False, True])
def test_a_pickle_under_any_name_is_refused_and_never_run(tmp_path, name, signed):
    marker = tmp_path / "marker"
    data = malicious_files(marker)[name]
    bnn = varlap.BNN(nn.Linear(2, 3))
    save(bnn, tmp_path / "model")
    for file in sorted(path.name for path in (tmp_path / "model").iterdir()):
        path = tmp_path / "attacked"
        shutil.copytree(tmp_path / "model", path)
        (path / file).write_bytes(data)
        if signed and file != "manifest.json":
            sign_again(path)
        refused(path, re.escape(file))
        with pytest.raises(CheckpointError):
            load(path, nn.Linear(2, 3))
        shutil.rmtree(path)
    assert not marker.exists()
    record(f"pickle {name!r} under every name, {'signed' if signed else 'unsigned'}", executed=0)


def test_nothing_here_can_unpickle():
    for part in (module, encoding, model_file):
        assert not re.search(r"pickle|torch\.load|torch\.save|\beval\(|\bexec\(", Path(part.__file__).read_text())


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Change some bytes, cut, repeat, insert, or replace a number or a word by another."""
    changed = bytearray(data)
    if chance.random() < 0.4:  # of one length, which gets past the sizes that a header gives
        for _ in range(chance.choice((1, 2, 5))):
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        return bytes(changed)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        start = chance.randrange(len(changed) + 1)
        end = min(len(changed), start + chance.choice((0, 1, 2, 8, 40)))
        pieces = (b"", bytes(chance.randrange(256) for _ in range(8)), bytes(changed[start:end]) * 3, b"0", b"-1", b'"',
                  b"[]", b"{}", b"null", b"NaN", b"1e999", b"9" * 25, b"F64", b"BF16", b"F4", b"\x00" * 8, b"own",
                  bytes([chance.randrange(256)]))  # fmt: skip
        changed[start:end] = chance.choice(pieces)
    if chance.random() < 0.1:
        numbers = list(re.finditer(rb"\d+", bytes(changed)))
        if numbers:
            number = chance.choice(numbers)
            changed[number.start() : number.end()] = str(chance.choice((0, 1, 7, 2**31, 2**63, 2**64))).encode()
    return bytes(changed)


@pytest.mark.filterwarnings("ignore:.* was saved from a network with other modules")  # a name in the file has changed
@pytest.mark.parametrize("num_trials", [500, pytest.param(10_000, marks=slow)])
def test_mutated_files_only_ever_raise_our_error(tmp_path, num_trials):
    """Half of them with right hashes, so that what parses foreign bytes is tried, and what builds a model from them."""
    chance = random.Random(1)
    network = lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))  # noqa: E731
    bnn = varlap.BNN(network(), varlap.Gaussian(num_outputs=1), varlap.EmpiricalBayesPrior(), select="1.*")
    path = tmp_path / "model"
    save(bnn, path)
    good = {file.name: file.read_bytes() for file in path.iterdir()}
    # Every stage must have been reached; other weights with right hashes are even a sound model.
    stages = ("SHA-256", "not what was written", "bytes instead of", "is no JSON document", "is no safetensors file",
              "cannot be built", "another network", "loaded")  # fmt: skip
    outcomes = dict.fromkeys(stages, 0)
    for trial in range(num_trials):
        signed = trial % 2 == 1
        name = chance.choice(sorted(good) if not signed else ["model.json", "model.safetensors"])
        bad = mutated(good[name], chance)
        if bad == good[name]:
            continue
        (path / name).write_bytes(bad)
        if signed:
            sign_again(path)
        try:
            load(path, network())
            outcomes["loaded"] += 1
            assert signed, "an unsigned change was not found"
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017
            for stage in stages:
                outcomes[stage] += stage in str(error)
        for file in {name, "manifest.json"}:
            (path / file).write_bytes(good[file])
    assert min(outcomes.values()) > 0, outcomes
    record("mutated files, half of them with right hashes", tried=num_trials, other_errors=0, where_found=outcomes)


# -- models ---------------------------------------------------------------------------------------------------------


class Tight:
    centre = "zero"
    learnt = False

    def scale(self, weight):
        return 0.1


class Laplacian(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_width = nn.Parameter(torch.zeros(()))

    def log_prob(self, outputs, targets):
        return -((outputs - targets).abs() * (-self.log_width).exp() + self.log_width).sum(1)

    def sample(self, outputs, generator, targets=None):
        return outputs + self.log_width.exp() * torch.randn(outputs.shape, generator=generator)

    def predict(self, outputs):
        return varlap.Prediction(mean=outputs)


class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x):
        return {"logits": self.second(self.first(x))}


def convnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def linear() -> nn.Module:
    return nn.Linear(2, 2)


MODELS = {
    "default": (convnet, {}),
    "categorical": (linear, {"likelihood": varlap.Categorical(ignored_label=-1)}),
    "bernoulli": (linear, {"likelihood": "bernoulli"}),
    "heteroscedastic": (linear, {"likelihood": "heteroscedastic"}),
    "poisson": (linear, {"likelihood": "poisson"}),
    "learnt noise": (linear, {"likelihood": varlap.Gaussian(noise=0.3)}),
    "known noise": (linear, {"likelihood": varlap.Gaussian(noise=0.3, learnt=False)}),
    "noise of each output": (linear, {"likelihood": varlap.Gaussian(num_outputs=2)}),
    "one scale": (convnet, {"prior": varlap.OneScalePrior(0.2)}),
    "gain": (convnet, {"prior": varlap.FanInPrior(gain=1)}),
    "centred": (convnet, {"prior": varlap.FanInPrior(centre="network")}),
    "empirical": (convnet, {"prior": varlap.EmpiricalBayesPrior()}),
    "empirical, started": (
        convnet,
        {"prior": varlap.EmpiricalBayesPrior(start=varlap.OneScalePrior(0.3), centre="network")},
    ),
    "last layer": (convnet, {"select": "3.*"}),
    "one variance": (convnet, {"variances": "one"}),
    "one variance of one weight": (linear, {"variances": "one", "select": "weight"}),
    "tied, with a key": (Tied, {"output": "logits"}),
    "index": (linear, {"output": 0}),
    "double": (lambda: convnet().double(), {}),
    "half": (lambda: convnet().bfloat16(), {"likelihood": "gaussian"}),
    "channels last": (lambda: convnet().to(memory_format=torch.channels_last), {}),
}


def trained(make, settings, seed=0) -> varlap.BNN:
    """A model none of whose tensors is where it started."""
    torch.manual_seed(seed)
    bnn = varlap.BNN(make(), **settings)
    with torch.no_grad():
        for tensor in bnn.state_dict().values():
            tensor.add_(torch.randn(tensor.shape).abs().to(tensor.dtype) if tensor.is_floating_point() else 3)
    return bnn


@pytest.mark.parametrize("case", MODELS)
def test_a_model_comes_back_the_same(tmp_path, case):
    make, settings = MODELS[case]
    bnn = trained(make, settings)
    save(bnn, tmp_path / "model")
    torch.manual_seed(1)
    network = make()
    state = torch.get_rng_state()
    again = load(tmp_path / "model", network)
    assert torch.equal(torch.get_rng_state(), state)
    assert again.network is network
    assert_same_bits(again.state_dict(), bnn.state_dict())
    assert list(again.means()) == list(bnn.means())
    assert list(again.point_estimates()) == list(bnn.point_estimates())
    assert type(again.likelihood) is type(bnn.likelihood)
    assert again.prior == bnn.prior
    assert model_file.describe(again) == model_file.describe(bnn)
    assert len(list(again.parameters())) == len(list(bnn.parameters())), "what was shared still is"
    if case in ("categorical",):
        assert again.likelihood.ignored_label == -1
    if case == "tied, with a key":
        assert torch.equal(again.outputs(torch.ones(1, 3)), bnn.outputs(torch.ones(1, 3)))
        assert again.network.second.weight is again.network.first.weight
    save(again, tmp_path / "again")
    first, second = (read_checkpoint(tmp_path / name).documents for name in ("model", "again"))
    assert first == second


def test_a_loaded_model_predicts_and_trains_as_the_saved_one(tmp_path):
    bnn = trained(lambda: varlap.models.mlp(2, 3, hidden=(4,)), {"prior": varlap.EmpiricalBayesPrior()})
    save(bnn, tmp_path / "model")
    again = load(tmp_path / "model", varlap.models.mlp(2, 3, hidden=(4,)))
    x, y = torch.randn(8, 2), torch.arange(8) % 3
    assert torch.equal(again.predict(x).probs, bnn.predict(x).probs)
    for model in (bnn, again):
        optimizer = varlap.adam(model)
        varlap.VI(num_data=8)(model, x, y).loss.backward()
        optimizer.step()
    assert_same_bits(again.state_dict(), bnn.state_dict())


def test_a_model_made_double_after_wrapping_comes_back(tmp_path):
    bnn = trained(linear, {"likelihood": "gaussian"}).double()
    save(bnn, tmp_path / "model")
    assert_same_bits(load(tmp_path / "model", linear().double()).state_dict(), bnn.state_dict())
    half = trained(linear, {"likelihood": "gaussian"}).half()
    save(half, tmp_path / "half")
    assert_same_bits(load(tmp_path / "half", linear().half()).state_dict(), half.state_dict())


def test_the_descriptions_know_every_setting_of_what_is_built_in():
    """A new setting of a likelihood or prior that was not saved would be lost in silence."""
    in_the_tensors = {"noise"}
    import inspect

    for name, kind in BUILT_IN.items():
        settings = set(inspect.signature(kind.__init__).parameters) - {"self", "args", "kwargs"} - in_the_tensors
        assert set(model_file.describe_likelihood(kind())["settings"]) == settings, name
    assert {varlap.FanInPrior, varlap.OneScalePrior, varlap.EmpiricalBayesPrior} == set(model_file.PRIORS.values())
    exported = [getattr(varlap, name) for name in varlap.__all__ if name.endswith("Prior") and name != "Prior"]
    assert set(exported) == set(model_file.PRIORS.values())


def test_own_classes_are_asked_for_by_name_and_checked(tmp_path):
    bnn = trained(linear, {"likelihood": Laplacian(), "prior": Tight(), "output": lambda outputs: outputs[:, :1]})
    path = tmp_path / "model"
    save(bnn, path)
    own = {"likelihood": Laplacian(), "prior": Tight(), "output": lambda outputs: outputs[:, :1]}
    for name, what in (("likelihood", "Laplacian"), ("prior", "Tight"), ("output", "a function")):
        given = {key: value for key, value in own.items() if key != name}
        message = rf"saved with a {name} of your own, {what}; pass it: varlap.load\(path, network, {name}=\.\.\.\)"
        with pytest.raises(CheckpointError, match=message):
            load(path, linear(), **given)
    with pytest.raises(CheckpointError, match=r"saved with the likelihood Laplacian, which .*gaussian.* is not"):
        load(path, linear(), **own | {"likelihood": "gaussian"})
    with pytest.raises(CheckpointError, match=r"saved with the prior Tight, which .*FanInPrior.* is not"):
        load(path, linear(), **own | {"prior": varlap.FanInPrior()})
    again = load(path, linear(), **own)
    assert_same_bits(again.state_dict(), bnn.state_dict())
    assert again.prior is own["prior"]
    assert again.outputs(torch.ones(1, 2)).shape == (1, 1)


def test_own_classes_inside_or_derived_from_built_in_ones_are_own(tmp_path):
    class Own(varlap.Gaussian):
        pass

    save(varlap.BNN(linear(), Own(), varlap.EmpiricalBayesPrior(start=Tight())), tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"likelihood of your own, Own"):
        load(tmp_path / "model", linear())
    with pytest.raises(CheckpointError, match=r"prior of your own, EmpiricalBayesPrior of Tight"):
        load(tmp_path / "model", linear(), Own())
    assert load(tmp_path / "model", linear(), Own(), varlap.EmpiricalBayesPrior(start=Tight())).prior.learnt


def test_what_is_given_must_be_what_was_saved(tmp_path):
    path = tmp_path / "model"
    save(varlap.BNN(linear(), "gaussian", output=0), path)
    assert isinstance(load(path, linear(), "gaussian", varlap.FanInPrior(), output=0).likelihood, varlap.Gaussian)
    for given in (
        {"likelihood": "poisson"},
        {"likelihood": varlap.Gaussian(learnt=False)},
        {"prior": varlap.FanInPrior(gain=1.0)},
        {"output": "logits"},
    ):
        (what,) = given
        with pytest.raises(CheckpointError, match=rf"was saved with the {what} .*; leave {what} out"):
            load(path, linear(), **given)
    with pytest.raises(ConfigError, match="did you mean 'gaussian'"):
        load(path, linear(), "gausian")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(2, 3), r"different: weight \(in the file it is float32 \(2, 2\), .*here it .*\(3, 2"),
        (lambda: nn.Linear(2, 2, bias=False), r"unexpected in the file: bias"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), r"missing in the file: 0\.weight, 0\.bias; unexpected in the file: w"),
        (lambda: linear().double(), r"in the file it is float32 .* here it is float64 .*network\.to\(dtype\)"),
        (lambda: nn.Sequential(*[nn.Linear(2, 2) for _ in range(5)]), r"0\.weight, 0\.bias, 1\.weight and 7 more"),
        (lambda: nn.LazyLinear(2), r"different: weight .* here it is a UninitializedParameter"),
    ],
    ids=range(6),
)  # fmt: skip
def test_a_network_of_another_form_is_refused_with_names_and_stays_as_it_was(tmp_path, make, message):
    save(trained(linear, {}), tmp_path / "model")
    network = make()
    before = {n: t.clone() for n, t in network.state_dict().items() if not isinstance(t, nn.UninitializedParameter)}
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "model", network)
    assert_same_bits({name: network.state_dict()[name] for name in before}, before)


def test_tied_and_untied_weights_are_told_apart(tmp_path):
    save(trained(Tied, {"output": "logits"}), tmp_path / "tied")
    with pytest.raises(CheckpointError, match=r"second\.weight \(.*a buffer, or shared, here .*a parameter of its own"):
        load(tmp_path / "tied", Tied(tied=False))
    save(trained(lambda: Tied(tied=False), {"output": "logits"}), tmp_path / "untied")
    with pytest.raises(CheckpointError, match=r"second\.weight \(.*a parameter of its own, here .*a buffer, or shared"):
        load(tmp_path / "untied", Tied())


def test_an_activation_of_another_kind_is_named(tmp_path):
    def network(activation):
        return nn.Sequential(nn.Linear(2, 3), activation, nn.Linear(3, 1))

    save(varlap.BNN(varlap.smooth(network(nn.ReLU())), "gaussian"), tmp_path / "model")
    with pytest.warns(VarlapWarning, match=r"saved from a network with other modules: 1 was Softplus, here it is ReLU"):
        load(tmp_path / "model", network(nn.ReLU()))
    load(tmp_path / "model", network(nn.Softplus()))  # as it was: nothing is said, which the settings of pytest check


def test_a_network_that_changes_what_it_loads_is_found_out(tmp_path):
    class Rounds(nn.Linear):
        def _load_from_state_dict(self, state_dict, prefix, *rest):
            state_dict = {name: tensor.round() for name, tensor in state_dict.items()}
            super()._load_from_state_dict(state_dict, prefix, *rest)

    save(trained(linear, {}), tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"network\.weight is not what was saved after the network took it over"):
        load(tmp_path / "model", Rounds(2, 2))


def test_what_is_no_model_or_no_network_is_refused(tmp_path):
    write_small(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"is a checkpoint without a model; give a folder that BNN\.save wrote"):
        load(tmp_path / "run", linear())
    with pytest.raises(NetworkError, match="load needs the network to put the weights into, got str"):
        load(tmp_path / "run", "model")

    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(CheckpointError, match=r"\['network\._extra_state'\] is a dict, which safetensors cannot hold"):
        save(varlap.BNN(Extra(2, 2)), tmp_path / "extra")
    with pytest.raises(CheckpointError, match="exists already"):
        save(varlap.BNN(linear()), tmp_path / "run")


def test_a_saved_model_is_replaced_by_the_next_one(tmp_path):
    one, two = varlap.BNN(linear()), varlap.BNN(linear())
    for bnn in (one, two):
        save(bnn, tmp_path / "model")
    assert_same_bits(load(tmp_path / "model", linear()).state_dict(), two.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "change",
    [
        {"likelihood": {"name": "os.system", "settings": {}}},
        {"likelihood": {"name": ["gaussian"], "settings": {}}},
        {"likelihood": {"name": "gaussian", "settings": {"learnt": True, "num_outputs": 10**15}}},
        {"likelihood": {"name": "categorical", "settings": {"ignored_label": "5"}}},
        {"likelihood": {"name": "poisson", "settings": {"__class__": 3}}},
        {"likelihood": None},
        {"prior": {"name": "FanInPrior", "settings": {"gain": "x", "centre": "zero"}}},
        {"prior": {"name": "FanInPrior", "settings": {"gain": -1.0, "centre": "zero"}}},
        {"prior": {"name": "FanInPrior", "settings": {"gain": 10**400, "centre": "zero"}}},
        {"prior": {"name": "FanInPrior", "settings": {"gain": 5e-324, "centre": "zero"}}},
        {"prior": {"name": "FanInPrior", "settings": {"gain": 2.0, "centre": "moon"}}},
        {"prior": {"name": "FanInPrior", "settings": []}},
        {"prior": {"name": "BNN", "settings": {}}},
        {"prior": []},
        {"bayesian": []},
        {"bayesian": ["weight"]},
        {"bayesian": 3},
        {"bayesian": [["weight"]]},
        {"others": None},
        {"variances": "two"},
        {"variances": "one"},
        {"output": {"own": 3}},
    ],
    ids=str,
)
def test_a_well_signed_description_is_not_believed_either(tmp_path, change):
    path = tmp_path / "model"
    save(varlap.BNN(linear(), "gaussian"), path)
    description = json.loads((path / "model.json").read_text())
    (path / "model.json").write_text(json.dumps(description | change))
    sign_again(path)
    network = linear()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(CheckpointError, match=str(path)):
        load(path, network)
    assert_same_bits(network.state_dict(), before)


# -- files of earlier versions --------------------------------------------------------------------------------------


def golden_network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.Linear(1, 1))


def make_golden() -> None:
    """Write the golden folders, once for each version of the format; those of earlier versions are never remade.

    From the folder tests/training: python -c "import test_checkpoint; test_checkpoint.make_golden()"
    """
    tensors = {
        "model": {
            "w": torch.tensor([[1.5, -2.0], [0.0, 3.25]]),
            "b": torch.tensor([0.5, -1.0], dtype=torch.bfloat16),
            "a": torch.tensor(0.1, dtype=torch.float64),
        },
        "run": {"step": torch.tensor(2**40)},
        "empty": {},
    }
    write_checkpoint(GOLDEN / "checkpoint-v1", tensors, {"state": {"step": 7, "nll": 0.25, "best": None, "µ": [True]}})
    bnn = varlap.BNN(
        golden_network(),
        varlap.Gaussian(num_outputs=1),
        varlap.EmpiricalBayesPrior(start=varlap.OneScalePrior(0.5), centre="network"),
        select="2.*",
    )
    with torch.no_grad():
        for index, tensor in enumerate(bnn.state_dict().values()):
            tensor.copy_(index + torch.arange(tensor.numel()).reshape(tensor.shape) / 4)
    save(bnn, GOLDEN / "model-v1")


def test_a_checkpoint_of_version_1_stays_readable():
    found = read_checkpoint(GOLDEN / "checkpoint-v1")
    assert found.documents == {"state": {"step": 7, "nll": 0.25, "best": None, "µ": [True]}}
    assert found.tensors["empty"] == {}
    assert found.tensors["run"]["step"].item() == 2**40
    assert list(found.tensors["model"]) == ["w", "b", "a"]
    assert found.tensors["model"]["w"].tolist() == [[1.5, -2.0], [0.0, 3.25]]
    assert found.tensors["model"]["b"].dtype == torch.bfloat16
    assert found.tensors["model"]["b"].tolist() == [0.5, -1.0]
    assert found.tensors["model"]["a"].item() == 0.1


def test_a_model_of_version_1_stays_loadable():
    bnn = load(GOLDEN / "model-v1", golden_network())
    assert list(bnn.means()) == ["2.weight", "2.bias"]
    assert bnn.prior == varlap.EmpiricalBayesPrior(start=varlap.OneScalePrior(0.5), centre="network")
    assert isinstance(bnn.likelihood, varlap.Gaussian)
    assert {name: tensor.tolist() for name, tensor in bnn.state_dict().items()} == {
        "network.0.weight": [[0.0, 0.25]],
        "network.0.bias": [1.0],
        "network.2.weight": [[2.0]],
        "network.2.bias": [3.0],
        "likelihood.log_noise": [4.0],
        "prior_scale.2.weight": 5.0,
        "prior_scale.2.bias": 6.0,
        "prior_mean.2.weight": [[7.0]],
        "prior_mean.2.bias": [8.0],
        "log_sigma.2.weight": [[9.0]],
        "log_sigma.2.bias": [10.0],
    }


def test_the_error_is_one_of_ours_and_one_of_the_systems():
    assert issubclass(CheckpointError, VarlapError)
    assert issubclass(CheckpointError, OSError)
