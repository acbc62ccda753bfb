"""Claims about regressors that learn next to nothing at first: they look again, and say so where it is in vain."""

import warnings

import numpy as np
import pytest

import varlap
from varlap.errors import VarlapWarning
from varlap.integrations.scikit_learn import flat, regressor, sizing

FLAT = r"VLRegressor's mean explains \d+\.\d% of the variance of its training targets, .*; if there is something"


def wave(num_rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(seed)
    x = draws.uniform(-3, 3, (num_rows, 1))
    return x, np.sin(2 * x[:, 0]) + 0.1 * draws.standard_normal(num_rows)


def noise(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(0)
    return draws.standard_normal((num_rows, 3)), draws.standard_normal(num_rows)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "FEWEST_STEPS_AGAIN", 300)


def test_a_wave_that_the_first_fit_takes_for_noise_is_learnt_by_the_defaults():
    data, others = wave(60), wave(500, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = varlap.VLRegressor(noise="constant", random_state=0).fit(*data)
    assert model.score(*others) > 0.9
    assert model.beta_ in {defaults.beta for defaults in sizing.AGAIN}
    assert model.n_iter_ == sizing.FEWEST_STEPS_AGAIN
    with pytest.warns(VarlapWarning, match=FLAT):
        first = varlap.VLRegressor(beta=0.6, random_state=0).fit(*data)
    assert first.score(*others) < 0.2


@pytest.mark.usefixtures("short")
def test_where_there_is_nothing_to_learn_the_first_fit_stays_and_says_so(monkeypatch: pytest.MonkeyPatch):
    with pytest.warns(VarlapWarning, match=FLAT):
        looked_again = varlap.VLRegressor(random_state=0).fit(*noise(60))
    monkeypatch.setattr(regressor, "better_defaults", lambda *_: None)
    with pytest.warns(VarlapWarning, match=FLAT):
        alone = varlap.VLRegressor(random_state=0).fit(*noise(60))
    assert looked_again.beta_ == alone.beta_ == 0.6
    np.testing.assert_array_equal(looked_again.predict(noise(60)[0]), alone.predict(noise(60)[0]))


@pytest.mark.parametrize("chosen", [{"beta": 0.6}, {"epochs": 80}, {"batch_size": 60}])
def test_what_the_user_has_chosen_is_not_chosen_again(chosen: dict, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(regressor, "better_defaults", None)  # whoever calls it fails
    with pytest.warns(VarlapWarning, match=FLAT):
        varlap.VLRegressor(random_state=0, **chosen).fit(*noise(60))


def test_a_fit_that_learns_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(regressor, "better_defaults", None)
    x, y = wave(60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        varlap.VLRegressor(random_state=0).fit(x, x[:, 0] + 0.1 * y)
        varlap.VLRegressor(random_state=0).fit(x, np.full(60, 3.0))  # nothing to explain


def test_folds_of_a_choice_of_beta_do_not_warn_and_the_choice_does():
    with pytest.warns(VarlapWarning, match=FLAT) as caught:
        varlap.VLRegressor(beta=[0.6, 1.0], cv=2, random_state=0).fit(*noise(60))
    assert len(caught) == 1


def test_a_weight_is_a_repetition_where_a_table_is_trained_again_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sizing, "FEWEST_STEPS_AGAIN", 600)
    x, y = wave(60)
    weights = np.repeat([0, 1, 2], [10, 45, 5])
    weighted = varlap.VLRegressor(noise="constant", random_state=0).fit(x, y, sample_weight=weights)
    repeated = varlap.VLRegressor(noise="constant", random_state=0).fit(np.repeat(x, weights, 0), np.repeat(y, weights))
    assert weighted.beta_ == repeated.beta_ < 0.6
    for one, other in zip(*(model.predict(x, return_std=True) for model in (weighted, repeated)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_equal_rows_are_held_out_together_and_a_quarter_of_the_others():
    x = np.repeat(np.arange(80.0), 2)[:, None]
    train, test = flat._held_out(x, x[:, 0], seed=0)
    assert sorted([*train, *test]) == list(range(160))
    assert len(test) == 40
    assert not set(x[train, 0]) & set(x[test, 0])
    assert flat._held_out(x[:78], x[:78, 0], seed=0) is None  # 39 distinct ones


def test_the_part_that_is_explained_counts_weights_like_repetitions():
    draws = np.random.default_rng(0)
    targets, fitted, weights = draws.standard_normal((9, 2)), draws.standard_normal((9, 2)), np.arange(9)
    found = flat.explained(targets, fitted, weights)
    again = flat.explained(np.repeat(targets, weights, 0), np.repeat(fitted, weights, 0), None)
    assert found == pytest.approx(again, rel=1e-12)
    assert flat.explained(targets, targets, None) == 1.0


def test_a_guess_is_the_gaussian_of_the_training_targets():
    y, test = np.array([1.0, 3.0]), np.array([2.0, 5.0])
    expected = np.mean([0.5 * np.log(2 * np.pi), 0.5 * (9 + np.log(2 * np.pi))])
    assert flat._nll_of_guess(y, test, None, None) == pytest.approx(expected, rel=1e-12)


@pytest.mark.usefixtures("short")
def test_settings_are_chosen_by_what_they_predict_and_not_by_their_order(monkeypatch: pytest.MonkeyPatch):
    data = wave(60)
    with warnings.catch_warnings(action="ignore"):
        fitted = varlap.VLRegressor(noise="constant", random_state=0).fit(*data)
    chosen = flat.better_defaults(fitted, *data, None)
    assert chosen in sizing.AGAIN
    monkeypatch.setattr(flat, "AGAIN", sizing.AGAIN[::-1])
    assert flat.better_defaults(fitted, *data, None) == chosen


@pytest.mark.usefixtures("short")
def test_a_fit_that_stays_flat_ends_with_the_best_settings_and_says_so(monkeypatch: pytest.MonkeyPatch):
    model = varlap.VLRegressor(noise="constant", random_state=0)
    monkeypatch.setattr(regressor, "LITTLE", 1.1)  # so that every fit counts as flat
    with pytest.warns(VarlapWarning, match=FLAT):
        model.fit(*wave(60))
    best = flat.better_defaults(model, *wave(60), None)
    assert best is not None
    assert model.beta_ == best.beta
    monkeypatch.setattr(regressor, "better_defaults", lambda *_: best)
    with pytest.warns(VarlapWarning, match=FLAT):
        again = varlap.VLRegressor(noise="constant", random_state=0).fit(*wave(60))
    np.testing.assert_array_equal(model.predict(wave(60)[0]), again.predict(wave(60)[0]))
