"""Claims about load, data_folder and ArrayData."""

import builtins
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from varlap.data import ArrayData, data_folder, load
from varlap.errors import DataError, MissingExtraError


def arrays(colour=False, **changes):
    random = np.random.default_rng(0)
    shape = (6, 5, 3) if colour else (6, 5)
    parts = {
        "train_images": random.integers(0, 256, (4, *shape), dtype=np.uint8),
        "train_labels": np.array([0, 1, 2, 1]),
        "test_images": random.integers(0, 256, (2, *shape), dtype=np.uint8),
        "test_labels": np.array([2, 0]),
    }
    parts |= changes
    return {key: value for key, value in parts.items() if value is not None}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VARLAP_DATA", str(tmp_path))
    return tmp_path


def test_digits_are_split_into_1437_and_360_the_same_way_each_time():
    data, again = load("digits"), load("digits")
    assert data.train_images.shape == (1437, 1, 8, 8)
    assert data.test_images.shape == (360, 1, 8, 8)
    assert data.train_images.dtype == torch.float32
    assert (data.train_images.min(), data.train_images.max()) == (0, 1)
    assert data.train_labels.dtype == torch.int64
    assert torch.equal(data.test_images, again.test_images)
    assert data.test_labels[:10].tolist() == [7, 6, 3, 7, 7, 3, 2, 8, 9, 3]


def test_digits_are_split_with_each_class_in_proportion():
    data = load("digits")
    train, test = data.train_labels.bincount(), data.test_labels.bincount()
    assert ((test - (train + test) * 360 / 1797).abs() < 1).all()


def importing_sklearn_raises(error, monkeypatch):
    real_import = builtins.__import__

    def raising(name, *args, **kwargs):
        if name.startswith("sklearn"):
            raise error
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", raising)


def test_digits_without_scikit_learn_name_the_extra(monkeypatch):
    importing_sklearn_raises(ModuleNotFoundError("No module", name="sklearn"), monkeypatch)
    with pytest.raises(MissingExtraError, match=r"the digits data set needs .* pip install '\.\[sklearn\]'"):
        load("digits")


@pytest.mark.parametrize("error", [ImportError("interrupted"), ModuleNotFoundError("No module", name="joblib")])
def test_a_scikit_learn_that_is_there_but_fails_is_not_called_missing(error, monkeypatch):
    importing_sklearn_raises(error, monkeypatch)
    with pytest.raises(type(error)) as caught:
        load("digits")
    assert caught.value is error


@pytest.mark.parametrize("labels", [np.int64, np.uint8, np.int32])
def test_grey_images_become_one_channel_and_labels_int64(folder, labels):
    parts = arrays(train_labels=np.array([0, 1, 2, 1], labels))
    np.savez(folder / "tiny.npz", **parts)
    data = load("tiny")
    assert (data.name, data.num_classes, data.image_shape) == ("tiny", 3, (1, 6, 5))
    assert data.train_images.dtype == torch.uint8
    assert data.train_labels.dtype == torch.int64
    np.testing.assert_array_equal(data.train_images[:, 0].numpy(), parts["train_images"])
    assert data.test_labels.tolist() == [2, 0]


def test_colour_images_become_channel_first(folder):
    parts = arrays(colour=True)
    np.savez_compressed(folder / "tiny.npz", **parts)
    data = load("tiny")
    assert data.image_shape == (3, 6, 5)
    assert data.train_images.is_contiguous()
    for channel in range(3):
        np.testing.assert_array_equal(data.test_images[:, channel].numpy(), parts["test_images"][..., channel])


def test_folder_argument_comes_before_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("VARLAP_DATA", "/nowhere")
    np.savez(tmp_path / "tiny.npz", **arrays())
    assert load("tiny", folder=str(tmp_path)).num_classes == 3


def test_data_folder_is_the_variable_or_the_users_cache(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("VARLAP_DATA", "~/images")
    assert data_folder() == Path.home() / "images"
    monkeypatch.delenv("VARLAP_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert data_folder() == Path("/cache/varlap")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_folder() == Path.home() / ".cache" / "varlap"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert data_folder() == Path.home() / "Library" / "Caches" / "varlap"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert data_folder() == Path("/local/varlap")
    monkeypatch.delenv("LOCALAPPDATA")
    assert data_folder() == Path.home() / "AppData" / "Local" / "varlap"


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "svhn", "fashion_mnist", "mnist", "my_cats"])
def test_missing_file_names_the_folder_the_command_and_the_variable(folder, name):
    with pytest.raises(DataError) as error:
        load(name)
    fetch = "Put" if name == "my_cats" else f"Fetch it with `varlap data get {name}`, put"
    assert str(error.value) == (
        f"data set '{name}' not found: no file {name}.npz in {folder}. "
        f"{fetch} the file there, or set VARLAP_DATA to the folder that holds it"
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [("digit", "digits"), ("fashion-mnist", "fashion_mnist"), ("my_cat", "my_Cats"), ("CIFAR-10", "cifar10")],
)
def test_misspelt_name_gets_did_you_mean(folder, name, meant):
    np.savez(folder / "my_Cats.npz", **arrays())
    with pytest.raises(DataError, match=rf"no file {name}\.npz in .*; did you mean '{meant}'\?"):
        load(name)


@pytest.mark.parametrize("name", ["", "a/b", "../a", "cifar10.npz"])
def test_name_that_is_a_path_is_refused(folder, name):
    with pytest.raises(DataError, match="give a plain name such as 'cifar10', and its folder as VARLAP_DATA"):
        load(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_labels": None}, "has no test_labels; it holds train_images, train_labels, test_images. Write it"),
        ({"train_images": np.zeros((4, 6, 5))}, "train_images has shape [4, 6, 5] and type float64; give uint8"),
        ({"test_images": np.zeros((2, 6), np.uint8)}, "test_images has shape [2, 6] and type uint8; give uint8"),
        ({"test_images": np.zeros((2, 3, 6, 5), np.uint8)}, "test_images has shape [2, 3, 6, 5] and type uint8"),
        ({"test_images": np.zeros((0, 6, 5), np.uint8)}, "test_images is empty; there must be at least one item"),
        ({"train_labels": np.zeros(4)}, "train_labels has shape [4] and type float64; give whole numbers [N]"),
        ({"train_labels": np.zeros((4, 1), int)}, "train_labels has shape [4, 1] and type int64; give whole"),
        ({"train_labels": np.zeros(3, int)}, "4 train_images but 3 train_labels; they must agree"),
    ],
)
def test_wrong_content_names_the_file_and_the_key(folder, changes, message):
    np.savez(folder / "bad.npz", **arrays(**changes))
    with pytest.raises(DataError) as error:
        load("bad")
    assert str(folder / "bad.npz") in str(error.value)
    assert message in str(error.value)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("unpickled",)


def test_pickled_objects_in_a_file_are_never_unpickled(folder):
    labels = np.array([Bomb(), Bomb(), Bomb(), Bomb()], dtype=object)
    np.savez(folder / "bad.npz", **arrays(train_labels=labels))
    with pytest.raises(DataError, match=r"bad\.npz: train_labels cannot be read as a plain array \(Object arrays"):
        load("bad")


def test_pickle_named_npz_is_never_unpickled(folder):
    (folder / "bad.npz").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError, match=r"bad\.npz is no npz file, or is cut short; fetch it again"):
        load("bad")


def test_damaged_file_is_named_with_the_key(folder):
    path = folder / "bad.npz"
    np.savez(path, **arrays())
    content = bytearray(path.read_bytes())
    content[200] ^= 255  # inside the first array's data: the checksum of the archive no longer fits
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"bad\.npz: train_images cannot be read as a plain array \("):
        load("bad")


def test_array_data_checks_itself():
    images, labels = torch.zeros(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(DataError, match=r"t: test_images has shape \[4, 2, 2\] and test_labels \[4\]; give images"):
        ArrayData("t", images, labels, images[:, 0], labels)
    with pytest.raises(DataError, match=r"t: train_labels must be int64 and count from 0; they are torch\.int32"):
        ArrayData("t", images, labels.int(), images, labels)
    with pytest.raises(DataError, match=r"t: test_labels must be int64 and count from 0; .* and start at -1"):
        ArrayData("t", images, labels, images, labels - 1)
    with pytest.raises(DataError, match=r"a training image has shape \[1, 2, 2\], a test image \[1, 2, 1\]"):
        ArrayData("t", images, labels, images[..., :1], labels)
