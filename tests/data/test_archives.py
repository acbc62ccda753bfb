"""Claims about the readers of the original archives: small ones in the same formats, whole and damaged."""

import gzip
import struct

import numpy as np
import pytest

import originals
from varlap.data.archives import read_cifar10, read_cifar100, read_idx, read_svhn
from varlap.errors import DataError

READERS = {
    "cifar10": (read_cifar10, originals.arrays()),
    "cifar100": (read_cifar100, originals.arrays(num_classes=100)),
    "svhn": (read_svhn, originals.arrays()),
    "mnist": (read_idx, originals.arrays((28, 28))),
}


def write(folder, content, name="archive"):
    path = folder / name
    path.write_bytes(content)
    return path


def refused(read, *paths):
    with pytest.raises(DataError) as error:
        read(*paths)
    assert str(paths[0]) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", READERS)
def test_every_format_gives_its_arrays_back(tmp_path, name):
    read, expected = READERS[name]
    folder = originals.put(tmp_path, name)
    result = read(*(folder / file for file in originals.contents(name)))
    assert list(result) == originals.KEYS
    for key, array in expected.items():
        assert result[key].dtype == (np.int64 if key.endswith("labels") else np.uint8)
        assert result[key].flags.c_contiguous
        np.testing.assert_array_equal(result[key], array)


def test_other_members_of_a_tar_are_passed_over(tmp_path):
    more = [
        ("../../outside.bin", b"x"),
        ("elsewhere/data_batch_1.bin", b"x"),
        ("cifar-10-batches-bin/data_batch_2.bin", None),  # a link of a wanted name
    ]
    members = [(f"./{name}", content) for name, content in originals.cifar10_members(originals.arrays())]
    path = write(tmp_path, originals.tar_gz(more + members))
    np.testing.assert_array_equal(read_cifar10(path)["train_images"], originals.arrays()["train_images"])
    assert [file.name for file in tmp_path.iterdir()] == ["archive"]  # nothing was unpacked


def test_tar_without_a_member_or_with_a_wrong_one_is_refused(tmp_path):
    members = originals.cifar10_members(originals.arrays())
    path = write(tmp_path, originals.tar_gz(members[:-1]))
    assert "has no cifar-10-batches-bin/test_batch.bin, or is cut short" in refused(read_cifar10, path)
    path = write(tmp_path, originals.tar_gz([*members, members[1]]))
    assert "holds cifar-10-batches-bin/data_batch_1.bin twice" in refused(read_cifar10, path)
    for content in (b"", b"x" * 3072):
        path = write(tmp_path, originals.tar_gz([(members[1][0], content)]))
        assert f"data_batch_1.bin has {len(content):,} bytes; it should be records of 3,073 bytes" in refused(
            read_cifar10, path
        )


def test_absurd_member_of_a_tar_is_refused_before_it_is_read(tmp_path):
    import tarfile

    member = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
    member.size = 3073 * 10**9
    path = write(tmp_path, gzip.compress(member.tobuf(tarfile.GNU_FORMAT) + bytes(10240)))
    assert "has 3,073,000,000,000 bytes; it should be records of 3,073 bytes, 536,870,912 bytes at" in refused(
        read_cifar10, path
    )


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", READERS)
def test_archive_cut_short_is_named(tmp_path, name, kept):
    folder = originals.put(tmp_path, name)
    paths = [folder / file for file in originals.contents(name)]
    content = paths[0].read_bytes()
    paths[0].write_bytes(content[: int(kept * len(content))])
    refused(READERS[name][0], *paths)


@pytest.mark.parametrize("name", READERS)
def test_file_of_another_kind_is_named(tmp_path, name):
    folder = originals.put(tmp_path, name)
    paths = [folder / file for file in originals.contents(name)]
    paths[0].write_bytes(b"<html>not found</html>" * 50)
    assert "cannot be read as a" in refused(READERS[name][0], *paths)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes([0, 0, 8, 1]) + struct.pack(">3I", 1, 1, 1) + b"x", "it starts with 00 00 08 01, not with 00 00 08 03"),
        (bytes([0, 0, 13, 3]) + struct.pack(">3I", 1, 1, 1) + b"x", "it starts with 00 00 0d 03, not with"),
        (bytes([0, 0, 8, 3]) + struct.pack(">2I", 1, 1), "not with 00 00 08 03 and 3 dimensions"),
        (bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 9), "claims the shape [4294967295, 4294967295"),
        (bytes([0, 0, 8, 3]) + struct.pack(">3I", 0, 28, 28), "claims the shape [0, 28, 28]; that is nothing, or more"),
        (bytes([0, 0, 8, 3]) + struct.pack(">3I", 2, 2, 2) + b"1234567", "is cut short: 7 bytes for the shape [2, 2,"),
        (bytes([0, 0, 8, 3]) + struct.pack(">3I", 2, 2, 2) + b"123456789", "has more bytes than the shape [2, 2, 2]"),
    ],
)
def test_idx_file_with_a_wrong_header_is_refused(tmp_path, content, message):
    path = write(tmp_path, gzip.compress(content))
    assert message in refused(read_idx, path, path, path, path)


def test_gzip_with_a_wrong_checksum_is_refused(tmp_path):
    content = bytearray(originals.idx(np.zeros((2, 3, 3))))
    content[-8] ^= 1
    path = write(tmp_path, bytes(content))
    assert "cannot be read as a gzip file (CRC check failed" in refused(read_idx, path, path, path, path)


def test_mat_file_of_other_shapes_is_refused(tmp_path):
    images, labels = originals.arrays()["train_images"], originals.arrays()["train_labels"]
    for content, message in [
        (originals.mat(images, labels[:3]), "holds X [32, 32, 3, 10], y [3, 1]; it should hold X [32, 32, 3, N] and y"),
        (originals.mat(images[..., :2], labels), "holds X [32, 32, 2, 10], y [10, 1]; it should hold"),
        (originals.mat(images.astype(float), labels), "X must be uint8 and y from 1 to 10; X is float64"),
        (originals.mat(images, labels + 5), "X must be uint8 and y from 1 to 10; X is uint8 and y from 5 to 14"),
    ]:
        path = write(tmp_path, content, "train_32x32.mat")
        assert message in refused(read_svhn, path, path)
