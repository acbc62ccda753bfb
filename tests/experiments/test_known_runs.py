"""A training that the store has under another name is not repeated, and no two different ones are taken for one."""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from varlap.experiments import Result, RunSpec, Store, run_grid
from varlap.experiments.choice import final_runs
from varlap.experiments.known_runs import SAME_RUN, KnownRuns
from varlap.experiments.run import epochs_done, run

SPEC = RunSpec("digits", "vl", 0.1, model="mlp", epochs=2, precision="fp32", lr=3e-3, num_train=100, batch_size=50)
BY_SGD = dataclasses.replace(SPEC, optimizer="SGD", momentum=0.9, clip_norm=1.0)
CLOSED = {"variances": "closed-form"}
OTHERS: dict[str, Any] = {
    **{"data": "mnist", "beta": 0.2, "seed": 1, "recipe": "x", "model": "convnet", "width": 64, "epochs": 3, "lr": 0.1},
    **{"schedule": "cosine", "optimizer": "Adam", "momentum": 0.8, "warmup": 0.1, "clip_norm": 2.0, "batch_size": 25},
    **{"log_sigma_lr_multiplier": 1.0, "curvature": "default", "gradient": "quiet", "variances": "closed-form"},
    **{"beta_warmup": 0.5, "prior_scale": 1.0, "augment": False, "validation": 0.2, "num_train": 50},
    **{"precision": "bf16", "linearised": False},
}
_OF_VL = {"recipe", "curvature", "gradient", "variances"}
UNUSED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "map": ({}, {*_OF_VL, "log_sigma_lr_multiplier"}),
    "map without held-out images": ({"validation": 0.0}, {*_OF_VL, "log_sigma_lr_multiplier", "linearised"}),
    "vi": ({}, {*_OF_VL, "linearised"}),
    "vl": ({}, {"recipe"}),
    "vl in closed form": (CLOSED, {"recipe", "log_sigma_lr_multiplier"}),
}


def _without_times(result: Result) -> Result:
    rows = tuple({n: v for n, v in row.items() if n not in ("seconds", "memory_mb")} for row in result.history)
    return dataclasses.replace(result, spec=SPEC, origin={}, seconds=0.0, evaluation_seconds=None, history=rows)


@pytest.mark.parametrize("which", UNUSED)
def test_specs_are_one_training_where_they_differ_in_nothing_that_their_method_uses(which: str, tmp_path: Path):
    settings, unused = UNUSED[which]
    spec = dataclasses.replace(BY_SGD, method=which.split()[0], **settings)
    assert set(OTHERS) == {field.name for field in dataclasses.fields(spec)} - {"method"}
    without = {"optimizer": {"momentum": 0.0}}  # which Adam has none of
    changed = {
        name: dataclasses.replace(spec, **{name: value, **without.get(name, {})}) for name, value in OTHERS.items()
    }
    changed = {name: one for name, one in changed.items() if one != spec}
    assert {name for name, one in changed.items() if one.effective() == spec.effective()} == unused
    different = {one.effective() for name, one in changed.items() if name not in unused}
    assert len(different) == len(changed) - len(unused)  # from each other too
    found = run(spec, Store(tmp_path))
    everything = dataclasses.replace(spec, **{name: OTHERS[name] for name in unused})
    assert _without_times(run(everything, Store(tmp_path))) == _without_times(found)


def test_methods_are_never_taken_for_each_other():
    assert len({dataclasses.replace(SPEC, method=method).effective() for method in ("map", "vi", "vl")}) == 3


@pytest.mark.parametrize(("method", "settings", "warmup"), [("map", {}, 0.0), ("vl", {}, 0.0), ("vl", CLOSED, 0.3)])
def test_no_warmup_of_beta_is_the_usual_one(method: str, settings: Mapping[str, Any], warmup: float, tmp_path: Path):
    spec = dataclasses.replace(SPEC, method=method, epochs=5, linearised=False, **settings)
    told = dataclasses.replace(spec, beta_warmup=warmup)
    assert told.effective() == spec.effective()
    assert _without_times(run(told, Store(tmp_path))) == _without_times(run(spec, Store(tmp_path)))
    assert dataclasses.replace(spec, beta_warmup=0.1).effective() != spec.effective()


def test_a_grid_trains_nothing_twice_and_keeps_a_copy_that_says_so(tmp_path: Path):
    store = Store(tmp_path)
    first = dataclasses.replace(SPEC, method="map")
    quiet, fast = (dataclasses.replace(first, **change) for change in ({"gradient": "quiet"}, {"recipe": "ours"}))
    assert run_grid([first, quiet], store).num_computed == 1  # the same within one call
    assert (run_grid([first], store).num_computed, run_grid([fast, quiet], store).num_computed) == (0, 0)
    original = store.get(first)
    assert original is not None
    assert SAME_RUN not in original.origin
    for spec in (quiet, fast):
        copy = store.get(spec)
        assert copy is not None
        assert copy.origin[SAME_RUN] == first.key()
        assert dataclasses.replace(copy, spec=first, origin=original.origin) == original
    other = dataclasses.replace(first, beta=0.2)
    assert run_grid([other], store).num_computed == 1


def test_a_run_with_linearised_scores_serves_a_spec_that_asks_for_none_but_not_the_other_way(tmp_path: Path):
    store, scores = Store(tmp_path), {way: {"nll": 0.3} for way in ("mean", "scaled", "linearised")}
    without = dataclasses.replace(SPEC, linearised=False)
    store.put(Result(SPEC, scores, scores, {}, 1.0, evaluation_seconds=9.0))
    (found,) = run_grid([without], store).results
    assert set(found.test) == set(found.validation) == {"mean", "scaled"}
    assert (found.origin[SAME_RUN], found.evaluation_seconds) == (SPEC.key(), None)
    alone = Store(tmp_path / "alone")
    alone.put(found)
    assert KnownRuns(alone).find(SPEC) is None


def test_a_failure_is_no_reason_to_train_the_same_again_unless_it_is_asked_for(tmp_path: Path):
    store, spec = Store(tmp_path), dataclasses.replace(SPEC, method="map")
    same = dataclasses.replace(spec, gradient="whole")
    store.put(Result(spec, {}, {}, {}, 1.0, failure="the loss is NaN"))
    found = KnownRuns(store).find(same)
    assert found is not None
    assert found.failure == "the loss is NaN"
    assert KnownRuns(store, again=True).find(same) is None
    diverging = [dataclasses.replace(one, lr=1e36) for one in (spec, same)]
    for again in (False, True):
        outcome = run_grid(diverging, store, again=again)
        assert (outcome.num_computed, len(outcome.failed)) == (1, 2)


def test_a_store_is_read_once_however_many_runs_a_grid_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = Store(tmp_path)
    specs = [dataclasses.replace(SPEC, seed=seed) for seed in range(20)]
    for spec in specs:
        store.put(Result(spec, {"mean": {"nll": 0.3}}, {}, {}, 1.0))
    read, original = [], Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *more: [read.append(path), original(path, *more)][1])
    assert len(run_grid(specs, store).results) == 20
    assert len(read) == 20


def test_a_copy_of_a_failure_gives_way_to_the_rerun_of_its_original(tmp_path: Path):
    store, spec = Store(tmp_path), dataclasses.replace(SPEC, method="map")
    same = dataclasses.replace(spec, gradient="whole")
    store.put(Result(spec, {}, {}, {}, 1.0, failure="the loss is NaN"))
    assert len(run_grid([spec, same], store).failed) == 2
    assert store.get(same) is not None
    store.put(Result(spec, {"mean": {"nll": 0.3}}, {}, {}, 1.0))  # as a rerun would
    outcome = run_grid([spec, same], store)
    assert (outcome.num_computed, outcome.failed) == (0, {})
    copy = store.get(same)
    assert copy is not None
    assert (copy.failure, copy.test["mean"]["nll"]) == (None, 0.3)


def test_of_the_same_training_one_that_ended_is_taken_before_one_that_failed(tmp_path: Path):
    store, asked = Store(tmp_path), dataclasses.replace(SPEC, gradient="whole", method="map", linearised=False)
    store.put(Result(dataclasses.replace(asked, gradient="held"), {}, {}, {}, 1.0, failure="the loss is NaN"))
    store.put(Result(dataclasses.replace(asked, gradient="held", linearised=True), {"mean": {"nll": 0.3}}, {}, {}, 1.0))
    found = KnownRuns(store).find(asked)
    assert found is not None
    assert found.failure is None


def test_a_failure_of_another_process_counts_though_earlier_ones_are_run_again(tmp_path: Path):
    store = Store(tmp_path)
    store.put(Result(SPEC, {}, {}, {}, 1.0, failure="the loss is NaN"))
    runs = KnownRuns(store, again=True)
    assert runs.find_now(SPEC) is None
    store.put(Result(SPEC, {}, {}, {}, 2.0, failure="the loss is NaN again"))
    found = runs.find_now(SPEC)
    assert found is not None
    assert found.failure == "the loss is NaN again"


def test_a_sweep_of_the_same_trainings_chooses_for_final_runs(tmp_path: Path):
    store = Store(tmp_path)
    held = [dataclasses.replace(SPEC, method="map", beta=beta, linearised=False) for beta in (0.1, 0.2)]
    for spec, nll in zip(held, (0.4, 0.3), strict=True):
        scores = {way: {"nll": nll} for way in ("mean", "scaled")}
        store.put(Result(spec, scores, scores, {}, 1.0))
    longer = [dataclasses.replace(spec, gradient="whole", epochs=4) for spec in held]
    assert [spec.beta for spec in final_runs(longer, store).specs] == [0.2]


def test_a_limit_that_the_loading_has_used_up_stops_the_run_at_a_checkpoint(tmp_path: Path):
    ticks = itertools.count(0.0, 60.0)
    outcome = run_grid([SPEC], Store(tmp_path), budget_s=100.0, clock=lambda: next(ticks))
    assert outcome.left == [SPEC]
    assert epochs_done(SPEC, Store(tmp_path)) == 0
    assert run_grid([SPEC], Store(tmp_path)).num_computed == 1
