"""Claims about Laplace's method: variances from the curvature at the present mean, in evaluation mode."""

import logging
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import varlap
from cases import CASES, Recurrent
from varlap.errors import BatchError, ConfigError, VarlapWarning
from varlap.posthoc.best_scales import set_best_scales


def named_case(name):
    return next(case for case in CASES if case.name == name)


def clone(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_close(found, expected, tolerance=0.0):
    assert found.keys() == expected.keys()
    for name in expected:
        assert (found[name] - expected[name]).abs().max() <= tolerance, name


def enumerated_fisher(bnn, x, y):
    """(1/N) Σᵢ Σ_y p(y|xᵢ) (∂ log p(y|xᵢ))² for classes, one item and one label at a time, in evaluation mode."""
    modes = [(module, module.training) for module in bnn.modules()]
    bnn.eval()
    means = bnn.means()
    total = {name: torch.zeros_like(mean, requires_grad=False) for name, mean in means.items()}
    for item in range(len(y)):
        for value in bnn.outputs(x[item : item + 1]).log_softmax(1)[0]:
            g = torch.autograd.grad(value, list(means.values()), retain_graph=True, allow_unused=True)
            for name, part in zip(means, g, strict=True):
                total[name] += 0 if part is None else value.exp().detach() * part.square() / len(y)
    for module, mode in modes:
        module.training = mode
    return total


def log_sigma_for(bnn, f, num_data, beta):
    """Eq. 23 with tempering: σ² = β/(N f + β/s²)."""
    return {
        name: 0.5 * (beta / (num_data * f[name] + beta / bnn.prior_scale[name] ** 2)).log() for name in bnn.log_sigma
    }


# -- what it computes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [1.0, 0.1])
@pytest.mark.parametrize("name", ["mlp-categorical", "convnet", "batch-norm", "attention", "lstm", "subset"])
def test_variances_are_the_closed_form_of_the_enumerated_fisher_in_evaluation_mode(name, beta):
    bnn, x, y = named_case(name).make()
    bnn(x)  # moves the running statistics off those of the batch
    expected = enumerated_fisher(bnn, x, y)
    found = varlap.laplace(bnn, (x, y), beta)
    assert_close(found, expected, 1e-12)
    assert_close(clone(bnn.log_sigma), log_sigma_for(bnn, expected, len(y), beta), 1e-12)


def test_evaluation_mode_matters_and_every_mode_is_given_back():
    bnn, x, y = named_case("batch-norm").make()
    bnn.network.append(nn.Dropout(0.5)).eval()
    bnn.network[1].train()  # a mixed state, as a user may leave it
    modes = {name: module.training for name, module in bnn.named_modules()}
    buffers = clone(dict(bnn.network.named_buffers()))
    first, again = varlap.laplace(bnn, (x, y)), varlap.laplace(bnn, (x, y))
    assert_close(first, again)  # no dropout
    assert {name: module.training for name, module in bnn.named_modules()} == modes
    assert_close(dict(bnn.network.named_buffers()), buffers)

    bnn.train()
    objective = varlap.VL(len(y), curvature=varlap.ExactFisher(), variances="closed-form", beta_warmup_steps=0)
    at_laplace = clone(bnn.log_sigma)
    objective(bnn, x, y)
    objective.update_variances(bnn)
    assert (bnn.log_sigma["0.weight"] - at_laplace["0.weight"]).abs().max() > 1e-2  # batch statistics give others


def test_modes_are_given_back_after_an_error():
    bnn, x, y = named_case("batch-norm").make()
    with pytest.raises(BatchError, match="label 9 is out of range"):
        varlap.laplace(bnn, (x, torch.full_like(y, 9)))
    assert all(module.training for module in bnn.modules())


def test_nothing_but_log_sigma_moves():
    bnn, x, y = named_case("batch-norm").make()
    before = clone(bnn.state_dict())
    torch.manual_seed(7)
    state = torch.get_rng_state()
    for curvature in ("fisher", "sampled-fisher"):
        varlap.laplace(bnn, (x, y), curvature=curvature)
    after = clone(bnn.state_dict())
    for name in before:
        assert torch.equal(before[name], after[name]) != name.startswith("log_sigma."), name
    assert all(parameter.grad is None and parameter.requires_grad for parameter in bnn.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_it_works_where_gradients_are_off():
    bnn, x, y = CASES[0].make()
    expected = {
        curvature: varlap.laplace(bnn, (x, y), 50.0, curvature=curvature) for curvature in ("fisher", "hessian")
    }
    with torch.no_grad():
        for curvature, diagonal in expected.items():
            assert_close(varlap.laplace(bnn, (x, y), 50.0, curvature=curvature), diagonal)
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()


def test_one_variance_is_the_best_single_one():
    bnn, x, y = named_case("one-variance").make()
    f = varlap.laplace(bnn, (x, y), 0.5)
    precisions = torch.cat([(len(y) * f[n] + 0.5 / bnn.prior_scale[n] ** 2).flatten() for n in f])
    (log_sigma,) = bnn.log_sigma.parameters()
    assert abs((2 * log_sigma).exp() - 0.5 / precisions.mean()) < 1e-14
    varlap.VL(len(y), 0.5, curvature=varlap.ExactFisher())(bnn, x, y).loss.backward()
    assert abs(log_sigma.grad) < 1e-12


def empirical_bayes(variances="per-weight"):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    bnn = varlap.BNN(network, prior=varlap.EmpiricalBayesPrior(), variances=variances)
    return bnn, torch.randn(20, 3).double(), torch.arange(20) % 3


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_scales_of_an_empirical_bayes_prior_and_variances_fit_each_other(beta):
    bnn, x, y = empirical_bayes()
    f = varlap.laplace(bnn, (x, y), beta)
    assert_close(clone(bnn.log_sigma), log_sigma_for(bnn, f, len(y), beta), 1e-5)
    for name, mean in bnn.means().items():
        spread = ((2 * bnn.log_sigma[name]).exp() + mean.square()).mean().detach()
        assert abs(spread / bnn.prior_scale[name].square() - 1) < 1e-5, name


@pytest.mark.parametrize("refitted", [False, True])
def test_a_second_call_changes_nothing_whatever_the_variances_were(refitted):
    bnn, x, y = empirical_bayes()
    varlap.laplace(bnn, (x, y))
    first = clone(bnn.log_sigma)
    varlap.laplace(bnn, (x, y))
    assert_close(clone(bnn.log_sigma), first, 1e-4)
    with torch.no_grad():
        for log_sigma in bnn.log_sigma.values():
            log_sigma.fill_(-9.0)
    if refitted:  # as after a training
        bnn.refit_prior()
    varlap.laplace(bnn, (x, y))
    assert_close(clone(bnn.log_sigma), first, 1e-4)


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_scales_and_one_shared_variance_fit_each_other(beta):
    bnn, x, y = empirical_bayes(variances="one")
    f = varlap.laplace(bnn, (x, y), beta)
    precisions = torch.cat([(len(y) * f[n] + beta / bnn.prior_scale[n] ** 2).flatten() for n in f])
    (log_sigma,) = bnn.log_sigma.parameters()
    variance = (2 * log_sigma).exp().detach()
    assert abs(variance * precisions.mean() / beta - 1) < 1e-5
    for name, mean in bnn.means().items():
        assert abs((variance + mean.square().mean()) / bnn.prior_scale[name].square() - 1) < 1e-5, name
    with torch.no_grad():
        log_sigma.fill_(-9.0)
    bnn.refit_prior()
    varlap.laplace(bnn, (x, y), beta)
    assert abs((2 * log_sigma).exp() / variance - 1) < 1e-4


def one_tensor(means):
    bnn = varlap.BNN(nn.Linear(len(means), 1, bias=False).double(), prior=varlap.EmpiricalBayesPrior())
    with torch.no_grad():
        bnn.means()["weight"].copy_(torch.tensor([means]))
    return bnn


def test_where_the_curvature_has_both_signs_the_scale_is_the_one_that_refits_lead_to_from_below():
    bnn, twin = one_tensor([0.3, -0.2, 0.1]), one_tensor([0.3, -0.2, 0.1])
    f = {"weight": torch.tensor([[5.0, 5.0, -0.1]]).double()}
    assert set_best_scales(bnn, f, 3, 0.5) == []
    twin.prior_scale["weight"].fill_(1e-3)
    for _ in range(1000):
        twin.set_optimal_variances(f, 3, 0.5)
        twin.refit_prior()
    assert abs(bnn.prior_scale["weight"] / twin.prior_scale["weight"] - 1) < 1e-6
    f["weight"][0, 2] = -20.0  # now the rounds have no end but a variance that is negative
    assert set_best_scales(bnn, f, 3, 0.5) == []
    assert (3 * f["weight"] + 0.5 / bnn.prior_scale["weight"].square()).min() < 0


@pytest.mark.parametrize(("beta", "epochs"), [(0.1, 50), (1.0, 200)], ids=["learnt", "pruned"])
def test_a_trained_regression_has_scales_without_a_warning(beta, epochs):
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    network = nn.Sequential(nn.Linear(4, 50), nn.SiLU(), nn.Linear(50, 50), nn.SiLU(), nn.Linear(50, 1))
    bnn = varlap.BNN(network, "gaussian", prior=varlap.EmpiricalBayesPrior())
    varlap.fit(bnn, varlap.VL(200, beta), (x, x[:, :1].sin()), epochs=epochs, batch_size=50, progress="none", lr=0.01)
    f = varlap.laplace(bnn, (x, x[:, :1].sin()), beta)  # a warning would be an error
    assert_close(clone(bnn.log_sigma), log_sigma_for(bnn, f, 200, beta), 1e-5)
    for name, mean in bnn.means().items():
        spread = ((2 * bnn.log_sigma[name]).exp() + mean.square()).mean().detach()
        assert abs(spread / bnn.prior_scale[name].square() - 1) < 1.1e-3, name


def test_weights_that_are_nothing_are_pruned_to_a_scale_that_is_positive():
    bnn, f = one_tensor([0.0, 0.0]), {"weight": torch.tensor([[1.0, 2.0]]).double()}
    for _ in range(2):
        assert set_best_scales(bnn, f, 10, 1.0) == []
        assert 0 < bnn.prior_scale["weight"] < 1e-8


def test_a_scale_that_nearly_fits_stays_where_the_data_say_nothing():
    bnn, f = one_tensor([1e-3, 1e-3]), {"weight": torch.zeros(1, 2).double()}
    bnn.prior_scale["weight"].fill_(0.7)
    assert set_best_scales(bnn, f, 10, 1.0) == []
    assert bnn.prior_scale["weight"] == 0.7
    bnn.prior_scale["weight"].fill_(0.01)  # a hundredth of its square more in each round
    assert set_best_scales(bnn, f, 10, 1.0) == ["weight"]
    assert bnn.prior_scale["weight"] == 0.01


@pytest.mark.parametrize("name", ["0.weight", "2.weight"])
def test_a_scale_that_the_data_leave_open_is_named_and_stays(name):
    bnn, x, y = empirical_bayes()
    x[:] = 0.0  # so that nothing depends on the first layer's matrix, whatever its scale
    if name == "2.weight":  # nor on the second's
        with torch.no_grad():
            bnn.means()["0.weight"].zero_()
            bnn.means()["0.bias"].zero_()
    before = bnn.prior_scale[name].clone()
    with pytest.warns(VarlapWarning, match=rf"scale of '{name}' has no optimum.* so it stays.*OneScalePrior"):
        varlap.laplace(bnn, (x, y))
    assert bnn.prior_scale[name] == before


def test_one_variance_that_the_data_leave_open_is_told_too():
    bnn, _, y = empirical_bayes(variances="one")
    f = {name: torch.zeros_like(mean) for name, mean in bnn.means().items()}
    assert set_best_scales(bnn, f, len(y), 1.0) == list(f)


def test_hessian_variances_are_those_of_the_dense_hessian():
    bnn, x, y = CASES[0].make(prior=varlap.OneScalePrior(0.2))
    parameters = list(bnn.network.parameters())
    flat = nn.utils.parameters_to_vector(parameters).detach()

    def log_likelihood(vector):
        named = dict(zip(dict(bnn.network.named_parameters()), _split(vector, parameters), strict=True))
        return bnn.likelihood.log_prob(torch.func.functional_call(bnn.network, named, (x,)), y).sum()

    hessian = torch.autograd.functional.hessian(log_likelihood, flat).diagonal()
    varlap.laplace(bnn, (x, y), curvature="hessian", batch_size=2)
    found = torch.cat([bnn.log_sigma[name].detach().flatten() for name in bnn.means()])
    assert (found - 0.5 * (1 / (-hessian + 1 / bnn.prior_scale["0.bias"] ** 2)).log()).abs().max() < 1e-12


def _split(vector, like):
    parts = vector.split([p.numel() for p in like])
    return [part.reshape(p.shape) for part, p in zip(parts, like, strict=True)]


def test_sampled_labels_are_repeated_by_their_seed():
    bnn, x, y = CASES[0].make()
    first, again, other = (
        varlap.laplace(bnn, (x, y), curvature="sampled-fisher", seed=seed)["0.weight"] for seed in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_hutchinsons_estimate_serves_large_networks():
    """On a linear model with orthogonal inputs the Hessian is diagonal, so that the estimate is exact."""
    x = torch.linalg.qr(torch.randn(60, 60, dtype=torch.float64))[0]
    bnn = varlap.BNN(nn.Linear(60, 40, bias=False).double(), varlap.Gaussian(noise=0.5, learnt=False).double())
    y = torch.zeros(60, 40, dtype=torch.float64)
    assert bnn.num_weights() > 2000
    with pytest.raises(ConfigError, match=r"2400 weights; pass num_probes=100 for Hutchinson's estimate"):
        varlap.laplace(bnn, (x, y), curvature="hessian")
    found = varlap.laplace(bnn, (x, y), curvature="hessian", num_probes=1)
    assert (found["weight"] - 1 / (60 * (2 * bnn.likelihood.log_noise).exp())).abs().max() < 1e-12


# -- the data ----------------------------------------------------------------------------------------------------


class Pairs(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


FORMS = {
    "arrays": lambda x, y: (x.numpy(), y.numpy()),
    "dataset": Pairs,
    "tensor-dataset": TensorDataset,
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=2),
    "list-of-batches": lambda x, y: [(x[:1], y[:1]), (x[1:], y[1:])],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same_and_counts_its_items(form):
    bnn, x, y = CASES[0].make()
    varlap.laplace(bnn, (x, y), 0.3)
    expected = clone(bnn.log_sigma)
    assert isinstance(FORMS["arrays"](x, y)[0], np.ndarray)
    varlap.laplace(bnn, FORMS[form](x, y), 0.3)
    assert_close(clone(bnn.log_sigma), expected, 1e-14)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 128])
@pytest.mark.parametrize("curvature", ["fisher", "hessian"])
def test_batches_are_only_a_matter_of_memory(curvature, batch_size):
    bnn, x, y = CASES[0].make()
    expected = varlap.laplace(bnn, (x, y), 50.0, curvature=curvature)
    assert_close(varlap.laplace(bnn, (x, y), 50.0, curvature=curvature, batch_size=batch_size), expected, 1e-14)


def test_num_data_stands_for_a_training_set_of_which_the_data_are_a_part():
    bnn, x, y = CASES[0].make()
    f = varlap.laplace(bnn, (x, y), 0.3)
    assert_close(clone(bnn.log_sigma), log_sigma_for(bnn, f, len(y), 0.3), 1e-14)
    again = varlap.laplace(bnn, (x, y), 0.3, num_data=50_000)
    assert_close(again, f)  # per datum
    assert_close(clone(bnn.log_sigma), log_sigma_for(bnn, f, 50_000, 0.3), 1e-14)


def test_inputs_may_be_dicts_and_tuples():
    (bnn, x, y), (twin, pair, _) = named_case("dicts").make(), named_case("tuples").make()
    assert_close(varlap.laplace(bnn, (x, y)), varlap.laplace(twin, (pair, y)))


# -- networks that vmap refuses ----------------------------------------------------------------------------------


class Looking(nn.Module):
    """Looks at its data to decide what to do, and does the same either way."""

    def __init__(self, looks):
        super().__init__()
        self.first, self.last, self.looks = nn.Linear(4, 5), nn.Linear(5, 3), looks

    def forward(self, x):
        if self.looks and x.sum() > 0:
            return self.last(torch.tanh(self.first(x)))
        return self.last(torch.tanh(self.first(x)))


def test_a_network_with_control_flow_gets_the_same_variances_by_a_loop(caplog):
    caplog.set_level(logging.INFO, logger="varlap.curvature.over_items")
    found = []
    for looks in (False, True):
        torch.manual_seed(0)
        bnn, (_, x, y) = varlap.BNN(Looking(looks).double()), CASES[0].make()
        assert bool((x.sum(1) > 0).any() and (x.sum(1) < 0).any())
        varlap.laplace(bnn, (x, y))
        found.append(clone(bnn.log_sigma))
        assert any("in a loop, since torch.vmap refused" in message for message in caplog.messages) == looks
    assert_close(*found, 1e-14)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_networks_get_the_variances_of_their_items(kind):
    torch.manual_seed(0)
    bnn = varlap.BNN(Recurrent(kind).double())
    x = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 0])
    assert_close(varlap.laplace(bnn, (x, y)), enumerated_fisher(bnn, x, y), 1e-12)


# -- messages ----------------------------------------------------------------------------------------------------


def test_hessian_that_is_no_maximum_is_refused_and_nothing_moves():
    bnn, x, y = CASES[0].make()
    before = clone(bnn.log_sigma)
    hessian = varlap.hessian_diagonal(bnn, (x, y))
    counts = varlap.unbounded_variances(bnn, hessian, len(y), 1e-3)
    assert 0 < counts.count < bnn.num_weights()
    most = max(counts.by_parameter, key=counts.by_parameter.get)
    message = (
        rf"laplace\(curvature='hessian'\): {counts.count} of {bnn.num_weights()} weights have no variance, since the "
        rf"log-joint curves upwards there \(most in '{most}'\); train to a maximum first, or use curvature='fisher'"
    )
    with pytest.raises(ConfigError, match=message):
        varlap.laplace(bnn, (x, y), 1e-3, curvature="hessian")
    assert_close(clone(bnn.log_sigma), before)
    varlap.laplace(bnn, (x, y), 1e-3)  # the way out that it names


def test_a_hessian_is_judged_by_the_scales_that_its_variances_are_set_by():
    """An empirical-Bayes prior is refitted before; by the old scales variances would be found that are not numbers."""

    def everything():
        return clone(bnn.log_sigma) | {f"s of {name}": scale.clone() for name, scale in bnn.prior_scale.items()}

    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    bnn = varlap.BNN(network, prior=varlap.EmpiricalBayesPrior())
    with torch.no_grad():
        for scale in bnn.prior_scale.values():
            scale.fill_(1e-2)
        for mean in bnn.means().values():
            mean.mul_(3)
    x, y = torch.randn(20, 3, dtype=torch.float64), torch.arange(20) % 3
    hessian = varlap.hessian_diagonal(bnn, (x, y))
    by_old_scales = [-20 * h + 1 / bnn.prior_scale[name].square() for name, h in hessian.items()]
    assert all(precision.min() > 0 for precision in by_old_scales)
    before = everything()
    with pytest.raises(ConfigError, match="have no variance"):
        varlap.laplace(bnn, (x, y), curvature="hessian")
    assert_close(everything(), before)


@pytest.mark.parametrize("beta", [0.0, -1.0, math.nan, math.inf, "1"])
def test_beta_must_be_positive(beta):
    bnn, x, y = CASES[0].make()
    with pytest.raises(ConfigError, match=r"laplace\(beta=.*\) must be a positive, finite number; 1 is Bayes"):
        varlap.laplace(bnn, (x, y), beta)


@pytest.mark.parametrize("num_data", [0, "90"])
def test_the_number_of_items_must_be_one(num_data):
    bnn, x, y = CASES[0].make()
    with pytest.raises(ConfigError, match=rf"laplace\(num_data={num_data!r}\) must be at least 1"):
        varlap.laplace(bnn, (x, y), num_data=num_data)


@pytest.mark.parametrize("num_probes", [0, -1, 1.5])
def test_a_hessian_of_no_probes_is_refused_and_changes_nothing(num_probes):
    bnn, x, y = CASES[0].make()
    before = clone(bnn.state_dict())
    with pytest.raises(ConfigError, match=rf"\(num_probes={num_probes}\) must be a whole number of at least 1"):
        varlap.laplace(bnn, (x, y), curvature="hessian", num_probes=num_probes)
    assert_close(clone(bnn.state_dict()), before)


def test_an_unknown_curvature_is_refused_with_the_known_ones():
    bnn, x, y = CASES[0].make()
    message = r"laplace\(curvature='ggn'\): choose 'fisher', 'sampled-fisher' or 'hessian'"
    with pytest.raises(ConfigError, match=message):
        varlap.laplace(bnn, (x, y), curvature="ggn")


class Own:
    """A user's likelihood without a `score`: classes, as the built-in one."""

    def __init__(self):
        self.inner = varlap.Categorical()
        self.log_prob, self.sample, self.predict = self.inner.log_prob, self.inner.sample, self.inner.predict


def test_a_likelihood_without_score_is_told_about_sampled_labels():
    bnn, x, y = CASES[0].make()
    own = varlap.BNN(bnn.network, Own())
    with pytest.raises(ConfigError, match=r"Own has no `score`.*labels='sampled'"):
        varlap.laplace(own, (x, y))
    sampled = varlap.laplace(own, (x, y), curvature="sampled-fisher", seed=1)
    assert sampled.keys() == bnn.means().keys()
    exact = enumerated_fisher(bnn, x, y)
    draws = [varlap.laplace(own, (x, y), curvature="sampled-fisher", seed=seed)["2.bias"] for seed in range(300)]
    z = (torch.stack(draws).mean(0) - exact["2.bias"]) / (torch.stack(draws).std(0) / math.sqrt(len(draws)))
    assert z.abs().max() < 4.5  # 300 seeds, three weights: a false-alarm rate of 2e-5


@pytest.mark.parametrize("how", ["sampled", "linearised"])
@pytest.mark.parametrize("refitted", [False, True])
@pytest.mark.parametrize(
    ("network", "told"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), nn.Linear(3, 2)), True),
        (lambda: nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)), False),
        (lambda: nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2)), False),
    ],
    ids=["batch norm behind weights", "batch norm before all weights", "layer norm"],
)
def test_draws_tell_once_of_variances_learnt_beside_a_batchs_statistics(network, told, refitted, how):
    bnn, x, y = varlap.BNN(network()), torch.randn(8, 2), torch.arange(8) % 2
    varlap.fit(bnn, varlap.VL(8), (x, y), epochs=1, progress="none")
    if refitted:
        varlap.laplace(bnn, (x, y))
    bnn.predict(x)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            bnn.predict(x, how=how)
    messages = [m for m in map(str, (one.message for one in said)) if m.startswith("batch norm follows Bayesian")]
    assert len(messages) == (told and not refitted)
    assert all("draws may predict worse than they could; varlap.laplace(bnn, train, beta)" in m for m in messages)


class Registered(nn.Module):
    """Layers in an order that is not that of the forward pass: convolution, batch norm, head."""

    def __init__(self, order: list[str], bias: bool) -> None:
        super().__init__()
        layers = {"conv": nn.Conv2d(1, 4, 3, bias=bias), "norm": nn.BatchNorm2d(4), "head": nn.Linear(4, 2)}
        for name in order:
            self.add_module(name, layers[name])

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).tanh().mean((2, 3)))


@pytest.mark.parametrize("order", [["conv", "norm", "head"], ["conv", "head", "norm"], ["norm", "conv", "head"]])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("how", ["sampled", "linearised"])
def test_draws_tell_again_of_a_bias_that_batch_norm_was_seen_to_cancel_whatever_the_order(how, bias, order):
    bnn, x = varlap.BNN(Registered(order, bias)).train(), torch.randn(8, 1, 4, 4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        varlap.VL(8)(bnn, x, torch.arange(8) % 2).loss.backward()
        for _ in range(2):
            bnn.predict(x, how=how)
    messages = [m for m in map(str, (one.message for one in said)) if m.startswith("batch norm follows Bayesian")]
    assert len(messages) == (bias or order[0] == "conv")  # the rough rule: the norm is registered behind weights
    for message in messages:
        assert ("(far worse for 'conv.bias': cancelled there, so that nothing held the variances)" in message) == bias
        assert "head.bias" not in message


def test_a_bias_in_front_of_batch_norm_is_no_trouble_with_statistics_of_its_own_draw():
    bnn, x = varlap.BNN(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))), torch.randn(8, 2)
    with torch.no_grad():
        bnn.log_sigma["0.bias"].fill_(1.0)
    bnn.predict(x, how="sampled", statistics=(x, torch.arange(8) % 2))  # a warning would be an error
