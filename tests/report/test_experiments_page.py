"""The page of the paper's experiments says what the committed results say."""

import re
from pathlib import Path

import pytest

from varlap.experiments import Store
from varlap.experiments.ways import Key
from varlap.report.sweeps import Sweep, sweeps

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "paper"
PAGE = (ROOT / "docs" / "experiments.md").read_text() if RESULTS.is_dir() else ""
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="the results are not part of a source distribution")
ROWS: dict[str, Key] = {
    "VL": ("vl", "mean"),
    "VI, mean network": ("vi", "mean"),
    "VI, 10 samples": ("vi", "sampled"),
    "MAP": ("map", "mean"),
    "MAP with a temperature, 1.62": ("map", "scaled"),
    "VL with a temperature, 1.02": ("vl", "scaled"),
}


def _sweep() -> Sweep:
    (sweep,) = sweeps(Store(RESULTS))
    assert (sweep.spec.data, sweep.spec.recipe, sweep.spec.epochs) == ("cifar10", "ours", 50)
    return sweep


@pytest.mark.parametrize(("name", "key"), ROWS.items())
def test_a_row_of_the_page_is_what_the_results_say(name: str, key: Key):
    row = next(line for line in PAGE.splitlines() if line.replace("*", "").startswith(f"| {name} |"))
    beta, nll, _, accuracy, _, ece, _, auroc = (cell.strip(" *%") for cell in row.split("|")[2:10])
    choice = _sweep().choices()[key]
    (run,) = choice.by_validation
    scores = run.test[key[1]]
    assert float(beta) == choice.beta
    assert float(nll) == pytest.approx(scores["nll"], abs=5.1e-4)
    assert float(accuracy) == pytest.approx(100 * scores["accuracy"], abs=0.051)
    assert float(ece) == pytest.approx(scores["ece"], abs=5.1e-4)
    assert float(auroc) == pytest.approx(scores["ood_auroc_entropy"], abs=5.1e-4)
    if key[1] == "scaled":
        assert f"{scores['temperature']:.2f}" in name


def test_what_the_page_says_about_choosing_by_test_images_is_so():
    choices = _sweep().choices()
    for key in ROWS.values():
        assert (choices[key].beta == choices[key].by_test[0].spec.beta) == (key[1] != "scaled"), key
    best = {key[0]: choices[key].by_test[0] for key in ROWS.values() if key[1] == "scaled"}
    told = re.search(r"would have chosen ([\d.]+) for MAP \(([\d.]+)\) and ([\d.]+) for VL \(([\d.]+)\)", PAGE)
    assert told is not None
    for method, beta, nll in (("map", *told.groups()[:2]), ("vl", *told.groups()[2:])):
        assert best[method].spec.beta == float(beta)
        assert best[method].test["scaled"]["nll"] == pytest.approx(float(nll), abs=5.1e-4)


def test_the_readme_has_the_same_numbers():
    row = next(line for line in (ROOT / "README.md").read_text().splitlines() if "crops and flips, 50 epochs" in line)
    choices = _sweep().choices()
    keys: tuple[Key, ...] = (("vl", "mean"), ("map", "mean"), ("map", "scaled"), ("vi", "sampled"))
    for key in keys:
        (run,) = choices[key].by_validation
        scores = run.test[key[1]]
        assert f"{scores['nll']:.3f} / {scores['ece']:.3f}" in row.replace("*", "")
        assert f"{100 * scores['accuracy']:.1f}" in row
