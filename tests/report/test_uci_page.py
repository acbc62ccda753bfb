"""The page on UCI regression shows the committed results and nothing else."""

import json
from pathlib import Path

import pytest

from varlap.data import UCI_SETS
from varlap.experiments.uci import UCIExperiment
from varlap.experiments.uci.summary import summarise
from varlap.report.uci import uci_json, uci_markdown

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "results" / "uci", ROOT / "docs" / "uci.md"
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="the results are not part of a source distribution")


@pytest.fixture(scope="module")
def found():
    return summarise(UCIExperiment.of(RESULTS))


def test_results_of_all_nine_tables_belong_to_the_shipped_recipes(found):
    assert {one.data for one in found} == set(UCI_SETS)


def test_the_committed_report_is_what_the_results_give(found):
    assert (RESULTS / "report.md").read_text() == uci_markdown(found)
    assert json.loads((RESULTS / "report.json").read_text()) == json.loads(json.dumps(uci_json(found)))


def test_every_row_of_the_report_is_on_the_page(found):
    rows = [line for line in uci_markdown(found).splitlines() if line.startswith("|")]
    missing = set(rows) - set(PAGE.read_text().splitlines())
    assert not missing
