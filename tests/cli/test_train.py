"""`varlap train` and `varlap bench`: one object with --json, one line and exit status 2 for a mistake."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import varlap
from varlap.cli import app
from varlap.cli.device import warn_if_slow
from varlap.experiments import TrainedRun
from varlap.models import convnet

QUICK = ["train", "digits", "--epochs", "2", "--batch-size", "256"]


def _run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.stderr


@pytest.mark.parametrize("method", ["map", "vi", "vl", "vl-hessian", "laplace"])
def test_every_method_trains_and_prints_one_object(method: str):
    beta = "0.5" if method == "laplace" else "0.01"
    result = json.loads(_run(*QUICK, "--method", method, "--model", "mlp", "--beta", beta, "--json"))
    assert result["method"] == method
    assert {"nll", "accuracy", "top5_accuracy", "brier", "ece", "aurc"} <= set(result["test"])


def test_laplace_saves_its_variances(tmp_path: Path):
    command = [*QUICK, "--model", "mlp", "--beta", "0.5", "--quiet"]
    for method in ("map", "laplace"):
        _run(*command, "--method", method, "--out", str(tmp_path / method))
    saved, expected = (TrainedRun.open(tmp_path / method).bnn() for method in ("laplace", "map"))
    varlap.laplace(expected, TrainedRun.open(tmp_path / "map").task.training, beta=0.5)
    assert saved.log_sigma.keys() == expected.log_sigma.keys()
    for name, value in expected.log_sigma.items():
        torch.testing.assert_close(saved.log_sigma[name], value)


def test_a_run_leaves_a_model_and_a_result_and_is_not_made_twice(tmp_path: Path):
    out = tmp_path / "run"
    first = json.loads(_run(*QUICK, "--out", str(out), "--json"))
    again = json.loads(_run(*QUICK, "--out", str(out), "--json"))
    assert first == again == json.loads((out / "result.json").read_text())
    here = varlap.experiments.origin("cpu")
    assert first["origin"] == here | {"date": first["origin"]["date"], "device": "cpu", "num_threads": 1}
    bnn = varlap.load(out / "model", convnet(image_size=8))
    digits = varlap.data.load("digits")
    normalise = varlap.data.Normaliser.of(digits.train_images)
    scores = varlap.evaluate(bnn, (normalise(digits.test_images), digits.test_labels))
    assert scores["nll"] == pytest.approx(first["test"]["nll"], rel=1e-6)


def test_held_out_images_score_each_epoch(tmp_path: Path):
    _run(*QUICK, "--validation", "0.2", "--patience", "5", "--augment", "--out", str(tmp_path), "--quiet")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1]
    assert all(row["validation_nll"] > 0 for row in rows)


def test_a_result_is_json_and_keeps_the_origin_of_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["varlap.cli.train"], "evaluate", lambda *_: {"nll": float("nan"), "accuracy": 0.1})
    command = [*QUICK, "--model", "mlp", "--quiet", "--out", str(tmp_path)]
    _run(*command)
    path = tmp_path / "result.json"
    result = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert result["test"] == {"nll": None, "accuracy": 0.1}
    elsewhere = result["origin"] | {"hardware": "a GPU", "device": "cuda:0"}
    path.write_text(json.dumps(result | {"origin": elsewhere}))
    _run(*command)  # which trains nothing
    assert json.loads(path.read_text())["origin"] == elsewhere


class Begun(Exception):
    """What a training would have begun with."""


def _begun(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    def begin(bnn: Any, objective: Any, training: Any, **settings: Any):
        raise Begun({"bnn": bnn, "objective": objective, "training": training, **settings})

    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["varlap.cli.train"], "fit", begin)
        said = CliRunner().invoke(app, list(arguments))
    assert isinstance(said.exception, Begun), said.output
    return said.exception.args[0]


def test_digits_are_shifted_by_a_pixel_over_black_and_never_mirrored(monkeypatch: pytest.MonkeyPatch):
    augment = _begun(*QUICK, "--augment", monkeypatch=monkeypatch)["augment"]
    digits = varlap.data.load("digits")
    normalise = varlap.data.Normaliser.of(digits.train_images)
    framed = F.pad(digits.test_images, (1, 1, 1, 1))  # 0 is black
    shifted = torch.stack([normalise(framed[..., a : a + 8, b : b + 8]) for a in range(3) for b in range(3)])
    found = augment(normalise(digits.test_images), torch.Generator().manual_seed(0))
    distance = (found - shifted).abs().amax((2, 3, 4))
    assert distance.amin(0).max() < 1e-5
    assert set(distance.argmin(0).tolist()) == set(range(9))


def test_a_result_says_whether_its_images_were_augmented(tmp_path: Path):
    _run(*QUICK, "--model", "mlp", "--out", str(tmp_path / "plain"), "--quiet")
    _run(*QUICK, "--model", "mlp", "--augment", "--out", str(tmp_path / "augmented"), "--quiet")
    assert "augment" not in TrainedRun.open(tmp_path / "plain").spec()
    assert TrainedRun.open(tmp_path / "augmented").spec()["augment"] is True
    for name, augmented in (("plain", False), ("augmented", True)):
        assert json.loads((tmp_path / name / "result.json").read_text())["augment"] is augmented


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "digit"], "did you mean 'digits'"),
        ([*QUICK, "--beta", "-1"], "beta=-1.0) must be finite and not negative"),
        ([*QUICK, "--lr", "0"], "fit(lr=0.0) must be positive and finite"),
        ([*QUICK, "--precision", "fp8"], "choose 'fp32', 'bf16' or 'fp16'"),
        ([*QUICK, "--patience", "3"], "--patience 3 goes by held-out images, and there are none; add --validation 0.1"),
        ([*QUICK, "--validation", "0.0003"], "validation = 0.0003 of 1437 images of digits is none; hold out more"),
        (
            [*QUICK, "--seed", "1" + 20 * "0"],
            "seed=100000000000000000000 must be a whole number from -2**63 to 2**64 - 1",
        ),
        ([*QUICK, "--recipe", "sgd", "--seed", "1" + 20 * "0"], "must be a whole number from -2**63 to 2**64 - 1"),
        (["demo", "--seed", "1" + 20 * "0"], "must be a whole number from -2**63 to 2**64 - 1"),
        (["bench", "step", "--model", "vgg"], "unknown model 'vgg'; choose one of preact-resnet-18, convnet, mlp"),
        (["bench", "step", "--methods", "VL best"], "methods are MAP"),
        (["bench", "growth", "--batch-size", "0"], "batch_size=0 must be at least 1"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments: list[str], message: str):
    said = _run(*arguments, status=2)
    assert message in said
    assert len(said.strip().splitlines()) == 1


def test_another_runs_folder_is_refused(tmp_path: Path):
    _run(*QUICK, "--out", str(tmp_path), "--quiet")
    assert "it has lr=0.003, not 0.01" in _run(*QUICK, "--lr", "0.01", "--out", str(tmp_path), status=2)


def test_growth_times_other_sizes_and_prints_one_object(tmp_path: Path):
    out = tmp_path / "growth.json"
    arguments = ["--model", "mlp", "--batch-size", "4", "--rounds", "1", "--steps", "1", "--out", str(out)]
    said = json.loads(_run("bench", "growth", *arguments, "--json"))
    assert said == json.loads(out.read_text())
    sizes = [tuple(r["spec"][name] for name in ("batch_size", "width", "depth")) for r in said["results"]]
    assert sizes == [(4, 100, 2), (2, 100, 2), (8, 100, 2), (4, 50, 2), (4, 200, 2), (4, 100, 1), (4, 100, 4)]
    assert all(result["methods"]["VL exact"]["ratio_to_map"] > 0 for result in said["results"])
    assert "VL exact, × MAP" in _run("bench", "growth", *arguments[:-2])


@pytest.fixture(autouse=True)
def _random_state():
    """The command seeds torch for the weights; other tests must not notice."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@pytest.mark.parametrize(
    ("device", "model", "width", "told"),
    [
        ("cpu", "preact-resnet-18", 64, True),
        ("cpu", "preact-resnet-18", 8, False),
        ("cpu", "convnet", 64, False),
        ("cuda", "preact-resnet-18", 64, False),
    ],
)
def test_a_network_that_is_too_large_for_a_cpu_is_told_of(device: str, model: str, width: int, told: bool):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_if_slow(torch.device(device), model, width, "--model convnet")
    words = [str(one.message) for one in caught]
    assert ["takes seconds a step on a CPU" in one and one.endswith(": --model convnet") for one in words] == [
        True
    ] * told


def test_times_are_not_lost_where_their_file_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    arguments = ["--model", "mlp", "--batch-size", "4", "--rounds", "1", "--steps", "1", "--methods", "MAP"]
    result = CliRunner().invoke(app, ["bench", "step", *arguments, "--out", str(tmp_path / "file" / "times.json")])
    assert result.exit_code == 2
    assert "MAP" in result.stdout
    assert "times.json cannot be written" in result.stderr
