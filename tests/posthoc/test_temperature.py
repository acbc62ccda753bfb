"""Claims about temperature scaling: the least NLL of held-out data, for every way of predicting."""

import math

import pytest
import torch
from torch import nn

import varlap
from varlap.errors import BatchError, ConfigError, VarlapWarning


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classifier(likelihood="categorical", scale=3.0):
    torch.manual_seed(0)
    bnn = varlap.BNN(varlap.models.mlp(4, 3, hidden=(10,)), likelihood).double()
    with torch.no_grad():
        bnn.network[-1].weight.mul_(scale)
    return bnn


def data_at(bnn, temperature, num_items, seed=0):
    """Labels drawn from the mean network at a temperature."""
    x = 2 * draw(num_items, 4, seed=seed)
    with torch.no_grad():
        y = bnn.likelihood.sample(bnn.network(x) / temperature, torch.Generator().manual_seed(seed))
    return x, y


def nll(bnn, x, y, temperature, **options):
    return -float(bnn.predict(x, temperature=temperature, **options).log_prob(y).mean())


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_of_the_data_is_found_within_its_standard_error(likelihood, temperature):
    bnn = classifier(likelihood)
    x, y = data_at(bnn, temperature, 4000)
    found = varlap.fit_temperature(bnn, (x, y))
    # The curvature of the NLL in log T, from differences, gives the standard error of log T.
    step = 0.05
    left, centre, right = (nll(bnn, x, y, found * math.exp(move)) for move in (-step, 0.0, step))
    error = 1 / math.sqrt(len(y) * (left - 2 * centre + right) / step**2)
    assert error < 0.1
    assert abs(math.log(found / temperature)) < 3 * error


@pytest.mark.parametrize("options", [{}, {"how": "sampled", "num_samples": 4}, {"how": "linearised", "num_samples": 4}])
def test_it_is_the_best_of_a_fine_grid_for_every_mode(options):
    bnn = classifier()
    x, y = data_at(bnn, 2.0, 200)
    found = varlap.fit_temperature(bnn, (x, y), **options, seed=3, batch_size=64)
    grid = [math.exp(-1 + 0.005 * i) for i in range(500)]
    best = min(grid, key=lambda temperature: nll(bnn, x, y, temperature, **options, seed=3))
    assert abs(math.log(found / best)) <= 0.005
    assert nll(bnn, x, y, found, **options, seed=3) <= nll(bnn, x, y, best, **options, seed=3) + 1e-12


def test_held_out_data_come_in_any_form_and_batch():
    bnn = classifier()
    x, y = data_at(bnn, 2.0, 50)
    whole = varlap.fit_temperature(bnn, (x, y))
    assert abs(varlap.fit_temperature(bnn, (x.numpy(), y.numpy()), batch_size=7) - whole) < 1e-5
    assert abs(varlap.fit_temperature(bnn, [(x[:20], y[:20]), (x[20:], y[20:])]) - whole) < 1e-5


def test_nothing_of_the_network_or_the_random_state_moves():
    bnn = classifier().train()
    before = {name: value.clone() for name, value in bnn.state_dict().items()}
    random_state = torch.get_rng_state()
    varlap.fit_temperature(bnn, data_at(bnn, 2.0, 50), how="sampled")
    assert all(torch.equal(value, before[name]) for name, value in bnn.state_dict().items())
    assert all(module.training for module in bnn.modules())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_labels_of_the_mean_network_stay():
    bnn = classifier()
    x = draw(20, 4)
    assert torch.equal(bnn.predict(x, temperature=5.0).labels, bnn.predict(x).labels)
    assert bnn.predict(x, temperature=5.0).confidence.mean() < bnn.predict(x).confidence.mean()


def test_data_that_ask_for_an_end_of_the_range_are_pointed_out():
    bnn = classifier()
    x = draw(20, 4)
    right = bnn.predict(x).labels
    message = (
        r"fit_temperature ended at the lowest temperature it tries, 0.01: on these 20 held-out items every label is"
    )
    with pytest.warns(VarlapWarning, match=message) as caught:
        varlap.fit_temperature(bnn, (x, right))
    assert caught[0].filename == __file__
    wrong = bnn.predict(x).probs.argmin(1)
    message = r"ended at the highest temperature it tries, 100: .* the predictions are no better than chance, or nearly"
    with pytest.warns(VarlapWarning, match=message):
        varlap.fit_temperature(bnn, (x, wrong))


def test_sampling_warns_once_for_all_batches():
    bnn = classifier()
    with torch.no_grad():
        for log_sigma in bnn.log_sigma.parameters():
            log_sigma.fill_(0.5)
    x, y = data_at(bnn, 2.0, 60)
    with pytest.warns(VarlapWarning, match="weight samples") as caught:
        varlap.fit_temperature(bnn, (x, y), "sampled", batch_size=10)
    assert len(caught) == 1


def test_regression_empty_data_and_wrong_labels_are_refused():
    regression = varlap.BNN(nn.Linear(2, 1), "gaussian")
    with pytest.raises(
        ConfigError, match=r"the likelihood Gaussian has no temperature: .* for regression learn the noise"
    ):
        varlap.fit_temperature(regression, (torch.zeros(3, 2), torch.zeros(3, 1)))
    bnn = classifier()
    with pytest.raises(BatchError, match="the data hold no items"):
        varlap.fit_temperature(bnn, (torch.zeros(0, 4).double(), torch.zeros(0).long()))
    with pytest.raises(BatchError, match="fit_temperature: the held-out data hold no items; give at least one batch"):
        varlap.fit_temperature(bnn, [])
    with pytest.raises(BatchError, match="label 3 is out of range: the network has 3 outputs"):
        varlap.fit_temperature(bnn, (torch.zeros(2, 4).double(), torch.tensor([0, 3])))
    with pytest.raises(ConfigError, match="did you mean 'sampled'"):
        varlap.fit_temperature(bnn, (torch.zeros(2, 4).double(), torch.tensor([0, 1])), how="samples")
