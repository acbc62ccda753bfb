"""Image data sets as tensors: scikit-learn's digits, or NAME.npz files in the data folder."""

import os
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from varlap.data.sources import SOURCES
from varlap.errors import DataError, did_you_mean, needs_extra

KNOWN_NAMES = ("digits", *SOURCES)
"""The data sets of the command line; `load` reads any other NAME.npz as well."""

_PARTS = ("train", "test")
_NUM_TEST_DIGITS = 360


@dataclass(frozen=True, eq=False)
class ArrayData:
    """A data set of images, whole in memory.

    Attributes:
        name: what it is called.
        train_images: uint8 or floating point, of shape [N, C, H, W].
        train_labels: int64, of shape [N].
        test_images: as `train_images`.
        test_labels: as `train_labels`.

    >>> images, labels = torch.zeros(4, 3, 8, 8), torch.tensor([0, 1, 2, 1])
    >>> data = ArrayData("tiny", images, labels, images, labels)
    >>> data.num_classes, data.image_shape
    (3, (3, 8, 8))
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def __post_init__(self) -> None:
        for part in _PARTS:
            images, labels = getattr(self, f"{part}_images"), getattr(self, f"{part}_labels")
            if images.dim() != 4 or labels.dim() != 1 or len(images) != len(labels) or len(images) == 0:
                raise DataError(
                    f"{self.name}: {part}_images has shape {list(images.shape)} and {part}_labels "
                    f"{list(labels.shape)}; give images [N, C, H, W] and as many labels [N], at least one"
                )
            if labels.dtype != torch.int64 or int(labels.min()) < 0:
                raise DataError(
                    f"{self.name}: {part}_labels must be int64 and count from 0; they are {labels.dtype} "
                    f"and start at {labels.min().item()}"
                )
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise DataError(
                f"{self.name}: a training image has shape {list(self.train_images.shape[1:])}, a test image "
                f"{list(self.test_images.shape[1:])}; they must agree"
            )

    @property
    def num_classes(self) -> int:
        """Number of classes: the largest label plus one."""
        return 1 + max(int(self.train_labels.max()), int(self.test_labels.max()))

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width


def data_folder() -> Path:
    """Say where data sets are kept: `VARLAP_DATA`, or else varlap's folder in the user's cache.

    The cache is `XDG_CACHE_HOME` or ~/.cache on Linux, ~/Library/Caches on macOS, and %LOCALAPPDATA% on Windows.

    >>> from unittest.mock import patch
    >>> with patch.dict(os.environ, VARLAP_DATA="/data/varlap"):
    ...     data_folder() == Path("/data/varlap")
    True
    """
    if folder := os.environ.get("VARLAP_DATA"):
        return Path(folder).expanduser()
    if sys.platform == "darwin":
        cache = "~/Library/Caches"
    elif sys.platform == "win32":
        cache = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "varlap"


def load(name: str, folder: str | Path | None = None) -> ArrayData:
    """Load a data set by name.

    "digits" comes with scikit-learn: 8×8 images with values in [0, 1], always split the same way into 1,437
    for training and 360 for testing, each class in proportion. Any other NAME is read from NAME.npz, which
    holds `train_images` and `test_images` (uint8, [N, H, W] or [N, H, W, C] with C 1 or 3) and `train_labels`
    and `test_labels` (whole numbers, [N]); `varlap.data.get` writes it for the names in `SOURCES`. Nothing is ever
    unpickled, and nothing is downloaded here.

    Args:
        name: the data set's name.
        folder: where NAME.npz is; default `data_folder()`.

    >>> data = load("digits")
    >>> data.train_images.shape, len(data.test_labels), data.num_classes
    (torch.Size([1437, 1, 8, 8]), 360, 10)
    """
    if name == "digits":
        return _load_digits()
    folder = data_folder() if folder is None else Path(folder).expanduser()
    if not name or Path(name).name != name or name.endswith(".npz"):
        raise DataError(
            f"data set name {name!r}: give a plain name such as 'cifar10', and its folder as VARLAP_DATA, or in "
            "Python as folder="
        )
    path = folder / f"{name}.npz"
    if not path.is_file():
        raise DataError(_not_found(name, folder))
    arrays = _read(path)
    return ArrayData(name, *(torch.from_numpy(array) for array in arrays))


def _load_digits() -> ArrayData:
    with needs_extra("sklearn", "the digits data set", "sklearn"):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    bunch: Any = load_digits()
    images = (bunch.images[:, None] / 16).astype(np.float32)
    labels = bunch.target.astype(np.int64)
    train_images, test_images, train_labels, test_labels = (
        torch.from_numpy(array)
        for array in train_test_split(images, labels, test_size=_NUM_TEST_DIGITS, random_state=0, stratify=labels)
    )
    return ArrayData("digits", train_images, train_labels, test_images, test_labels)


def _not_found(name: str, folder: Path) -> str:
    known = {path.stem for path in folder.glob("*.npz")}.union(KNOWN_NAMES)
    hint = "" if name in known else did_you_mean(name, sorted(known), otherwise="")
    fetch = f"Fetch it with `varlap data get {name}`, put" if name in SOURCES else "Put"
    return (
        f"data set {name!r} not found: no file {name}.npz in {folder}{f'; {hint}' if hint else '.'} "
        f"{fetch} the file there, or set VARLAP_DATA to the folder that holds it"
    )


def _read(path: Path) -> list[np.ndarray]:
    """Return train images, train labels, test images and test labels, checked, in torch's layout."""
    keys = [f"{part}_{what}" for part in _PARTS for what in ("images", "labels")]
    arrays = [_checked(path, key, array) for key, array in _raw_arrays(path, keys)]
    for part, images, labels in (("train", *arrays[:2]), ("test", *arrays[2:])):
        if len(images) != len(labels):
            raise DataError(f"{path}: {len(images)} {part}_images but {len(labels)} {part}_labels; they must agree")
    return arrays


def _raw_arrays(path: Path, keys: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is no npz file, or is cut short; fetch it again")
    with np.load(path, allow_pickle=False) as archive:
        missing = [key for key in keys if key not in archive]
        if missing:
            raise DataError(
                f"{path} has no {' and no '.join(missing)}; it holds {', '.join(archive) or 'nothing'}. "
                f"Write it with numpy.savez and the keys {', '.join(keys)}"
            )
        for key in keys:
            try:
                array = archive[key]
            # What a damaged file raises, or one with pickled objects in it.
            except (ValueError, OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
                raise DataError(
                    f"{path}: {key} cannot be read as a plain array ({error}); fetch the file again, "
                    "or write it with numpy.savez from arrays of numbers"
                ) from error
            yield key, array


def _checked(path: Path, key: str, array: np.ndarray) -> np.ndarray:
    if len(array.shape) == 0 or len(array) == 0:
        raise DataError(f"{path}: {key} is empty; there must be at least one item")
    if key.endswith("labels"):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                f"{path}: {key} has shape {list(array.shape)} and type {array.dtype}; give whole numbers [N]"
            )
        return array.astype(np.int64)
    if array.dtype != np.uint8 or not (array.ndim == 3 or (array.ndim == 4 and array.shape[3] in (1, 3))):
        raise DataError(
            f"{path}: {key} has shape {list(array.shape)} and type {array.dtype}; "
            "give uint8 images [N, H, W] or [N, H, W, 3]"
        )
    channel_first = array[:, None] if array.ndim == 3 else array.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(channel_first)
