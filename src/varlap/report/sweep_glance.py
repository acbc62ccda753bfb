"""Table 1 as a picture: every way of predicting by each score, with the paper's own numbers among ours."""

import statistics
from typing import TYPE_CHECKING, Any

from varlap.experiments.ways import NAMES, Key
from varlap.plot import style
from varlap.report.sweep_figures import COLOURS, Drawn, drawn
from varlap.report.sweeps import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SCORES = {"nll": "test NLL (lower is better)", "accuracy": "accuracy (higher)", "ece": "ECE (lower)"}
_DOT: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 7}
_BAR: dict[str, Any] = {"linestyle": "none", "marker": "|", "markersize": 11, "markeredgewidth": 2}
_WIDTH, _HEIGHT_OF_A_ROW, _ROOM = 9.0, 0.3, 1.1  # inches; room for the axis and the legend


def at_a_glance(sweep: Sweep, prefix: str) -> list[Drawn]:
    """Draw NLL, accuracy and ECE of every row, the best NLL on top, each beside the paper's where it has one."""
    scores = _scores_from_the_worst(sweep)
    if len(scores) < 2:
        return []
    told = "; ".join(f"{NAMES[key]} {row['nll']:.3f}" for key, row in reversed(scores.items()))
    chosen = sweep.final is not None or any(choice.num_trials > 1 for choice in sweep.choices().values())
    caption = f"Each row at {'the β that held-out images choose' if chosen else 'its one β'}, the best NLL on top."
    alt = f"Scores on {sweep.title}; test NLL: {told}"
    return [drawn(f"{prefix}-at-a-glance", lambda: draw_at_a_glance(sweep)[0], alt, caption)]


def draw_at_a_glance(sweep: Sweep) -> "list[Axes]":
    """Return a panel for each score, with a line for each row from the worst NLL to the best."""
    from matplotlib.lines import Line2D

    scores = _scores_from_the_worst(sweep)
    theirs = sweep.papers_scores
    panels = style.panels("at_a_glance", len(_SCORES), (_WIDTH, _ROOM + _HEIGHT_OF_A_ROW * len(scores)))
    for number, (ax, (score, words)) in enumerate(zip(panels, _SCORES.items(), strict=True)):
        for place, (key, row) in enumerate(scores.items()):
            colour = style.colour(COLOURS[key[0]])
            filled = colour if key[1] == "mean" else "none"
            ax.plot([row[score]], [place], **_DOT, color=colour, markerfacecolor=filled)
            if NAMES[key] in theirs:
                ax.plot([theirs[NAMES[key]][number]], [place], **_BAR, color=colour)
        style.tidy(ax, words, "")
        ax.set_yticks(range(len(scores)), [NAMES[key] for key in scores])
        ax.set_ylim(-0.6, len(scores) - 0.4)
        ax.grid(axis="y", color=style.GREY, alpha=0.25, linewidth=0.6)
        ax.tick_params(axis="y", length=0)
        if score == "accuracy":
            ax.xaxis.set_major_formatter(style.percent())
    marks = [
        Line2D([], [], **_DOT, color=style.GREY, label="mean network"),
        Line2D([], [], **_DOT, color=style.GREY, markerfacecolor="none", label="with temperature scaling, or by draws"),
    ]
    if theirs:
        marks.append(Line2D([], [], **_BAR, color=style.GREY, label=f"the paper's{sweep.after}"))
    style.legend_above(panels, marks)
    return panels


def _scores_from_the_worst(sweep: Sweep) -> dict[Key, dict[str, float]]:
    """Return the means over the seeds of every row, the worst NLL first."""
    found = {
        key: {score: statistics.fmean(run.test[key[1]][score] for run in choice.by_validation) for score in _SCORES}
        for key, choice in sweep.choices().items()
    }
    return {key: found[key] for key in sorted(found, key=lambda key: found[key]["nll"], reverse=True)}
