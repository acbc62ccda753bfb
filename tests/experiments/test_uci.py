"""The UCI experiment: standardised by training rows, chosen on held-out rows, resumable, and in the table's units."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from uci_tables import NUM_SPLITS, write_uci
from varlap.data import UCI_SETS, Split, TableData, load_uci
from varlap.errors import ConfigError, DataError
from varlap.experiments.uci import (
    TableRecipe,
    TableResult,
    TableRun,
    TableStore,
    UCIExperiment,
    published,
    run as run_module,
)
from varlap.experiments.uci.run import choose, compute, laplace_way
from varlap.experiments.uci.spec import TRAINED
from varlap.experiments.uci.summary import Estimate, TableSummary, summarise
from varlap.experiments.uci.task import TableTask
from varlap.likelihoods import Gaussian
from varlap.posterior import BNN

ONE_BETA = {"map": [0.1], "vi": [0.1], "vl": [0.1], "laplace": [0.3]}
QUICK = {"epochs": 2, "batch_size": 32, "hidden": 4, "betas": ONE_BETA, "tuning_splits": 1}


def quick_run(**changes):
    return TableRun(
        **{"data": "yacht", "method": "vl", "split": 0, "beta": 0.1, "epochs": 2, "batch_size": 32} | changes
    )


def result(method, beta, split=0, failure=None, **log_likelihoods):
    scores = {way.replace("_", "-"): {"log_likelihood": value, "rmse": 1.0} for way, value in log_likelihoods.items()}
    run = quick_run(method=method, beta=beta, split=split, tuning=True)
    return TableResult(run, {} if failure else scores, 1.0, failure=failure)


@pytest.fixture
def table(tmp_path):
    write_uci(tmp_path)
    return load_uci("yacht", tmp_path)


# Standardised rows


def test_training_rows_are_standardised_by_their_own_moments(table):
    x, y = TableTask.of(table, 1).training
    rows = table.splits[1].train
    features, targets = table.features[rows].numpy(), table.targets[rows].numpy()
    expected = (features - features.mean(0)) / features.std(0)
    assert np.allclose(x.numpy(), expected, atol=1e-5)
    assert np.allclose(y[:, 0].numpy(), (targets - targets.mean()) / targets.std(), atol=1e-5)


def test_test_rows_have_no_say_in_the_standardisation(table):
    rows = table.splits[0].test
    features, targets = table.features.clone(), table.targets.clone()
    features[rows], targets[rows] = 1e6, -1e6
    changed = TableData("yacht", features, targets, table.splits)
    for one, other in zip(TableTask.of(table, 0).training, TableTask.of(changed, 0).training, strict=True):
        assert torch.equal(one, other)


def test_a_constant_feature_becomes_zero():
    features = torch.tensor([[7.0, 0.0], [7.0, 1.0], [7.0, 2.0]]).double()
    table = TableData("tiny", features, features[:, 1], (Split(torch.tensor([0, 1]), torch.tensor([2])),))
    task = TableTask.of(table, 0)
    assert task.training[0][:, 0].tolist() == [0.0, 0.0]
    assert task.scored[0].tolist() == [[0.0, 3.0]]


def test_targets_that_are_all_the_same_are_refused():
    table = TableData("tiny", torch.rand(3, 1), torch.ones(3), (Split(torch.tensor([0, 1]), torch.tensor([2])),))
    with pytest.raises(DataError, match="tiny, split 0: all targets of the training rows are the same"):
        TableTask.of(table, 0)


def test_held_out_rows_are_a_fifth_of_the_training_rows_and_never_test_rows(table):
    numbered = TableData("yacht", torch.arange(60.0)[:, None].double(), torch.arange(60.0).double(), table.splits)
    task = TableTask.of(numbered, 2, held_out=0.2)
    sizes = [len(part[0]) for part in (task.training, task.scored)]
    # Standardised row numbers are row numbers up to a shift, which their sum tells.
    shifted = torch.cat([task.training[1], task.scored[1]])[:, 0].double() * task.target_scale
    rows = (shifted + (table.splits[2].train.sum() - shifted.sum()) / sum(sizes)).round().long()
    assert sizes == [43, 11]
    assert sorted(rows.tolist()) == sorted(table.splits[2].train.tolist())


def test_scores_are_those_of_the_untransformed_gaussian(table):
    task = TableTask.of(table, 0)
    bnn = BNN(nn.Linear(3, 1), Gaussian(noise=0.7))
    found = task.score(bnn.predict(task.scored[0]))
    train, test = table.splits[0].train, table.splits[0].test
    shift, scale = table.targets[train].mean(), table.targets[train].std(correction=0)
    with torch.no_grad():
        mean = bnn.network.double()(task.scored[0].double())[:, 0] * scale + shift
    density = torch.distributions.Normal(mean, 0.7 * scale)
    assert found["log_likelihood"] == pytest.approx(float(density.log_prob(table.targets[test]).mean()), abs=1e-5)
    assert found["rmse"] == pytest.approx(float((mean - table.targets[test]).square().mean().sqrt()), rel=1e-5)


# One run


def test_choosing_does_not_look_at_test_rows(table):
    targets = table.targets.clone()
    targets[table.splits[0].test] = 1e6
    changed = TableData("yacht", table.features, targets, table.splits)
    run = quick_run(tuning=True)
    assert compute(table, run).scores == compute(changed, run).scores


def test_a_run_repeats_and_leaves_the_global_generator_alone(table):
    before = torch.random.get_rng_state()
    one = compute(table, quick_run())
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    assert compute(table, quick_run()).scores == one.scores
    assert compute(table, quick_run(split=1)).scores != one.scores
    assert one.seconds > 0
    assert {"varlap", "torch", "hardware"} <= set(one.origin)


def test_map_learns_a_linear_table_and_laplace_goes_to_it_as_beta_falls(table):
    run = quick_run(method="map", epochs=60, batch_size=16, hidden=8, laplace_betas=(1e-9, 1.0))
    scores = compute(table, run).scores
    assert set(scores) == {"mean", laplace_way(1e-9), laplace_way(1.0)}
    assert scores["mean"]["rmse"] < 0.25 * float(table.targets.std())
    assert scores[laplace_way(1e-9)]["log_likelihood"] == pytest.approx(scores["mean"]["log_likelihood"], abs=1e-4)
    assert scores[laplace_way(1.0)]["log_likelihood"] != pytest.approx(scores["mean"]["log_likelihood"], abs=1e-4)


def test_vi_and_vl_are_scored_by_three_ways(table):
    for method in ("vi", "vl"):
        assert set(compute(table, quick_run(method=method)).scores) == {"mean", "sampled", "linearised"}


def test_a_training_that_diverges_is_a_result_without_scores(table):
    found = compute(table, quick_run(method="map", lr=1e30))
    assert found.scores == {}
    assert found.failure


# What held-out rows choose


def two_betas(**changes):
    betas = {"map": [0.1, 1.0], "vi": [0.1, 1.0], "vl": [0.1, 1.0], "laplace": [0.1, 1.0]}
    return TableRecipe.named("yacht", **{"betas": betas} | changes)


def trials(**vl):
    """Return results of a split in which MAP prefers β = 1, and Laplace on it 0.1."""
    found = [result("map", 0.1, mean=-2.0, laplace_0_1=-0.1, laplace_1=-0.1)]
    found.append(result("map", 1.0, mean=-1.0, laplace_0_1=-0.8, laplace_1=-0.9))
    found += [result("vi", beta, mean=-1.0 - beta, sampled=-2.0, linearised=-2.0) for beta in (0.1, 1.0)]
    found += [result("vl", beta, **vl[name]) for beta, name in ((0.1, "low"), (1.0, "high"))]
    for one in found:
        for way in list(one.scores):
            if way == "laplace-0-1":
                one.scores["laplace-0.1"] = one.scores.pop(way)
    return found


def ways(mean, sampled, linearised):
    return {"mean": mean, "sampled": sampled, "linearised": linearised}


def test_beta_and_way_are_those_of_the_best_held_out_log_likelihood():
    chosen = choose(two_betas(), trials(low=ways(-1.0, -1.2, -0.9), high=ways(-1.1, -0.95, -1.3)))
    assert (chosen["vl"].beta, chosen["vl"].way, chosen["vl"].log_likelihood) == (0.1, "linearised", -0.9)
    assert (chosen["vi"].beta, chosen["vi"].way) == (0.1, "mean")


def test_laplace_is_chosen_on_the_mean_that_map_chose():
    chosen = choose(two_betas(), trials(low=ways(-1.0, -1.0, -1.0), high=ways(-1.0, -1.0, -1.0)))
    assert chosen["map"].beta == 1.0
    assert (chosen["laplace"].beta, chosen["laplace"].way, chosen["laplace"].log_likelihood) == (
        0.1,
        "laplace-0.1",
        -0.8,
    )


def test_splits_are_averaged_and_a_beta_that_diverged_once_is_not_chosen():
    found = trials(low=ways(-1.0, -9.0, -9.0), high=ways(-2.0, -9.0, -9.0))
    second = [result(one.run.method, one.run.beta, split=1, failure="diverged") for one in found[4:5]]
    assert choose(two_betas(), [*found, *second])["vl"].beta == 1.0
    better = [result("vl", 0.1, 1, **ways(-1.5, -9.0, -9.0)), result("vl", 1.0, 1, **ways(0.0, -9.0, -9.0))]
    chosen = choose(two_betas(), [*found, *better])["vl"]
    assert (chosen.beta, chosen.log_likelihood) == (1.0, -1.0)


def test_a_table_on_which_all_diverges_says_so():
    found = [
        result(one.run.method, one.run.beta, failure="NaN") for one in trials(low=ways(0, 0, 0), high=ways(0, 0, 0))
    ]
    with pytest.raises(ConfigError, match="yacht, map: the training diverged for every β; lower the recipe's lr"):
        choose(two_betas(), found)


# The whole


def test_what_is_done_is_not_computed_again_and_other_settings_are_other_runs(tmp_path, monkeypatch):
    write_uci(tmp_path)
    experiment = UCIExperiment.of(tmp_path / "out", ["yacht"], folder=tmp_path, **QUICK)
    assert experiment.run()
    count = 3 + 3 * NUM_SPLITS
    assert len(TableStore(tmp_path / "out").results("yacht")) == count
    calls = []
    monkeypatch.setattr(run_module, "compute", lambda table, run: calls.append(run) or compute(table, run))
    assert UCIExperiment.of(tmp_path / "out", ["yacht"], folder=tmp_path, **QUICK).run()
    assert calls == []
    changed = QUICK | {"betas": ONE_BETA | {"vl": [0.2]}}
    assert UCIExperiment.of(tmp_path / "out", ["yacht"], 2, tmp_path, **changed).run()
    assert [(run.method, run.split, run.tuning) for run in calls] == [
        ("vl", 0, True),
        ("vl", 0, False),
        ("vl", 1, False),
    ]


def test_a_spent_budget_stops_and_the_next_call_carries_on(tmp_path, monkeypatch):
    write_uci(tmp_path)
    experiment = UCIExperiment.of(tmp_path / "out", ["yacht"], 1, tmp_path, **QUICK)
    assert not experiment.run(budget_s=0)
    assert experiment.store.tables() == []
    assert summarise(experiment) == []
    told = []
    assert experiment.run(tell=told.append)
    assert (told[0].done, told[0].seconds_left) == (0, None)
    assert all(one.seconds_left > 0 for one in told[1:-1])
    assert told[-1].seconds_left == 0
    assert told[-1].done == told[-1].total
    assert [one.done for one in told] == sorted(one.done for one in told)
    done = sum(run_module._cost(one.run) for one in experiment.store.results("yacht"))
    assert done == pytest.approx(told[-1].total)


def test_a_table_that_is_missing_is_named_before_anything_is_computed(tmp_path):
    write_uci(tmp_path)
    with pytest.raises(DataError, match="the UCI table 'wine' is not in"):
        UCIExperiment.of(tmp_path / "out", ["yacht", "wine"], folder=tmp_path, **QUICK).run()
    assert not (tmp_path / "out").exists()


def test_a_summary_has_all_methods_on_the_same_splits_and_skips_one_that_diverged(tmp_path):
    write_uci(tmp_path)
    experiment = UCIExperiment.of(tmp_path / "out", ["yacht"], folder=tmp_path, **QUICK)
    experiment.run()
    (found,) = summarise(experiment)
    assert (found.data, found.num_done, found.num_splits, found.num_failed) == ("yacht", NUM_SPLITS, 20, 0)
    assert list(found.values["rmse"]) == ["MAP", "Laplace", "VI", "VL"]
    stored = {(one.run.method, one.run.split): one for one in experiment.store.results("yacht") if not one.run.tuning}
    way = found.choices["vl"].way
    assert found.values["rmse"]["VL"] == [stored["vl", split].scores[way]["rmse"] for split in range(NUM_SPLITS)]
    broken = stored["vi", 1]
    experiment.store.put(TableResult(broken.run, {}, 1.0, failure="NaN"))
    (found,) = summarise(experiment)
    assert (found.num_done, found.num_failed) == (NUM_SPLITS - 1, 1)


def test_no_split_at_all_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="0 splits are none; give at least 1"):
        UCIExperiment.of(tmp_path, num_splits=0)


# Statistics


def test_the_standard_error_is_that_of_the_mean():
    values = [1.0, 2.0, 4.0, 9.0]
    found = Estimate.of(values)
    assert found.mean == 4.0
    assert found.standard_error == pytest.approx(np.std(values, ddof=1) / 2)
    assert Estimate.of([3.0]) == Estimate(3.0, None)


def test_best_are_those_that_a_paired_difference_cannot_tell_apart():
    far_apart = [0.0, 10.0, 20.0, 30.0]  # splits differ far more than methods
    values = {
        "A": far_apart,
        "B": [value - 1 + 0.1 * (-1) ** i for i, value in enumerate(far_apart)],
        "C": [value + 5 * (-1) ** i - 0.1 for i, value in enumerate(far_apart)],
    }
    summary = TableSummary("boston", 20, {}, {"log_likelihood": values, "rmse": values})
    assert summary.best("log_likelihood") == ["A", "C"]
    assert summary.best("rmse") == ["B", "C"]


# Specs and the store


def test_every_shipped_recipe_gives_each_method_as_many_trials():
    recipes = [TableRecipe.named(name) for name in UCI_SETS]
    assert len(recipes) == 9
    for recipe in recipes:
        runs = recipe.tuning_runs()
        assert len(set(runs)) == len(runs)
        for split in range(recipe.tuning_splits):
            tried = {m: {run.beta for run in runs if (run.method, run.split) == (m, split)} for m in TRAINED}
            assert {method: len(betas) for method, betas in tried.items()} == dict.fromkeys(TRAINED, 4)
        after_map = {len(set(run.laplace_betas)) for run in runs if run.method == "map"}
        assert after_map == {4}
        assert recipe.hidden == (100 if recipe.data == "protein" else 50)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epoch": 3}, "a recipe has no setting 'epoch'; did you mean 'epochs'?"),
        ({"epochs": 0}, "a recipe has epochs = 0; it must be a whole number of at least 1"),
        ({"lr": -1}, "a recipe has lr = -1; it must be a positive, finite number"),
        ({"validation": 1.0}, "a recipe has validation = 1.0; it must be a part of the rows"),
        ({"activation": "tan"}, "a recipe has activation = 'tan'; did you mean 'tanh'?"),
        ({"betas": ONE_BETA | {"vi": [0.1, 1.0]}}, "every method is tuned over the same number of trials"),
        ({"betas": {"map": [0.1]}}, "give as many for each of map, vi, vl, laplace"),
        ({"betas": ONE_BETA | {"vi": [0.0]}}, "a recipe has betas that are not positive"),
    ],
)
def test_a_recipe_that_cannot_be_right_is_refused(changes, message):
    with pytest.raises(ConfigError) as error:
        TableRecipe.named("yacht", **changes)
    assert message in str(error.value)


def test_a_run_that_cannot_be_right_is_refused():
    with pytest.raises(ConfigError, match="a run has method = 'mapp'; did you mean 'map'"):
        quick_run(method="mapp")
    with pytest.raises(ConfigError, match="a run has split = -1; it must be a whole number, counted from 0"):
        quick_run(split=-1)


def test_a_stored_result_comes_back_as_it_was(tmp_path):
    kept = TableResult(quick_run(method="map", laplace_betas=(0.1, 1.0)), {"mean": {"rmse": 0.5}}, 2.0, {"torch": "2"})
    TableStore(tmp_path).put(kept)
    assert TableStore(tmp_path).get(kept.run) == kept
    assert TableStore(tmp_path).get(quick_run(method="map")) is None


def test_a_damaged_file_of_results_is_named(tmp_path):
    (tmp_path / "yacht.json").write_text('{"runs": [{"run"')
    with pytest.raises(DataError, match=r"yacht\.json cannot be read .* delete it, and it is computed again"):
        TableStore(tmp_path).get(quick_run())


def test_published_figures_are_of_all_tables_and_have_a_source():
    theirs = published()
    for score in ("log_likelihood", "rmse"):
        assert list(theirs[score]) == list(theirs["methods"])
        for figures in theirs[score].values():
            assert set(figures) == set(UCI_SETS)
            assert all(len(pair) == 2 and math.isfinite(pair[0]) and pair[1] >= 0 for pair in figures.values())
