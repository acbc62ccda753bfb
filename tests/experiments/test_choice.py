"""β is chosen by held-out images and never by test images, and every method has had the same trials."""

import dataclasses
import math
from pathlib import Path

import pytest

from made_results import made_result, made_sweep
from varlap.errors import ConfigError
from varlap.experiments import RunSpec, Store
from varlap.experiments.choice import choose, final_runs


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
        "map (mean) β = 0.01",
    )


def test_the_longest_finished_sweep_chooses(tmp_path: Path):
    longer = [result for result in made_sweep(num_epochs=100) if result.spec.beta != 0.1]
    store = _store(tmp_path, made_sweep(num_epochs=20) + made_sweep(num_epochs=50) + longer)
    assert "sweep of 50 epochs" in final_runs(_grid(), store).chosen[0]


def test_a_sweep_that_is_not_finished_or_of_another_recipe_chooses_nothing(tmp_path: Path):
    store = _store(tmp_path, made_sweep(num_epochs=50)[:-1])
    with pytest.raises(ConfigError, match=r"cifar10: no sweep over β is finished, of which 8 of 9 .*--final"):
        final_runs(_grid(), store)
    with pytest.raises(ConfigError, match="of which 0 of 9"):
        final_runs(_grid(recipe="ours"), store)


def test_a_sweep_without_held_out_images_chooses_nothing(tmp_path: Path):
    store = _store(tmp_path, made_sweep(num_epochs=50, validation=0.0))
    with pytest.raises(ConfigError, match="the sweep held no images out"):
        final_runs(_grid(validation=0.0), store)
