"""Checkpoints: folders that are either whole or not there, and that hold numbers and text but never code.

A checkpoint holds `NAME.safetensors` files (named tensors), `NAME.json` files (plain documents) and `manifest.json`:
the size and the SHA-256 of each file, and a SHA-256 of the manifest itself. Whatever is read is checked first. One
process at a time writes into a folder of checkpoints.
"""

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from varlap.errors import CheckpointError, ConfigError
from varlap.files import sync_folder
from varlap.training.encoding import canonical, damaged, document_bytes, parse_document, parse_tensors, tensor_bytes

FORMAT = "varlap checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 2**24  # its size is the only one that nothing else vouches for
LARGEST_STEP = 10**12 - 1

FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.(safetensors|json)")
STEP_NAME = re.compile(r"step-[0-9]{12}")
LEFTOVER = re.compile(r"\.(?P<of>.+)\.(?P<pid>[0-9]{1,10})-(?P<run>[0-9a-f]{8})-[0-9]+\.(?P<kind>tmp|old|gone)")

_RUN = secrets.token_hex(4)  # tells this process from an earlier one that had its pid, as the first in a container has
_count = itertools.count()
_known_whole: set[tuple[Path, int]] = set()  # paths and inodes of what this process wrote or read, for `prune`
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds, by the names under which it was written.

    >>> Checkpoint(tensors={}, documents={"progress": {"step": 3}}).documents["progress"]["step"]
    3
    """

    tensors: dict[str, dict[str, Tensor]]
    """each `NAME.safetensors`, its tensors in the order in which they were written, contiguous and on the CPU"""
    documents: dict[str, Any]
    """each `NAME.json`"""


# -- writing --------------------------------------------------------------------------------------------------------


def write_checkpoint(
    path: Path | str,
    tensors: Mapping[str, Mapping[str, Tensor]],
    documents: Mapping[str, Any],
    *,
    replace: bool = False,
) -> None:
    """Write a checkpoint, whole or not at all; `path` must not exist yet, unless it is to be replaced.

    Everything is written to a hidden folder beside `path`, brought to the disk, and renamed. What is replaced gets a
    hidden name just before and is deleted just after; where the process is killed between, `surviving` finds it.
    Documents are made of dicts with text keys, lists (tuples become lists), text, finite numbers, booleans and None.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_checkpoint(f"{folder}/first", {"model": {"w": torch.ones(2)}}, {"progress": {"step": 3}})
    ...     sorted(file.name for file in Path(folder, "first").iterdir())
    ['manifest.json', 'model.safetensors', 'progress.json']
    """
    path = Path(path)
    contents: dict[str, Callable[[], bytes]] = {}  # made one at a time, since each is a copy in memory
    for name, named in tensors.items():
        contents[f"{name}.safetensors"] = partial(tensor_bytes, f"tensors[{name!r}]", named)
    for name, document in documents.items():
        contents[f"{name}.json"] = partial(document_bytes, f"documents[{name!r}]", document)
    for name in contents:
        if not FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise CheckpointError(
                f"{path}: {name!r} cannot be a file of a checkpoint; use a name of at most 100 letters, digits, "
                "'_' and '-' other than 'manifest'"
            )
    if os.path.lexists(path) and not replace:
        raise CheckpointError(f"{path} exists already; delete it first, or choose another path")
    temporary, old = _hidden(path, "tmp"), _hidden(path, "old")
    identity = None
    try:
        with _write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            identity = temporary.stat().st_ino
            files = {name: _write_file(temporary / name, make()) for name, make in contents.items()}
            _write_file(temporary / MANIFEST, _sealed({"format": FORMAT, "version": VERSION, "files": files}))
            sync_folder(temporary, _fsync)
            if replace and os.path.lexists(path):
                _rename(path, old)
            _rename(temporary, path)
            sync_folder(path.parent, _fsync)
        _known_whole.add((path.absolute(), identity))
    except BaseException:
        # An interrupt may come just after the rename, so look which of the two names the folder has now.
        with contextlib.suppress(OSError):
            if identity is not None and path.stat().st_ino == identity:
                os.rename(path, temporary)
        with contextlib.suppress(OSError):  # where nothing was replaced yet, there is none
            os.rename(old, path)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    for hidden in (old, *filter(_is_leftover, _hidden_beside(path))) if replace else ():
        shutil.rmtree(hidden, ignore_errors=True)


def surviving(path: Path) -> Path:
    """Return a checkpoint's path, or where it is while it is being replaced, or if a process was killed just then.

    >>> surviving(Path("nowhere")).name
    'nowhere'
    """
    if path.is_symlink() and not path.exists():
        path = Path(os.path.realpath(path))  # what is hidden lies beside the folder, not beside the link
    if os.path.lexists(path):
        return path
    replaced = (hidden for hidden in _hidden_beside(path) if hidden.suffix == ".old")
    try:
        return max(replaced, key=os.path.getmtime, default=path)
    except FileNotFoundError:
        return path  # the new one has just come


def _sealed(manifest: dict[str, Any]) -> bytes:
    """Return a manifest's bytes with its own SHA-256 among them."""
    return canonical(manifest | {"sha256": hashlib.sha256(canonical(manifest)).hexdigest()})


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{_RUN}-{next(_count)}.{kind}")


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        how = "free some space, or choose another `out`" if full else "choose an `out` that can be written"
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}; {how}") from error


def _write_file(path: Path, data: bytes) -> dict[str, Any]:
    """Write a new file through to the disk, and return its entry in the manifest."""
    with open(path, "xb") as file:
        _write(file, data)
        _fsync(file.fileno())
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


# All that touches the disk goes through these three, so that tests can make each of them fail in turn.


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()


def _fsync(descriptor: int) -> None:
    os.fsync(descriptor)


def _rename(source: Path, target: Path) -> None:
    os.rename(source, target)


# -- reading --------------------------------------------------------------------------------------------------------


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Read a checkpoint whose every byte is as it was written, or raise `CheckpointError`.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_checkpoint(f"{folder}/first", {"model": {"w": torch.ones(2)}}, {"progress": {"step": 3}})
    ...     read_checkpoint(f"{folder}/first")
    Checkpoint(tensors={'model': {'w': tensor([1., 1.])}}, documents={'progress': {'step': 3}})
    """
    path = Path(path)
    tensors: dict[str, dict[str, Tensor]] = {}
    documents: dict[str, Any] = {}
    for name, entry in _read_manifest(path / MANIFEST).items():
        file = path / name
        data = _read_file(file, entry["bytes"])
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise damaged(file, "its contents are not what was written")
        if file.suffix == ".json":
            documents[file.stem] = parse_document(file, data)
        else:
            tensors[file.stem] = parse_tensors(file, data)
    with contextlib.suppress(OSError):
        _known_whole.add((path.absolute(), path.stat().st_ino))
    return Checkpoint(tensors, documents)


def _read_manifest(file: Path) -> dict[str, dict[str, Any]]:
    """Return the files' sizes and hashes by file name, all of them checked for form."""
    data = _read_file(file)
    manifest = parse_document(file, data)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or type(manifest.get("version")) is not int:
        raise CheckpointError(f"{file} is not the manifest of a varlap checkpoint; give a folder that varlap wrote")
    if manifest["version"] > VERSION:
        raise CheckpointError(
            f"{file} has version {manifest['version']}, but this varlap reads up to {VERSION}; "
            "upgrade it: git pull, then pip install . in the checkout"
        )
    # Compared as bytes, since a changed space or an entry given twice would not show in what was parsed.
    unsealed = {key: value for key, value in manifest.items() if key != "sha256"}
    with contextlib.suppress(RecursionError):  # so deep that it can be read but not written
        if data == _sealed(unsealed):
            return _checked_entries(file, manifest.get("files"))
    raise damaged(file, "it does not have the SHA-256 that it gives itself")


def _checked_entries(file: Path, files: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(files, dict):
        raise damaged(file, "it has no list of files")
    for name, entry in files.items():
        if not FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise damaged(file, f"{name!r} is no file name of a checkpoint")
        sound = isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)
        if not sound:
            raise damaged(file, f"it gives no size and SHA-256 for {name}")
    return files


def _read_file(file: Path, size: int | None = None) -> bytes:
    """Read a regular file, never through a link, after checking its size, so that no size on paper is believed."""
    # Without O_NONBLOCK, opening a named pipe would wait for its writer forever.
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    try:
        with open(os.open(file, flags), "rb") as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise damaged(file, "it is not a regular file")
            if size is None and found.st_size > LARGEST_MANIFEST:
                raise damaged(file, f"{found.st_size} bytes are too many for a manifest")
            if size is not None and found.st_size != size:
                raise damaged(file, f"it has {found.st_size} bytes instead of {size}")
            data = opened.read(found.st_size)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{file} does not exist; give the folder of a whole varlap checkpoint") from None
    except (OSError, ValueError, MemoryError) as error:
        what = "it is a symbolic link" if isinstance(error, OSError) and error.errno == errno.ELOOP else error
        raise CheckpointError(f"{file} cannot be read: {what}; give the folder that varlap wrote") from error
    if len(data) != found.st_size:
        raise damaged(file, f"it ends after {len(data)} bytes instead of {found.st_size}")
    return data


# -- choosing and deleting ------------------------------------------------------------------------------------------


def checkpoint_path(folder: Path | str, step: int) -> Path:
    """Return where the checkpoint of a step belongs: names of one length, whose order is that of the steps.

    >>> checkpoint_path("run", 123).name
    'step-000000000123'
    """
    if not 0 <= step <= LARGEST_STEP:
        raise ConfigError(f"checkpoint_path(step={step}) must be between 0 and {LARGEST_STEP}; count optimizer steps")
    return Path(folder) / f"step-{step:012d}"


def newest_checkpoint(folder: Path | str) -> tuple[Path, Checkpoint] | None:
    """Return the newest checkpoint of a folder that is whole, or None; log a warning for each damaged one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (9, 10):
    ...         write_checkpoint(checkpoint_path(folder, step), {}, {"progress": {"step": step}})
    ...     path, checkpoint = newest_checkpoint(folder)
    >>> path.name, checkpoint.documents
    ('step-000000000010', {'progress': {'step': 10}})
    """
    for path in _newest_first(Path(folder)):
        try:
            return path, read_checkpoint(path)
        except CheckpointError as error:
            _log.warning("checkpoint %s is skipped: %s", path.name, error)
    return None


def prune(folder: Path | str, keep: int) -> None:
    """Delete all but the `keep` newest whole checkpoints of a folder, and what killed processes left behind.

    A damaged one does not count, or it could outlive the last good one; it stays until enough newer ones are there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (1, 2, 3):
    ...         write_checkpoint(checkpoint_path(folder, step), {}, {})
    ...     prune(folder, keep=2)
    ...     sorted(path.name for path in Path(folder).iterdir())
    ['step-000000000002', 'step-000000000003']
    """
    if keep < 1:
        raise ConfigError(f"prune(keep={keep}) must be at least 1, or no checkpoint would be left")
    folder = Path(folder)
    doomed = [path for path in _entries(folder) if _is_leftover(path)]
    with _write_errors(folder):
        # Renamed first: a half-deleted folder must not look like a checkpoint.
        steps = _newest_first(folder)
        whole = list(itertools.islice((index for index, path in enumerate(steps) if _is_whole(path)), keep))
        for path in steps[whole[-1] + 1 :] if len(whole) == keep else []:
            hidden = _hidden(path, "gone")
            with contextlib.suppress(FileNotFoundError):
                _rename(path, hidden)
                doomed.append(hidden)
        if doomed:
            sync_folder(folder, _fsync)
    for path in doomed:
        shutil.rmtree(path, ignore_errors=True)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be listed: {error.strerror}; give a folder of checkpoints") from error


def _newest_first(folder: Path) -> list[Path]:
    steps = [p for p in _entries(folder) if STEP_NAME.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]
    return sorted(steps, reverse=True)


def _is_whole(path: Path) -> bool:
    try:
        return (path.absolute(), path.stat().st_ino) in _known_whole or bool(read_checkpoint(path))
    except OSError:
        return False


def _hidden_beside(path: Path) -> list[Path]:
    """Return our hidden folders that belong to a path."""
    found = [(hidden, LEFTOVER.fullmatch(hidden.name)) for hidden in _entries(path.parent)]
    return [hidden for hidden, match in found if match and match["of"] == path.name]


def _is_leftover(path: Path) -> bool:
    """Whether this is a hidden folder of ours that no process works on any more, and that `surviving` needs not."""
    match = LEFTOVER.fullmatch(path.name)
    if match is None or (match["kind"] == "old" and not os.path.lexists(path.with_name(match["of"]))):
        return False
    if match["kind"] == "gone":
        return True  # `prune` had begun to delete it
    pid = int(match["pid"])
    return match["run"] != _RUN if pid == os.getpid() else not _is_running(pid)


def _is_running(pid: int) -> bool:
    if os.name != "posix":
        return True  # elsewhere, asking by `os.kill` would end the process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # it runs, but belongs to somebody else
    return True
