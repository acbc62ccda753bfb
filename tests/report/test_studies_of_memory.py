"""What the page of studies says of a remembered curvature is what the committed results say."""

import json
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "quality" / "memory.json"
pytestmark = pytest.mark.skipif(not RESULTS.is_file(), reason="the results are not part of a source distribution")
DEFAULT, QUARTER, PAPERS = "the default", "a quarter of the batch in every step", "the paper's"
Where = tuple[str, float, float]
Found = dict[Where, dict[str, list[float | None]]]


@pytest.fixture(scope="module")
def nlls() -> Found:
    found: Found = {}
    for run in json.loads(RESULTS.read_text())["runs"]:
        where = found.setdefault((run["task"], run["lr"], run["beta"]), {})
        where.setdefault(run["curvature"], []).append(run["test_nll"])
    assert len(found) == 18
    assert all(len(runs) == 3 for where in found.values() for runs in where.values())
    return found


def _mean(runs: list[float | None]) -> float:
    return statistics.fmean(nll for nll in runs if nll is not None)


def test_a_quarter_in_every_step_is_nowhere_far_behind_where_both_end(nlls: Found):
    whole = [one for one in nlls.values() if None not in one[DEFAULT] + one[QUARTER]]
    behind = max(_mean(one[QUARTER]) - _mean(one[DEFAULT]) for one in whole)
    assert f"nowhere more than {behind:.3f} behind" in (ROOT / "docs" / "studies.md").read_text()
    lost = {name: sum(one[name].count(None) for one in nlls.values()) for name in (DEFAULT, QUARTER, PAPERS)}
    told = (
        f"{lost[DEFAULT]} ended with a NaN by the default, {lost[QUARTER]} by a quarter in every step, {lost[PAPERS]}"
    )
    assert f"Of 54 runs each, {told} by the paper's" in (ROOT / "docs" / "studies.md").read_text()


def test_the_papers_curvature_diverged_at_the_highest_rate_and_beta_alone(nlls: Found):
    assert {where[1:] for where, one in nlls.items() if None in one[PAPERS]} == {(0.02, 1.0)}


def test_on_the_digits_the_papers_curvature_is_behind_both_others(nlls: Found):
    for where, one in nlls.items():
        if where[0] == "digits":
            assert _mean(one[PAPERS]) > max(_mean(one[DEFAULT]), _mean(one[QUARTER]))
