"""`evaluate` against scores counted by hand."""

import math

import pytest
import torch
from torch import nn

import varlap


class Given(nn.Module):
    """A network whose outputs are its inputs, shifted by a parameter that is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def ece_by_hand(confidence: torch.Tensor, correct: torch.Tensor, bins: int = 15) -> float:
    total = 0.0
    for low in range(bins):
        inside = (confidence > low / bins) & (confidence <= (low + 1) / bins)
        if inside.any():
            total += float((confidence[inside].mean() - correct[inside].double().mean()).abs() * inside.sum())
    return total / len(confidence)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_class_scores_equal_those_counted_by_hand(batch_size):
    logits, labels = 3 * torch.randn(20, 4), torch.arange(20) % 4
    found = varlap.evaluate(varlap.BNN(Given()), (logits, labels), batch_size=batch_size)
    probs = logits.softmax(1)
    confidence, guess = probs.max(1)
    assert found["nll"] == pytest.approx(-probs[range(20), labels].log().mean().item(), rel=1e-5)
    assert found["accuracy"] == pytest.approx((guess == labels).double().mean().item())
    assert found["ece"] == pytest.approx(ece_by_hand(confidence, guess == labels), abs=1e-5)


def test_ignored_positions_enter_no_score():
    logits = 3 * torch.randn(4, 3, 5)
    labels = logits.argmax(1)
    labels[0, :3] = -100
    wrong = labels.clone()
    wrong[1, 1] = (wrong[1, 1] + 1) % 3
    bnn = varlap.BNN(Given())
    assert varlap.evaluate(bnn, (logits, labels))["accuracy"] == 1
    assert varlap.evaluate(bnn, (logits, wrong))["accuracy"] == pytest.approx(16 / 17)


def test_yes_or_no_labels_are_counted_one_by_one():
    logits = torch.tensor([[2.0, -1.0], [0.5, 3.0]])
    found = varlap.evaluate(varlap.BNN(Given(), "bernoulli"), (logits, torch.tensor([[1.0, 1.0], [1.0, 1.0]])))
    assert found["accuracy"] == 0.75
    assert found["nll"] == pytest.approx(-logits.sigmoid().log().sum(1).mean().item(), rel=1e-6)


def test_regression_scores_equal_those_counted_by_hand():
    outputs, targets = torch.randn(10, 2), torch.randn(10, 2)
    bnn = varlap.BNN(Given(), varlap.Gaussian(noise=0.5, learnt=False))
    found = varlap.evaluate(bnn, (outputs, targets), batch_size=4)
    squares = (outputs - targets).square()
    assert found["rmse"] == pytest.approx(squares.mean().sqrt().item(), rel=1e-6)
    expected = (squares / (2 * 0.25) + math.log(0.5) + 0.5 * math.log(2 * math.pi)).sum(1).mean()
    assert found["nll"] == pytest.approx(expected.item(), rel=1e-5)
