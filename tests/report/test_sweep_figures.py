"""Figures 1 and 2 and the NLL over epochs: what is drawn is what the results say."""

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

from made_results import made_result, made_sweep
from varlap.experiments import Result
from varlap.experiments.grid import paper_numbers
from varlap.experiments.ways import NAMES, PAPERS
from varlap.report import sweep_figures
from varlap.report.sweep_figures import figure_1, figure_2, over_epochs
from varlap.report.sweeps import sweeps

Points = list[tuple[float, float]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Axes]:
    """Return the axes of every picture that is drawn, by its name."""
    found: dict[str, Axes] = {}
    original = sweep_figures.drawn

    def kept(name: str, draw: Callable[[], Axes], alt: str, caption: str) -> sweep_figures.Drawn:
        found[name] = draw()
        return original(name, draw, alt, caption)

    monkeypatch.setattr(sweep_figures, "drawn", kept)
    return found


def _lines(ax: Axes) -> dict[str, Points]:
    """Return the points of the lines that have a name and are no mere words of the legend."""
    points = {str(line.get_label()): list(zip(*line.get_data(), strict=True)) for line in ax.lines}
    return {name: each for name, each in points.items() if each and not name.startswith("_")}


def _unnamed(ax: Axes) -> list[Points]:
    return [list(zip(*line.get_data(), strict=True)) for line in ax.lines if str(line.get_label()).startswith("_")]


def _score(run: Result, way: str, score: str) -> float:
    return -run.test[way]["nll"] if score == "log-likelihood" else run.test[way][score]


@pytest.mark.parametrize(("score", "place"), [("log-likelihood", 0), ("accuracy", 1), ("ece", 2)])
def test_figure_1_has_the_scores_of_every_beta_rings_at_the_chosen_ones_and_the_papers_values(
    drawn: dict[str, Axes], score: str, place: int
):
    runs = made_sweep()
    (sweep,) = sweeps(runs)
    figure_1(sweep, "x")
    ax = drawn[f"x-figure-1-{score}"]
    of = {
        key: {run.spec.beta: _score(run, key[1], score) for run in runs if run.spec.method == key[0]} for key in PAPERS
    }
    assert _lines(ax) == {NAMES[key]: [*points.items()] for key, points in of.items()}
    rings, dotted = _unnamed(ax)[::2], _unnamed(ax)[1::2]
    chosen = {("vl", "mean"): 0.1, ("vi", "mean"): 0.1, ("vi", "sampled"): 0.1, ("map", "mean"): 0.01}
    assert rings == [[(beta, of[key][beta])] for key, beta in chosen.items()]
    theirs = [paper_numbers("table-1")["cifar10"][NAMES[key]][place] for key in PAPERS]
    sign = -1 if score == "log-likelihood" else 1
    assert [{y for _, y in points} for points in dotted] == [{sign * value} for value in theirs]


def _num_pixels(ax: Axes, y: float, colour: str) -> int:
    """Count the pixels of a colour about a height."""
    canvas = FigureCanvasAgg(ax.get_figure(root=True))
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[:, :, :3]
    row = round(len(pixels) - ax.transData.transform((1, y))[1])
    return int((pixels[row - 2 : row + 3] == [round(255 * part) for part in to_rgb(colour)]).all(-1).sum())


def test_papers_values_that_are_the_same_can_all_be_seen(drawn: dict[str, Axes]):
    (sweep,) = sweeps(made_sweep(data="fashion_mnist"))
    figure_1(sweep, "x")
    ax = drawn["x-figure-1-log-likelihood"]
    same = [str(line.get_color()) for line in ax.lines if list(line.get_ydata()) == [-0.29, -0.29]]
    found = [_num_pixels(ax, -0.29, colour) for colour in same]
    assert len(set(same)) == len(found) == 2  # VI's by samples, and MAP's
    assert min(found) > 0.7 * max(found)


def test_two_points_are_no_curve_and_three_are(drawn: dict[str, Axes]):
    for betas in ((0.01, 0.1), (0.01, 0.03, 0.1)):
        (sweep,) = sweeps([made_result("vl", beta) for beta in betas])
        figure_1(sweep, "x")
        (line,) = [line for line in drawn["x-figure-1-ece"].lines if line.get_label() == "VL"]
        assert (line.get_marker(), line.get_linestyle()) == ("o", "-" if len(betas) > 2 else "None")


def test_figure_1_compares_beta_by_the_seeds_that_all_of_them_have(drawn: dict[str, Axes]):
    lucky = made_result("vl", 0.1, seed=1)
    lucky = dataclasses.replace(lucky, test={way: {**scores, "nll": 0.0} for way, scores in lucky.test.items()})
    runs = made_sweep()
    (sweep,) = sweeps([*runs, lucky])
    figures = figure_1(sweep, "x")
    expected = [(run.spec.beta, -run.test["mean"]["nll"]) for run in runs if run.spec.method == "vl"]
    assert _lines(drawn["x-figure-1-log-likelihood"])["VL"] == expected
    assert "Means over the seeds that all β of a method have." in figures[0].picture.caption
    (sweep,) = sweeps([made_result("vl", beta, seed=seed) for beta in (0.01, 0.1) for seed in (0, 1)])
    figure_1(sweep, "x")
    means = [
        -sum(run.test["mean"]["nll"] for run in sweep.results if run.spec.beta == beta) / 2 for beta in (0.01, 0.1)
    ]
    assert [y for _, y in _lines(drawn["x-figure-1-log-likelihood"])["VL"]] == pytest.approx(means)


def test_a_chosen_beta_that_shares_no_seed_with_others_is_left_out_of_figure_1(drawn: dict[str, Axes]):
    (sweep,) = sweeps([made_result("vl", 0.01), made_result("vl", 0.03), made_result("vl", 0.1, seed=1)])
    figure_1(sweep, "x")
    assert [beta for beta, _ in _lines(drawn["x-figure-1-ece"])["VL"]] == [0.01, 0.03]


def test_rings_and_dotted_lines_are_named_in_a_legend_that_covers_nothing(drawn: dict[str, Axes]):
    (sweep,) = sweeps(made_sweep())
    figure_1(sweep, "x")
    for ax in drawn.values():
        ax.figure.draw_without_rendering()
        legend = ax.get_legend()
        words = [text.get_text() for text in legend.get_texts()]
        assert words == [*(NAMES[key] for key in PAPERS), "chosen by held-out images", "paper's best value"]
        assert legend.get_window_extent().y0 >= ax.get_window_extent().y1
    (other,) = sweeps(made_sweep(model="mlp"))
    figure_1(other, "x")
    assert "paper's best value" not in [text.get_text() for text in drawn["x-figure-1-ece"].get_legend().get_texts()]


def test_no_legend_covers_a_line(drawn: dict[str, Axes]):
    (sweep,) = sweeps(made_sweep())
    over_epochs(sweep, "x")
    (early,) = sweeps([made_result("vl", 0.1, log_sigma_lr_multiplier=multiplier) for multiplier in (1.0, 10.0)])
    figure_2(early, "x")
    assert len(drawn) == 5
    for ax in drawn.values():
        ax.figure.draw_without_rendering()
        assert ax.get_legend().get_window_extent().y0 >= ax.get_window_extent().y1


@pytest.mark.parametrize(
    "betas", [(0.005, 0.01), (0.003, 0.005, 0.01, 0.1, 0.3), (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)]
)
def test_every_beta_has_a_label_and_labels_do_not_overlap(drawn: dict[str, Axes], betas: tuple[float, ...]):
    (sweep,) = sweeps([made_result("vl", beta) for beta in betas])
    figure_1(sweep, "x")
    ax = drawn["x-figure-1-log-likelihood"]
    ax.figure.draw_without_rendering()
    labels = ax.get_xticklabels()
    assert [label.get_text().strip() for label in labels] == [f"{beta:g}" for beta in betas]
    for line in (True, False):
        boxes = [label.get_window_extent() for label in labels if label.get_text().startswith("\n") == line]
        assert all(one.x1 < other.x0 for one, other in itertools.pairwise(boxes))


def test_the_nll_over_the_epochs_is_that_of_the_chosen_run(drawn: dict[str, Axes]):
    def learns_its_own_way(run: Result, number: int) -> Result:
        names = ("log_likelihood", "validation_nll")
        rows = ({**row, **{name: number * row[name] for name in names}} for row in run.history)
        return dataclasses.replace(run, history=tuple(rows))

    runs = [learns_its_own_way(run, number) for number, run in enumerate(made_sweep(), start=1)]
    (sweep,) = sweeps(runs)
    over_epochs(sweep, "x")
    ax = drawn["x-over-epochs"]
    names = {("vl", 0.1): "VL, β 0.1", ("vi", 0.1): "VI, mean network, β 0.1", ("map", 0.01): "MAP, β 0.01"}
    histories = {(run.spec.method, run.spec.beta): run.history for run in runs}
    chosen = {name: histories[key] for key, name in names.items()}
    assert _lines(ax) == {
        name: [(row["epoch"] + 1, row["validation_nll"]) for row in rows] for name, rows in chosen.items()
    }
    assert _unnamed(ax) == [[(row["epoch"] + 1, -row["log_likelihood"]) for row in rows] for rows in chosen.values()]


MULTIPLIERS = (1.0, 3.0, 10.0, 30.0)


def _faster(**spec: int) -> list[Result]:
    return [
        made_result(method, 0.1, log_sigma_lr_multiplier=multiplier, **spec)
        for method in ("vi", "vl")
        for multiplier in MULTIPLIERS
    ]


def test_figure_2_has_the_elbo_of_every_epoch_and_the_final_scores(drawn: dict[str, Axes]):
    runs = _faster()
    (sweep,) = sweeps(runs)
    figure_2(sweep, "x")
    for method in ("vi", "vl"):
        own = [run for run in runs if run.spec.method == method]
        assert _lines(drawn[f"x-figure-2-beta-0.1-{method}-elbo"]) == {
            f"× {run.spec.log_sigma_lr_multiplier:g}": [(row["epoch"] + 1, row["elbo"]) for row in run.history]
            for run in own
        }
        finals = {
            "log-likelihood": [-run.test["mean"]["nll"] for run in own],
            "accuracy": [run.test["mean"]["accuracy"] for run in own],
            "elbo": [run.history[-1]["elbo"] for run in own],
        }
        for score, values in finals.items():
            points = _lines(drawn[f"x-figure-2-beta-0.1-{score}"])[method.upper()]
            assert points == list(zip(MULTIPLIERS, values, strict=True))


def test_the_elbos_of_late_epochs_fill_the_axis_and_what_is_cut_off_is_said(drawn: dict[str, Axes]):
    runs = _faster(num_epochs=40)
    (sweep,) = sweeps(runs)
    captions = {one.name: one.picture.caption for one in figure_2(sweep, "x")[0.1]}
    ax = drawn["x-figure-2-beta-0.1-vl-elbo"]
    slowest, *faster = [run for run in runs if run.spec.method == "vl"]
    shown = [slowest.history[-1]["elbo"], *(row["elbo"] for run in faster for row in run.history[10:])]
    bottom, top = ax.get_ylim()
    assert bottom < min(shown) < max(shown) < top
    assert max(shown) - min(shown) > 0.9 * (top - bottom)
    assert slowest.history[0]["elbo"] < bottom
    assert ax.get_ylabel() == "ELBO (nats per datum; lower ones cut off)"
    assert (
        "Lower ones, of early epochs and of the slowest log σ, are cut off." in captions["x-figure-2-beta-0.1-vl-elbo"]
    )


def test_where_no_elbo_is_cut_off_none_is_said_to_be(drawn: dict[str, Axes]):
    (sweep,) = sweeps(_faster(num_epochs=1))
    found = figure_2(sweep, "x")[0.1]
    assert drawn["x-figure-2-beta-0.1-vl-elbo"].get_ylabel() == "ELBO (nats per datum)"
    assert not any("cut off" in one.picture.caption for one in found)


def test_a_multiplier_whose_first_seed_diverged_is_named_and_compared_by_the_seeds_of_all(drawn: dict[str, Axes]):
    later = _faster(seed=1)
    runs = [run for run in (*_faster(), *later) if (run.spec.seed, run.spec.log_sigma_lr_multiplier) != (0, 30.0)]
    (sweep,) = sweeps(runs)
    figure_2(sweep, "x")
    ax = drawn["x-figure-2-beta-0.1-vl-elbo"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["× 1", "× 3", "× 10", "× 30"]
    assert len(ax.lines) == 7
    expected = [-run.test["mean"]["nll"] for run in later if run.spec.method == "vl"]
    assert [y for _, y in _lines(drawn["x-figure-2-beta-0.1-log-likelihood"])["VL"]] == expected


def test_a_multiplier_looks_the_same_for_vi_and_for_vl_that_lacks_another(drawn: dict[str, Axes]):
    runs = [r for r in _faster() if (r.spec.method, r.spec.log_sigma_lr_multiplier) != ("vl", 30.0)]
    (sweep,) = sweeps(runs)
    figure_2(sweep, "x")
    vi, vl = (
        {
            line.get_label(): (line.get_color(), line.get_linestyle())
            for line in drawn[f"x-figure-2-beta-0.1-{m}-elbo"].lines
        }
        for m in ("vi", "vl")
    )
    assert vl == {label: look for label, look in vi.items() if label != "× 30"}
