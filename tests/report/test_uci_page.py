"""The page on UCI regression shows the committed results and nothing else."""

import json
import math
from pathlib import Path

import pytest

from varlap.data import UCI_SETS
from varlap.experiments.uci import TableRecipe, UCIExperiment
from varlap.experiments.uci.spec import NUM_TRAINING_ROWS
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


def test_the_steps_that_the_page_counts_are_those_of_the_recipes():
    recipes = [TableRecipe.named(name) for name in UCI_SETS]
    steps = {r.data: r.epochs * math.ceil(NUM_TRAINING_ROWS[r.data] / r.batch_size) for r in recipes}
    small = [steps[r.data] for r in recipes if r.tuning_splits > 1]
    large = [steps[r.data] for r in recipes if r.tuning_splits == 1]
    words = f"{min(small)} to {max(small)} steps for a small table, {min(large)} to {max(large):,} for a large one"
    assert words in " ".join(PAGE.read_text().split())


def test_the_page_counts_the_significant_differences_as_the_report_does(found):
    page = " ".join(PAGE.read_text().split())
    for other in ("MAP", "Laplace", "VI"):
        differences = [one.difference("log_likelihood", "VL", other) for one in found]
        better, worse = (sum(d.is_clear and sign * d.mean > 0 for d in differences) or "none" for sign in (1, -1))
        words = f"**VL against {other}**: significantly better on {better} of the nine, significantly worse on {worse}"
        assert words in page


def test_the_readme_counts_them_too(found):
    readme = (ROOT / "README.md").read_text()
    told = []
    for other in ("VI", "MAP", "Laplace"):
        differences = [one.difference("log_likelihood", "VL", other) for one in found]
        better, worse = (sum(d.is_clear and sign * d.mean > 0 for d in differences) for sign in (1, -1))
        told.append(f"vs {other} {'significantly ' if other == 'VI' else ''}better on {better}, worse on {worse}")
    assert "; ".join(told) in readme
