"""`evaluate` against scores counted by hand."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import varlap
from cases import LIKELIHOOD_CASES
from varlap.errors import BatchError, ConfigError, NonFiniteError


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


@pytest.mark.parametrize("batch_size", [1, 7, 512])
@pytest.mark.parametrize("case", LIKELIHOOD_CASES, ids=lambda case: case.name)
def test_evaluate_gives_the_scores_of_the_prediction_for_any_batch_size(case, batch_size):
    bnn, x, y = case.make()
    other = x + 1
    whole = varlap.metrics.score(bnn.predict(x), y, ood=bnn.predict(other), bootstrap=20)
    found = varlap.evaluate(bnn, (x, y), ood=other, bootstrap=20, batch_size=batch_size)
    assert found == pytest.approx(whole, rel=1e-9)
    assert bnn.network.training


@pytest.mark.parametrize("form", ["tensor", "array", "pair", "dataset", "loader", "batches"])
def test_out_of_distribution_data_come_in_any_form(form):
    x, y, other = torch.randn(20, 3), torch.arange(20) % 3, 0.1 * torch.randn(12, 3)
    data = TensorDataset(other, torch.zeros(12))
    forms = {
        "tensor": other,
        "array": other.numpy(),
        "pair": (other, torch.zeros(12)),
        "dataset": data,
        "loader": DataLoader(data, batch_size=5),
        "batches": [(other[:6], "no label"), (other[6:], None)],
    }
    found = varlap.evaluate(varlap.BNN(Given()), (x, y), ood=forms[form], batch_size=8)
    inside, outside = (varlap.Prediction(probs=part.softmax(1)).entropy for part in (x, other))
    assert found["ood_auroc_entropy"] == pytest.approx(varlap.metrics.auroc(inside, outside), rel=1e-6)
    assert found["ood_auroc_entropy"] > 0.7
    assert "ood_auroc_mutual_information" not in found  # the mean network does not know it


def test_inputs_in_a_dict_may_be_out_of_distribution():
    class Sum(Given):
        def forward(self, left, right):
            return left + right + self.shift

    x = {"left": torch.randn(6, 3), "right": torch.zeros(6, 3)}
    bnn, y = varlap.BNN(Sum()), torch.arange(6) % 3
    expected = varlap.evaluate(bnn, (x, y), ood=(x, y))
    assert varlap.evaluate(bnn, (x, y), ood=x) == expected
    assert varlap.evaluate(bnn, (x, y), ood={name: part.numpy() for name, part in x.items()}) == expected
    assert expected["ood_auroc_entropy"] == pytest.approx(0.5)


@pytest.mark.parametrize("bootstrap", [1, 19])
def test_too_few_draws_for_an_interval_are_refused(bootstrap):
    bnn, data = varlap.BNN(Given()), (torch.zeros(4, 3), torch.arange(4) % 3)
    with pytest.raises(
        ConfigError, match=rf"evaluate\(bootstrap={bootstrap}\).*leave out the score itself; give at least 20"
    ):
        varlap.evaluate(bnn, data, bootstrap=bootstrap)
    assert "nll_low" in varlap.evaluate(bnn, data, bootstrap=20)


def test_empty_and_unclean_data_are_refused():
    bnn, x, y = varlap.BNN(Given()), torch.zeros(2, 3), torch.tensor([0, 1])
    with pytest.raises(BatchError, match="the data hold no items; give at least one"):
        varlap.evaluate(bnn, [])
    for nothing in ([], x[:0]):
        with pytest.raises(
            BatchError, match="ood holds no items, counted by the first dimension; give at least one, or"
        ):
            varlap.evaluate(bnn, (x, y), ood=nothing)
    with pytest.raises(
        NonFiniteError, match=r"^x holds NaN, in batch 0 \(the first is 0\); clean the data or the transform"
    ):
        varlap.evaluate(bnn, (x * math.nan, y))
    with pytest.raises(NonFiniteError, match=r"^x holds Inf, in batch 1"):
        varlap.evaluate(bnn, (torch.tensor([[0.0] * 3, [math.inf] * 3]), y), batch_size=1)
    with pytest.raises(NonFiniteError, match=r"^ood x holds NaN, in batch 0"):
        varlap.evaluate(bnn, (x, y), ood=x * math.nan)
    with pytest.raises(BatchError, match="label 3 is out of range: the network has 3 outputs"):
        varlap.evaluate(bnn, (x, y + 2))
    with pytest.raises(BatchError, match=r"needs outputs of shape \[S, K\] or \[S, K, ...\], got \(2,\)"):
        varlap.evaluate(bnn, (x[:, 0], y))
    with pytest.raises(BatchError, match=r"needs targets of shape \(2,\) for outputs of shape \(2, 3\), got \(2, 3\)"):
        varlap.evaluate(bnn, (x, x.long()))


def test_a_log_prob_that_is_not_one_value_per_item_is_refused():
    class Unsummed(varlap.Gaussian):
        def log_prob(self, outputs, targets):
            return outputs - targets

    with pytest.raises(BatchError, match=r"log_prob returned shape \(2, 3\) for 2 items; it must return one value per"):
        varlap.evaluate(varlap.BNN(Given(), Unsummed()), (torch.zeros(2, 3), torch.zeros(2, 3)))


def test_a_likelihood_that_predicts_nothing_still_has_its_nll():
    class Silent(varlap.Gaussian):
        def predict(self, outputs):
            return varlap.Prediction()

    bnn, x = varlap.BNN(Given(), Silent(noise=1.0, learnt=False)), torch.zeros(4, 1)
    assert varlap.evaluate(bnn, (x, x)) == pytest.approx({"nll": 0.5 * math.log(2 * math.pi)})


def test_settings_that_are_not_the_defaults_reach_the_prediction(monkeypatch):
    calls = []

    def predict(bnn, x, **options):
        calls.append(options)
        return bnn.predict(x)

    monkeypatch.setattr(sys.modules["varlap.metrics.evaluate"], "predict", predict)
    bnn, data = varlap.BNN(Given()), (torch.zeros(2, 3), torch.tensor([0, 1]))
    varlap.evaluate(bnn, data)
    given = {"how": "linearised", "num_samples": 4, "seed": 3, "temperature": 2.0, "closed_form": True}
    varlap.evaluate(bnn, data, ood=data[0], **given)
    assert calls == [{"how": "mean", "num_samples": None, "seed": 0, "closed_form": False}, given, given]


def test_validation_in_a_fit_needs_no_torchmetrics():
    code = """
import sys, torch, varlap
bnn, data = varlap.BNN(torch.nn.Linear(2, 3)), (torch.zeros(4, 2), torch.tensor([0, 1, 2, 0]))
history = varlap.fit(bnn, varlap.MAP(4), data, validation=data, epochs=1, progress="none")
found = {name.removeprefix("validation_") for name in history.epochs[0] if name.startswith("validation_")}
assert found == {"nll", "accuracy", "ece"}
assert "torchmetrics" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_posterior_too_wide_to_sample_is_warned_of_once_an_evaluation():
    bnn = varlap.BNN(torch.nn.Linear(4, 3))
    with torch.no_grad():
        bnn.log_sigma["weight"].fill_(2.0)
    data = torch.randn(20, 4), torch.arange(20) % 3
    with pytest.warns(varlap.errors.VarlapWarning) as caught:
        varlap.evaluate(bnn, data, how="sampled", batch_size=4)
    assert len([w for w in caught if issubclass(w.category, varlap.errors.VarlapWarning)]) == 1


def test_closed_form_scores_are_those_of_the_closed_form_prediction():
    torch.manual_seed(0)
    bnn, x, y = (
        varlap.BNN(nn.Linear(3, 2), "gaussian").double(),
        torch.randn(20, 3).double(),
        torch.randn(20, 2).double(),
    )
    expected = -bnn.predict(x, "linearised", closed_form=True).log_prob(y).mean()
    found = varlap.evaluate(bnn, (x, y), how="linearised", closed_form=True, batch_size=7)
    assert found["nll"] == pytest.approx(float(expected), rel=1e-12)
    drawn = varlap.evaluate(bnn, (x, y), how="linearised", batch_size=7)
    assert drawn["nll"] != found["nll"]
