"""`varlap reproduce`: the whole path in small, killed on the way; mistakes are one line before anything runs."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from made_results import made_result
from varlap.cli import app
from varlap.errors import Interrupted
from varlap.experiments import Experiment, Result, Store
from varlap.experiments.final_line import recorded
from varlap.experiments.run import claim
from varlap.experiments.ways import NAMES
from varlap.training import FitSettings, History


def _run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["reproduce", *arguments])
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.stderr


def test_the_miniature_killed_and_restarted_computes_nothing_twice_and_writes_its_page(tmp_path: Path):
    command = ["miniature", "--out", str(tmp_path)]
    child = subprocess.Popen(
        [sys.executable, "-m", "varlap", "reproduce", *command],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert child.stderr is not None
    begun, first = child.stderr.readline(), child.stderr.readline()
    child.kill()
    child.wait(60)
    assert begun == "4 runs, 0 stored\n"
    assert first.startswith("1/4  digits map β 0.01  held-out NLL")
    before = {path: path.read_bytes() for path in tmp_path.glob("*.json")}
    assert len(before) >= 1
    said = json.loads(_run(*command, "--json"))
    assert (said["runs"], said["computed"], said["left"], said["failed"]) == (4, 4 - len(before), 0, {})
    assert all(path.read_bytes() == content for path, content in before.items())
    assert not (tmp_path / "running").exists()
    (section,) = said["sections"]
    assert [row["name"] for row in section["tables"]["Table 1"]["rows"]] == ["VL", "MAP"]
    assert section["beta"].startswith("β is chosen by the NLL of 20% of the training images")
    for name in ("report.html", "report.md", "report.json"):
        assert (tmp_path / "report" / name).is_file()
    after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    shown = " ".join(_run(*command).split())
    assert "Table 1: digits, miniature recipe" in shown
    assert "β is chosen by the NLL of 20% of the training images" in shown
    assert "Runs that shared a device slowed each other." in shown
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")} == after


def test_a_budget_leaves_runs_for_the_same_command(tmp_path: Path):
    command = ["miniature", "--out", str(tmp_path), "--no-linearised", "--epochs", "200", "--set", "num_train=300"]
    said = _run(*command, "--budget", "0.01")
    assert "4 runs are left; the same command carries on" in said
    assert len(list((tmp_path / "running").iterdir())) == 1
    said = json.loads(_run(*command, "--budget", "0.01", "--json"))
    assert said["left"] >= 3


def test_a_dry_run_tells_what_there_is_to_do_and_writes_nothing(tmp_path: Path):
    first, second, third, fourth = Experiment.named("miniature").specs
    store, epochs = Store(tmp_path), first.epochs
    made = made_result(first.method, first.beta, data="digits", num_epochs=epochs)
    origin = dict(made.origin) | {"device": "cpu"}
    store.put(dataclasses.replace(made, spec=first, origin=origin, evaluation_seconds=7.0))
    store.put(Result(second, {}, {}, {}, 1.0, failure="the loss is NaN"))
    (tmp_path / "running" / fourth.key()).mkdir(parents=True)
    (tmp_path / "running" / fourth.key() / "metrics.jsonl").write_text("{}\n{}\n")
    command = ["miniature", "--dry-run", "--device", "cpu", "--out", str(tmp_path)]
    with claim(third, store):
        before = sorted(tmp_path.rglob("*"))
        said = json.loads(_run(*command, "--json"))
        shown = " ".join(_run(*command).split())
        assert sorted(tmp_path.rglob("*")) == before
    assert [(run["state"], run["epochs_done"]) for run in said["plan"]] == [
        *(("stored", epochs), ("diverged", 0), ("held", 0), ("pending", 2)),
    ]
    assert [said[name] for name in ("runs", "stored", "diverged", "held", "pending")] == [4, 1, 1, 1, 1]
    assert said["expected_s"] == said["plan"][3]["expected_s"] == 7.0 + (epochs - 2) * made.seconds_per_epoch
    assert [run["key"] for run in said["plan"]] == [spec.key() for spec in (first, second, third, fourth)]
    assert "held by another process" in shown
    assert "4 runs: 1 stored, 1 diverged, 1 held by another process, 1 pending; expected to take" in shown
    said = json.loads(_run(*command, "--json", "--again"))
    assert [run["state"] for run in said["plan"]] == ["stored", "pending", "pending", "pending"]
    fresh = ["miniature", "--dry-run", "--out", str(tmp_path / "fresh")]
    assert "4 runs: 4 pending\n" in _run(*fresh)
    assert not (tmp_path / "fresh").exists()


@pytest.mark.filterwarnings("default::varlap.errors.VarlapWarning")
def test_a_dry_run_tells_why_the_command_itself_would_be_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VARLAP_DATA", str(tmp_path))
    command = ["reproduce", "figure-1", "--dry-run", "--json", "--out", str(tmp_path / "runs")]
    told = CliRunner().invoke(app, command)
    assert (told.exit_code, json.loads(told.stdout)["pending"]) == (0, 12)
    assert told.stderr.startswith("varlap: warning: without --dry-run this would be refused: cifar10: no such data in")


def test_the_final_line_runs_what_the_sweep_has_chosen(tmp_path: Path):
    common = ["--set", "model=mlp", "--set", "precision=fp32", "--out", str(tmp_path), "--no-linearised", "--quiet"]
    grid = ["--set", "method=['map','vl']", "--data", "digits", "--set", "beta=[0.01, 0.1]", "--set", "num_train=200"]
    unfinished = "no sweep over β by the recipe paper is finished"
    assert unfinished in _run("table-1", *grid, *common, "--final", status=2)
    _run("table-1", *grid, *common, "--epochs", "1")
    denied = _run("table-1", *grid, *common, "--final", "--recipe", "sgd", status=2)
    assert "by the recipe sgd is finished" in denied
    assert "there are runs of --recipe paper too" in denied
    said = json.loads(_run("table-1", *grid, *common, "--final", "--epochs", "2", "--seeds", "2", "--json"))
    assert said["runs"] == said["computed"] >= 4
    (section,) = said["sections"]
    assert (
        "chosen before, by the NLL of held-out images in a sweep of 1 epoch over 0.01, 0.1 with seed 0"
        in section["beta"]
    )
    (line,) = recorded(Store(tmp_path))
    shown = {
        row["name"]: row["scores"]["beta"]["value"] for row in section["tables"]["Every way of predicting"]["rows"]
    }
    assert shown == {NAMES[row.method, row.way]: row.beta for row in line.rows if row.own}
    specs = [result.spec for result in Store(tmp_path)]
    assert {(spec.method, spec.beta) for spec in specs if spec.epochs == 2} == {(r.method, r.beta) for r in line.rows}
    assert all({spec.seed for spec in specs if spec.epochs == 2 and spec.method == m} == {0, 1} for m in ("map", "vl"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table-3"], "there is no experiment 'table-3'; did you mean 'table-2'?"),
        (["UCI"], "there is no experiment 'UCI'; did you mean 'uci'?"),
        (["uci", "--again"], "--again is for images; uci takes --data"),
        (["miniature", "--set", "recipe=ours"], "a recipe is a set of settings; choose it by --recipe ours"),
        (["miniature", "--set", "name=x"], "a run has no setting 'name'"),
        (["miniature", "--set", "metod=vl"], "a run has no setting 'metod'; did you mean 'method'?"),
        (["miniature", "--set", "method=vll"], "method = 'vll': did you mean 'vl'?"),
        (["table-1", "--set", "method=v1"], "method = 'v1': choose 'map', 'vi' or 'vl'"),
        (["miniature", "--set", "lr=none"], "lr = None must be a positive, finite number"),
        (["miniature", "--set", "beta"], "--set beta: give NAME=VALUE, such as --set batch_size=64"),
        (
            ["table-1", "--data", "fashion_mnist", "--set", "data=mnst"],
            "--set data=mnst and --data fashion_mnist are about the same setting; give one of them",
        ),
        (["miniature", "--epochs", "1", "--set", "epochs=0"], "--set epochs=0 and --epochs 1 are about the same"),
        (["miniature", "--seeds", "2", "--set", "seed=1"], "--set seed=1 and --seeds 2 are about the same setting"),
        (["miniature", "--no-linearised", "--set", "linearised=true"], "and --no-linearised are about the same"),
        (["miniature", "--set", "lr=1", "--set", "lr=2"], "--set lr=2 and another --set lr are about the same"),
        (["miniature", "--data", "digit"], "data = 'digit': did you mean 'digits'?"),
        (["miniature", "--budget", "0"], "--budget 0 must be a positive number of minutes"),
        (["no-such.toml"], "the experiment no-such.toml cannot be read"),
        (["table-1", "--data", "svhn"], "svhn: no such data in"),
        (["miniature", "--device", "gpu"], "--device gpu is none that torch knows; choose cpu or cuda"),
        (["miniature", "--device", "cuda:99"], "--device cuda:99 cannot be used here; try cpu ("),
        (["miniature", "--recipe", "sdg"], "'sdg' is not one of 'paper', 'ours', 'sgd'; did you mean 'sgd'? see"),
        (["miniature", "--set", "beta=[0.01, 0.1"], "[0.01, 0.1 cannot be read as a list: a bracket is not closed"),
        (["miniature", "--set", "beta={vl=[1]"], "beta={vl=[1] cannot be read as a table: a bracket is not closed"),
        (["miniature", "--set", "method=[map]"], "[map] cannot be read as a list: write it as in ['map', 'vl']"),
    ],
)
def test_a_mistake_is_one_line_and_status_2_before_anything_runs(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("VARLAP_DATA", str(tmp_path / "no-data"))
    said = _run(*arguments, "--out", str(tmp_path / "out"), status=2)
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert "cannot be made" in _run("miniature", "--out", str(tmp_path / "file" / "runs"), status=2)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "running").write_text("")  # as a folder of somebody else, to which root could write all the same
    said = _run("miniature", "--quiet", "--out", str(tmp_path), status=2)
    assert said.startswith(f"varlap: {tmp_path / 'running'}/digits-")
    assert said.endswith(".lock cannot be written (File exists); choose another folder\n")


@pytest.mark.parametrize("name", ["paper", "figure-2", "miniature", "uci"])
def test_a_file_of_ones_own_does_not_go_where_the_shipped_experiments_go(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path(f"{name}.toml").write_text('[grid]\ndata = "digits"\nmethod = "map"\nbeta = 0.1\n')
    said = _run(f"{name}.toml", status=2)
    assert f"{name}.toml: runs/{name} is for a shipped experiment; rename the file, or give another --out" in said
    assert not Path("runs").exists()


def test_a_run_that_fails_is_told_with_status_1_in_later_calls_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from varlap.errors import NonFiniteError

    def fail(*_: object, **__: object) -> None:
        raise NonFiniteError("step 3: the loss is NaN")

    monkeypatch.setattr("varlap.experiments.grid_run.run", fail)
    result = CliRunner().invoke(app, ["reproduce", "miniature", "--out", str(tmp_path), "--quiet"])
    assert result.exit_code == 1
    assert "digits vl β 0.1 diverged: step 3: the loss is NaN" in result.stdout
    assert "not run again without --again" in result.stdout
    said = CliRunner().invoke(app, ["reproduce", "miniature", "--out", str(tmp_path), "--json"])
    counts = json.loads(said.stdout)
    assert (said.exit_code, counts["runs"], counts["computed"], len(counts["failed"])) == (1, 4, 0, 4)
    said = CliRunner().invoke(app, ["reproduce", "miniature", "--out", str(tmp_path), "--again", "--json"])
    assert (said.exit_code, json.loads(said.stdout)["computed"]) == (1, 4)


def test_a_run_that_is_out_of_memory_is_told_with_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("varlap.experiments.grid_run.run", fail)
    said = CliRunner().invoke(app, ["reproduce", "miniature", "--out", str(tmp_path), "--quiet"])
    assert said.exit_code == 1
    assert "digits vl β 0.1: the device has too little memory for it" in said.stdout
    assert "4 runs are left; the same command carries on" in said.stdout
    said = CliRunner().invoke(app, ["reproduce", "miniature", "--out", str(tmp_path), "--json"])
    assert (said.exit_code, json.loads(said.stdout)["left"], len(json.loads(said.stdout)["out_of_memory"])) == (1, 4, 4)


def test_what_is_in_the_store_needs_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar10.npz").write_bytes(b"never read")
    monkeypatch.setenv("VARLAP_DATA", str(tmp_path / "data"))
    store = Store(tmp_path / "runs")
    for spec in Experiment.named("table-2").specs:
        store.put(made_result(spec.method, spec.beta, num_epochs=3, validation=0.0, linearised=False))
    said = json.loads(_run("table-2", "--out", str(store.folder), "--json"))
    assert (said["runs"], said["computed"]) == (3, 0)
    assert said["sections"][0]["tables"]["Table 2"]["rows"][0]["scores"]["paper_seconds"]["shown"] == "114.9"


def test_ctrl_c_in_an_evaluation_is_told_of_and_the_training_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("varlap.experiments.run.evaluate_ways", interrupted)
        said = CliRunner().invoke(app, ["reproduce", "miniature", "--out", str(tmp_path), "--quiet"])
    assert (said.exit_code, said.stderr) == (
        130,
        "varlap: no run is done yet; the same command carries on\n"
        "varlap: stopped by Ctrl-C; what a command has stored is kept\n",
    )
    assert list((tmp_path / "running").glob("*/checkpoints/step-*"))


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("stop", "status"),
    [
        (lambda: _raise(KeyboardInterrupt()), 130),
        (lambda: signal.raise_signal(signal.SIGTERM), 143),
        (lambda: _raise(Interrupted(15, step=3, saved=True)), 143),
    ],
    ids=["Ctrl-C in an evaluation", "SIGTERM in an evaluation", "SIGTERM in a training"],
)
def test_a_stopped_command_leaves_the_page_of_what_is_done(
    stop: Callable[[], None], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def stopped(*_: object):
        stop()
        raise AssertionError("it went on")

    first = Experiment.named("miniature").specs[0]
    made = made_result(first.method, first.beta, data="digits", num_epochs=first.epochs)
    Store(tmp_path).put(dataclasses.replace(made, spec=first))
    monkeypatch.setattr("varlap.experiments.run.fit", lambda *_, **__: History(FitSettings(epochs=1)))
    monkeypatch.setattr("varlap.experiments.run.evaluate_ways", stopped)
    said = CliRunner().invoke(app, ["reproduce", "miniature", "--out", str(tmp_path), "--json"])
    assert (said.exit_code, said.stdout) == (status, "")
    page = tmp_path / "report" / "report.html"
    assert f"varlap: the page of what is done is {page}; the same command carries on\n" in said.stderr
    assert page.is_file()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_setting_of_a_recipe_can_be_left_out(tmp_path: Path):
    command = ["miniature", "--recipe", "sgd", "--epochs", "1", "--no-linearised", "--quiet", "--out", str(tmp_path)]
    command += ["--set", "clip_norm=none", "--set", "method=map", "--set", "beta=0.1", "--set", "num_train=200"]
    assert "none was trained" not in _run(*command)
    told = "".join(_run(*command).split())  # the terminal breaks its lines where the folder's name makes it
    assert f"1of1runswerein{tmp_path};nonewastrained" in told
    (result,) = Store(tmp_path)
    assert (result.spec.optimizer, result.spec.clip_norm) == ("SGD", None)
