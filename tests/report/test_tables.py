"""Tables hold the right numbers, mark the best ones, and say the same in every form."""

import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from varlap import report
from varlap.experiments import Evaluated
from varlap.report.sections import sections
from varlap.report.sources import collect
from varlap.report.tables import KNOWN, Table, comparison


def _one(name: str, scores: dict[str, float], seconds: float | None = None, **spec: object) -> Evaluated:
    return Evaluated(name, scores, {"data": "toy", **spec}, {}, {"varlap": "1"}, seconds)


def _table(*evaluated: Evaluated) -> Table:
    (table,) = report.compare(evaluated).values()
    return table


def test_several_seeds_show_their_mean_and_its_standard_error():
    nlls = [0.3, 0.5, 0.4, 0.6]
    table = _table(*(_one("VL", {"nll": nll}, 10.0, seed=seed) for seed, nll in enumerate(nlls)))
    (row,) = table.rows
    cell = row.cells["nll"]
    assert cell.value == pytest.approx(0.45)
    # deviations ±0.15, ±0.05: variance 0.05/3, over 4 runs
    assert cell.standard_error == pytest.approx(math.sqrt(0.05 / 3 / 4))
    assert (cell.num_runs, row.num_runs) == (4, 4)
    assert (cell.shown, cell.shown_range) == ("0.450", "± 0.065")
    assert row.cells["seconds"].standard_error == 0


def test_one_run_shows_its_interval_and_the_ends_are_no_columns():
    table = _table(_one("VL", {"nll": 0.3, "nll_low": 0.2, "nll_high": 0.45, "accuracy": 0.975}))
    assert [column.key for column in table.columns] == ["nll", "accuracy"]
    cells = table.rows[0].cells
    assert (cells["nll"].low, cells["nll"].high, cells["nll"].shown_range) == (0.2, 0.45, "[0.200, 0.450]")
    assert (cells["accuracy"].shown, cells["accuracy"].shown_range) == ("97.5", "")


def test_a_score_of_an_unlucky_name_is_a_column():
    assert [column.key for column in _table(_one("VL", {"glow_low": 0.2})).columns] == ["glow_low"]


def test_the_best_of_each_column_is_marked_in_its_direction():
    scores = {
        "MAP": {"nll": 0.5, "accuracy": 0.9, "ece": 0.02, "coverage": 0.99, "mine": 1.0},
        "VI": {"nll": math.nan, "accuracy": 0.8, "coverage": 0.95, "mine": 2.0},
        "VL": {"nll": 0.3, "accuracy": 0.9000001, "ece": 0.04, "coverage": 0.9, "mine": 3.0},
    }
    table = _table(
        *(_one(name, found, seconds) for (name, found), seconds in zip(scores.items(), (1, 2, 3), strict=True))
    )
    best = {
        c.key: {row.name for row in table.rows if c.key in row.cells and row.cells[c.key].best} for c in table.columns
    }
    assert best == {
        "nll": {"VL"},  # NaN is no best
        "accuracy": {"MAP", "VL"},  # they print alike
        "ece": {"MAP"},
        "coverage": set(),  # neither way is better
        "mine": set(),  # nobody knows
        "seconds": {"MAP"},
    }


def test_a_fourth_decimal_makes_none_the_best():
    table = _table(_one("VL", {"nll": 0.1743}), _one("VL, again", {"nll": 0.1744}), _one("MAP", {"nll": 0.1746}))
    assert [(row.cells["nll"].shown, row.cells["nll"].best) for row in table.rows] == [
        *(("0.174", True), ("0.174", True), ("0.175", False)),
    ]


def test_nothing_is_best_alone():
    assert not _table(_one("VL", {"nll": 0.5})).rows[0].cells["nll"].best


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ((0.5, 0.25), ["0.500", "0.250"]),
        ((1234.4, 2.25), ["1234", "2"]),
        ((12.346, 2.0), ["12.35", "2.00"]),
        ((0.00012, 0.0001), ["0.0001200", "0.0001000"]),
        ((0.0, 0.0), ["0.000", "0.000"]),
    ],
)
def test_a_column_prints_four_digits_of_its_largest_value(values: tuple[float, ...], shown: list[str]):
    table = _table(*(_one(f"M{i}", {"rmse": value}) for i, value in enumerate(values)))
    assert [row.cells["rmse"].shown for row in table.rows] == shown


def test_runs_that_differ_in_more_than_their_seed_are_told_apart():
    table = _table(*(_one("VL", {"nll": b}, beta=b, lr=0.1, seed=s) for b in (0.1, 1.0) for s in (0, 1)))
    assert [(row.name, row.num_runs) for row in table.rows] == [("VL (beta 0.1)", 2), ("VL (beta 1.0)", 2)]
    table = _table(*(_one("VL", {"nll": 0.5}, seed=0) for _ in range(2)))
    assert [row.name for row in table.rows] == ["VL (1)", "VL (2)"]


def test_an_experiment_that_was_repeated_in_another_folder_is_a_row_of_its_own(tmp_path: Path):
    for folder, seeds in (("a", (0, 1)), ("b", (0, 1, 2)), ("c/twice", (0,)), ("c/again", (0,))):
        for seed in seeds:
            _one("VL", {"nll": 0.5}, seed=seed).write(tmp_path / folder / f"vl-{seed}")
    (table,) = report.compare([tmp_path / "a", tmp_path / "b", tmp_path / "c"]).values()
    assert [(row.name, row.num_runs) for row in table.rows] == [
        ("VL (a)", 2),
        ("VL (b)", 3),
        ("VL (c/again/vl-0)", 1),
        ("VL (c/twice/vl-0)", 1),
    ]


def test_a_row_alone_says_that_it_averages_draws():
    def names(*hows: str, name: str = "VL") -> list[str]:
        draws = {"mean": None, "sampled": 10, "linearised": 30}
        rows = [_one(name, {"nll": 0.5}, beta=0.1, how=how, num_samples=draws[how]) for how in hows]
        return [row.name for row in _table(*rows).rows]

    assert names("linearised") == ["VL (30 linearised)"]
    assert names("mean") == ["VL"]
    assert names("mean", "sampled") == ["VL (mean)", "VL (10 sampled)"]
    assert names("linearised", name="VL, linearised") == ["VL, linearised"]
    by_beta = [_one("VL", {"nll": b}, beta=b, how="linearised", num_samples=30) for b in (0.1, 1.0)]
    assert [row.name for row in _table(*by_beta).rows] == [
        "VL (30 linearised, beta 0.1)",
        "VL (30 linearised, beta 1.0)",
    ]


def test_a_temperature_that_each_seed_found_does_not_part_them():
    table = _table(*(_one("VL", {"nll": 0.5}, seed=s, temperature=1 + 0.1 * s) for s in (0, 1)))
    assert [(row.name, row.num_runs) for row in table.rows] == [("VL", 2)]
    table = _table(*(_one("VL", {"nll": 0.5}, seed=0, temperature=t) for t in (1.0, 1.5)))
    assert [row.name for row in table.rows] == ["VL (temperature 1.0)", "VL (temperature 1.5)"]


def test_a_name_that_is_taken_stays_a_row_of_its_own():
    first = [_one("VL", {"nll": b}, beta=b) for b in (0.1, 1.0)]
    table = _table(*first, _one("VL (beta 0.1)", {"nll": 0.7}))
    assert [row.cells["nll"].value for row in table.rows] == [0.1, 1.0, 0.7]
    assert len({row.name for row in table.rows}) == 3


def test_test_sets_are_compared_apart_but_splits_together():
    def on(labels: list[int], **spec: object) -> Evaluated:
        return Evaluated("VL", {"nll": 0.5}, {"data": "toy", **spec}, {"labels": torch.tensor(labels)})

    apart = report.compare([on([0, 1]), on([1, 0]), on([0, 1], data="other"), on([0, 1], seed=3)])
    assert [(title, table.rows[0].num_runs) for title, table in apart.items()] == [
        ("toy", 2),
        ("toy, test set 2", 1),
        ("other", 1),
    ]
    together = report.compare([on([0, 1], split=0), on([1, 0], split=1)])
    assert [(title, table.rows[0].num_runs) for title, table in together.items()] == [("toy", 2)]


def test_every_form_holds_the_same_numbers():
    evaluated = [
        _one("MAP", {"nll": 0.5, "nll_low": 0.4, "nll_high": 0.6, "accuracy": 0.91234}),
        _one("V|L*", {"nll": 0.3, "accuracy": 0.8}),
    ]
    table = _table(*evaluated)
    markdown = table.to_markdown()
    assert markdown.splitlines()[2:] == [
        "| MAP | 0.500 [0.400, 0.600] | **91.2** |",
        r"| V\|L\* | **0.300** | 80.0 |",
    ]
    assert json.loads(json.dumps(table.to_json()))["rows"][0]["scores"]["nll"] == {
        "value": 0.5,
        "low": 0.4,
        "high": 0.6,
        "standard_error": None,
        "runs": 1,
        "best": False,
        "shown": "0.500",
        "shown_range": "[0.400, 0.600]",
    }
    html = table.to_html("scores")
    assert "<td>0.500 <small>[0.400, 0.600]</small></td>" in html
    assert '<td class="best"><strong>91.2</strong></td>' in html
    for turned in (False, True):
        console = Console(width=200, record=True, file=io.StringIO())
        console.print(table.to_rich("[red]toy", turned=turned))
        text = console.export_text()
        for word in ("[red]toy", "V|L*", "0.500", "[0.400, 0.600]", "91.2", "NLL ↓", "accuracy (%) ↑"):
            assert word in text


def test_a_score_that_is_not_finite_is_shown_and_is_null_in_json():
    cell = _table(_one("VL", {"nll": math.nan})).to_json()["rows"][0]["scores"]["nll"]
    assert (cell["value"], cell["shown"]) == (None, "nan")


def test_every_score_of_evaluate_is_known():
    from varlap.metrics.accumulator import ALL_SCORES

    assert set(ALL_SCORES) == {column.key for column in KNOWN}


def test_rows_keep_the_order_in_which_runs_were_found():
    (section,) = sections(collect([_one(name, {"nll": 0.5}) for name in ("b", "a", "c")]))
    assert [row.name for row in comparison(section.methods).rows] == ["b", "a", "c"]
