"""Data sets in the data folder: fetched, listed and verified."""

import contextlib
import importlib.util
import itertools
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib import format as formats

from varlap.data.archives import Arrays
from varlap.data.arrays import data_folder, load
from varlap.data.download import Progress, UnreachableError, download
from varlap.data.sources import SOURCES, Archive, Source, hash_arrays
from varlap.data.tables import UCI_SETS, uci_hint
from varlap.errors import ConfigError, DataError, did_you_mean, missing_extra, warn
from varlap.files import alone, locked, replacing

_KEYS = ("train_images", "train_labels", "test_images", "test_labels")
_LOCK = ".lock"


@dataclass(frozen=True)
class Stored:
    """A NAME.npz in the data folder, as its headers describe it.

    Attributes:
        name: of the data set.
        path: of the file.
        num_bytes: the file's size.
        shapes: of the arrays in it, by their names.
        problem: why it cannot be used, as far as the headers tell; None if nothing speaks against it.

    >>> Stored("cats", Path("cats.npz"), 2048, {"train_images": (4, 8, 8)}, problem=None).shapes["train_images"]
    (4, 8, 8)
    """

    name: str
    path: Path
    num_bytes: int
    shapes: Mapping[str, tuple[int, ...]]
    problem: str | None


@dataclass(frozen=True)
class Verification:
    """What came of reading a data set whole.

    Attributes:
        name: of the data set.
        path: of its file.
        problem: what is wrong with it; None if nothing was found.
        known: whether the right SHA-256 of its arrays is known; else shapes, types and labels were looked at.
        sha256: of its arrays, by their names; empty if they cannot be read.

    >>> Verification("cats", Path("cats.npz"), "cats.npz is cut short", known=False, sha256={}).problem
    'cats.npz is cut short'
    """

    name: str
    path: Path
    problem: str | None
    known: bool
    sha256: Mapping[str, str]


def get(
    name: str | Source,
    folder: str | Path | None = None,
    *,
    archives: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
    tries: int = 4,
) -> Path:
    """Fetch a data set: download its original archives, check their SHA-256, and store them as NAME.npz.

    Nothing is stored unless all is as it should be. What is there already stays, unless `force` is set, and then until
    its successor is complete. A download that broke off is carried on by the next call. Of several processes that fetch
    the same set, one does, and the others wait for it.

    Args:
        name: one of `SOURCES`, or a `Source` of your own.
        folder: where NAME.npz goes; default `data_folder()`.
        archives: a folder that holds the archives already, or holds a folder NAME that does; nothing is downloaded.
        force: fetch it even if it is there.
        progress: is called with a file's name, how many of its bytes are there and how many there will be.
        tries: how often to try each download.

    Returns:
        The path of NAME.npz.

    >>> get("cifar")
    Traceback (most recent call last):
        ...
    varlap.errors.DataError: no data set 'cifar' to fetch; did you mean 'cifar10'?
    """
    source = name if isinstance(name, Source) else find_source(name, SOURCES)
    folder = data_folder() if folder is None else Path(folder).expanduser()
    path = folder / f"{source.name}.npz"
    if path.is_file() and not force:
        if problem := look(path).problem:
            raise DataError(f"{path} is there, but {problem}; fetch it again with force (--force)")
        return path
    if source.module and importlib.util.find_spec(source.module) is None:
        raise missing_extra("data", f"reading {source.name}")  # now, not after the download
    downloads = folder / "downloads" / source.name
    try:
        if archives is not None:
            _store(source, _given(source, Path(archives).expanduser()), path)
            return path
        with _alone(source.name, downloads):
            if force or not path.is_file():  # else another process has fetched it meanwhile
                files = _downloaded(source, downloads, progress, tries)
                _store(source, files, path)
                _remove(files)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{source.name} cannot be stored in {folder}: {error}") from error
    return path


def find_source(name: str, sources: Mapping[str, Source]) -> Source:
    """Look a data set up that can be fetched.

    >>> find_source("digits", SOURCES)
    Traceback (most recent call last):
    varlap.errors.DataError: digits needs no download: it comes with scikit-learn, pip install '.[sklearn]' in the ...
    """
    if name in sources:
        return sources[name]
    if name == "digits":
        raise DataError(
            "digits needs no download: it comes with scikit-learn, pip install '.[sklearn]' in the checkout"
        )
    if name == "uci" or name in UCI_SETS:
        raise DataError(f"the UCI tables are not fetched, since no SHA-256 is published. {uci_hint(data_folder())}")
    raise DataError(f"no data set {name!r} to fetch; {did_you_mean(name, sources)}")


def look(path: Path) -> Stored:
    """Describe a NAME.npz by its headers, without reading its arrays."""
    shapes: dict[str, tuple[int, ...]] = {}
    key, problem = "", None
    try:
        with zipfile.ZipFile(path) as archive:
            for key in _KEYS:
                with archive.open(f"{key}.npy") as file:
                    version = formats.read_magic(file)
                    read = formats.read_array_header_1_0 if version == (1, 0) else formats.read_array_header_2_0
                    shapes[key] = read(file)[0]
    except KeyError:
        problem = f"it has no {key}"
    except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
        problem = f"it cannot be read as an npz file ({error})"
    return Stored(path.stem, path, path.stat().st_size, shapes, problem)


def find_stored(folder: str | Path | None = None) -> list[Stored]:
    """Describe every NAME.npz in the data folder, by name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(Path(folder) / "cats.npz", train_images=np.zeros((4, 8, 8), np.uint8))
    ...     [(one.name, one.shapes, one.problem) for one in find_stored(folder)]
    [('cats', {'train_images': (4, 8, 8)}, 'it has no train_labels')]
    """
    folder = data_folder() if folder is None else Path(folder).expanduser()
    found = sorted(path for path in folder.glob("*.npz") if path.is_file())  # no folder, and no link to nowhere
    return [look(path) for path in found if not path.name.startswith(".")]


def verify(name: str | Source, folder: str | Path | None = None) -> Verification:
    """Read a stored data set whole, and compare it with what it should be.

    For the names in `SOURCES`: shapes, types, labels, and the SHA-256 of the arrays where the right ones are known.
    For any other NAME.npz: that it can be loaded.

    Args:
        name: of the data set, or its `Source`.
        folder: where NAME.npz is; default `data_folder()`.

    >>> import tempfile
    >>> images, labels = np.zeros((4, 8, 8), np.uint8), np.arange(4)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     arrays = dict(train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    ...     np.savez(Path(folder) / "cifar10.npz", **arrays)
    ...     verification = verify("cifar10", folder)
    >>> verification.problem.split(": ")[1]
    'train_images has shape [4, 8, 8] and type uint8, not [50000, 32, 32, 3] and uint8'
    """
    source = name if isinstance(name, Source) else SOURCES.get(name)
    name = name.name if isinstance(name, Source) else name
    folder = data_folder() if folder is None else Path(folder).expanduser()
    path = folder / f"{name}.npz"
    known = source is not None and bool(source.sha256)
    try:
        data = load(name, folder)
    except DataError as error:
        if not path.is_file():
            raise
        return Verification(name, path, str(error), known, {})
    arrays: Arrays = {}
    for key in _KEYS:
        array = getattr(data, key).numpy()
        if key.endswith("images"):
            array = array[:, 0] if array.shape[1] == 1 else array.transpose(0, 2, 3, 1)
        arrays[key] = array
    problem = None if source is None else source.find_problem(arrays)
    return Verification(name, path, problem and f"{path}: {problem}", known, hash_arrays(arrays))


def _given(source: Source, folder: Path) -> list[Path]:
    found: dict[Archive, Path] = {}
    for archive, place in itertools.product(source.archives, (folder, folder / source.name)):
        if (path := place / archive.name).is_file():
            found[archive] = path  # one in the folder NAME is surely of this data set
    if missing := [archive for archive in source.archives if archive not in found]:
        raise DataError(
            f"no {' and no '.join(archive.name for archive in missing)} in {folder} or {folder / source.name}; fetch "
            f"{_it(missing)} from {' and '.join(archive.url for archive in missing)}"
        )
    for archive, path in found.items():
        archive.check(path)
    return list(found.values())


def _downloaded(source: Source, folder: Path, progress: Progress | None, tries: int) -> list[Path]:
    paths = [folder / archive.name for archive in source.archives]
    for archive, path in zip(source.archives, paths, strict=True):
        if path.is_file():  # of an earlier call, or put there by hand
            try:
                archive.check(path)
            except DataError as error:
                raise DataError(f"{error}; delete it, and it is fetched again") from error
            continue
        try:
            download(archive, path, progress=progress, tries=tries)
        except UnreachableError as error:
            missing = [one for one, there in zip(source.archives, paths, strict=True) if not there.is_file()]
            raise DataError(
                f"cannot download {archive.url}: {error}. Run the command again to carry on. Without a network, fetch "
                f"{' and '.join(one.url for one in missing)} elsewhere, put {_it(missing)} into {folder} and run the "
                f"command again; or say which folder holds {_it(missing)}: varlap data get {source.name} --from FOLDER"
            ) from error
    return paths


@contextlib.contextmanager
def _alone(name: str, folder: Path) -> Iterator[None]:
    """Wait until no other process downloads to a folder; not where files cannot be locked."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(ConfigError):
            if (file := locked(folder / _LOCK)) is not None:
                held.enter_context(file)
            else:
                warn(f"another process is fetching {name}; this one waits for it")
                held.enter_context(alone(folder / _LOCK))
        yield


def _it(several: Sequence[object]) -> str:
    return "it" if len(several) == 1 else "them"


def _store(source: Source, files: Sequence[Path], path: Path) -> None:
    """Read the archives and write the file beside its place, then rename it: NAME.npz is always a whole one."""
    arrays = source.read(*files)
    if problem := source.find_problem(arrays):
        raise DataError(f"{source.name}: {problem}; nothing was stored")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        np.savez(file, **{key: arrays[key] for key in _KEYS})  # pyright: ignore[reportArgumentType]


def _remove(files: list[Path]) -> None:
    """Remove the downloads, whose content is stored now, and their folders where nothing else is in them."""
    for file in files:
        file.unlink(missing_ok=True)
    folder = files[0].parent
    with contextlib.suppress(OSError):  # Windows deletes no open file, and nobody a folder that is not empty
        (folder / _LOCK).unlink()
        folder.rmdir()
        folder.parent.rmdir()
