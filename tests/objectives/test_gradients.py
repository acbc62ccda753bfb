"""Claims about gradients: finite differences, Eq. 30 written out, and expectations found by enumerating labels.

Two oracles, both slow and obvious: central differences of the objective's own value with the noise held, and the
objective written naively for autograd. Where labels are drawn, `HeldDraws` records what the first call drew and lets
every later call draw the same, so that a value is a smooth function of the weights.
"""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import varlap
from cases import CASES, LIKELIHOOD_CASES

N, BETA = 20, 0.7  # N differs from the batch size in cases.py, so that one cannot stand in for the other
STEP = 4  # one in which the default evaluates its curvature

OBJECTIVES = {
    "map": lambda: varlap.MAP(N, BETA),
    "vi": lambda: varlap.VI(N, BETA),
    "vi-antithetic": lambda: varlap.VI(N, BETA, num_samples=2, antithetic=True),
    "vl": lambda: varlap.VL(N, BETA, curvature=varlap.Fisher()),
    "vl-whole": lambda: varlap.VL(N, BETA, curvature=varlap.Fisher(gradient="whole")),
    "vl-exact": lambda: varlap.VL(N, BETA, curvature=varlap.ExactFisher()),
    "vl-empirical": lambda: varlap.VL(N, BETA, curvature=varlap.EmpiricalFisher()),
    "vl-part": lambda: varlap.VL(N, BETA, curvature=varlap.Fisher(fraction=0.6, groups=2)),
    "vl-every": lambda: varlap.VL(N, BETA, curvature=varlap.Fisher(every=STEP)),
    "vl-hessian": lambda: varlap.VLHessian(N, BETA, curvature=varlap.Hessian(num_probes=2)),
}

over_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


class HeldDraws:
    """Makes a likelihood repeat its first draws: same noise, same outputs, whatever the weights are by then.

    The noise of a Gaussian still follows its own learnt scale, as it always does.
    """

    def __init__(self, bnn):
        self.sample, self.calls, self.position = bnn.likelihood.sample, [], None
        bnn.likelihood.sample = self

    def __call__(self, outputs, generator, targets=None):
        if self.position is None:
            self.calls.append((outputs.detach().clone(), generator.get_state()))
            return self.sample(outputs, generator, targets)
        outputs, state = self.calls[self.position % len(self.calls)]
        self.position += 1
        return self.sample(outputs, torch.Generator().set_state(state), targets)

    def hold(self):
        self.position = 0


def trainable(bnn):
    """Every trainable tensor, in the groups whose gradients may differ in scale."""
    log_sigma = {f"log_sigma.{name}": tensor for name, tensor in bnn.log_sigma.items()}
    groups = {
        "means": {f"network.{name}": mean for name, mean in bnn.means().items()},
        "point estimates": bnn.point_estimates(),
        "log sigma": {id(t): (name, t) for name, t in log_sigma.items()},  # a shared one once
    }
    groups["log sigma"] = dict(groups["log sigma"].values())
    return {name: group for name, group in groups.items() if group}


def gradients(bnn, objective, x, y, step=STEP):
    """The gradients that `loss.backward()` leaves, and the loss."""
    bnn.zero_grad()
    loss = objective(bnn, x, y, step=step).loss
    loss.backward()
    return loss.item(), {
        name: tensor.grad.clone()
        for group in trainable(bnn).values()
        for name, tensor in group.items()
        if tensor.grad is not None
    }


FOURTH_ORDER = {-2: 1 / 12, -1: -2 / 3, 1: 2 / 3, 2: -1 / 12}, 2e-3  # error ~ width⁴, rounding ~ 1e-16 / width
SECOND_ORDER = {-1: -1 / 2, 1: 1 / 2}, 1e-4


@torch.no_grad()
def derivative(value_fn, tensors, direction, stencil=FOURTH_ORDER):
    """Central difference of a value along a direction in the tensors that it depends on."""
    kept, (weights, width), slope = [tensor.clone() for tensor in tensors], stencil, 0.0
    for shift, weight in weights.items():
        for tensor, start, d in zip(tensors, kept, direction, strict=True):
            tensor.copy_(start + shift * width * d)
        slope += weight * value_fn() / width
    for tensor, start in zip(tensors, kept, strict=True):
        tensor.copy_(start)
    return slope


def unit_direction(tensors, generator):
    direction = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in tensors]
    norm = torch.stack([d.square().sum() for d in direction]).sum().sqrt()
    return [d / norm for d in direction]


def worst_error(bnn, objective, x, y, num_directions=2):
    """Largest |difference − gradient·d| over unit directions d of each group, relative to the group's gradient."""
    draws = HeldDraws(bnn)
    _, found = gradients(bnn, objective, x, y)
    draws.hold()
    generator = torch.Generator().manual_seed(5)
    worst = {}
    for group, named in trainable(bnn).items():
        if not named.keys() & found.keys():
            continue
        tensors, grads = list(named.values()), [found[name] for name in named]
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt().item()
        assert norm > 1e-3, group  # otherwise nothing is shown
        for _ in range(num_directions):
            direction = unit_direction(tensors, generator)
            slope = derivative(lambda: objective(bnn, x, y, step=STEP).loss.item(), tensors, direction)
            claimed = sum((g * d).sum().item() for g, d in zip(grads, direction, strict=True))
            worst[group] = max(worst.get(group, 0.0), abs(slope - claimed) / norm)
    return worst


# -- every objective on every case: finite differences -----------------------------------------------------------


@over_cases
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_equals_finite_differences_with_the_noise_held(case, name):
    if name == "map" and case.name == "empirical-bayes":
        pytest.skip("MAP refuses a learnt prior")
    bnn, x, y = case.make()
    worst = worst_error(bnn, OBJECTIVES[name](), x, y)
    expected = {"means", "log sigma"} - ({"log sigma"} if name == "map" else set())
    assert worst.keys() >= expected
    assert max(worst.values()) < 1e-6, worst


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_equals_finite_differences_coordinate_by_coordinate(name):
    bnn, x, y = next(case for case in CASES if case.name == "mlp-gaussian").make()
    objective, draws = OBJECTIVES[name](), HeldDraws(bnn)
    _, found = gradients(bnn, objective, x, y)
    draws.hold()
    for group in trainable(bnn).values():
        for tensor_name, tensor in group.items():
            if tensor_name not in found:
                assert name == "map"
                assert tensor_name.startswith("log_sigma.")
                continue
            slopes = torch.zeros_like(tensor, requires_grad=False)
            for entry in range(tensor.numel()):
                unit = torch.zeros_like(slopes)
                unit.view(-1)[entry] = 1
                slopes.view(-1)[entry] = derivative(
                    lambda: objective(bnn, x, y, step=STEP).loss.item(), [tensor], [unit], SECOND_ORDER
                )
            scale = found[tensor_name].abs().max()
            assert (slopes - found[tensor_name]).abs().max() < 1e-6 * scale, tensor_name


LINEAR = {
    "categorical": (3, varlap.Categorical(), lambda: torch.arange(8) % 3),
    "bernoulli": (2, varlap.Bernoulli(), lambda: (torch.arange(16).reshape(8, 2) % 3 == 0).double()),
    "poisson": (2, varlap.Poisson(), lambda: (torch.arange(16).reshape(8, 2) % 4).double()),
    "gaussian": (2, varlap.Gaussian(noise=0.7), lambda: torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(8, 2)),
}


@pytest.mark.parametrize("likelihood", LINEAR)
def test_determinant_gradient_equals_finite_differences_on_convex_models(likelihood):
    num_outputs, kind, targets = LINEAR[likelihood]
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    bnn = varlap.BNN(nn.Linear(3, num_outputs).double(), kind.double())
    worst = worst_error(bnn, varlap.VLDeterminant(8, BETA), x, targets())
    assert worst.keys() >= {"means"}
    assert max(worst.values()) < 1e-6, worst


def test_determinant_gradient_equals_finite_differences_on_a_network_with_a_strong_prior():
    bnn, x, y = CASES[0].make(prior=varlap.OneScalePrior(0.3))
    worst = worst_error(bnn, varlap.VLDeterminant(len(y), BETA), x, y)
    assert worst["means"] < 1e-6


# -- Eq. 30 written out, for autograd ----------------------------------------------------------------------------


def naive_eq_30(bnn, x, y, draw_fn):
    """−(1/S) Σ log p(y) + (S/2) Σ σ² ḡ² + (β/2N) Σ [(σ² + (μ − m)²)/s² − 1 + log(s²/σ²)], term by term."""
    with sdpa_kernel(SDPBackend.MATH):
        outputs = bnn.outputs(x)
    log_prob = bnn.likelihood.log_prob
    means = bnn.means()
    drawn = draw_fn(outputs)
    sampled_grad = torch.autograd.grad(
        log_prob(outputs, drawn).mean(), list(means.values()), create_graph=True, allow_unused=True
    )
    penalty, kl = 0.0, 0.0
    for (name, mean), g in zip(means.items(), sampled_grad, strict=True):
        variance, scale = (2 * bnn.log_sigma[name]).exp().expand(mean.shape), bnn.prior_scale[name]
        if g is not None:
            penalty = penalty + len(y) / 2 * (variance * g.square()).sum()
        shifted = (mean - bnn.prior_mean_of(name)).square()
        if bnn.prior.learnt:
            scale = (variance + shifted).mean().sqrt()
        kl = kl + 0.5 * ((variance + shifted) / scale**2 - 1 + (scale**2 / variance).log()).sum()
    return -log_prob(outputs, y).mean() + penalty + BETA / N * kl


@over_cases
def test_value_and_closed_form_gradients_equal_autograd_of_eq_30(case):
    bnn, x, y = case.make()
    draws = HeldDraws(bnn)
    loss, found = gradients(bnn, varlap.VL(N, BETA, curvature=varlap.Fisher()), x, y)
    (outputs, state), *others = draws.calls
    assert not others
    bnn.zero_grad()
    expected = naive_eq_30(bnn, x, y, lambda _: draws.sample(outputs, torch.Generator().set_state(state), y))
    expected.backward()
    assert abs(loss - expected.item()) < 1e-12 * (1 + abs(loss))
    for group in trainable(bnn).values():
        for name, tensor in group.items():
            assert (tensor.grad - found[name]).abs().max() < 1e-10 * (1 + tensor.grad.abs().max()), name


# -- the whole gradient, by enumerating labels -------------------------------------------------------------------


def enumerated_labels(likelihood, y):
    """All label batches whose item-wise probabilities are to be summed: the same label for each item in turn."""
    shape = y.shape[1:]
    values = {"Categorical": range(3), "Bernoulli": range(2), "Poisson": range(25)}[type(likelihood).__name__]
    for combination in itertools.product(values, repeat=math.prod(shape)):
        label = torch.tensor(combination, dtype=y.dtype).reshape(shape)
        yield label.expand(y.shape)


def enumerated_fisher_term(bnn, x, y):
    """½ Σ σ² f with f = (1/S) Σᵢ Σ_ỹ p(ỹ|xᵢ) (∂ log p(ỹ|xᵢ))², differentiable through the label probabilities."""
    means, total = bnn.means(), 0.0
    for labels in enumerated_labels(bnn.likelihood, y):
        values = bnn.likelihood.log_prob(bnn.outputs(x), labels)
        for value in values:
            g = torch.autograd.grad(value, list(means.values()), create_graph=True)
            for name, part in zip(means, g, strict=True):
                variance = (2 * bnn.log_sigma[name].detach()).exp()
                total = total + 0.5 * value.exp() * (variance * part.square()).sum() / len(y)
    return total


def tiny(likelihood):
    """A network with one hidden layer, sure enough of its labels that the held gradient is far from the whole one."""
    torch.manual_seed(4)
    _, kind, targets = LINEAR[likelihood]
    y = targets()[:3, :1] if likelihood == "poisson" else targets()[:3]
    num_outputs = 3 if likelihood == "categorical" else y.shape[1]
    network = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, num_outputs)).double()
    bnn = varlap.BNN(network, type(kind)())
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        for log_sigma in bnn.log_sigma.values():
            log_sigma.uniform_(-1.5, -0.5)
        for mean in bnn.means().values():
            mean.mul_(2)
    return bnn, x, y


def flat_mean_gradient(bnn, found):
    return torch.cat([found[f"network.{name}"].flatten() for name in bnn.means()])


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "poisson"])
def test_exact_fisher_and_its_gradient_equal_the_enumerated_ones(likelihood):
    bnn, x, y = tiny(likelihood)
    term = enumerated_fisher_term(bnn, x, y)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(term, list(bnn.means().values()))])
    objective = varlap.VL(N, beta=0.0, curvature=varlap.ExactFisher())
    assert abs(objective(bnn, x, y).curvature - term) < 1e-10
    data_only = flat_mean_gradient(bnn, gradients(bnn, varlap.MAP(N, beta=0.0), x, y)[1])
    found = flat_mean_gradient(bnn, gradients(bnn, objective, x, y)[1]) - data_only
    assert (found - expected).abs().max() < 1e-10


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_whole_gradient_averages_to_the_enumerated_one_and_the_held_one_does_not(likelihood):
    """500 draws, 15 and 12 weights: |z| < 4.5 for all of them has a false-alarm rate below 27 × 7e-6 = 2e-4."""
    bnn, x, y = tiny(likelihood)
    term = enumerated_fisher_term(bnn, x, y)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(term, list(bnn.means().values()))])
    data_only = flat_mean_gradient(bnn, gradients(bnn, varlap.MAP(N, beta=0.0), x, y)[1])

    def z_scores(kind):
        objective = varlap.VL(N, beta=0.0, curvature=varlap.Fisher(gradient=kind))
        draws = torch.stack(
            [flat_mean_gradient(bnn, gradients(bnn, objective, x, y, step)[1]) - data_only for step in range(500)]
        )
        return (draws.mean(0) - expected) / (draws.std(0) / math.sqrt(len(draws)))

    assert z_scores("whole").abs().max() < 4.5
    assert z_scores("held").abs().max() > 10


# -- learnt noise ------------------------------------------------------------------------------------------------


def test_curvature_gradient_in_learnt_noise_is_the_exact_fishers_where_held_labels_would_double_it():
    """Holding the draw would double it. 1,000 draws; |z| < 4.5, twice, has a false-alarm rate of 1.4e-5."""
    bnn, x, y = LIKELIHOOD_CASES[2].make()
    log_noise = bnn.likelihood.log_noise

    def curvature_and_gradient(objective, step):
        bnn.zero_grad()
        terms = objective(bnn, x, y, step=step)
        terms.loss.backward()
        return terms.curvature.item(), log_noise.grad.item() - data_only

    data_only = 0.0
    data_only = curvature_and_gradient(varlap.MAP(N, beta=0.0), 0)[1]
    curvature, expected = curvature_and_gradient(varlap.VL(N, beta=0.0, curvature=varlap.ExactFisher()), 0)
    assert abs(expected - -2 * curvature) < 1e-12  # C is proportional to noise⁻²

    def held_gradient(step):
        """What autograd gives for ½ S Σ σ² ḡ² with the drawn labels as constants."""
        outputs = bnn.outputs(x)
        drawn = bnn.likelihood.sample(outputs, torch.Generator().manual_seed(step)).detach()
        means = bnn.means()
        g = torch.autograd.grad(bnn.likelihood.log_prob(outputs, drawn).mean(), list(means.values()), create_graph=True)
        variances = [(2 * bnn.log_sigma[name].detach()).exp() for name in means]
        penalty = sum(len(y) / 2 * (v * part.square()).sum() for v, part in zip(variances, g, strict=True))
        return torch.autograd.grad(penalty, log_noise)[0].item()

    objective = varlap.VL(N, beta=0.0, curvature=varlap.Fisher())
    for gradient_fn, right in ((lambda step: curvature_and_gradient(objective, step)[1], True), (held_gradient, False)):
        draws = torch.tensor([gradient_fn(step) for step in range(1000)], dtype=torch.float64)
        standard_error = draws.std() / math.sqrt(len(draws))
        assert (abs(draws.mean() - expected) < 4.5 * standard_error) == right
        if not right:
            assert abs(draws.mean() - expected) > 10 * standard_error
            assert abs(draws.mean() - 2 * expected) < 4.5 * standard_error


@pytest.mark.parametrize("gradient", ["held", "whole"])
def test_likelihoods_own_parameters_get_the_same_gradient_held_or_whole_for_the_same_noise(gradient):
    """Per draw, both equal −2 C: the Gaussian's score is ε/noise either way."""
    bnn, x, y = LIKELIHOOD_CASES[2].make()
    objective = varlap.VL(N, beta=0.0, curvature=varlap.Fisher(gradient=gradient))
    _, with_curvature = gradients(bnn, objective, x, y)
    _, without = gradients(bnn, varlap.MAP(N, beta=0.0), x, y)
    name = "likelihood.log_noise"
    curvature = objective(bnn, x, y, step=STEP).curvature
    assert abs(with_curvature[name] - without[name] - -2 * curvature) < 1e-12


class WithNoise(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)
        self.log_noise = nn.Parameter(torch.tensor(0.3))


def test_a_parameter_that_network_and_likelihood_share_counts_once():
    def gradient(shared: bool) -> torch.Tensor:
        torch.manual_seed(0)
        network = WithNoise()
        likelihood = varlap.likelihoods.Gaussian()
        log_noise = network.log_noise if shared else nn.Parameter(torch.tensor(0.3))
        likelihood.log_noise = log_noise
        bnn = varlap.BNN(network, likelihood, select=["weight", "bias"])
        varlap.MAP(10, beta=0)(bnn, torch.ones(4, 2), torch.arange(4.0)[:, None]).loss.backward()
        assert log_noise.grad is not None
        return log_noise.grad

    torch.testing.assert_close(gradient(shared=True), gradient(shared=False), rtol=1e-6, atol=0)
