"""Figures 1 and 2 of the paper, and how the chosen runs learn, from the results of `varlap reproduce`."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from varlap.experiments import Result
from varlap.experiments.spec import Method
from varlap.experiments.ways import NAMES, PAPERS, Key, Way
from varlap.plot import style
from varlap.report.figures import Picture, as_png, draw_picture
from varlap.report.sweeps import METHODS, Compared, Sweep, comparable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SCORES = {"accuracy": "test accuracy", "log_likelihood": "test log-likelihood", "ece": "ECE"}
_FINALS = {"log_likelihood": "test log-likelihood", "accuracy": "test accuracy", "elbo": "ELBO"}
COLOURS = {"vl": 0, "vi": 1, "map": 3}
"""of the palette, as in Figure 1"""
_RING: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 11, "markerfacecolor": "none"}
_DOTTED: dict[str, Any] = {"linestyle": ":", "linewidth": 1}
_DOT = 2.5  # of a dotted line, in its widths
_CHARACTER, _GAP = 0.027, 0.02  # widths in ticks' labels and between them, as parts of what the ticks span
_ROOM = 0.05  # above and below what an axis that is cut shows, as a part of it
_FEWEST_IN_A_LINE = 3
_WITH_LEGEND = (4.2, 3.7)  # inches, with room above
_LOG_MULTIPLIER = "multiplier of log σ's learning rate"


@dataclass(frozen=True)
class Drawn:
    """A picture for the page, and the same as files."""

    name: str
    picture: Picture
    png: bytes

    @property
    def files(self) -> dict[str, bytes]:
        """The files beside the page, by name."""
        return {f"figures/{self.name}.svg": self.picture.content, f"figures/{self.name}.png": self.png}


def figure_1(sweep: Sweep, prefix: str) -> list[Drawn]:
    """Draw accuracy, log-likelihood and ECE against β, where a method has several."""
    series = {key: runs for key in PAPERS if (runs := [r for r in sweep.of(key[0]) if key[1] in r.test])}
    if not any(len({run.spec.beta for run in runs}) > 1 for runs in series.values()):
        return []
    chosen = {key: choice.beta for key, choice in sweep.choices().items()}
    theirs = sweep.papers_scores

    def draw(score: str) -> "Axes":
        ax = style.axes_for(None, "figure_1", _WITH_LEGEND)
        means: dict[Key, dict[float, float]] = {}
        for key, runs in series.items():
            number = PAPERS.index(key)  # a method has its colour whoever else is there
            found = means[key] = _means(runs, "beta", lambda run, way=key[1]: _score(run, way, score))
            colour = style.colour(number)
            ax.plot(*_xy(found), color=colour, **_marks(number, found), markersize=4, label=NAMES[key])
            if (at := chosen.get(key)) in found:
                ax.plot([at], [found[at]], **_RING, markeredgecolor=colour)
            if NAMES[key] in theirs:
                dots = (number * _DOT, (_DOT, (len(PAPERS) - 1) * _DOT))  # each in the gaps of the others
                ax.axhline(_papers(theirs[NAMES[key]], score), linestyle=dots, linewidth=1.2, color=colour)
        _log_axis(ax, sorted({beta for found in means.values() for beta in found}))
        style.tidy(ax, "β", _SCORES[score])
        if score == "accuracy":
            ax.yaxis.set_major_formatter(style.percent())
        if chosen:
            ax.plot([], [], **_RING, markeredgecolor=style.GREY, label="chosen by held-out images")
        if theirs:
            ax.plot([], [], **_DOTTED, color=style.GREY, label="paper's best value")
        _legend_above(ax)
        return ax

    several = any(len(runs) > len({run.spec.beta for run in runs}) for runs in series.values())
    told = ", ".join(f"{NAMES[key]} chooses β {chosen[key]:g}" for key in series if key in chosen)
    return [
        drawn(
            f"{prefix}-figure-1-{score.replace('_', '-')}",
            lambda score=score: draw(score),
            f"{_SCORES[score]} against β on {sweep.title}; {told}",
            f"{_SCORES[score].capitalize() if score != 'ece' else 'ECE'} against β."
            + (" Rings: the β that held-out images choose." if chosen else "")
            + (f" Dotted: the paper's best value{sweep.after}." if theirs else "")
            + (" Means over the seeds that all β of a method have." if several else ""),
        )
        for score in _SCORES
    ]


def over_epochs(sweep: Sweep, prefix: str) -> list[Drawn]:
    """Draw the NLL of training and held-out images over the epochs, for the run that each method has chosen."""
    chosen: dict[Method, Result] = {}
    for key, choice in sweep.choices().items():
        run = choice.by_validation[0]
        if key in PAPERS and sum("validation_nll" in row for row in run.history) > 1:
            chosen.setdefault(key[0], run)
    if not chosen:
        return []

    def draw() -> "Axes":
        ax = style.axes_for(None, "over_epochs", _WITH_LEGEND)
        for method, run in chosen.items():
            colour = style.colour(COLOURS[method])
            trained = [(row["epoch"] + 1, -row["log_likelihood"]) for row in run.history]
            scored = [row for row in run.history if "validation_nll" in row]  # not every epoch of a long training is
            held_out = [(row["epoch"] + 1, row["validation_nll"]) for row in scored]
            ax.plot(*zip(*held_out, strict=True), color=colour, label=f"{_network(method)}, β {run.spec.beta:g}")
            ax.plot(*zip(*trained, strict=True), color=colour, linestyle=":")
        for words, line in (("held-out images", "-"), ("training images", ":")):
            ax.plot([], [], color=style.GREY, linestyle=line, label=words)
        style.tidy(ax, "epoch", "NLL (nats)")
        ax.set_yscale("log")
        ticks = style.log_ticks(*ax.get_ylim())
        ax.set_yticks(ticks, [style.plain_number(tick) for tick in ticks])
        ax.minorticks_off()
        ax.xaxis.set_major_locator(style.whole_numbers())
        _legend_above(ax)
        return ax

    last = "; ".join(f"{_network(method)} {run.history[-1]['validation_nll']:.3f}" for method, run in chosen.items())
    return [
        drawn(
            f"{prefix}-over-epochs",
            draw,
            f"NLL of training and held-out images over the epochs on {sweep.title}; held-out at the end: {last}",
            "NLL over the epochs by the mean network: held-out images (lines) and training images (dotted; the mean "
            "over an epoch while the network learns, for VI with weights drawn anew in each step).",
        )
    ]


def _legend_above(ax: "Axes") -> None:
    """Put the legend where it hides nothing: lines go from side to side here, and from top to bottom."""
    style.legend(ax, "lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def _network(method: Method) -> str:
    """Name a method; VI with its network, since the chosen run may be the one for its samples."""
    return "VI, mean network" if method == "vi" else method.upper()


def figure_2(sweep: Sweep, prefix: str) -> dict[float, list[Drawn]]:
    """Draw, for each β, the ELBO over the epochs and the final scores for faster and slower log σ."""
    return {
        beta: list(_of_beta(beta, runs, f"{prefix}-figure-2-beta-{beta:g}", sweep.title))
        for beta, runs in sweep.of_several_multipliers().items()
    }


def _of_beta(beta: float, runs: dict[str, list[Result]], prefix: str, title: str) -> Iterator[Drawn]:
    multipliers = sorted({run.spec.log_sigma_lr_multiplier for each in runs.values() for run in each})
    for method, each in runs.items():
        last = ", ".join(f"{r.spec.log_sigma_lr_multiplier:g}: {r.history[-1]['elbo']:.3f}" for r in each)
        yield drawn(
            f"{prefix}-{method}-elbo",
            lambda each=each: _elbos(each, multipliers),
            f"ELBO of {METHODS[method]} over the epochs at β {beta:g} on {title}; at the end, by multiplier, {last}",
            f"{METHODS[method]}, β = {beta:g}: ELBO over the epochs, by the multiplier of log σ's learning rate."
            + (" Lower ones, of early epochs and of the slowest log σ, are cut off." if _is_cut(each) else ""),
        )
    for score, words in _FINALS.items():
        yield drawn(
            f"{prefix}-{score.replace('_', '-')}",
            lambda score=score, words=words: _finals(runs, score, words),
            f"Final {words} against the {_LOG_MULTIPLIER} at β {beta:g} on {title}",
            f"β = {beta:g}: {words} at the end.",
        )


def _elbos(runs: Sequence[Result], multipliers: list[float]) -> "Axes":
    """Draw runs; a multiplier looks the same where a method lacks some of all `multipliers`."""
    from matplotlib import colormaps

    ax = style.axes_for(None, "figure_2", _WITH_LEGEND)
    shades = colormaps[style.SEQUENTIAL]
    named: set[float] = set()
    for run in runs:
        multiplier = run.spec.log_sigma_lr_multiplier
        place = multipliers.index(multiplier)
        epochs = [row["epoch"] + 1 for row in run.history]
        label = None if multiplier in named else f"× {multiplier:g}"  # once, whichever seeds have diverged
        named.add(multiplier)
        shade = shades(0.9 * (1 - place / max(1, len(multipliers) - 1)))
        ax.plot(epochs, [row["elbo"] for row in run.history], color=shade, linestyle=style.dashes(place), label=label)
    style.tidy(ax, "epoch", "ELBO (nats per datum)")
    if _is_cut(runs):
        low, high = _worth_showing(runs)
        room = _ROOM * (high - low)
        ax.set_ylim(low - room, high + room)
        ax.set_ylabel("ELBO (nats per datum; lower ones cut off)")
    ax.xaxis.set_major_locator(style.whole_numbers())
    _legend_above(ax)
    return ax


def _is_cut(runs: Sequence[Result]) -> bool:
    low, high = _worth_showing(runs)
    return min(row["elbo"] for run in runs for row in run.history) < low - _ROOM * (high - low)


def _worth_showing(runs: Sequence[Result]) -> tuple[float, float]:
    """Return ELBOs between which all end, and the faster log σ are in the last three quarters of their epochs.

    The first epochs are hundreds of nats below: on one axis with them, all others would lie on one line.
    """
    slowest = min(run.spec.log_sigma_lr_multiplier for run in runs)

    def late(run: Result) -> Sequence[Mapping[str, float]]:
        return run.history[-1 if run.spec.log_sigma_lr_multiplier == slowest else len(run.history) // 4 :]

    lowest = min(row["elbo"] for run in runs for row in late(run))
    return lowest, max(row["elbo"] for run in runs for row in run.history)


def _finals(runs: dict[str, list[Result]], score: str, words: str) -> "Axes":
    ax = style.axes_for(None, "figure_2", _WITH_LEGEND)
    ticks: set[float] = set()

    def final(run: Result) -> float:
        return run.history[-1]["elbo"] if score == "elbo" else _score(run, "mean", score)

    for method, each in runs.items():
        number = COLOURS[method]
        means = _means(each, "log_sigma_lr_multiplier", final)
        ticks |= set(means)
        ax.plot(*_xy(means), color=style.colour(number), **_marks(number, means), label=METHODS[method])
    _log_axis(ax, sorted(ticks))
    style.tidy(ax, _LOG_MULTIPLIER, words)
    if score == "accuracy":
        ax.yaxis.set_major_formatter(style.percent())
    _legend_above(ax)
    return ax


def _means(runs: Sequence[Result], setting: Compared, value: Callable[[Result], float]) -> dict[float, float]:
    return {at: statistics.fmean(map(value, found)) for at, found in comparable(runs, setting).items()}


def _score(run: Result, way: Way, score: str) -> float:
    return -run.test[way]["nll"] if score == "log_likelihood" else run.test[way][score]


def _papers(row: Sequence[float], score: str) -> float:
    nll, accuracy, ece = row
    return {"log_likelihood": -nll, "accuracy": accuracy, "ece": ece}[score]


def _marks(number: int, values: dict[float, float]) -> dict[str, Any]:
    """Return a curve's marker, with a line where there are enough points for one to show a trend."""
    return {"marker": style.marker(number), "linestyle": "-" if len(values) >= _FEWEST_IN_A_LINE else "none"}


def _xy(values: dict[float, float]) -> tuple[list[float], list[float]]:
    return list(values), list(values.values())


def _log_axis(ax: "Axes", ticks: Sequence[float]) -> None:
    ax.set_xscale("log")
    ax.set_xticks(ticks, tick_labels(ticks))
    ax.minorticks_off()


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Label ticks of a log axis, in order; one that would run into the last one stands a line lower, or has none.

    >>> tick_labels([0.003, 0.005, 0.01, 0.3])
    ['0.003', '\\n0.005', '0.01', '0.3']
    """
    whole = math.log(ticks[-1] / ticks[0])
    labels: list[str] = []
    ends = [-math.inf, -math.inf]  # of the last label, in either line
    for tick in ticks:
        place, half = math.log(tick / ticks[0]), whole * _CHARACTER * len(f"{tick:g}") / 2
        line = next((line for line, end in enumerate(ends) if place - half >= end), None)
        labels.append("" if line is None else "\n" * line + f"{tick:g}")
        if line is not None:
            ends[line] = place + half + whole * _GAP
    return labels


def drawn(name: str, draw: Callable[[], "Axes"], alt: str, caption: str) -> Drawn:
    """Draw a picture once for the page and once as a file."""
    return Drawn(name, draw_picture(draw, "the results", alt, caption), as_png(draw))
