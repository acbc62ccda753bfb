"""Where the image data sets of the paper's experiments come from, and how to know them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from varlap.data.archives import Arrays, read_cifar10, read_cifar100, read_idx, read_svhn
from varlap.errors import DataError

_PARTS = ("train", "test")


@dataclass(frozen=True)
class Archive:
    """A file to download.

    Attributes:
        url: its address.
        size: in bytes.
        sha256: of its content, in hexadecimal digits.

    >>> Archive("https://example.org/sets/cats.tar.gz", 7, hashlib.sha256(b"content").hexdigest()).name
    'cats.tar.gz'
    """

    url: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's name."""
        return self.url.rsplit("/", 1)[-1]

    def check(self, path: Path) -> None:
        """Raise a `DataError` unless the file at `path` has this size and this SHA-256."""
        if (size := path.stat().st_size) != self.size:
            raise DataError(f"{path} has {size:,} bytes, not the {self.size:,} of {self.url}")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self.sha256:
            raise DataError(f"{path} has the SHA-256 {digest}, not {self.sha256}: it is not the file of {self.url}")


@dataclass(frozen=True)
class Source:
    """A data set in its original form: which archives, how to read them, and what must come out.

    Attributes:
        name: what it is called; it is stored as NAME.npz.
        archives: the files to download.
        read: turns the paths of the archives, in their order, into the four arrays of NAME.npz.
        image_shape: [H, W] or [H, W, 3].
        num_train: number of training images.
        num_test: number of test images.
        num_classes: labels are whole numbers below it.
        sha256: of the bytes of the arrays, by their names, where they are known; labels as int64.
        module: what `read` must be able to import, from the extra `data`.

    >>> from varlap.data import SOURCES
    >>> SOURCES["cifar10"].archives[0].name, SOURCES["cifar10"].num_train
    ('cifar-10-binary.tar.gz', 50000)
    """

    name: str
    archives: tuple[Archive, ...]
    read: Callable[..., Arrays]
    image_shape: tuple[int, ...]
    num_train: int
    num_test: int
    num_classes: int
    sha256: Mapping[str, str] = field(default_factory=dict)
    module: str | None = None

    @property
    def num_bytes(self) -> int:
        """How much there is to download."""
        return sum(archive.size for archive in self.archives)

    def find_problem(self, arrays: Arrays) -> str | None:
        """Say what is wrong with arrays of this data set, or None."""
        for part, count in zip(_PARTS, (self.num_train, self.num_test), strict=True):
            images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
            if images.shape != (count, *self.image_shape) or images.dtype != np.uint8:
                wanted = [count, *self.image_shape]
                return f"{part}_images has shape {list(images.shape)} and type {images.dtype}, not {wanted} and uint8"
            if labels.shape != (count,) or labels.min() < 0 or labels.max() >= self.num_classes:
                return f"{part}_labels must be {count:,} whole numbers from 0 to {self.num_classes - 1}"
        for key, digest in hash_arrays(arrays).items():
            if self.sha256.get(key, digest) != digest:
                return f"{key} has the SHA-256 {digest}, not {self.sha256[key]}"
        return None


def hash_arrays(arrays: Arrays) -> dict[str, str]:
    """Give the SHA-256 of each array's bytes, labels as little-endian int64.

    >>> hash_arrays({"test_images": np.zeros((1, 2, 2), np.uint8)})["test_images"][:12]
    'df3f619804a9'
    """
    return {
        key: hashlib.sha256(np.ascontiguousarray(array, "<i8" if key.endswith("labels") else None).data).hexdigest()
        for key, array in arrays.items()
    }


def _idx(name: str, base: str, *, files: Sequence[tuple[int, str]], arrays: Sequence[str]) -> Source:
    """Return a data set in MNIST's form, of each file its size and SHA-256, and of each array its SHA-256."""
    names = (f"{base}/{part}-{what}-ubyte.gz" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1"))
    keys = (f"{part}_{what}" for part in _PARTS for what in ("images", "labels"))
    return Source(
        name,
        tuple(Archive(url, *known) for url, known in zip(names, files, strict=True)),
        read_idx,
        image_shape=(28, 28),
        num_train=60_000,
        num_test=10_000,
        num_classes=10,
        sha256=dict(zip(keys, arrays, strict=True)),
    )


# Sizes and SHA-256 of the archives as published by TensorFlow Datasets. Of the arrays: computed from the originals.
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_CIFAR = "https://www.cs.toronto.edu/~kriz"
_SVHN = "http://ufldl.stanford.edu/housenumbers"

_ALL = (
    _idx(
        "fashion_mnist",
        _FASHION,
        files=(
            (26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
            (29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
            (4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
            (5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
        ),
        arrays=(
            "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
            "e3245b63f7c40d1c8b652835f19744d970c1613b40ddac6bcfc87b9c46e16a0b",
            "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
            "d51d859896c55775b9e9e219b77ff03bcec1b6ac322f313544dc3f9e7bc94fae",
        ),
    ),
    _idx(
        "mnist",
        _MNIST,
        files=(
            (9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            (28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            (1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            (4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
        arrays=(
            "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
            "e474323ac02fc156161b0bbb1f8c9cfeb327a74bcd9f9680a8385269a24f566c",
            "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
            "2fd8de6bdb8d11780b4b96dc57847bcfe6953f7c32aa48bfcd8237c3b7847243",
        ),
    ),
    Source(
        "cifar10",
        (
            Archive(
                f"{_CIFAR}/cifar-10-binary.tar.gz",
                170_052_171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
        read_cifar10,
        image_shape=(32, 32, 3),
        num_train=50_000,
        num_test=10_000,
        num_classes=10,
        sha256={
            "train_images": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
            "train_labels": "f5cfe00b0f00968c0cc5ff3b1d2de51b10e33efa277c2986f4e0fa63e58c9f4f",
            "test_images": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
            "test_labels": "cbb7365de8ed11f05cc4c3a1e7f78144127c5e851efd83762fb18202461230bb",
        },
    ),
    Source(
        "cifar100",
        (
            Archive(
                f"{_CIFAR}/cifar-100-binary.tar.gz",
                168_513_733,
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
        read_cifar100,
        image_shape=(32, 32, 3),
        num_train=50_000,
        num_test=10_000,
        num_classes=100,
    ),
    Source(
        "svhn",
        (
            Archive(
                f"{_SVHN}/train_32x32.mat",
                182_040_794,
                "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            ),
            Archive(
                f"{_SVHN}/test_32x32.mat",
                64_275_384,
                "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            ),
        ),
        read_svhn,
        image_shape=(32, 32, 3),
        num_train=73_257,
        num_test=26_032,
        num_classes=10,
        module="scipy",
    ),
)

SOURCES: Mapping[str, Source] = MappingProxyType({source.name: source for source in _ALL})
"""The data sets that `get` fetches, by their names."""
