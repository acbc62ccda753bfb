"""The page of a reproduction: the paper's numbers beside ours, β chosen honestly, and the same numbers everywhere."""

import dataclasses
import html
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from made_results import BEST, made_line, made_result, made_sweep
from varlap.cli import app
from varlap.cli.report import fitting
from varlap.errors import DataError
from varlap.experiments import Result, Store
from varlap.experiments.final_line import FinalRow, record
from varlap.experiments.grid import paper_numbers
from varlap.report.reproduction import read_sweeps, shared, tables, write_reproduction
from varlap.report.sweep_figures import figure_1, figure_2, over_epochs
from varlap.report.sweep_glance import at_a_glance, draw_at_a_glance
from varlap.report.sweep_notes import at_an_end, how_beta_was_chosen, what_is_best
from varlap.report.sweep_tables import table_1, table_2, table_of_all_ways, table_of_multipliers, table_of_runs
from varlap.report.sweeps import sweeps


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def _cells(table, row: str) -> dict[str, str]:
    (found,) = [each for each in table.rows if each.name == row]
    return {key: cell.shown for key, cell in found.cells.items()}


def test_table_1_has_the_papers_numbers_beside_ours_and_what_test_images_would_choose():
    (sweep,) = sweeps(made_sweep())
    table = table_1(sweep)
    assert table is not None
    assert [row.name for row in table.rows] == ["VL", "VI (mean)", "VI (10 samples)", "MAP"]
    vl = _cells(table, "VL")
    assert (vl["beta"], vl["test_beta"]) == ("0.1", "0.03")
    assert (vl["paper_nll"], vl["paper_accuracy"], vl["paper_ece"]) == ("0.23", "92.4", "0.017")
    assert float(vl["nll"]) == pytest.approx(0.3525, abs=6e-4)
    assert float(vl["test_nll"]) == pytest.approx(0.3225, abs=6e-4)
    assert (vl["test_accuracy"], vl["test_ece"]) == ("93.0", "0.021")
    assert not any(cell.best for row in table.rows for key, cell in row.cells.items() if key.startswith("test_"))
    headings = [column.heading for column in table.columns]
    assert headings[:5] == ["NLL ↓", "accuracy (%) ↑", "ECE ↓", "β", "paper's NLL"]  # what a phone shows comes first
    assert "Every row has had 3 trials" in how_beta_was_chosen(sweep)
    assert "'best values' and mentions no held-out set" in how_beta_was_chosen(sweep)


def test_numbers_of_another_network_have_none_of_the_papers_beside_them():
    (sweep,) = sweeps(made_sweep(model="mlp"))
    table = table_1(sweep)
    assert table is not None
    assert not [column.key for column in (*table.columns, *table_2(sweep).columns) if column.key.startswith("paper")]


def test_a_title_says_what_is_not_as_in_the_recipe():
    usual, other = sweeps([made_result("vl", 0.1), made_result("vl", 0.1, model="convnet", num_train=10_000, lr=3e-3)])
    assert usual.title == "CIFAR-10, paper's recipe, 4 epochs"
    told = "CIFAR-10, paper's recipe, 4 epochs, convnet, learning rate 0.003, 10,000 training images"
    assert other.title == told
    assert other.file_name == "cifar10-paper-recipe-4-epochs-model-convnet-lr-0-003-num-train-10000"
    (alone,) = sweeps([other.results[0]])
    assert alone.title == other.title


def test_the_chosen_runs_are_drawn_over_the_epochs():
    (sweep,) = sweeps(made_sweep())
    (drawn,) = over_epochs(sweep, "cifar10")
    assert drawn.name == "cifar10-over-epochs"
    for name in ("VL", "VI", "MAP"):
        assert name in drawn.picture.alt
    assert "VI, mean network 0.450" in drawn.picture.alt
    (untold,) = sweeps([dataclasses.replace(run, history=()) for run in made_sweep()])
    assert over_epochs(untold, "cifar10") == []


def test_at_a_glance_every_row_stands_at_its_scores_the_best_on_top_with_the_papers_four_beside():
    (sweep,) = sweeps([*made_sweep(), *made_sweep(seed=1)])
    table = table_of_all_ways(sweep)
    assert table is not None
    rows = sorted(table.rows, key=lambda row: -row.cells["nll"].value)
    papers = paper_numbers("table-1")["cifar10"]
    panels = draw_at_a_glance(sweep)
    assert [label.get_text() for label in panels[0].get_yticklabels()] == [row.name for row in rows]
    for number, (ax, score) in enumerate(zip(panels, ("nll", "accuracy", "ece"), strict=True)):
        marks = [(line.get_marker(), line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines]
        ours = [(x, y) for marker, x, y in marks if marker == "o"]
        assert ours == [(pytest.approx(row.cells[score].value), place) for place, row in enumerate(rows)]
        theirs = {rows[y].name: x for marker, x, y in marks if marker == "|"}
        assert theirs == {name: numbers[number] for name, numbers in papers.items()}
    (drawn,) = at_a_glance(sweep, "cifar10")
    assert drawn.name == "cifar10-at-a-glance"
    assert f"test NLL: {rows[-1].name} {rows[-1].cells['nll'].value:.3f}; " in drawn.picture.alt
    assert drawn.picture.caption == "Each row at the β that held-out images choose, the best NLL on top."
    (alone,) = sweeps([made_result(method, BEST[method]) for method in BEST])
    assert at_a_glance(alone, "cifar10")[0].picture.caption == "Each row at its one β, the best NLL on top."


def test_at_a_glance_another_networks_rows_stand_alone_and_one_row_is_not_drawn():
    (sweep,) = sweeps(made_sweep(model="mlp"))
    assert {line.get_marker() for line in draw_at_a_glance(sweep)[0].lines} == {"o"}
    (untold,) = sweeps([made_result("map", 0.1, validation=0.0)])
    assert at_a_glance(untold, "cifar10") == []


def test_final_runs_show_mean_and_error_over_seeds_and_nothing_chosen_by_test():
    (sweep,) = sweeps([made_result(method, BEST[method], seed=seed) for method in BEST for seed in range(3)])
    table = table_1(sweep)
    assert table is not None
    cell = table.rows[0].cells["nll"]
    assert cell.value == pytest.approx(0.3625)
    assert cell.shown_range == "± 0.006"  # 0.01/√3
    noted = [heading for heading, (_, note) in tables(sweep).items() if "±: the standard error over the runs" in note]
    assert noted == ["Every way of predicting", "Table 1"]  # the times have medians
    assert "test_nll" not in [column.key for column in table.columns]
    assert "which no finished sweep of all of them has chosen" in how_beta_was_chosen(sweep)  # as far as is known


def test_the_final_table_shows_exactly_the_runs_that_were_chosen_for_it():
    # Runs of another figure are better on held-out images, and of the right length; they were not chosen.
    final = [made_result("vl", 0.01, seed=seed) for seed in (0, 1, 2)]
    others = [made_result("vl", 0.1), made_result("vl", 0.01, log_sigma_lr_multiplier=1.0)]
    line = made_line({("vl", "mean"): 0.01, ("vl", "linearised"): 0.01})
    (sweep,) = sweeps([*final, *others], [line])
    table = table_1(sweep)
    assert table is not None
    assert [(row.name, row.num_runs) for row in table.rows] == [("VL", 2)]
    assert _cells(table, "VL")["beta"] == "0.01"
    expected = sum(run.test["mean"]["nll"] for run in final[:2]) / 2
    assert table.rows[0].cells["nll"].value == pytest.approx(expected)
    assert "test_nll" not in [column.key for column in table.columns]
    words = how_beta_was_chosen(sweep)
    assert "chosen before, by the NLL of held-out images in a sweep of 50 epochs over 0.01, 0.1 with seed 0: 2" in words
    assert "has not scored ‘VL, linearised’: the β there is that of the method's mean network" in words


def test_rows_that_several_sweeps_have_chosen_have_their_own_seeds_and_name_their_own_sweep():
    of_vl = made_line({("vl", "mean"): 0.1})
    line = dataclasses.replace(
        of_vl,
        seeds={**of_vl.seeds, "map": (0, 1, 2)},
        sweep_epochs={"vl": 50, "map": 20},
        sweep_betas={**of_vl.sweep_betas, "map": (0.1, 1.0)},
        sweep_seeds={**of_vl.sweep_seeds, "map": (0, 1)},
        rows=(*of_vl.rows, FinalRow("map", "mean", 0.1)),
    )
    runs = [made_result(method, 0.1, seed=seed) for method in ("vl", "map") for seed in range(3)]
    (sweep,) = sweeps(runs, [line])
    table = table_1(sweep)
    assert table is not None
    assert [(row.name, row.num_runs) for row in table.rows] == [("VL", 2), ("MAP", 3)]
    assert (
        "by the NLL of held-out images in a sweep of 50 epochs over 0.01, 0.1 with seed 0 (VL); a sweep of 20 epochs "
        "over 0.1, 1 with seeds 0, 1 (MAP): 2 trials of β for every row. No β here"
    ) in how_beta_was_chosen(sweep)


def test_a_final_line_of_another_length_says_nothing_about_a_sweep():
    line = made_line({("vl", "mean"): 0.01})
    (sweep,) = sweeps(made_sweep(num_epochs=20), [line])
    assert sweep.final is None
    assert "Every row has had 3 trials" in how_beta_was_chosen(sweep)


@pytest.mark.parametrize("seeds", [(0, 1), (1, 2)])  # with the sweep's seed among them, and without
@pytest.mark.parametrize("linearised", [True, False])  # of the sweep, which is in the same part of the page
def test_a_final_table_shows_nothing_that_test_images_would_choose(seeds: tuple[int, ...], linearised: bool):
    rows = {("vl", "mean"): 0.1, ("vl", "scaled"): 0.03}
    line = dataclasses.replace(made_line(rows, sweep_epochs=4), seeds={"vl": seeds})
    final = {result.spec: result for beta in rows.values() for result in [made_result("vl", beta, seed=seeds[0])]}
    swept = {result.spec: result for result in made_sweep(linearised=linearised)}
    (sweep,) = [sweep for sweep in sweeps((swept | final).values(), [line]) if sweep.final is not None]
    table = table_1(sweep)
    assert table is not None
    assert not [column.key for column in table.columns if column.key.startswith("test_")]
    assert not [key for row in table.rows for key in row.cells if key.startswith("test_")]
    assert "best on test" not in how_beta_was_chosen(sweep).lower()


def test_methods_without_final_runs_stay_in_the_tables_by_the_runs_that_are_there():
    line = made_line({("vl", "mean"): 0.1}, sweep_epochs=4)
    (sweep,) = sweeps([*made_sweep(), made_result("vl", 0.1, seed=1)], [line])
    table = table_1(sweep)
    assert table is not None
    assert [(row.name, row.num_runs) for row in table.rows] == [
        *(("VL", 2), ("VI (mean)", 1), ("VI (10 samples)", 1), ("MAP", 1)),
    ]
    assert [_cells(table, row.name)["beta"] for row in table.rows] == ["0.1", "0.1", "0.1", "0.01"]
    words = how_beta_was_chosen(sweep)
    assert words.startswith("The β of VL was chosen before")
    assert "The other methods have no final runs: their β is chosen by the NLL of held-out images among" in words
    assert (
        "here, the numbers of trials being VI (mean) 3; VI (10 samples) 3; MAP 3; MAP + temperature scaling 3" in words
    )
    assert "The chosen β is at an edge of those tried, so one beyond might be better: every row." in at_an_end(sweep)
    (all_final,) = sweeps([made_result("vl", 0.1)], [line])
    assert how_beta_was_chosen(all_final).startswith("The β of each row was chosen before")


def _without_linearised(result: Result) -> Result:
    parts = {
        part: {way: scores for way, scores in getattr(result, part).items() if way != "linearised"}
        for part in ("test", "validation")
    }
    return dataclasses.replace(result, spec=dataclasses.replace(result.spec, linearised=False), **parts)


def test_runs_with_and_without_linearised_predictions_are_one_sweep_and_the_one_with_more_scores_is_shown():
    made = made_sweep()
    without = [_without_linearised(result) for result in made]
    for results in ([*made, *without], [*without, *made]):
        (sweep,) = sweeps(results)
        assert {result.spec for result in sweep.results} == {result.spec for result in made}
        assert "linearised" in shared(sweep)
    (mixed,) = sweeps([made[0], *without[1:]])
    assert (len(mixed.results), mixed.title) == (len(made), "CIFAR-10, paper's recipe, 4 epochs")
    assert "linearised" not in shared(mixed)
    (alone,) = sweeps(without)
    assert shared(alone)["linearised"] is False
    line = made_line({("vl", "mean"): 0.1}, sweep_epochs=4)
    (final,) = sweeps(without, [line])
    table = table_1(final)
    assert final.final == line
    assert table is not None
    assert _cells(table, "VL")["beta"] == "0.1"
    last = dataclasses.replace(without[0], test={}, validation={}, failure="the loss is NaN")
    (found,) = sweeps([*made, last])
    assert not found.diverged


def test_scores_against_different_images_are_not_averaged():
    runs = [made_result("vl", 0.1, seed=seed) for seed in (0, 1)]
    (sweep,) = sweeps(runs)
    table = table_of_all_ways(sweep)
    assert table is not None
    assert _cells(table, "VL")["ood_auroc_entropy"] == "0.900"
    (sweep,) = sweeps([runs[0], dataclasses.replace(runs[1], ood="rotated"), made_result("map", 0.01)])
    table = table_of_all_ways(sweep)
    assert table is not None
    found = _cells(table, "VL")
    assert "ood_auroc_entropy" not in found
    assert (found["ood"], found["nll"]) == ("SVHN, rotated", f"{(0.32 + 0.33) / 2 + 0.05 * 0.65:.3f}")
    assert _cells(table, "MAP")["ood_auroc_entropy"] == "0.900"


@pytest.mark.parametrize(("num_epochs", "told"), [(200, False), (50, True)])
def test_where_ours_are_of_another_length_than_the_papers_scores_the_page_says_so(num_epochs: int, told: bool):
    (sweep,) = sweeps(made_sweep(num_epochs=num_epochs))
    words = how_beta_was_chosen(sweep)
    assert ("The paper calls its scores after 200 epochs 'best" in words) == told
    assert ("The paper calls its scores 'best values'" in words) != told
    assert ("The paper's best: VL, 0.23 (92.4 %, 0.017)." in what_is_best(sweep)) != told
    assert "after 200 epochs." in figure_1(sweep, "x")[0].picture.caption or not told
    (other,) = sweeps(made_sweep(num_epochs=num_epochs, model="mlp"))
    assert "paper's" not in how_beta_was_chosen(other)


def test_a_run_that_diverged_is_a_trial_and_is_shown_as_diverged(tmp_path: Path):
    made = made_result("vl", 1.0)
    diverged = dataclasses.replace(made, test={}, validation={}, history=(), ood=None, failure="the loss is NaN")
    results = [*made_sweep(), diverged, made_result("vi", 1.0), made_result("map", 1.0)]
    (sweep,) = sweeps(results)
    words = how_beta_was_chosen(sweep)
    assert "Every row has had 4 trials" in words
    assert "Diverged, and so left out: VL, β 1, seed 0 (the loss is NaN)." in words
    assert _cells(table_of_runs(sweep), "VL, β 1, seed 0 (diverged)") == {"nll": "inf", "validation_nll": "inf"}
    store = Store(tmp_path)
    for result in results:
        store.put(result)
    page = write_reproduction(store, tmp_path / "report").read_text()
    assert "12, of which 1 diverged" in page
    content = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [run["failure"] for run in content["sections"][0]["runs"]] == [None] * 11 + ["the loss is NaN"]


def test_a_run_that_diverged_with_scores_is_in_no_table_of_times_and_in_no_figure(tmp_path: Path):
    runs = _faster()
    bad = next(
        run for run in runs if (run.spec.method, run.spec.beta, run.spec.log_sigma_lr_multiplier) == ("vl", 1, 10)
    )
    scores = {"mean": dict(bad.validation["mean"]) | {"nll": 4e4}}
    slow = tuple(dict(row) | {"seconds": 1e6} for row in bad.history)
    diverged = dataclasses.replace(bad, validation=scores, history=slow)
    (sweep,) = sweeps([diverged if run is bad else run for run in runs])
    assert sweep.diverged == (diverged,)
    table = table_of_multipliers(sweep)
    assert table is not None
    assert "VL, β 1, × 10" not in [row.name for row in table.rows]
    assert "10: " not in figure_2(sweep, "x")[1.0][0].picture.alt
    assert all(cell.value < 1e5 for row in table_2(sweep).rows for cell in row.cells.values())
    for run in (*sweep.results, diverged):
        Store(tmp_path).put(run)
    write_reproduction(tmp_path, tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text().partition("Figure 2 in numbers")[2]
    said = f"Scores by the mean network. Diverged, and so left out: VL, β 1, × 10, seed 0 ({diverged.failure})."
    assert said in " ".join(text.split())


def test_a_method_whose_shared_seed_diverged_at_every_beta_has_no_row():
    bad = [
        dataclasses.replace(made_result("vl", beta), test={}, validation={}, history=(), failure="the loss is NaN")
        for beta in (0.1, 1.0)
    ]
    (sweep,) = sweeps([*bad, made_result("vl", 1.0, seed=1), made_result("map", 0.1)])
    table = table_1(sweep)
    assert table is not None
    assert [row.name for row in table.rows] == ["MAP"]
    (sweep,) = sweeps([*bad, made_result("vl", 1.0, seed=1)])
    assert table_1(sweep) is None


def test_a_store_in_which_all_has_diverged_has_a_page(tmp_path: Path):
    made = made_result("vl", 1.0)
    Store(tmp_path).put(dataclasses.replace(made, test={}, validation={}, history=(), failure="the loss is NaN"))
    page = write_reproduction(tmp_path, tmp_path / "report").read_text()
    said = "Diverged, and so left out: VL, β 1, seed 0 (the loss is NaN)."
    assert "1, of which 1 diverged" in page
    assert said in page
    text = (tmp_path / "report" / "report.md").read_text()
    assert said in text
    assert "Table" not in text
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert said in " ".join(done.stdout.split())


def test_a_method_with_fewer_trials_is_named():
    (sweep,) = sweeps(made_sweep()[:-1])
    assert "not had the same number of trials: VL 2; VI (mean) 3; VI (10 samples) 3; MAP 3" in how_beta_was_chosen(
        sweep
    )


def test_baselines_and_detection_stand_beside_the_papers_methods():
    (sweep,) = sweeps(made_sweep())
    table = table_of_all_ways(sweep)
    assert table is not None
    names = [row.name for row in table.rows]
    assert names[4:] == [
        "MAP + temperature scaling",
        "MAP + linearised Laplace",
        "VI + temperature scaling",
        "VL + temperature scaling",
        "VL, linearised",
    ]
    assert _cells(table, "MAP + temperature scaling")["temperature"] == "1.2"
    assert _cells(table, "MAP + linearised Laplace")["laplace_beta"] == "0.003"
    assert _cells(table, "VL, linearised")["ood_auroc_mutual_information"] == "0.950"


def test_a_table_that_is_too_wide_for_the_terminal_is_shown_in_parts():
    (sweep,) = sweeps(made_sweep())
    table = table_of_all_ways(sweep)
    assert table is not None
    console = Console(width=80, file=io.StringIO(), color_system=None)
    console.print(fitting(console, table, "Every way"))
    printed = console.file.getvalue().splitlines()
    assert [line.strip() for line in printed if line.startswith(" ")] == ["Every way", "continued", "continued"]
    for row in table.rows:
        cells = [line.split("│") for line in printed if line.startswith("│")]
        lines = [line[2:-1] for line in cells if line[1].strip() == row.name]
        found = [row.cells[column.key].shown for column in table.columns if column.key in row.cells]
        assert [cell.strip() for line in lines for cell in line if cell.strip()] == found
        assert all(any(cell.strip() for cell in line) for line in lines)  # a row without anything is left out


def test_rows_against_different_other_images_name_them_and_are_not_ranked_by_them():
    same = table_of_all_ways(sweeps(made_sweep())[0])
    assert same is not None
    assert {_cells(same, row.name)["ood"] for row in same.rows} == {"SVHN"}
    assert any(row.cells["ood_auroc_entropy"].best for row in same.rows)
    mixed = [dataclasses.replace(r, ood="rotated") if r.spec.method == "map" else r for r in made_sweep()]
    table = table_of_all_ways(sweeps(mixed)[0])
    assert table is not None
    assert (_cells(table, "MAP")["ood"], _cells(table, "VL")["ood"]) == ("rotated", "SVHN")
    assert not any(cell.best for row in table.rows for key, cell in row.cells.items() if key.startswith("ood"))
    assert any(row.cells["nll"].best for row in table.rows)


def test_table_2_leaves_the_compiling_epoch_out_and_gives_ratios_to_map():
    (sweep,) = sweeps(made_sweep((0.1,), validation=0.0, linearised=False))
    assert table_1(sweep) is None
    assert list(tables(sweep)) == ["Table 2"]
    table = table_2(sweep)
    assert _cells(table, "VL") == {"seconds": "6.00", "ratio": "3.00", "paper_seconds": "114.9", "paper_ratio": "2.75"}
    assert _cells(table, "MAP")["ratio"] == "1.00"


def test_runs_of_other_epochs_recipes_or_sizes_are_never_put_side_by_side():
    results = [made_result("vl", 0.1), made_result("vl", 0.1, num_epochs=9), made_result("vl", 0.1, width=32)]
    titles = [sweep.title for sweep in sweeps(results)]
    assert titles[0] == "CIFAR-10, paper's recipe, 9 epochs"
    assert sorted(titles[1:]) == ["CIFAR-10, paper's recipe, 4 epochs", "CIFAR-10, paper's recipe, 4 epochs, width 32"]


def test_the_papers_recipe_comes_first_and_the_longest_training_within_a_recipe():
    settings = [("fashion_mnist", "paper", 4), ("cifar10", "ours", 9), ("cifar10", "paper", 4), ("cifar10", "paper", 9)]
    found = sweeps(made_result("vl", 0.1, data=data, recipe=name, num_epochs=n) for data, name, n in settings)
    assert [(sweep.spec.data, sweep.spec.recipe, sweep.spec.epochs) for sweep in found] == [
        *(("cifar10", "paper", 9), ("cifar10", "paper", 4), ("cifar10", "ours", 9), ("fashion_mnist", "paper", 4)),
    ]


def _faster(data: str = "cifar10") -> list[Result]:
    return [
        made_result(method, beta, data=data, log_sigma_lr_multiplier=multiplier)
        for method in ("vi", "vl")
        for beta in (1.0, 0.1)
        for multiplier in (1.0, 3.0, 10.0, 30.0)
    ]


def test_figures_are_drawn_where_there_is_something_to_compare():
    (sweep,) = sweeps(made_sweep())
    assert [drawn.name for drawn in figure_1(sweep, "x")] == [
        f"x-figure-1-{score}" for score in ("accuracy", "log-likelihood", "ece")
    ]
    assert figure_2(sweep, "x") == {}
    (sweep,) = sweeps(_faster())
    found = figure_2(sweep, "x")
    assert list(found) == [1.0, 0.1]
    assert [drawn.name.removeprefix("x-figure-2-beta-1-") for drawn in found[1.0]] == [
        *("vl-elbo", "vi-elbo", "log-likelihood", "accuracy", "elbo"),
    ]
    assert "at the end, by multiplier, 1: -2.154, 3: " in found[1.0][0].picture.alt
    assert len(table_of_runs(sweep).rows) == 16
    assert all(drawn.png.startswith(b"\x89PNG") and b"<svg" in drawn.picture.content for drawn in found[0.1])
    (sweep,) = sweeps([made_result("vl", 0.1)])
    assert figure_1(sweep, "x") == []


def test_figure_2_stands_in_numbers_on_the_page_and_in_the_terminal(tmp_path: Path):
    runs = [*_faster(), *(made_result("vl", 0.1, log_sigma_lr_multiplier=10.0, seed=seed) for seed in (1, 2))]
    (sweep,) = sweeps(runs)
    table = table_of_multipliers(sweep)
    assert table is not None
    assert [row.name for row in table.rows] == [
        f"{method}, β {beta}, × {multiplier}"
        for beta in (1, 0.1)
        for method in ("VL", "VI")
        for multiplier in (1, 3, 10, 30)
    ]
    assert [column.heading for column in table.columns] == ["ELBO", "NLL", "accuracy (%)"]
    assert not any(cell.best for row in table.rows for cell in row.cells.values())
    for row, run in zip(table.rows, [*runs[8:12], *runs[:4], *runs[12:16], *runs[4:8]], strict=True):
        assert row.num_runs == 1  # by the seeds that all multipliers have
        assert row.cells["elbo"].value == run.history[-1]["elbo"]
        assert not row.cells["elbo"].best
        assert (row.cells["nll"].value, row.cells["accuracy"].value) == (
            *(run.test["mean"]["nll"], run.test["mean"]["accuracy"]),
        )
    store = Store(tmp_path)
    for run in runs:
        store.put(run)
    page = write_reproduction(store, tmp_path / "report").read_text()
    markdown = (tmp_path / "report" / "report.md").read_text()
    terminal = CliRunner().invoke(app, ["report", str(tmp_path)]).stdout
    table = table_of_multipliers(sweeps(store)[0])  # of scores as they are stored, rounded
    assert table is not None
    for text in (page, markdown, terminal):
        assert "Figure 2 in numbers" in text
        for row in table.rows:
            assert row.name in text
            assert all(row.cells[column.key].shown in text for column in table.columns)
        assert "× 1 is the means" in " ".join(text.split())
    assert table_of_multipliers(sweeps(made_sweep())[0]) is None


def test_runs_for_figure_2_have_it_alone_and_among_others_it_is_the_last(tmp_path: Path):
    def headings(runs: list[Result], folder: Path) -> list[str]:
        for run in runs:
            Store(folder).put(run)
        write_reproduction(folder, folder / "report")
        return re.findall(r"^### (.*)$", (folder / "report" / "report.md").read_text(), re.M)

    of_figure_2 = ["Figure 2 in numbers", "Figure 2, β = 1", "Figure 2, β = 0.1"]
    assert headings(_faster(), tmp_path / "alone") == of_figure_2
    (section,) = json.loads((tmp_path / "alone" / "report" / "report.json").read_text())["sections"]
    assert section["beta"] is None
    assert "arXiv" not in (tmp_path / "alone" / "report" / "report.md").read_text()
    for number, other in enumerate([made_result("map", 0.1), made_result("vl", 0.03)]):
        found = headings([*_faster(), other], tmp_path / f"{number}")
        assert found[:3] == ["At a glance", "Every way of predicting", "Table 1"]
        assert [heading for heading in found if heading in of_figure_2] == of_figure_2


def test_where_multipliers_differ_table_1_says_which_its_rows_have_and_every_run_its_own():
    (sweep,) = sweeps(_faster())
    said = "Of the multipliers of log σ's learning rate, × 1, × 3, × 10, × 30, only runs with × 10 are here."
    assert said in how_beta_was_chosen(sweep)
    assert "VL, β 0.1, × 10, seed 0" in [row.name for row in table_of_runs(sweep).rows]
    (usual,) = sweeps(made_sweep())
    assert "multiplier" not in how_beta_was_chosen(usual)
    assert "VL, β 0.1, seed 0" in [row.name for row in table_of_runs(usual).rows]
    (slower,) = sweeps([made_result("vl", 0.1, log_sigma_lr_multiplier=3.0)])
    assert [row.name for row in table_of_runs(slower).rows] == ["VL, β 0.1, × 3, seed 0"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("store"))
    for result in [*made_sweep(num_epochs=20), *made_sweep((0.1,), num_epochs=3, validation=0.0, linearised=False)]:
        store.put(result)
    return store


def test_page_markdown_and_json_tell_the_same_and_the_page_loads_nothing(store: Store, tmp_path: Path):
    page = write_reproduction(store, tmp_path)
    text, markdown = page.read_text(), (tmp_path / "report.md").read_text()
    content = json.loads((tmp_path / "report.json").read_text())
    assert [section["title"] for section in content["sections"]] == [
        "CIFAR-10, paper's recipe, 20 epochs",
        "CIFAR-10, paper's recipe, 3 epochs, no held-out images",
    ]
    assert list(content["sections"][1]["tables"]) == ["Table 2"]
    rows = content["sections"][0]["tables"]["Table 1"]["rows"]
    for row in rows:
        for cell in row["scores"].values():
            assert cell["shown"] in text
            assert cell["shown"] in markdown
    for tag, attributes in Tags(text).found:
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), tag
        if tag == "img":
            assert attributes["alt"]
    for name in re.findall(r"\]\((figures/.*?)\)", markdown):
        assert (tmp_path / name).is_file()
        assert (tmp_path / name).with_suffix(".svg").is_file()
    assert len(list((tmp_path / "figures").iterdir())) == 10
    again = write_reproduction(store, tmp_path / "again")
    assert again.read_bytes() == page.read_bytes()


def _headings(page: str) -> list[str]:
    """Return what stands open on a page, and what is folded away, in their order."""
    main = page.partition("<main>")[2]
    return re.findall(r"<(?:h2|summary)>((?!Every run|Settings).*?)</(?:h2|summary)>", main)


def test_a_page_opens_with_what_was_asked_for_its_result_and_its_picture(tmp_path: Path):
    ours, theirs, other = (made_sweep(num_epochs=n, width=w) for n, w in ((4, 32), (200, 64), (4, 64)))
    for run in (*ours, *theirs, *other):
        Store(tmp_path).put(run)
    asked = [dataclasses.replace(run.spec, linearised=False) for run in ours]
    titles = [part.title for part in read_sweeps(tmp_path, asked)]
    page = write_reproduction(tmp_path, tmp_path / "report", asked).read_text()
    assert titles[0] == "CIFAR-10, paper's recipe, 4 epochs, width 32"
    shown = [titles[0], "All trainings in short", "The other trainings", *titles[1:]]
    assert _headings(page) == [html.escape(title) for title in shown]
    first = [page.index(words) for words in ("Best test NLL: ", "<h3>At a glance</h3>", "<h3>Every way", "<h3>Table 1")]
    assert first == sorted(first)
    assert read_sweeps(tmp_path)[0].title == "CIFAR-10, paper's recipe, 200 epochs"  # unasked, the longest


def test_the_command_opens_its_page_with_its_own_runs(tmp_path: Path):
    for run in [*made_sweep((0.1,), num_epochs=9), *made_sweep((0.1,), width=32)]:
        Store(tmp_path).put(run)
    asked = ["--data", "cifar10", "--epochs", "4", "--set", "width=32", "--set", "beta=[0.1]"]
    done = CliRunner().invoke(app, ["reproduce", "table-1", *asked, "--device", "cpu", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "report" / "report.html").read_text()
    assert _headings(page)[0] == "CIFAR-10, paper&#x27;s recipe, 4 epochs, width 32"


def test_a_page_opens_with_final_runs_where_nothing_was_asked_for(tmp_path: Path):
    for run in [*made_sweep(num_epochs=9), *made_sweep()]:
        Store(tmp_path).put(run)
    record([made_line({("vl", "mean"): 0.1}, sweep_epochs=9)], Store(tmp_path))
    assert [part.spec.epochs for part in read_sweeps(tmp_path)] == [4, 9]


def test_a_result_names_the_best_nll_and_all_that_have_it_to_three_decimals():
    runs = made_sweep()
    (sweep,) = sweeps(runs)
    best = min(table_of_all_ways(sweep).rows, key=lambda row: row.cells["nll"].value)  # type: ignore[union-attr]
    nll, accuracy, ece = (best.cells[key].value for key in ("nll", "accuracy", "ece"))
    assert what_is_best(sweep) == (
        f"Best test NLL: {best.name}, {nll:.3f} (accuracy {100 * accuracy:.1f} %, ECE {ece:.3f}). One seed: small "
        "differences may be chance."
    )
    same = {way: {**scores, "nll": 0.1743 + 0.0001 * (way == "mean")} for way, scores in runs[-1].test.items()}
    (tied,) = sweeps([*runs[:-1], dataclasses.replace(runs[-1], test=same)])
    assert what_is_best(tied).startswith("Best test NLL: VL, 0.174 (")
    assert "The same NLL to three digits: VL + temperature scaling; VL, linearised." in what_is_best(tied)
    (several,) = sweeps([*runs, *made_sweep(seed=1)])
    assert "One seed" not in what_is_best(several)


def test_a_page_of_several_trainings_has_the_nll_of_each_in_a_row(tmp_path: Path):
    other = made_sweep(model="mlp", num_epochs=200)
    long = made_sweep(num_epochs=200)
    for run in [*made_sweep(), *long, *other, *_faster("fashion_mnist"), *made_sweep((0.1,), validation=0.0)]:
        Store(tmp_path).put(run)
    page = write_reproduction(tmp_path, tmp_path / "report").read_text()
    content = json.loads((tmp_path / "report" / "report.json").read_text())
    rows = {row["name"]: row["scores"] for row in content["summary"]["rows"]}
    compared = [section for section in content["sections"] if "Table 1" in section["tables"]]
    assert list(rows) == [section["title"] for section in compared]
    assert len(rows) == 3
    for section in compared:
        all_ways = {row["name"]: row["scores"] for row in section["tables"]["Every way of predicting"]["rows"]}
        scores = rows[section["title"]]
        for name in ("VL", "MAP", "MAP + temperature scaling", "MAP + linearised Laplace", "VI (10 samples)"):
            assert scores[name]["value"] == all_ways[name]["nll"]["value"]
        nlls = {name: cell["shown"] for name, cell in scores.items() if name != "paper"}
        assert {name for name in nlls if scores[name]["best"]} == {n for n in nlls if nlls[n] == min(nlls.values())}
    papers = [scores.get("paper", {}).get("shown") for scores in rows.values()]
    assert papers == ["0.23", None, None]  # of as long a training of the paper's network alone
    assert '<th scope="col">training</th><th scope="col">VL</th>' in page


def test_a_page_of_one_training_has_no_summary(store: Store, tmp_path: Path):
    page = write_reproduction(store, tmp_path)
    assert "All trainings in short" not in page.read_text()
    assert json.loads((tmp_path / "report.json").read_text())["summary"] is None


def test_the_name_of_other_images_is_shown_as_it_is(tmp_path: Path):
    Store(tmp_path).put(dataclasses.replace(made_result("vl", 0.1), ood="<b>a|b</b>"))
    page = write_reproduction(tmp_path, tmp_path / "report").read_text()
    assert "<td>&lt;b&gt;a|b&lt;/b&gt;</td>" in page
    assert r"| &lt;b>a\|b&lt;/b> |" in (tmp_path / "report" / "report.md").read_text()


def test_the_page_names_the_commit_of_every_run_and_markdown_shows_the_command_as_code(tmp_path: Path):
    for number, result in enumerate(made_sweep((0.1,))):
        Store(tmp_path).put(dataclasses.replace(result, origin={**result.origin, "commit": f"c0ffee{number}"}))
    page = write_reproduction(tmp_path, tmp_path / "report").read_text()
    assert "<dt>commit</dt><dd>c0ffee0, c0ffee1, c0ffee2</dd>" in page
    assert "3 runs of `varlap reproduce`, beside" in (tmp_path / "report" / "report.md").read_text()


def test_the_report_command_recognises_a_store(store: Store, tmp_path: Path):
    done = CliRunner().invoke(app, ["report", str(store.folder), "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["page"] == str(tmp_path / "report.html")
    assert said["sections"][0]["tables"]["Table 1"]["rows"][0]["name"] == "VL"
    done = CliRunner().invoke(app, ["report", str(store.folder), "--out", str(tmp_path)])
    assert "Table 1: CIFAR-10, paper's recipe, 20 epochs" in " ".join(done.stdout.split())
    assert "Every row has had 3 trials." in " ".join(done.stdout.split())


def test_a_folder_with_a_page_of_another_kind_is_told_of_its_command(store: Store, tmp_path: Path):
    (tmp_path / "boston.json").write_text("{}")
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 2
    assert f"holds results of `varlap reproduce uci`, whose page is {tmp_path / 'report.md'}" in done.stderr
    assert f"`varlap reproduce uci --out {tmp_path}` writes it" in done.stderr
    done = CliRunner().invoke(app, ["report", str(store.folder), str(store.folder)])
    assert f"give it alone: `varlap report {store.folder}`" in done.stderr


def test_a_store_without_results_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"there are no results in .*; `varlap reproduce table-1"):
        write_reproduction(tmp_path, tmp_path / "report")
