"""Claims about the scikit-learn estimators themselves: what they learn, weigh, choose and refuse."""

import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris, make_regression
from sklearn.exceptions import NotFittedError
from torch import nn

import varlap
from varlap.errors import ConfigError
from varlap.integrations.scikit_learn import base, sizing

X_IRIS, Y_IRIS = load_iris(return_X_y=True)
FEW = {"hidden": (4,), "epochs": 5, "random_state": 0}


def line(num_rows: int = 40, noise: float = 0.3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draws = np.random.default_rng(seed)
    x = draws.uniform(-2, 2, (num_rows, 1))
    return x, 100 + 50 * x[:, 0] + 50 * noise * draws.standard_normal(num_rows)


def own_network(num_inputs: int, num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(num_inputs, 5), nn.Tanh(), nn.Linear(5, num_outputs))


def normed_network(num_inputs: int, num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(num_inputs, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, num_outputs))


# ---- learning -----------------------------------------------------------------------------------------------------


def test_classifier_learns_with_its_defaults():
    model = varlap.VLClassifier(random_state=0).fit(X_IRIS, Y_IRIS)
    assert model.score(X_IRIS, Y_IRIS) > 0.95
    assert model.n_iter_ == sizing.num_steps(150)
    assert isinstance(model.bnn_, varlap.BNN)
    assert model.network_ is model.bnn_.network


def test_regressor_learns_mean_and_noise_in_the_units_of_the_targets():
    X, y = line(200)
    mean, std = varlap.VLRegressor(random_state=0).fit(X, y).predict([[0.0], [1.0]], return_std=True)
    np.testing.assert_allclose(mean, [100, 150], atol=6)
    np.testing.assert_allclose(std, [15, 15], rtol=0.25)


def test_standard_deviation_is_that_of_the_linearised_posterior_and_the_noise():
    X, y = line()
    model = varlap.VLRegressor(noise="constant", **FEW).fit(X, y)
    mean, std = model.predict(X, return_std=True)
    inputs = torch.as_tensor((X - X.mean(0)) / X.std(0))
    prediction = model.bnn_.predict(inputs, how="linearised", closed_form=True)
    np.testing.assert_allclose(mean, prediction.mean[:, 0] * y.std() + y.mean())
    np.testing.assert_allclose(std, prediction.variance[:, 0].sqrt() * y.std())
    np.testing.assert_array_equal(mean, model.predict(X))


def test_noise_that_grows_with_the_input_is_learnt():
    X = np.random.default_rng(0).uniform(-1, 1, (600, 1))
    y = 3 * X[:, 0] + np.exp(X[:, 0]) * np.random.default_rng(1).normal(size=600)
    grid = np.linspace(-0.9, 0.9, 7)[:, None]
    mean, std = varlap.VLRegressor(random_state=0).fit(X, y).predict(grid, return_std=True)
    np.testing.assert_allclose(std, np.exp(grid[:, 0]), rtol=0.5)
    assert std[-1] > 3 * std[0]  # truly 6 times
    np.testing.assert_allclose(mean, 3 * grid[:, 0], atol=0.4)


def test_varying_noise_is_the_shared_noise_times_the_second_networks_scale():
    X, y = line()
    model = varlap.VLRegressor(**FEW).fit(X, y)
    inputs = torch.as_tensor((X - X.mean(0)) / X.std(0))
    noise = (model.bnn_.likelihood.log_noise + model.noise_bnn_.network(inputs)).exp()
    weights = model.bnn_.predict(inputs, how="linearised", closed_form=True).epistemic_variance
    expected = (weights + noise.square()).sqrt()[:, 0] * y.std()
    np.testing.assert_allclose(model.predict(X, return_std=True)[1], expected.detach())
    assert model.set_params(how="mean").predict(X, return_std=True)[1] == pytest.approx(
        noise.detach().numpy()[:, 0] * y.std()
    )


def test_second_network_sees_the_squared_residuals_and_the_variance_of_the_weights(monkeypatch):
    seen = []
    X, y = line()
    model = varlap.VLRegressor(noise="constant", **FEW).fit(X, y)
    monkeypatch.setattr(varlap.VLRegressor, "_run", lambda self, bnn, data, *rest, **named: seen.append(data))
    model.set_params(noise="varying")._learn_noise(X, y, None)
    inputs, targets = seen[0]
    prediction = model.bnn_.predict(inputs, how="linearised", closed_form=True)
    residuals = torch.as_tensor((y - y.mean()) / y.std())[:, None] - prediction.mean
    expected = (residuals.square() + prediction.epistemic_variance).sqrt() / model.bnn_.likelihood.log_noise.exp()
    torch.testing.assert_close(targets, expected.detach())


def test_constant_noise_is_one_number_for_all_rows():
    X, y = line()
    model = varlap.VLRegressor(noise="constant", how="mean", **FEW).fit(X, y)
    assert model.noise_bnn_ is None
    assert len(set(model.predict(X, return_std=True)[1])) == 1


def test_a_pass_of_partial_fit_has_one_noise_for_all_rows():
    X, y = line()
    model = varlap.VLRegressor(how="mean", **FEW).fit(X, y).partial_fit(X, y)
    assert len(set(model.predict(X, return_std=True)[1])) == 1


@pytest.mark.parametrize("name", ["fit", "partial_fit"])
def test_noise_of_another_name_is_refused_before_training(name):
    model = varlap.VLRegressor(noise="none", **FEW)
    with pytest.raises(ConfigError, match=r"VLRegressor\(noise='none'\): choose 'varying' or 'constant'"):
        getattr(model, name)(*line())
    assert not hasattr(model, "bnn_")


@pytest.mark.parametrize("wrong", ["features", "targets", "weights", "noise"])
def test_a_wrong_call_of_partial_fit_leaves_the_predictions_as_they_were(wrong):
    X, y = line()
    model = varlap.VLRegressor(**FEW).fit(X, y)
    before = model.predict(X, return_std=True)
    rows = X.repeat(2, 1) if wrong == "features" else X
    targets = np.stack([y, y], 1) if wrong == "targets" else y
    model.set_params(noise="none" if wrong == "noise" else "varying")
    with pytest.raises(ValueError, match=r"features|sample_weight|noise"):
        model.partial_fit(rows, targets, -np.ones(40) if wrong == "weights" else None)
    for one, other in zip(model.predict(X, return_std=True), before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["fit", "partial_fit"])
def test_training_that_fails_leaves_no_noise_of_an_earlier_network(name, monkeypatch):
    def interrupted(*_args, **_named):
        raise KeyboardInterrupt

    X, y = line()
    model = varlap.VLRegressor(**FEW).fit(X, y)
    monkeypatch.setattr(varlap.VLRegressor, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(model, name)(X, y)
    assert model.noise_bnn_ is None


def test_far_from_the_data_the_regressor_is_less_sure():
    X, y = line(200)
    _, std = varlap.VLRegressor(random_state=0).fit(X, y).predict([[0.0], [20.0]], return_std=True)
    assert std[1] > 1.4 * std[0]


def test_several_targets_have_each_their_own_noise_and_scale():
    X, first = line(100)
    y = np.stack([first, 0.001 * first[::-1]], 1)
    mean, std = varlap.VLRegressor(random_state=0).fit(X, y).predict(X, return_std=True)
    assert mean.shape == std.shape == (100, 2)
    assert std[:, 0].mean() > 100 * std[:, 1].mean()


@pytest.mark.filterwarnings("ignore:VLRegressor's mean explains")  # after five passes
@pytest.mark.parametrize("kind", [varlap.VLClassifier, varlap.VLRegressor])
def test_units_of_the_features_do_not_matter(kind):
    X, y = make_regression(40, 3, random_state=0)
    y = y > 0 if kind is varlap.VLClassifier else y
    scaled = kind(**FEW).fit(1e4 * X + 7, y).predict(1e4 * X + 7)
    np.testing.assert_allclose(scaled, kind(**FEW).fit(X, y).predict(X), rtol=1e-6)


def test_log_probabilities_are_the_logarithms_of_the_probabilities():
    model = varlap.VLClassifier(**FEW).fit(X_IRIS, Y_IRIS)
    far = np.vstack([X_IRIS, 1e5 * X_IRIS[:1]])  # where probabilities may be 0
    np.testing.assert_allclose(np.exp(model.predict_log_proba(far)), model.predict_proba(far), rtol=1e-12)


def test_labels_may_be_words():
    names = np.array(["setosa", "versicolor", "virginica"])
    model = varlap.VLClassifier(**FEW).fit(X_IRIS, names[Y_IRIS])
    assert list(model.classes_) == list(names)
    assert set(model.predict(X_IRIS)) <= set(names)


@pytest.mark.parametrize("how", ["mean", "linearised", "sampled"])
def test_probabilities_sum_to_one_however_they_are_predicted(how):
    model = varlap.VLClassifier(how=how, beta=0.01, random_state=0).fit(X_IRIS, Y_IRIS)
    np.testing.assert_allclose(model.predict_proba(X_IRIS).sum(1), 1)
    assert model.score(X_IRIS, Y_IRIS) > 0.9


# ---- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [varlap.VLClassifier, varlap.VLRegressor])
def test_weight_equals_repetition_and_zero_equals_absence(kind):
    weights = np.arange(len(X_IRIS)) % 4
    weighted = kind(**FEW).fit(X_IRIS, Y_IRIS, sample_weight=weights)
    repeated = kind(**FEW).fit(np.repeat(X_IRIS, weights, 0), np.repeat(Y_IRIS, weights))
    if kind is varlap.VLRegressor:
        pairs = zip(*(model.predict(X_IRIS, return_std=True) for model in (weighted, repeated)), strict=True)
    else:
        pairs = [(weighted.predict_proba(X_IRIS), repeated.predict_proba(X_IRIS))]
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=1e-9)


def test_smaller_weights_are_less_evidence():
    X, y = line()
    full, tenth = (varlap.VLRegressor(random_state=0).fit(X, y, np.full(40, weight)) for weight in (1.0, 0.1))
    variances = [
        model.bnn_.predict(torch.zeros(1, 1).double(), how="linearised", closed_form=True).epistemic_variance
        for model in (full, tenth)
    ]
    assert variances[1] > 2 * variances[0]


def test_weights_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="sample_weight must not be negative, and not all of it zero"):
        varlap.VLClassifier(**FEW).fit(X_IRIS, Y_IRIS, -np.ones(150))
    with pytest.raises(ValueError, match="zero"):  # scikit-learn's own words, where it looks first
        varlap.VLClassifier(**FEW).fit(X_IRIS, Y_IRIS, np.zeros(150))


# ---- chance -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, 32])
def test_a_seed_repeats_a_fit_bit_by_bit_and_leaves_the_global_generators_alone(batch_size):
    states = torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    one, again = (varlap.VLClassifier(batch_size=batch_size, **FEW).fit(X_IRIS, Y_IRIS) for _ in range(2))
    np.testing.assert_array_equal(one.predict_proba(X_IRIS), again.predict_proba(X_IRIS))
    assert torch.equal(torch.get_rng_state(), states[0])
    np.testing.assert_array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002


def test_order_of_the_rows_of_a_small_table_does_not_matter():
    one = varlap.VLClassifier(**FEW).fit(X_IRIS, Y_IRIS)
    other = varlap.VLClassifier(**FEW).fit(X_IRIS[::-1], Y_IRIS[::-1])
    np.testing.assert_allclose(one.predict_proba(X_IRIS), other.predict_proba(X_IRIS), rtol=1e-9)


def test_pickle_gives_the_same_predictions():
    model = varlap.VLRegressor(network=own_network, **FEW | {"hidden": None}).fit(X_IRIS, Y_IRIS)
    again = pickle.loads(pickle.dumps(model))
    for one, other in zip(model.predict(X_IRIS, True), again.predict(X_IRIS, True), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_number_of_threads_is_put_back():
    torch.set_num_threads(2)
    varlap.VLClassifier(**FEW).fit(X_IRIS, Y_IRIS).predict(X_IRIS)
    assert torch.get_num_threads() == 2


def test_fits_at_once_leave_the_number_of_threads_to_threads_that_come():
    torch.set_num_threads(2)
    entered, leave = threading.Event(), threading.Event()

    def second():
        with base._one_thread(True):
            entered.set()
            leave.wait()

    with ThreadPoolExecutor(1) as threads:
        with base._one_thread(True):
            threads.submit(second)
            entered.wait()
        leave.set()
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(torch.get_num_threads).result() == 2


@pytest.mark.parametrize("options", [{}, {"beta": "cv"}], ids=["fit", "cv"])
def test_one_class_alone_is_refused_by_its_name(options):
    with pytest.raises(ValueError, match="y has one class only, cat; give rows of at least two"):
        varlap.VLClassifier(**FEW | options).fit(X_IRIS, ["cat"] * len(X_IRIS))


def test_one_class_alone_is_refused_by_partial_fit_unless_there_are_others():
    for classes in (None, [0]):
        with pytest.raises(ValueError, match="y has one class only, 0; give rows of at least two"):
            varlap.VLClassifier(**FEW).partial_fit(X_IRIS, np.zeros(150, dtype=int), classes=classes)
    varlap.VLClassifier(**FEW).partial_fit(X_IRIS, np.zeros(150, dtype=int), classes=[0, 1])


# ---- partial_fit --------------------------------------------------------------------------------------------------


def test_partial_fit_learns_from_pass_to_pass():
    model = varlap.VLClassifier(batch_size=16, random_state=0)
    for _ in range(10):
        model.partial_fit(X_IRIS, Y_IRIS)
    assert model.score(X_IRIS, Y_IRIS) > 0.8
    assert model.n_iter_ == 10


def test_partial_fit_may_meet_a_class_later_if_it_was_told_of_it():
    model = varlap.VLClassifier(**FEW).partial_fit(X_IRIS[:50], Y_IRIS[:50], classes=[0, 1, 2])
    model.partial_fit(X_IRIS, Y_IRIS)
    assert model.predict_proba(X_IRIS).shape == (150, 3)
    with pytest.raises(ValueError, match="class 7 is none of"):
        model.partial_fit(X_IRIS, np.full(150, 7))
    with pytest.raises(ValueError, match="are not those of the first call"):
        model.partial_fit(X_IRIS, Y_IRIS, classes=[0, 1])


def test_partial_fit_counts_all_rows_seen_as_data():
    """The KL's share of the loss, β/N, falls with the rows seen."""
    X, y = line()
    model = varlap.VLRegressor(**FEW).partial_fit(X, y)
    assert model._num_seen == 40
    assert model.partial_fit(X, y, np.full(40, 0.5))._num_seen == 60


def test_fit_starts_anew_after_partial_fit():
    fresh = varlap.VLClassifier(**FEW).fit(X_IRIS, Y_IRIS)
    model = varlap.VLClassifier(**FEW).partial_fit(X_IRIS + 9, Y_IRIS + 5).fit(X_IRIS, Y_IRIS)
    np.testing.assert_array_equal(model.predict_proba(X_IRIS), fresh.predict_proba(X_IRIS))
    assert model.n_iter_ == fresh.n_iter_


# ---- networks and sizes -------------------------------------------------------------------------------------------


def test_own_network_is_made_of_the_numbers_of_inputs_and_outputs():
    model = varlap.VLClassifier(network=own_network, epochs=2, random_state=0).fit(X_IRIS, Y_IRIS)
    assert [type(module) for module in model.network_] == [nn.Linear, nn.Tanh, nn.Linear]
    assert (model.network_[0].in_features, model.network_[2].out_features) == (4, 3)


def test_own_network_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match=r"network=.*must make an nn.Module of \(num_inputs, num_outputs\).*int"):
        varlap.VLRegressor(network=lambda i, o: i + o).fit(X_IRIS, Y_IRIS)


@pytest.mark.parametrize("network", [nn.Linear(4, 1), "mlp"], ids=["module", "word"])
def test_a_network_in_place_of_a_function_that_makes_one_is_refused_with_the_fix(network):
    message = (
        rf"network=...\) must be a function .* but it is a {type(network).__name__}; give .*lambda num_inputs, num"
    )
    with pytest.raises(ConfigError, match=message):
        varlap.VLRegressor(network=network).fit(X_IRIS, Y_IRIS)


@pytest.mark.parametrize("device", ["cuda:99", "banana", 1.5])
def test_a_device_that_is_not_there_is_refused_with_the_fix(device):
    message = (
        rf"^VLClassifier\(device={device!r}\): torch .* has no such device here \(.+\); leave device out for the CPU$"
    )
    with pytest.raises(ConfigError, match=message):
        varlap.VLClassifier(device=device).fit(X_IRIS, Y_IRIS)


def test_large_tables_are_trained_in_batches_and_single_precision(monkeypatch):
    monkeypatch.setattr(sizing, "MOST_EXACT_ENTRIES", 100)
    model = varlap.VLClassifier(hidden=(4,), epochs=2, random_state=0).fit(X_IRIS, Y_IRIS)
    assert model.history_.settings.batch_size == sizing.CLASSES.small.batch_size
    assert next(model.network_.parameters()).dtype == torch.float32


def test_own_network_that_is_no_plain_stack_is_trained_in_batches():
    model = varlap.VLRegressor(network=normed_network, epochs=2, random_state=0).fit(X_IRIS, Y_IRIS)
    assert model.history_.settings.batch_size == sizing.NUMBERS.small.batch_size


@pytest.mark.parametrize(("num_rows", "num_features", "expected"), [(300, 2, 300), (1300, 40, 128), (2000, 1, 256)])
def test_rows_a_step_are_those_documented(num_rows, num_features, expected):
    X = np.random.default_rng(0).normal(size=(num_rows, num_features))
    model = varlap.VLRegressor(epochs=1, noise="constant", random_state=0).fit(X, X[:, 0])
    assert model.history_.settings.batch_size == expected
    words = "of a small table (fewer than 2,000 rows, and rows × targets × weights of the network up to two million)"
    assert f"all {words}, else 128, or 256 from 2,000 rows on" in " ".join(varlap.VLRegressor.__doc__.split())


def test_fitted_numbers_are_those_asked_for():
    model = varlap.VLClassifier(hidden=(3, 2), epochs=4, batch_size=50, lr=0.02, random_state=0).fit(X_IRIS, Y_IRIS)
    settings = model.history_.settings
    assert (settings.epochs, settings.batch_size, settings.lr) == (4, 50, 0.02)
    assert [p.shape[0] for p in model.network_.parameters() if p.ndim == 2] == [3, 2, 3]


def test_clone_is_unfitted_and_has_the_same_parameters():
    model = varlap.VLClassifier(network=own_network, beta=[0.1, 1.0], **FEW).fit(X_IRIS, Y_IRIS)
    copy = clone(model)
    assert copy.get_params() == model.get_params()
    with pytest.raises(NotFittedError):
        copy.predict(X_IRIS)


# ---- the extra ----------------------------------------------------------------------------------------------------

WITHOUT_SKLEARN = """
import sys
sys.modules["sklearn"] = None
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "sklearn" else found(name, *rest)
import varlap
from varlap import *
try:
    varlap.VLClassifier
except varlap.errors.MissingExtraError as error:
    print(error)
"""


def test_without_scikit_learn_the_pip_command_is_named_and_the_rest_works():
    done = subprocess.run([sys.executable, "-c", WITHOUT_SKLEARN], capture_output=True, text=True, timeout=120)
    assert done.stdout == (
        "varlap.VLClassifier and varlap.VLRegressor needs an optional dependency: pip install '.[sklearn]' in the "
        "checkout\n"
    ), done.stderr


@pytest.mark.parametrize("kind", [varlap.VLClassifier, varlap.VLRegressor])
def test_an_unknown_way_to_predict_is_refused_before_the_training(kind):
    with pytest.raises(varlap.errors.ConfigError, match=r"\(how='linear'\): did you mean 'linearised'"):
        kind(how="linear").fit([[0.0], [1.0]], [0, 1])


@pytest.mark.parametrize("kind", [varlap.VLClassifier, varlap.VLRegressor])
@pytest.mark.parametrize("name", ["epochs", "batch_size", "lr"])
def test_zero_is_refused_and_not_taken_for_the_default(kind, name):
    with pytest.raises(ConfigError, match=rf"{kind.__name__}\({name}=0\) must be positive; None chooses by the size"):
        kind(**{name: 0}).fit([[0.0], [1.0]], [0, 1])


def test_one_hidden_layer_may_be_given_by_its_size():
    model = varlap.VLClassifier(7, epochs=1).fit([[0.0], [1.0]], [0, 1])
    assert [layer.out_features for layer in model.network_.modules() if isinstance(layer, nn.Linear)] == [7, 2]
