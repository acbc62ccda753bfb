"""Derivatives of normalisations are right: third ones, which VLHessian needs, and of weight norm also second ones."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import varlap
from varlap.curvature.written_out import WrittenOut
from varlap.errors import NetworkError

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
    with WrittenOut(num_derivatives=3):
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
        with WrittenOut(num_derivatives=3):
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


def gradient_and_differences(objective: varlap.VL | varlap.VLHessian, bnn: varlap.BNN, x, y) -> tuple:
    """The gradient of the objective in all weights, and differences of its value for the same draws."""

    def loss() -> torch.Tensor:
        return objective(bnn, x, y, step=0).loss

    loss().backward()
    h, differences = 1e-5, []
    for weight in bnn.network.parameters():
        flat = weight.detach().view(-1)
        for entry in range(flat.numel()):
            values = []
            for offset in (h, -2 * h):
                flat[entry] += offset
                values.append(loss().item())
            flat[entry] += h
            differences.append((values[0] - values[1]) / (2 * h))
    gradient = torch.cat([weight.grad.flatten() for weight in bnn.network.parameters()])
    return gradient, torch.tensor(differences, dtype=gradient.dtype)


VL_AND_VL_HESSIAN = [lambda: varlap.VL(20, curvature=varlap.Fisher()), lambda: varlap.VLHessian(20)]
new, old = nn.utils.parametrizations.weight_norm, nn.utils.weight_norm
WEIGHT_NORMED = {
    "linear": lambda: nn.Sequential(new(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 3)),
    "columns": lambda: nn.Sequential(new(nn.Linear(4, 3), dim=1), nn.Tanh(), nn.Linear(3, 3)),
    "whole": lambda: nn.Sequential(new(nn.Linear(4, 3), dim=None), nn.Tanh(), nn.Linear(3, 3)),
    "bias": lambda: nn.Sequential(new(nn.Linear(4, 3), name="bias"), nn.Tanh(), nn.Linear(3, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), new(nn.Conv1d(1, 2, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)
    ),
}


@pytest.mark.parametrize("objective", VL_AND_VL_HESSIAN, ids=["VL", "VLHessian"])
@pytest.mark.parametrize("name", WEIGHT_NORMED)
def test_gradients_with_weight_norm_equal_differences_of_the_value(name, objective):
    torch.manual_seed(1)
    bnn = varlap.BNN(WEIGHT_NORMED[name]().double())
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    torch.testing.assert_close(*gradient_and_differences(objective(), bnn, x, y), rtol=1e-5, atol=1e-8)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("dim", [0, 1])
def test_the_old_weight_norm_has_the_gradient_of_its_value_too(dim):
    torch.manual_seed(1)
    bnn = varlap.BNN(nn.Sequential(old(nn.Linear(4, 3), dim=dim), nn.Tanh(), nn.Linear(3, 3)).double())
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    found = gradient_and_differences(varlap.VL(20, curvature=varlap.Fisher()), bnn, x, y)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2])
def test_weight_norm_written_out_has_torchs_value_and_a_right_second_derivative(dim):
    v = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    g = torch.randn_like(torch.norm_except_dim(v, 2, dim)).requires_grad_()

    def written_out(v: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        with WrittenOut(num_derivatives=2):
            return torch._weight_norm(v, g, dim)

    torch.testing.assert_close(written_out(v, g), torch._weight_norm(v, g, dim), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradgradcheck(written_out, (v, g))


def test_torchs_own_second_derivative_of_weight_norm_is_wrong():
    """What writing it out is for. When torch has mended it, this test says that the route can go."""
    v, g = (torch.randn(3, n, dtype=torch.float64, requires_grad=True) for n in (4, 1))
    assert not torch.autograd.gradgradcheck(torch._weight_norm, (v, g), raise_exception=False)


def test_hessian_objective_with_a_functional_batch_norm_has_the_gradient_of_its_value():
    class OwnNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.batch_norm(x, None, None, self.scale, self.shift, True)

    torch.manual_seed(1)
    bnn = varlap.BNN(nn.Sequential(nn.Linear(4, 3), OwnNorm(), nn.Tanh(), nn.Linear(3, 3)).double())
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    found = gradient_and_differences(varlap.VLHessian(20), bnn, x, y)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-8)


class Checkpointed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("name", "layers", "objectives"),
    [
        ("weight_norm", lambda: [new(nn.Linear(4, 3))], VL_AND_VL_HESSIAN),
        ("layer_norm", lambda: [nn.Linear(4, 3), nn.LayerNorm(3)], VL_AND_VL_HESSIAN[1:]),
        ("batch_norm", lambda: [nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3)], VL_AND_VL_HESSIAN[1:]),
    ],
)
def test_normalisations_in_a_checkpoint_are_refused_only_where_torchs_own_derivative_is_wrong(name, layers, objectives):
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    for objective in VL_AND_VL_HESSIAN:
        torch.manual_seed(1)
        bnn = varlap.BNN(nn.Sequential(Checkpointed(*layers()), nn.Tanh(), nn.Linear(3, 3)).double())
        if objective in objectives:
            with pytest.raises(NetworkError, match=f"own derivatives of {name} are wrong .* out of the checkpoint"):
                objective()(bnn, x, y)
        else:
            found = gradient_and_differences(objective(), bnn, x, y)
            torch.testing.assert_close(*found, rtol=1e-5, atol=1e-8)
        varlap.laplace(bnn, (x, y), curvature="sampled-fisher")
        bnn.predict(x, how="linearised")


def test_tensors_saved_elsewhere_leave_derivatives_right():
    torch.manual_seed(1)
    bnn = varlap.BNN(nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)).double())
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 3
    with torch.autograd.graph.save_on_cpu():
        found = gradient_and_differences(varlap.VLHessian(20), bnn, x, y)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-8)
