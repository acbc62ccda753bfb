"""Scores of class probabilities against loops over the labels, and what bad input is told."""

import math

import pytest
import torch

from varlap import metrics
from varlap.errors import BatchError, ConfigError, NonFiniteError

CLASS_METRICS = [
    metrics.nll,
    metrics.accuracy,
    metrics.brier,
    metrics.ece,
    metrics.adaptive_ece,
    metrics.classwise_ece,
    metrics.reliability_bins,
]


def draw_classes(num_items=40, num_classes=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_items, num_classes, dtype=torch.float64, generator=generator)
    return logits.softmax(1), torch.randint(num_classes, (num_items,), generator=generator)


def positions(probs, labels):
    """The same labels as 2 × 5 positions of a tenth as many items, and two more that are ignored."""
    num_items, num_classes = len(labels) // 10, probs.shape[1]
    shaped = probs.reshape(num_items, 10, num_classes).movedim(-1, 1)
    shaped = torch.cat([shaped, shaped[..., :2].flip(1)], -1).reshape(num_items, num_classes, 2, 6)
    kept = torch.cat([labels.reshape(num_items, 10), torch.full((num_items, 2), -100)], 1)
    return shaped, kept.reshape(num_items, 2, 6)


def test_scores_equal_loops_over_the_labels():
    probs, labels = draw_classes()
    rows = list(zip(probs.tolist(), labels.tolist(), strict=True))
    assert metrics.nll(probs, labels) == pytest.approx(sum(-math.log(p[y]) for p, y in rows) / 40, rel=1e-12)
    assert metrics.accuracy(probs, labels) == sum(p.index(max(p)) == y for p, y in rows) / 40
    for k in (1, 3, 5):
        among = sum(y in sorted(range(7), key=lambda j, p=p: -p[j])[:k] for p, y in rows)
        assert metrics.top_k_accuracy(probs, labels, k) == pytest.approx(among / 40)
    squares = sum((p[j] - (j == y)) ** 2 for p, y in rows for j in range(7))
    assert metrics.brier(probs, labels) == pytest.approx(squares / 40, rel=1e-12)


def test_positions_count_one_by_one_and_ignored_ones_not_at_all():
    probs, labels = draw_classes()
    shaped, kept = positions(probs, labels)
    assert metrics.nll(shaped, kept) == pytest.approx(10 * metrics.nll(probs, labels), rel=1e-12)  # of an item
    for metric in CLASS_METRICS[1:-1]:
        assert metric(shaped, kept) == pytest.approx(metric(probs, labels), rel=1e-12), metric.__name__
    assert metrics.top_k_accuracy(shaped, kept) == metrics.top_k_accuracy(probs, labels)
    assert torch.equal(metrics.reliability_bins(shaped, kept).count, metrics.reliability_bins(probs, labels).count)


def test_yes_or_no_scores_equal_loops_over_the_labels():
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(8, 3, dtype=torch.float64, generator=generator)
    labels = torch.randint(2, (8, 3), generator=generator)
    pairs = list(zip(probs.flatten().tolist(), labels.flatten().tolist(), strict=True))
    assert metrics.nll(probs, labels) == pytest.approx(sum(-math.log(p if y else 1 - p) for p, y in pairs) / 8)
    assert metrics.accuracy(probs, labels) == pytest.approx(sum((p > 0.5) == y for p, y in pairs) / 24)
    assert metrics.brier(probs, labels) == pytest.approx(sum((p - y) ** 2 for p, y in pairs) / 24)
    assert metrics.accuracy(probs, labels.bool()) == metrics.accuracy(probs, labels.double())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("perfect", {"accuracy": 1, "brier": 0, "ece": 0, "adaptive_ece": 0, "classwise_ece": 0}),
        # 1 of 4 is right, at confidence 1/4 (the first of equal classes is the guess)
        ("constant", {"accuracy": 0.25, "brier": 0.75, "ece": 0, "adaptive_ece": 0, "classwise_ece": 0}),
        # each class is given 1 where it is not, and 0 where it is: 2 of 4 labels wrong by 1 for each class
        ("adversarial", {"accuracy": 0, "brier": 2, "ece": 1, "adaptive_ece": 1, "classwise_ece": 0.5}),
    ],
)
def test_perfect_constant_and_confidently_wrong_predictors_have_their_known_scores(kind, expected):
    labels, certain = torch.arange(40) % 4, torch.eye(4, dtype=torch.float64)
    probs = {
        "perfect": certain[labels],
        "constant": torch.full((40, 4), 0.25, dtype=torch.float64),
        "adversarial": certain[(labels + 1) % 4],
    }[kind]
    found = {name: getattr(metrics, name)(probs, labels) for name in expected}
    assert found == pytest.approx(expected, abs=1e-12)
    expected_nll = {"perfect": 0, "constant": math.log(4), "adversarial": math.inf}[kind]
    assert metrics.nll(probs, labels) == pytest.approx(expected_nll, abs=1e-12)


def test_half_precision_is_scored_in_single():
    probs, labels = draw_classes()
    assert metrics.brier(probs.bfloat16(), labels) == pytest.approx(metrics.brier(probs, labels), abs=0.01)
    assert metrics.accuracy(probs.half(), labels.to(torch.uint8)) == metrics.accuracy(probs, labels)


GOOD, LABELS = torch.full((4, 2), 0.5), torch.tensor([0, 1, 0, 1])
BAD = [
    (GOOD[:0], LABELS[:0], BatchError, "nothing to score: probs and labels are empty; give at least one item"),
    (GOOD, LABELS[:3], BatchError, r"probs of shape \(4, 2\) do not fit labels of shape \(3,\): classes need probs"),
    (torch.tensor(0.5), torch.tensor(1), BatchError, r"probs of shape \(\) do not fit labels of shape \(\)"),
    (GOOD[:, :1], LABELS, BatchError, r"\(4, 1\) have one class only; for yes-or-no labels give .* by probs\[:, 0\]"),
    (GOOD, LABELS.double(), BatchError, r"class numbers, got torch.float64; use labels.long\(\)"),
    (
        GOOD,
        LABELS + 1,
        BatchError,
        r"label 2 is out of range: probs have 2 classes, so labels go from 0 to 1 \(ignored",
    ),
    (GOOD, LABELS - 1, BatchError, "label -1 is out of range"),
    (GOOD, LABELS * 0 - 100, BatchError, "nothing to score: every label is the ignored one; give at least one"),
    (GOOD * math.nan, LABELS, NonFiniteError, "probs hold NaN or Inf; did the network diverge"),
    (
        GOOD - 0.6,
        LABELS,
        BatchError,
        r"probs hold -0.1, which is no probability; of logits take the softmax\(1\) first",
    ),
    (GOOD * 4, LABELS, BatchError, r"probs hold 2, which is no probability; of logits take the softmax"),
    (GOOD * 0.8, LABELS, BatchError, r"of a label sum to 0.8, not to 1; divide by probs.sum\(1, keepdim=True\)"),
    (GOOD[:, 0] + 1, LABELS, BatchError, r"probs hold 1.5, .* take the sigmoid\(\) first"),
    (
        GOOD[:, 0],
        LABELS * 2,
        BatchError,
        r"yes-or-no labels must be 0 or 1; for class numbers give probs \[S, K, ...\]",
    ),
    (LABELS, GOOD, BatchError, "probs must be real numbers, got torch.int64; probs come first, then labels"),
    ([0.5], LABELS, BatchError, r"probs must be a tensor, got list; use torch.as_tensor\(probs\)"),
]


@pytest.mark.parametrize("metric", CLASS_METRICS, ids=lambda metric: metric.__name__)
@pytest.mark.parametrize(("probs", "labels", "kind", "message"), BAD, ids=range(len(BAD)))
def test_bad_probabilities_and_labels_are_refused_by_every_metric(metric, probs, labels, kind, message):
    with pytest.raises(kind, match=message):
        metric(probs, labels)


def test_top_k_needs_more_than_k_classes():
    message = r"top_k_accuracy\(k=5\) is 1 whatever the probs are, since there are 2 classes; use a smaller k"
    with pytest.raises(ConfigError, match=message):
        metrics.top_k_accuracy(GOOD, LABELS)
    with pytest.raises(ConfigError, match=r"top_k_accuracy\(k=0\) must be a whole number of at least 1"):
        metrics.top_k_accuracy(GOOD, LABELS, k=0)
