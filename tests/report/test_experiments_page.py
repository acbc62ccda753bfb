"""The page of the paper's experiments says what the committed results say."""

import itertools
import json
import re
import statistics
from pathlib import Path

import pytest

from varlap.experiments import Store
from varlap.experiments.choice import Choice, choose
from varlap.experiments.final_line import recorded
from varlap.experiments.grid import paper_numbers
from varlap.experiments.ways import Key
from varlap.report.sweeps import Sweep, sweeps

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "paper"
PAGE = (ROOT / "docs" / "experiments.md").read_text() if RESULTS.is_dir() else ""
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="the results are not part of a source distribution")
SWEEP: dict[str, Key] = {
    "VL": ("vl", "mean"),
    "VI, mean network": ("vi", "mean"),
    "VI, 10 samples": ("vi", "sampled"),
    "MAP": ("map", "mean"),
    "MAP with a temperature, 1.62": ("map", "scaled"),
    "VL with a temperature, 1.02": ("vl", "scaled"),
}
FASHION: dict[str, Key] = {
    "VL": ("vl", "mean"),
    "VI, mean network": ("vi", "mean"),
    "VI, 10 samples": ("vi", "sampled"),
    "MAP": ("map", "mean"),
    "MAP with a temperature, 1.31": ("map", "scaled"),
    "VL with a temperature, 1.13": ("vl", "scaled"),
}


def _rows_of_all_ways(of_map: float, of_vi: float, of_vl: float) -> dict[str, Key]:
    """Return the rows of a table by their names, in which the temperatures are."""
    return {
        "VL": ("vl", "mean"),
        "VI, mean network": ("vi", "mean"),
        "VI, 10 samples": ("vi", "sampled"),
        "MAP": ("map", "mean"),
        f"MAP with a temperature, {of_map}": ("map", "scaled"),
        "MAP, linearised Laplace": ("map", "linearised"),
        f"VI with a temperature, {of_vi}": ("vi", "scaled"),
        f"VL with a temperature, {of_vl}": ("vl", "scaled"),
        "VL, linearised": ("vl", "linearised"),
    }


TABLES = {
    ("CIFAR-10", 50): SWEEP,
    ("CIFAR-10", 200): _rows_of_all_ways(2.81, 3.06, 1.36),
    ("Fashion-MNIST", 50): FASHION,
}
PARTS = [(*table, name, key) for table, rows in TABLES.items() for name, key in rows.items()]
BY_SGD: dict[str, dict[str, Key]] = {
    data: _rows_of_all_ways(of_map, of_vi, of_vl)
    for data, of_map, of_vi, of_vl in (("CIFAR-10", 2.72, 4.04, 0.92), ("Fashion-MNIST", 1.92, 1.96, 0.99))
}
BY_THE_PAPER: dict[str, dict[str, Key]] = {
    data: _rows_of_all_ways(of_map, of_vi, of_vl)
    for data, of_map, of_vi, of_vl in (("CIFAR-10", 2.04, 3.31, 0.85), ("Fashion-MNIST", 2.26, 3.07, 1.21))
}
STORED = {"CIFAR-10": "cifar10", "Fashion-MNIST": "fashion_mnist"}


def _sweep(epochs: int = 50, data: str = "CIFAR-10", recipe: str = "ours") -> Sweep:
    store = Store(RESULTS)
    (sweep,) = [
        sweep
        for sweep in sweeps(store, recorded(store))
        if (sweep.spec.data, sweep.spec.recipe, sweep.spec.epochs) == (STORED[data], recipe, epochs)
    ]
    return sweep


def _section(start: str) -> str:
    return PAGE.partition(start)[2].partition("\n### ")[0]


@pytest.mark.parametrize(("data", "epochs", "name", "key"), PARTS)
def test_a_row_of_the_page_is_what_the_results_say(data: str, epochs: int, name: str, key: Key):
    _check_row(_section(f"### {data}, our recipe, {epochs} epochs"), name, key, _sweep(epochs, data))


@pytest.mark.parametrize(("data", "name", "key"), [(data, *row) for data in BY_SGD for row in BY_SGD[data].items()])
def test_a_row_by_sgd_is_what_the_results_say(data: str, name: str, key: Key):
    section = _section("### SGD, 200 epochs").partition(f"\n{data}:\n")[2]
    _check_row(section, name, key, _sweep(200, data, "sgd"))


@pytest.mark.parametrize(
    ("data", "name", "key"), [(data, *row) for data in BY_THE_PAPER for row in BY_THE_PAPER[data].items()]
)
def test_a_row_by_the_papers_recipe_is_what_the_results_say(data: str, name: str, key: Key):
    section = _section("### The paper's recipe, 200 epochs").partition(f"\n{data}:\n")[2]
    _check_row(section, name, key, _sweep(200, data, "paper"))


@pytest.mark.parametrize("data", BY_THE_PAPER)
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
    section = _section("### The paper's recipe, 200 epochs").partition(f"\n{data}:\n")[2]
    told = re.search(r"in NLL (?:is|by) ([\d.]+) over VI's samples and (?:by )?([\d.]+) over MAP", section)
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
    section = _section("### The paper's recipe, 200 epochs")
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
        PAGE,
    )
    assert told is not None
    sweep = _sweep(200, recipe="paper")
    of_map, vi, vl = (sweep.of(method)[0].history for method in ("map", "vi", "vl"))
    said = [-of_map[-1]["log_likelihood"], -vi[-1]["log_likelihood"]]
    said += [run[epoch]["validation_nll"] for epoch in (103, -1) for run in (of_map, vi)]
    said += [-vl[-1]["log_likelihood"], vl[103]["validation_nll"], vl[-1]["validation_nll"]]
    assert [f"{number:.3f}" for number in said] == list(told.groups())


def test_the_times_of_an_epoch_are_what_the_results_say():
    (sweep,) = sweeps(Store(ROOT / "results" / "table-2"))
    (of_map,) = sweep.of("map")
    papers = paper_numbers("table-2")["cifar10"]
    for method, name in (("vl", "VL, exact curvature"), ("vi", "VI"), ("map", "MAP")):
        (run,) = sweep.of(method)
        row = next(line for line in _section("#### Table 2").splitlines() if line.startswith(f"| {name} |"))
        seconds, ratio, theirs, their_ratio = (float(cell) for cell in row.split("|")[2:6])
        assert run.seconds_per_epoch == pytest.approx(seconds, abs=5.1e-3)
        assert run.seconds_per_epoch / of_map.seconds_per_epoch == pytest.approx(ratio, abs=5.1e-3)
        assert papers[name[:3].strip(",")] == theirs
        assert theirs / papers["MAP"] == pytest.approx(their_ratio, abs=5.1e-3)


def _check_row(section: str, name: str, key: Key, sweep: Sweep) -> None:
    row = next(line for line in section.splitlines() if line.replace("*", "").startswith(f"| {name} |"))
    beta, nll, _, accuracy, _, ece, _, auroc = (cell.strip(" *%") for cell in row.split("|")[2:10])
    choice = sweep.choices()[key]
    (run,) = choice.by_validation
    scores = run.test[key[1]]
    assert float(beta) == choice.beta
    assert float(nll) == pytest.approx(scores["nll"], abs=5.1e-4)
    assert float(accuracy) == pytest.approx(100 * scores["accuracy"], abs=0.051)
    assert float(ece) == pytest.approx(scores["ece"], abs=5.1e-4)
    assert float(auroc) == pytest.approx(scores["ood_auroc_entropy"], abs=5.1e-4)
    if key[1] == "scaled":
        assert f"{scores['temperature']:.2f}" in name


def test_what_the_page_says_of_the_commits_of_the_runs_is_so():
    commits = [str(result.origin.get("commit", "none")) for result in Store(RESULTS)]
    num_without, num_changed = commits.count("none"), sum("dirty" in commit for commit in commits)
    assert (
        f"Of the {len(commits)} files {num_without}, the sweep on CIFAR-10, are from before\n"
        f"commits were recorded, and {num_changed} name a commit with changes"
    ) in PAGE


GLANCE = {
    ("CIFAR-10", "SGD"): "sgd",
    ("CIFAR-10", "paper's recipe"): "paper",
    ("CIFAR-10", "Adam at 1e-3"): "ours",
    ("Fashion-MNIST", "SGD"): "sgd",
    ("Fashion-MNIST", "paper's recipe"): "paper",
}


@pytest.mark.parametrize(("data", "name"), GLANCE)
def test_the_table_at_a_glance_is_what_the_results_say(data: str, name: str):
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {data}, [{name}]"))
    choices = _sweep(200, data, GLANCE[data, name]).choices()
    scores = [
        choices[key].by_validation[0].test[key[1]]
        for key in (("vl", "mean"), ("map", "mean"), ("map", "scaled"), ("vi", "mean"))
    ]
    expected = [f"{s['nll']:.3f} / {100 * s['accuracy']:.1f} % / {s['ece']:.3f}" for s in scores]
    nll, accuracy, ece = paper_numbers("table-1")[STORED[data]]["VL"]
    expected.append(f"{nll:.2f} / {100 * accuracy:.1f} % / {ece:.3f}")
    assert [cell.strip() for cell in row.replace("*", "").split("|")[2:7]] == expected
    cells = [cell.strip() for cell in row.split("|")[2:6]]
    for position, best in enumerate((min, max, min)):
        numbers = [float(cell.split(" / ")[position].strip("*% ")) for cell in cells]
        assert [_is_bold(cell, position) for cell in cells] == [number == best(numbers) for number in numbers]


def _is_bold(cell: str, position: int) -> bool:
    """Tell whether a part of a cell, such as the 2 of "**1 / 2** / 3", is within double stars."""
    upto = " / ".join(cell.split(" / ")[: position + 1]).removesuffix("**")
    return upto.count("**") % 2 == 1


WHICH_METHOD = {
    "SGD, 200 epochs": ("sgd", 200),
    "paper's recipe, 200 epochs": ("paper", 200),
    "Adam, 200 epochs": ("ours", 200),
    "Adam, 50 epochs": ("ours", 50),
    "SGD, 30 epochs": ("sgd", 30),
}


def test_the_table_of_vl_against_map_with_a_temperature_has_every_study_and_its_numbers():
    lines = (ROOT / "docs" / "which-method.md").read_text().splitlines()
    rows = [line.strip() for line in lines if line.strip().startswith(("| CIFAR-10, ", "| Fashion-MNIST, "))]
    told = {}
    for row in rows:
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        data, _, study = name.partition(", ")
        recipe, epochs = WHICH_METHOD[study]
        told[STORED[data], recipe, epochs] = True
        choices = _sweep(epochs, data, recipe).choices()
        for key, cell in zip(
            (("vl", "mean"), ("map", "mean"), ("map", "scaled"), ("vi", "sampled")), cells, strict=True
        ):
            if key not in choices:
                assert not cell
                continue
            scores = choices[key].by_validation[0].test[key[1]]
            assert cell.replace("*", "") == f"{scores['nll']:.3f} / {scores['ece']:.3f}", (name, key)
        cells = [cell for cell in cells if cell]
        for position in (0, 1):
            numbers = [float(cell.split(" / ")[position].strip("*")) for cell in cells]
            assert [_is_bold(cell, position) for cell in cells] == [number == min(numbers) for number in numbers], name
    both = {
        (sweep.spec.data, sweep.spec.recipe, sweep.spec.epochs): True
        for sweep in sweeps(Store(RESULTS), recorded(Store(RESULTS)))
        if {("vl", "mean"), ("map", "scaled")} <= set(sweep.choices())
    }
    assert told == both


def test_every_choice_of_the_results_has_its_row():
    for (data, epochs), rows in TABLES.items():
        assert set(_sweep(epochs, data).choices()) == set(rows.values())
    for data, rows in BY_SGD.items():
        assert set(_sweep(200, data, "sgd").choices()) == set(rows.values())
    for data, rows in BY_THE_PAPER.items():
        assert set(_sweep(200, data, "paper").choices()) == set(rows.values())


@pytest.mark.parametrize("data", BY_SGD)
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


def test_what_the_page_says_of_a_stronger_prior_for_map_by_sgd_is_so():
    told = re.search(
        r"lowers the NLL \(([\d.]+) to ([\d.]+), and ([\d.]+) to ([\d.]+)\) and costs accuracy "
        r"\(([\d.]+) to ([\d.]+) %, and ([\d.]+) to ([\d.]+) %\)",
        PAGE,
    )
    assert told is not None
    runs = [_sweep(200, data, "sgd").of("map") for data in BY_SGD]
    scores = [
        sorted((run.spec.beta, run.test["mean"]["nll"], 100 * run.test["mean"]["accuracy"]) for run in of)
        for of in runs
    ]
    nlls, accuracies = ([f"{row[1]:.3f}" for of in scores for row in of], [f"{r[2]:.1f}" for of in scores for r in of])
    assert list(told.groups()) == [*nlls, *accuracies]


def test_what_the_page_says_of_maps_short_trainings_by_sgd_is_so():
    told = re.search(
        r"after 30 epochs of its own schedule it has ([\d.]+) on CIFAR-10 and ([\d.]+) on Fashion-MNIST, with a "
        r"temperature ([\d.]+) and ([\d.]+)\.",
        PAGE,
    )
    assert told is not None
    for way, numbers in (("mean", told.groups()[:2]), ("scaled", told.groups()[2:])):
        for data, number in zip(BY_SGD, numbers, strict=True):
            choice = _sweep(30, data, "sgd").choices()["map", way]
            assert choice.num_trials == 3
            assert choice.by_validation[0].test[way]["nll"] == pytest.approx(float(number), abs=5.1e-4)


def test_what_the_page_says_about_choosing_by_test_images_is_so():
    choices = _sweep().choices()
    for key in SWEEP.values():
        assert (choices[key].beta == choices[key].by_test[0].spec.beta) == (key[1] != "scaled"), key
    best = {key[0]: choices[key].by_test[0] for key in SWEEP.values() if key[1] == "scaled"}
    told = re.search(r"would have chosen ([\d.]+) for MAP \(([\d.]+)\) and ([\d.]+) for VL \(([\d.]+)\)", PAGE)
    assert told is not None
    for method, beta, nll in (("map", *told.groups()[:2]), ("vl", *told.groups()[2:])):
        assert best[method].spec.beta == float(beta)
        assert best[method].test["scaled"]["nll"] == pytest.approx(float(nll), abs=5.1e-4)


@pytest.mark.parametrize("epochs", [12, 25, 50, 100])
def test_the_best_beta_of_a_length_is_what_the_results_say(epochs: int):
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {epochs} | "))
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
    "MAP, β rises over the first 30 %": ("map", {"beta_warmup": 0.3}),
    "VL as it comes": ("vl", {}),
    "VL, whole gradient": ("vl", {"gradient": "whole"}),
    "VL, β rises over the first 30 %": ("vl", {"beta_warmup": 0.3}),
    "VL, variances in closed form, β rises": ("vl", {"variances": "closed-form"}),
    "VL, the same with the quiet gradient": ("vl", {"variances": "closed-form", "gradient": "quiet"}),
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
    choice = choose(own, "scaled" if "scaled" in name else "mean")
    assert choice is not None
    return choice


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_in_small_is_what_the_results_say(name: str):
    section = _section("### What it takes, in small")
    row = next(line for line in section.splitlines() if line.startswith(f"| {name} |"))
    beta, seeds, nll, accuracy, ece, scaled = (float(cell.strip(" *%")) for cell in row.split("|")[2:8])
    choice = _chosen(name)
    assert choice.beta == beta
    assert len(choice.by_validation) == seeds
    told = {("mean", "nll"): nll, ("mean", "accuracy"): accuracy / 100, ("mean", "ece"): ece, ("scaled", "nll"): scaled}
    for (way, score), number in told.items():
        assert number == pytest.approx(statistics.fmean(r.test[way][score] for r in choice.by_validation), abs=5.1e-4)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize("method", ["MAP", "MAP with a rising β", "VL"])
def test_averages_of_the_means_are_what_the_results_say(method: str, schedule: str):
    name = f"{method}, {schedule}"
    found = json.loads((ROOT / "results" / "quality" / "averaging.json").read_text())["summary"]
    section = _section("### Averaging the means, in small")
    row = next(line for line in section.splitlines() if line.startswith(f"| {name} |")).replace("*", "")
    for cell, way in zip(row.split("|")[2:5], ("last", "exponential", "last quarter"), strict=True):
        scores = found[f"{name}, {way}"]
        assert scores["seeds"] == 3
        assert cell.strip() == f"{scores['nll']:.3f} / {scores['ece']:.3f}"


@pytest.mark.parametrize(("recipe", "method"), itertools.product(("ours", "sgd"), ("map", "vl")))
def test_an_optimizer_in_small_is_what_the_results_say(recipe: str, method: str):
    own = [r for r in Store(ROOT / "results" / "optimizers") if (r.spec.recipe, r.spec.method) == (recipe, method)]
    start = f"| {'ours (Adam)' if recipe == 'ours' else 'sgd, first form'} | {method.upper()} |"
    row = next(line for line in _section("### SGD instead of Adam").splitlines() if line.startswith(start))
    beta, nll, accuracy, ece, scaled = (float(cell.strip(" %")) for cell in row.split("|")[3:8])
    choice = choose(own, "mean")
    assert choice is not None
    assert (choice.beta, choice.num_trials) == (beta, 2)
    (run,) = choice.by_validation
    assert nll == pytest.approx(run.test["mean"]["nll"], abs=5.1e-4)
    assert accuracy == pytest.approx(100 * run.test["mean"]["accuracy"], abs=0.051)
    assert ece == pytest.approx(run.test["mean"]["ece"], abs=5.1e-4)
    assert scaled == pytest.approx(run.test["scaled"]["nll"], abs=5.1e-4)


@pytest.mark.parametrize(
    ("title", "data", "num_ended", "num_diverged"),
    [("### Figure 2 in small", "fashion_mnist", 16, 0), ("### Figure 2: variances", "cifar10", 9, 4)],
)
def test_early_stopping_is_what_the_results_say(title: str, data: str, num_ended: int, num_diverged: int):
    (sweep,) = [found for found in sweeps(Store(ROOT / "results" / "figure-2")) if found.spec.data == data]
    assert (len(sweep.results), len(sweep.diverged)) == (num_ended, num_diverged)
    runs = {(r.spec.beta, r.spec.log_sigma_lr_multiplier, r.spec.method): r for r in sweep.results}
    diverged = {(r.spec.beta, r.spec.log_sigma_lr_multiplier, r.spec.method) for r in sweep.diverged}
    lines = _section(title).splitlines()
    for beta, multiplier in itertools.product((1.0, 0.1), (1.0, 3.0, 10.0, 30.0)):
        row = next(line for line in lines if line.startswith(f"| {beta:g} | × {multiplier:g} |"))
        cells = [cell.strip(" %").replace("−", "-") for cell in row.split("|")[3:9]]
        for method, told in zip(("vl", "vi"), (cells[:3], cells[3:]), strict=True):
            key = beta, multiplier, method
            if key not in runs:
                assert told == ["diverged" if key in diverged else "not run", "", ""]
                continue
            elbo, nll, accuracy = map(float, told)
            assert runs[key].history[-1]["elbo"] == pytest.approx(elbo, abs=5.1e-4)
            assert runs[key].test["mean"]["nll"] == pytest.approx(nll, abs=5.1e-4)
            assert 100 * runs[key].test["mean"]["accuracy"] == pytest.approx(accuracy, abs=0.051)


def test_where_vl_diverges_in_small_is_what_the_results_say():
    runs = json.loads((ROOT / "results" / "quality" / "stability.json").read_text())["runs"]
    found = {(run["curvature"], run["beta"], run["lr"], run["seed"]): run["training_nll"] for run in runs}
    lines = [line for line in _section("### Where VL diverges, in small").splitlines() if line.startswith("| ")][2:]
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


@pytest.mark.parametrize(("data", "epochs"), TABLES)
def test_the_readme_has_the_same_numbers(data: str, epochs: int):
    readme = (ROOT / "README.md").read_text().splitlines()
    row = next(line for line in readme if f"{data}, crops and flips, {epochs} epochs" in line)
    choices = _sweep(epochs, data).choices()
    keys: list[Key] = [("vl", "mean"), ("map", "mean"), ("map", "scaled"), ("vi", "sampled")]
    keys += [("vl", "scaled"), ("vi", "scaled")] if epochs == 200 else []
    for key in keys:
        (run,) = choices[key].by_validation
        scores = run.test[key[1]]
        assert f"{scores['nll']:.3f} / {scores['ece']:.3f}" in row.replace("*", "")
        if key[0] == "map" or key[1] != "scaled":
            assert f"{100 * scores['accuracy']:.1f}" in row


@pytest.mark.parametrize("data", BY_SGD)
def test_the_readme_has_the_same_numbers_by_sgd(data: str):
    readme = (ROOT / "README.md").read_text().splitlines()
    row = next(line for line in readme if f"{data} by SGD, crops and flips, 200 epochs" in line).replace("*", "")
    choices = _sweep(200, data, "sgd").choices()
    keys = [key for key in BY_SGD[data].values() if key not in (("vl", "scaled"), ("vl", "linearised"))]
    for key in keys:
        (run,) = choices[key].by_validation
        scores = run.test[key[1]]
        assert f"{scores['nll']:.3f} / {scores['ece']:.3f}" in row
    for method in ("vl", "map", "vi"):
        assert f"{100 * choices[method, 'mean'].by_validation[0].test['mean']['accuracy']:.1f}" in row


@pytest.mark.parametrize("data", BY_THE_PAPER)
def test_the_readme_has_the_same_numbers_by_the_papers_recipe(data: str):
    readme = (ROOT / "README.md").read_text().splitlines()
    row = next(line for line in readme if f"{data} by the paper's own recipe" in line).replace("*", "")
    choices = _sweep(200, data, "paper").choices()
    for key in BY_THE_PAPER[data].values():
        scores = choices[key].by_validation[0].test[key[1]]
        assert key in (("vl", "scaled"), ("vl", "linearised")) or f"{scores['nll']:.3f} / {scores['ece']:.3f}" in row
    for method in ("vl", "map", "vi"):
        assert f"{100 * choices[method, 'mean'].by_validation[0].test['mean']['accuracy']:.1f}" in row


def test_the_readme_has_the_numbers_of_the_choices_in_small():
    readme = (ROOT / "README.md").read_text().splitlines()
    row = next(line for line in readme if "Fashion-MNIST images, 100 epochs, β tuned, three seeds" in line)
    for name, way in (
        ("VL, variances in closed form, β rises", "mean"),
        ("VL as it comes", "mean"),
        ("MAP", "mean"),
        ("MAP, β for its scaled predictions", "scaled"),
        ("MAP, β rises over the first 30 %", "mean"),
    ):
        runs = _chosen(name).by_validation
        nll, ece = (statistics.fmean(run.test[way][score] for run in runs) for score in ("nll", "ece"))
        assert f"{nll:.3f} / {ece:.3f}" in row, name
