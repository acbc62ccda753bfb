"""Scores that are gathered batch by batch: any split gives the same, and their intervals cover the truth."""

import math

import pytest
import torch

import varlap
from varlap import metrics
from varlap.errors import BatchError, ConfigError, NonFiniteError
from varlap.metrics import Scores, score

S = 24


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def classes():
    """An average of two networks over 7 classes, with ignored positions."""
    outputs = [2 * draw(S, 7, 3, seed=seed) for seed in (0, 1)]
    labels = (draw(S, 3, seed=2) * 3).round().long() % 7
    labels[3:5, 1:] = labels[9] = -100
    each = [o.softmax(1) for o in outputs]
    return varlap.Prediction(
        probs=(each[0] + each[1]) / 2,
        expected_entropy=torch.stack([torch.special.entr(p).sum(1) for p in each]).mean(0),
        outputs=outputs,
        likelihood=varlap.Categorical(),
    ), labels


def yes_or_no():
    logits = draw(S, 2)
    probs = logits.sigmoid()
    prediction = varlap.Prediction(probs=probs, exclusive=False, outputs=[logits], likelihood=varlap.Bernoulli())
    return prediction, (draw(S, 2, seed=1) > 0).double()


def regression():
    mean, variance = draw(S, 2), 1 + draw(S, 2, seed=1).square()
    prediction = varlap.Prediction(mean=mean, variance=variance, noise_variance=torch.ones_like(mean))
    return prediction, draw(S, 2, seed=2)


CASES = [classes, yes_or_no, regression]


def part(prediction, items):
    columns = {
        name: value[items] if isinstance(value, torch.Tensor) else value for name, value in vars(prediction).items()
    }
    columns["outputs"] = [outputs[items] for outputs in prediction.outputs]
    return varlap.Prediction(**columns)


@pytest.mark.parametrize("bootstrap", [0, 20])
@pytest.mark.parametrize("size", [1, 5, 23, 24])
@pytest.mark.parametrize("make", CASES)
def test_any_split_into_batches_gives_the_scores_of_the_whole(make, size, bootstrap):
    prediction, y = make()
    outside = part(prediction, slice(0, 7))
    scores = Scores(bootstrap=bootstrap)
    for start in range(0, S, size):
        items = slice(start, start + size)
        scores.add(part(prediction, items), y[items])
    for item in range(7):
        scores.add_ood(part(outside, slice(item, item + 1)))
    whole = score(prediction, y, ood=outside, bootstrap=bootstrap)
    assert scores.compute() == pytest.approx(whole, rel=1e-9)
    assert scores.compute() == scores.compute()  # reading changes nothing
    assert list(scores.compute()) == list(whole)


def test_scores_of_classes_are_those_of_the_plain_functions():
    prediction, y = classes()
    probs, found = prediction.probs, score(*classes(), ood=part(prediction, slice(0, 9)))
    assert found["nll"] == pytest.approx(
        -prediction.log_prob(y).mean().item()
    )  # of whole items, not position by position
    for name in ("accuracy", "brier", "ece", "adaptive_ece", "classwise_ece"):
        assert found[name] == pytest.approx(getattr(metrics, name)(probs, y), rel=1e-9), name
    assert found["top5_accuracy"] == metrics.top_k_accuracy(probs, y, 5)
    counted = y != -100
    assert found["aurc"] == pytest.approx(
        metrics.aurc(prediction.confidence[counted], (prediction.labels == y)[counted])
    )
    for name, uncertainty in {
        "entropy": prediction.entropy.mean(1),
        "mutual_information": prediction.mutual_information.mean(1),
    }.items():
        assert found[f"ood_auroc_{name}"] == pytest.approx(metrics.auroc(uncertainty, uncertainty[:9]))
        assert found[f"ood_aupr_{name}"] == pytest.approx(metrics.aupr(uncertainty, uncertainty[:9]))
        assert found[f"ood_fpr95_{name}"] == pytest.approx(metrics.fpr_at_tpr(uncertainty, uncertainty[:9]))
    assert len(found) == 8 + 6


def test_scores_of_yes_or_no_labels_are_those_of_the_plain_functions():
    prediction, y = yes_or_no()
    found = score(prediction, y)
    for name in ("nll", "accuracy", "brier", "ece", "adaptive_ece"):
        assert found[name] == pytest.approx(getattr(metrics, name)(prediction.probs, y), rel=1e-9), name
    assert found["aurc"] == pytest.approx(metrics.aurc(prediction.confidence, prediction.labels == y))
    assert len(found) == 6


def test_scores_of_regression_are_those_of_the_plain_functions():
    prediction, y = regression()
    mean, variance = prediction.mean, prediction.variance
    found = score(prediction, y, level=0.8, ood=part(prediction, slice(0, 9)))
    assert found["nll"] == -found["log_likelihood"]
    assert found["log_likelihood"] == pytest.approx(metrics.log_likelihood(mean, variance, y))
    assert found["rmse"] == pytest.approx(metrics.rmse(mean, y))
    assert found["coverage"] == pytest.approx(metrics.coverage(mean, variance, y, 0.8))
    assert found["width"] == pytest.approx(metrics.width(variance, 0.8))
    assert found["crps"] == pytest.approx(metrics.crps(mean, variance, y))
    spread = (variance - 1).mean(1)
    assert found["ood_auroc_epistemic_variance"] == pytest.approx(metrics.auroc(spread, spread[:9]))
    assert len(found) == 6 + 6


def test_a_prediction_made_by_hand_is_scored_by_its_probabilities():
    probs, labels = torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, -100])
    found = score(varlap.Prediction(probs=probs), labels)
    assert found["nll"] == pytest.approx(-math.log(0.9) / 2, rel=1e-6)
    assert found["accuracy"] == 1
    assert not {"top5_accuracy", "ood_auroc_entropy"} & found.keys()
    assert score(varlap.Prediction(mean=torch.zeros(3)), torch.ones(3)) == {"rmse": 1}


def test_only_the_wanted_scores_that_apply_are_given():
    wanted = ("ece", "nll", "rmse", "ood_auroc_entropy")
    prediction, y = classes()
    found = score(prediction, y, only=wanted, ood=prediction, bootstrap=20)
    each = [name + end for name in ("nll", "ece", "ood_auroc_entropy") for end in ("", "_low", "_high")]
    assert list(found) == each
    everything = score(prediction, y, ood=prediction)
    assert all(found[name] == everything[name] for name in ("nll", "ece", "ood_auroc_entropy"))
    assert list(score(*regression(), only=wanted)) == ["nll", "rmse"]
    assert list(score(*regression(), only="log_likelihood")) == ["log_likelihood"]
    assert list(score(prediction, y, only=["accuracy"])) == ["accuracy"]


def test_a_batch_may_consist_of_ignored_labels_but_not_all_of_them():
    prediction, y = classes()
    scores = Scores()
    scores.add(prediction, y * 0 - 100)
    with pytest.raises(BatchError, match="nothing to score: every label is the ignored one; give at least one"):
        scores.compute()
    scores.add(prediction, y)
    assert scores.compute()["accuracy"] == score(prediction, y)["accuracy"]


# ---- intervals ------------------------------------------------------------------------------------------------------


def test_intervals_repeat_for_a_seed_and_leave_global_randomness_alone():
    prediction, y = classes()
    state = torch.get_rng_state()
    first, again, other = (score(prediction, y, bootstrap=20, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert first == again
    assert first["nll_low"] != other["nll_low"]
    assert first["nll"] == other["nll"]


@pytest.mark.parametrize("make", CASES)
def test_every_score_but_the_classwise_error_has_an_interval_with_its_mean_inside(make):
    prediction, y = make()
    found = score(prediction, y, bootstrap=50, ood=prediction)
    names = [name for name in found if not name.endswith(("_low", "_high"))]
    for name in set(names) - {"classwise_ece"}:
        low, high = found[f"{name}_low"], found[f"{name}_high"]
        assert low <= high
        if "ece" not in name:
            assert low <= found[name] <= high, name
    assert "classwise_ece_low" not in found


def test_a_wider_level_gives_a_wider_interval():
    prediction, y = classes()
    narrow, wide = (score(prediction, y, bootstrap=100, level=level) for level in (0.5, 0.95))
    assert wide["nll_low"] < narrow["nll_low"] < narrow["nll_high"] < wide["nll_high"]


def test_the_interval_of_a_mean_has_the_ends_that_its_standard_error_gives():
    probs, y = draw(2_000, 3).softmax(1), torch.zeros(2_000).long()
    found = score(varlap.Prediction(probs=probs), y, only="nll", bootstrap=2_000, level=0.9)
    standard_error = probs[:, 0].log().std().item() / math.sqrt(2_000)
    for end, sign in (("low", -1), ("high", 1)):
        assert (found[f"nll_{end}"] - found["nll"]) / standard_error == pytest.approx(sign * 1.645, abs=0.2)


def overconfident():
    """Claims of 0.8 to 0.99 that come true for 0.6 of the items, in three positions each, some of them ignored."""
    generator = torch.Generator().manual_seed(0)
    claimed = 0.8 + 0.19 * torch.rand(200, 3, dtype=torch.float64, generator=generator)
    labels = (torch.rand(200, 1, generator=generator) > 0.6).long().expand(200, 3).clone()
    labels[torch.rand(200, 3, generator=generator) < 0.2] = -100
    return torch.stack([claimed, 1 - claimed], 1), labels


def test_intervals_of_scores_of_all_labels_are_as_wide_as_those_of_items_drawn_by_hand():
    """Ends of 1,000 draws each: the ratio of two widths has a standard error of about 4 %."""
    probs, y = overconfident()
    only, times = ("aurc", "ece", "adaptive_ece"), 1_000
    found = score(varlap.Prediction(probs=probs), y, only=only, level=0.9, bootstrap=times)
    generator = torch.Generator().manual_seed(1)
    by_hand = []
    for _ in range(times):
        drawn = torch.randint(len(y), (len(y),), generator=generator)
        by_hand.append(score(varlap.Prediction(probs=probs[drawn]), y[drawn], only=only))
    for name in only:
        low, high = found[f"{name}_low"], found[f"{name}_high"]
        assert low < found[name] < high, name
        ends = torch.tensor([each[name] for each in by_hand]).quantile(torch.tensor([0.05, 0.95]))
        assert (high - low) / float(ends[1] - ends[0]) == pytest.approx(1, abs=0.15), name


def test_intervals_cover_the_truth_at_about_their_level():
    """For an accuracy, a mean and a detection rate, in standard errors of the count of hits."""
    level, runs, size = 0.9, 120, 100
    generator = torch.Generator().manual_seed(0)
    only = ("nll", "accuracy", "ood_auroc_entropy")
    covered = dict.fromkeys(only, 0)
    probs_yes = torch.tensor([0.6, 0.9], dtype=torch.float64)
    by_kind = -(probs_yes * probs_yes.log() + (1 - probs_yes) * (1 - probs_yes).log())
    truth = {"nll": by_kind.mean().item(), "accuracy": 0.75, "ood_auroc_entropy": 0.5}
    for run in range(runs):
        p = probs_yes[torch.randint(2, (size,), generator=generator)]
        labels = (torch.rand(size, dtype=torch.float64, generator=generator) >= p).long()
        outside = probs_yes[torch.randint(2, (size,), generator=generator)]
        found = score(
            varlap.Prediction(probs=torch.stack([p, 1 - p], 1)),
            labels,
            ood=varlap.Prediction(probs=torch.stack([outside, 1 - outside], 1)),
            only=only,
            level=level,
            bootstrap=100,
            seed=run,
        )
        for name in only:
            covered[name] += found[f"{name}_low"] <= truth[name] <= found[f"{name}_high"]
    standard_error = math.sqrt(level * (1 - level) / runs)
    for name, count in covered.items():
        assert abs(count / runs - level) < 4 * standard_error, name


def test_an_item_is_drawn_with_all_its_positions():
    """Ten copies of each label are no more data: the intervals stay, where ten times the items narrow them."""
    probs, y = draw(60, 3).softmax(1), torch.arange(60) % 3
    single = score(varlap.Prediction(probs=probs), y, bootstrap=50)
    copies = probs[..., None].expand(60, 3, 10)
    several = score(varlap.Prediction(probs=copies), y[:, None].expand(60, 10), bootstrap=50)
    for name in ("accuracy", "brier", "ece"):
        for end in ("", "_low", "_high"):
            assert several[name + end] == pytest.approx(single[name + end], rel=1e-9)
    more = score(varlap.Prediction(probs=probs.repeat(10, 1)), y.repeat(10), bootstrap=50)
    assert more["brier_high"] - more["brier_low"] < 0.5 * (single["brier_high"] - single["brier_low"])


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_bad_settings_are_refused():
    with pytest.raises(
        ConfigError, match=r"only=\['acuracy'\]: there is no score 'acuracy'; did you mean 'accuracy'\?"
    ):
        Scores(["acuracy"])
    for name in ("auroc", "ood_auroc"):
        message = (
            f"there is no score '{name}'; auroc tells items of another distribution by their uncertainty: "
            r"ood_auroc_entropy, .*ood_auroc_epistemic_variance, with evaluate\(..., ood=inputs\)"
        )
        with pytest.raises(ConfigError, match=message):
            Scores([name])
    with pytest.raises(ConfigError, match="there is no score 'xyz'; there are nll, accuracy, "):
        Scores("xyz")
    with pytest.raises(ConfigError, match=r"level=95 must be between 0 and 1; 0.95 is usual"):
        Scores(level=95)
    with pytest.raises(ConfigError, match=r"Scores\(bootstrap=-1\) must be a whole number of at least 0"):
        Scores(bootstrap=-1)
    with pytest.raises(BatchError, match="the data hold no items; give at least one"):
        Scores().compute()


def test_bad_predictions_are_refused():
    prediction, y = classes()
    with pytest.raises(BatchError, match=r"probs of shape \(24, 7, 3\) do not fit labels of shape \(24, 2\)"):
        score(prediction, y[:, :2])
    with pytest.raises(BatchError, match=r"\(and Prediction\(exclusive=False\)\)"):
        score(varlap.Prediction(probs=torch.rand(4, 2)), torch.ones(4, 2))
    with pytest.raises(BatchError, match="label 7 is out of range"):
        score(varlap.Prediction(probs=prediction.probs), y * 0 + 7)
    with pytest.raises(BatchError, match=r"targets has shape \(24,\) but mean has \(24, 2\)"):
        score(regression()[0], torch.zeros(24))
    with pytest.raises(NonFiniteError, match="mean holds NaN or Inf"):
        score(varlap.Prediction(mean=torch.zeros(2) / 0), torch.zeros(2))
    with pytest.raises(ConfigError, match="made by hand, without outputs"):
        score(varlap.Prediction(), torch.zeros(2))
    with pytest.raises(
        ConfigError, match="ood needs predictions with probabilities or a variance, to tell inside from"
    ):
        Scores().add_ood(varlap.Prediction(mean=torch.zeros(2)))
    diverged = Scores(trusted=True)
    diverged.add(varlap.Prediction(probs=torch.full((2, 3), math.nan)), torch.zeros(2).long())
    assert math.isnan(diverged.compute()["nll"])
    diverged.add_ood(varlap.Prediction(probs=torch.full((2, 3), 1 / 3)))
    with pytest.raises(NonFiniteError, match="inside holds NaN"):
        diverged.compute()


def test_a_bootstrap_over_several_ranks_is_refused():
    scores = Scores(bootstrap=20)
    with pytest.raises(ConfigError, match=r"cannot be gathered from several ranks; leave out the bootstrap"):
        scores.gather()
