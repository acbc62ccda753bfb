"""Simulation-based calibration: weights drawn from the prior rank uniformly among draws of the fitted posterior.

A thousand data sets are simulated, weights and all, and each is fitted by varlap: the means by one Newton step along
VL's own gradient (exact, since the model is linear), the variances by `varlap.laplace`. With orthogonal inputs mean
field is the true posterior, so the ranks are uniform; with correlated inputs it is too narrow, so they are not.
"""

import math

import pytest
import torch
from torch import nn

import varlap

NUM_DRAWS = 19  # ranks 0..19: twenty equally likely values
N, D, NOISE, SCALE = 6, 3, 0.5, 1.0
ALPHA = 1e-3


def design(kind):
    x = torch.randn(N, D, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    orthonormal = torch.linalg.qr(x)[0]
    if kind == "orthogonal":
        return 2 * orthonormal
    shared = orthonormal[:, :1].expand(N, D)
    return 2 * (0.9 * shared + 0.4 * orthonormal)


def p_value(ranks):
    """Chi-square test that the ranks 0..NUM_DRAWS are equally likely."""
    counts = torch.bincount(ranks, minlength=NUM_DRAWS + 1).double()
    expected = len(ranks) / len(counts)
    chi_square = ((counts - expected).square() / expected).sum()
    return torch.special.gammaincc(torch.tensor(NUM_DRAWS / 2, dtype=torch.float64), chi_square / 2).item()


def fit(bnn, objective, x, y, precision):
    """Move the means to VL's optimum by one Newton step along its gradient, and set Laplace's variances there."""
    bnn.zero_grad()
    objective(bnn, x, y).loss.backward()
    with torch.no_grad():
        mean = bnn.network.weight
        mean -= torch.linalg.solve(precision, N * mean.grad[0])
    varlap.laplace(bnn, (x, y))


def simulate(kind, num_sets):
    """For each data set the rank of the first true weight, by varlap's posterior and by the true one."""
    generator = torch.Generator().manual_seed(11)
    x = design(kind)
    bnn = varlap.BNN(
        nn.Linear(D, 1, bias=False).double(),
        varlap.Gaussian(noise=NOISE, learnt=False).double(),
        prior=varlap.OneScalePrior(SCALE),
    )
    bnn.likelihood.log_noise.fill_(math.log(NOISE))  # in double precision
    objective = varlap.VL(N, curvature=varlap.ExactFisher())
    precision = x.T @ x / NOISE**2 + torch.eye(D, dtype=torch.float64) / SCALE**2
    true_sigma = precision.inverse()[0, 0].sqrt()
    ranks, true_ranks = [], []
    for number in range(num_sets):
        weights = SCALE * torch.randn(D, generator=generator, dtype=torch.float64)
        noise = torch.randn(N, generator=generator, dtype=torch.float64)
        y = (x @ weights + NOISE * noise)[:, None]
        fit(bnn, objective, x, y, precision)
        if number % 100 == 0:  # it is VL's optimum, in means and variances
            bnn.zero_grad()
            objective(bnn, x, y).loss.backward()
            assert max(p.grad.abs().max() for p in bnn.parameters()) < 1e-12
        mean, sigma = bnn.network.weight[0, 0].item(), bnn.log_sigma["weight"][0, 0].exp().item()
        epsilon = torch.randn(NUM_DRAWS, generator=generator, dtype=torch.float64)
        ranks.append((mean + sigma * epsilon < weights[0]).sum())
        true_ranks.append((mean + true_sigma * epsilon < weights[0]).sum())
    return torch.stack(ranks), torch.stack(true_ranks)


def test_ranks_are_uniform_for_an_orthogonal_design():
    """The false-alarm rate is 1e-3 for a random seed; this one is fixed."""
    ranks, true_ranks = simulate("orthogonal", num_sets=1000)
    assert p_value(ranks) > ALPHA
    assert torch.equal(ranks, true_ranks)


def test_ranks_are_not_uniform_for_a_correlated_design_where_mean_field_is_too_narrow():
    """The full posterior's ranks pass on the same data (false-alarm rate 1e-3), so it is mean field that fails."""
    ranks, true_ranks = simulate("correlated", num_sets=300)
    assert p_value(ranks) < ALPHA
    assert p_value(true_ranks) > ALPHA
    outer = (ranks == 0) | (ranks == NUM_DRAWS)
    assert outer.double().mean() > 2 * 2 / (NUM_DRAWS + 1)  # too narrow: true weights fall outside all draws


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_the_rank_test_notices_a_sigma_that_is_wrong_by_a_quarter(factor):
    """The power of the test above, found on exact normal draws: variances twice off would not go unseen."""
    generator = torch.Generator().manual_seed(1)
    truth = torch.randn(1000, 1, generator=generator, dtype=torch.float64)
    draws = factor * torch.randn(1000, NUM_DRAWS, generator=generator, dtype=torch.float64)
    assert p_value((draws < truth).sum(1)) < ALPHA
