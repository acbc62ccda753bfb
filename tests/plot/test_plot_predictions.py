"""Plots of predictions against networks and predictions whose answers are known."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import varlap
from varlap import plot
from varlap.errors import BatchError, ConfigError


def straight_line(slope=2.0, noise=0.5):
    network = nn.Linear(1, 1).double()
    with torch.no_grad():
        network.weight.fill_(slope)
        network.bias.fill_(1.0)
    return varlap.BNN(network, varlap.Gaussian(noise=noise, learnt=False))


def by_label(artists):
    return {one.get_label(): one for one in artists}


def ends(band):
    """Return the lowest and highest y of a band by x."""
    corners = band.get_paths()[0].vertices
    return {x: (corners[corners[:, 0] == x, 1].min(), corners[corners[:, 0] == x, 1].max()) for x in set(corners[:, 0])}


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_bands_are_one_and_two_standard_deviations_around_the_mean(shape):
    ax = plot.regression_band(straight_line(), torch.tensor([1.0, -1.0, 0.0]).view(shape))
    (line,) = ax.lines
    assert line.get_xydata().tolist() == [[-1, -1], [0, 1], [1, 3]], "in order of x"
    bands = by_label(ax.collections)
    assert ends(bands["±1 std"])[1.0] == pytest.approx((2.5, 3.5))
    assert ends(bands["±2 std"])[-1.0] == pytest.approx((-2.0, 0.0))
    assert set(bands) == {"±1 std", "±2 std"}


def test_noise_is_drawn_apart_where_it_is_known():
    mean, noise = torch.zeros(2, 1), torch.tensor([[0.25], [1.0]])
    prediction = varlap.Prediction(mean=mean, variance=noise + 3, noise_variance=noise)
    ax = plot.regression_band(prediction, np.array([0.0, 1.0]))
    low, high = (line for line in ax.lines if line.get_linestyle() == "--")
    assert low.get_ydata() == pytest.approx([-1.0, -2.0])
    assert high.get_ydata() == pytest.approx([1.0, 2.0])
    assert ends(by_label(ax.collections)["±2 std"])[1.0] == pytest.approx((-4.0, 4.0))
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["mean", "±1 std", "±2 std", "±2 std of the noise"]


def test_training_points_are_drawn_where_they_are():
    train = np.array([[0.5], [0.25]]), torch.tensor([1.0, 2.0])
    ax = plot.regression_band(straight_line(), torch.zeros(2), train)
    points = by_label(ax.collections)["training data"].get_offsets()
    assert points.tolist() == [[0.5, 1.0], [0.25, 2.0]]


def test_regression_mistakes_are_named():
    with pytest.raises(BatchError, match=r"x has shape \(3, 2\).*give \[N\] or \[N, 1\]"):
        plot.regression_band(straight_line(), torch.zeros(3, 2))
    prediction = varlap.Prediction(mean=torch.zeros(2), variance=torch.ones(2))
    with pytest.raises(BatchError, match="the prediction has 2 items and x has 3"):
        plot.regression_band(prediction, torch.zeros(3))
    with pytest.raises(ConfigError, match="how= and its options are for a network"):
        plot.regression_band(prediction, torch.zeros(2), how="sampled")
    with pytest.raises(ConfigError, match="this prediction is of classes"):
        plot.regression_band(varlap.Prediction(probs=torch.ones(2, 1)), torch.zeros(2))


def halves(likelihood="categorical"):
    """Make a network whose odds of class 1 are exp(x₁)."""
    network = nn.Linear(2, 1 if likelihood == "bernoulli" else 2)
    with torch.no_grad():
        network.weight.zero_()
        network.weight[-1, 0] = 1
        network.bias.zero_()
    return varlap.BNN(network, likelihood)


def grid_of(ax):
    return np.asarray(ax.images[0].get_array())


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_plane_shows_the_probability_of_class_one(likelihood):
    ax = plot.decision_2d(halves(likelihood), limits=(-2, 2, -1, 1), resolution=5)
    expected = torch.linspace(-2, 2, 5).sigmoid().expand(5, 5).numpy()
    assert grid_of(ax) == pytest.approx(expected, abs=1e-6)
    assert ax.images[0].get_extent() == [-2, 2, -1, 1]
    assert ax.images[0].origin == "lower"
    assert ax.images[0].get_clim() == (0, 1)


def test_boundary_is_where_the_classes_are_as_probable():
    ax = plot.decision_2d(halves(), limits=(-2, 2.5, -1, 1), resolution=40)
    (boundary,) = [one for one in ax.collections if hasattr(one, "levels")]
    assert boundary.get_paths()[0].vertices[:, 0] == pytest.approx(0, abs=0.01)


def test_entropy_of_the_plane_is_in_nats():
    ax = plot.decision_2d(halves(), limits=(-2, 2, -1, 1), what="entropy", resolution=5)
    assert grid_of(ax)[:, 2] == pytest.approx(math.log(2))
    assert ax.images[0].get_clim() == pytest.approx((0, math.log(2)))
    assert ax.figure.axes[-1].get_ylabel() == "entropy (nats)"


def test_rows_of_the_plane_are_the_second_input():
    bnn = halves()
    with torch.no_grad():
        bnn.network.weight.copy_(bnn.network.weight.flip(1))
    ax = plot.decision_2d(bnn, limits=(-1, 1, -2, 2), resolution=5)
    assert grid_of(ax)[:, 0] == pytest.approx(torch.linspace(-2, 2, 5).sigmoid().numpy(), abs=1e-6)


def test_more_than_two_classes_show_the_most_probable_one():
    bnn = varlap.BNN(nn.Linear(2, 3))
    x = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])
    ax = plot.decision_2d(bnn, limits=(-1, 1, -1, 1), resolution=2)
    assert grid_of(ax).flatten() == pytest.approx(bnn.predict(x).probs.amax(1).numpy())
    assert ax.images[0].get_clim() == pytest.approx((1 / 3, 1))


def test_training_data_set_the_limits_and_are_drawn_by_class():
    x, y = np.array([[0.0, 0.0], [4.0, 2.0], [2.0, 1.0]]), [0, 1, 0]
    ax = plot.decision_2d(halves(), (x, y), resolution=5)
    assert ax.get_xlim() == pytest.approx((-1, 5))
    assert ax.get_ylim() == pytest.approx((-0.5, 2.5))
    points = by_label(one for one in ax.collections if not hasattr(one, "levels"))
    assert points["class 0"].get_offsets().tolist() == [[0, 0], [2, 1]]
    assert points["class 1"].get_offsets().tolist() == [[4, 2]]


def test_other_modes_of_prediction_are_asked_for_with_their_options(monkeypatch):
    asked = []

    def predict(self, x, **options):
        asked.append(options)
        probs = torch.full((len(x), 2), 0.5)
        return varlap.Prediction(probs=probs, expected_entropy=torch.full((len(x),), 0.25))

    monkeypatch.setattr(varlap.BNN, "predict", predict)
    ax = plot.decision_2d(
        halves(), limits=(0, 1, 0, 1), what="mutual_information", how="sampled", resolution=2, num_samples=7
    )
    assert grid_of(ax) == pytest.approx(math.log(2) - 0.25)
    plot.decision_2d(halves(), limits=(0, 1, 0, 1), resolution=2)
    assert asked == [{"how": "sampled", "num_samples": 7}, {"how": "mean"}]


def test_decision_mistakes_are_named():
    box = {"limits": (0, 1, 0, 1), "resolution": 2}
    with pytest.raises(ConfigError, match=r"what='risk'\): choose 'probability', 'entropy' or"):
        plot.decision_2d(halves(), what="risk", **box)
    with pytest.raises(ConfigError, match="one network has no mutual information; pass how='sampled'"):
        plot.decision_2d(halves(), what="mutual_information", **box)
    with pytest.raises(ConfigError, match=r"needs train=\(x, y\), or limits"):
        plot.decision_2d(halves())
    with pytest.raises(ConfigError, match=r"resolution=1\) must be a whole number of at least 2"):
        plot.decision_2d(halves(), limits=(0, 1, 0, 1), resolution=1)
    with pytest.raises(BatchError, match=r"inputs of shape \(3, 1\) and 3 labels; give inputs \[N, 2\]"):
        plot.decision_2d(halves(), (torch.zeros(3, 1), torch.zeros(3)))
    with pytest.raises(ConfigError, match="is for classes"):
        plot.decision_2d(varlap.BNN(nn.Linear(2, 1), "gaussian"), **box)
    with pytest.raises(BatchError, match=r"one label an input.*\(4, 3\)"):
        plot.decision_2d(varlap.BNN(nn.Linear(2, 3), "bernoulli"), **box)


def test_histograms_hold_the_share_of_each_entropy():
    inside, outside = torch.tensor([0.0, 0.1, 0.1, 0.9]), np.array([2.9, 3.0])
    ax = plot.entropy_histogram(inside, outside)
    found = by_label(ax.patches)
    values, edges, _ = found["in distribution"].get_data()
    assert edges == pytest.approx(np.linspace(0, 3, 31))
    assert values.sum() == pytest.approx(1)
    assert values[:2].sum() == pytest.approx(0.75)  # 0.1 lies on an edge
    assert values[8:10].sum() == pytest.approx(0.25)
    values, _, _ = found["out of distribution"].get_data()
    assert values[28:].sum() == pytest.approx(1)
    assert ax.get_legend().get_title().get_text() == "AUROC 1.000"


def test_entropies_are_those_of_the_predictions():
    sure, unsure = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.5, 0.5]])
    ax = plot.entropy_histogram(varlap.Prediction(probs=sure), unsure.numpy())
    assert ax.get_xlim()[1] == pytest.approx(math.log(2))
    assert ax.patches[0].get_data().values[0] == 1
    assert ax.patches[1].get_data().values[-1] == 1
    yes_or_no = varlap.Prediction(probs=torch.tensor([[0.5, 1.0]]), exclusive=False)
    ax = plot.entropy_histogram(sure, yes_or_no)
    assert ax.patches[1].get_data().values[[0, -1]].tolist() == [0.5, 0.5]
    assert ax.get_legend().get_title().get_text() == "AUROC 0.750"  # one tie


def test_certainty_everywhere_can_be_drawn():
    ax = plot.entropy_histogram(torch.zeros(3), torch.zeros(2))
    assert ax.get_legend().get_title().get_text() == "AUROC 0.500"


def test_entropies_that_cannot_be_drawn_are_named():
    with pytest.raises(BatchError, match="outside is empty, or holds NaN or Inf"):
        plot.entropy_histogram(torch.zeros(3), torch.tensor([math.nan]))
    with pytest.raises(BatchError, match="inside is empty"):
        plot.entropy_histogram(torch.zeros(0), torch.zeros(3))


PROBS = torch.tensor([[0.9, 0.1, 0.0], [0.4, 0.3, 0.3], [0.0, 1.0, 0.0], [0.2, 0.2, 0.6]])


def grey(count=4, height=2, width=3):
    return torch.arange(count).view(-1, 1, 1, 1).expand(count, 1, height, width) / count


def test_least_sure_images_come_first_and_wrong_ones_name_the_truth():
    ax = plot.least_sure(PROBS, grey(), torch.tensor([0, 2, 1, 2]), count=3, names=["a", "b", "c"])
    assert [text.get_text() for text in ax.texts] == ["a 40%\nnot c", "c 60%\n", "a 90%\n"]
    assert [text.get_color() == plot.style.DARK_RED for text in ax.texts] == [True, False, False]
    assert [float(image.get_array()[0, 0]) for image in ax.images] == pytest.approx([0.25, 0.75, 0.0])
    assert all(image.get_clim() == (0, 1) for image in ax.images)


def test_images_lie_side_by_side_within_the_axes():
    ax = plot.least_sure(PROBS.repeat(3, 1), grey(12), count=12)
    assert len(ax.images) == 12
    boxes = [image.get_extent() for image in ax.images]
    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    for box in boxes:
        assert left <= box[0] < box[1] <= right
        assert bottom <= box[2] < box[3] <= top
        assert (box[3] - box[2]) / (box[1] - box[0]) == pytest.approx(2 / 3, rel=0.2)
    for first in range(12):
        for second in range(first):
            a, b = boxes[first], boxes[second]
            assert a[0] >= b[1] or b[0] >= a[1] or a[2] >= b[3] or b[2] >= a[3]
    assert boxes[0][0] < boxes[1][0]
    assert boxes[0][2] > boxes[-1][2], "from the top"


def test_grey_and_colour_images_of_any_layout_are_the_same_picture():
    image = torch.rand(1, 3, 4, 5)
    one = PROBS[:1]
    for same in (image, image.numpy(), image.movedim(1, -1), (image * 255).round().to(torch.uint8)):
        drawn = np.asarray(plot.least_sure(one, same).images[0].get_array())
        assert drawn == pytest.approx(image[0].movedim(0, -1).numpy(), abs=2 / 255)
    flat = image[:, :1]
    for same in (flat, flat[:, 0], flat.movedim(1, -1)):
        assert np.asarray(plot.least_sure(one, same).images[0].get_array()) == pytest.approx(flat[0, 0].numpy())


def test_normalised_images_are_brought_back_into_range():
    drawn = np.asarray(plot.least_sure(PROBS[:1], torch.tensor([[[-1.0, 0.0, 3.0]]])).images[0].get_array())
    assert drawn.tolist() == [[0.0, 0.25, 1.0]]


def test_long_names_get_smaller_letters():
    short = plot.least_sure(PROBS, grey(), names=["a", "b", "c"]).texts[0].get_fontsize()
    long = plot.least_sure(PROBS, grey(), names=["a rather long name"] * 3).texts[0].get_fontsize()
    assert 5 <= long < short <= 8.5


def test_image_mistakes_are_named():
    with pytest.raises(BatchError, match="3 images for 4 predictions"):
        plot.least_sure(PROBS, grey(3))
    with pytest.raises(BatchError, match="3 labels for 4 predictions"):
        plot.least_sure(PROBS, grey(), torch.zeros(3))
    with pytest.raises(BatchError, match=r"images have shape \(4, 2, 8, 8\)"):
        plot.least_sure(PROBS, torch.zeros(4, 2, 8, 8))
    with pytest.raises(BatchError, match=r"needs probabilities \[N, K\]"):
        plot.least_sure(PROBS[:, 0], grey())
    with pytest.raises(ConfigError, match=r"count=0\) must be a whole number of at least 1"):
        plot.least_sure(PROBS, grey(), count=0)
    with pytest.raises(ConfigError, match="2 names for 3 classes"):
        plot.least_sure(PROBS, grey(), names=["a", "b"])
