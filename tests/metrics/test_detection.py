"""Detection scores against counts over all pairs and thresholds."""

import math

import pytest
import torch

from varlap import metrics
from varlap.errors import BatchError, ConfigError, NonFiniteError

ALL = (metrics.auroc, metrics.aupr, metrics.fpr_at_tpr)


def auroc_by_hand(inside, outside):
    """Wins of the outside over the inside among all pairs."""
    return sum((o > i) + 0.5 * (o == i) for o in outside for i in inside) / (len(inside) * len(outside))


def aupr_by_hand(inside, outside):
    """Σ over thresholds, from the highest, of the gain in recall times the precision there."""
    total, recall = 0.0, 0.0
    for threshold in sorted({*inside, *outside}, reverse=True):
        found = sum(o >= threshold for o in outside)
        precision = found / (found + sum(i >= threshold for i in inside))
        total += (found / len(outside) - recall) * precision
        recall = found / len(outside)
    return total


def fpr_by_hand(inside, outside, tpr=0.95):
    """The fewest false alarms of any threshold that finds enough."""
    shares = [
        sum(i >= threshold for i in inside) / len(inside)
        for threshold in {*inside, *outside}
        if sum(o >= threshold for o in outside) >= tpr * len(outside) - 1e-9
    ]
    return min(shares)


@pytest.mark.parametrize("num_outside", [1, 20, 37])
@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
def test_detection_equals_counts_over_pairs_and_thresholds(rounded, num_outside):
    generator = torch.Generator().manual_seed(0)
    inside = torch.randn(30, dtype=torch.float64, generator=generator)
    outside = 1 + torch.randn(num_outside, dtype=torch.float64, generator=generator)
    if rounded:
        inside, outside = inside.round(), outside.round()
    pair = inside.tolist(), outside.tolist()
    assert metrics.auroc(inside, outside) == pytest.approx(auroc_by_hand(*pair), abs=1e-6)
    assert metrics.aupr(inside, outside) == pytest.approx(aupr_by_hand(*pair), abs=1e-6)
    for tpr in (0.5, 0.95, 1.0):
        assert metrics.fpr_at_tpr(inside, outside, tpr) == pytest.approx(fpr_by_hand(*pair, tpr), abs=1e-6)


def test_perfect_constant_and_reversed_detectors_have_their_known_scores():
    low, high = torch.arange(10.0), torch.arange(10.0, 20.0)
    assert [metric(low, high) for metric in ALL] == [1, 1, 0]
    constant = torch.full((10,), 0.3), torch.full((30,), 0.3)
    assert [metric(*constant) for metric in ALL] == pytest.approx([0.5, 0.75, 1])
    assert metrics.auroc(high, low) == 0
    assert metrics.fpr_at_tpr(high, low) == 1


def test_large_scores_keep_their_order():
    """A sigmoid in single precision would make them equal."""
    assert metrics.auroc(torch.tensor([100.0, 101.0]), torch.tensor([102.0, 103.0])) == 1
    assert metrics.auroc(torch.tensor([1.0, 2.0]), torch.tensor([math.inf])) == 1


def test_exactly_19_of_20_found_is_95_percent():
    inside, outside = torch.tensor([0.5, 0.0]), torch.cat([torch.ones(19), torch.zeros(1) - 1])
    assert metrics.fpr_at_tpr(inside, outside) == 0
    assert metrics.fpr_at_tpr(inside, outside, 0.96) == 1
    many = torch.cat([torch.ones(53), torch.zeros(47) - 1])  # in single precision, 53/100 · 100 is below 53
    assert metrics.fpr_at_tpr(inside, many, 0.53) == 0


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.__name__)
def test_bad_scores_are_refused(metric):
    some, none = torch.ones(3), torch.ones(0)
    with pytest.raises(BatchError, match="outside holds no scores; detection needs at least one item on each side"):
        metric(some, none)
    with pytest.raises(BatchError, match="inside holds no scores"):
        metric(none, some)
    with pytest.raises(
        BatchError, match=r"inside has shape \(3, 1\); give one score for each item, for example the mean"
    ):
        metric(some[:, None], some)
    with pytest.raises(NonFiniteError, match="outside holds NaN; did the network diverge"):
        metric(some, some * math.nan)


def test_a_rate_beyond_1_is_refused():
    with pytest.raises(ConfigError, match=r"fpr_at_tpr\(tpr=95\) must be above 0 and at most 1; 0.95 is usual"):
        metrics.fpr_at_tpr(torch.ones(1), torch.ones(1), tpr=95)
