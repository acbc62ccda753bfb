"""`varlap train` and `varlap bench`: one object with --json, one line and exit status 2 for a mistake."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import varlap
from varlap.cli import app
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


def test_a_run_leaves_a_model_and_a_result_and_is_not_made_twice(tmp_path: Path):
    out = tmp_path / "run"
    first = json.loads(_run(*QUICK, "--out", str(out), "--json"))
    again = json.loads(_run(*QUICK, "--out", str(out), "--json"))
    assert first == again == json.loads((out / "result.json").read_text())
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "digit"], "Did you mean 'digits'"),
        ([*QUICK, "--beta", "-1"], "beta=-1.0) must be finite and not negative"),
        ([*QUICK, "--precision", "fp8"], "choose 'fp32', 'bf16' or 'fp16'"),
        ([*QUICK, "--patience", "3"], "need validation data"),
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
