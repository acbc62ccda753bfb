"""β is chosen by held-out images and never by test images, and every method has had the same trials."""

import contextlib
import dataclasses
import math
import threading
from pathlib import Path

import pytest

from made_results import BEST, made_result, made_sweep
from varlap.errors import CheckpointError, ConfigError, DataError
from varlap.experiments import RunSpec, Store, final_line
from varlap.experiments.choice import choose, final_runs
from varlap.experiments.final_line import record, recorded
from varlap.experiments.ways import NAMES


def _store(folder: Path, results: list) -> Store:
    store = Store(folder)
    for result in results:
        store.put(result)
    return store


def _grid(epochs: int = 200, seeds: int = 3, betas: tuple[float, ...] = (0.01, 0.03, 0.1), **spec) -> list[RunSpec]:
    return [
        RunSpec("cifar10", method, beta, epochs=epochs, seed=seed, **spec)
        for method in ("map", "vi", "vl")
        for beta in betas
        for seed in range(seeds)
    ]


def test_held_out_images_choose_and_what_test_images_would_choose_stands_beside():
    choice = choose([made_result("vl", beta) for beta in (0.01, 0.03, 0.1)], "mean")
    assert choice is not None
    assert (choice.beta, choice.by_test[0].spec.beta, choice.num_trials) == (0.1, 0.03, 3)


def test_a_choice_is_by_the_mean_over_seeds_and_a_nan_is_never_chosen():
    def result(beta: float, seed: int, nll: float):
        made = made_result("vl", beta, seed=seed)
        return dataclasses.replace(made, validation={"mean": {"nll": nll}})

    runs = [result(0.01, 0, 0.1), result(0.01, 1, 0.9), result(0.1, 0, 0.4), result(0.1, 1, 0.4)]
    choice = choose(runs, "mean")
    assert choice is not None
    assert choice.beta == 0.1
    assert [run.spec.seed for run in choice.by_validation] == [0, 1]
    choice = choose([result(0.01, 0, math.nan), result(0.1, 0, 9.0)], "mean")
    assert choice is not None
    assert choice.beta == 0.1


def _scored(beta: float, seed: int, nll: float):
    made = made_result("vl", beta, seed=seed)
    return dataclasses.replace(made, validation={"mean": {"nll": nll}}, test={"mean": {"nll": nll}})


def _diverged(method: str, beta: float, **spec):
    made = made_result(method, beta, **spec)
    return dataclasses.replace(made, test={}, validation={}, history=(), ood=None, failure="the loss is NaN")


def test_beta_are_compared_by_the_seeds_that_all_have():
    unlucky = [_scored(0.01, 0, 0.30), _scored(0.01, 1, 0.90), _scored(0.1, 0, 0.35)]
    choice = choose(unlucky, "mean")
    assert choice is not None
    assert (choice.beta, choice.by_test[0].spec.beta, choice.num_trials) == (0.01, 0.01, 2)
    assert [run.spec.seed for run in choice.by_validation] == [0, 1]  # all that were run there are shown


def test_beta_that_share_no_seed_are_compared_by_the_one_that_most_have():
    choice = choose([_scored(0.01, 1, 0.1), _scored(0.03, 0, 0.4), _scored(0.1, 0, 0.3)], "mean")
    assert choice is not None
    assert (choice.beta, choice.num_trials) == (0.1, 2)
    choice = choose([_scored(0.01, 1, 0.1), _scored(0.03, 0, 0.4)], "mean")
    assert choice is not None
    assert (choice.beta, choice.num_trials) == (0.03, 1)


def test_a_run_that_diverged_is_a_trial_that_is_never_chosen():
    choice = choose([_diverged("vl", 0.01), _scored(0.1, 0, 9.0)], "mean")
    assert choice is not None
    assert (choice.beta, choice.by_test[0].spec.beta, choice.num_trials) == (0.1, 0.1, 2)
    choice = choose([_diverged("vl", 0.01), _scored(0.1, 0, math.nan)], "mean")
    assert choice is not None
    assert choice.beta == 0.1
    assert choose([_diverged("vl", 0.01), _diverged("vl", 0.1)], "mean") is None


def test_where_every_beta_lost_a_seed_the_others_choose():
    runs = [_scored(0.01, 0, 0.9), _diverged("vl", 0.01, seed=1), _scored(0.1, 0, 0.1), _diverged("vl", 0.1, seed=1)]
    choice = choose(runs, "mean")
    assert choice is not None
    assert (choice.beta, choice.by_test[0].spec.beta) == (0.1, 0.1)


def test_what_the_test_images_would_choose_is_told_by_the_seeds_that_all_have():
    runs = [_scored(0.01, 0, 0.30), _scored(0.1, 0, 0.29), _scored(0.1, 1, 0.5)]
    runs[1] = dataclasses.replace(runs[1], validation={"mean": {"nll": 0.9}})
    choice = choose(runs, "mean")
    assert choice is not None
    assert choice.beta == 0.01
    assert [run.test["mean"]["nll"] for run in choice.by_test] == [0.29]


def test_where_all_compared_runs_diverged_nothing_is_chosen_whatever_other_seeds_did():
    unshared = _scored(1.0, 1, 0.3)
    assert choose([_diverged("vl", 0.1), _diverged("vl", 1.0), unshared], "mean") is None


def test_without_held_out_images_nothing_is_chosen():
    assert choose([made_result("vl", 0.1, validation=0.0)], "mean") is None
    assert choose([made_result("vl", 0.1)], "sampled") is None


def test_final_runs_are_those_at_the_chosen_beta_with_all_seeds(tmp_path: Path):
    final = final_runs(_grid(), _store(tmp_path, made_sweep(num_epochs=50)))
    found = {(spec.method, spec.beta, spec.seed, spec.epochs) for spec in final.specs}
    assert found == {(m, b, seed, 200) for m, b in (("map", 0.01), ("vi", 0.1), ("vl", 0.1)) for seed in range(3)}
    assert len(final.specs) == 9
    assert final.chosen == (
        "cifar10: the sweep of 50 epochs chooses vl (mean) β = 0.1, vi (mean) β = 0.1, vi (sampled) β = 0.1, "
        "map (mean) β = 0.01, map (scaled) β = 0.01, map (linearised) β = 0.01, vi (scaled) β = 0.1, "
        "vl (scaled) β = 0.1, vl (linearised) β = 0.1",
    )


def _with_nll(result, way: str, nll: float):
    return dataclasses.replace(result, validation={**result.validation, way: {"nll": nll}})


def test_every_way_of_predicting_has_a_beta_of_its_own(tmp_path: Path):
    sweep = [
        _with_nll(result, "scaled", 0.1) if (result.spec.method, result.spec.beta) == ("map", 0.03) else result
        for result in made_sweep(num_epochs=50)
    ]
    final = final_runs(_grid(seeds=1), _store(tmp_path, sweep))
    (line,) = final.lines
    assert {row.way: row.beta for row in line.rows if row.method == "map"} == {
        "mean": 0.01,
        "scaled": 0.03,
        "linearised": 0.01,
    }
    assert [(row.method, row.way) for row in line.rows] == list(NAMES)
    assert all(row.own for row in line.rows)
    assert sorted(spec.beta for spec in final.specs if spec.method == "map") == [0.01, 0.03]
    methods = ("map", "vi", "vl")
    assert line.sweep_epochs == dict.fromkeys(methods, 50)
    assert line.sweep_seeds == line.seeds == dict.fromkeys(methods, (0,))
    assert line.sweep_betas == dict.fromkeys(("map", "vi", "vl"), (0.01, 0.03, 0.1))


def test_methods_that_another_call_has_chosen_for_stay_in_the_record(tmp_path: Path):
    store = _store(tmp_path, made_sweep(num_epochs=50))
    (whole,) = final_runs(_grid(), store).lines
    for method in ("vl", "map", "vi", "map"):
        record(final_runs([spec for spec in _grid() if spec.method == method], store).lines, store)
    assert recorded(store) == [whole]


def test_other_methods_stay_in_the_record_with_their_own_seeds_and_their_own_sweep(tmp_path: Path):
    store = _store(tmp_path, made_sweep(num_epochs=50))
    record(final_runs([spec for spec in _grid(seeds=3) if spec.method != "vi"], store).lines, store)
    for result in made_sweep(num_epochs=100):
        store.put(result)
    record(final_runs([spec for spec in _grid(seeds=5) if spec.method == "vl"], store).lines, store)
    (line,) = recorded(store)
    assert {row.method for row in line.rows} == {"map", "vl"}
    assert line.seeds == {"map": (0, 1, 2), "vl": (0, 1, 2, 3, 4)}
    assert line.sweep_epochs == {"map": 50, "vl": 100}
    final = [made_result(method, BEST[method], num_epochs=200, seed=seed) for method in BEST for seed in range(5)]
    assert [run.spec.seed for run in line.runs(("map", "mean"), final)] == [0, 1, 2]
    assert [run.spec.seed for run in line.runs(("vl", "mean"), final)] == [0, 1, 2, 3, 4]
    assert line.runs(("vi", "mean"), final) == []


def test_two_commands_that_record_at_once_lose_nothing_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = _store(tmp_path, made_sweep(num_epochs=50))
    lines = {m: final_runs([spec for spec in _grid() if spec.method == m], store).lines for m in ("map", "vl")}
    original, together = final_line._with_other_methods, threading.Barrier(2)

    def slow(line, store):
        found = original(line, store)
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.3)  # both have read, if nothing holds the second one off
        return found

    monkeypatch.setattr(final_line, "_with_other_methods", slow)
    threads = [threading.Thread(target=record, args=(lines[method], store)) for method in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert set(recorded(store)[0].seeds) == {"map", "vl"}


def test_a_way_that_the_sweep_has_not_scored_takes_the_beta_of_the_mean(tmp_path: Path):
    def without(result):
        scores = {way: scores for way, scores in result.validation.items() if way != "linearised"}
        return dataclasses.replace(result, validation=scores)

    sweep = [without(result) for result in made_sweep(num_epochs=50, linearised=False)]
    final = final_runs(_grid(), _store(tmp_path, sweep))
    (line,) = final.lines
    assert line.borrowed == ["MAP + linearised Laplace", "VL, linearised"]
    assert (line.beta(("map", "linearised")), line.beta(("vl", "linearised"))) == (0.01, 0.1)
    assert "it has not scored MAP + linearised Laplace, VL, linearised, with the β of the mean" in final.chosen[0]
    (line,) = final_runs(_grid(linearised=False), Store(tmp_path)).lines
    assert {row.way for row in line.rows} == {"mean", "sampled", "scaled"}  # the final runs will not score it either
    assert line.borrowed == []


def test_results_of_a_version_without_a_way_choose_as_they_did(tmp_path: Path):
    def older(result):
        parts = {"test": result.test, "validation": result.validation}
        kept = {name: {way: part[way] for way in part if way != "scaled"} for name, part in parts.items()}
        return dataclasses.replace(result, **kept) if result.spec.method == "vi" else result

    sweep = [older(result) for result in made_sweep(num_epochs=50)]
    assert choose([result for result in sweep if result.spec.method == "vi"], "scaled") is None
    final = final_runs(_grid(), _store(tmp_path, sweep))
    assert {(spec.method, spec.beta) for spec in final.specs} == set(BEST.items())
    assert final.lines[0].borrowed == ["VI + temperature scaling"]


def test_a_way_that_the_sweep_has_scored_at_some_beta_only_has_had_fewer_trials_and_chooses_nothing(tmp_path: Path):
    some = [result for result in made_sweep(num_epochs=50) if result.spec.beta != BEST[result.spec.method]]
    others = [
        dataclasses.replace(r, validation={"mean": r.validation["mean"]})
        for r in made_sweep(num_epochs=50, linearised=False)
    ]
    (line,) = final_runs(_grid(), _store(tmp_path, some + others)).lines
    assert line.beta(("vl", "linearised")) == 0.1


def test_seeds_of_a_sweep_that_not_every_beta_has_choose_nothing(tmp_path: Path):
    lucky = dataclasses.replace(made_result("vl", 0.01, num_epochs=50, seed=1), validation={"mean": {"nll": 0.0}})
    (line,) = final_runs(_grid(), _store(tmp_path, [*made_sweep(num_epochs=50), lucky])).lines
    assert (line.beta(("vl", "mean")), line.sweep_seeds["vl"]) == (0.1, (0,))


def test_a_run_that_diverged_does_not_keep_a_sweep_from_choosing(tmp_path: Path):
    sweep = [*made_sweep((0.01, 0.1), num_epochs=50), *(_diverged(m, 0.03, num_epochs=50) for m in BEST)]
    (line,) = final_runs(_grid(), _store(tmp_path, sweep)).lines
    assert (line.beta(("vl", "mean")), line.sweep_betas["vl"]) == (0.1, (0.01, 0.03, 0.1))
    all_of_one = [r if r.spec.method != "vl" else _diverged("vl", r.spec.beta, num_epochs=50) for r in sweep]
    with pytest.raises(ConfigError, match="cifar10: every run of vl in the sweep of 50 epochs diverged"):
        final_runs(_grid(), _store(tmp_path, all_of_one))


def test_what_was_chosen_is_read_as_it_was_recorded_and_a_damaged_file_is_named(tmp_path: Path):
    store = _store(tmp_path, made_sweep(num_epochs=50))
    lines = [*final_runs(_grid(), store).lines, *final_runs(_grid(epochs=100), store).lines]
    record(lines, store)
    record(lines[:1], store)  # again
    assert sorted(line.spec.epochs for line in recorded(store)) == [100, 200]
    assert lines[0] in recorded(store)
    assert len(list(store)) == 9
    path = next((tmp_path / "final").glob("*.json"))
    path.write_text("{}")
    with pytest.raises(DataError, match=r"cannot be read .*; delete it, and --final writes it again"):
        recorded(store)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/final cannot be written \(Not a directory\); choose another one"):
        record(lines, Store(tmp_path / "file"))


def test_the_longest_finished_sweep_chooses(tmp_path: Path):
    longer = [result for result in made_sweep(num_epochs=100) if result.spec.beta != 0.1]
    store = _store(tmp_path, made_sweep(num_epochs=20) + made_sweep(num_epochs=50) + longer)
    assert "sweep of 50 epochs" in final_runs(_grid(), store).chosen[0]


def test_a_sweep_that_is_not_finished_or_of_another_recipe_chooses_nothing(tmp_path: Path):
    store = _store(tmp_path, made_sweep(num_epochs=50)[:-1])
    expected = r"is finished; of the one of 50 epochs with seed 0, 8 of 9 runs .*; missing: cifar10 vl β 0.1; run it"
    with pytest.raises(ConfigError, match=expected):
        final_runs(_grid(), store)
    with pytest.raises(ConfigError, match=r"of it, 0 of 9 .*; missing: cifar10 map β 0.01, .* and others; run it"):
        final_runs(_grid(recipe="ours"), store)


def test_a_sweep_without_held_out_images_chooses_nothing(tmp_path: Path):
    store = _store(tmp_path, made_sweep(num_epochs=50, validation=0.0))
    with pytest.raises(ConfigError, match="the sweep held no images out"):
        final_runs(_grid(validation=0.0), store)
