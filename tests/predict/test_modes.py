"""Claims about `predict`: every mode with every network and likelihood, repeatable, and without a trace."""

import copy
import math
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import varlap
from cases import CASES, Exponential, S
from varlap.errors import BatchError, ConfigError, VarlapWarning
from varlap.likelihoods.prediction import entropy
from varlap.predict import predict
from varlap.predict.average import average
from varlap.predict.mean import probed_outputs

pytestmark = pytest.mark.filterwarnings("ignore:batch norm follows Bayesian weights:varlap.errors.VarlapWarning")

MODES = {
    "mean": {"how": "mean"},
    "sampled": {"how": "sampled", "num_samples": 6},
    "linearised": {"how": "linearised", "num_samples": 6},
    "closed-form": {"how": "linearised", "closed_form": True},
    "outputs-drawn": {"how": "linearised", "closed_form": True, "num_samples": 6},
}
by_mode = pytest.mark.parametrize("mode", MODES)
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def named_case(name):
    return next(case for case in CASES if case.name == name)


def values(prediction):
    fields = ("probs", "mean", "variance", "expected_entropy", "noise_variance")
    return {name: getattr(prediction, name) for name in fields if getattr(prediction, name) is not None}


def assert_close(one, two, tolerance):
    assert values(one).keys() == values(two).keys()
    for name, value in values(one).items():
        assert (value - values(two)[name]).abs().max() <= tolerance, name


def state_of(bnn):
    return {name: tensor.clone() for name, tensor in (*bnn.named_parameters(), *bnn.named_buffers())}


def assert_untouched(bnn, state, modes):
    assert [module.training for module in bnn.modules()] == modes
    found = state_of(bnn)
    assert found.keys() == state.keys()
    for name in state:
        assert torch.equal(found[name], state[name]), name
    assert all(isinstance(parameter, nn.Parameter) for parameter in bnn.means().values())


# -- every mode with everything -------------------------------------------------------------------------------------


@by_mode
@by_case
def test_every_mode_predicts_for_every_network_and_leaves_no_trace(case, mode):
    bnn, x, y = case.make()
    bnn.network.append(nn.Dropout(0.5)) if isinstance(bnn.network, nn.Sequential) else None
    next(bnn.network.children()).eval()  # a mixed state, as a user may leave it
    modes, state, random_state = [module.training for module in bnn.modules()], state_of(bnn), torch.get_rng_state()
    prediction = bnn.predict(x, **MODES[mode])
    assert_untouched(bnn, state, modes)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert values(prediction)
    for value in values(prediction).values():
        assert value.isfinite().all()
        assert not value.requires_grad
    assert prediction.log_prob(y).shape == (S,)
    assert prediction.log_prob(y).isfinite().all()
    if prediction.probs is not None:
        assert prediction.probs.min() >= 0
        assert not prediction.exclusive or (prediction.probs.sum(1) - 1).abs().max() < 1e-12
    if mode == "mean":
        assert prediction.mutual_information is None
        assert prediction.epistemic_variance is None
        assert prediction.expected_entropy is None
    elif prediction.probs is not None:
        assert prediction.mutual_information.min() >= 0
        assert prediction.mutual_information.max() > 0
        total = prediction.expected_entropy + prediction.mutual_information
        assert (total - prediction.entropy).abs().max() < 1e-12
    else:
        assert prediction.epistemic_variance.min() >= 0
        assert prediction.epistemic_variance.max() > 0
        total = prediction.noise_variance + prediction.epistemic_variance
        assert (total - prediction.variance).abs().max() < 1e-12


def test_the_weights_part_of_a_variance_has_its_digits_beside_a_noise_that_dwarfs_it():
    class Loud(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = nn.Linear(1, 1)

        def forward(self, x):
            return torch.cat([self.mean(x), torch.full_like(x, 9.0)], 1)  # a noise variance of e¹⁸

    torch.manual_seed(0)
    bnn, x = varlap.BNN(Loud(), "heteroscedastic"), torch.tensor([[0.5]])
    for mode, tolerance in (({"how": "linearised", "closed_form": True}, 1e-5), ({"how": "linearised"}, 0.9)):
        found, exact = (
            float(one.predict(inputs, **mode, seed=0).epistemic_variance)
            for one, inputs in ((bnn, x), (copy.deepcopy(bnn).double(), x.double()))
        )
        assert exact > 1e-4
        assert found == pytest.approx(exact, rel=tolerance)


@by_mode
@by_case
def test_a_seed_determines_the_prediction_whatever_the_batch_size(case, mode):
    bnn, x, _ = case.make()
    whole = bnn.predict(x, **MODES[mode], seed=5)
    torch.rand(3)  # the global generator has no say
    assert_close(bnn.predict(x, **MODES[mode], seed=5), whole, 0.0)
    parts = bnn.predict(x, **MODES[mode], seed=5, batch_size=2)
    assert_close(parts, whole, 1e-12)
    for one, two in zip(parts.outputs, whole.outputs, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
    if mode != "mean":
        other = bnn.predict(x, **MODES[mode], seed=6)
        exact = mode == "closed-form" and case.name in ("mlp-gaussian", "mlp-poisson", "mlp-heteroscedastic")
        assert exact == all(torch.equal(v, values(whole)[n]) for n, v in values(other).items())


@by_mode
def test_batches_predicted_one_by_one_join_to_the_whole(mode):
    bnn, x, y = named_case("batch-norm").make()
    whole = bnn.predict(x, **MODES[mode])
    joined = varlap.Prediction.concatenate([bnn.predict(part, **MODES[mode]) for part in x.split(2)])
    assert_close(joined, whole, 1e-12)
    assert (joined.log_prob(y) - whole.log_prob(y)).abs().max() < 1e-12


@by_mode
def test_a_likelihood_of_the_users_own_is_predicted_by_its_three_methods(mode):
    bnn = varlap.BNN(nn.Linear(2, 2), Exponential()).double()
    x, y = torch.randn(S, 2).double(), torch.rand(S, 2).double()
    prediction = bnn.predict(x, **MODES[mode])
    assert prediction.log_prob(y).isfinite().all()
    assert (prediction.epistemic_variance is None) == (mode == "mean")

    class WithoutVariance(Exponential):
        def predict(self, outputs):
            return varlap.Prediction(mean=(-outputs).exp())

    bnn = varlap.BNN(bnn.network, WithoutVariance())
    again = bnn.predict(x, **MODES[mode])
    assert (again.mean - prediction.mean).abs().max() == 0
    assert again.variance is None
    assert again.log_prob(y).shape == (S,)


def test_a_likelihood_that_predicts_nothing_to_average_is_refused():
    class Empty(Exponential):
        def predict(self, outputs):
            return varlap.Prediction()

    message = (
        r"the likelihood Empty predicts neither probs nor a mean, so its draws cannot be averaged; have its predict"
    )
    with pytest.raises(ConfigError, match=message):
        varlap.BNN(nn.Linear(2, 2), Empty()).predict(torch.zeros(3, 2), how="sampled")


def test_only_selected_weights_vary():
    bnn, x, _ = named_case("subset").make()
    twin = copy.deepcopy(bnn)
    with torch.no_grad():
        for log_sigma in twin.log_sigma.parameters():
            log_sigma.fill_(-40)
    mean = bnn.predict(x).probs
    for how in ("sampled", "linearised"):
        assert (twin.predict(x, how=how).probs - mean).abs().max() < 1e-12
        assert (bnn.predict(x, how=how).probs - mean).abs().max() > 1e-3


# -- the average ----------------------------------------------------------------------------------------------------


def test_sampled_prediction_is_the_average_over_networks_that_were_sampled_by_hand():
    bnn, x, y = named_case("batch-norm").make()
    bnn.eval()
    prediction = bnn.predict(x, how="sampled", num_samples=4, seed=7)
    by_hand = []
    for number in range(4):
        generator = varlap.streams.Streams(7, number).generator("weights", "cpu")
        with torch.no_grad(), bnn.sample(generator):
            by_hand.append(bnn.network(x).softmax(1))
    probs = torch.stack(by_hand)
    assert (prediction.probs - probs.mean(0)).abs().max() < 1e-14
    assert (prediction.expected_entropy - entropy(probs.flatten(0, 1)).reshape(4, -1).mean(0)).abs().max() < 1e-14
    assert (prediction.log_prob(y) - probs.mean(0)[torch.arange(S), y].log()).abs().max() < 1e-12


def test_total_variance_is_that_of_the_mixture():
    outputs = [torch.randn(3, 4).double() for _ in range(5)]  # two means and two log scales
    found = average(varlap.Heteroscedastic(), outputs)
    mean = torch.stack([o[:, :2] for o in outputs])
    second_moment = (mean.square() + torch.stack([(2 * o[:, 2:]).exp() for o in outputs])).mean(0)
    assert (found.variance - (second_moment - mean.mean(0).square())).abs().max() < 1e-12


def test_defaults_are_ten_samples_and_thirty_linearised_draws():
    bnn, x = varlap.BNN(nn.Linear(2, 3)), torch.zeros(1, 2)
    assert [len(bnn.predict(x, how).outputs) for how in ("mean", "sampled", "linearised")] == [1, 10, 30]


# -- inputs ---------------------------------------------------------------------------------------------------------


@by_mode
def test_arrays_are_taken_and_numpys_doubles_become_the_weights_type(mode):
    bnn, x = varlap.BNN(varlap.models.mlp(4, 3)), np.random.default_rng(0).normal(size=(5, 4))
    expected = bnn.predict(torch.tensor(x).float(), **MODES[mode])
    for given in (x, x.astype(np.float32)):
        assert_close(bnn.predict(given, **MODES[mode]), expected, 0.0)
    x.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch's, of arrays that it could write to
        bnn.predict(x)


def test_dicts_and_tuples_of_arrays_are_split_like_tensors():
    bnn, x, _ = named_case("dicts").make()
    expected = bnn.predict(x)
    arrays = {name: part.numpy() for name, part in x.items()}
    assert_close(bnn.predict(arrays, batch_size=2), expected, 1e-14)
    bnn, x, _ = named_case("tuples").make()
    assert_close(bnn.predict(tuple(part.numpy() for part in x), batch_size=2), expected, 1e-14)


def test_no_items_give_no_predictions():
    bnn = varlap.BNN(nn.Linear(2, 3))
    for options in ({}, {"batch_size": 4}, {"how": "sampled"}, {"how": "linearised"}):
        assert bnn.predict(torch.zeros(0, 2), **options).probs.shape == (0, 3)


# -- what is restored after a failure -------------------------------------------------------------------------------


@by_mode
def test_everything_is_put_back_after_an_exception(mode):
    class Fails(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 1:
                raise KeyError("in the network")
            return x

    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), Fails(), nn.Linear(5, 3))
    bnn = varlap.BNN(network).train()
    modes, state, random_state = [module.training for module in bnn.modules()], state_of(bnn), torch.get_rng_state()
    with pytest.raises(KeyError):
        bnn.predict(torch.randn(6, 4, generator=torch.Generator()), **MODES[mode], batch_size=3)
    assert_untouched(bnn, state, modes)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_two_threads_that_predict_at_once_leave_no_trace():
    began = threading.Event()

    class Slow(nn.BatchNorm1d):
        def forward(self, x):
            began.set()
            time.sleep(0.1)  # in which the other one would begin too
            return super().forward(x)

    bnn = varlap.BNN(nn.Sequential(nn.Linear(2, 3), Slow(3))).train()
    buffers = dict(bnn.network.named_buffers())
    other = threading.Thread(target=lambda: began.wait() and bnn.predict(torch.ones(2, 2)))
    other.start()
    bnn.predict(torch.ones(4, 2))
    other.join()
    assert bnn.network.training
    assert all(buffer is buffers[name] for name, buffer in bnn.network.named_buffers())


@by_mode
def test_a_network_that_counts_its_calls_or_draws_numbers_leaves_no_trace(mode):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen = self.seen + self.layer.weight.sum()
            return self.layer(x) + 0.1 * torch.randn(3)

    bnn, x = varlap.BNN(Counts()), torch.ones(4, 2)
    seen, random_state = bnn.network.seen, torch.get_rng_state()
    first = bnn.predict(x, **MODES[mode])
    assert bnn.network.seen is seen
    assert seen == 0
    assert torch.equal(torch.get_rng_state(), random_state)
    torch.rand(5)
    assert_close(bnn.predict(x, **MODES[mode]), first, 0.0)
    copy.deepcopy(bnn)


# -- temperature ----------------------------------------------------------------------------------------------------


@by_mode
@pytest.mark.parametrize("name", ["mlp-categorical", "mlp-bernoulli", "segmentation"])
def test_temperature_divides_the_logits_of_every_draw(name, mode):
    bnn, x, y = named_case(name).make()
    plain, found = bnn.predict(x, **MODES[mode]), bnn.predict(x, **MODES[mode], temperature=2.5)
    if mode == "closed-form":  # there the probit's scale depends on the temperature too
        from varlap.predict.closed_form import output_gaussian
        from varlap.predict.inputs import Inputs

        mean, covariance = output_gaussian(bnn.eval(), Inputs(bnn, x, None))
        expected = bnn.likelihood.predict_from_gaussian(mean / 2.5, covariance / 2.5**2)
    else:
        expected = average(bnn.likelihood, [outputs / 2.5 for outputs in plain.outputs])
    assert (found.probs - expected.probs).abs().max() < 1e-12
    assert (found.log_prob(y) - expected.log_prob(y)).abs().max() < 1e-12
    assert_close(bnn.predict(x, **MODES[mode], temperature=1.0), plain, 1e-15)


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"how": "sample"},
            r"predict\(how='sample'\): did you mean 'sampled'\?$",
        ),
        ({"how": "linearized"}, r"did you mean 'linearised'\?"),
        ({"how": "xyz"}, r"predict\(how='xyz'\): choose 'mean', 'sampled' or 'linearised'$"),
        ({"how": "sampled", "num_samples": 0}, r"num_samples=0\) must be a whole number of at least 1"),
        ({"how": "linearised", "num_samples": 2.5}, r"num_samples=2.5\) must be a whole number of at least 1"),
        ({"how": "linearised", "closed_form": True, "num_samples": -1}, r"num_samples=-1\) must be a whole number"),
        ({"batch_size": 0}, r"predict\(batch_size=0\) must be at least 1, or None for all at once"),
        ({"batch_size": "all"}, r"predict\(batch_size='all'\) must be a whole number of items, or None for all"),
        ({"temperature": 0.0}, r"predict\(temperature=0.0\) must be a positive number; 1 changes nothing"),
        ({"temperature": math.nan}, r"predict\(temperature=nan\) must be a positive number"),
        ({"temperature": "1.5"}, r"predict\(temperature='1\.5'\) must be a positive number"),
        (
            {"closed_form": True},
            r"predict\(how='mean'\) has no closed form; closed_form=True goes with how='linearised'",
        ),
        (
            {"statistics": (torch.zeros(4, 2), torch.zeros(4))},
            r"predict\(how='mean'\) has no use for statistics: .* use varlap.reestimate_statistics\(bnn, data\)",
        ),
    ],
)
def test_options_that_cannot_be_right_are_refused(options, message):
    bnn = varlap.BNN(nn.Linear(2, 3))
    with pytest.raises(ConfigError, match=message):
        bnn.predict(torch.zeros(4, 2), **options)
    with pytest.raises(ConfigError, match=message):
        predict(bnn, torch.zeros(4, 2), **options)


@by_mode
def test_a_temperature_for_regression_is_refused(mode):
    bnn = varlap.BNN(nn.Linear(2, 3), "gaussian")
    message = (
        r"the likelihood Gaussian has no temperature: it is for classes, whose logits it divides; for regression learn "
        r"the noise instead, as varlap.Gaussian\(\) does by default"
    )
    with pytest.raises(ConfigError, match=message):
        bnn.predict(torch.zeros(4, 2), **MODES[mode], temperature=2.0)


def test_inputs_that_cannot_be_split_or_read_are_refused():
    bnn, x, _ = named_case("tuples").make()
    message = (
        r"predict\(batch_size=2\) splits the first dimension, which the tensors of x do not share "
        r"\(x\[0\] \(5, 4\), x\[1\] \(2, 2\)\); leave batch_size out"
    )
    with pytest.raises(BatchError, match=message):
        bnn.predict((x[0], x[1][:2]), batch_size=2)
    with pytest.raises(BatchError, match=r"x is an array of <U1; give numbers, such as float32 or int64"):
        bnn.predict(np.array(["a", "b"]))
    with pytest.raises(
        BatchError, match=r"x is a list of numbers; give a tensor or an array, such as torch\.tensor\(x\)"
    ):
        bnn.predict([[0.0, 1.0], [2.0, 3.0]])


def test_draws_asked_of_the_mean_network_warn():
    bnn = varlap.BNN(nn.Linear(2, 3))
    with pytest.warns(
        varlap.errors.VarlapWarning, match=r"num_samples=10 draws nothing by how='mean'.* how='sampled'$"
    ):
        found = bnn.predict(torch.zeros(4, 2), num_samples=10)
    assert found.mutual_information is None


def test_a_number_beside_tensors_is_an_input():
    class Scaled(nn.Linear):
        def forward(self, factor, x):
            return factor * super().forward(x)

    bnn = varlap.BNN(Scaled(2, 3))
    assert bnn.predict((2.0, torch.zeros(4, 2))).probs.shape == (4, 3)


@by_mode
def test_an_own_likelihood_that_predicts_no_prediction_is_named(mode):
    class Own(varlap.Gaussian):
        def predict(self, outputs):
            return outputs

    bnn = varlap.BNN(nn.Linear(2, 1), Own())
    with pytest.raises(ConfigError, match=r"Own\.predict returned a Tensor; it must return varlap\.Prediction\(probs"):
        bnn.predict(torch.zeros(4, 2), **MODES[mode])


def test_sampling_warns_at_the_users_line():
    bnn = varlap.BNN(nn.Linear(2, 3), prior=varlap.OneScalePrior(100.0))
    for call in (lambda: bnn.predict(torch.zeros(1, 2), "sampled"), lambda: predict(bnn, torch.zeros(1, 2), "sampled")):
        with pytest.warns(VarlapWarning) as caught:
            call()
        assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("how", ["sampled", "linearised"])
def test_draws_with_the_variances_of_the_start_are_told_of_once(how: str, caplog: pytest.LogCaptureFixture):
    bnn, x = varlap.BNN(torch.nn.Linear(2, 3)), torch.zeros(4, 2)
    bnn.predict(x)
    assert not caplog.text
    for _ in range(2):
        bnn.predict(x, how=how)  # type: ignore[arg-type]
    assert caplog.text.count("the variances are those of the start: MAP does not train them") == 1
    caplog.clear()
    trained = varlap.BNN(torch.nn.Linear(2, 3))
    with torch.no_grad():
        trained.log_sigma["weight"].add_(0.1)
    trained.predict(x, how=how)  # type: ignore[arg-type]
    assert not caplog.text


@by_mode
def test_a_loader_of_inputs_is_predicted_like_the_inputs(mode):
    x, y = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.arange(5)
    bnn = varlap.BNN(varlap.models.mlp(4, 3, hidden=(3,))).double()
    expected = bnn.predict(x, **MODES[mode])
    in_order = DataLoader(TensorDataset(x), batch_sampler=BatchSampler(SequentialSampler(x), 2, False))
    assert_close(bnn.predict(in_order, **MODES[mode]), expected, 1e-12)
    for items in (x, TensorDataset(x), TensorDataset(x, y)):
        found = bnn.predict(DataLoader(items, batch_size=2), **MODES[mode])
        assert_close(found, expected, 1e-12)


def test_loaders_that_cannot_be_predicted_are_refused_with_the_fix():
    bnn, data = varlap.BNN(nn.Linear(4, 3)), TensorDataset(torch.zeros(5, 4))
    with pytest.raises(ConfigError, match=r"the DataLoader's RandomSampler mixes the items, .* with shuffle=False"):
        bnn.predict(DataLoader(data, shuffle=True))
    for sampler in (RandomSampler(data), SubsetRandomSampler(range(5)), WeightedRandomSampler(torch.ones(5), 5)):
        with pytest.raises(ConfigError, match=rf"the DataLoader's {type(sampler).__name__} mixes the items"):
            bnn.predict(DataLoader(data, batch_sampler=BatchSampler(sampler, 4, False)))
    with pytest.raises(
        ConfigError, match=r"predict\(batch_size=2\) does not go with a DataLoader, which makes its own"
    ):
        bnn.predict(DataLoader(data), batch_size=2)
    with pytest.raises(BatchError, match=r"x is the Dataset TensorDataset; give a DataLoader of it: DataLoader\(x, "):
        bnn.predict(data)


def test_outputs_that_are_only_looked_at_leave_the_inputs_alone_where_a_network_works_in_place():
    class Shifting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.sub_(1))

    bnn, x = varlap.BNN(Shifting(2, 3)).double(), torch.ones(4, 2, dtype=torch.float64)
    outputs = probed_outputs(bnn, x)
    assert torch.equal(x, torch.ones_like(x))
    assert torch.equal(outputs, bnn.network.bias.detach().expand(4, 3))  # at x - 1 = 0
