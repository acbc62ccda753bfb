"""The page on speed, and the README, say what the committed measurements say."""

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "bench"
pytestmark = pytest.mark.skipif(not RESULTS.is_dir(), reason="the results are not part of a source distribution")
PAGE = (ROOT / "docs" / "performance.md").read_text() if RESULTS.is_dir() else ""

ON_GPU = {
    "MAP": "MAP, Adam on the means",
    "plain torch loop": "an ordinary training loop",
    "VI": "VI",
    "VL exact": "VL exact: ",
    "VL default": "VL default",
    "VL exact, own loop": "VL exact in a loop of your own",
    "obvious double backward": "Eq. 30 as one would first write it",
}
ON_CPU = ON_GPU | {"MAP": "MAP", "VL exact": "VL exact |", "VL exact, own loop": "VL exact, a loop of your own"}


def _result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def _cells(section: str, start: str) -> list[str]:
    """Return the cells of the table's row that begins so, without marks."""
    rows = (line.replace("*", "") for line in PAGE.partition(f"## {section}")[2].splitlines())
    row = next(line for line in rows if line.startswith(f"| {start}"))
    return [cell.strip() for cell in row.split("|")[2:-1]]


def _number(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-").removesuffix(" MB").removesuffix(" %"))


def _agrees(text: str, value: float) -> bool:
    """Tell whether a number is the value, rounded to the digits that it has."""
    plain = text.replace(",", "").replace("−", "-").split(" ")[0]
    digits = len(plain.partition(".")[2])
    return abs(_number(text) - value) <= 0.51 * 10**-digits


@pytest.mark.parametrize("method", ON_GPU)
def test_a_step_on_the_gpu_is_as_measured(method: str):
    measured = _result("step-h200.json")["methods"][method]
    ms, ratio, memory = _cells("NVIDIA H200", ON_GPU[method])
    assert _agrees(ms, measured["median_ms"])
    assert _agrees(ratio, measured["ratio_to_map"])
    assert not memory or _agrees(memory, measured["peak_memory_mb"])


@pytest.mark.parametrize("method", ON_CPU)
def test_a_step_on_the_cpu_is_as_measured(method: str):
    measured = _result("step-cpu.json")["methods"][method]
    ms, ratio = _cells("CPU, small convnet", ON_CPU[method])
    assert _agrees(ms, measured["median_ms"])
    assert _agrees(ratio, measured["ratio_to_map"])


@pytest.mark.parametrize(
    ("mlp", "file"),
    {
        "784-100-100-10": "step-small-mlp-cpu.json",
        "784-800-800-10": "step-wide-mlp-cpu.json",
        "784-800-800-10, glibc as is": "step-wide-mlp-cpu-usual-malloc.json",
    }.items(),
)
def test_dense_layers_cost_what_was_measured(mlp: str, file: str):
    assert bool(_result(file)["origin"]["malloc"]) == ("glibc" not in mlp)
    times = {name: method["median_ms"] for name, method in _result(file)["methods"].items()}
    ordinary, *ratios = _row_after("**Dense layers cost more**", f"{mlp} |")
    assert _agrees(ordinary, times["plain torch loop"])
    for told, name in zip(ratios, ("MAP", "VI", "VL default", "VL exact", "obvious double backward"), strict=True):
        assert _agrees(told.removesuffix(" ×"), times[name] / times["plain torch loop"])


def test_growth_is_as_measured():
    for result in _result("growth-cpu.json")["results"]:
        spec, methods = result["spec"], result["methods"]
        start = f"{spec['batch_size']} | {spec['width']} | {spec['depth']} |"
        _, _, ms, exact, default = _cells("CPU, small convnet", start)
        assert _agrees(ms, methods["MAP"]["median_ms"])
        assert _agrees(exact, methods["VL exact"]["ratio_to_map"])
        assert _agrees(default, methods["VL default"]["ratio_to_map"])


def test_the_readme_has_the_same_step():
    row = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| a training step"))
    told = re.findall(r"([\d.]+) (?:ms|×)", row)
    methods = _result("step-h200.json")["methods"]
    vl, exact = methods["VL default"], methods["VL exact"]
    expected = (methods["MAP"]["median_ms"], vl["median_ms"], vl["ratio_to_map"], exact["median_ms"])
    expected += (exact["ratio_to_map"], methods["obvious double backward"]["median_ms"])
    assert all(_agrees(text, value) for text, value in zip(told, expected, strict=True))
    earlier = _result("step-h200-all-methods.json")["methods"]["obvious double backward"]["median_ms"]
    assert f"{earlier:.0f}–{methods['obvious double backward']['median_ms']:.0f} ms" in row


def test_cosines_of_bfloat16_are_as_measured():
    gpu, cpu = _result("precision-h200.json"), _result("precision-cpu.json")["after_training"]
    told = PAGE.partition("bfloat16 against single precision")[2].partition("\n\n")[0]
    expected = [*gpu["at_initialisation"].values(), gpu["after_training"]["log_likelihood"]]
    expected += [gpu["after_training"]["curvature"], cpu["log_likelihood"], cpu["curvature"]]
    numbers = re.findall(r"\b0\.99\d+", told)
    assert len(numbers) == len(expected)
    assert all(_agrees(text, value) for text, value in zip(numbers, expected, strict=True))


CIFAR = "**CIFAR-10 without augmentation**"
FASHION = "**Fashion-MNIST, 10,000 images**"


@pytest.mark.parametrize(("row", "method"), {"MAP": "map", "VL exact": "vl-exact", "VL default": "vl-default"}.items())
def test_quality_of_each_seed_is_as_measured(row: str, method: str):
    result = _result("quality/cifar10-25-epochs-no-augmentation.json")
    runs = {run["seed"]: run for run in result["runs"] if run["method"] == method}
    *seeds, difference = _row_after(CIFAR, row)
    for seed, cell in enumerate(seeds):
        assert bool(cell) == (seed in runs)
        if cell:
            nll, accuracy, ece = cell.split(" / ")
            assert _agrees(nll, runs[seed]["nll"])
            assert _agrees(accuracy, 100 * runs[seed]["accuracy"])
            assert _agrees(ece, runs[seed]["ece"])
    _check_difference(difference, result["summary"][f"{method}, beta 0.01"])


def test_quality_of_a_sixteenth_in_every_step_is_as_measured():
    runs = _result("quality/cifar10-25-epochs-no-augmentation-every-1.json")["runs"]
    assert [run["seed"] for run in runs] == [0, 1]
    told = (f"{run['nll']:.3f} / {100 * run['accuracy']:.1f} % / {run['ece']:.3f}" for run in runs)
    assert " and ".join(told) in PAGE


def test_a_curvature_in_every_eighth_step_is_as_far_behind_the_default_as_the_page_says():
    seldom, default = (
        [
            run["nll"]
            for run in _result(f"quality/cifar10-25-epochs-no-augmentation{name}.json")["runs"]
            if (run["method"], run["beta"]) == (method, 0.01) and run["seed"] < 2
        ]
        for name, method in (("-every-8", "vl-every-8"), ("", "vl-default"))
    )
    assert len(seldom) == len(default) == 2
    gap = statistics.fmean(seldom) - statistics.fmean(default)
    assert f"but {gap:.3f} worse than the default above (same two seeds)" in PAGE


@pytest.mark.parametrize(("row", "method"), {"MAP": "map", "VL exact": "vl-exact", "VL default": "vl-default"}.items())
def test_quality_over_the_seeds_is_as_measured(row: str, method: str):
    summary = _result("quality/fashion-mnist-10000-convnet.json")["summary"][f"{method}, beta 0.1"]
    nll, accuracy, ece, difference = _row_after(FASHION, row)
    assert _agrees(nll, summary["nll"])
    assert _agrees(accuracy, 100 * summary["accuracy"])
    assert _agrees(ece, summary["ece"])
    _check_difference(difference, summary)


def _row_after(start: str, name: str) -> list[str]:
    rows = PAGE.partition(start)[2].splitlines()
    row = next(line for line in rows if line.startswith(f"| {name}"))
    return [cell.strip() for cell in row.split("|")[2:-1]]


def _check_difference(text: str, summary: dict[str, float]) -> None:
    assert bool(text) == ("nll_minus_exact" in summary)
    if text:
        difference, error = text.split(" ± ")
        assert _agrees(difference, summary["nll_minus_exact"])
        assert _agrees(error, summary["standard_error"])


def test_an_epoch_and_its_steps_alone_are_as_measured():
    (stored,) = (ROOT / "results" / "table-2").glob("cifar10-map-*.json")
    run = json.loads(stored.read_text())
    epoch = statistics.median(row["seconds"] for row in run["history"][1:])
    num_steps = math.ceil(50_000 / run["spec"]["batch_size"])
    steps = _result("step-h200.json")["methods"]
    of_map, vi, vl = (num_steps * steps[name]["median_ms"] / 1e3 for name in ("MAP", "VI", "VL exact"))
    told = f"takes MAP {epoch:.2f} s](experiments-in-detail.md#table-2-time-per-epoch), its steps alone {of_map:.2f} s."
    assert told in PAGE
    told = f"are {of_map:.2f} s of MAP's epoch, {vi:.2f} of VI's and {vl:.2f} of VL's, the {num_steps}st"
    assert told in (ROOT / "docs" / "experiments-in-detail.md").read_text()
