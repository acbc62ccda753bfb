"""Claims about mlp and convnet."""

import pytest
import torch
from torch import nn

from varlap.errors import ConfigError
from varlap.models import convnet, find_kinks, mlp


def count_weights(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def test_mlp_has_an_activation_between_linear_layers_and_none_at_the_end():
    network = mlp(3, 2, hidden=(5, 4), activation=nn.Tanh)
    assert [type(layer) for layer in network] == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
    assert network(torch.zeros(7, 3)).shape == (7, 2)


def test_mlp_takes_the_size_of_its_one_hidden_layer():
    assert [p.shape for p in mlp(3, 2, hidden=10).parameters()] == [p.shape for p in mlp(3, 2, (10,)).parameters()]
    with pytest.raises(ConfigError, match=r"mlp\(hidden\[0\]=2\.5\) must be a whole number of at least 1"):
        mlp(3, 2, hidden=2.5)  # type: ignore[arg-type]


def test_mlp_without_hidden_layers_is_linear():
    assert [type(layer) for layer in mlp(3, 2, hidden=())] == [nn.Linear]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({"num_inputs": 0}, "num_inputs=0"), ({"hidden": (5, -1)}, r"hidden\[1\]=-1")],
)
def test_mlp_names_a_size_that_cannot_be(arguments, name):
    with pytest.raises(ConfigError, match=rf"mlp\({name}\) must be a whole number of at least 1"):
        mlp(**{"num_inputs": 3, "num_outputs": 2, **arguments})


@pytest.mark.parametrize("activation", [nn.Tanh(), torch.tanh, "tanh", nn.Linear])
@pytest.mark.parametrize("build", [lambda activation: mlp(1, 1, activation=activation), convnet])
def test_builders_refuse_an_activation_that_makes_no_module(build, activation):
    with pytest.raises(ConfigError, match=r"give what makes a module, such as nn\.Softplus"):
        build(activation=activation)


@pytest.mark.parametrize("image_size", [8, 28, 32])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_convnet_fits_images_from_digits_to_cifar(image_size, batch_norm):
    network = convnet(num_channels=3, num_classes=7, image_size=image_size, batch_norm=batch_norm)
    assert network(torch.zeros(2, 3, image_size, image_size)).shape == (2, 7)


def test_convnet_has_about_30_000_weights_for_28_by_28():
    assert count_weights(convnet()) == 33_546


def test_default_networks_have_no_kinks():
    image = torch.zeros(1, 1, 28, 28)
    network = convnet(batch_norm=True)
    assert find_kinks(network, lambda: network.eval()(image)) == []
    assert find_kinks(mlp(1, 1)) == []
