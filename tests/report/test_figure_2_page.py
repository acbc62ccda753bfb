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


def test_the_runs_are_all_there_and_the_pages_count_the_earlier_ones_and_the_diverged(runs: Runs, page: str):
    earlier = _of(20)
    assert len(runs) == 16
    assert f"{len(earlier)} of the 16 runs of" in page
    assert not any(run.failure for run in runs.values())
    assert {key for key, run in earlier.items() if run.failure} == {("vl", 1.0, each) for each in MULTIPLIERS}
    assert "None of the four runs above diverged" in page
    assert "none of 4 with PreactResNet-18 at a lower rate" in (ROOT / "docs" / "choices.md").read_text()


def test_the_multiplier_matters_far_less_to_vl_than_to_vi(runs: Runs, page: str):
    vl, vi = ([_accuracy(runs[method, 0.1, at]) for at in MULTIPLIERS] for method in ("vl", "vi"))
    assert vi == sorted(vi, reverse=True)
    told = f"VL's accuracy stays between {min(vl):.1f} and {max(vl):.1f} % from × 1 to × 30, while VI's falls from "
    assert f"{told}{vi[0]:.1f} to {vi[-1]:.1f} %" in page
    lost = {m: _accuracy(runs[m, 1.0, 1.0]) - _accuracy(runs[m, 1.0, 30.0]) for m in ("vl", "vi")}
    by_three = _accuracy(runs["vi", 1.0, 1.0]) - _accuracy(runs["vi", 1.0, 3.0])
    assert [round(lost["vl"]), round(lost["vi"]), round(by_three)] == [7, 34, 17]
    assert "VL loses seven points, and VI thirty-four, of which × 3 takes seventeen" in page


@pytest.mark.parametrize("beta", [1.0, 0.1])
@pytest.mark.parametrize("method", ["vl", "vi"])
def test_both_predict_best_where_their_elbo_is_worst(runs: Runs, method: str, beta: float):
    found = [run for (name, at, _), run in runs.items() if (name, at) == (method, beta)]
    for best in (max(found, key=_accuracy), min(found, key=_elbo), min(found, key=lambda run: run.test["mean"]["nll"])):
        assert best.spec.log_sigma_lr_multiplier == 1


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_the_variances_of_vi_at_the_means_rate_are_late(runs: Runs, beta: float):
    assert all(row["log_sigma_over_s_median"] < math.log(1 / 5) for row in runs["vi", beta, 1.0].history[:10])


def test_vi_with_late_variances_is_ahead_of_vl(runs: Runs, page: str):
    of_vl, of_vi = (runs[method, 0.1, 1.0].test["mean"]["nll"] for method in ("vl", "vi"))
    assert f"VI is ahead of VL there, in NLL by {of_vl - of_vi:.3f}" in page


def test_the_late_variances_of_vi_end_where_the_page_says(runs: Runs, page: str):
    ends = [math.exp(runs["vi", beta, 1.0].history[-1]["log_sigma_over_s_median"]) for beta in (0.1, 1.0)]
    assert f"ends at {ends[0]:.2f} (β = 0.1) or {ends[1]:.2f} (β = 1) of it" in page


def test_no_multiplier_is_best_for_vis_elbo_at_both_beta(runs: Runs, page: str):
    at_tenth, at_one = ({at: _elbo(runs["vi", beta, at]) for at in MULTIPLIERS} for beta in (0.1, 1.0))
    assert (max(at_tenth, key=at_tenth.__getitem__), max(at_one, key=at_one.__getitem__)) == (10, 3)
    assert [at_one[3.0] - at_one[at] for at in (10.0, 30.0)] == pytest.approx([0.05, 0.05], abs=5e-3)
    assert "× 10 at 0.1, × 3 at 1, where × 10 and × 30 are 0.05 behind" in page


def test_vls_elbo_rises_with_the_multiplier_and_has_settled_from_three_on(runs: Runs, page: str):
    elbos = [[_elbo(runs["vl", beta, at]) for at in MULTIPLIERS] for beta in (0.1, 1.0)]
    assert all(each == sorted(each) for each in elbos)
    assert f"from × 3 on by {max(each[-1] - each[1] for each in elbos):.3f} at most" in page


def test_the_first_page_counts_the_points_of_accuracy_that_thirty_times_the_rate_costs(runs: Runs):
    lost = {
        (method, beta): _accuracy(runs[method, beta, 1.0]) - _accuracy(runs[method, beta, 30.0])
        for method in ("vl", "vi")
        for beta in (0.1, 1.0)
    }
    assert lost == pytest.approx({("vi", 0.1): 24, ("vi", 1.0): 34, ("vl", 0.1): 0.5, ("vl", 1.0): 7}, abs=0.5)
    losses = f"VL loses {lost['vl', 0.1]:.1f} and {lost['vl', 1.0]:.0f}"
    words = f"VI's ELBO rises and it loses 24 and 34 accuracy points (β = 0.1 and 1); {losses}."
    assert words in (ROOT / "docs" / "experiments.md").read_text()
    assert all(_elbo(runs["vi", beta, 30.0]) > _elbo(runs["vi", beta, 1.0]) for beta in (0.1, 1.0))
