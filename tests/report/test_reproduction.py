"""The page of a reproduction: the paper's numbers beside ours, β chosen honestly, and the same numbers everywhere."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from made_results import BEST, made_result, made_sweep
from varlap.cli import app
from varlap.errors import DataError
from varlap.experiments import Store
from varlap.report.reproduction import write_reproduction
from varlap.report.sweep_figures import figure_1, figure_2
from varlap.report.sweeps import how_beta_was_chosen, sweeps, table_1, table_2, table_of_all_ways, table_of_runs


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
    assert float(vl["nll"]) == pytest.approx(0.3525)
    assert float(vl["test_nll"]) == pytest.approx(0.3225)
    headings = [column.heading for column in table.columns]
    assert headings[1:3] == ["NLL ↓", "paper's NLL"]
    assert "Every method has had 3 trials" in how_beta_was_chosen(sweep)
    assert "would have given, as the paper seems to have done: it is no fair score" in how_beta_was_chosen(sweep)


def test_numbers_of_another_network_have_none_of_the_papers_beside_them():
    (sweep,) = sweeps(made_sweep(model="mlp"))
    table = table_1(sweep)
    assert table is not None
    assert not [column.key for column in (*table.columns, *table_2(sweep).columns) if column.key.startswith("paper")]


def test_final_runs_show_mean_and_error_over_seeds_and_nothing_chosen_by_test():
    (sweep,) = sweeps([made_result(method, BEST[method], seed=seed) for method in BEST for seed in range(3)])
    table = table_1(sweep)
    assert table is not None
    cell = table.rows[0].cells["nll"]
    assert cell.value == pytest.approx(0.3625)
    assert cell.shown_range == "± 0.0058"  # 0.01/√3
    assert "test_nll" not in [column.key for column in table.columns]
    assert "which a sweep had chosen before" in how_beta_was_chosen(sweep)


def test_a_method_with_fewer_trials_is_named():
    (sweep,) = sweeps(made_sweep()[:-1])
    assert "not had the same number of trials: VL 2, VI 3, MAP 3" in how_beta_was_chosen(sweep)


def test_baselines_and_detection_stand_beside_the_papers_methods():
    (sweep,) = sweeps(made_sweep())
    table = table_of_all_ways(sweep)
    assert table is not None
    names = [row.name for row in table.rows]
    assert names[4:] == ["MAP, scaled", "MAP, Laplace", "VL, scaled", "VL, linearised"]
    assert _cells(table, "MAP, scaled")["temperature"] == "1.2"
    assert _cells(table, "MAP, Laplace")["laplace_beta"] == "0.003"
    assert _cells(table, "VL, linearised")["ood_auroc_mutual_information"] == "0.9500"


def test_table_2_leaves_the_compiling_epoch_out_and_gives_ratios_to_map():
    (sweep,) = sweeps(made_sweep((0.1,), validation=0.0))
    assert table_1(sweep) is None
    table = table_2(sweep)
    assert _cells(table, "VL") == {"seconds": "6.00", "ratio": "3.00", "paper_seconds": "114.9", "paper_ratio": "2.75"}
    assert _cells(table, "MAP")["ratio"] == "1.00"


def test_runs_of_other_epochs_recipes_or_sizes_are_never_put_side_by_side():
    results = [made_result("vl", 0.1), made_result("vl", 0.1, num_epochs=9), made_result("vl", 0.1, width=32)]
    titles = [sweep.title for sweep in sweeps(results)]
    assert titles[0] == "cifar10, paper recipe, 9 epochs"
    assert sorted(titles[1:]) == [f"cifar10, paper recipe, 4 epochs, width {width}" for width in (32, 64)]


def _faster() -> list:
    return [
        made_result(method, beta, log_sigma_lr_multiplier=multiplier)
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
        *("vi-elbo", "vl-elbo", "log-likelihood", "accuracy", "elbo"),
    ]
    assert "at the end, by multiplier, 1: -2.154, 3: " in found[1.0][0].picture.alt
    assert len(table_of_runs(sweep).rows) == 16
    assert all(drawn.png.startswith(b"\x89PNG") and b"<svg" in drawn.picture.content for drawn in found[0.1])
    (sweep,) = sweeps([made_result("vl", 0.1)])
    assert figure_1(sweep, "x") == []


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("store"))
    for result in [*made_sweep(num_epochs=20), *made_sweep((0.1,), num_epochs=3, validation=0.0)]:
        store.put(result)
    return store


def test_page_markdown_and_json_tell_the_same_and_the_page_loads_nothing(store: Store, tmp_path: Path):
    page = write_reproduction(store, tmp_path)
    text, markdown = page.read_text(), (tmp_path / "report.md").read_text()
    content = json.loads((tmp_path / "report.json").read_text())
    assert [section["title"] for section in content["sections"]] == [
        "cifar10, paper recipe, 20 epochs",
        "cifar10, paper recipe, 3 epochs",
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
    assert len(list((tmp_path / "figures").iterdir())) == 6
    again = write_reproduction(store, tmp_path / "again")
    assert again.read_bytes() == page.read_bytes()


def test_the_report_command_recognises_a_store(store: Store, tmp_path: Path):
    done = CliRunner().invoke(app, ["report", str(store.folder), "--out", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["page"] == str(tmp_path / "report.html")
    assert said["sections"][0]["tables"]["Table 1"]["rows"][0]["name"] == "VL"
    done = CliRunner().invoke(app, ["report", str(store.folder), "--out", str(tmp_path)])
    assert "Table 1: cifar10, paper recipe, 20 epochs" in " ".join(done.stdout.split())


def test_a_store_without_results_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"there are no results in .*; `varlap reproduce table-1"):
        write_reproduction(tmp_path, tmp_path / "report")
