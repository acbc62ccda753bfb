"""The UCI tables on a page: ours with standard errors beside published figures."""

import json

import pytest

from varlap.errors import ConfigError
from varlap.experiments.uci import Choice, published
from varlap.experiments.uci.summary import TableSummary
from varlap.report.uci import uci_json, uci_markdown, write_uci

VALUES = {
    "log_likelihood": {"MAP": [-3.0, -2.8], "VL": [-2.5, -2.3]},
    "rmse": {"MAP": [0.091, 0.093], "VL": [0.081, 0.083]},
}
FOUND = TableSummary(
    "kin8nm",
    20,
    {"map": Choice(0.3, "mean", -2.9), "laplace": Choice(1.0, "laplace-1", -2.8)},
    VALUES,
    {"log_likelihood": {"VL, mean": [-2.5, -2.3]}},
    num_failed=1,
)


def test_a_row_has_means_with_standard_errors_the_best_bold_and_published_figures():
    lines = uci_markdown([FOUND]).splitlines()
    first, second = (line for line in lines if line.startswith("| kin8nm | 2 of 20, 1 diverged"))
    assert "| -2.90 ± 0.10 | **-2.40 ± 0.10** | 0.90 ± 0.01 | 0.95 ± 0.01 |" in first
    assert "| 0.0920 ± 0.0010 | **0.0820 ± 0.0010** | 0.10 ± 0.00 |" in second
    assert "| kin8nm | 0.3, mean | 1, laplace |" in lines


def test_differences_are_paired_and_bold_where_they_are_clear():
    rmse = {"MAP": [1.0, 1.0], "VI": [1.0, 1.0], "VL": [1.0, 1.0]}
    values = {"MAP": [-9.0, 5.0], "VI": [-9.0, 6.0], "VL": [-8.5, 5.7]}
    lines = uci_markdown([TableSummary("boston", 20, {}, {"log_likelihood": values, "rmse": rmse})]).splitlines()
    assert "| boston | **+0.600 ± 0.100** | +0.100 ± 0.400 |" in lines


def test_every_published_method_is_cited():
    text = uci_markdown([FOUND])
    for name, source in published()["methods"].items():
        assert f"- **{name}**: {source}." in text


def test_json_holds_every_split_and_what_was_chosen(tmp_path):
    path = write_uci([FOUND], tmp_path)
    content = json.loads((path.parent / "report.json").read_text())
    assert content == json.loads(json.dumps(uci_json([FOUND])))
    (table,) = content["tables"]
    assert table["splits"] == {"done": 2, "of": 20, "diverged": 1}
    assert table["chosen"]["Laplace"] == {"beta": 1.0, "by": "laplace-1", "held_out_log_likelihood": -2.8}
    assert table["rmse"]["VL"]["splits"] == [0.081, 0.083]
    assert table["rmse"]["VL"]["best"]
    assert not table["rmse"]["MAP"]["best"]


def test_a_report_of_nothing_yet_is_a_page_without_rows(tmp_path):
    assert "UCI regression" in write_uci([], tmp_path).read_text()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the report cannot be written to .*; choose another folder"):
        write_uci([FOUND], tmp_path / "file" / "below")
