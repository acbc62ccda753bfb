"""`varlap demo`: one table and a folder for each method, or one object."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from varlap.cli import app
from varlap.errors import Interrupted, NonFiniteError
from varlap.experiments import Evaluated, ImageTask, comparison

NAMES = ["MAP", "MAP + temperature scaling", "Laplace", "VI", "VL", "VL, linearised"]
SHOWN = ["accuracy", "nll", "ece", "brier", "ood_auroc_entropy"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One β is enough to see that all is written."""
    monkeypatch.setattr(comparison, "BETAS", (0.01,))
    monkeypatch.setattr(comparison, "LAPLACE_BETAS", (0.001,))


def test_a_process_prints_one_object_and_writes_every_method(tmp_path: Path):
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "varlap", "demo", "--epochs", "1", "--out", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    said = json.loads(done.stdout)
    assert list(said["methods"]) == NAMES
    written = {each.name: each for each in Evaluated.read_all(folder)}
    assert written.keys() == set(NAMES)
    for name, each in written.items():
        assert said["methods"][name] == {"scores": each.scores, "spec": each.spec, "seconds": each.seconds}
        assert set(SHOWN) <= each.scores.keys()
        assert each.scores["nll_low"] < each.scores["nll"] < each.scores["nll_high"]
        assert each.spec["epochs"] == 1
        assert each.predictions["images"].shape == (12, 1, 8, 8)
    ways = {name: (each.spec["how"], each.spec["num_samples"]) for name, each in written.items()}
    assert ways.pop("Laplace") == ways.pop("VL, linearised") == ("linearised", 30)
    assert set(ways.values()) <= {("mean", None), ("sampled", 10)}
    assert ways["MAP"] == ways["MAP + temperature scaling"] == ("mean", None)
    assert "VL, β = 0.1: 1 epoch" in done.stderr  # progress goes there
    assert written["MAP"].spec["beta"] == written["Laplace"].spec["beta_of_the_mean"]
    assert written["MAP + temperature scaling"].scores["accuracy"] == written["MAP"].scores["accuracy"]
    assert written["MAP + temperature scaling"].spec["temperature"] != 1
    pictures = {path.relative_to(folder).as_posix() for path in folder.rglob("*.svg")}
    assert pictures == {
        "laplace/figures/sigma_over_s.svg",
        "laplace/figures/travelling_variances.svg",
        "vi/figures/sigma_over_s.svg",
        "vl/figures/sigma_over_s.svg",
        "vl/figures/travelling_variances.svg",
    }


@pytest.mark.filterwarnings("ignore:fit_temperature ended")  # one epoch teaches little
def test_people_get_one_table_with_the_best_of_each_column_marked(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    before = torch.get_rng_state()
    result = CliRunner().invoke(app, ["demo", "--epochs", "1", "--out", str(tmp_path), "--ood", "rotated"])
    assert result.exit_code == 0, result.output
    assert torch.equal(before, torch.get_rng_state())
    found = {each.name: each for each in Evaluated.read_all(tmp_path)}
    green = "\x1b[1;32m"
    best = {name: min(each.scores[name] for each in found.values()) for name in ("nll", "ece", "brier")}
    best |= {name: max(each.scores[name] for each in found.values()) for name in ("accuracy", "ood_auroc_entropy")}
    for name, value in best.items():
        assert f"{green}{value:.4f}" in result.stdout, name
    worst = max(each.scores["nll"] for each in found.values())
    assert f"{worst:.4f}" in result.stdout
    assert f"{green}{worst:.4f}" not in result.stdout
    assert "30 linearised" in result.stdout
    assert "Out of distribution: rotated" in result.stdout
    assert str(tmp_path) in result.stdout.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ood", "digits"], "digits is what the network was trained on"),
        (["--out", "{file}"], "file cannot be made"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(quick: None, tmp_path: Path, arguments: list[str], message: str):
    (tmp_path / "file").write_text("")
    named = [argument.format(file=tmp_path / "file") for argument in arguments]
    result = CliRunner().invoke(app, ["demo", "--epochs", "1", "--out", str(tmp_path / "out"), *named])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_a_signal_has_its_own_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stopped(*_, **__):
        raise Interrupted(15, step=3, saved=False)

    monkeypatch.setattr(comparison, "fit", stopped)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 143
    assert "SIGTERM stopped the training" in result.stderr


def test_held_out_images_choose_beta(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(comparison, "BETAS", (1000.0, 0.01))  # the first lets nothing be learnt
    monkeypatch.setattr(comparison, "WAYS", {"VL": comparison.WAYS["VL"]})
    task = ImageTask("digits", "mlp", validation=0.2)
    told: list[str] = []
    found, linearised = comparison.Comparison(task, epochs=3).run(tell=told.append)
    assert found.spec["beta"] == linearised.spec["beta"] == 0.01
    assert told[-1].startswith("VL: held-out images choose β = 0.01, mean (NLL ")
    assert found.spec["temperature"] == 1.0


def test_a_beta_that_diverges_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    train = comparison.fit

    def diverging(bnn, objective, *data, **settings):
        if objective.beta in diverged:
            raise NonFiniteError("step 3: the loss is NaN")
        return train(bnn, objective, *data, **settings)

    monkeypatch.setattr(comparison, "fit", diverging)
    monkeypatch.setattr(comparison, "BETAS", (0.01, 0.03))
    monkeypatch.setattr(comparison, "WAYS", {"VL": comparison.WAYS["VL"]})
    both = comparison.Comparison(ImageTask("digits", "mlp", validation=0.2), epochs=1)
    told: list[str] = []
    diverged = {0.01}
    assert [found.spec["beta"] for found in both.run(tell=told.append)] == [0.03, 0.03]
    assert "VL, β = 0.01 diverged: step 3: the loss is NaN" in told
    diverged = {0.01, 0.03}
    with pytest.raises(NonFiniteError, match=r"VL diverged for every β of \(0.01, 0.03\); try a smaller learning rate"):
        next(both.run())


def test_a_way_of_predicting_that_gives_no_numbers_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    score = comparison.evaluate

    def scored(bnn, data, *, how, **options):
        if how == "mean":
            raise NonFiniteError("the outputs hold NaN")
        return score(bnn, data, how=how, **options)

    monkeypatch.setattr(comparison, "evaluate", scored)
    monkeypatch.setattr(comparison, "BETAS", (0.01,))
    monkeypatch.setattr(comparison, "WAYS", {"VL": comparison.WAYS["VL"]})
    found = next(comparison.Comparison(ImageTask("digits", "mlp", validation=0.2), epochs=1).run())
    assert found.spec["how"] == "sampled"
