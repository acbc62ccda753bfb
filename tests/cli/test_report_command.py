"""`varlap report`: what has a page of its own is named, not passed over in silence."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import varlap
from made_results import made_result
from varlap.cli import app
from varlap.errors import VarlapWarning
from varlap.experiments import Evaluated, Store
from varlap.experiments.uci import TableResult, TableRun, TableStore


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with an evaluation, a store of images and one of tables."""
    Evaluated("VL", {"nll": 0.3}, {"data": "digits"}, {}).write(tmp_path / "vl" / "evaluations" / "mean")
    Store(tmp_path / "paper").put(made_result("vl", 0.1))
    run = TableRun("boston", "vl", split=0, beta=0.1, epochs=10, batch_size=64)
    TableStore(tmp_path / "uci").put(TableResult(run, {"mean": {"log_likelihood": -2.5, "rmse": 3.0}}, seconds=1.0))
    return tmp_path


@pytest.mark.filterwarnings("default::varlap.errors.VarlapWarning")
def test_stores_below_a_folder_of_runs_are_named_with_their_commands(runs: Path):
    done = CliRunner().invoke(app, ["report", str(runs), "--json"])
    assert done.exit_code == 0, done.output
    assert done.stderr == (
        f"varlap: warning: stores of `varlap reproduce` below {runs} have pages of their own: `varlap report "
        f"{runs / 'paper'}`, `varlap reproduce uci --out {runs / 'uci'}`\n"
    )
    assert Path(json.loads(done.stdout)["page"]).is_file()
    assert CliRunner().invoke(app, ["report", str(runs / "vl"), "--json"]).stderr == ""


@pytest.mark.filterwarnings("default::varlap.errors.VarlapWarning")
def test_trained_runs_that_were_never_evaluated_are_named_with_their_command(tmp_path: Path):
    for name in ("map", "vl", "the last"):
        (tmp_path / name).mkdir()
        for file in ("spec.json", "result.json"):  # what `varlap train` leaves behind
            (tmp_path / name / file).write_text("{}")
    Evaluated("VL", {"nll": 0.3}, {"data": "digits"}, {}).write(tmp_path / "vl" / "evaluations" / "mean")
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    assert done.stderr == (
        f"varlap: warning: runs below {tmp_path} were never evaluated, so they are not in the comparison: `varlap "
        f"evaluate {tmp_path / 'map'}`, `varlap evaluate '{tmp_path / 'the last'}'`\n"
    )
    assert CliRunner().invoke(app, ["report", str(tmp_path / "vl"), "--json"]).stderr == ""


def test_a_page_from_python_names_them_too_and_a_name_with_a_space_can_be_pasted(runs: Path):
    (runs / "paper").rename(runs / "the paper")
    with pytest.warns(VarlapWarning, match="have pages of their own: `varlap report '.*/the paper'`"):
        varlap.report.write(runs, out=runs / "page")


def test_a_folder_of_stores_alone_is_refused_with_their_commands(runs: Path):
    shutil.rmtree(runs / "vl")
    done = CliRunner().invoke(app, ["report", str(runs)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        f"varlap: {runs} has no evaluations below, but stores of `varlap reproduce`: `varlap report {runs / 'paper'}`, "
        f"`varlap reproduce uci --out {runs / 'uci'}`\n"
    )
    assert CliRunner().invoke(app, ["report", str(runs / "paper")]).exit_code == 0


def test_a_store_is_read_once_and_has_the_title_of_its_page(runs: Path, monkeypatch: pytest.MonkeyPatch):
    read, original = [], Path.read_text

    def read_text(path: Path, *arguments: Any, **options: Any) -> str:
        read.append(path.name)
        return original(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    said = json.loads(CliRunner().invoke(app, ["report", str(runs / "paper"), "--json"]).stdout)
    assert len([name for name in read if "-seed" in name]) == 1
    page, kept = Path(said["page"]), json.loads(Path(said["page"]).with_name("report.json").read_text())
    assert said["title"] == kept["title"] == "Variational Laplace, reproduced: CIFAR-10"
    assert f"<title>{said['title']}</title>" in page.read_text()
    told = json.loads(CliRunner().invoke(app, ["report", str(runs / "paper"), "--json", "--title", "Mine"]).stdout)
    assert told["title"] == "Mine"
