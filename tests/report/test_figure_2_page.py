"""What the pages say of Figure 2 at full size is what the committed results say."""

import math
from pathlib import Path

import pytest

from varlap.experiments import Result, Store

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "figure-2"
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="the results are not part of a source distribution")
Runs = dict[tuple[str, float, float], Result]
MULTIPLIERS = (1.0, 3.0, 10.0, 30.0)


@pytest.fixture(scope="module")
def page() -> str:
    text = (ROOT / "docs" / "experiments-in-detail.md").read_text()
    return text.partition("## Figure 2: variances that stop early")[2]


@pytest.fixture(scope="module")
def runs() -> Runs:
    return _of(50)


def _of(epochs: int) -> Runs:
    return {
        (run.spec.method, run.spec.beta, run.spec.log_sigma_lr_multiplier): run
        for run in Store(RESULTS)
        if (run.spec.data, run.spec.epochs) == ("cifar10", epochs)
    }


def _accuracy(run: Result) -> float:
    return 100 * run.test["mean"]["accuracy"]


def _elbo(run: Result) -> float:
    return run.history[-1]["elbo"]


def test_the_pages_count_the_runs_and_the_diverged(runs: Runs, page: str):
    earlier = _of(20)
    assert f"{len(runs)} of the 16 runs of" in page
    assert f"[{len(runs)} of its 16 runs](" in (ROOT / "docs" / "experiments.md").read_text()
    assert f"{len(earlier)} of the 16 runs of" in page
    assert not any(run.failure for run in runs.values())
    assert {key for key, run in earlier.items() if run.failure} == {("vl", 1.0, each) for each in MULTIPLIERS}


def test_the_multiplier_matters_far_less_to_vl_than_to_vi(runs: Runs, page: str):
    vl, vi = ([_accuracy(runs[method, 0.1, at]) for at in (1.0, 10.0)] for method in ("vl", "vi"))
    told = f"VL's accuracy is {vl[0]:.1f} % at × 1 and {vl[1]:.1f} % at × 10, VI's {vi[0]:.1f} % and {vi[1]:.1f} %"
    assert told in page
    lost = {m: _accuracy(runs[m, 1.0, 1.0]) - _accuracy(runs[m, 1.0, 30.0]) for m in ("vl", "vi")}
    assert {method: round(points) for method, points in lost.items()} == {"vl": 7, "vi": 34}
    assert "VL loses seven points and VI thirty-four" in page


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_vi_predicts_best_where_its_elbo_is_worst(runs: Runs, beta: float):
    found = [run for (method, at, _), run in runs.items() if (method, at) == ("vi", beta)]
    for best in (max(found, key=_accuracy), min(found, key=_elbo)):
        assert best.spec.log_sigma_lr_multiplier == 1
        assert all(row["log_sigma_over_s_median"] < math.log(1 / 5) for row in best.history[:10])


def test_vi_with_late_variances_is_ahead_of_vl(runs: Runs, page: str):
    of_vl, of_vi = (runs[method, 0.1, 1.0].test["mean"]["nll"] for method in ("vl", "vi"))
    assert f"it is ahead of VL there, in NLL by {of_vl - of_vi:.3f}" in page


def test_the_late_variances_of_vi_end_where_the_page_says(runs: Runs, page: str):
    ends = [math.exp(runs["vi", beta, 1.0].history[-1]["log_sigma_over_s_median"]) for beta in (0.1, 1.0)]
    assert f"ends at {ends[0]:.2f} (β = 0.1) or {ends[1]:.2f} (β = 1) of it" in page


def test_beyond_ten_there_is_no_trend_of_vi(runs: Runs):
    nll = {key: run.test["mean"]["nll"] for key, run in runs.items()}
    assert nll["vi", 1.0, 30.0] < nll["vi", 1.0, 10.0]
    assert nll["vi", 0.1, 30.0] > nll["vi", 0.1, 10.0]
    assert _elbo(runs["vi", 0.1, 30.0]) < _elbo(runs["vi", 0.1, 10.0])


def test_vls_elbo_has_settled_from_ten_on(runs: Runs, page: str):
    changed = abs(_elbo(runs["vl", 1.0, 10.0]) - _elbo(runs["vl", 1.0, 30.0]))
    assert f"VL's at β = 1 changes by {changed:.3f} from × 10 to × 30" in page


def test_the_first_page_counts_the_points_of_accuracy_that_ten_times_the_rate_costs(runs: Runs):
    lost = {
        (method, beta): _accuracy(runs[method, beta, 1.0]) - _accuracy(runs[method, beta, 10.0])
        for method in ("vl", "vi")
        for beta in (0.1, 1.0)
    }
    told = {("vi", 0.1): 18, ("vi", 1.0): 38, ("vl", 0.1): 0.5, ("vl", 1.0): 6}
    assert lost == pytest.approx(told, abs=0.25)
    words = "its accuracy falls by 18 and 38 points; VL loses half a point at β = 0.1, six at β = 1"
    assert words in (ROOT / "docs" / "experiments.md").read_text()
    assert all(_elbo(runs["vi", beta, 10.0]) > _elbo(runs["vi", beta, 1.0]) for beta in (0.1, 1.0))
