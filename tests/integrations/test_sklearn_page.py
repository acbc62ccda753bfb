"""The page on the scikit-learn estimators and the README show the committed results and nothing else."""

import importlib.util
import json
import statistics
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import varlap
from varlap.experiments.uci.summary import Estimate

ROOT = Path(__file__).parents[2]
RESULTS, SCRIPT = ROOT / "results" / "quality" / "estimators.json", ROOT / "benchmarks" / "estimators.py"
PAGE, README = ROOT / "docs" / "scikit-learn.md", ROOT / "README.md"
pytestmark = pytest.mark.skipif(not RESULTS.is_file(), reason="the results are not part of a source distribution")
NAMES = {  # what sentences call the tables
    "bostonHousing": "Boston housing",
    "wine-quality-red": "red wine",
    "power-plant": "power plant",
    "naval-propulsion-plant": "naval propulsion",
    "protein-tertiary-structure": "protein",
}
NUMBERS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SPLITS_OF_NLL = {"VL": [1.0, 2.0, 3.1], "a": [1.4, 2.5, 3.4], "b": [1.1, 2.2, 3.2]}


def words(path: Path) -> str:
    return " ".join(path.read_text().split())


def listed(tables: list[str]) -> str:
    names = [NAMES.get(table, table) for table in tables]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_of_estimators", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return json.loads(RESULTS.read_text())


def made_runs(script: ModuleType, seed: int = 0) -> list[dict[str, Any]]:
    """Runs of three splits; the MLP is worst, and the others are worse than VL by four standard errors."""
    values = dict.fromkeys(script.MLPS, SPLITS_OF_NLL["b"])
    values |= {"VL": SPLITS_OF_NLL["VL"], script.CONSTANT: SPLITS_OF_NLL["VL"], "MLP": SPLITS_OF_NLL["a"]}
    return [
        {"table": "yacht", "split": split, "method": method, "seed": seed, "training_rows": 9, "cpu_s": 1.0}
        | {"scores": {"rmse": numbers[split], "nll": numbers[split]}, "hit_max_iter": False}
        for method, numbers in values.items()
        for split in range(3)
    ]


# ---- the summary --------------------------------------------------------------------------------------------------


def test_the_committed_summary_is_what_the_runs_give(script, stored):
    assert stored["summary"] == json.loads(json.dumps(script.summary(stored["runs"], stored["spec"]["seed"])))
    assert list(stored["summary"]) == script.ALL


def test_every_run_says_where_it_comes_from_and_is_there_once(stored):
    keys = [(run["table"], run["split"], run["method"], run["seed"]) for run in stored["runs"]]
    assert len(set(keys)) == len(keys)
    assert "origin" not in stored
    for run in stored["runs"]:
        assert set(run["origin"]) >= {"varlap", "torch", "python", "hardware", "date", "scikit-learn"}


def test_runs_of_another_seed_are_no_part_of_a_summary(script):
    runs = made_runs(script)
    assert script.summary(runs + made_runs(script, seed=1), 0) == script.summary(runs, 0)


def test_vl_is_judged_against_the_best_mlp_by_a_paired_t_test(script):
    entry = script.summary(made_runs(script), 0)["yacht"]["nll"]
    assert entry["best MLP"] == "MLP, held out"
    pairs = zip(SPLITS_OF_NLL["VL"], SPLITS_OF_NLL["b"], strict=True)
    expected = Estimate.of([one - other for one, other in pairs])
    found = entry["VL minus best MLP"]
    assert (found["mean"], found["standard_error"]) == (expected.mean, expected.standard_error)
    assert abs(found["mean"]) > 2 * found["standard_error"]  # which is not enough of three splits
    assert not found["is_clear"]


def test_mlps_that_were_stopped_before_they_converged_are_counted(script, stored):
    runs = made_runs(script)
    next(run for run in runs if run["method"] == "MLP, held out")["hit_max_iter"] = True
    assert script.summary(runs, 0)["yacht"]["hit_max_iter"] == dict.fromkeys(script.MLPS, 0) | {"MLP, held out": 1}
    for run in stored["runs"]:
        assert ("n_iter" in run) == run["method"].startswith("MLP")


# ---- the page -----------------------------------------------------------------------------------------------------


def test_the_table_of_the_page_is_the_summary(script, stored):
    lines = PAGE.read_text().splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("| table | training rows"))
    table = script.markdown(stored["summary"]).splitlines()
    assert lines[start : start + len(table) + 1] == [*table, ""]


@pytest.mark.parametrize(
    ("scores", "begin"),
    [(["nll"], "**NLL**: clearly better than the best MLP on"), (["accuracy", "rmse"], "**Accuracy")],
)
def test_the_page_names_the_tables_with_a_clear_difference(script, stored, scores, begin):
    better = script.clearly(stored["summary"], scores)
    worse = script.clearly(stored["summary"], scores, better=False)
    sentence = words(PAGE).split(begin, 1)[1].split(" - **", 1)[0]
    assert f"{NUMBERS[len(better)]} of the {len(stored['summary'])} tables: {listed(better)}." in sentence
    assert f"Clearly worse on {NUMBERS[len(worse)]}" + (f": {listed(worse)}." if worse else ".") in sentence


def test_the_page_says_what_constant_noise_gives(script, stored):
    better = script.clearly(stored["summary"], ["nll"], method=script.CONSTANT)
    assert f"with constant noise on {NUMBERS[len(better)]}: {listed(better)}." in words(PAGE)
    differences = {t: e["nll"].get(f"VL minus {script.CONSTANT}") for t, e in stored["summary"].items()}
    gains = [table for table, one in differences.items() if one and one["is_clear"] and one["mean"] < 0]
    losses = [table for table, one in differences.items() if one and one["is_clear"] and one["mean"] > 0]
    assert f"clearly better than constant on {NUMBERS[len(gains)]} ({listed(gains)})" in words(PAGE)
    assert f"clearly worse on {NUMBERS[len(losses)]}" in words(PAGE)


def test_the_page_counts_the_tables_on_which_every_mlp_was_stopped(stored):
    stopped = [t for t, e in stored["summary"].items() if e["hit_max_iter"]["MLP"] == e["splits"]]
    assert f"every fit of the MLP was stopped by its 200 passes on {NUMBERS[len(stopped)]} of the 14" in words(PAGE)
    assert not any(e["hit_max_iter"]["MLP, 2000 passes"] for e in stored["summary"].values())


def test_what_the_page_says_of_single_rows_is_in_the_runs(stored):
    runs = {(run["table"], run["split"], run["method"]): run for run in stored["runs"]}
    costs = [dict(runs["concrete", 3, method]["worst_rows"]) for method in ("VL", "VL, constant noise")]
    rows = list(costs[0])[:2]
    assert [[round(cost[row]) for row in rows] for cost in costs] == [[30, 30], [18, 18]]
    assert "two of 103 rows cost 30 nats each, and 18 with constant noise" in words(PAGE)
    worst = [runs["bostonHousing", split, "VL"]["worst_rows"][0][1] for split in range(5)]
    assert (sum(cost > 10 for cost in worst), round(max(worst))) == (3, 15)
    parts = [
        sum(cost for _, cost in run["worst_rows"]) / (run["scores"]["nll"] * num_rows)
        for run, num_rows in zip((runs["breast cancer", n, "VL"] for n in range(5)), [114] * 4 + [113], strict=True)
    ]
    assert 0.5 < min(parts) < max(parts) < 0.95


def test_the_defaults_are_nowhere_said_to_be_tested_independently(script, stored):
    for text in (words(PAGE), stored["spec"]["defaults_chosen_on"], script.TUNED_ON):
        assert "so this is no independent test" in text
    source = words(ROOT / "src" / "varlap" / "integrations" / "scikit_learn" / "sizing.py")
    assert "so those are no independent test" in source


def noisy_wave(frequency: float, num_rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(seed)
    X = draws.uniform(-3, 3, (num_rows, 1))
    return X, np.sin(frequency * X[:, 0]) + 0.1 * draws.standard_normal(num_rows)


def test_the_page_says_how_far_to_trust_a_std_away_from_the_data():
    model = varlap.VLRegressor(random_state=0).fit(*noisy_wave(1, 300))
    mean, std = model.predict([[0.0], [6.0], [30.0]], return_std=True)
    assert (
        f"it is {std[0]:.2f} at 0, {std[1]:.2f} at 6, where the mean is off by {abs(np.sin(6) - mean[1]):.2f}, and "
        f"{std[2]:.2f} at 30"
    ) in words(PAGE)


def test_the_page_says_what_a_second_look_finds():
    data, others = noisy_wave(3, 100), noisy_wave(3, 1000, seed=1)
    with warnings.catch_warnings(action="ignore"):
        first = varlap.VLRegressor(beta=0.6, random_state=0).fit(*data).score(*others)
    found = varlap.VLRegressor(random_state=0).fit(*data).score(*others)
    assert f"a score of {found:.2f} on other rows; the first fit alone has {first:.2f}" in words(PAGE)


# ---- the README ---------------------------------------------------------------------------------------------------


def test_the_readme_counts_what_the_results_show(script, stored):
    summary = stored["summary"]
    counts = [
        len(script.clearly(summary, scores, better)) or "none"
        for scores in (["nll"], ["accuracy", "rmse"])
        for better in (True, False)
    ]
    row = next(line for line in README.read_text().splitlines() if line.startswith("| `VLClassifier`/`VLRegressor`"))
    assert f"{len(summary)} tables" in row
    by_noise = set(script.clearly(summary, ["nll"])) - set(script.clearly(summary, ["nll"], method=script.CONSTANT))
    assert f"NLL significantly better on {counts[0]} (on {len(by_noise)} of them because of" in row
    assert f"worse on {counts[1]}; accuracy/RMSE better on {counts[2]}, worse on {counts[3]};" in row
    ratios = [entry["cpu_s"]["VL"] / entry["cpu_s"]["MLP"] for entry in summary.values()]
    assert f"fit time {round(min(ratios))}–{round(max(ratios))}× (median {statistics.median(ratios):.0f}×)" in row
