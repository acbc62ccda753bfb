"""What is kept of an evaluation is read again as it was, and damage is named."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from varlap.errors import DataError
from varlap.experiments import Evaluated, assess, evaluation
from varlap.experiments.evaluation import _commit, origin
from varlap.posterior import BNN


def _evaluated(name: str = "VL") -> Evaluated:
    probs = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    kept = {"probs": probs, "labels": torch.tensor([1, 0]), "mutual_information": torch.tensor([0.1, 0.0])}
    return Evaluated(name, {"nll": 0.3, "nll_low": 0.2, "nll_high": 0.4}, {"beta": 0.1}, kept, {"varlap": "1"}, 2.5)


def test_what_was_written_is_read_again(tmp_path: Path):
    _evaluated().write(tmp_path / "vl")
    again = Evaluated.read(tmp_path / "vl")
    assert (again.name, again.scores, again.spec, again.origin, again.seconds) == (
        "VL",
        {"nll": 0.3, "nll_low": 0.2, "nll_high": 0.4},
        {"beta": 0.1},
        {"varlap": "1"},
        2.5,
    )
    for name, tensor in _evaluated().predictions.items():
        assert torch.equal(again.predictions[name], tensor)
    torch.testing.assert_close(again.prediction().mutual_information, torch.tensor([0.1, 0.0]))


def test_all_below_a_folder_are_read_in_order(tmp_path: Path):
    for name in ("b", "a"):
        _evaluated(name).write(tmp_path / "runs" / name)
    assert [found.name for found in Evaluated.read_all(tmp_path)] == ["a", "b"]


def test_what_is_missing_or_damaged_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"nothing holds no evaluation .*; write one by `varlap evaluate RUN`"):
        Evaluated.read(tmp_path / "nothing")
    _evaluated().write(tmp_path)
    whole = {name: (tmp_path / name).read_bytes() for name in ("scores.json", "predictions.safetensors")}
    for name, content in whole.items():
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(DataError, match=r"is damaged .*; make it again by `varlap evaluate`"):
            Evaluated.read(tmp_path)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "scores.json").write_text("[]")
    with pytest.raises(DataError, match="is damaged"):
        Evaluated.read(tmp_path)


def test_yes_or_no_labels_positions_and_variances_keep_their_meaning():
    yes_or_no = Evaluated("a", {}, {}, {"probs": torch.full((6, 4), 0.5), "labels": torch.zeros(6, 4)}).prediction()
    assert not yes_or_no.exclusive
    assert yes_or_no.labels.shape == (6, 4)
    positions = {"probs": torch.full((5, 2, 5, 5), 0.5), "labels": torch.zeros(5, 5, 5)}
    assert (
        Evaluated("b", {}, {}, positions | {"mutual_information": torch.zeros(5)}).prediction().mutual_information
        is None
    )
    moments = {"mean": torch.zeros(3), "variance": torch.ones(3), "epistemic_variance": torch.full((3,), 0.25)}
    assert torch.equal(Evaluated("c", {}, {}, moments).prediction().epistemic_variance, torch.full((3,), 0.25))


def _checkout(folder: Path) -> Path:
    """Make a repository that tracks a package, and return the package."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    package = folder / "src" / "varlap"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (folder / "page.md").write_text("")
    _git(folder, "init", "-q")
    _git(folder, "add", ".")
    _git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    return package


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_result_of_a_checkout_names_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = _checkout(tmp_path)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "of-something-else"))  # as within a hook
    _commit.cache_clear()
    found = _commit(package)
    monkeypatch.delenv("GIT_DIR")
    assert found == _git(tmp_path, "rev-parse", "--short", "HEAD")
    (tmp_path / "page.md").write_text("another page, or a result")
    _commit.cache_clear()
    assert _commit(package) == found
    (package / "__init__.py").write_text("changed = True")
    _commit.cache_clear()
    assert _commit(package) == f"{found}-dirty"
    monkeypatch.setattr(evaluation.varlap, "__file__", str(package / "__init__.py"))
    assert origin()["commit"] == f"{found}-dirty"


def test_an_installed_package_has_no_commit_even_inside_a_checkout_of_something_else(tmp_path: Path):
    _checkout(tmp_path)
    installed = tmp_path / ".venv" / "varlap"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert _commit(installed) is None


@pytest.mark.parametrize(
    "error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 10)], ids=["none", "slow"]
)
def test_an_origin_does_without_git(monkeypatch: pytest.MonkeyPatch, error: Exception):
    def failing(*arguments, **options):
        raise error

    monkeypatch.setattr(subprocess, "run", failing)
    _commit.cache_clear()
    try:
        assert "commit" not in origin()
    finally:
        _commit.cache_clear()


def test_an_origin_names_what_computed_also_where_there_is_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told = tmp_path / "cpuinfo"
    told.write_text(
        "processor : 0\nmodel name\t: A Processor @ 3 GHz\nprocessor : 1\nmodel name\t: A Processor @ 3 GHz\n"
    )
    assert evaluation._cpu(told) == "A Processor @ 3 GHz"
    told.write_text("processor : 0\nmodel name :\n")
    assert evaluation._cpu(told) == evaluation._cpu(tmp_path / "none") == f"{platform.machine()} CPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU, {device}")
    monkeypatch.setattr(evaluation, "_cpu", lambda: "a processor")
    assert origin()["hardware"] == "a GPU, cuda"
    assert origin("cuda:1")["hardware"] == "a GPU, cuda:1"
    assert origin("cpu")["hardware"] == origin(torch.device("cpu"))["hardware"] == "a processor"
    found = assess(BNN(torch.nn.Linear(2, 3)), (torch.ones(4, 2), torch.zeros(4).long()), name="VL")
    assert found.origin["hardware"] == "a processor"
