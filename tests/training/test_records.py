"""Rows on disk: strict JSON, whole lines, and a file that survives kills and resuming."""

import errno
import io
import json
import math
import os
import sys
import types

import numpy as np
import pytest
import torch

from varlap import files
from varlap.errors import CheckpointError, ConfigError, MissingExtraError
from varlap.training.records import LoggerLike, Records, TensorBoardLogger

ROWS = [{"step": step, "elbo": -1 / step, "note": "line\nend   ünïcode"} for step in (10, 20, 30)]


@pytest.fixture
def records(tmp_path):
    records = Records(tmp_path / "run" / "epochs.jsonl")
    for row in ROWS:
        records.append(row)
    return records


def test_rows_come_back_as_they_were_one_line_each(records):
    assert records.rows() == ROWS
    assert Records(str(records.path)).rows() == ROWS
    assert records.path.read_bytes().count(b"\n") == len(ROWS)


def test_floats_come_back_to_the_bit(tmp_path):
    records = Records(tmp_path / "epochs.jsonl")
    row = {"a": 0.1 + 0.2, "b": 5e-324, "c": np.float64(1 / 3), "d": 2**70, "e": True}
    records.append(row)
    assert records.rows() == [row]


def test_non_finite_numbers_are_strict_json_and_come_back_as_floats(tmp_path):
    records = Records(tmp_path / "epochs.jsonl")
    records.append({"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float64("nan")})

    def refuse(name):
        raise AssertionError(name)

    line = records.path.read_text()
    assert json.loads(line, parse_constant=refuse) == {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": "NaN"}
    (row,) = records.rows()
    assert math.isnan(row["a"])
    assert math.isnan(row["d"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)


def test_a_row_is_written_by_one_call_of_the_system(tmp_path):
    writes = []

    class RawFile(io.FileIO):
        def write(self, data):
            writes.append(bytes(data))
            return super().write(data)

    class WatchedPath(type(tmp_path)):
        def open(self, mode="r", *args, **options):
            return io.BufferedWriter(RawFile(self, mode)) if mode == "ab" else super().open(mode, *args, **options)

    records = Records(tmp_path / "epochs.jsonl")
    records.path = WatchedPath(records.path)
    for row in (ROWS[0], {"long": "x" * 100_000}, ROWS[1]):
        records.append(row)
        assert writes == [json.dumps(row).encode() + b"\n"]
        writes.clear()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor(1.0), r"row\['elbo'\] is a Tensor; rows hold plain numbers and strings: use value.item\(\)"),
        (np.float32(1), r"row\['elbo'\] is a float32"),
        (None, r"row\['elbo'\] is a NoneType"),
        ([1.0], r"row\['elbo'\] is a list"),
        ("NaN", r"row\['elbo'\] is the string 'NaN', which would be read as a number"),
    ],
)
def test_what_is_no_plain_value_is_refused_and_nothing_is_written(records, value, message):
    with pytest.raises(ConfigError, match=message):
        records.append({"step": 40, "elbo": value})
    assert records.rows() == ROWS


@pytest.mark.parametrize("keep", range(1, 30))
def test_a_line_torn_anywhere_is_no_row_and_the_next_row_is_whole(records, keep):
    whole = records.path.read_bytes()
    torn = json.dumps({"step": 40, "elbo": -0.025, "a": {}}).encode()[:keep]
    records.path.write_bytes(whole + torn)
    assert records.rows() == ROWS
    Records(records.path).append({"step": 50})
    assert records.rows() == [*ROWS, {"step": 50}]


def test_a_row_after_one_that_a_full_disk_tore_is_whole(records, monkeypatch):
    class FullDisk(io.FileIO):
        def write(self, data):
            super().write(bytes(data)[:5])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def torn_open(self, mode):
        return io.BufferedWriter(FullDisk(self, mode))

    with monkeypatch.context() as patched:
        patched.setattr(type(records.path), "open", torn_open)
        with pytest.raises(OSError, match="No space left"):
            records.append({"step": 40})
    assert not records.path.read_bytes().endswith(b"\n")  # so the disk did tear it
    records.append({"step": 50})
    assert records.rows() == [*ROWS, {"step": 50}]


def test_zeros_that_a_power_cut_left_are_a_torn_line(records):
    records.path.write_bytes(records.path.read_bytes() + b"\0" * 100)
    assert records.rows() == ROWS
    assert records.truncate_after(30) == 0
    assert records.path.read_bytes().endswith(b"}\n")


def test_a_last_row_that_lacks_only_its_end_is_kept(records):
    records.path.write_bytes(records.path.read_bytes()[:-1])
    assert records.rows() == ROWS
    Records(records.path).append({"step": 40})
    assert records.rows() == [*ROWS, {"step": 40}]


@pytest.mark.parametrize("line", [b'{"step": 1', b"", b"[1]", b'{"step": NaN}', b"\xff", b"3"])
def test_a_damaged_line_elsewhere_is_an_error_that_names_it(records, line):
    first, *others = records.path.read_bytes().splitlines(keepends=True)
    records.path.write_bytes(first + line + b"\n" + b"".join(others))
    content = records.path.read_bytes()
    for read in (records.rows, lambda: records.truncate_after(10)):
        with pytest.raises(CheckpointError, match=r"epochs\.jsonl, line 2 is not a JSON object .* mend or delete"):
            read()
    assert records.path.read_bytes() == content


@pytest.mark.parametrize(("step", "expected"), [(0, 0), (9, 0), (10, 1), (25, 2), (30, 3), (99, 3)])
def test_truncating_drops_the_rows_after_the_checkpoint(records, step, expected):
    assert records.truncate_after(step) == len(ROWS) - expected
    assert records.rows() == ROWS[:expected]
    records.append({"step": 40})
    assert records.rows() == [*ROWS[:expected], {"step": 40}]
    assert os.listdir(records.path.parent) == ["epochs.jsonl"]


def test_truncating_drops_a_torn_line_and_keeps_rows_without_a_step(records):
    records.append({"host": "a"})
    records.path.write_bytes(records.path.read_bytes() + b'{"step": 4')
    assert records.truncate_after(10) == 2
    assert records.path.read_bytes().splitlines()[1:] == [b'{"host": "a"}']


def test_a_step_that_is_no_number_is_refused(records):
    records.append({"step": "forty"})
    with pytest.raises(CheckpointError, match=r"line 4: step 'forty' is no number"):
        records.truncate_after(10)
    assert len(records.rows()) == 4


def test_where_there_is_no_file_there_are_no_rows(tmp_path):
    records = Records(tmp_path / "epochs.jsonl")
    assert records.rows() == []
    assert records.truncate_after(3) == 0
    assert not records.path.exists()
    records.path.touch()
    assert records.rows() == []
    assert records.truncate_after(3) == 0


def test_a_kill_while_truncating_leaves_the_old_file(records, monkeypatch):
    content = records.path.read_bytes()
    order = []

    def killed(*paths):
        order.append("replace")
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", lambda _: order.append("fsync"))
    monkeypatch.setattr(files.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        records.truncate_after(10)
    assert order == ["fsync", "replace"], "a rename that reaches the disk before the content would lose all"
    assert records.path.read_bytes() == content
    assert os.listdir(records.path.parent) == ["epochs.jsonl"]


def test_a_link_stays_a_link(records, tmp_path):
    link = tmp_path / "link.jsonl"
    link.symlink_to(records.path)
    Records(link).truncate_after(10)
    assert link.is_symlink()
    assert records.rows() == ROWS[:1]


def test_tensorboard_gets_each_value_and_is_flushed(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder):
            calls.append(folder)

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def flush(self):
            calls.append("flush")

        def close(self):
            calls.append("close")

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    logger = TensorBoardLogger(tmp_path)
    as_protocol: LoggerLike = logger
    as_protocol.log_metrics({"elbo": -0.5, "kl": 2.0}, step=10)
    logger.close()
    assert calls == [str(tmp_path), ("elbo", -0.5, 10), ("kl", 2.0, 10), "flush", "close"]


def test_without_tensorboard_the_error_holds_the_pip_command(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"TensorBoardLogger needs .* pip install '\.\[tensorboard\]'"):
        TensorBoardLogger(tmp_path)
