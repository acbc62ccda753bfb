"""Whether probabilities can be trusted."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from varlap.likelihoods import Prediction
from varlap.metrics import ReliabilityBins, ece, reliability_bins, risk_coverage as risk_coverage_curve
from varlap.plot import style
from varlap.plot.inputs import Values, by_name, probabilities, rows
from varlap.seeds import checked_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STRIP = (-0.27, 0.2)  # bottom and height of the histogram under the diagram, in units of accuracy
_LEGEND_LINE = 0.12  # room above the diagram, where a legend hides nothing
_LARGEST_MARKER, _SMALLEST_MARKER = 40.0, 4.0  # square points
_FEW = 10  # items in a bin, of which fewer say little about its accuracy


def reliability(
    predictions: Prediction | Values | Mapping[str, Prediction | Values],
    labels: Values,
    *,
    bins: int = 15,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draw accuracy against confidence, the probability of the predicted class, in bins of equal width.

    Calibrated probabilities lie on the diagonal. Below it is the share of the items in each bin. For one prediction the
    gaps to the diagonal are hatched; several are drawn as lines, with larger markers where there are more items; bins
    of fewer than ten items are faint, and no line goes through them. The expected calibration error is the gap,
    averaged over the items. Yes-or-no labels are judged as `varlap.metrics.ece` judges them: by how often a yes comes
    true against its probability.

    Args:
        predictions: a prediction, or probabilities [N, K] (or [N], of a yes), or several of them by name.
        labels: the true classes, [N].
        bins: number of bins.
        ax: where to draw; a new figure if None.

    >>> import torch
    >>> probs, labels = torch.tensor([[0.85, 0.15], [0.85, 0.15], [0.05, 0.95]]), torch.tensor([0, 1, 1])
    >>> ax = reliability(probs, labels)
    >>> ax.get_legend().get_title().get_text()  # 0.85 against a half for two items, 0.95 against 1 for the third
    'ECE 0.250'
    """
    bins = checked_count("plot.reliability", "bins", bins)
    lines = (len(predictions) + 1) // 2 if isinstance(predictions, Mapping) else 2
    ax = style.axes_for(ax, "reliability", size=(4.2, 3.2 + 0.2 * lines))
    named = {name: _claims(one, labels) for name, one in by_name(predictions).items()}
    found = {name: reliability_bins(*both, bins=bins) for name, both in named.items()}
    errors = {name: float(ece(*both, bins=bins)) for name, both in named.items()}
    ax.plot([0, 1], [0, 1], color=style.GREY, linestyle="--", linewidth=1)
    _strip(ax, found)
    if isinstance(predictions, Mapping):
        for index, (name, one) in enumerate(found.items()):
            _line(ax, one, style.colour(index), style.marker(index), f"{name}, ECE {errors[name]:.3f}")
        style.legend(ax, "upper left", ncols=2, columnspacing=1.0)
    else:
        _bars(ax, found[""])
        title = f"ECE {errors['']:.3f}"
        style.legend(ax, "upper left", ncols=2, title=title, title_fontsize=style.SMALL, alignment="left")
    of_a_yes = all(probs.ndim == 1 for probs, _ in named.values())
    style.tidy(ax, *(("probability of a yes", "frequency of a yes") if of_a_yes else ("confidence", "accuracy")))
    ax.set_xlim(0, 1)
    ax.set_ylim(_STRIP[0], 1.05 + _LEGEND_LINE * lines)
    ax.spines["left"].set_bounds(0, 1)
    ax.set_yticks(np.linspace(0, 1, 6))
    return ax


def risk_coverage(
    predictions: Prediction | Values | Mapping[str, Prediction | Values], labels: Values, *, ax: "Axes | None" = None
) -> "Axes":
    """Draw the error rate among the surest items against how many of them are answered.

    A network that knows what it does not know errs little until it must answer everything.

    Args:
        predictions: a prediction, or probabilities [N, K] (or [N], of a yes), or several of them by name.
        labels: the true classes, [N].
        ax: where to draw; a new figure if None.

    >>> import torch
    >>> ax = risk_coverage(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    >>> ax.lines[0].get_ydata().tolist()  # the surest is right, the other is not
    [0.0, 0.5]
    """
    from_name = by_name(predictions)
    ax = style.axes_for(ax, "risk_coverage")
    for index, (name, one) in enumerate(from_name.items()):
        probs, truth = rows(one, labels, "risk_coverage")
        confidence, guess = probs.max(1)
        coverage, risk = risk_coverage_curve(confidence, guess == truth)
        ax.plot(coverage.numpy(), risk.numpy(), color=style.colour(index), label=name, linestyle=style.dashes(index))
    if isinstance(predictions, Mapping):
        style.legend(ax, "upper left")
    style.tidy(ax, "coverage (share of items answered, surest first)", "risk (error rate among them)")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(style.percent())
    ax.set_xlim(0, 1)
    ax.set_ylim(bottom=0)
    return ax


def _claims(prediction: Prediction | Values, labels: Values) -> tuple[Tensor, Tensor]:
    """Return probabilities [M, K] and classes [M], or for yes-or-no labels the probabilities [M] of a yes."""
    probs, truth = rows(prediction, labels, "reliability")
    _, exclusive = probabilities(prediction, "reliability")
    return (probs, truth) if exclusive else (probs[:, 1], truth)


def _bars(ax: "Axes", found: ReliabilityBins) -> None:
    full = found.count > 0
    left, width = found.edges[:-1][full].numpy(), np.diff(found.edges.numpy())[full.numpy()]
    accuracy, confidence = found.accuracy[full].numpy(), found.confidence[full].numpy()
    ax.bar(left, accuracy, width, align="edge", color=style.BLUE, edgecolor=ax.get_facecolor(), label="accuracy")
    ax.bar(
        left,
        confidence - accuracy,
        width,
        bottom=accuracy,
        align="edge",
        facecolor=(*style.rgb(style.RED), 0.25),
        edgecolor=style.RED,
        hatch="////",
        linewidth=0.8,
        label="gap to confidence",
    )


def _line(ax: "Axes", found: ReliabilityBins, colour: str, marker: str, label: str) -> None:
    full = found.count > 0
    x, y = found.confidence[full].numpy(), found.accuracy[full].numpy()
    area = np.maximum(_LARGEST_MARKER * (found.count / found.count.max())[full].sqrt().numpy(), _SMALLEST_MARKER)
    enough = found.count[full].numpy() >= _FEW
    ax.plot(x, np.where(enough, y, np.nan), color=colour, linewidth=1, alpha=0.6)
    form = {"color": colour, "marker": marker, "linewidths": 0, "zorder": 3}
    for some, named, alpha in ((enough, label, None), (~enough, None, 0.25)):
        ax.scatter(x[some], y[some], area[some], label=named, alpha=alpha, **form)


def _strip(ax: "Axes", found: Mapping[str, ReliabilityBins]) -> None:
    """Draw the share of items in each bin under the diagram, to one scale for all."""
    bottom, height = _STRIP
    shares = {name: (one.count / one.count.sum()).numpy() for name, one in found.items()}
    largest = max(share.max() for share in shares.values())
    alone = len(found) == 1
    for index, (name, share) in enumerate(shares.items()):
        ax.stairs(
            bottom + height * share / largest,
            found[name].edges.numpy(),
            baseline=bottom,
            fill=alone,
            color=style.GREY if alone else style.colour(index),
        )
    ax.axhline(0, color=style.GREY, linewidth=0.8)
    ax.text(0.02, bottom + height, f"share of items,\nup to {largest:.0%} a bin", fontsize="x-small", va="top")
