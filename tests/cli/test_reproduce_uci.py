"""`varlap reproduce uci`: one JSON object, one line for a mistake, a second call that carries on."""

import json

import pytest
from typer.testing import CliRunner

from uci_tables import write_uci
from varlap.cli import app
from varlap.errors import Interrupted
from varlap.experiments.uci import TableResult
from varlap.experiments.uci.run import compute


@pytest.fixture
def call(tmp_path, monkeypatch):
    write_uci(tmp_path)
    monkeypatch.setenv("VARLAP_DATA", str(tmp_path))
    quick = ["reproduce", "uci", "--data", "yacht", "--epochs", "1", "--splits", "1", "--out", str(tmp_path / "out")]
    return lambda *arguments: CliRunner().invoke(app, [*quick, *arguments])


def test_json_is_one_object_and_the_results_are_kept(call, tmp_path):
    first = call("--json")
    assert first.exit_code == 0, first.output
    content = json.loads(first.stdout)
    assert content["complete"]
    assert set(content["tables"][0]["log_likelihood"]) >= {"MAP", "Laplace", "VI", "VL", "VL, linearised"}
    kept = {path.name for path in (tmp_path / "out").glob("[!.]*")}
    assert kept == {"yacht.json", "report.md", "report.json"}
    kept = (tmp_path / "out" / "yacht.json").read_bytes()
    again = call()
    assert again.exit_code == 0
    assert "Test log-likelihood" in again.stdout
    assert "report.md" in again.stdout
    assert "100% done" in again.stderr
    assert (tmp_path / "out" / "yacht.json").read_bytes() == kept


def test_a_budget_of_nothing_computes_nothing_and_says_so(call):
    assert json.loads(call("--budget", "1e-9", "--json").stdout)["complete"] is False
    assert "The budget is spent; the same command carries on." in call("--budget", "1e-9").stdout


def test_quiet_shows_the_result_and_no_progress(call):
    found = call("--quiet", "--device", "cpu")
    assert found.exit_code == 0
    assert found.stderr == ""
    assert "Test log-likelihood" in found.stdout


def test_the_page_shows_all_that_the_folder_holds_and_the_answer_what_was_asked_for(call, tmp_path):
    write_uci(tmp_path, "wine-quality-red")
    call("--data", "wine", "--json")
    last = json.loads(call("--json").stdout)
    assert [table["data"] for table in last["tables"]] == ["yacht, 1 epoch"]
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| wine, 1 epoch | 1 of 20 |" in page
    assert "| yacht, 1 epoch | 1 of 20 |" in page
    stored = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [table["data"] for table in stored["tables"]] == ["wine, 1 epoch", "yacht, 1 epoch"]


def test_a_table_on_which_all_diverged_is_named_beside_the_report_of_the_others(call, tmp_path, monkeypatch):
    write_uci(tmp_path, "wine-quality-red")

    def diverging(table, run):
        return TableResult(run, {}, 1.0, failure="NaN") if run.data == "yacht" else compute(table, run)

    monkeypatch.setattr("varlap.experiments.uci.run.compute", diverging)
    found = call("--data", "wine", "--json")
    assert found.exit_code == 1
    words = "yacht, map: the training diverged for every β at the learning rate 0.02; try a smaller one: "
    assert found.stderr.startswith(f"varlap: {words}")
    content = json.loads(found.stdout)
    assert not content["complete"]
    assert [table["data"] for table in content["tables"]] == ["wine, 1 epoch"]
    assert content["left_out"][0].startswith(words)
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| wine, 1 epoch | 1 of 20 |" in page
    assert f"Left out:\n\n- {words}" in page
    assert "wine, 1 epoch" in call("--data", "wine", "--quiet").stdout


def test_mistakes_are_one_line_with_status_2(call):
    unknown = call("--data", "boton")
    assert unknown.exit_code == 2
    assert unknown.stderr == "varlap: no UCI table 'boton'; did you mean 'boston'?\n"
    missing = call("--data", "wine")
    assert missing.exit_code == 2
    assert missing.stderr.startswith("varlap: the UCI table 'wine' is not in")
    assert missing.stderr.count("\n") == 1


def test_an_interrupted_run_says_that_the_same_command_carries_on(call, monkeypatch):
    def stopped(table, run):
        raise Interrupted(15, 3, saved=False)

    monkeypatch.setattr("varlap.experiments.uci.run.compute", stopped)
    found = call("--json")
    assert found.exit_code == 128 + 15
    assert found.stderr.startswith("varlap: stopped; what is finished is in ")
    assert found.stderr.endswith("and the same command carries on\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["uci", "--seeds", "3"], "--seeds is for images; uci takes --data, --splits, --epochs, --budget and --out"),
        (["uci", "--set", "lr=1"], "--set is for images; uci takes --data, --splits, --epochs, --budget and --out"),
        (
            ["uci", "--no-linearised"],
            "--no-linearised is for images; uci takes --data, --splits, --epochs, --budget and --out",
        ),
        (
            ["uci", "--device", "cuda"],
            "--device cuda: uci runs on the CPU, its networks being so small; leave it out",
        ),
        (["uci", "--budget", "-3"], "--budget -3 must be a positive number of minutes"),
        (["uci", "--budget", "nan"], "--budget nan must be a positive number of minutes"),
        (["miniature", "--splits", "3"], "--splits is for uci, whose tables come with them; miniature has --seeds"),
    ],
)
def test_options_of_the_other_kind_are_refused(arguments, message):
    answer = CliRunner().invoke(app, ["reproduce", *arguments])
    assert (answer.exit_code, answer.stderr) == (2, f"varlap: {message}\n")
