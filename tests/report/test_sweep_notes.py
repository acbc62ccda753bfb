"""The notes under the tables: β at the end of a grid, rows that are missing or unequal, and what was timed."""

import dataclasses

import pytest

from made_results import BEST, made_line, made_result, made_sweep
from varlap.experiments.final_line import FinalRow
from varlap.report.reproduction import tables
from varlap.report.sweep_notes import at_an_end, how_beta_was_chosen, how_it_was_timed
from varlap.report.sweep_tables import table_1, table_2, table_of_all_ways
from varlap.report.sweeps import sweeps


def _cells(table, row: str) -> dict[str, str]:
    (found,) = [each for each in table.rows if each.name == row]
    return {key: cell.shown for key, cell in found.cells.items()}


def _with_variances(beta: float | None, seed: int, **ends: float):
    made = made_result("vl", 0.1, seed=seed)
    scores = {name: value for name, value in made.test["linearised"].items() if name != "laplace_beta"}
    fitted = {} if beta is None else {"laplace_beta": beta, **ends}
    return dataclasses.replace(made, test={**made.test, "linearised": {**scores, **fitted}})


def test_what_each_seed_has_fitted_is_listed_and_not_averaged():
    (sweep,) = sweeps([_with_variances(beta, seed) for seed, beta in enumerate((0.0003, 0.003, None))])
    table = table_of_all_ways(sweep)
    assert table is not None
    assert _cells(table, "VL, linearised")["laplace_beta"] == "0.0003, 0.003, as trained"
    assert _cells(table, "VL + temperature scaling")["temperature"] == "1.2"
    shown = table.to_json()["rows"][2]["scores"]["laplace_beta"]
    assert (shown["value"], shown["runs"]) == (None, 3)


def test_a_beta_at_the_end_of_what_was_tried_is_named():
    said = "The chosen β is at an edge of those tried, so one beyond might be better: "
    (sweep,) = sweeps([made_result("vl", beta) for beta in (0.01, 0.1, 1.0)])
    assert said not in at_an_end(sweep)
    (sweep,) = sweeps([made_result("map", beta) for beta in (0.01, 0.1)])
    assert f"{said}every row." in at_an_end(sweep)
    assert tables(sweep)["Every way of predicting"][1].startswith(f"{said}every row.")  # beside what it is about
    assert said not in how_beta_was_chosen(sweep)
    inside = [made_result("vl", beta) for beta in (0.01, 0.1, 1.0)]
    (sweep,) = sweeps([*inside, *(made_result("map", beta) for beta in (0.01, 0.1))])
    told = "MAP at β 0.01; MAP + temperature scaling at β 0.01; MAP + linearised Laplace at β 0.01."
    assert f"{said}{told}" in at_an_end(sweep)
    # Of the sweep that chose, whatever the final runs are.
    (sweep,) = sweeps([made_result("vl", 0.01, seed=seed) for seed in (0, 1)], [made_line({("vl", "mean"): 0.01})])
    assert f"{said}VL at β 0.01." in at_an_end(sweep)


@pytest.mark.parametrize(
    ("beta", "ends", "named"),
    [
        (0.0003, {}, True),  # kept by a version that tried no less
        (0.001, {}, False),
        (0.0003, {"laplace_beta_least": 0.00003, "laplace_beta_most": 1.0}, False),
        (0.00003, {"laplace_beta_least": 0.00003, "laplace_beta_most": 1.0}, True),
    ],
)
def test_variances_at_the_end_of_what_was_tried_are_named(beta: float, ends: dict[str, float], named: bool):
    (sweep,) = sweeps([_with_variances(beta, 0, **ends)])
    assert (f"better: VL, linearised at β {beta:.5f}".rstrip("0") + " of its variances." in at_an_end(sweep)) == named
    table = table_of_all_ways(sweep)
    assert table is not None
    assert not {"laplace_beta_least", "laplace_beta_most"} & set(_cells(table, "VL, linearised"))


def test_final_rows_that_were_not_run_or_not_scored_are_named():
    line = made_line({("vl", "mean"): 0.01, ("vl", "scaled"): 0.1, ("vl", "linearised"): 0.01})
    older = made_result("vl", 0.01)
    older = dataclasses.replace(older, test={"mean": older.test["mean"]})
    (sweep,) = sweeps([older], [line])
    words = how_beta_was_chosen(sweep)
    missing = "VL at β 0.01 with seed 1; VL + temperature scaling at β 0.1; VL, linearised at β 0.01 with seed 1."
    assert f"Not run yet: {missing}" in words
    assert "Run, but not scored in this way: VL, linearised at β 0.01." in words
    diverged = dataclasses.replace(made_result("vl", 0.01, seed=1), test={}, validation={}, failure="the loss is NaN")
    (sweep,) = sweeps([older, diverged], [line])
    assert "Not run yet: VL + temperature scaling at β 0.1." in how_beta_was_chosen(sweep)


def test_rows_of_unequal_numbers_of_seeds_or_trials_are_named_in_words():
    of_vl = made_line({("vl", "mean"): 0.1})
    line = dataclasses.replace(
        of_vl,
        seeds={**of_vl.seeds, "map": (0,)},
        sweep_epochs={"vl": 50, "map": 50},
        sweep_betas={**of_vl.sweep_betas, "map": (0.01, 0.1, 1.0)},
        sweep_seeds={**of_vl.sweep_seeds, "map": (0,)},
        rows=(*of_vl.rows, FinalRow("map", "mean", 0.1)),
    )
    (sweep,) = sweeps([made_result("vl", 0.1), made_result("vl", 0.1, seed=1), made_result("map", 0.1)], [line])
    words = how_beta_was_chosen(sweep)
    assert "unequal numbers of trials (VL 2, MAP 3). No β here" in words
    assert "The rows are of unequal numbers of seeds: VL 2; MAP 1." in words
    (sweep,) = sweeps([made_result(method, 0.1, seed=seed) for method in BEST for seed in (0, 1)])
    assert "numbers of seeds" not in how_beta_was_chosen(sweep)


def test_the_papers_times_stand_beside_those_of_its_curvature_alone():
    (papers,) = sweeps(made_sweep((0.1,), validation=0.0, linearised=False))
    (ours,) = sweeps(made_sweep((0.1,), curvature="default"))
    assert "VL's curvature: exact, as the paper's. The paper's hardware is another: compare ratios" in (
        how_it_was_timed(papers)
    )
    assert [column.key for column in table_2(ours).columns] == ["seconds", "ratio"]
    told = "of a sixteenth of the images. The paper's times are of other steps and left out: exact curvature."
    assert how_it_was_timed(ours).endswith(f"VL's curvature: {told}")
    assert "compare the ratios" not in how_it_was_timed(ours)
    (other,) = sweeps(made_sweep((0.1,), model="mlp"))
    assert how_it_was_timed(other).endswith("VL's curvature: exact.")
    (table,) = [column.heading for column in table_1(ours).columns if column.key == "paper_nll"]
    assert table == "paper's NLL"  # scores are compared all the same


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        ({"batch_size": 512}, "batches of 128"),
        ({"optimizer": "SGD", "momentum": 0.9}, "Adam"),
        ({"clip_norm": 1.0}, "gradients not clipped"),
        ({"gradient": "quiet"}, "curvature's gradient held"),
        ({"variances": "closed-form"}, "learnt variances"),
    ],
)
def test_the_papers_times_stand_beside_those_of_its_own_steps_alone(settings: dict[str, object], theirs: str):
    (sweep,) = sweeps(made_sweep((0.1,), **settings))
    assert [column.key for column in table_2(sweep).columns] == ["seconds", "ratio"]
    assert how_it_was_timed(sweep).endswith(f"exact. The paper's times are of other steps and left out: {theirs}.")


def test_the_papers_times_stand_beside_whatever_leaves_a_step_as_it_is():
    others = {"num_epochs": 9, "seed": 3, "lr": 1e-3, "schedule": "cosine", "validation": 0.0, "linearised": False}
    (sweep,) = sweeps(made_sweep((0.5,), **others))
    assert [column.key for column in table_2(sweep).columns] == ["seconds", "ratio", "paper_seconds", "paper_ratio"]


@pytest.mark.parametrize("settings", [{}, {"validation": 0.0}, {"linearised": False}])
def test_only_runs_of_table_2_are_called_so_and_stand_beside_the_papers_times(settings: dict[str, object]):
    (sweep,) = sweeps(made_sweep((0.1,), **settings))
    assert [column.key for column in table_2(sweep).columns] == ["seconds", "ratio"]
    assert "Table 2" not in tables(sweep)
    _, words = tables(sweep)["Time per epoch"]
    assert words.endswith("exact. The paper's times stand beside runs of the experiment table-2 alone.")


def test_the_time_of_one_epoch_is_not_said_to_be_without_the_first():
    (sweep,) = sweeps(made_sweep((0.1,), num_epochs=1))
    assert how_it_was_timed(sweep).startswith("The one epoch without validation; a GPU compiles in it")
    assert "without the first" not in how_it_was_timed(sweep)
