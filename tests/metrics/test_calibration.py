"""Calibration errors against loops over the bins, against torchmetrics, and at predictors of known calibration."""

import itertools
import math

import pytest
import torch

from varlap import metrics
from varlap.errors import BatchError, ConfigError, NonFiniteError


def draw_classes(num_items=200, num_classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_items, num_classes, dtype=torch.float64, generator=generator)
    return logits.softmax(1), torch.randint(num_classes, (num_items,), generator=generator)


def error_by_hand(claimed, came_true, members):
    """Σ over bins of the share of labels in it times |frequency − mean probability|."""
    total = 0.0
    for inside in members:
        if inside:
            frequency = sum(came_true[i] for i in inside) / len(inside)
            total += len(inside) / len(claimed) * abs(frequency - sum(claimed[i] for i in inside) / len(inside))
    return total


def equal_width(claimed, bins):
    return [[i for i, p in enumerate(claimed) if b / bins < p <= (b + 1) / bins] for b in range(bins)]


def equal_mass(claimed, bins):
    order = sorted(range(len(claimed)), key=lambda i: claimed[i])
    return [order[b * len(order) // bins : (b + 1) * len(order) // bins] for b in range(bins)]


@pytest.mark.parametrize("bins", [1, 7, 15, 500])
@pytest.mark.parametrize("yes_or_no", [False, True])
def test_errors_equal_loops_over_the_bins(bins, yes_or_no):
    probs, labels = draw_classes()
    if yes_or_no:
        probs, labels = probs[:, 0], (labels == 0).long()
        claimed, came_true = probs.tolist(), labels.tolist()
    else:
        claimed, came_true = probs.amax(1).tolist(), (probs.argmax(1) == labels).tolist()
    expected = error_by_hand(claimed, came_true, equal_width(claimed, bins))
    assert metrics.ece(probs, labels, bins) == pytest.approx(expected, rel=1e-9)
    expected = error_by_hand(claimed, came_true, equal_mass(claimed, bins))
    assert metrics.adaptive_ece(probs, labels, bins) == pytest.approx(expected, rel=1e-9)
    if not yes_or_no:
        of_class = [(probs[:, k].tolist(), (labels == k).tolist()) for k in range(4)]
        expected = sum(error_by_hand(p, y, equal_width(p, bins)) for p, y in of_class) / 4
        assert metrics.classwise_ece(probs, labels, bins) == pytest.approx(expected, rel=1e-9)


def test_many_labels_are_summed_bin_by_bin_to_the_same_error(monkeypatch):
    probs, labels = draw_classes()
    at_once = [metric(probs, labels) for metric in (metrics.ece, metrics.classwise_ece)]
    monkeypatch.setattr("varlap.metrics.calibration.AT_ONCE", 0)
    assert [metric(probs, labels) for metric in (metrics.ece, metrics.classwise_ece)] == pytest.approx(
        at_once, rel=1e-12
    )


@pytest.mark.parametrize("num_classes", [2, 10])
def test_ece_equals_that_of_torchmetrics(num_classes):
    from torchmetrics.functional.classification import binary_calibration_error, multiclass_calibration_error

    probs, labels = draw_classes(num_classes=num_classes)
    expected = multiclass_calibration_error(probs, labels, num_classes, n_bins=15, norm="l1")
    assert metrics.ece(probs, labels) == pytest.approx(float(expected), abs=1e-6)
    expected = binary_calibration_error(probs[:, 0].contiguous(), (labels == 0).long(), n_bins=15, norm="l1")
    assert metrics.ece(probs[:, 0], labels == 0) == pytest.approx(float(expected), abs=1e-6)


def test_certainty_shares_the_last_bin_with_near_certainty():
    """Where one is right and the other wrong they make up for each other: |1/2 − 0.995|, not a bin each."""
    assert metrics.ece(torch.tensor([1.0, 0.99]), torch.tensor([0, 1])) == pytest.approx(0.495, abs=1e-6)
    assert metrics.ece(torch.tensor([0.0, 0.01]), torch.tensor([0, 0])) == pytest.approx(0.005, abs=1e-6)


def test_a_calibrated_predictor_has_an_error_that_vanishes_with_the_data_and_an_overconfident_one_does_not():
    errors, wrong = [], []
    for num_items in (1_000, 100_000):
        generator = torch.Generator().manual_seed(0)
        probs = torch.rand(num_items, dtype=torch.float64, generator=generator)
        labels = torch.rand(num_items, dtype=torch.float64, generator=generator) < probs
        errors.append(max(metrics.ece(probs, labels), metrics.adaptive_ece(probs, labels)))
        sharper = (2 * torch.special.logit(probs)).sigmoid()
        wrong.append(metrics.ece(sharper, labels))
    assert errors[1] < 0.2 * errors[0]  # falls as 1/√N, that is to a tenth
    expected = (sharper - probs).abs().mean().item()
    assert wrong[1] == pytest.approx(expected, abs=5e-3)


def test_reliability_bins_hold_what_the_loop_counts_and_give_the_ece():
    probs, labels = draw_classes()
    found = metrics.reliability_bins(probs, labels)
    claimed, came_true = probs.amax(1).tolist(), (probs.argmax(1) == labels).tolist()
    for b, inside in enumerate(equal_width(claimed, 15)):
        assert found.count[b] == len(inside)
        if inside:
            assert found.confidence[b] == pytest.approx(sum(claimed[i] for i in inside) / len(inside))
            assert found.accuracy[b] == pytest.approx(sum(came_true[i] for i in inside) / len(inside))
        else:
            assert found.confidence[b].isnan()
            assert found.accuracy[b].isnan()
    assert torch.equal(found.edges, torch.linspace(0, 1, 16, dtype=torch.float64))
    ece = (found.gap.abs() * found.count).nansum() / found.count.sum()
    assert metrics.ece(probs, labels) == pytest.approx(ece.item(), rel=1e-9)
    again = metrics.reliability_bins(probs.amax(1), probs.argmax(1) == labels)  # confidences and whether right
    torch.testing.assert_close(again.gap, found.gap, equal_nan=True)


def test_equal_mass_bins_do_not_depend_on_the_order_of_equal_probabilities():
    probs = torch.full((30,), 0.5)
    sorted_labels = torch.arange(30) >= 15
    assert metrics.adaptive_ece(probs, sorted_labels) == pytest.approx(0, abs=1e-12)
    shuffled = torch.randperm(30)
    probs = torch.tensor([0.2, 0.6, 0.9]).repeat(10)
    by_order = [metrics.adaptive_ece(probs[o], sorted_labels[o], 4) for o in (torch.arange(30), shuffled)]
    assert by_order[0] == pytest.approx(by_order[1], rel=1e-9)


def risks_by_hand(confidence, correct):
    """The expected error rate of the k surest, over every order of equal ones."""
    orders = [
        order
        for order in itertools.permutations(range(len(confidence)))
        if all(confidence[a] >= confidence[b] for a, b in itertools.pairwise(order))
    ]
    return [
        sum(sum(not correct[i] for i in order[:k]) / k for order in orders) / len(orders)
        for k in range(1, len(confidence) + 1)
    ]


@pytest.mark.parametrize("confidence", [[0.9, 0.2, 0.7, 0.4, 0.5, 0.3], [0.5, 0.5, 0.9, 0.5, 0.2, 0.2], [0.5] * 6])
def test_risk_coverage_equals_the_average_over_all_orders(confidence):
    correct = [True, False, False, True, True, False]
    coverage, risk = metrics.risk_coverage(torch.tensor(confidence, dtype=torch.float64), torch.tensor(correct))
    expected = risks_by_hand(confidence, correct)
    assert coverage.tolist() == pytest.approx([k / 6 for k in range(1, 7)])
    assert risk.tolist() == pytest.approx(expected)
    assert metrics.aurc(torch.tensor(confidence), torch.tensor(correct)) == pytest.approx(sum(expected) / 6, rel=1e-6)


def test_area_under_risk_is_0_for_perfect_the_error_rate_for_constant_and_1_for_wholly_wrong_answers():
    correct = torch.arange(20) % 4 == 0
    assert metrics.aurc(torch.rand(20), torch.ones(20)) == 0
    assert metrics.aurc(torch.full((20,), 0.7), correct) == pytest.approx(0.75)
    assert metrics.aurc(torch.rand(20), torch.zeros(20)) == 1
    best, worst = metrics.aurc(correct.float(), correct), metrics.aurc(-correct.float(), correct)
    assert best == pytest.approx(sum((k - 5) / k for k in range(6, 21)) / 20)
    assert worst == pytest.approx((15 + sum(15 / k for k in range(16, 21))) / 20)


def test_bad_settings_and_inputs_are_refused():
    probs, labels = draw_classes()
    for metric in (metrics.ece, metrics.adaptive_ece, metrics.classwise_ece, metrics.reliability_bins):
        for bins in (0, 1.5, True):
            with pytest.raises(
                ConfigError, match=rf"{metric.__name__}\(bins={bins}\) must be a whole number of at lea"
            ):
                metric(probs, labels, bins)
    with pytest.raises(BatchError, match=r"classwise_ece needs probs \[S, K, ...\] of classes; ece is the one for yes"):
        metrics.classwise_ece(probs[:, 0], labels == 0)
    with pytest.raises(
        BatchError, match=r"\(2,\) does not fit correct of shape \(3,\); give prediction.confidence and"
    ):
        metrics.aurc(torch.zeros(2), torch.zeros(3))
    with pytest.raises(BatchError, match="confidence is empty; give at least one item"):
        metrics.risk_coverage(torch.zeros(0), torch.zeros(0))
    with pytest.raises(NonFiniteError, match="confidence holds NaN; did the network diverge"):
        metrics.aurc(torch.tensor([math.nan]), torch.ones(1))
