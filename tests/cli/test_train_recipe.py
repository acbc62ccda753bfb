"""`varlap train --recipe`: what `varlap reproduce` trains, to the same bits, and what is given beside it."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import varlap
from varlap.cli import app
from varlap.cli.training import Training, by_recipe
from varlap.experiments import RunSpec, Store, TrainedRun
from varlap.experiments.grid import RECIPES
from varlap.experiments.run import run
from varlap.experiments.training_setup import task_of

QUICK = ["train", "digits", "--epochs", "2", "--set", "model=mlp", "--set", "num_train=600", "--quiet"]
CPU = torch.device("cpu")


def _run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.stderr


def _made(recipe: str = "sgd", *pairs: str, device: torch.device = CPU, **given: Any) -> Training:
    return by_recipe(recipe, "digits", "vl", 0.1, 0, {"model": "mlp"} | given, pairs, device)


def _state(bnn: varlap.BNN) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in bnn.state_dict().items()}


class Trained(Exception):
    """What a run has trained."""


@pytest.mark.parametrize(("recipe", "method"), [("paper", "vi"), ("ours", "vl"), ("sgd", "vl"), ("sgd", "map")])
def test_a_recipe_trains_the_network_of_reproduce_to_the_same_bits(
    recipe: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def evaluate(bnn: varlap.BNN, *_: Any):
        raise Trained(_state(bnn))

    command = [*QUICK, "--recipe", recipe, "--method", method, "--seed", "3", "--device", "cpu"]
    _run(*command, "--out", str(tmp_path / "run"))
    quick = {"epochs": 2, "model": "mlp", "num_train": 600, "precision": "fp32"}
    spec = RunSpec("digits", method, 0.01, seed=3, **RECIPES[recipe] | quick)  # type: ignore[arg-type]
    monkeypatch.setattr("varlap.experiments.run.evaluate_ways", evaluate)
    with pytest.raises(Trained) as trained:
        run(spec, Store(tmp_path / "store"))
    opened = TrainedRun.open(tmp_path / "run")
    found, expected = _state(opened.bnn()), trained.value.args[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for mine, other in zip(opened.task.held_out, task_of(spec).held_out, strict=True):
        assert torch.equal(mine, other)
    assert len(opened.task.training[1]) == 600
    told = {"recipe": recipe, "method": method, "seed": 3, "epochs": 2, "num_train": 600, "augment": True}
    assert opened.spec().items() >= told.items()


def test_a_recipe_decides_what_is_not_given_and_an_option_what_is():
    usual = _made()
    told = {"lr": 0.2, "batch_size": 256, "optimizer": "SGD", "momentum": 0.9, "clip_norm": 1.0, "warmup_epochs": 10.0}
    told |= {"schedule": "cosine", "epochs": 200, "precision": "fp32"}
    assert usual.settings.items() >= told.items()
    assert usual.augment
    assert len(usual.task.held_out[1]) == round(0.1 * 1437)
    assert (usual.objective.variances, usual.objective.curvature.gradient) == ("closed-form", "quiet")
    assert _made(device=torch.device("cuda")).settings["precision"] == "bf16"
    given = {"lr": 0.1, "batch_size": 64, "epochs": 3, "precision": "fp16"}
    found = _made("sgd", "clip_norm=none", "variances=learnt", augment=False, validation=0.0, **given)
    assert found.settings.items() >= (given | {"clip_norm": None, "optimizer": "SGD"}).items()
    assert (found.augment, found.task.held_out, found.objective.variances) == (False, None, "learnt")
    assert by_recipe("ours", "digits", "map", 0.1, 0, {}, (), CPU).task.model == "convnet"  # as --model auto


class Stop:
    """A progress that raises in one step."""

    def start(self, **_: Any) -> None:
        pass

    def step(self, number: int, num_items: int, values: Mapping[str, float] | None) -> None:
        if number == 4:
            raise KeyboardInterrupt

    def epoch(self, row: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_killed_run_is_carried_on_by_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stopped(*arguments: Any, **settings: Any):
        return varlap.fit(*arguments, **settings | {"progress": Stop()})

    command = [*QUICK, "--recipe", "sgd", "--save-every", "2"]
    with monkeypatch.context() as patched:
        patched.setattr(sys.modules["varlap.cli.train"], "fit", stopped)
        _run(*command, "--out", str(tmp_path / "stopped"), status=130)
    assert "is not finished" in _run("evaluate", str(tmp_path / "stopped"), status=2)
    assert "it has lr=0.2, not 0.1" in _run(*command, "--lr", "0.1", "--out", str(tmp_path / "stopped"), status=2)
    for name in ("stopped", "alone"):
        _run(*command, "--out", str(tmp_path / name))
    found, expected = (_state(TrainedRun.open(tmp_path / name).bnn()) for name in ("stopped", "alone"))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_laplace_is_map_with_variances_at_its_end_and_is_evaluated(tmp_path: Path):
    settings = ["--recipe", "ours", "--beta", "0.1", "--set", "prior_scale=0.5"]
    for method in ("map", "laplace"):
        _run(*QUICK, *settings, "--method", method, "--out", str(tmp_path / method))
    plain, laplace = (TrainedRun.open(tmp_path / method).bnn() for method in ("map", "laplace"))
    for mine, other in zip(laplace.network.parameters(), plain.network.parameters(), strict=True):
        assert torch.equal(mine, other)
    varlap.laplace(plain, TrainedRun.open(tmp_path / "map").task.training, beta=0.1)
    for name, value in plain.log_sigma.items():
        torch.testing.assert_close(laplace.log_sigma[name], value)
    said = json.loads(_run("evaluate", str(tmp_path / "laplace"), "--json"))
    assert said["scores"]["nll"] == json.loads((tmp_path / "laplace" / "result.json").read_text())["test"]["nll"]
    assert (said["spec"]["method"], said["spec"]["recipe"], said["spec"]["prior_scale"]) == ("laplace", "ours", 0.5)
    assert "scores" in json.loads(_run("evaluate", str(tmp_path / "laplace"), "--how", "linearised", "--json"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "sdg"], "'sdg' is not one of 'paper', 'ours', 'sgd'; did you mean 'sgd'?"),
        (["--recipe", "sgd", "--set", "momentm=0.8"], "a run has no setting 'momentm'; did you mean 'momentum'?"),
        (["--recipe", "sgd", "--set", "momentum"], "--set momentum: give NAME=VALUE, such as --set batch_size=64"),
        (["--recipe", "sgd", "--set", "lr=1", "--lr", "2"], "--set lr=1 and --lr are about the same setting; give one"),
        (["--recipe", "sgd", "--set", "lr=1", "--set", "lr=2"], "--set lr=2 and another --set lr are about the same"),
        (["--recipe", "sgd", "--set", "seed=1"], "--set seed=1: choose it by --seed"),
        (["--recipe", "sgd", "--set", "recipe=ours"], "choose it by --recipe ours"),
        (["--recipe", "sgd", "--set", "linearised=false"], "it is about how `varlap reproduce` evaluates"),
        (["--recipe", "sgd", "--set", "lr=[1, 2]"], "lr = [1, 2] must be a positive, finite number"),
        (["--recipe", "ours", "--set", "optimizer=SGD"], "optimizer = 'SGD' without momentum; set momentum too"),
        (["--recipe", "sgd", "--lr", "0"], "lr = 0.0 must be a positive, finite number"),
        (["--recipe", "sgd", "--method", "vl-hessian"], "--recipe sgd is for map, vi, vl and laplace; leave it out"),
        (["--set", "momentum=0.8"], "--set momentum=0.8 changes a setting of a recipe; give --recipe too"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments: list[str], message: str, tmp_path: Path):
    said = _run("train", "digits", *arguments, "--out", str(tmp_path / "out"), status=2)
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
