"""Calibration plots against bins that were filled by hand."""

import numpy as np
import pytest
import torch

import varlap
from varlap import plot
from varlap.errors import BatchError, ConfigError

# Ten bins: (0.5, 0.6] holds two items, one right; (0.7, 0.8] one, wrong; (0.9, 1] four, all right.
CONFIDENCE = [0.52, 0.58, 0.75, 0.92, 0.94, 0.96, 0.98]
RIGHT = [1, 0, 0, 1, 1, 1, 1]
LEFT, ACCURACY, MEAN, COUNT = [0.5, 0.7, 0.9], [0.5, 0.0, 1.0], [0.55, 0.75, 0.95], [2, 1, 4]
ECE = (2 * 0.05 + 1 * 0.75 + 4 * 0.05) / 7


@pytest.fixture
def case():
    confidence = torch.tensor(CONFIDENCE, dtype=torch.float64)
    probs = torch.stack([1 - confidence, confidence], 1)
    return probs, torch.tensor(RIGHT)


def strip_of(ax):
    return [(one.get_data().values, one.get_data().edges) for one in ax.patches if hasattr(one, "get_data")]


def test_bars_stand_at_the_bins_and_are_as_high_as_their_accuracy(case):
    ax = plot.reliability(*case, bins=10)
    bars, gaps = ax.containers
    assert [bar.get_x() for bar in bars] == pytest.approx(LEFT)
    assert [bar.get_width() for bar in bars] == pytest.approx([0.1] * 3)
    assert [bar.get_height() for bar in bars] == pytest.approx(ACCURACY)
    assert [gap.get_y() for gap in gaps] == pytest.approx(ACCURACY)
    assert [gap.get_y() + gap.get_height() for gap in gaps] == pytest.approx(MEAN)


def test_error_is_printed_with_three_digits(case):
    legend = plot.reliability(*case, bins=10).get_legend()
    assert legend.get_title().get_text() == f"ECE {ECE:.3f}" == "ECE 0.150"
    assert [text.get_text() for text in legend.get_texts()] == ["accuracy", "gap to confidence"]


@pytest.mark.parametrize("num_methods", [0, 1, 2, 3, 5])
def test_legend_hides_nothing(case, num_methods):
    probs, labels = case
    ax = plot.reliability({f"VL {index}": probs for index in range(num_methods)} if num_methods else probs, labels)
    ax.figure.canvas.draw()
    box = ax.get_legend().get_window_extent().transformed(ax.transData.inverted())
    assert box.y0 > 1
    assert box.x1 < 1
    assert box.y1 <= ax.get_ylim()[1]


def test_strip_below_holds_the_share_of_items_in_each_bin(case):
    ax = plot.reliability(*case, bins=10)
    ((values, edges),) = strip_of(ax)
    expected = np.zeros(10)
    expected[[5, 7, 9]] = np.array(COUNT) / 4  # the fullest bin is the highest
    bottom = values[0]
    assert (values - bottom) / (values.max() - bottom) == pytest.approx(expected)
    assert edges == pytest.approx(np.linspace(0, 1, 11))
    assert values.max() - bottom == pytest.approx(0.2), "the fullest bin fills the strip"
    assert values.max() < 0, "it stays under the diagram"
    assert bottom == pytest.approx(ax.get_ylim()[0])
    assert "57%" in ax.texts[0].get_text()  # 4 of 7


def test_several_methods_are_lines_through_mean_confidence_and_accuracy(case):
    probs, labels = case[0].repeat(10, 1), case[1].repeat(10)
    ax = plot.reliability({"VL": probs, "MAP": probs.flip(1)}, labels, bins=10)
    diagonal, vl, other = (line for line in ax.lines if len(line.get_xdata()) > 2 or line.get_linestyle() == "--")
    assert diagonal.get_xydata().tolist() == [[0, 0], [1, 1]]
    assert vl.get_xdata() == pytest.approx(MEAN)
    assert vl.get_ydata() == pytest.approx(ACCURACY)
    assert other.get_ydata() == pytest.approx([0.5, 1.0, 0.0])
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["VL, ECE 0.150", f"MAP, ECE {(2 * 0.05 + 0.25 + 4 * 0.95) / 7:.3f}"]
    areas = ax.collections[0].get_sizes()
    assert areas[2] / areas[0] == pytest.approx(2**0.5)  # four items against two
    assert len(strip_of(ax)) == 2


def test_bins_of_few_items_are_faint_and_no_line_goes_through_them(case):
    probs, labels = case[0].repeat(5, 1), case[1].repeat(5)  # 10, 5 and 20 items
    ax = plot.reliability({"VL": probs}, labels, bins=10)
    (line,) = (line for line in ax.lines if line.get_alpha() == 0.6)
    assert line.get_ydata() == pytest.approx([ACCURACY[0], float("nan"), ACCURACY[2]], nan_ok=True)
    enough, few = ax.collections
    assert few.get_offsets().tolist() == [pytest.approx([MEAN[1], ACCURACY[1]])]
    assert (few.get_alpha(), enough.get_alpha()) == (0.25, None)


def test_yes_or_no_is_judged_by_how_often_a_yes_comes_true(case):
    probs, labels = case
    for prediction in (
        probs[:, 1],
        varlap.Prediction(probs=probs[:, 1], exclusive=False),
        varlap.Prediction(probs=probs[:, 1:], exclusive=False),
    ):
        target = labels[:, None] if isinstance(prediction, varlap.Prediction) and prediction.probs.ndim == 2 else labels
        ax = plot.reliability(prediction, target, bins=10)
        oracle = [float(labels[found].double().mean()) for found in in_tenths(probs[:, 1]) if found.any()]
        assert [bar.get_height() for bar in ax.containers[0]] == pytest.approx(oracle)
        assert ax.get_legend().get_title().get_text() == f"ECE {varlap.metrics.ece(probs[:, 1], labels, bins=10):.3f}"
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("probability of a yes", "frequency of a yes")


def in_tenths(probs):
    return [(probs > tenth / 10) & (probs <= (tenth + 1) / 10) for tenth in range(10)]


def test_positions_are_counted_one_by_one_and_ignored_ones_not(case):
    probs, labels = case
    more = torch.cat([probs, torch.tensor([[0.35, 0.65]], dtype=torch.float64)])  # the eighth is ignored
    at_positions = more.view(4, 2, 2).movedim(-1, 1)
    ax = plot.reliability(at_positions, torch.cat([labels, torch.tensor([-100])]).view(4, 2), bins=10)
    assert [bar.get_x() for bar in ax.containers[0]] == pytest.approx(LEFT)
    likelihood = varlap.Categorical(ignored_label=-1)
    prediction = varlap.Prediction(probs=more, likelihood=likelihood)
    ax = plot.reliability(prediction, torch.cat([labels, torch.tensor([-1])]), bins=10)
    assert [bar.get_x() for bar in ax.containers[0]] == pytest.approx(LEFT)


def test_arrays_and_low_precision_are_drawn_as_tensors_are(case):
    probs, labels = case
    for same in (probs.numpy(), varlap.Prediction(probs=probs.clone().requires_grad_()), probs.bfloat16()):
        ax = plot.reliability(same, labels.numpy(), bins=10)
        assert [bar.get_height() for bar in ax.containers[0]] == pytest.approx(ACCURACY)


def test_probabilities_of_half_precision_add_up_to_one(case):
    probs, _ = plot.inputs.probabilities(case[0].bfloat16(), "reliability")
    assert (case[0].bfloat16().float().sum(1) - 1).abs().max() > 1e-4
    assert probs.sum(1).numpy() == pytest.approx(1, abs=1e-6)


def test_risk_is_the_error_rate_among_the_surest(case):
    probs, labels = case
    ax = plot.risk_coverage(probs, labels)
    (line,) = ax.lines
    assert line.get_xdata() == pytest.approx(np.arange(1, 8) / 7)
    assert line.get_ydata() == pytest.approx([0, 0, 0, 0, 1 / 5, 2 / 6, 2 / 7])
    assert ax.get_legend() is None
    ax = plot.risk_coverage({"VL": probs, "MAP": probs.flip(1)}, labels)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["VL", "MAP"]
    assert ax.lines[1].get_ydata()[-1] == pytest.approx(5 / 7)


def test_mistakes_are_named(case):
    probs, labels = case
    with pytest.raises(BatchError, match=r"plot.reliability needs labels of shape \(7,\).*got \(6,\)"):
        plot.reliability(probs, labels[:6])
    with pytest.raises(BatchError, match=r"label 2 is out of range for probabilities of 2 classes.* from 0 to 1"):
        plot.risk_coverage(probs, labels + 1)
    with pytest.raises(BatchError, match="label -1 is out of range"):
        plot.risk_coverage(probs, labels - 1)
    with pytest.raises(BatchError, match="no items to count"):
        plot.reliability(probs, torch.full((7,), -100))
    with pytest.raises(ConfigError, match="is for classes"):
        plot.reliability(varlap.Prediction(mean=torch.zeros(7), variance=torch.ones(7)), labels)
    with pytest.raises(ConfigError, match="nothing to draw"):
        plot.reliability({}, labels)
    with pytest.raises(ConfigError, match=r"bins=0\) must be a whole number of at least 1"):
        plot.reliability(probs, labels, bins=0)
