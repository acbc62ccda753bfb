"""Claims about `Fisher(gradient="quiet")`: the value and the expected gradient of held labels, with far less noise."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import varlap
from varlap.posterior.batch import checked_batch
from varlap.streams import Streams

HELD, QUIET = varlap.Fisher(), varlap.Fisher(gradient="quiet")


def network(num_inputs: int, num_outputs: int, *, batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(3)
    middle = [nn.BatchNorm1d(6)] if batch_norm else []
    return nn.Sequential(
        nn.Linear(num_inputs, 6, bias=not batch_norm), *middle, nn.Softplus(), nn.Linear(6, num_outputs)
    )


def made(likelihood: nn.Module, num_outputs: int, num_items: int, **options) -> tuple[varlap.BNN, Tensor]:
    bnn = varlap.BNN(network(4, num_outputs, **options), likelihood).double().train()
    return bnn, 2 * torch.randn(num_items, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def penalty_gradient(curvature: varlap.Fisher, bnn: varlap.BNN, x: Tensor, y: Tensor, step: int = 0) -> Tensor:
    """∂(½ Σ σ² f) by the means and by the likelihood's own parameters, flat."""
    with bnn.spare_buffers():
        _, estimate = curvature.estimate(bnn, checked_batch(x, y, None, num_data=1000, step=0), Streams(1, step), True)
    variance = {name: (2 * log_sigma.detach()).exp() for name, log_sigma in bnn.log_sigma.items()}
    outputs, cotangents = zip(*estimate.pull_back(variance), strict=True)
    inputs = [*bnn.means().values(), *bnn.likelihood.parameters()]
    found = torch.autograd.grad(outputs, inputs, cotangents, materialize_grads=True, allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in found])


@pytest.mark.parametrize("batch_norm", [False, True], ids=["alone", "batch-norm"])
@pytest.mark.parametrize("likelihood", [varlap.Categorical(), varlap.Bernoulli()], ids=["categorical", "bernoulli"])
def test_its_expectation_over_all_labels_is_that_of_held_labels(likelihood, batch_norm, monkeypatch):
    bnn, x = made(likelihood, 3, num_items=3, batch_norm=batch_norm)
    outputs = bnn.outputs(x).detach()
    if isinstance(likelihood, varlap.Categorical):
        choices = [torch.tensor(labels) for labels in itertools.product(range(3), repeat=3)]
    else:
        choices = [torch.tensor(labels, dtype=x.dtype).reshape(3, 3) for labels in itertools.product((0, 1), repeat=9)]
    expected, apart = {"held": 0.0, "quiet": 0.0}, 0.0
    for labels in choices:
        monkeypatch.setattr(bnn.likelihood, "sample", lambda *_, labels=labels: labels)
        prob = likelihood.log_prob(outputs, labels).sum().exp()
        held, quiet = (penalty_gradient(curvature, bnn, x, choices[0]) for curvature in (HELD, QUIET))
        expected["held"] = expected["held"] + prob * held
        expected["quiet"] = expected["quiet"] + prob * quiet
        apart = max(apart, (held - quiet).abs().max().item())
    torch.testing.assert_close(expected["quiet"], expected["held"], rtol=0, atol=1e-12)
    assert apart > 1e-3  # for single labels they are different


def test_for_a_gaussian_it_is_the_mean_over_a_draw_and_its_mirror_image(monkeypatch):
    bnn, x = made(varlap.Gaussian(noise=0.7), 2, num_items=6)
    noise = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    y = torch.zeros(6, 2, dtype=torch.float64)
    found: dict[str, list[Tensor]] = {"held": [], "quiet": []}
    for sign in (1, -1):
        drawn = sign * noise

        def sample(outputs, generator, targets=None, drawn=drawn):  # differentiable in the noise level, as it must be
            return outputs + bnn.likelihood.log_noise.exp() * drawn

        monkeypatch.setattr(bnn.likelihood, "sample", sample)
        for name, curvature in (("held", HELD), ("quiet", QUIET)):
            found[name].append(penalty_gradient(curvature, bnn, x, y))
    torch.testing.assert_close(sum(found["quiet"]), sum(found["held"]), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found["quiet"][0], found["quiet"][1], rtol=1e-10, atol=1e-12)  # it is even in the draw
    assert (found["held"][0] - found["held"][1]).abs().max() > 1e-3
    # The noise level has its true gradient by either.
    torch.testing.assert_close(found["quiet"][0][-1], found["held"][0][-1])


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian", "poisson", "heteroscedastic"])
def test_a_likelihood_is_canonical_where_its_second_derivative_ignores_the_targets(likelihood):
    likelihood = varlap.BNN(nn.Linear(1, 4), likelihood).likelihood.double()
    outputs = torch.randn(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = [likelihood.sample(outputs, torch.Generator().manual_seed(seed)) for seed in range(20)]
    hessians = [
        torch.autograd.functional.hessian(lambda z, y=y: likelihood.log_prob(z, y).sum(), outputs) for y in targets
    ]
    assert any(not torch.equal(targets[0], y) for y in targets)
    same = all(torch.allclose(hessians[0], hessian, rtol=1e-10, atol=1e-12) for hessian in hessians)
    assert same == getattr(likelihood, "canonical", False)


@pytest.mark.parametrize("likelihood", ["categorical", "heteroscedastic"])
def test_its_value_is_that_of_held_labels(likelihood):
    bnn = varlap.BNN(network(4, 4), likelihood).double()
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    y = torch.arange(5) % 4 if likelihood == "categorical" else x[:, :2]
    batch = checked_batch(x, y, None, num_data=1000, step=0)
    held, quiet = (c.estimate(bnn, batch, Streams(1, 0), False)[1].diagonal() for c in (HELD, QUIET))
    for name, value in held.items():
        torch.testing.assert_close(quiet[name], value, rtol=1e-12, atol=1e-14)


def test_without_a_canonical_likelihood_it_is_the_gradient_of_held_labels():
    bnn, x = made(varlap.Heteroscedastic(), 4, num_items=5)
    y = x[:, :2]
    assert torch.equal(penalty_gradient(QUIET, bnn, x, y), penalty_gradient(HELD, bnn, x, y))


class Together(nn.Module):
    """Logits beside something that no likelihood reads."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.network(x), "other": x.sum(1)}


class Entry(varlap.Categorical):
    canonical = True

    def log_prob(self, outputs, targets):
        return super().log_prob(outputs["logits"], targets)

    def sample(self, outputs, generator, targets=None):
        return super().sample(outputs["logits"], generator, targets)

    def check(self, outputs, targets):
        super().check(outputs["logits"], targets)


class Probit(varlap.Bernoulli):
    """Another link by another log_prob, which does not say that it is canonical, though what it inherits from does."""

    def log_prob(self, outputs, targets):
        return torch.special.log_ndtr(outputs * (2 * targets - 1)).sum(1)


@pytest.mark.parametrize("kind", ["structured", "inherited"])
def test_where_it_would_not_be_right_it_is_the_gradient_of_held_labels(kind):
    bnn, x = made(Probit() if kind == "inherited" else varlap.Gaussian(noise=0.7), 3, num_items=5)
    y = (x[:, :3] > 0).double()
    if kind == "structured":
        bnn, y = varlap.BNN(Together(), Entry()).double(), torch.arange(5) % 3
    assert torch.equal(penalty_gradient(QUIET, bnn, x, y), penalty_gradient(HELD, bnn, x, y))


def test_outputs_without_a_graph_are_refused_as_they_are_for_held_labels():
    bnn, x = made(varlap.Categorical(), 3, num_items=5)
    messages = []
    for curvature in (HELD, QUIET):
        with torch.inference_mode(), pytest.raises(varlap.errors.NetworkError) as raised:
            varlap.VL(100, curvature=curvature)(bnn, x, torch.arange(5) % 3)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_its_noise_does_not_grow_with_the_batch_as_that_of_held_labels_does():
    def noise(curvature: varlap.Fisher, num_items: int) -> float:
        bnn, x = made(varlap.Categorical(), 3, num_items)
        y = torch.arange(num_items) % 3
        draws = torch.stack([penalty_gradient(curvature, bnn, x, y, step) for step in range(200)])
        return draws.var(0).sum().sqrt().item()

    small, large = 32, 512  # sixteen times as many items: four times the noise, or no more
    assert noise(HELD, large) > 3 * noise(HELD, small)
    assert noise(QUIET, large) < 1.5 * noise(QUIET, small)
    assert noise(QUIET, large) < 0.1 * noise(HELD, large)
