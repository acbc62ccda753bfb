"""What holds for every plot: it draws where it is told, and leaves matplotlib as it was."""

import inspect
import subprocess
import sys

import matplotlib
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch import nn

import varlap
from varlap import plot
from varlap.errors import MissingExtraError

PROBS, LABELS = torch.tensor([[0.9, 0.1], [0.35, 0.65], [0.55, 0.45]]), torch.tensor([0, 0, 1])
ROW = {"epoch": 0, "elbo": -1.0, "log_likelihood": -0.5, "curvature": 0.25, "kl": 0.5}


def network(num_inputs=2, likelihood="categorical", num_outputs=2):
    return varlap.BNN(nn.Linear(num_inputs, num_outputs), likelihood)


def travelling(**options):
    bnn = network()
    fisher = {name: torch.ones_like(mean) for name, mean in bnn.means().items()}
    return plot.travelling_variances(bnn, fisher, 10, 1.0, log_sigma_lr=0.1, steps_left=3, **options)


DRAW = {
    "reliability": lambda **options: plot.reliability({"VL": PROBS, "MAP": PROBS}, LABELS, **options),
    "risk_coverage": lambda **options: plot.risk_coverage({"VL": PROBS, "MAP": PROBS}, LABELS, **options),
    "elbo_terms": lambda **options: plot.elbo_terms([ROW], **options),
    "sigma_over_s": lambda **options: plot.sigma_over_s(network(), **options),
    "travelling_variances": travelling,
    "regression_band": lambda **options: plot.regression_band(network(1, "gaussian", 1), torch.arange(3.0), **options),
    "decision_2d": lambda **options: plot.decision_2d(network(), (torch.randn(3, 2), LABELS), resolution=5, **options),
    "entropy_histogram": lambda **options: plot.entropy_histogram(PROBS, PROBS, **options),
    "least_sure": lambda **options: plot.least_sure(PROBS, torch.rand(3, 1, 4, 4), LABELS, **options),
}

every_plot = pytest.mark.parametrize("name", DRAW)


def test_every_public_plot_is_checked_here():
    assert set(DRAW) == set(plot.__all__)


@every_plot
def test_given_axes_are_drawn_on_and_returned(name):
    figure, (left, right) = plt.subplots(1, 2)
    try:
        before = plt.get_fignums()
        assert DRAW[name](ax=right) is right
        assert right.has_data()
        assert not left.has_data()
        assert right.figure is figure
        assert plt.get_fignums() == before
    finally:
        plt.close(figure)


@every_plot
def test_new_figure_is_not_kept_by_pyplot_and_can_be_saved(name, tmp_path):
    before = plt.get_fignums()
    ax = DRAW[name]()
    assert plt.get_fignums() == before
    ax.figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1_000


@every_plot
def test_settings_of_matplotlib_stay_as_they_were(name):
    settings, backend = dict(matplotlib.rcParams), matplotlib.get_backend()
    DRAW[name]().figure.canvas.draw()
    assert dict(matplotlib.rcParams) == settings
    assert matplotlib.get_backend() == backend


@every_plot
def test_axes_are_labelled_and_keep_their_own_background(name):
    with matplotlib.rc_context({"axes.facecolor": "#123456"}):
        ax = DRAW[name]()
        assert ax.get_facecolor() == matplotlib.colors.to_rgba("#123456")
    if name != "least_sure":  # images have no axes
        assert ax.get_xlabel()
        assert ax.get_ylabel() or name == "sigma_over_s"  # whose ticks are names


@every_plot
def test_words_stay_within_a_new_figure_and_apart_from_each_other(name):
    ax = DRAW[name]()
    figure = ax.figure
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    words = [text for text in ax.texts if text.get_text().strip()]
    boxes = [text.get_window_extent(renderer) for text in words]
    outer = figure.bbox.padded(1)
    shown = [ax.xaxis.label, ax.yaxis.label] if ax.axison else []
    for box in boxes + [label.get_window_extent(renderer) for label in shown if label.get_text()]:
        assert outer.x0 <= box.x0
        assert box.x1 <= outer.x1
        assert outer.y0 <= box.y0
        assert box.y1 <= outer.y1
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index])


@every_plot
def test_one_line_names_the_pip_command_where_matplotlib_is_missing(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError) as caught:
        DRAW[name]()
    assert (
        str(caught.value) == f"varlap.plot.{name} needs an optional dependency: pip install '.[plot]' in the checkout"
    )


@every_plot
def test_plot_is_documented_with_an_example_and_takes_axes_by_name(name):
    function = getattr(plot, name)
    assert ">>>" in function.__doc__
    parameter = inspect.signature(function).parameters["ax"]
    assert parameter.default is None
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY


def test_colours_are_many_and_distinct_and_repeat_after_the_last():
    assert len(set(plot.style.PALETTE)) == 6
    assert plot.style.colour(7) == plot.style.PALETTE[1]


def test_matplotlib_is_not_imported_before_the_first_plot():
    code = "import sys, varlap.plot; assert 'matplotlib' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
