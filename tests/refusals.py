"""A context in which one of our errors must come, and nothing may change."""

import contextlib

import pytest
import torch
from torch import nn

import varlap
from varlap.errors import VarlapError

OBJECTIVES = [varlap.MAP, varlap.VI, varlap.VL, varlap.VLHessian]
by_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.__name__)


def network():
    """Batch norm moves its statistics in every forward pass, so a step that failed half-way would show."""
    return nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def batch(num_items=6):
    x = torch.randn(num_items, 4, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(num_items) % 3


def everything(bnn, objective=None):
    """All that a step could change, bit by bit."""
    found = {f"state {name}": tensor for name, tensor in bnn.state_dict().items()}
    found |= {f"gradient {name}": p.grad for name, p in bnn.named_parameters()}
    found |= {f"requires_grad {name}": p.requires_grad for name, p in bnn.named_parameters()}
    found |= {f"mode {name}": module.training for name, module in bnn.named_modules()}
    found |= flattened("objective", {} if objective is None else objective.state_dict())
    found |= {"random state": torch.get_rng_state()}
    return {
        name: (value.dtype, value.numpy(force=True).tobytes()) if isinstance(value, torch.Tensor) else value
        for name, value in found.items()
    }


def flattened(name, state):
    if not isinstance(state, dict):
        return {name: state}
    return {key: value for part in state for key, value in flattened(f"{name} {part}", state[part]).items()}


def assert_unchanged(before, bnn, objective=None):
    after = everything(bnn, objective)
    assert [name for name in before | after if before.get(name) != after.get(name)] == []


@contextlib.contextmanager
def refused(error, match, bnn, objective=None):
    """The body raises that error, which is one of ours, and nothing has changed."""
    before = everything(bnn, objective)
    with pytest.raises(error, match=match) as caught:
        yield
    assert isinstance(caught.value, VarlapError)
    assert_unchanged(before, bnn, objective)
