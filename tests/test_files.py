"""One holder of a file at a time, and a file system that cannot lock says so."""

import contextlib
import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from varlap import files
from varlap.errors import ConfigError
from varlap.files import alone, locked, replace_file, replacing, sync_folder

pytest.importorskip("fcntl")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.EBADF])
def test_a_file_system_without_locks_is_named_and_not_taken_for_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    def refused(file, how):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.fcntl, "flock", refused)
    message = rf"files in {tmp_path} cannot be locked \({os.strerror(code)}\).*; choose a folder on another file system"
    with pytest.raises(ConfigError, match=message):
        locked(tmp_path / ".lock")
    with pytest.raises(ConfigError, match=message), alone(tmp_path / ".lock"):
        pass


def test_a_file_that_another_holder_has_is_none_until_it_is_closed(tmp_path: Path):
    with alone(tmp_path / ".lock"):
        assert locked(tmp_path / ".lock") is None
    mine = locked(tmp_path / ".lock")
    assert mine is not None
    mine.close()


def test_a_block_waits_for_the_one_before_it(tmp_path: Path):
    order = []

    def second():
        with alone(tmp_path / ".lock"):
            order.append("second")

    with alone(tmp_path / ".lock"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


@pytest.mark.parametrize(("code", "harmless"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_a_file_system_that_syncs_no_folders_is_no_failure(tmp_path: Path, code: int, harmless: bool):
    def refused(_: int) -> None:
        raise OSError(code, os.strerror(code))

    with contextlib.nullcontext() if harmless else pytest.raises(OSError, match=os.strerror(code)):
        sync_folder(tmp_path, refused)


def test_threads_that_write_one_file_at_once_do_not_meet(tmp_path: Path):
    path, contents = tmp_path / "result.json", [letter * 10_000 for letter in (b"a", b"b")]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda content: [replace_file(path, content) for _ in range(50)], contents))
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


def test_writers_with_one_process_number_in_two_containers_do_not_meet(tmp_path: Path):
    path = tmp_path / "result.json"
    with replacing(path) as first:
        with replacing(path) as second:
            second.write(b"second")
        first.write(b"first")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_beside_a_file_goes_with_a_later_write(tmp_path: Path):
    path = tmp_path / "digits [1].json"
    old, new = (tmp_path / f".{path.name}.{which}.tmp" for which in ("0123abcd", "ffffffff"))
    other, of_a_user = (tmp_path / f".{name}.0123abcd.tmp" for name in ("other.json", f"{path.name}.backup"))
    for left in (old, new, other, of_a_user):
        left.write_bytes(b"")
    for left in (old, other, of_a_user):
        os.utime(left, (time.time() - 2 * files.LONGER_THAN_A_WRITE_S,) * 2)
    replace_file(path, b"{}")
    assert sorted(tmp_path.iterdir()) == sorted(
        [path, new, other, of_a_user]
    )  # `new` may be of a process that writes now


def test_what_cannot_be_removed_beside_a_file_does_not_keep_it_from_being_written(tmp_path: Path):
    path, folder = tmp_path / "result.json", tmp_path / ".result.json.0123abcd.tmp"
    folder.mkdir()
    os.utime(folder, (0, 0))
    replace_file(path, b"{}")
    assert path.read_bytes() == b"{}"
