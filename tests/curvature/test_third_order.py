"""Third derivatives of normalisations, which VLHessian and VLDeterminant need, are right."""

import copy

import pytest
import torch
from torch import nn

import varlap
from varlap.curvature.third_order import ThirdOrder

NORMS = {
    "layer": lambda: nn.LayerNorm(4),
    "layer-two-dimensions": lambda: nn.LayerNorm((3, 4)),
    "instance": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    "batch-without-affine": lambda: nn.BatchNorm1d(3, affine=False),
    "layer-without-bias": lambda: nn.LayerNorm(4, bias=False),
}


@pytest.mark.parametrize("name", NORMS)
def test_written_out_norm_has_torchs_value_and_statistics(name):
    norm = NORMS[name]().double()
    twin = copy.deepcopy(norm)
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    with ThirdOrder():
        found = norm(x)
    torch.testing.assert_close(found, twin(x), rtol=1e-12, atol=1e-12)
    for one, other in zip(norm.buffers(), twin.buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NORMS)
def test_third_derivative_equals_differences_of_the_second(name):
    norm = NORMS[name]().double()
    x = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    v, u, w, direction = (torch.randn(5, 3, 4, dtype=torch.float64) for _ in range(4))

    def second(point: torch.Tensor) -> torch.Tensor:
        with ThirdOrder():
            first = torch.autograd.grad((norm(point).tanh() * v).sum(), point, create_graph=True)[0]
        return torch.autograd.grad((first * u).sum(), point, create_graph=True)[0]

    third = torch.autograd.grad((second(x) * w).sum(), x)[0]
    h = 1e-5
    ahead, behind = ((x.detach() + s * h * direction).requires_grad_() for s in (1, -1))
    difference = ((second(ahead) - second(behind)) * w).sum() / (2 * h)
    assert float((third * direction).sum()) == pytest.approx(float(difference.detach()), rel=1e-6)


def test_hessian_objective_with_layer_norm_has_the_gradient_of_its_value():
    torch.manual_seed(1)
    bnn = varlap.BNN(nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    objective = varlap.VLHessian(num_data=20)
    objective(bnn, x, y, step=0).loss.backward()
    weight = bnn.network[0].weight
    claimed, h = weight.grad[0, 0].item(), 1e-5
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[0, 0] += sign * h
            values.append(objective(bnn, x, y, step=0).loss.item())
            weight[0, 0] -= sign * h
    assert claimed == pytest.approx((values[0] - values[1]) / (2 * h), rel=1e-6)
