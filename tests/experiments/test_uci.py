"""The UCI experiment: standardised by training rows, chosen on held-out rows, resumable, and in the table's units."""

import math
import shutil
import threading

import numpy as np
import pytest
import torch
from torch import nn

from uci_tables import NUM_SPLITS, write_uci
from varlap.data import UCI_SETS, Split, TableData, load_uci
from varlap.errors import CheckpointError, ConfigError, DataError
from varlap.experiments.uci import (
    AllDivergedError,
    TableRecipe,
    TableResult,
    TableRun,
    TableStore,
    Tuned,
    UCIExperiment,
    published,
    run as run_module,
    spec as spec_module,
)
from varlap.experiments.uci.run import choose_betas, compute, laplace_way
from varlap.experiments.uci.spec import TRAINED
from varlap.experiments.uci.summary import T_QUANTILES, Estimate, TableSummary, all_diverged, summarise
from varlap.experiments.uci.task import TableTask
from varlap.files import alone
from varlap.likelihoods import Gaussian
from varlap.posterior import BNN

QUICK = {"epochs": 2, "batch_size": 32, "hidden": 4, "betas": [0.1], "tuning_splits": 1}
SHIPPED = {"common": QUICK | {"lr": 0.02}, "sets": {"wine": {}, "yacht": {}}}


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
    return TableRecipe.named("yacht", **{"betas": [0.1, 1.0]} | changes)


def trials(low, high):
    """Return results of a split in which MAP prefers β = 1, Laplace on it 0.1, and VL what is given."""
    laplace = {beta: laplace_way(beta).replace("-", "_") for beta in (0.1, 1.0)}
    return [
        result("map", 0.1, mean=-2.0, **{laplace[0.1]: -0.1, laplace[1.0]: -0.1}),
        result("map", 1.0, mean=-1.0, **{laplace[0.1]: -0.8, laplace[1.0]: -0.9}),
        *(result("vi", beta, mean=-2.0, sampled=-2.0, linearised=-1.0 - beta) for beta in (0.1, 1.0)),
        result("vl", 0.1, **low),
        result("vl", 1.0, **high),
    ]


def ways(linearised, mean=-9.0, sampled=-9.0):
    return {"mean": mean, "sampled": sampled, "linearised": linearised}


def test_beta_is_that_of_the_best_held_out_log_likelihood():
    chosen = choose_betas(two_betas(), trials(ways(-0.9), ways(-1.3)))
    assert chosen["vl"] == Tuned(0.1, -0.9, num_trials=2, edge="smallest")
    assert chosen["vi"] == Tuned(0.1, -1.1, num_trials=2, edge="smallest")


def test_every_method_has_one_trial_a_beta_and_its_other_ways_of_predicting_are_none():
    """A score that only mean or samples reach chooses nothing: VI and VL would have three trials to MAP's one."""
    chosen = choose_betas(two_betas(), trials(ways(-0.9), ways(-1.3, mean=0.0, sampled=0.0)))
    assert chosen["vl"].beta == 0.1
    assert {one.num_trials for one in chosen.values()} == {2}


def test_a_chosen_beta_says_whether_it_is_the_smallest_or_the_largest_that_was_tried():
    assert Tuned.of({0.1: -1.0, 1.0: -2.0, 10.0: -3.0}).edge == "smallest"
    assert Tuned.of({0.1: -2.0, 1.0: -1.0, 10.0: -3.0}).edge == ""
    assert Tuned.of({0.1: -2.0, 1.0: -2.0, 10.0: -1.0}).edge == "largest"


def test_laplace_is_chosen_on_the_mean_that_map_chose():
    chosen = choose_betas(two_betas(), trials(ways(-1.0), ways(-1.0)))
    assert chosen["map"].beta == 1.0
    assert chosen["laplace"] == Tuned(0.1, -0.8, num_trials=2, edge="smallest")


def test_splits_are_averaged_and_a_beta_that_diverged_once_is_not_chosen():
    found = trials(ways(-1.0), ways(-2.0))
    second = [result(one.run.method, one.run.beta, split=1, failure="diverged") for one in found[4:5]]
    assert choose_betas(two_betas(), [*found, *second])["vl"].beta == 1.0
    better = [result("vl", 0.1, 1, **ways(-1.5)), result("vl", 1.0, 1, **ways(0.0))]
    chosen = choose_betas(two_betas(), [*found, *better])["vl"]
    assert (chosen.beta, chosen.log_likelihood) == (1.0, -1.0)


def test_a_table_on_which_all_diverges_says_so():
    found = [result(one.run.method, one.run.beta, failure="NaN") for one in trials(ways(0.0), ways(0.0))]
    with pytest.raises(ConfigError) as error:
        choose_betas(two_betas(), found)
    assert str(error.value) == (
        "yacht, map: the training diverged for every β at the learning rate 0.02; try a smaller one: "
        'UCIExperiment.of(out, data=["yacht"], lr=0.005)'
    )
    advised = UCIExperiment.of("out", data=["yacht"], lr=0.005)  # what the message says can be done
    assert advised.recipes[0].lr == 0.005


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
    assert UCIExperiment.of(tmp_path / "out", ["yacht"], 1, tmp_path, **QUICK | {"epochs": 1}).run()
    methods = ("map", "vi", "vl")
    assert [(run.method, run.tuning) for run in calls] == [(m, tuning) for tuning in (True, False) for m in methods]


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


def test_only_a_table_of_which_a_split_is_missing_is_read(tmp_path):
    out, data = tmp_path / "out", tmp_path / "data"
    for name, folder, num_splits in (("yacht", "yacht", 1), ("wine", "wine-quality-red", 2)):
        write_uci(data, folder)
        UCIExperiment.of(out, [name], num_splits, data, **QUICK).run()
    shutil.rmtree(data / "uci" / "wine-quality-red")
    both = UCIExperiment.of(out, ["yacht", "wine"], 2, data, **QUICK)
    assert both.run()  # the second split of yacht
    shutil.rmtree(data)
    assert both.run()
    assert [one.num_done for one in summarise(both)] == [2, 2]
    with pytest.raises(DataError, match="the UCI table 'yacht' is not in"):
        UCIExperiment.of(out, ["yacht", "wine"], 3, data, **QUICK).run()


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
    for label, method, way in (("MAP", "map", "mean"), ("Laplace", "map", "laplace-0.1"), ("VL", "vl", "linearised")):
        scores = [stored[method, split].scores[way]["rmse"] for split in range(NUM_SPLITS)]
        assert found.values["rmse"][label] == scores
    broken = stored["vi", 1]
    experiment.store.put(TableResult(broken.run, {}, 1.0, failure="NaN"))
    (found,) = summarise(experiment)
    assert (found.num_done, found.num_failed) == (NUM_SPLITS - 1, 1)


def test_all_that_a_store_holds_is_summarised_whatever_was_asked_for_last(tmp_path, monkeypatch):
    monkeypatch.setattr(spec_module, "_shipped", lambda: SHIPPED)
    for name in ("wine-quality-red", "yacht"):
        write_uci(tmp_path, name)
    UCIExperiment.of(tmp_path / "out", ["wine"], 1, tmp_path).run()
    UCIExperiment.of(tmp_path / "out", ["yacht"], 2, tmp_path).run()
    UCIExperiment.of(tmp_path / "out", ["yacht"], 1, tmp_path, epochs=1).run()
    found = summarise(UCIExperiment.stored(tmp_path / "out"))
    assert [(one.name, one.num_done) for one in found] == [("wine", 1), ("yacht", 2), ("yacht, 1 epoch", 1)]


def test_runs_of_other_settings_are_summarised_as_rows_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(spec_module, "_shipped", lambda: SHIPPED)
    write_uci(tmp_path)
    changes = [
        {},
        {"lr": 0.005},
        {"betas": [0.1, 1.0]},
        {"hidden": 3, "seed": 1},
        {"batch_size": 16, "activation": "softplus", "validation": 0.3, "tuning_splits": 2},
    ]
    for change in changes:
        UCIExperiment.of(tmp_path / "out", ["yacht"], 1, tmp_path, **change).run()
    stored = UCIExperiment.stored(tmp_path / "out")
    assert set(stored.recipes) == {TableRecipe.named("yacht", **change) for change in changes}
    assert [one.name for one in summarise(stored)] == [
        "yacht",
        "yacht, betas 0.1 1",
        "yacht, lr 0.005",
        "yacht, hidden 3, seed 1",
        "yacht, batch size 16, activation softplus, validation 0.3, tuning splits 2",
    ]
    for change in changes:
        (own,) = summarise(UCIExperiment.of(tmp_path / "out", ["yacht"], 1, **change))
        assert own in summarise(stored)


def test_a_table_on_which_all_diverged_holds_no_other_up_and_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(spec_module, "_shipped", lambda: SHIPPED)
    for name in ("wine-quality-red", "yacht"):
        write_uci(tmp_path, name)

    def diverging(table, run):
        return TableResult(run, {}, 1.0, failure="NaN") if run.data == "yacht" else compute(table, run)

    monkeypatch.setattr(run_module, "compute", diverging)
    with pytest.raises(AllDivergedError, match="yacht, map: the training diverged for every β"):
        UCIExperiment.of(tmp_path / "out", ["wine", "yacht"], 2, tmp_path).run()
    for experiment in (UCIExperiment.of(tmp_path / "out", ["wine", "yacht"]), UCIExperiment.stored(tmp_path / "out")):
        assert [(one.name, one.num_done) for one in summarise(experiment)] == [("wine", 2)]
        (words,) = all_diverged(experiment)
        assert words.startswith("yacht, map: the training diverged for every β")


def test_no_split_at_all_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="0 splits are none; give at least 1"):
        UCIExperiment.of(tmp_path, num_splits=0)


# Statistics


def test_the_standard_error_is_that_of_the_mean():
    values = [1.0, 2.0, 4.0, 9.0]
    found = Estimate.of(values)
    assert found.mean == 4.0
    assert found.standard_error == pytest.approx(np.std(values, ddof=1) / 2)
    assert Estimate.of([3.0]) == Estimate(3.0, None, 1)


@pytest.mark.parametrize("num_values", [2, 5, 20])
def test_a_difference_is_clear_where_a_t_test_says_so_at_5_per_cent(num_values):
    stats = pytest.importorskip("scipy.stats")
    assert T_QUANTILES[num_values - 2] == pytest.approx(stats.t.ppf(0.975, num_values - 1), abs=5e-4)
    values = np.random.default_rng(num_values).normal(size=num_values)
    values -= values.mean()
    error = values.std(ddof=1) / math.sqrt(num_values)
    for factor, clear in ((0.99, False), (1.01, True)):
        shifted = values + factor * T_QUANTILES[num_values - 2] * error
        assert Estimate.of(shifted.tolist()).is_clear is clear
        assert bool(stats.ttest_1samp(shifted, 0.0).pvalue < 0.05) is clear


def test_of_one_split_nothing_is_clear():
    summary = TableSummary("boston", 20, {}, {"rmse": {"MAP": [1.0], "VL": [9.0]}})
    assert summary.best("rmse") == ["MAP", "VL"]


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
        for split in range(recipe.tuning_splits):
            tried = {m: {run.beta for run in runs if (run.method, run.split) == (m, split)} for m in TRAINED}
            assert tried == {key: set(recipe.betas) for key in TRAINED}
        assert len(set(runs)) == len(runs) == 9 * len(TRAINED) * recipe.tuning_splits
        assert {run.laplace_betas for run in runs if run.method == "map"} == {recipe.betas}
        assert recipe.hidden == (100 if recipe.data == "protein" else 50)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epoch": 3}, "a recipe has no setting 'epoch'; did you mean 'epochs'?"),
        ({"epochs": 0}, "a recipe has epochs = 0; it must be a whole number of at least 1"),
        ({"lr": -1}, "a recipe has lr = -1; it must be a positive, finite number"),
        ({"validation": 1.0}, "a recipe has validation = 1.0; it must be a part of the rows"),
        ({"activation": "tan"}, "a recipe has activation = 'tan'; did you mean 'tanh'?"),
        ({"betas": []}, "a recipe has betas = (); give at least one, all of them positive"),
        ({"betas": [0.0, 1.0]}, "a recipe has betas = (0.0, 1.0); give at least one, all of them positive"),
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


def test_two_processes_lose_nothing_of_each_other(tmp_path):
    one, other = TableStore(tmp_path), TableStore(tmp_path)
    runs = [quick_run(split=split) for split in range(40)]
    assert one.get(runs[0]) is other.get(runs[1]) is None  # both have read the file before either writes

    def put(store, some):
        for run in some:
            store.put(TableResult(run, {"mean": {"rmse": 0.5}}, 1.0))

    threads = [threading.Thread(target=put, args=(store, runs[start::2])) for start, store in ((0, one), (1, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {result.run for result in TableStore(tmp_path).results("yacht")} == set(runs)


def test_a_result_waits_for_the_one_that_is_being_written(tmp_path):
    pytest.importorskip("fcntl")
    kept = TableResult(quick_run(), {"mean": {"rmse": 0.5}}, 1.0)
    with alone(tmp_path / ".lock"):
        thread = threading.Thread(target=TableStore(tmp_path).put, args=(kept,))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert TableStore(tmp_path).get(kept.run) is None
    thread.join(10)
    assert TableStore(tmp_path).get(kept.run) == kept


def test_a_folder_that_cannot_be_written_is_named_before_results_are_lost(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"the results in .* cannot be written: .*; choose another out"):
        TableStore(tmp_path / "file").put(TableResult(quick_run(), {}, 1.0))


def test_a_damaged_file_of_results_is_named(tmp_path):
    (tmp_path / "yacht.json").write_text('{"runs": [{"run"')
    for use in (TableStore(tmp_path).get, lambda run: TableStore(tmp_path).put(TableResult(run, {}, 1.0))):
        with pytest.raises(DataError, match=r"yacht\.json cannot be read .* delete it, and it is computed again"):
            use(quick_run())


def test_published_figures_are_of_all_tables_and_have_a_source():
    theirs = published()
    for score in ("log_likelihood", "rmse"):
        assert list(theirs[score]) == list(theirs["methods"])
        for figures in theirs[score].values():
            assert set(figures) == set(UCI_SETS)
            assert all(len(pair) == 2 and math.isfinite(pair[0]) and pair[1] >= 0 for pair in figures.values())
