"""Claims about priors: the scale is the true fan-in's, and each kind does in the ELBO what it says."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import varlap
from varlap.errors import ConfigError
from varlap.posterior.prior import Weight, weights_of


def fan_ins(network):
    return {weight.name: weight.fan_in for weight in weights_of(network)}


class ClassToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 6))
        self.temperature = nn.Parameter(torch.zeros(()))
        self.matrix = nn.Parameter(torch.zeros(4, 6))


VECTORS = 0.0
FAN_INS = [
    (nn.Linear(5, 3), {"weight": 5, "bias": VECTORS}),
    (nn.Linear(5, 1), {"weight": 5, "bias": VECTORS}),
    (nn.Linear(1, 5), {"weight": 1, "bias": VECTORS}),
    (nn.Conv1d(4, 6, 3), {"weight": 12, "bias": VECTORS}),
    (nn.Conv2d(4, 6, (3, 5), groups=2), {"weight": 2 * 15, "bias": VECTORS}),
    (nn.Conv2d(4, 4, 3, groups=4, bias=False), {"weight": 9}),
    (nn.Conv2d(4, 1, 1), {"weight": 4, "bias": VECTORS}),
    (nn.Conv3d(2, 6, 2, stride=2), {"weight": 16, "bias": VECTORS}),
    (nn.ConvTranspose1d(4, 6, 3), {"weight": 12, "bias": VECTORS}),
    (nn.ConvTranspose2d(4, 6, 4, stride=2, groups=2), {"weight": 2 * 4, "bias": VECTORS}),
    (nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 1)), {"weight": 4 * 1.5 * 2, "bias": VECTORS}),
    (nn.Bilinear(2, 3, 4), {"weight": 6, "bias": VECTORS}),
    (nn.Embedding(7, 4), {"weight": 1}),
    (nn.Embedding(1, 4), {"weight": 1}),
    (nn.EmbeddingBag(7, 4), {"weight": 1}),
    (
        nn.LSTM(2, 3, proj_size=1),
        {"weight_ih_l0": 2, "weight_hh_l0": 1, "weight_hr_l0": 3, "bias_ih_l0": VECTORS, "bias_hh_l0": VECTORS},
    ),
    (
        nn.GRU(2, 3, bidirectional=True, bias=False),
        {"weight_ih_l0": 2, "weight_hh_l0": 3, "weight_ih_l0_reverse": 2, "weight_hh_l0_reverse": 3},
    ),
    (nn.RNNCell(2, 1), {"weight_ih": 2, "weight_hh": 1, "bias_ih": VECTORS, "bias_hh": VECTORS}),
    (
        nn.MultiheadAttention(6, 2, add_bias_kv=True),
        {
            "in_proj_weight": 6,
            "in_proj_bias": VECTORS,
            "bias_k": VECTORS,
            "bias_v": VECTORS,
            "out_proj.weight": 6,
            "out_proj.bias": VECTORS,
        },
    ),
    (
        nn.MultiheadAttention(6, 2, kdim=4, vdim=3, bias=False),
        {"q_proj_weight": 6, "k_proj_weight": 4, "v_proj_weight": 3, "out_proj.weight": 6},
    ),
    (nn.MultiheadAttention(1, 1, bias=False), {"in_proj_weight": 1, "out_proj.weight": 1}),
    (nn.LayerNorm((4, 5)), {"weight": VECTORS, "bias": VECTORS}),
    (nn.RMSNorm((4, 5)), {"weight": VECTORS}),
    (nn.BatchNorm2d(4), {"weight": VECTORS, "bias": VECTORS}),
    (nn.InstanceNorm1d(4, affine=True), {"weight": VECTORS, "bias": VECTORS}),
    (nn.GroupNorm(2, 4), {"weight": VECTORS, "bias": VECTORS}),
    (nn.PReLU(3), {"weight": VECTORS}),
    (ClassToken(), {"token": VECTORS, "temperature": VECTORS, "matrix": 6}),
]


@pytest.mark.parametrize(
    ("module", "expected"), FAN_INS, ids=lambda value: str(value) if isinstance(value, nn.Module) else ""
)
def test_fan_in_of_each_kind_of_weight(module, expected):
    assert fan_ins(module) == expected


def counted_fan_in(module, size):
    """Count, by its gradient, how many products with weights enter an output; averaged over the interior."""
    module = module.double()
    with torch.no_grad():
        module.weight.fill_(1.0)
    x = torch.ones(1, module.in_channels, *[size] * (module.weight.ndim - 2), dtype=torch.float64, requires_grad=True)
    outputs = module(x)
    middle = outputs[
        (0, 0, *[slice(n // 4, n // 4 + 2 * s) for n, s in zip(outputs.shape[2:], module.stride, strict=True)])
    ]
    (touched,) = torch.autograd.grad(middle.sum(), x)
    return touched.sum().item() / middle.numel()


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv1d(4, 6, 3, bias=False),
        nn.Conv2d(4, 6, (3, 5), stride=2, groups=2, bias=False),
        nn.Conv2d(4, 6, 3, dilation=2, bias=False),
        nn.Conv3d(2, 4, 2, bias=False),
        nn.ConvTranspose1d(3, 2, 5, bias=False),
        nn.ConvTranspose1d(3, 2, 3, stride=2, bias=False),
        nn.ConvTranspose2d(4, 6, 4, stride=2, groups=2, bias=False),
        nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 1), bias=False),
        nn.ConvTranspose2d(4, 2, 3, stride=3, padding=1, bias=False),
        nn.ConvTranspose3d(2, 4, 3, stride=2, groups=2, bias=False),
    ],
    ids=str,
)
def test_fan_in_of_a_convolution_is_the_counted_number_of_products(module):
    counted = counted_fan_in(module, size=12)
    assert fan_ins(module)["weight"] == pytest.approx(counted, rel=1e-12)
    bnn = varlap.BNN(module, "gaussian")
    assert bnn.prior_scale["weight"].item() ** 2 == pytest.approx(2 / counted, rel=1e-6)


@pytest.mark.parametrize(
    ("module", "fan_in"), [(nn.Embedding(7, 4), 1), (nn.ConvTranspose2d(4, 6, 4, stride=2), 16), (nn.Linear(5, 3), 5)]
)
def test_a_parametrised_weight_has_the_fan_in_of_its_place(module, fan_in):
    network = nn.ModuleDict({"inner": spectral_norm(module)})
    assert fan_ins(network)["inner.parametrizations.weight.original"] == fan_in
    assert fan_ins(network["inner"])["parametrizations.weight.original"] == fan_in


def test_shared_weight_has_the_fan_in_of_the_first_place_that_holds_it():
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    network[1].weight = network[0].weight
    assert fan_ins(network) == {"0.weight": 4, "0.bias": 0, "1.bias": 0}


def test_default_variance_is_two_over_fan_in_and_one_for_vectors():
    bnn = varlap.BNN(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(8, 3)).double())
    variances = {name: scale.item() ** 2 for name, scale in bnn.prior_scale.items()}
    expected = {"0.weight": 2 / 27, "0.bias": 1, "1.weight": 1, "1.bias": 1, "2.weight": 2 / 8, "2.bias": 1}
    assert variances == pytest.approx(expected, rel=1e-12)


def test_gain_scales_the_variance_of_matrices_only():
    bnn = varlap.BNN(nn.Linear(8, 3).double(), prior=varlap.FanInPrior(gain=4.0))
    assert bnn.prior_scale["weight"].item() ** 2 == pytest.approx(0.5, rel=1e-12)
    assert bnn.prior_scale["bias"].item() == 1


@pytest.mark.parametrize("activation", [F.relu, lambda h: F.softplus(h, beta=20)], ids=["relu", "softplus"])
def test_networks_drawn_from_the_default_prior_keep_the_second_moment_of_activations(activation):
    """s² = 2/fan-in balances the half that ReLU cuts off; over 10 layers the moment stays of order one."""
    network = nn.Sequential(*[nn.Linear(400, 400, bias=False) for _ in range(10)]).double()
    bnn = varlap.BNN(network)
    with torch.no_grad():
        for name, mean in bnn.means().items():
            mean.zero_()
            bnn.log_sigma[name].copy_(bnn.prior_scale[name].log().expand(mean.shape))
    h = torch.randn(32, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with bnn.sample(1), torch.no_grad():
        for layer in network:
            h = activation(layer(h))
            assert 0.4 < h.square().mean().item() < 2.5


def test_one_scale_is_the_same_for_all():
    bnn = varlap.BNN(nn.Linear(8, 3).double(), prior=varlap.OneScalePrior(0.1))
    assert {name: scale.item() for name, scale in bnn.prior_scale.items()} == {"weight": 0.1, "bias": 0.1}
    assert bnn.log_sigma["weight"][0, 0].item() == pytest.approx(math.log(0.1) - 3, rel=1e-12)


# -- empirical Bayes ------------------------------------------------------------------------------------------------


def empirical(centre="zero", variances="per-weight"):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    bnn = varlap.BNN(network, prior=varlap.EmpiricalBayesPrior(centre=centre), variances=variances)
    with torch.no_grad():
        for parameter in bnn.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return bnn


def kl_at(bnn, scales):
    """Eq. 12 at any prior scales, written out."""
    total = 0.0
    for name, mean in bnn.means().items():
        variance, square = (2 * bnn.log_sigma[name]).exp(), (mean - bnn.prior_mean_of(name)).square()
        s2 = scales[name].square()
        total = total + 0.5 * ((variance + square) / s2 - 1 + s2.log() - variance.log()).sum()
    return total


def optimal_scales(bnn):
    """The optimum as a differentiable function of the posterior, written out."""
    return {
        name: ((2 * bnn.log_sigma[name]).exp().expand(mean.shape) + (mean - bnn.prior_mean_of(name)).square())
        .mean()
        .sqrt()
        for name, mean in bnn.means().items()
    }


@pytest.mark.parametrize("variances", ["per-weight", "one"])
@pytest.mark.parametrize("centre", ["zero", "network"])
def test_learnt_scale_is_the_mean_of_second_moments_and_minimises_the_kl(centre, variances):
    bnn = empirical(centre, variances)
    kl = bnn.kl().item()
    best = {name: scale.clone() for name, scale in bnn.prior_scale.items()}
    for name, scale in optimal_scales(bnn).items():
        torch.testing.assert_close(best[name], scale.detach(), rtol=1e-14, atol=0)
    assert kl == pytest.approx(kl_at(bnn, best).item(), rel=1e-12)
    for name in best:
        up, down = (kl_at(bnn, best | {name: best[name] * factor}).item() for factor in (1 + 1e-4, 1 - 1e-4))
        assert up > kl
        assert down > kl
        assert abs(up - down) / 2e-4 < 1e-5 * (up + down - 2 * kl) / 1e-8  # the slope vanishes, the curvature does not


def test_gradient_at_the_learnt_scale_equals_autograds_through_the_optimum():
    bnn = empirical()
    envelope = torch.autograd.grad(bnn.kl(), list(bnn.parameters()))
    through = torch.autograd.grad(kl_at(bnn, optimal_scales(bnn)), list(bnn.parameters()))
    for one, other in zip(envelope, through, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_learnt_scale_follows_the_weights_in_each_step():
    bnn = empirical()
    optimizer = varlap.adam(bnn, lr=0.05)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    objective = varlap.VL(num_data=60)
    for _ in range(3):
        terms = objective(bnn, x, y)
        for name, scale in optimal_scales(bnn).items():
            torch.testing.assert_close(bnn.prior_scale[name], scale.detach(), rtol=1e-14, atol=0)
        torch.testing.assert_close(terms.kl, bnn.kl().detach() / 60, rtol=1e-14, atol=0)
        terms.loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_start_of_a_learnt_prior_sets_where_log_sigma_starts():
    bnn = varlap.BNN(nn.Linear(8, 3), prior=varlap.EmpiricalBayesPrior(start=varlap.OneScalePrior(0.2)))
    assert bnn.prior_scale["weight"].item() == pytest.approx(0.2)
    assert bnn.log_sigma["weight"][0, 0].item() == pytest.approx(math.log(0.2) - 3)


@pytest.mark.parametrize("objective", [varlap.MAP, varlap.VLDeterminant])
def test_objectives_without_variances_refuse_a_learnt_prior(objective):
    name = objective.__name__
    message = rf"{name} cannot learn the prior's scale.*unbounded as s goes to 0; use varlap\.FanInPrior"
    with pytest.raises(ConfigError, match=message):
        objective(num_data=6)(empirical(), torch.zeros(6, 4, dtype=torch.float64), torch.arange(6) % 3)


# -- a mean at pretrained weights -----------------------------------------------------------------------------------


def test_centred_prior_makes_the_kl_quadratic_around_the_pretrained_weights():
    torch.manual_seed(0)
    bnn = varlap.BNN(nn.Linear(4, 3).double(), prior=varlap.OneScalePrior(0.5, centre="network"))
    start = {name: mean.detach().clone() for name, mean in bnn.means().items()}
    at_start = bnn.kl().item()
    assert at_start == pytest.approx(15 * 0.5 * (math.exp(-6) - 1 + 6), rel=1e-12)
    move = {name: torch.randn_like(mean) for name, mean in start.items()}
    square = sum(direction.square().sum().item() for direction in move.values())
    for distance in (0.1, -0.1, 2.0):
        with torch.no_grad():
            for name, mean in bnn.means().items():
                mean.copy_(start[name] + distance * move[name])
        assert bnn.kl().item() - at_start == pytest.approx(0.5 * distance**2 * square / 0.25, rel=1e-10)


def test_centre_is_a_copy_that_training_does_not_move_and_the_state_dict_keeps():
    torch.manual_seed(0)
    network = nn.Linear(4, 3)
    pretrained = network.weight.detach().clone()
    bnn = varlap.BNN(network, prior=varlap.FanInPrior(centre="network"))
    with torch.no_grad():
        network.weight.add_(1.0)
    assert torch.equal(bnn.prior_mean["weight"], pretrained)
    assert torch.equal(bnn.state_dict()["prior_mean.weight"], pretrained)
    fresh = varlap.BNN(nn.Linear(4, 3), prior=varlap.FanInPrior(centre="network"))
    assert not torch.equal(fresh.kl(), bnn.kl())
    fresh.load_state_dict(bnn.state_dict())
    assert torch.equal(fresh.prior_mean["weight"], pretrained)
    assert torch.equal(fresh.kl(), bnn.kl())


def test_centre_at_zero_costs_no_memory():
    assert len(varlap.BNN(nn.Linear(4, 3)).prior_mean) == 0


@pytest.mark.parametrize("objective", [varlap.MAP, varlap.VI, varlap.VL])
def test_every_objective_pulls_towards_the_centre(objective):
    """With one item of weight 0 only the prior speaks, and its gradient vanishes at the centre."""
    torch.manual_seed(0)
    bnn = varlap.BNN(nn.Linear(4, 3).double(), prior=varlap.OneScalePrior(0.5, centre="network"))
    x, y, nothing = torch.ones(1, 4).double(), torch.tensor([0]), torch.zeros(1).double()
    objective(num_data=10)(bnn, x, y, weights=nothing).loss.backward()
    assert bnn.network.weight.grad.abs().max() == 0
    with torch.no_grad():
        bnn.network.weight.add_(0.1)
    bnn.zero_grad()
    objective(num_data=10)(bnn, x, y, weights=nothing).loss.backward()
    torch.testing.assert_close(bnn.network.weight.grad, torch.full_like(bnn.network.weight, 0.1 / 0.25 / 10))


# -- own priors and mistakes ----------------------------------------------------------------------------------------


class OwnPrior:
    """Tight for the head, wide elsewhere; it sees the weight in its place."""

    centre = "network"
    learnt = False

    def __init__(self):
        self.seen = []

    def scale(self, weight):
        assert isinstance(weight, Weight)
        self.seen.append((weight.name, weight.attribute, type(weight.module), tuple(weight.value.shape)))
        return 0.1 if weight.name.startswith("2.") else 3.0


def test_own_prior_is_asked_once_for_each_bayesian_weight():
    prior = OwnPrior()
    assert isinstance(prior, varlap.Prior)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    bnn = varlap.BNN(network, prior=prior, select=["0.weight", "2.*"])
    assert prior.seen == [
        ("0.weight", "weight", nn.Linear, (5, 4)),
        ("2.weight", "weight", nn.Linear, (3, 5)),
        ("2.bias", "bias", nn.Linear, (3,)),
    ]
    scales = {name: round(scale.item(), 6) for name, scale in bnn.prior_scale.items()}
    assert scales == {"0.weight": 3.0, "2.weight": 0.1, "2.bias": 0.1}
    assert torch.equal(bnn.prior_mean["2.bias"], network[2].bias)
    varlap.VL(num_data=60)(bnn, torch.randn(6, 4), torch.arange(6) % 3).loss.backward()


@pytest.mark.parametrize("scale", [-1.0, 0.0, math.nan, math.inf])
def test_scale_that_is_no_standard_deviation_is_refused(scale):
    with pytest.raises(ConfigError, match=rf"OneScalePrior\({scale}\) must be positive and finite"):
        varlap.OneScalePrior(scale)
    with pytest.raises(ConfigError, match=rf"FanInPrior\(gain={scale}\) must be positive and finite: s² = gain/fan-in"):
        varlap.FanInPrior(gain=scale)


@pytest.mark.parametrize("scale", [-1.0, 0.0, math.nan, math.inf])
def test_own_prior_with_a_scale_that_is_no_standard_deviation_is_refused(scale):
    class Wrong(OwnPrior):
        def scale(self, weight):
            return scale

    with pytest.raises(ConfigError, match=rf"Wrong\.scale says {scale} for 'weight'; it must be a positive"):
        varlap.BNN(nn.Linear(2, 2), prior=Wrong())


@pytest.mark.parametrize("prior", [varlap.OneScalePrior, varlap.FanInPrior, varlap.EmpiricalBayesPrior])
def test_unknown_centre_is_refused(prior):
    with pytest.raises(ConfigError, match=rf"{prior.__name__}\(centre='pretrained'\): choose 'zero' or 'network'"):
        prior(centre="pretrained")


def test_unknown_centre_of_an_own_prior_is_refused():
    class Wrong(OwnPrior):
        centre = "pretrained"

    with pytest.raises(ConfigError, match=r"centre='pretrained'.*choose 'zero' or 'network'"):
        varlap.BNN(nn.Linear(2, 2), prior=Wrong())


@pytest.mark.parametrize("prior", [varlap.FanInPrior, "fan-in", 1.0], ids=["a class", "a name", "a number"])
def test_prior_that_is_no_prior_object_is_refused(prior):
    with pytest.raises(ConfigError, match=r"does not follow varlap\.Prior; use for example varlap\.FanInPrior\(\)"):
        varlap.BNN(nn.Linear(2, 2), prior=prior)
