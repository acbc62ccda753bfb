"""The original archives of image data sets, read into arrays. Nothing is unpickled and nothing is unpacked to disk.

They are whole: whoever calls has compared their size and SHA-256, and looks at the arrays' shapes and types.
"""

import gzip
import math
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]

_IMAGE = (3, 32, 32)  # of CIFAR's records: red, green and blue planes


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
        "train_images": _read_idx(train_images),
        "train_labels": _read_idx(train_labels).astype(np.int64),
        "test_images": _read_idx(test_images),
        "test_labels": _read_idx(test_labels).astype(np.int64),
    }


def read_svhn(train: Path, test: Path) -> Arrays:
    """Read train_32x32.mat and test_32x32.mat, whose label 10 means the digit 0. Needs scipy."""
    arrays = {}
    for part, path in (("train", train), ("test", test)):
        arrays[f"{part}_images"], arrays[f"{part}_labels"] = _read_mat(path)
    return arrays


def _read_cifar(archive: Path, members: Mapping[str, list[str]], num_labels: int) -> Arrays:
    contents = _members(archive, [name for names in members.values() for name in names])
    arrays = {}
    for part, names in members.items():
        content = b"".join(contents.pop(name) for name in names)
        records = np.frombuffer(content, np.uint8).reshape(-1, num_labels + math.prod(_IMAGE))
        images = records[:, num_labels:].reshape(-1, *_IMAGE).transpose(0, 2, 3, 1)
        arrays[f"{part}_images"] = np.ascontiguousarray(images)
        arrays[f"{part}_labels"] = records[:, num_labels - 1].astype(np.int64)
    return arrays


def _members(archive: Path, wanted: list[str]) -> dict[str, bytes]:
    """Read the wanted members of a tar.gz; whatever else is there is passed over."""
    contents = {}
    with tarfile.open(archive, "r|gz") as stream:
        for member in stream:
            name = member.name.removeprefix("./")
            if name in wanted and (file := stream.extractfile(member) if member.isreg() else None) is not None:
                contents[name] = file.read()
    return contents


def _read_idx(path: Path) -> np.ndarray:
    with gzip.open(path) as file:
        content = file.read()
    # Two zeros, 8 for bytes, the number of dimensions; then the dimensions, the high byte first; then the bytes.
    num_dims = content[3]
    shape = np.frombuffer(content, ">u4", num_dims, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_dims).reshape(shape)


def _read_mat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    from scipy import io

    content: Any = io.loadmat(str(path), variable_names=["X", "y"])
    images, labels = content["X"], content["y"].reshape(-1)
    return np.ascontiguousarray(images.transpose(3, 0, 1, 2)), labels.astype(np.int64) % 10
