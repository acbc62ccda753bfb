"""Claims about PreactResNet-18."""

import pytest
import torch
from torch import nn
from torch.nn.functional import pad

from varlap.errors import ConfigError
from varlap.models import find_kinks, preact_resnet18
from varlap.models.preact_resnet import PreactBlock


@pytest.fixture(autouse=True)
def same_weights_in_every_run():
    torch.manual_seed(0)


def test_preact_resnet18_has_the_11_171_146_parameters_of_the_cifar_variant():
    with torch.device("meta"):
        network = preact_resnet18()
    assert sum(parameter.numel() for parameter in network.parameters()) == 11_171_146


@pytest.mark.parametrize(("num_channels", "size"), [(3, 32), (1, 28), (1, 8), (3, 40)])
def test_preact_resnet18_takes_images_of_any_size(num_channels, size):
    network = preact_resnet18(num_classes=5, num_channels=num_channels, width=2)
    assert network(torch.randn(3, num_channels, size, size)).shape == (3, 5)


def test_28_by_28_images_are_padded_to_32_by_32():
    network = preact_resnet18(num_channels=1, width=2).eval()
    images = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(network(images), network(pad(images, (2, 2, 2, 2))))


def test_last_stage_of_a_32_by_32_image_is_4_by_4():
    network = preact_resnet18(width=2)
    assert network.blocks(network.stem(torch.zeros(1, 3, 32, 32))).shape == (1, 16, 4, 4)


def test_block_is_norm_activation_convolution_twice_with_a_preactivated_shortcut():
    block = PreactBlock(2, 4, stride=2).eval().double()
    for norm in (block.norm1, block.norm2):
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.uniform_(norm.running_mean)
    x = torch.randn(1, 2, 6, 6, dtype=torch.float64)
    first = nn.functional.softplus(block.norm1(x))
    second = nn.functional.softplus(block.norm2(block.conv1(first)))
    torch.testing.assert_close(block(x), block.conv2(second) + block.shortcut(first))


def test_block_that_keeps_the_shape_adds_its_raw_input():
    block = PreactBlock(2, 2, stride=1)
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(1, 2, 6, 6)
    assert block.shortcut is None
    torch.testing.assert_close(block(x), x)


def test_activations_are_modules_so_that_each_can_be_seen():
    network = preact_resnet18(width=1, activation=nn.ReLU)
    kinks = find_kinks(network, lambda: network(torch.zeros(2, 3, 32, 32)))
    assert len(kinks) == 16
    assert kinks[0].where == "blocks.0.activation1"


def test_preact_resnet18_names_a_size_that_cannot_be():
    with pytest.raises(ConfigError, match=r"preact_resnet18\(width=0\) must be a whole number of at least 1"):
        preact_resnet18(width=0)
