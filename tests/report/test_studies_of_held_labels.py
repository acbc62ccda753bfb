"""What the page of studies says of a remembered curvature is what the committed results say."""

import json
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "quality" / "memory.json"
pytestmark = pytest.mark.skipif(not RESULTS.is_file(), reason="the results are not part of a source distribution")
LABELS, QUIET, NUMBERS, PAPERS = "VL's own for labels", "the same, quiet", "VL's own for numbers", "the paper's"
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


def _behind(first: str, second: str, nlls: Found) -> float:
    """How far the first is behind the second at most, where both came to an end."""
    whole = [one for one in nlls.values() if None not in one[first] + one[second]]
    return max(_mean(one[first]) - _mean(one[second]) for one in whole)


def test_what_is_said_of_vls_own_for_numbers(nlls: Found):
    page = (ROOT / "docs" / "studies.md").read_text()
    lost = {name: sum(one[name].count(None) for one in nlls.values()) for name in (LABELS, NUMBERS, PAPERS)}
    assert (
        f"of 54 runs {lost[NUMBERS]} ended with a NaN, by labels' way {lost[LABELS]}, by the paper's {lost[PAPERS]}."
    ) in page
    behind = (_behind(NUMBERS, other, nlls) for other in (LABELS, PAPERS))
    assert "nowhere more than {:.3f} behind labels' way and {:.3f} behind the paper's".format(*behind) in page


def test_the_quiet_gradient_mends_one_learnt_noise_and_not_one_that_depends_on_x(nlls: Found):
    for (task, _, _), one in nlls.items():
        if task == "regression":
            assert None not in one[QUIET]
            assert _mean(one[NUMBERS]) < _mean(one[QUIET]) < _mean(one[LABELS])
        elif task == "regression with its own noise":
            assert one[QUIET] == pytest.approx(one[LABELS])


def test_what_is_said_of_the_quiet_gradient_on_the_digits(nlls: Found):
    digits = {where: one for where, one in nlls.items() if where[0] == "digits"}
    told = f"nowhere more than {_behind(QUIET, LABELS, digits):.3f} behind held labels at the same curvature"
    assert told in (ROOT / "docs" / "studies.md").read_text()
    assert _behind(QUIET, PAPERS, digits) < 0
