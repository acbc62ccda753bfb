"""Claims about which parameters are Bayesian, and what optimizers are given."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from networks_and_batches import assert_same, batch, by_name, generator, mlp, snapshot
from torch import nn

import varlap
from varlap.errors import ConfigError, VarlapWarning

# -- which parameters are Bayesian -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (None, ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ("2.*", ["2.weight", "2.bias"]),
        (["0.weight", "*.bias"], ["0.weight", "0.bias", "2.bias"]),
        (("2.bias",), ["2.bias"]),
        ((name for name in ["2.bias"]), ["2.bias"]),
        (lambda name, parameter: parameter.ndim == 2, ["0.weight", "2.weight"]),
    ],
    ids=["default", "pattern", "list", "tuple", "iterator", "function"],
)
def test_select_chooses_the_bayesian_parameters_and_leaves_the_rest_as_point_estimates(select, expected):
    bnn = varlap.BNN(mlp(), select=select)
    rest = [f"network.{n}" for n, _ in bnn.network.named_parameters() if n not in expected]
    assert list(bnn.log_sigma) == list(bnn.prior_scale) == list(bnn.means()) == expected
    assert list(bnn.point_estimates()) == rest
    assert bnn.num_weights() == sum(bnn.network.get_parameter(name).numel() for name in expected)


def test_misspelt_pattern_gets_the_nearest_name():
    with pytest.raises(ConfigError, match=r"pattern '0\.wieght' matches no parameter.*did you mean '0\.weight'\?"):
        varlap.BNN(mlp(), select=["2.*", "0.wieght"])


def test_pattern_near_to_no_name_gets_an_example():
    with pytest.raises(ConfigError, match=r"'head\.\*' matches no parameter.*names look like '0\.weight'"):
        varlap.BNN(mlp(), select="head.*")


@pytest.mark.parametrize("select", [[], lambda name, parameter: False], ids=["empty list", "function"])
def test_select_that_chooses_nothing_is_refused(select):
    with pytest.raises(ConfigError, match=r"no Bayesian parameter is left: select chose none.*select='head\.\*'"):
        varlap.BNN(mlp(), select=select)


def test_frozen_parameters_are_left_out_by_default_and_get_no_gradient():
    network = mlp()
    network[0].requires_grad_(False)
    bnn = varlap.BNN(network)
    assert list(bnn.log_sigma) == ["2.weight", "2.bias"]
    assert bnn.point_estimates() == {}
    varlap.VL(num_data=60)(bnn, *batch()).loss.backward()
    assert network[0].weight.grad is None
    assert network[2].weight.grad is not None


def test_frozen_parameter_that_is_selected_learns_its_variance_only():
    network = mlp()
    network[0].requires_grad_(False)
    bnn = varlap.BNN(network, select="*")
    before = snapshot(network[0])
    optimizer = varlap.adam(bnn, lr=0.1)
    varlap.VL(num_data=60)(bnn, *batch()).loss.backward()
    optimizer.step()
    assert_same(before, network[0])
    assert not network[0].weight.requires_grad
    assert not any(p is network[0].weight for group in optimizer.param_groups for p in group["params"])
    assert bnn.log_sigma["0.weight"].grad.abs().min() > 0


def test_buffers_are_never_bayesian():
    bnn = varlap.BNN(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    assert list(bnn.log_sigma) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    before = bnn.network[1].running_mean.clone()
    with bnn.sample(generator()):
        assert torch.equal(bnn.network[1].running_mean, before)


def test_shared_parameter_counts_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Linear(3, 3)
            self.decode = nn.Linear(3, 3)
            self.decode.weight = self.encode.weight

    bnn = varlap.BNN(Tied())
    assert list(bnn.log_sigma) == ["encode.weight", "encode.bias", "decode.bias"]
    assert bnn.num_weights() == 9 + 3 + 3
    alone = [varlap.BNN(nn.Linear(3, 3)), varlap.BNN(nn.Linear(3, 3), select="bias")]
    with torch.no_grad():
        for p, value in zip(alone[0].network.parameters(), bnn.network.encode.parameters(), strict=True):
            p.copy_(value)
        alone[1].network.bias.copy_(bnn.network.decode.bias)
    torch.testing.assert_close(bnn.kl(), alone[0].kl() + alone[1].kl())


@pytest.mark.parametrize("select", [None, "noise"])
def test_a_noise_that_is_a_weight_of_the_network_is_no_bayesian_one(select):
    network, likelihood = nn.Linear(4, 1), varlap.Gaussian()
    network.register_parameter("noise", likelihood.log_noise)
    with pytest.raises(ConfigError, match=r"'noise' is the likelihood's too.*select=lambda name.*name != 'noise'"):
        varlap.BNN(network, likelihood, select=select)
    bnn = varlap.BNN(network, likelihood, select=lambda name, parameter: name != "noise")
    assert list(bnn.point_estimates()) == ["network.noise"]


def test_several_dtypes_in_one_network_are_trained_together():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.single = nn.Linear(4, 4)
            self.precise = nn.Linear(4, 4).double()
            self.brain = nn.Linear(4, 3).bfloat16()

        def forward(self, x):
            x = torch.tanh(self.precise(torch.tanh(self.single(x)).double()))
            return self.brain(x.bfloat16()).float()

    bnn = varlap.BNN(Mixed())
    dtypes = {"single": torch.float32, "precise": torch.float64, "brain": torch.float32}
    for name, log_sigma in bnn.log_sigma.items():
        assert log_sigma.dtype == dtypes[name.split(".")[0]], name
        assert bnn.prior_scale[name].dtype == log_sigma.dtype
    optimizer = varlap.adam(bnn, lr=0.01)
    for objective in (varlap.VL(60), varlap.VI(60), varlap.VLHessian(60), varlap.MAP(60)):
        before = snapshot(bnn)
        objective(bnn, *batch()).loss.backward()
        for name, mean in bnn.means().items():
            assert mean.grad.dtype == mean.dtype, name
        optimizer.step()
        optimizer.zero_grad()
        moved = [name for name, tensor in bnn.state_dict().items() if not torch.equal(tensor, before[name])]
        assert {f"network.{name}" for name in bnn.means()} <= set(moved)
        assert {t.dtype for t in bnn.network.brain.parameters()} == {torch.bfloat16}
    with bnn.sample(generator()):
        assert bnn(batch()[0]).shape == (6, 3)


def test_a_part_that_is_called_sparse_makes_no_gradient_sparse():
    network = nn.Module()
    network.sparse, network.bias = nn.Linear(4, 3), nn.Parameter(torch.zeros(3))
    assert set(varlap.BNN(network).log_sigma) == {"bias", "sparse.weight", "sparse.bias"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_prior_of_many_means_in_half_precision_is_summed_in_single(dtype):
    network = nn.Linear(400, 400).to(dtype)
    bnn = varlap.BNN(network, prior=varlap.OneScalePrior(1.0))
    with torch.no_grad():
        network.weight.fill_(1.0)
        network.bias.zero_()
    terms = varlap.MAP(num_data=10)(bnn, torch.zeros(4, 400, dtype=dtype), torch.arange(4))
    assert terms.kl.item() == 160_000 / 2 / 10


# -- optimizers ------------------------------------------------------------------------------------------------------


@by_name
def test_parameter_groups_hold_each_trainable_parameter_exactly_once(case):
    bnn, _, _ = case.make()
    means, log_sigma = bnn.parameter_groups(lr=0.1, log_sigma_lr_multiplier=7)
    together = [id(p) for p in (*means["params"], *log_sigma["params"])]
    assert sorted(together) == sorted(id(p) for p in bnn.parameters() if p.requires_grad)
    assert {id(p) for p in log_sigma["params"]} == {id(p) for p in bnn.log_sigma.parameters()}
    assert means["lr"] == 0.1
    assert log_sigma["lr"] == pytest.approx(0.7)


@pytest.mark.filterwarnings("ignore:SGD leaves log σ where it starts")
@pytest.mark.parametrize(
    "make",
    [
        lambda groups: torch.optim.SGD(groups, weight_decay=0.1),
        lambda groups: torch.optim.AdamW(groups),
        lambda groups: torch.optim.RMSprop(groups, weight_decay=0.1),
    ],
    ids=["SGD", "AdamW", "RMSprop"],
)
def test_any_optimizer_takes_the_groups_and_decays_nothing(make):
    bnn = varlap.BNN(mlp(), "gaussian")
    optimizer = make(bnn.parameter_groups(lr=0.1))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.0]
    before = snapshot(bnn)
    for p in bnn.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert_same(before, bnn)
    varlap.VL(num_data=60)(bnn, batch()[0], torch.randn(6, 3, generator=generator())).loss.backward()
    optimizer.step()
    for name, tensor in bnn.named_parameters():
        assert not torch.equal(tensor, before[name]), name


def test_learning_rates_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"lr=0 and log_sigma_lr_multiplier=10\.0 must be positive"):
        varlap.adam(varlap.BNN(mlp()), lr=0)
    with pytest.raises(ConfigError, match=r"lr=0\.1 and log_sigma_lr_multiplier=-1 must be positive"):
        varlap.BNN(mlp()).parameter_groups(0.1, -1)


def warnings_of_steps(bnns, optimizer, objective, num_steps=2):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(num_steps):
            for bnn in bnns:
                objective(bnn, *batch()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in caught if issubclass(w.category, VarlapWarning)]


@pytest.mark.parametrize(
    ("optimizer", "instead"),
    [
        (
            torch.optim.Adam,
            "Adam(bnn.parameter_groups(lr=...)) or varlap.adam(bnn, lr=...), whose log σ learns 10 times faster",
        ),
        (torch.optim.SGD, "varlap.sgd(bnn, lr=...), whose log σ has Adam"),
    ],
)
def test_one_learning_rate_for_all_parameters_warns_once(optimizer, instead):
    bnn = varlap.BNN(mlp())
    (message,) = warnings_of_steps([bnn], optimizer(bnn.parameters(), lr=1e-3), varlap.VL(num_data=60))
    name = optimizer.__name__
    assert message == (
        f"{name} trains log σ and the means at one learning rate, so the variances may not converge (paper, section "
        f"5.1); use {instead}"
    )


def test_lbfgs_which_takes_no_groups_is_told_of_adam():
    bnn, objective = varlap.BNN(mlp()), varlap.VL(num_data=60)
    optimizer = torch.optim.LBFGS(bnn.parameters(), max_iter=1)

    def closure():
        optimizer.zero_grad()
        loss = objective(bnn, *batch()).loss
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.warns(VarlapWarning, match=r"^LBFGS trains log σ and .*; use varlap\.adam\(bnn, lr=\.\.\.\), whose"):
        optimizer.step(closure)


def test_sgd_over_log_sigma_warns_once_and_sgd_of_the_library_does_not():
    bnn, objective = varlap.BNN(mlp()), varlap.VL(num_data=60)
    (message,) = warnings_of_steps([bnn], torch.optim.SGD(bnn.parameter_groups(lr=0.1)), objective)
    assert message == (
        "SGD leaves log σ where it starts, unless the data are few: its gradient is of the size β/N; use "
        "varlap.sgd(bnn, lr=...), whose log σ has Adam"
    )
    assert warnings_of_steps([bnn], varlap.sgd(bnn, lr=0.1), objective) == []
    assert warnings_of_steps([bnn], torch.optim.SGD(bnn.network.parameters(), lr=0.1), objective) == []


def test_warning_points_at_the_users_line():
    bnn = varlap.BNN(mlp())
    optimizer = torch.optim.Adam(bnn.parameters())
    varlap.VL(num_data=60)(bnn, *batch()).loss.backward()
    with pytest.warns(VarlapWarning, match="one learning rate") as caught:
        optimizer.step()
    assert caught[0].filename == __file__


def test_parameter_groups_closed_form_variances_and_map_do_not_warn():
    bnn = varlap.BNN(mlp())
    objective = varlap.VL(num_data=60)
    assert warnings_of_steps([bnn], torch.optim.Adam(bnn.parameter_groups(lr=1e-3)), objective) == []
    assert warnings_of_steps([bnn], varlap.adam(bnn, lr=1e-3), objective) == []
    bnn = varlap.BNN(mlp())
    assert warnings_of_steps([bnn], torch.optim.Adam(bnn.parameters()), varlap.MAP(num_data=60)) == []
    bnn = varlap.BNN(mlp())
    closed = varlap.VL(num_data=60, variances="closed-form", beta_warmup_steps=0)
    assert warnings_of_steps([bnn], torch.optim.Adam(bnn.parameters()), closed) == []


def test_copy_of_a_network_is_watched_too():
    bnn = copy.deepcopy(varlap.BNN(mlp()))
    assert len(warnings_of_steps([bnn], torch.optim.Adam(bnn.parameters()), varlap.VL(num_data=60))) == 1


def test_two_networks_in_one_optimizer_do_not_warn():
    one, two = varlap.BNN(mlp()), varlap.BNN(mlp())
    groups = one.parameter_groups(lr=1e-3) + two.parameter_groups(lr=1e-3)
    for number, group in enumerate(groups):
        group["name"] = str(number)
    assert (
        warnings_of_steps([one, two], torch.optim.Adam(groups), varlap.VL(num_data=60, curvature=varlap.Fisher())) == []
    )
    plain = nn.Linear(4, 3)
    assert warnings_of_steps([one], torch.optim.SGD(plain.parameters(), lr=0.1), varlap.MAP(num_data=60)) == []


def test_networks_are_released_though_optimizers_are_watched():
    bnn = varlap.BNN(mlp())
    optimizer = varlap.adam(bnn, lr=1e-3)
    varlap.VL(num_data=60)(bnn, *batch()).loss.backward()
    optimizer.step()
    alive = weakref.ref(bnn), weakref.ref(optimizer)
    del bnn, optimizer
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
