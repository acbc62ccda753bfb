"""Claims about the probed Hessian: unbiased for the dense one's diagonal, with the sign of a penalty."""

import itertools

import pytest
import torch
from test_diagonal import dense_hessian
from test_fisher import flat
from torch import nn

import varlap
from cases import CASES, LIKELIHOOD_CASES
from varlap.curvature.differentiable import twice_differentiable
from varlap.errors import ConfigError
from varlap.posterior.batch import checked_batch
from varlap.streams import Streams

WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0], dtype=torch.float64)
IN_TRAINING_MODE = [c for c in CASES if c.name in ("batch-norm", "attention", "gru", "shared-frozen-unused", "tuples")]


def test_vl_hessian_refuses_a_curvature_that_remembers():
    with pytest.raises(ConfigError, match=r"VLHessian\(curvature=Fisher.* cannot remember a curvature"):
        varlap.VLHessian(100, curvature=varlap.Fisher(fraction=0.25, memory=0.9))  # type: ignore[arg-type]


class Elementwise(nn.Module):
    """Outputs a function of one weight each, so that the Hessian is diagonal."""

    def __init__(self, function=torch.sin):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 2, 4))
        self.function = function

    def forward(self, x):
        return x * self.function(self.weight)


def estimate(curvature, bnn, x, y, weights=None, seed=0, step=0, create_graph=False):
    with twice_differentiable(bnn.network):
        batch = checked_batch(x, y, weights, num_data=100, step=0)
        return curvature.estimate(bnn, batch, Streams(seed, step), create_graph)


def moments_over_all_signs(hessian):
    """Mean and variance of v ∘ H v over all vectors of signs, which is what a probe draws from."""
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=len(hessian))), dtype=torch.float64)
    products = signs * (signs @ hessian)
    return products.mean(0), products.var(0, correction=0)


def test_the_theory_used_below_holds_for_a_matrix_small_enough_to_try_all_signs():
    hessian = torch.randn(7, 7, dtype=torch.float64)
    hessian = hessian + hessian.T
    mean, variance = moments_over_all_signs(hessian)
    torch.testing.assert_close(mean, hessian.diagonal(), rtol=1e-12, atol=1e-12)
    off_diagonal = hessian - hessian.diagonal().diag()
    torch.testing.assert_close(variance, off_diagonal.square().sum(1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("case", "num_probes"),
    [*((case, 1) for case in [*LIKELIHOOD_CASES, *IN_TRAINING_MODE]), (CASES[0], 3), (IN_TRAINING_MODE[0], 3)],
    ids=lambda value: getattr(value, "name", value),
)
def test_probed_diagonal_is_unbiased_for_minus_the_dense_hessians(case, num_probes):
    """Mean of 200 draws in standard errors √(Σ_{j≠i} H²ᵢⱼ / (200 · probes)), which are known, not estimated.

    v ∘ Hv is bounded and symmetric about its mean: the normal's tail holds, so that 6 standard errors for 24 to 131
    weights in 13 tests raise a false alarm with probability below 4e-6 with other seeds (Bonferroni).
    """
    bnn, x, y = case.make()
    hessian = dense_hessian(bnn, x, y)
    curvature = varlap.Hessian(num_probes=num_probes)
    rows = [flat(estimate(curvature, bnn, x, y, step=step)[1].diagonal()) for step in range(200)]
    variance = (hessian - hessian.diagonal().diag()).square().sum(1) / num_probes
    moving = variance > 1e-20
    z = ((torch.stack(rows).mean(0) + hessian.diagonal()) / (variance / 200).sqrt())[moving]
    assert z.abs().max() < 6
    assert moving.sum() > 10
    torch.testing.assert_close(torch.stack(rows)[0, ~moving], -hessian.diagonal()[~moving], rtol=1e-8, atol=1e-12)
    # The variance falls with the probes as it should. Its own error is 10 % for each weight, less for their mean.
    measured = torch.stack(rows).var(0)[moving]
    assert 0.6 < (measured / variance[moving]).mean() < 1.6


def test_items_are_weighted():
    bnn, x, y = CASES[0].make()

    class Weighted(varlap.Categorical):
        def log_prob(self, outputs, targets):
            return WEIGHTS * super().log_prob(outputs, targets)

    by_hand = varlap.BNN(bnn.network, Weighted()).double()
    first = estimate(varlap.Hessian(), bnn, x, y, weights=WEIGHTS)
    second = estimate(varlap.Hessian(), by_hand, x, y)
    torch.testing.assert_close(first[0], second[0])
    torch.testing.assert_close(first[1].diagonal(), second[1].diagonal(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("num_probes", [1, 4])
def test_of_a_diagonal_hessian_every_single_draw_is_exact(num_probes):
    bnn = varlap.BNN(Elementwise(), varlap.Gaussian(noise=0.5, learnt=False)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    w, precision = bnn.network.weight.detach(), (-2 * bnn.likelihood.log_noise).exp()
    residual = y - x * w.sin()
    h = precision * (-(x * w.cos()).square() - residual * x * w.sin()).mean(0)
    assert h.min() < 0 < h.max()  # both signs, as Eq. 20 has it
    for step in range(5):
        _, found = estimate(varlap.Hessian(num_probes=num_probes), bnn, x, y, step=step)
        torch.testing.assert_close(found.diagonal()["weight"], -h, rtol=1e-12, atol=1e-14)


def test_pull_back_is_the_gradient_of_half_the_sum_of_variance_times_minus_h():
    """For a diagonal Hessian the third derivative can be written down: d/dw of −½ σ² h(w), weight by weight."""
    bnn = varlap.BNN(Elementwise(torch.exp), varlap.Gaussian(noise=1.0, learnt=False)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    w, variance = bnn.network.weight, torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    _, found = estimate(varlap.Hessian(num_probes=2), bnn, x, y, create_graph=True)
    pairs = list(found.pull_back({"weight": variance}))
    assert len(pairs) == 2
    tensors, cotangents = zip(*pairs, strict=True)
    (gradient,) = torch.autograd.grad(tensors, [w], cotangents)
    # With one exp a weight, ℓ = −½ (y − x eʷ)²: ℓ'' = x y eʷ − 2 x² e²ʷ, ℓ''' = x y eʷ − 4 x² e²ʷ.
    third = (x * y * w.exp() - 4 * x.square() * (2 * w).exp()).mean(0)
    torch.testing.assert_close(gradient, (-0.5 * variance * third).detach(), rtol=1e-12, atol=1e-14)


def test_probes_are_signs_of_equal_chance_and_independent():
    """2,500 draws of 4 signs: means and products within 5 standard errors of 0, a false alarm of 10 × 6e-7."""
    bnn = varlap.BNN(Elementwise(), "gaussian").double()
    x, y = torch.ones(2, 4, dtype=torch.float64), torch.ones(2, 4, dtype=torch.float64)
    _, found = estimate(varlap.Hessian(num_probes=2_500), bnn, x, y)
    signs = torch.stack([probe["weight"] for probe in found.probes])
    assert torch.equal(signs.abs(), torch.ones_like(signs))
    pairs = [signs[:, i] * signs[:, j] for i, j in itertools.combinations(range(4), 2)]
    assert torch.cat([signs.mean(0), torch.stack(pairs).mean(1)]).abs().max() < 5 / 50


def test_a_step_repeats_its_probes_another_has_others_and_the_global_generator_stays():
    bnn, x, y = CASES[0].make()
    state = torch.get_rng_state()
    first, again, other = (flat(estimate(varlap.Hessian(), bnn, x, y, step=step)[1].diagonal()) for step in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_that_play_no_part_or_enter_linearly_have_no_curvature():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.used

    class Score:
        """log p = Σ outputs: nothing curves."""

        def log_prob(self, outputs, targets):
            return outputs.sum(1)

        def sample(self, outputs, generator, targets=None): ...

        def predict(self, outputs): ...

    bnn = varlap.BNN(Linear(), Score()).double()
    _, found = estimate(varlap.Hessian(), bnn, torch.ones(2, 3, dtype=torch.float64), torch.zeros(2))
    assert all(torch.equal(f, torch.zeros_like(f)) for f in found.diagonal().values())


def test_weight_of_a_step_is_every_or_nothing():
    assert [varlap.Hessian(every=3).weight(step) for step in range(7)] == [3, 0, 0, 3, 0, 0, 3]


@pytest.mark.parametrize("settings", [{"every": 0}, {"num_probes": 0}, {"every": -1, "num_probes": 2}])
def test_settings_that_cannot_be_right_are_refused(settings):
    name, value = next(iter(settings.items()))
    with pytest.raises(ConfigError, match=rf"Hessian\({name}={value}\) must be a whole number of at least 1"):
        varlap.Hessian(**settings)
