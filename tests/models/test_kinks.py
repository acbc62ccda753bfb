"""Claims about find_kinks."""

import inspect
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from varlap.models import Kink, find_kinks

KINKED = [
    nn.ReLU(),
    nn.ReLU6(),
    nn.LeakyReLU(),
    nn.PReLU(),
    nn.RReLU(),
    nn.Hardtanh(),
    nn.Hardswish(),
    nn.Hardsigmoid(),
    nn.Threshold(0.1, 0.0),
    nn.SELU(),
    nn.ELU(alpha=2.0),
    nn.Hardshrink(),
    nn.Softshrink(),
]
SMOOTH = [nn.Softplus(), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.ELU(), nn.CELU(2.0), nn.Mish(), nn.Softsign()]


@pytest.fixture(autouse=True)
def same_weights_in_every_run():
    torch.manual_seed(0)


class Calls(nn.Module):
    """A linear layer, then any function."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


def kinds(network, x=None):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)) if x is None else x
    return [kink.kind for kink in find_kinks(network, lambda: network(x))]


@pytest.mark.parametrize("activation", KINKED, ids=lambda module: type(module).__name__)
def test_kinked_module_is_named_once_whether_or_not_it_is_called(activation):
    network = nn.Sequential(nn.Linear(4, 4), activation)
    expected = [Kink(type(activation).__name__, "1")]
    assert find_kinks(network) == expected
    assert find_kinks(network, lambda: network(torch.randn(8, 4))) == expected


@pytest.mark.parametrize("activation", SMOOTH, ids=lambda module: type(module).__name__)
def test_smooth_module_is_not_named(activation):
    assert kinds(nn.Sequential(nn.Linear(4, 4), activation)) == []


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("relu", F.relu),
        ("relu", torch.relu),
        ("relu", torch.Tensor.relu),
        ("relu", lambda x: x.relu()),
        ("relu", lambda x: x.relu_()),
        ("relu", lambda x: F.relu(x, inplace=True)),
        ("relu6", F.relu6),
        ("leaky_relu", F.leaky_relu),
        ("prelu", lambda x: F.prelu(x, torch.tensor([0.1]))),
        ("rrelu", F.rrelu),
        ("hardtanh", F.hardtanh),
        ("hardswish", F.hardswish),
        ("hardsigmoid", F.hardsigmoid),
        ("threshold", lambda x: F.threshold(x, 0.0, 0.0)),
        ("selu", F.selu),
        ("elu", lambda x: F.elu(x, 2.0)),
        ("hardshrink", F.hardshrink),
        ("softshrink", F.softshrink),
        ("abs", torch.abs),
        ("abs", abs),
        ("clamp", lambda x: x.clamp(min=0)),
        ("clamp", lambda x: torch.clamp(input=x, min=0)),
        ("clamp_min", lambda x: x.clamp_min_(0)),
        ("clip", lambda x: torch.clip(x, -0.5, 0.5)),
        ("maximum", lambda x: torch.maximum(x, torch.zeros(()))),
        ("max", lambda x: torch.max(torch.zeros_like(x), x)),
    ],
)
def test_functional_call_is_named_by_function(kind, function):
    assert kinds(Calls(function)) == [kind]


@pytest.mark.parametrize(
    "function",
    [
        F.softplus,
        F.elu,
        torch.tanh,
        lambda x: x.square().clamp_min(-1.0),
        lambda x: x.square().abs(),
        lambda x: x.max(),
        lambda x: x.max(dim=1).values,
        lambda x: F.relu(x.detach()),
        lambda x: x.softmax(-1).clamp(0.0, 1.0),
    ],
)
def test_call_without_a_kink_in_the_weights_is_not_named(function):
    assert kinds(Calls(function)) == []


def test_looking_at_a_guard_changes_neither_its_input_nor_its_output():
    network = Calls(lambda x: x.clamp_(min=0))
    x = torch.randn(8, 4)
    seen = []
    find_kinks(network, lambda: seen.append(network(x)))
    torch.testing.assert_close(seen[0], network.linear(x).clamp(min=0))


def test_place_of_a_call_is_file_line_and_function_of_the_users_code():
    class Network(Calls):
        def forward(self, x):
            return F.relu(self.linear(x))

    network = Network(None)
    line = inspect.getsourcelines(Network.forward)[1] + 1
    kinks = find_kinks(network, lambda: [network(torch.randn(2, 4)) for _ in range(3)])
    assert kinks == [Kink("relu", f"{Path(__file__).name}:{line} in forward")]
    assert str(kinks[0]) == f"relu at {Path(__file__).name}:{line} in forward"


def test_a_module_that_nothing_trainable_reaches_is_named_only_without_a_call():
    network = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.ReLU6())
    x = torch.randn(8, 4)
    assert [kink.where for kink in find_kinks(network)] == ["1", "3", "4"]
    assert [kink.where for kink in find_kinks(network, lambda: network(x))] == ["3", "4"]
    both = network[1]  # here shared by a frozen and a trained place
    shared = nn.Sequential(network[0], both, network[2], both)
    assert [kink.where for kink in find_kinks(shared, lambda: shared(x))] == ["1"]
    assert not any(module._forward_pre_hooks for module in network.modules())


def test_call_inside_a_subclass_of_a_kinked_module_is_named_once():
    class Own(nn.ReLU):
        def forward(self, x):
            return F.relu(x) + 1

    assert kinds(nn.Sequential(nn.Linear(4, 4), Own())) == ["Own"]


def test_gradients_are_on_during_the_call_even_under_no_grad():
    with torch.no_grad():
        assert kinds(Calls(F.relu)) == ["relu"]


def test_module_shared_between_two_places_is_named_once():
    shared = nn.ReLU()
    assert find_kinks(nn.Sequential(shared, nn.Linear(4, 4), shared)) == [Kink("ReLU", "0")]


def test_network_that_is_itself_an_activation_is_named():
    assert find_kinks(nn.ReLU()) == [Kink("ReLU", "the network itself")]


@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_functional_relu_of_a_transformer_layer_is_named_once(layer):
    network = layer(4, 1, 8, dropout=0.0)
    inputs = [torch.randn(3, 1, 4)] * (1 if layer is nn.TransformerEncoderLayer else 2)
    expected = [Kink("relu", "activation")]
    assert find_kinks(network) == expected
    assert find_kinks(network, lambda: network(*inputs)) == expected


@pytest.mark.parametrize("cell", [nn.RNN, nn.RNNCell])
def test_recurrent_layer_with_relu_is_named(cell):
    kink = Kink(f"{cell.__name__} with nonlinearity='relu'", "0")
    assert find_kinks(nn.Sequential(cell(2, 2, nonlinearity="relu"))) == [kink]
    assert find_kinks(nn.Sequential(cell(2, 2))) == []


def test_error_of_the_call_leaves_no_mode_behind():
    network = Calls(F.relu)
    with pytest.raises(RuntimeError):
        find_kinks(network, lambda: network(torch.zeros(1, 3)))
    assert not torch.overrides.has_torch_function((torch.zeros(1),))
