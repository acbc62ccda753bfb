"""Networks, batches and comparisons that the claims of this folder share."""

import pytest
import torch
from torch import nn

from cases import CASES

by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(seed=0):
    return torch.randn(6, 4, generator=generator(seed)), torch.arange(6) % 3


def snapshot(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same(before, module):
    after = module.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
