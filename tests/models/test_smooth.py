"""Claims about smooth."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from varlap.errors import ConfigError, VarlapWarning
from varlap.models import find_kinks, smooth
from varlap.models.smooth import ScaledTanh, SmoothLeakyReLU, SmoothPReLU, SmoothSELU

SWAPS = [
    (nn.ReLU(), nn.SiLU),
    (nn.ReLU(inplace=True), nn.SiLU),
    (nn.ReLU6(), ScaledTanh),
    (nn.Hardtanh(-2.0, 1.0), ScaledTanh),
    (nn.LeakyReLU(0.2), SmoothLeakyReLU),
    (nn.PReLU(init=0.3), SmoothPReLU),
    (nn.RReLU(0.1, 0.3).eval(), SmoothLeakyReLU),
    (nn.Hardswish(), nn.SiLU),
    (nn.Hardsigmoid(), nn.Sigmoid),
    (nn.SELU(), SmoothSELU),
    (nn.ELU(2.0), nn.CELU),
]
IDS = [type(old).__name__ for old, _ in SWAPS]


@pytest.fixture(autouse=True)
def same_weights_in_every_run():
    torch.manual_seed(0)


@pytest.mark.parametrize(("old", "kind"), SWAPS, ids=IDS)
def test_smooth_form_agrees_far_from_the_kink(old, kind):
    old = copy.deepcopy(old).double()
    new = smooth(old)
    assert type(new) is kind
    far = torch.tensor([-60.0, -40.0, 40.0, 60.0], dtype=torch.float64)
    torch.testing.assert_close(new(far), old(far.clone()), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("old", "kind"), SWAPS, ids=IDS)
def test_smooth_form_stays_near_the_activation_everywhere(old, kind):
    old = copy.deepcopy(old).double()
    x = torch.linspace(-8, 8, 201, dtype=torch.float64)
    assert (smooth(old)(x) - old(x.clone())).abs().max() < 0.8


@pytest.mark.parametrize(("old", "kind"), SWAPS, ids=IDS)
def test_smooth_form_has_a_slope_without_jump_and_a_right_second_derivative(old, kind):
    new = smooth(copy.deepcopy(old).double())
    x = torch.linspace(-3, 3, 13, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(new(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x)
    assert second.abs().max() > 0.05
    step = 1e-5
    slopes = [
        torch.autograd.grad(new(y).sum(), y)[0]
        for y in ((x + sign * step).detach().requires_grad_() for sign in (1, -1))
    ]
    away = x.detach() != 0  # CELU's second derivative jumps there, so the central difference is its average
    torch.testing.assert_close(second[away], ((slopes[0] - slopes[1]) / (2 * step))[away], atol=1e-6, rtol=1e-4)
    assert (slopes[0] - slopes[1]).abs().max() < 1e-4


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("old", "kind"), SWAPS, ids=IDS)
def test_smooth_form_keeps_the_mode(old, kind, training):
    assert smooth(copy.deepcopy(old).train(training)).training is training


def test_swap_is_in_place_and_returns_the_network():
    network = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"act": nn.ReLU()}))
    assert smooth(network) is network
    assert isinstance(network[1]["act"], nn.SiLU)
    assert find_kinks(network) == []


def test_root_that_is_an_activation_gives_a_new_root():
    assert isinstance(smooth(nn.ReLU()), nn.SiLU)


def test_module_shared_by_several_places_stays_shared():
    shared = nn.ReLU()
    network = nn.Sequential(shared, nn.Sequential(nn.Linear(2, 2), shared), shared)
    smooth(network)
    assert isinstance(network[0], nn.SiLU)
    assert network[0] is network[1][1] is network[2]


def test_prelu_keeps_its_parameter_and_its_name():
    network = nn.Sequential(nn.PReLU(3))
    weight = network[0].weight
    smooth(network)
    assert network[0].weight is weight
    assert list(network.state_dict()) == ["0.weight"]


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 4, 4)])
def test_prelu_slopes_belong_to_channels(shape):
    old = nn.PReLU(3)
    old.weight.data = torch.tensor([0.1, 0.2, 0.3])
    x = torch.full(shape, -50.0)
    torch.testing.assert_close(smooth(old)(x), old(x))


def test_hooks_are_kept_and_their_handles_still_remove_them():
    calls = []
    network = nn.Sequential(nn.ReLU())
    handle = network[0].register_forward_hook(lambda *_: calls.append("after"))
    network[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    smooth(network)
    network(torch.zeros(1))
    assert calls == ["before", "after"]
    handle.remove()
    network(torch.zeros(1))
    assert calls == ["before", "after", "before"]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # torch, of torch.relu
@pytest.mark.parametrize("activation", [F.relu, torch.relu, "relu", nn.ReLU()])
def test_transformer_encoder_is_smooth_on_every_path_of_torch(activation):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation=activation, batch_first=True)
    network = smooth(nn.TransformerEncoder(layer, 2)).eval()
    x = torch.randn(3, 5, 8)
    padding = torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]
    assert find_kinks(network, lambda: network(x)) == []
    for arguments in ({}, {"src_key_padding_mask": padding}):
        expected = network(x, **arguments)
        with torch.no_grad():  # torch's fused path would compute ReLU here
            output = network(x, **arguments)
        torch.testing.assert_close(output[~padding], expected[~padding])


def test_transformer_with_gelu_keeps_its_fused_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
    network = smooth(nn.TransformerEncoder(layer, 1))
    assert network.layers[0].activation_relu_or_gelu == 2
    assert network.use_nested_tensor


def test_transformer_decoder_layer_is_smoothed():
    layer = smooth(nn.TransformerDecoderLayer(8, 2, 16), activation=nn.GELU)
    assert isinstance(layer.activation, nn.GELU)


class Odd(nn.ReLU):
    def forward(self, x):
        return super().forward(x) + 1


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrised_prelu():
    module = nn.PReLU()
    register_parametrization(module, "weight", Doubled())
    return module


@pytest.mark.parametrize(
    "module",
    [nn.Threshold(0.0, 0.0), nn.Hardshrink(), nn.Softshrink(), Odd(), parametrised_prelu()],
    ids=lambda module: type(module).__name__,
)
def test_module_without_smooth_form_is_left_and_named(module):
    network = nn.Sequential(nn.ReLU(), module)
    message = f"smooth left these as they are: {type(module).__name__} at 1. VL loses their curvature; write an"
    with pytest.warns(VarlapWarning, match=message):
        smooth(network)
    assert isinstance(network[0], nn.SiLU)
    assert network[1] is module


def test_functional_calls_are_named_if_a_call_is_given():
    class Network(nn.Linear):
        def forward(self, x):
            return F.relu(super().forward(x))

    network = Network(2, 2)
    with pytest.warns(VarlapWarning, match=r"left these as they are: relu at test_smooth\.py:\d+ in forward\. VL"):
        smooth(network, lambda: network(torch.zeros(1, 2)))


def test_warning_points_at_the_callers_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        smooth(nn.Hardshrink())
    assert caught[0].filename == __file__


def test_smooth_network_survives_a_copy_and_a_second_smoothing():
    network = smooth(nn.Sequential(nn.Linear(2, 2), nn.LeakyReLU(0.2), nn.SELU()))
    again = smooth(copy.deepcopy(network))
    x = torch.randn(3, 2)
    torch.testing.assert_close(again(x), network(x))
    assert "SmoothLeakyReLU(negative_slope=0.2)" in repr(again)


def test_another_activation_may_stand_for_relu():
    network = smooth(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LeakyReLU()), activation=nn.Softplus)
    assert isinstance(network[1], nn.Softplus)
    assert isinstance(network[2], SmoothLeakyReLU)


@pytest.mark.parametrize("activation", [nn.GELU(), F.silu])
def test_what_makes_no_module_is_refused_before_anything_is_swapped(activation):
    network = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(ConfigError, match=r"smooth: activation is .*; give what makes a module"):
        smooth(network, activation=activation)
    assert isinstance(network[1], nn.ReLU)
