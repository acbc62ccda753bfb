"""The original archives of image data sets, read into arrays. Nothing is unpickled and nothing is unpacked to disk."""

import gzip
import math
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from varlap.errors import DataError

Arrays = dict[str, np.ndarray]

_LARGEST = 2**29  # bytes of one file's images; the largest of the real ones has 225 million
_IMAGE = (3, 32, 32)  # of CIFAR's records: red, green and blue planes
_DAMAGE = (tarfile.TarError, EOFError, OSError, zlib.error)


def read_cifar10(archive: Path) -> Arrays:
    """Read cifar-10-binary.tar.gz: records of a label and an image, in five files and one."""
    batches = [f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)]
    return _read_cifar(archive, {"train": batches, "test": ["cifar-10-batches-bin/test_batch.bin"]}, num_labels=1)


def read_cifar100(archive: Path) -> Arrays:
    """Read cifar-100-binary.tar.gz: records of a coarse label (left out), a fine one and an image."""
    members = {"train": ["cifar-100-binary/train.bin"], "test": ["cifar-100-binary/test.bin"]}
    return _read_cifar(archive, members, num_labels=2)


def read_idx(train_images: Path, train_labels: Path, test_images: Path, test_labels: Path) -> Arrays:
    """Read the four gzipped idx files of MNIST and of the sets in its form."""
    return {
        "train_images": _read_idx(train_images, 3),
        "train_labels": _read_idx(train_labels, 1).astype(np.int64),
        "test_images": _read_idx(test_images, 3),
        "test_labels": _read_idx(test_labels, 1).astype(np.int64),
    }


def read_svhn(train: Path, test: Path) -> Arrays:
    """Read train_32x32.mat and test_32x32.mat, whose label 10 means the digit 0. Needs scipy."""
    arrays = {}
    for part, path in (("train", train), ("test", test)):
        arrays[f"{part}_images"], arrays[f"{part}_labels"] = _read_mat(path)
    return arrays


def _read_cifar(archive: Path, members: Mapping[str, list[str]], num_labels: int) -> Arrays:
    wanted = [name for names in members.values() for name in names]
    contents = _members(archive, wanted, num_labels + math.prod(_IMAGE))
    if missing := [name for name in wanted if name not in contents]:
        raise DataError(f"{archive} has no {' and no '.join(missing)}, or is cut short; fetch it again")
    arrays = {}
    for part, names in members.items():
        records = np.concatenate([contents.pop(name) for name in names])
        images = records[:, num_labels:].reshape(-1, *_IMAGE).transpose(0, 2, 3, 1)
        arrays[f"{part}_images"] = np.ascontiguousarray(images)
        arrays[f"{part}_labels"] = records[:, num_labels - 1].astype(np.int64)
    return arrays


def _members(archive: Path, wanted: list[str], record: int) -> Arrays:
    """Read the wanted members of a tar.gz as records, one after the other; whatever else is there is passed over."""
    contents: Arrays = {}
    try:
        with tarfile.open(archive, "r|gz") as stream:
            for member in stream:
                name = member.name.removeprefix("./")
                if name not in wanted or not member.isreg():
                    continue
                if name in contents:
                    raise DataError(f"{archive} holds {name} twice; fetch it again")
                if not 0 < member.size <= _LARGEST or member.size % record:
                    raise DataError(
                        f"{archive}: {name} has {member.size:,} bytes; it should be records of {record:,} bytes, "
                        f"{_LARGEST:,} bytes at most"
                    )
                file = stream.extractfile(member)
                content = b"" if file is None else file.read()
                if len(content) != member.size:
                    raise DataError(f"{archive}: {name} is cut short; fetch the archive again")
                contents[name] = np.frombuffer(content, np.uint8).reshape(-1, record)
    except DataError:
        raise
    except _DAMAGE as error:
        raise DataError(f"{archive} cannot be read as a tar.gz ({error}); fetch it again") from error
    return contents


def _read_idx(path: Path, num_dims: int) -> np.ndarray:
    try:
        with gzip.open(path) as file:
            header = file.read(4 + 4 * num_dims)
            # Two zeros, 8 for bytes, the number of dimensions; then the dimensions, the high byte first.
            if header[:4] != bytes([0, 0, 8, num_dims]) or len(header) < 4 + 4 * num_dims:
                raise DataError(
                    f"{path} is no idx file of bytes in {num_dims} dimensions: it starts with {header[:4].hex(' ')}, "
                    f"not with 00 00 08 0{num_dims} and {num_dims} dimensions"
                )
            shape = [int(size) for size in np.frombuffer(header, ">u4", offset=4)]
            if not 0 < math.prod(shape) <= _LARGEST:
                raise DataError(f"{path} claims the shape {shape}; that is nothing, or more than {_LARGEST:,} bytes")
            content = file.read(math.prod(shape))
            if len(content) < math.prod(shape):
                raise DataError(f"{path} is cut short: {len(content):,} bytes for the shape {shape}; fetch it again")
            if file.read(1):  # reads to the end, so that the checksum is compared
                raise DataError(f"{path} has more bytes than the shape {shape} it claims; fetch it again")
    except DataError:
        raise
    except _DAMAGE as error:
        raise DataError(f"{path} cannot be read as a gzip file ({error}); fetch it again") from error
    return np.frombuffer(content, np.uint8).reshape(shape)


def _read_mat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    from scipy import io

    try:
        shapes = {name: shape for name, shape, _ in io.whosmat(str(path))}
        _check_mat_shapes(path, shapes)
        content: Any = io.loadmat(str(path), variable_names=["X", "y"])
    except DataError:
        raise
    except Exception as error:  # whatever a damaged file leads scipy to
        raise DataError(f"{path} cannot be read as a .mat file ({error}); fetch it again") from error
    images, labels = content["X"], content["y"].reshape(-1)
    if images.dtype != np.uint8 or not np.isin(labels, np.arange(1, 11)).all():
        found = f"X is {images.dtype} and y from {labels.min()} to {labels.max()}"
        raise DataError(f"{path}: X must be uint8 and y from 1 to 10; {found}")
    return np.ascontiguousarray(images.transpose(3, 0, 1, 2)), labels.astype(np.int64) % 10


def _check_mat_shapes(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    images, labels = shapes.get("X", ()), shapes.get("y", ())
    fits = len(images) == 4 and images[2] == 3 and 0 < math.prod(images) <= _LARGEST
    if not fits or tuple(labels) != (images[3], 1):
        raise DataError(
            f"{path} holds {', '.join(f'{name} {list(shape)}' for name, shape in shapes.items()) or 'nothing'}; it "
            f"should hold X [32, 32, 3, N] and y [N, 1], {_LARGEST:,} bytes at most"
        )
