"""`varlap data`: get, list and verify, with small data sets in place of the real ones."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import originals
from varlap.cli import app


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VARLAP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "data"


@pytest.fixture
def server(folder):
    server = originals.Server()
    yield server
    server.close()


def run(*arguments, sources=None, status=0):
    result = CliRunner().invoke(app, ["data", *arguments], obj=sources)
    assert result.exit_code == status, result.output
    return result.stdout if status != 2 else result.stderr


def test_get_list_and_verify_print_one_object_each(server, folder):
    sources = {name: originals.source(name, server.address) for name in ("mnist", "cifar10")}
    server.offer("mnist")
    got = json.loads(run("get", "mnist", "--json", sources=sources))
    path = str(folder / "mnist.npz")
    assert got == {"folder": str(folder), "data": [{"name": "mnist", "path": path}]}
    there, missing = json.loads(run("list", "--json", sources=sources))["data"]
    assert there == {
        "name": "mnist",
        "present": True,
        "path": path,
        "bytes": (folder / "mnist.npz").stat().st_size,
        "download_bytes": sources["mnist"].num_bytes,
        "shapes": {"train_images": [10, 28, 28], "train_labels": [10], "test_images": [4, 28, 28], "test_labels": [4]},
        "problem": None,
    }
    assert (missing["name"], missing["present"], missing["path"]) == ("cifar10", False, None)
    (good,) = json.loads(run("verify", "--json", sources=sources))["data"]
    assert (good["name"], good["ok"], good["content_known"]) == ("mnist", True, True)
    assert good["sha256"] == sources["mnist"].sha256


def test_people_are_told_the_same_in_words(server, folder):
    sources = {"mnist": originals.source("mnist", server.address), "svhn": originals.source("svhn", known=False)}
    server.offer("mnist")
    said = run("get", "mnist", sources=sources)
    assert said == f"mnist: 10 training and 4 test images of 28×28 in {folder / 'mnist.npz'}\n"
    originals.put(folder / "archives", "svhn")
    run("get", "svhn", "--from", str(folder / "archives"), sources=sources)
    np.savez(folder / "cats.npz", **originals.arrays((5, 5)))
    listed = run("list", sources=sources | {"cifar10": originals.source("cifar10")})
    assert f"data in {folder}; varlap data get NAME fetches what is missing" in listed
    for words in ("10×28×28", "10×32×32×3", "cats", "10×5×5", "missing, 0.0 MB", "comes with"):
        assert words in listed
    assert run("verify", sources=sources).splitlines() == [
        "cats: good (it can be loaded)",
        "mnist: good (SHA-256 of every array)",
        "svhn: good (shapes and labels; no SHA-256 is known)",
    ]


def test_verify_has_status_1_where_something_is_wrong(folder):
    folder.mkdir()
    assert run("verify") == f"no data sets in {folder}\n"
    parts = originals.arrays((28, 28))
    np.savez(folder / "mnist.npz", **(parts | {"test_images": parts["test_images"] ^ 1}))
    sources = {"mnist": originals.source("mnist")}
    said = run("verify", "mnist", sources=sources, status=1)
    assert "test_images has the SHA-256" in said
    assert said.endswith(f", not {sources['mnist'].sha256['test_images']}\n")
    (bad,) = json.loads(run("verify", "--json", sources=sources, status=1))["data"]
    assert not bad["ok"]
    assert "test_images has the SHA-256" in bad["problem"]


def test_force_fetches_again(server, folder):
    sources = {"mnist": originals.source("mnist", server.address)}
    server.offer("mnist")
    run("get", "mnist", sources=sources)
    run("get", "mnist", sources=sources)
    assert len(server.ranges) == 4
    run("get", "mnist", "--force", sources=sources)
    assert len(server.ranges) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["get", "cifar"], "no data set 'cifar' to fetch; did you mean 'cifar10'?"),
        (["get", "FashionMNIST"], "did you mean 'fashion_mnist'?"),
        (["get", "imagenet"], "'imagenet' to fetch; choose 'fashion_mnist', 'mnist', 'cifar10', 'cifar100' or 'svhn'"),
        (["get", "digits"], "digits needs no download: it comes with scikit-learn"),
        (["get", "uci"], "the UCI tables are not fetched, since no SHA-256 is published. Get the folder"),
        (["get", "boston"], "put it into"),
        (["get", "mnist", "--from", "/nowhere"], "no t10k-labels-idx1-ubyte.gz in /nowhere or /nowhere/mnist; fetch"),
        (["verify", "mnist"], "data set 'mnist' not found: no file mnist.npz in"),
        (["verify", "minst"], "did you mean 'mnist'?"),
        (["verify", "../mnist"], "give a plain name such as 'cifar10'"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(folder, arguments, message):
    said = run(*arguments, status=2)
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert said.startswith("varlap: ")


def test_all_archives_that_are_missing_are_named_and_none_holds_another_set_up(folder):
    sources = {name: originals.source(name, known=False) for name in ("mnist", "svhn", "cifar10")}
    archives = originals.put(folder / "archives", "svhn")
    command = ["get", "mnist", "svhn", "cifar10", "--from", str(archives)]
    said = run(*command, sources=sources, status=2)
    for name in ("mnist", "cifar10"):
        for archive in sources[name].archives:
            assert archive.url in said
    assert said.count("fetch them from") == said.count("fetch it from") == 1  # mnist has four files, cifar10 one
    assert len(said.strip().splitlines()) == 1
    assert [path.name for path in folder.glob("*.npz")] == ["svhn.npz"]


def test_a_misspelt_name_is_found_before_anything_is_downloaded(server, folder):
    server.offer("mnist")
    sources = {"mnist": originals.source("mnist", server.address)}
    run("get", "mnist", "minst", sources=sources, status=2)
    assert server.ranges == []


def test_no_network_is_one_line_and_status_2(folder):
    said = run("get", "cifar10", "--tries", "1", "--json", sources={"cifar10": originals.source("cifar10")}, status=2)
    assert "put it into" in said
    assert str(folder / "downloads" / "cifar10") in said
    assert len(said.strip().splitlines()) == 1


def test_a_failing_get_prints_nothing_on_standard_output(folder):
    sources = {"cifar10": originals.source("cifar10")}
    result = CliRunner().invoke(app, ["data", "get", "cifar10", "--tries", "1", "--json"], obj=sources)
    assert result.stdout == ""
