"""Claims about get, find_stored and verify."""

import dataclasses
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import originals
from varlap.data import SOURCES, find_stored, get, load, verify
from varlap.errors import DataError, MissingExtraError, VarlapWarning

NAMES = ["cifar10", "cifar100", "svhn", "fashion_mnist", "mnist"]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = originals.Server()
    yield server
    server.close()


def content(path):
    with np.load(path, allow_pickle=False) as archive:
        return {key: archive[key] for key in archive}


@pytest.mark.parametrize("name", NAMES)
def test_every_data_set_is_downloaded_read_stored_and_loaded(server, tmp_path, name):
    server.offer(name)
    source = originals.source(name, server.address)
    path = get(source, tmp_path)
    assert path == tmp_path / f"{name}.npz"
    assert list(tmp_path.iterdir()) == [path]  # no downloads left
    stored = content(path)
    assert list(stored) == originals.KEYS
    assert originals.hashes(stored) == source.sha256
    assert stored["train_labels"].dtype == np.int64
    data = load(name, tmp_path)
    assert data.image_shape == ((3, 32, 32) if len(source.image_shape) == 3 else (1, 28, 28))
    verification = verify(source, tmp_path)
    assert (verification.problem, verification.known) == (None, True)
    assert verification.sha256 == source.sha256


@pytest.mark.parametrize("inside", ["", "mnist"])
def test_archives_that_are_there_are_read_without_a_network_and_left_alone(tmp_path, inside):
    archives = originals.put(tmp_path / "archives" / inside, "mnist")
    before = sorted(path.name for path in archives.iterdir())
    path = get(originals.source("mnist"), tmp_path, archives=tmp_path / "archives")
    assert originals.hashes(content(path)) == originals.source("mnist").sha256
    assert sorted(path.name for path in archives.iterdir()) == before


def test_archives_put_into_the_folder_of_downloads_are_used(tmp_path):
    downloads = originals.put(tmp_path / "downloads" / "mnist", "mnist", **{originals.IDX_NAMES[2]: b"cut short"})
    with pytest.raises(DataError, match=r"-ubyte.gz has 9 bytes, not the .*; delete it, and it is fetched again$"):
        get(originals.source("mnist"), tmp_path)
    originals.put(downloads, "mnist")
    assert get(originals.source("mnist"), tmp_path).is_file()


def test_what_is_there_is_not_fetched_again_unless_forced(server, tmp_path):
    server.offer("mnist")
    source = originals.source("mnist", server.address)
    np.savez(tmp_path / "mnist.npz", **originals.arrays((5, 5)))
    assert get(source, tmp_path) == tmp_path / "mnist.npz"
    assert server.ranges == []
    get(source, tmp_path, force=True)
    assert verify(source, tmp_path).problem is None


def test_of_two_calls_at_once_one_fetches_and_the_other_waits_for_it(server, tmp_path):
    def slowly(handler, content):
        time.sleep(0.3)
        originals.send(handler, content)

    server.offer("mnist")
    server.replies.append(slowly)
    source = originals.source("mnist", server.address)
    with (
        ThreadPoolExecutor(2) as pool,
        pytest.warns(VarlapWarning, match="another process is fetching mnist; this one waits for it"),
    ):
        paths = list(pool.map(get, [source] * 2, [tmp_path] * 2))
    assert paths == [tmp_path / "mnist.npz"] * 2
    assert len(server.ranges) == len(source.archives)
    assert list(tmp_path.iterdir()) == [tmp_path / "mnist.npz"]  # and no lock


def test_damaged_file_is_said_to_need_force(tmp_path):
    (tmp_path / "mnist.npz").write_bytes(b"no npz")
    with pytest.raises(DataError, match=r"mnist\.npz is there, but it cannot be read as an npz file .*--force"):
        get(originals.source("mnist"), tmp_path)
    np.savez(tmp_path / "mnist.npz", train_images=np.zeros((1, 2, 2), np.uint8))
    with pytest.raises(DataError, match=r"mnist\.npz is there, but it has no train_labels; fetch it again"):
        get(originals.source("mnist"), tmp_path)


def test_without_a_network_the_message_says_what_to_fetch_and_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    source = originals.source("svhn")
    with pytest.raises(DataError) as error:
        get(source, tmp_path, tries=1)
    message = str(error.value)
    assert message.startswith("cannot download http://127.0.0.1:9/svhn/train_32x32.mat: ")
    assert (
        "fetch http://127.0.0.1:9/svhn/train_32x32.mat and http://127.0.0.1:9/svhn/test_32x32.mat elsewhere, "
        f"put them into {tmp_path / 'downloads' / 'svhn'} and run the command again; or say which folder holds them: "
        "varlap data get svhn --from FOLDER"
    ) in message
    assert "\n" not in message
    assert not (tmp_path / "svhn.npz").exists()


@pytest.mark.parametrize("data", ["cifar10", "svhn", "fashion_mnist"])
def test_archive_with_a_wrong_hash_is_named_and_nothing_is_stored(tmp_path, data):
    name, good = next(iter(originals.contents(data).items()))
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    archives = originals.put(tmp_path / "archives", data, **{name: bytes(bad)})
    with pytest.raises(DataError, match=rf"{name} has the SHA-256 .*: it is not the file of http"):
        get(originals.source(data), tmp_path, archives=archives)
    (archives / name).write_bytes(good[:-1])
    with pytest.raises(DataError, match=rf"{name} has {len(good) - 1:,} bytes, not the {len(good):,} of http"):
        get(originals.source(data), tmp_path, archives=archives)
    assert not (tmp_path / f"{data}.npz").exists()


def test_missing_archive_is_named_with_its_address(tmp_path):
    with pytest.raises(DataError, match=r"no cifar-10-binary\.tar\.gz in .*; fetch it from http://127\.0\.0\.1:9/"):
        get(originals.source("cifar10"), tmp_path, archives=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_train": 11}, "train_images has shape [10, 28, 28] and type uint8, not [11, 28, 28] and uint8; nothing"),
        ({"image_shape": (28, 27)}, "train_images has shape [10, 28, 28] and type uint8, not [10, 28, 27] and uint8"),
        ({"num_classes": 3}, "train_labels must be 10 whole numbers from 0 to 2; nothing was stored"),
        ({"sha256": {"test_labels": "abc"}}, ", not abc; nothing was stored"),
    ],
)
def test_content_that_is_not_the_data_set_is_not_stored(tmp_path, change, message):
    source = dataclasses.replace(originals.source("mnist"), **change)
    with pytest.raises(DataError) as error:
        get(source, tmp_path, archives=originals.put(tmp_path / "archives", "mnist"))
    assert message in str(error.value)
    assert list(tmp_path.glob("*.npz")) == []


def test_missing_scipy_is_said_before_the_download(server, tmp_path, monkeypatch):
    server.offer("svhn")
    source = originals.source("svhn", server.address)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingExtraError, match=r"^reading svhn needs .*: pip install '\.\[data\]' in the checkout$"):
        get(source, tmp_path)
    assert server.ranges == []


def test_process_that_dies_before_the_rename_leaves_no_npz_and_the_next_one_stores_it(tmp_path):
    originals.put(tmp_path / "archives", "mnist")
    script = (
        "import os, sys, originals, varlap\n"
        "os.replace = lambda *paths: os._exit(9)\n"
        "varlap.data.get(originals.source('mnist'), sys.argv[1], archives=sys.argv[1] + '/archives')\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    died = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, check=False)
    assert died.returncode == 9
    assert list(tmp_path.glob("*.npz")) == []
    assert len(list(tmp_path.glob(".mnist.npz.*.tmp"))) == 1  # it had written all of it
    assert find_stored(tmp_path) == []
    get(originals.source("mnist"), tmp_path, archives=tmp_path / "archives")
    assert verify(originals.source("mnist"), tmp_path).problem is None


def test_failing_write_is_named_and_keeps_what_was_there(tmp_path, monkeypatch):
    np.savez(tmp_path / "mnist.npz", **originals.arrays((5, 5)))
    before = (tmp_path / "mnist.npz").read_bytes()
    archives = originals.put(tmp_path / "archives", "mnist")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"mnist cannot be stored in .*: .*No space left on device"):
        get(originals.source("mnist"), tmp_path, archives=archives, force=True)
    assert (tmp_path / "mnist.npz").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archives", "mnist.npz"]


def test_stored_sets_are_described_by_their_headers(tmp_path):
    np.savez(tmp_path / "cats.npz", **originals.arrays((5, 5)))
    (tmp_path / "dogs.npz").write_bytes(b"no npz")
    cats, dogs = find_stored(tmp_path)
    assert (cats.name, cats.path, cats.problem) == ("cats", tmp_path / "cats.npz", None)
    assert cats.num_bytes == (tmp_path / "cats.npz").stat().st_size
    assert cats.shapes["train_images"] == (10, 5, 5)
    assert "cannot be read as an npz file" in str(dogs.problem)
    assert find_stored(tmp_path / "nowhere") == []


def test_a_folder_and_a_link_to_nowhere_are_no_data_sets(tmp_path):
    np.savez(tmp_path / "cats.npz", **originals.arrays((5, 5)))
    (tmp_path / "dogs.npz").mkdir()
    (tmp_path / "mnist.npz").symlink_to(tmp_path / "not-mounted" / "mnist.npz")
    assert [one.name for one in find_stored(tmp_path)] == ["cats"]


def test_verify_finds_one_changed_pixel_and_one_changed_label(tmp_path):
    source = originals.source("cifar10")
    for key in originals.KEYS:
        parts = originals.arrays()
        parts[key].reshape(-1)[5 % len(parts[key])] ^= 1
        np.savez(tmp_path / "cifar10.npz", **parts)
        problem = str(verify(source, tmp_path).problem)
        assert problem.startswith(f"{tmp_path / 'cifar10.npz'}: {key} has the SHA-256 ")
        assert verify(dataclasses.replace(source, sha256={}), tmp_path).problem is None


def test_verify_takes_labels_of_another_type_and_a_channel_of_one(tmp_path):
    parts = originals.arrays((28, 28))
    parts["train_labels"] = parts["train_labels"].astype(np.uint8)
    parts["test_images"] = parts["test_images"][..., None]
    np.savez(tmp_path / "mnist.npz", **parts)
    assert verify(originals.source("mnist"), tmp_path).problem is None


def test_verify_names_a_damaged_file_and_a_missing_one(tmp_path):
    (tmp_path / "mnist.npz").write_bytes(b"no npz")
    assert "is no npz file, or is cut short" in str(verify(originals.source("mnist"), tmp_path).problem)
    with pytest.raises(DataError, match="`varlap data get cifar10`"):
        verify("cifar10", tmp_path)


def test_any_npz_can_be_verified_by_loading_it(tmp_path):
    np.savez(tmp_path / "cats.npz", **originals.arrays((5, 5)))
    verification = verify("cats", tmp_path)
    assert (verification.problem, verification.known) == (None, False)
    assert verification.sha256 == originals.hashes(originals.arrays((5, 5)))


def test_catalogue_is_complete_and_well_formed():
    assert sorted(SOURCES) == sorted(NAMES)
    for name, source in SOURCES.items():
        assert source.name == name
        assert [archive.name for archive in source.archives] == list(originals.contents(name))
        assert source.read is originals.source(name).read
        assert set(source.sha256) == (set() if name in ("cifar100", "svhn") else set(originals.KEYS))
        for digest in [*source.sha256.values(), *(archive.sha256 for archive in source.archives)]:
            assert len(bytes.fromhex(digest)) == 32
    digests = [archive.sha256 for source in SOURCES.values() for archive in source.archives]
    assert len(set(digests)) == len(digests) == 12
