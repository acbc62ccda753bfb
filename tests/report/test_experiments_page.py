"""The page of the paper's experiments says what the committed results say."""

import itertools
import json
import re
import statistics
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from varlap.experiments import Store
from varlap.experiments.choice import Choice, choose
from varlap.experiments.final_line import recorded
from varlap.experiments.grid import expand, paper_numbers
from varlap.experiments.ways import PAPERS, Key, Way
from varlap.report.sweeps import Sweep, sweeps

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "paper"
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="the results are not part of a source distribution")
if RESULTS.is_dir():
    sys.path.insert(0, str(ROOT / "docs"))
    import write_tables

PAGES = {
    name: ROOT / f"{name}.md"
    for name in ("README", "docs/experiments", "docs/experiments-in-detail", "docs/reproduce", "docs/studies")
}
DETAIL, STUDIES = (PAGES[f"docs/{name}"].read_text() for name in ("experiments-in-detail", "studies"))
STORED = {"CIFAR-10": "cifar10", "Fashion-MNIST": "fashion_mnist"}


def _sweep(epochs: int = 50, data: str = "CIFAR-10", recipe: str = "ours") -> Sweep:
    store = Store(RESULTS)
    (sweep,) = [
        sweep
        for sweep in sweeps(store, recorded(store))
        if (sweep.spec.data, sweep.spec.recipe, sweep.spec.epochs) == (STORED[data], recipe, epochs)
    ]
    return sweep


def _section(title: str, page: str = STUDIES) -> str:
    """Return what stands under a heading, up to the next one of its rank."""
    rank = title.partition(" ")[0]
    assert f"\n{title}\n" in page, title
    return page.partition(f"\n{title}\n")[2].partition(f"\n{rank} ")[0]


def test_the_tables_of_the_pages_are_what_the_results_say():
    for page in write_tables.PAGES:
        assert write_tables.with_tables(page.read_text()) == page.read_text(), page.name


@pytest.mark.parametrize(
    ("data", "recipe", "epochs"), [tuple(each.split()) for each in re.findall(r"<!-- table: ways (.*) -->", DETAIL)]
)
def test_a_table_is_of_the_raw_files_and_bold_where_a_column_is_best(data: str, recipe: str, epochs: str):
    lines = (
        DETAIL.partition(f"<!-- table: ways {data} {recipe} {epochs} -->\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    for name, method, way in (("VL", "vl", "mean"), ("MAP", "map", "mean"), ("VI (10 samples)", "vi", "sampled")):
        (row,) = [row for row in rows if row[0] == name]
        files = [
            json.loads(path.read_text()) for path in RESULTS.glob(f"{data}-{method}-beta{row[1]}-seed0-{recipe}-*")
        ]
        (file,) = [file for file in files if file["spec"]["epochs"] == int(epochs)]
        scores = file["test"][way]
        expected = [scores["nll"], 100 * scores["accuracy"], scores["ece"], scores["ood_auroc_entropy"]]
        told = [float(row[column].strip("* %")) for column in (2, 4, 6, 8)]
        assert told == [pytest.approx(value, abs=0.0501 if value > 2 else 5.01e-4) for value in expected]
    for column, best in ((2, min), (4, max), (6, min), (8, max)):
        numbers = [float(row[column].strip("* %")) for row in rows]
        for row, number in zip(rows, numbers, strict=True):
            assert row[column].startswith("**") == (number == best(numbers)), (row, column)


def test_a_table_that_differs_from_the_results_would_be_found():
    page = PAGES["docs/experiments"].read_text()
    assert "| **0.174** |" in page
    assert write_tables.with_tables(page.replace("| **0.174** |", "| 0.175 |")) == page


def test_the_pages_own_experiment_is_one():
    text = re.findall(r"```toml\n(.*?)```", PAGES["docs/reproduce"].read_text(), flags=re.DOTALL)
    assert [len(expand(tomllib.loads(each), {})) for each in text] == [12]


def test_every_sweep_of_the_results_has_its_table():
    made = set(re.findall(r"<!-- table: ways (\S+) (\S+) (\d+) -->", DETAIL))
    found = [(part.spec.data, part.spec.recipe, str(part.spec.epochs)) for part in sweeps(Store(RESULTS))]
    assert made == {each for each in found if each[2] != "30"}  # those of 30 epochs are in the table of all studies
    told = (PAGES["docs/experiments"].parent / "which-method.md").read_text()
    rows = [line for line in told.splitlines() if re.match(r"\| (CIFAR-10|Fashion-MNIST), .* epochs \(", line)]
    assert len(rows) == len(found)


def test_the_answers_of_the_first_page_hold():
    best_nll, best_of_all, ahead_of_scaled, calibrated = [], [], [], []
    for part in sweeps(Store(RESULTS), recorded(Store(RESULTS))):
        if part.spec.epochs != 200:
            continue
        named = part.spec.data, part.spec.recipe
        scores = {key: choice.by_validation[0].test[key[1]] for key, choice in part.choices().items()}
        ours = scores["vl", "mean"]
        papers = [scores[key] for key in PAPERS if key[0] != "vl"]
        scaled = [scores[method, "scaled"] for method in ("map", "vi")]
        if all(ours["nll"] < row["nll"] for row in papers):
            best_nll.append(named)
        if all(ours["accuracy"] > row["accuracy"] and ours["ece"] < row["ece"] for row in papers):
            best_of_all.append(named)
        if all(ours["nll"] < row["nll"] for row in scaled):
            ahead_of_scaled.append(named)
        if all(ours["ece"] < row["ece"] for row in scaled):
            calibrated.append(named)
    by_adam = ("cifar10", "ours")
    assert len(best_nll) == 5
    assert set(best_nll) - set(best_of_all) == {by_adam}
    assert set(best_nll) - set(ahead_of_scaled) == {by_adam}
    assert calibrated == [("cifar10", "sgd"), ("fashion_mnist", "sgd")]


def test_the_first_pages_sentences_have_the_numbers_of_the_results():
    page = " ".join(PAGES["docs/experiments"].read_text().split())
    told = re.search(
        r"temperature-scaled MAP has ([\d.]+) on CIFAR-10 and ([\d.]+) on Fashion-MNIST, and VL, with one β "
        r"against MAP's three, ([\d.]+) and ([\d.]+)\.",
        page,
    )
    assert told is not None
    choices = [_sweep(30, data, "sgd").choices() for data in STORED]
    nlls = [
        one[key].by_validation[0].test[key[1]]["nll"] for key in (("map", "scaled"), ("vl", "mean")) for one in choices
    ]
    assert list(told.groups()) == [f"{nll:.3f}" for nll in nlls]


def _mean(name: str, way: Way = "mean", score: str = "nll") -> float:
    """Return the mean over the seeds of the small study's row."""
    return statistics.fmean(run.test[way][score] for run in _chosen(name).by_validation)


def test_the_first_page_says_of_the_small_study_what_it_found_for_and_against_vl():
    page = " ".join(PAGES["docs/experiments"].read_text().split())
    told = re.search(
        r"the best of seven VL variants beats tuned MAP by ([\d.]+) NLL, or by ([\d.]+) if MAP also gets "
        r"the β warm-up, but has worse ECE \(([\d.]+) vs ([\d.]+)\)\. VL with default settings is ([\d.]+) ahead of "
        r"MAP and ([\d.]+) behind temperature-scaled MAP\. Temperature-scaled VI is ([\d.]+) ahead of VL's "
        r"best variant\.",
        page,
    )
    assert told is not None
    assert sum(name.startswith("VL") for name in CHOICES) == 7
    best = "VL, variances in closed form, β warm-up"
    assert all(_mean(best) <= _mean(name) + 5e-4 for name in CHOICES if name.startswith("VL"))
    scaled = _mean("MAP, β for its scaled predictions", "scaled")
    default, vi = _mean("VL, default settings"), _mean("VI, 10 samples", "scaled")
    numbers = [_mean("MAP") - _mean(best), _mean("MAP, β warm-up over the first 30 %") - _mean(best)]
    numbers += [_mean(best, score="ece"), _mean("MAP", score="ece")]
    numbers += [_mean("MAP") - default, default - scaled, _mean(best) - vi]
    assert [f"{number:.3f}" for number in numbers] == list(told.groups())


def test_the_pages_say_by_how_much_repeated_runs_differed():
    folder = ROOT / "results" / "bench" / "quality"
    first, second = (
        {
            (run["method"], run["seed"]): run["nll"]
            for run in json.loads((folder / f"cifar10-25-epochs-no-augmentation{name}.json").read_text())["runs"]
            if run["beta"] == 0.01
        }
        for name in ("", "-every-8")
    )
    gaps = sorted(abs(first[key] - second[key]) for key in first.keys() & second.keys())
    assert len(gaps) == 3
    words = "Three repeated pairs in a shorter setting (25 epochs, no augmentation) differed by "
    for name in ("README", "docs/experiments"):
        page = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(PAGES[name].read_text().split()))
        assert f"{words}{gaps[0]:.3f} to {gaps[-1]:.3f} in NLL" in page


def test_the_pages_say_how_far_ahead_vl_is_where_it_leads():
    leads, over_scaled = [], []
    for part in sweeps(Store(RESULTS), recorded(Store(RESULTS))):
        if part.spec.epochs != 200:
            continue
        scores = {key: choice.by_validation[0].test[key[1]] for key, choice in part.choices().items()}
        gaps = {key: row["nll"] - scores["vl", "mean"]["nll"] for key, row in scores.items() if key[0] != "vl"}
        if min(gaps.values()) > 0:
            leads.append(min(gaps.values()))
        if part.spec.recipe == "sgd":
            over_scaled += [gap for key, gap in gaps.items() if key[1] == "scaled"]
    assert len(leads) == 4
    for name in ("README", "docs/experiments"):
        page = " ".join(PAGES[name].read_text().split())
        told = f"its lead over the next best method is {min(leads):.3f} to {max(leads):.3f}, so it may be noise"
        told = f"In the four rows that VL wins, {told}"
        assert told in page
    least, most = min(over_scaled), max(over_scaled)
    told = f"Over temperature-scaled baselines the NLL lead is {least:.3f}–{most:.3f}, with one seed"
    assert told in PAGES["docs/experiments"].read_text()


def test_the_first_page_says_what_a_temperature_does_for_vl():
    page = " ".join(PAGES["docs/experiments"].read_text().split())
    told = re.search(
        r"lowers VL's own NLL by at most ([\d.]+), except with Adam at 1e-3 \(([\d.]+) → ([\d.]+)\)\. With the paper's "
        r"recipe it roughly halves VL's ECE \(([\d.]+) → ([\d.]+); ([\d.]+) → ([\d.]+)\)",
        page,
    )
    assert told is not None

    def pair(data: str, recipe: str, score: str) -> list[float]:
        choices = _sweep(200, data, recipe).choices()
        ways: tuple[Way, Way] = ("mean", "scaled")
        return [choices["vl", way].by_validation[0].test[way][score] for way in ways]

    gains = [before - after for before, after in (pair(d, r, "nll") for d in STORED for r in ("sgd", "paper"))]
    numbers = [max(gains), *pair("CIFAR-10", "ours", "nll")]
    numbers += [ece for data in STORED for ece in pair(data, "paper", "ece")]
    assert [f"{number:.3f}" for number in numbers] == list(told.groups())


@pytest.mark.parametrize("data", STORED)
def test_by_the_papers_recipe_vl_is_ahead_of_the_papers_rows_in_every_score_and_of_all_in_nll_and_accuracy(data: str):
    choices = _sweep(200, data, "paper").choices()
    ours = choices["vl", "mean"].by_validation[0].test["mean"]
    for (method, way), choice in choices.items():
        assert choice.num_trials == 1
        if method != "vl":
            theirs = choice.by_validation[0].test[way]
            assert ours["nll"] < theirs["nll"] - {"CIFAR-10": 0.0335, "Fashion-MNIST": 0.0285}[data]
            assert ours["accuracy"] > theirs["accuracy"]
            assert (ours["ece"] < theirs["ece"]) == (way != "scaled")
    nll, accuracy, ece = paper_numbers("table-1")[STORED[data]]["VL"]
    assert ours["nll"] < nll
    assert ours["accuracy"] > accuracy
    assert (ours["ece"] < ece) == (data == "CIFAR-10")
    section = _section(f"### {data}", _section("## The paper's recipe", DETAIL))
    told = re.search(r"[Ii]n NLL (?:is|VL leads by) ([\d.]+) over VI's samples and (?:by )?([\d.]+) over MAP", section)
    assert told is not None
    for key, number in zip((("vi", "sampled"), ("map", "mean")), told.groups(), strict=True):
        theirs = choices[key].by_validation[0].test[key[1]]
        assert theirs["nll"] - ours["nll"] == pytest.approx(float(number), abs=6e-4)


def test_on_fashion_mnist_by_the_papers_recipe_vl_with_a_temperature_is_ahead_in_every_score():
    choices = _sweep(200, "Fashion-MNIST", "paper").choices()
    ours = choices["vl", "scaled"].by_validation[0].test["scaled"]
    for (method, way), choice in choices.items():
        if method != "vl":
            theirs = choice.by_validation[0].test[way]
            assert ours["nll"] < theirs["nll"]
            assert ours["accuracy"] > theirs["accuracy"]
            assert ours["ece"] < theirs["ece"]
    section = _section("### Fashion-MNIST", _section("## The paper's recipe", DETAIL))
    told = re.search(
        r"held-out NLL, ([\d.]+) and ([\d.]+) after 104 epochs, ends at ([\d.]+) and ([\d.]+); "
        r"VL's goes from ([\d.]+) to ([\d.]+)\.",
        section,
    )
    assert told is not None
    sweep = _sweep(200, "Fashion-MNIST", "paper")
    of_map, vi, vl = (sweep.of(method)[0].history for method in ("map", "vi", "vl"))
    rows = [of_map[103], vi[103], of_map[-1], vi[-1], vl[103], vl[-1]]
    assert [f"{row['validation_nll']:.3f}" for row in rows] == list(told.groups())


def test_what_the_page_says_of_training_and_held_out_images_by_the_papers_recipe_is_so():
    told = re.search(
        r"to an NLL of ([\d.]+) and ([\d.]+) at the end, and their held-out NLL rises, from ([\d.]+) and ([\d.]+) "
        r"after 104 epochs to ([\d.]+) and ([\d.]+)\. VL stops at ([\d.]+), and its held-out NLL falls from ([\d.]+) "
        r"to ([\d.]+)\.",
        DETAIL,
    )
    assert told is not None
    sweep = _sweep(200, recipe="paper")
    of_map, vi, vl = (sweep.of(method)[0].history for method in ("map", "vi", "vl"))
    said = [-of_map[-1]["log_likelihood"], -vi[-1]["log_likelihood"]]
    said += [run[epoch]["validation_nll"] for epoch in (103, -1) for run in (of_map, vi)]
    said += [-vl[-1]["log_likelihood"], vl[103]["validation_nll"], vl[-1]["validation_nll"]]
    assert [f"{number:.3f}" for number in said] == list(told.groups())


def test_what_the_page_says_of_the_commits_of_the_runs_is_so():
    commits = [str(result.origin.get("commit", "none")) for result in Store(RESULTS)]
    num_without, num_changed = commits.count("none"), sum("dirty" in commit for commit in commits)
    assert (
        f"Of the {len(commits)} files {num_without}, the sweep of 50 epochs on CIFAR-10, are from before commits were "
        f"recorded, and {num_changed} name a commit with changes"
    ) in (ROOT / "results" / "README.md").read_text()


@pytest.mark.parametrize("data", STORED)
def test_by_sgd_vl_is_ahead_in_every_score_of_every_row_that_is_not_its_own(data: str):
    choices = _sweep(200, data, "sgd").choices()
    (vl,) = choices["vl", "mean"].by_validation
    ours = vl.test["mean"]
    for (method, way), choice in choices.items():
        assert choice.num_trials == 2 or (data, method, way) == ("Fashion-MNIST", "vl", "linearised")
        assert choice.beta == choice.by_test[0].spec.beta
        if method == "vl":
            continue
        (run,) = choice.by_validation
        theirs = run.test[way]
        assert ours["nll"] < theirs["nll"]
        assert ours["accuracy"] > theirs["accuracy"]
        assert ours["ece"] < theirs["ece"]
        assert way in ("scaled", "linearised") or theirs["nll"] - ours["nll"] > 0.0705
    nll, accuracy, ece = paper_numbers("table-1")[STORED[data]]["VL"]
    assert ours["nll"] < nll
    assert ours["accuracy"] > accuracy
    assert ours["ece"] < ece


def test_the_leads_by_sgd_that_the_page_calls_noise_are_so_small():
    cifar, fashion = (_sweep(200, data, "sgd").choices() for data in STORED)

    def score(choices: dict[Key, Choice], key: Key, name: str) -> float:
        return choices[key].by_validation[0].test[key[1]][name]

    ours, vis = (score(cifar, key, "accuracy") for key in (("vl", "mean"), ("vi", "scaled")))
    assert ours - vis < (ours * (1 - ours) / 10_000) ** 0.5
    assert f"the accuracy lead on CIFAR-10 is {100 * (ours - vis):.2f} points (below one standard error)" in DETAIL
    eces = [score(fashion, key, "ece") for key in (("vl", "mean"), ("vi", "scaled"))]
    assert f"the ECE lead on Fashion-MNIST ({eces[0]:.3f} vs {eces[1]:.3f}) is within sampling noise" in DETAIL
    assert f"its lead in accuracy over temperature-scaled VI is {10_000 * (ours - vis):.0f} of 10,000 images" in (
        PAGES["README"].read_text()
    )


def test_a_calibrated_classifier_has_the_ece_that_the_page_says():
    generator = np.random.default_rng(0)
    eces: dict[float, list[float]] = {0.07: [], 0.12: [], 1.0: []}
    for shape, found in eces.items():  # of Beta distributions with a mean of 94 %
        for _ in range(100):
            confidence = generator.beta(17 * shape, shape, 10_000)
            right = generator.random(10_000) < confidence
            bins = np.minimum((15 * confidence).astype(int), 14)
            gaps = np.bincount(bins, confidence - right, minlength=15)
            found.append(float(np.abs(gaps).sum()) / 10_000)
    means, spreads = ([of(each) for each in eces.values()] for of in (statistics.fmean, statistics.stdev))
    assert spreads == pytest.approx([0.001] * 3, abs=5e-4)
    told = f"of 94 % accuracy scores about {min(means):.3f} to {max(means):.3f}, ± 0.001"
    assert told in DETAIL


def test_what_the_page_says_of_vls_own_variances_is_so():
    shares = []
    for recipe, data in itertools.product(("sgd", "paper"), STORED):
        choices = _sweep(200, data, recipe).choices()
        assert choices["vl", "linearised"].by_validation[0].test["linearised"]["laplace_beta"] == 3e-5
        shares.append(100 * choices["vl", "mean"].by_validation[0].history[-1]["share_at_prior"])
    sgd, sgd_fashion, paper, paper_fashion = (f"{share:.0f}" for share in shares)
    assert f"{sgd} and {sgd_fashion} % of its σ have grown to the prior's scale" in DETAIL
    assert f"With the paper's recipe it is the same ({paper} and {paper_fashion} %)" in DETAIL


def test_what_the_page_says_of_a_stronger_prior_for_map_by_sgd_is_so():
    told = re.search(
        r"lowers the NLL \(([\d.]+) to ([\d.]+), and ([\d.]+) to ([\d.]+)\) and costs accuracy "
        r"\(([\d.]+) to ([\d.]+) %, and ([\d.]+) to ([\d.]+) %\)",
        DETAIL,
    )
    assert told is not None
    runs = [_sweep(200, data, "sgd").of("map") for data in STORED]
    scores = [
        sorted((run.spec.beta, run.test["mean"]["nll"], 100 * run.test["mean"]["accuracy"]) for run in of)
        for of in runs
    ]
    nlls, accuracies = ([f"{row[1]:.3f}" for of in scores for row in of], [f"{r[2]:.1f}" for of in scores for r in of])
    assert list(told.groups()) == [*nlls, *accuracies]


def test_what_the_page_says_of_maps_short_trainings_by_sgd_is_so():
    told = re.search(
        r"after 30 epochs of its own schedule it has ([\d.]+) on CIFAR-10 and ([\d.]+) on Fashion-MNIST, "
        r"temperature-scaled ([\d.]+) and ([\d.]+)\.",
        DETAIL,
    )
    assert told is not None
    for way, numbers in (("mean", told.groups()[:2]), ("scaled", told.groups()[2:])):
        for data, number in zip(STORED, numbers, strict=True):
            choice = _sweep(30, data, "sgd").choices()["map", way]
            assert choice.num_trials == 3
            assert choice.by_validation[0].test[way]["nll"] == pytest.approx(float(number), abs=5.1e-4)


def test_what_the_page_says_about_choosing_by_test_images_is_so():
    choices = _sweep().choices()
    for key, choice in choices.items():
        assert (choice.beta == choice.by_test[0].spec.beta) == (key[1] != "scaled"), key
    best = {key[0]: choice.by_test[0] for key, choice in choices.items() if key[1] == "scaled"}
    told = re.search(r"would have chosen ([\d.]+) for MAP \(([\d.]+)\) and ([\d.]+) for VL \(([\d.]+)\)", DETAIL)
    assert told is not None
    for method, beta, nll in (("map", *told.groups()[:2]), ("vl", *told.groups()[2:])):
        assert best[method].spec.beta == float(beta)
        assert best[method].test["scaled"]["nll"] == pytest.approx(float(nll), abs=5.1e-4)


@pytest.mark.parametrize("epochs", [12, 25, 50, 100])
def test_the_best_beta_of_a_length_is_what_the_results_say(epochs: int):
    row = next(line for line in STUDIES.splitlines() if line.startswith(f"| {epochs} | "))
    beta, nll, temperature, at_first, map_beta, map_nll = map(float, row.split("|")[2:8])
    (sweep,) = [sweep for sweep in sweeps(Store(ROOT / "results" / "length")) if sweep.spec.epochs == epochs]
    choices = sweep.choices()
    vl, of_map = choices["vl", "mean"], choices["map", "mean"]
    (first,) = [run for run in sweep.of("vl") if run.spec.beta == 0.01]
    assert (vl.beta, of_map.beta, vl.num_trials, of_map.num_trials) == (beta, map_beta, 4, 4)
    told = {nll: vl.by_validation[0], at_first: first, map_nll: of_map.by_validation[0]}
    for number, run in told.items():
        assert run.test["mean"]["nll"] == pytest.approx(number, abs=5.1e-4)
    assert vl.by_validation[0].test["scaled"]["temperature"] == pytest.approx(temperature, abs=5.1e-3)


CHOICES: dict[str, tuple[str, dict[str, object]]] = {
    "MAP": ("map", {}),
    "MAP, β for its scaled predictions": ("map", {}),
    "MAP, β warm-up over the first 30 %": ("map", {"beta_warmup": 0.3}),
    "VI, mean network": ("vi", {}),
    "VI, 10 samples": ("vi", {}),
    "VI, 10 samples, β warm-up over the first 30 %": ("vi", {"beta_warmup": 0.3}),
    "VL, default settings": ("vl", {}),
    "VL, full gradient": ("vl", {"gradient": "whole"}),
    "VL, β warm-up over the first 30 %": ("vl", {"beta_warmup": 0.3}),
    "VL, variances in closed form, β warm-up": ("vl", {"variances": "closed-form"}),
    "VL, the same with the variance-reduced gradient": ("vl", {"variances": "closed-form", "gradient": "quiet"}),
    "VL, the exact curvature": ("vl", {"curvature": "exact"}),
    "VL, prior of scale 0.1": ("vl", {"prior_scale": 0.1}),
}


def _chosen(name: str) -> Choice:
    method, settings = CHOICES[name]
    usual = {
        "gradient": "held",
        "beta_warmup": None,
        "variances": "learnt",
        "curvature": "default",
        "prior_scale": None,
    }
    wanted = {"method": method, **usual, **settings}
    own = [r for r in Store(ROOT / "results" / "choices") if {n: getattr(r.spec, n) for n in wanted} == wanted]
    choice = choose(own, "scaled" if "scaled" in name else _way(name))
    assert choice is not None
    return choice


def _way(name: str) -> Way:
    """Return the way of predicting that the scores of a row are by."""
    return "sampled" if "10 samples" in name else "mean"


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_in_small_is_what_the_results_say(name: str):
    section = _section("## What VL needs")
    row = next(line for line in section.splitlines() if line.startswith(f"| {name} |"))
    beta, seeds, nll, accuracy, ece, scaled = (float(cell.strip(" *%")) for cell in row.split("|")[2:8])
    choice = _chosen(name)
    assert choice.beta == beta
    assert len(choice.by_validation) == seeds
    way = _way(name)
    told = {(way, "nll"): nll, (way, "accuracy"): accuracy / 100, (way, "ece"): ece, ("scaled", "nll"): scaled}
    for (way, score), number in told.items():
        assert number == pytest.approx(statistics.fmean(r.test[way][score] for r in choice.by_validation), abs=5.1e-4)


def test_what_the_page_says_of_vi_in_small_is_so():
    told = re.search(
        r"VL at its best is ([\d.]+) ahead of these \(([\d.]+), ([\d.]+) and ([\d.]+) for the three seeds\)\. Against "
        r"temperature-scaled VI it is ([\d.]+) behind, and with a temperature of its own ([\d.]+) ahead",
        STUDIES,
    )
    assert told is not None
    best, vi = (
        sorted(_chosen(name).by_validation, key=lambda run: run.spec.seed)
        for name in ("VL, variances in closed form, β warm-up", "VI, 10 samples")
    )

    def leads(ours: Way, theirs: Way) -> list[float]:
        return [b.test[theirs]["nll"] - a.test[ours]["nll"] for a, b in zip(best, vi, strict=True)]

    by_samples, behind, ahead = leads("mean", "sampled"), leads("mean", "scaled"), leads("scaled", "scaled")
    numbers = [statistics.fmean(by_samples), *by_samples, -statistics.fmean(behind), statistics.fmean(ahead)]
    assert list(told.groups()) == [f"{number:.3f}" for number in numbers]


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize("method", ["MAP", "MAP with a β warm-up", "VL"])
def test_averages_of_the_means_are_what_the_results_say(method: str, schedule: str):
    found = json.loads((ROOT / "results" / "quality" / "averaging.json").read_text())["summary"]
    section = _section("## Averaging the means")
    start = f"| {method}, {schedule} |"
    row = next(line for line in section.splitlines() if line.startswith(start)).replace("*", "")
    name = f"{method.replace('with a β warm-up', 'with a rising β')}, {schedule}"
    for cell, way in zip(row.split("|")[2:5], ("last", "exponential", "last quarter"), strict=True):
        scores = found[f"{name}, {way}"]
        assert scores["seeds"] == 3
        assert cell.strip() == f"{scores['nll']:.3f} / {scores['ece']:.3f}"


@pytest.mark.parametrize(("recipe", "method"), list(itertools.product(("ours", "sgd"), ("map", "vl"))))
def test_an_optimizer_in_small_is_what_the_results_say(recipe: str, method: str):
    own = [r for r in Store(ROOT / "results" / "optimizers") if (r.spec.recipe, r.spec.method) == (recipe, method)]
    start = f"| {'ours (Adam)' if recipe == 'ours' else 'sgd, first form'} | {method.upper()} |"
    row = next(line for line in _section("## SGD or Adam").splitlines() if line.startswith(start))
    beta, nll, accuracy, ece, scaled = (float(cell.strip(" %")) for cell in row.split("|")[3:8])
    choice = choose(own, "mean")
    assert choice is not None
    assert (choice.beta, choice.num_trials) == (beta, 2)
    (run,) = choice.by_validation
    assert nll == pytest.approx(run.test["mean"]["nll"], abs=5.1e-4)
    assert accuracy == pytest.approx(100 * run.test["mean"]["accuracy"], abs=0.051)
    assert ece == pytest.approx(run.test["mean"]["ece"], abs=5.1e-4)
    assert scaled == pytest.approx(run.test["scaled"]["nll"], abs=5.1e-4)


def test_where_vl_diverges_in_small_is_what_the_results_say():
    runs = json.loads((ROOT / "results" / "quality" / "stability.json").read_text())["runs"]
    found = {(run["curvature"], run["beta"], run["lr"], run["seed"]): run["training_nll"] for run in runs}
    lines = [line for line in _section("## Where VL diverges").splitlines() if line.startswith("| ")][2:]
    names = ("seldom", "seldom, quiet", "seldom, whole", "seldom, no memory", "the default", "exact")
    num_told = 0
    for name, line in zip(names, lines, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")[2:]]
        for where, cell in zip(((1.0, 2e-3, 0), (1.0, 2e-3, 1), (1.0, 1e-3, 0), (0.1, 2e-3, 0)), cells, strict=True):
            nlls = found.get((name, *where))
            if nlls is None:
                assert not cell
                continue
            assert cell.strip("*") == (f"{nlls[-1]:.0f}" if nlls[-1] > 10 else f"{nlls[-1]:.2f}")
            assert cell.startswith("**") == (max(nlls) > 20)
            num_told += 1
    assert num_told == len(runs) == 16
