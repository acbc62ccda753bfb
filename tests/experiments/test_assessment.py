"""An assessment has `varlap.evaluate`'s scores, and of each prediction what tables and pictures need."""

from pathlib import Path

import pytest
import torch
from torch import nn

import varlap
from varlap.errors import NonFiniteError
from varlap.experiments import Evaluated, assess, draw_figures

CLASSES = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 3
OUTSIDE = 3 * torch.randn(20, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", [{}, {"how": "sampled", "num_samples": 4}, {"temperature": 2.0}])
@pytest.mark.filterwarnings("ignore::varlap.errors.VarlapWarning")
def test_scores_equal_those_of_evaluate(options: dict):
    bnn = varlap.BNN(nn.Linear(4, 3))
    options |= {"seed": 3, "ood": OUTSIDE, "bootstrap": 20, "batch_size": 16}
    assert assess(bnn, CLASSES, name="x", **options).scores == varlap.evaluate(bnn, CLASSES, **options)


def test_predictions_are_those_of_one_pass_over_all(tmp_path: Path):
    bnn = varlap.BNN(nn.Linear(4, 3))
    found = assess(bnn, CLASSES, name="x", how="linearised", num_samples=5, ood=OUTSIDE, batch_size=16)
    found.write(tmp_path)
    kept = Evaluated.read(tmp_path).predictions
    inside = bnn.predict(CLASSES[0], how="linearised", num_samples=5)
    outside = bnn.predict(OUTSIDE, how="linearised", num_samples=5)
    expected = {
        "probs": inside.probs,
        "labels": CLASSES[1],
        "entropy": inside.entropy,
        "mutual_information": inside.mutual_information,
        "ood_entropy": outside.entropy,
        "ood_mutual_information": outside.mutual_information,
        "least_sure": inside.entropy.argsort(descending=True)[:12],
    }
    assert kept.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(kept[name], value)


def test_regression_keeps_moments_and_targets():
    bnn = varlap.BNN(nn.Linear(4, 2), "gaussian")
    data = CLASSES[0], torch.randn(50, 2, generator=torch.Generator().manual_seed(2))
    found = assess(bnn, data, name="x", how="linearised", ood=OUTSIDE, batch_size=16)
    prediction = bnn.predict(data[0], how="linearised")
    assert found.scores == varlap.evaluate(bnn, data, how="linearised", ood=OUTSIDE, batch_size=16)
    torch.testing.assert_close(found.predictions["mean"], prediction.mean)
    torch.testing.assert_close(found.predictions["variance"], prediction.variance)
    torch.testing.assert_close(found.predictions["epistemic_variance"], prediction.epistemic_variance.mean(1))
    assert torch.equal(found.predictions["targets"], data[1])
    assert found.predictions["least_sure"][0] == prediction.variance.mean(1).argmax()
    assert {"ood_variance", "ood_epistemic_variance"} <= found.predictions.keys()


def test_few_items_are_all_among_the_least_sure():
    found = assess(varlap.BNN(nn.Linear(4, 3)), (CLASSES[0][:5], CLASSES[1][:5]), name="x", images=CLASSES[0][:5])
    assert sorted(found.predictions["least_sure"].tolist()) == [0, 1, 2, 3, 4]
    assert torch.equal(found.predictions["images"], CLASSES[0][found.predictions["least_sure"]])


def test_a_nan_is_refused_as_in_evaluate():
    with pytest.raises(NonFiniteError):
        assess(varlap.BNN(nn.Linear(4, 3)), (torch.full((2, 4), float("nan")), torch.zeros(2).long()), name="x")


def test_the_second_picture_needs_a_curvature(tmp_path: Path):
    bnn = varlap.BNN(nn.Linear(4, 3))
    fisher = varlap.fisher_diagonal(bnn, CLASSES)
    assert [path.name for path in draw_figures(bnn, tmp_path)] == ["sigma_over_s.svg"]
    paths = draw_figures(bnn, tmp_path, fisher=fisher, num_data=50, beta=0.1)
    assert [path.name for path in paths] == ["sigma_over_s.svg", "travelling_variances.svg"]
    assert all("<svg" in path.read_text() for path in paths)
