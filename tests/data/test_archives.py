"""Claims about the readers of the original archives: small ones in the same formats."""

import numpy as np
import pytest

import originals
from varlap.data.archives import read_cifar10, read_cifar100, read_idx, read_svhn

READERS = {
    "cifar10": (read_cifar10, originals.arrays()),
    "cifar100": (read_cifar100, originals.arrays(num_classes=100)),
    "svhn": (read_svhn, originals.arrays()),
    "mnist": (read_idx, originals.arrays((28, 28))),
}


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
    path = tmp_path / "archive"
    path.write_bytes(originals.tar_gz(more + members))
    np.testing.assert_array_equal(read_cifar10(path)["train_images"], originals.arrays()["train_images"])
    assert [file.name for file in tmp_path.iterdir()] == ["archive"]  # nothing was unpacked
