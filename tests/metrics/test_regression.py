"""Regression scores against sums by hand, integrals and drawn targets."""

import math

import pytest
import torch
from torch.distributions import Normal

from varlap import metrics
from varlap.errors import BatchError, ConfigError, NonFiniteError


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mean, log_std, targets = torch.randn(3, *shape, dtype=torch.float64, generator=generator)
    return mean, (2 * log_std).exp(), 2 * targets


def test_scores_equal_sums_by_hand():
    mean, variance, targets = draw(6, 2)
    errors = (mean - targets).flatten().tolist()
    assert metrics.rmse(mean, targets) == pytest.approx(math.sqrt(sum(e * e for e in errors) / 12), rel=1e-12)
    expected = Normal(mean, variance.sqrt()).log_prob(targets).sum(1).mean()
    assert metrics.log_likelihood(mean, variance, targets) == pytest.approx(expected.item(), rel=1e-12)
    low, high = (Normal(mean, variance.sqrt()).icdf(torch.tensor(level)) for level in (0.2, 0.8))
    inside = ((low <= targets) & (targets <= high)).double().mean().item()
    assert 0 < inside < 1
    assert metrics.coverage(mean, variance, targets, level=0.6) == pytest.approx(inside)
    assert metrics.width(variance, level=0.6) == pytest.approx((high - low).mean().item(), rel=1e-6)


def test_crps_equals_the_integral_that_defines_it():
    mean, variance, targets = draw(5)
    expected = 0.0
    for m, v, y in zip(mean, variance, targets, strict=True):
        at = torch.linspace(-60, 60, 1_200_001, dtype=torch.float64)
        expected += torch.trapezoid((Normal(m, v.sqrt()).cdf(at) - (at >= y).double()).square(), at).item() / 5
    assert metrics.crps(mean, variance, targets) == pytest.approx(expected, abs=2e-4)


def test_crps_without_variance_is_the_absolute_error():
    mean, targets = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, -1.0, 4.5])
    assert metrics.crps(mean, torch.zeros(3), targets) == pytest.approx(1.5)
    assert metrics.crps(mean, torch.full((3,), 1e-12), targets) == pytest.approx(1.5, abs=1e-5)


def test_targets_drawn_from_the_prediction_are_covered_at_the_level():
    mean, variance, _ = draw(40_000)
    targets = mean + variance.sqrt() * torch.randn(
        40_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    for level in (0.5, 0.95):
        standard_error = math.sqrt(level * (1 - level) / 40_000)
        assert abs(metrics.coverage(mean, variance, targets, level) - level) < 4 * standard_error
        assert abs(metrics.coverage(mean, variance / 9, targets, level) - level) > 20 * standard_error  # too sure


def test_a_perfect_and_a_confidently_wrong_prediction_have_their_known_scores():
    targets = torch.arange(4.0)
    assert metrics.rmse(targets, targets) == 0
    assert metrics.coverage(targets, torch.full((4,), 1e-6), targets) == 1
    assert metrics.coverage(targets + 1, torch.full((4,), 1e-6), targets) == 0
    assert metrics.log_likelihood(targets + 1, torch.full((4,), 1e-6), targets) < -4e5
    assert metrics.crps(targets + 1, torch.full((4,), 1e-6), targets) == pytest.approx(1, abs=1e-3)


def test_bad_moments_are_refused():
    one = torch.ones(3)
    calls = [
        lambda mean, variance, targets: metrics.rmse(mean, targets),
        metrics.log_likelihood,
        metrics.coverage,
        metrics.crps,
    ]
    for call in calls:
        with pytest.raises(
            BatchError, match=r"targets has shape \(3, 1\) but mean has \(3,\); reshape it, for example"
        ):
            call(one, one, one[:, None])
        with pytest.raises(BatchError, match="mean and targets are empty; give at least one item"):
            call(one[:0], one[:0], one[:0])
        with pytest.raises(NonFiniteError, match="targets holds NaN or Inf; did the network diverge, or are the data"):
            call(one, one, one / 0)
        if call is not calls[0]:
            with pytest.raises(BatchError, match=r"variance holds -1; give variances, such as std.square\(\)"):
                call(one, -one, one)
    with pytest.raises(BatchError, match="variance holds -1"):
        metrics.width(-one)
    for level in (0, 1, 95):
        with pytest.raises(ConfigError, match=rf"level={level} must be between 0 and 1; 0.95 is usual"):
            metrics.width(one, level)
