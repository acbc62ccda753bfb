"""What the page of studies says of held labels is what the committed results say."""

import json
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "quality" / "held_labels.json"
pytestmark = pytest.mark.skipif(not RESULTS.is_file(), reason="the results are not part of a source distribution")
LABELS, NUMBERS, PAPERS, MAP = "VL's own for labels", "VL's own for numbers", "the paper's", "MAP"
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


def test_what_is_said_of_vls_own_for_numbers(nlls: Found):
    page = (ROOT / "docs" / "studies.md").read_text()
    lost = {name: sum(one[name].count(None) for one in nlls.values()) for name in (LABELS, NUMBERS, PAPERS)}
    assert lost[NUMBERS] == 0
    assert sum(len(one[NUMBERS]) for one in nlls.values()) == 54
    told = f"ended with a NaN; with held labels {lost[LABELS]} did, with the paper's own curvature {lost[PAPERS]}."
    assert "With it none of 54 runs" in page
    assert told in page
    ended = {name: [one for one in nlls.values() if None not in one[name]] for name in (LABELS, PAPERS)}
    assert all(_mean(one[NUMBERS]) < _mean(one[LABELS]) for one in ended[LABELS])
    behind = max(_mean(one[NUMBERS]) - _mean(one[PAPERS]) for one in ended[PAPERS])
    assert f"nowhere more than {behind:.3f} behind the paper's" in page


def test_what_is_said_of_one_learnt_noise_and_of_map(nlls: Found):
    page = (ROOT / "docs" / "studies.md").read_text()
    highest = nlls["regression", 0.02, 1.0]
    assert f"by {_mean(highest[LABELS]) - _mean(highest[NUMBERS]):.1f} at the highest rate and β = 1" in page
    ahead = [_mean(one[MAP]) < _mean(one[NUMBERS]) for one in nlls.values()]
    assert sum(ahead) > len(ahead) / 2
    fastest = [one for (task, lr, _), one in nlls.items() if (task, lr) == ("regression with its own noise", 0.02)]
    for name in (MAP, NUMBERS):
        assert sum(nll > 10 for one in fastest for nll in one[name] if nll is not None) == 1
