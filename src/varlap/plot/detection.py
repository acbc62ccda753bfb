"""Whether strange inputs look strange to the network."""

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from varlap.errors import BatchError
from varlap.likelihoods import Prediction
from varlap.likelihoods.prediction import entropy
from varlap.metrics import auroc
from varlap.plot import style
from varlap.plot.inputs import Values, as_tensor, probabilities

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NUM_BINS = 30
_HEADROOM = 1.25  # for the legend


def entropy_histogram(inside: Prediction | Values, outside: Prediction | Values, *, ax: "Axes | None" = None) -> "Axes":
    """Draw the entropies of predictions for familiar inputs and for inputs from elsewhere.

    The AUROC is the probability that an input from elsewhere has the higher entropy: a half is chance, 1 is perfect.
    Each position of an image or sequence counts, as does each yes or no.

    Args:
        inside: predictions or probabilities [N, K] for data like the training data; or their entropies [N].
        outside: the same for data from elsewhere.
        ax: where to draw; a new figure if None.

    >>> import torch
    >>> ax = entropy_histogram(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.25, 0.9]))
    >>> ax.get_legend().get_title().get_text()  # of 6 pairs, only 0.3 and 0.25 are the wrong way round
    'AUROC 0.833'
    """
    scores = {"in distribution": _entropies(inside, "inside"), "out of distribution": _entropies(outside, "outside")}
    area = float(auroc(*scores.values()))
    ax = style.axes_for(ax, "entropy_histogram")
    highest = max(float(values.max()) for values in scores.values())
    edges = np.linspace(0, highest or 1.0, _NUM_BINS + 1)
    for (name, values), colour, hatch in zip(scores.items(), (style.BLUE, style.RED), (None, "////"), strict=True):
        counts, _ = np.histogram(values.numpy(), edges)
        shares = counts / len(values)
        ax.stairs(
            shares,
            edges,
            fill=True,
            facecolor=(*style.rgb(colour), 0.35),
            edgecolor=colour,
            linewidth=1,
            hatch=hatch,
            label=name,
        )
    style.tidy(ax, "entropy of the prediction (nats)", "share of items")
    ax.yaxis.set_major_formatter(style.percent())
    ax.set_xlim(0, edges[-1])
    ax.set_ylim(0, _HEADROOM * ax.get_ylim()[1])
    style.legend(ax, "upper right", title=f"AUROC {area:.3f}", title_fontsize=style.SMALL, alignment="left")
    return ax


def _entropies(prediction: Prediction | Values, what: str) -> Tensor:
    if not isinstance(prediction, Prediction) and as_tensor(prediction).ndim == 1:
        values = as_tensor(prediction)
    else:
        values = entropy(*probabilities(prediction, "entropy_histogram")).flatten()
    if len(values) == 0 or not values.isfinite().all():
        raise BatchError(f"plot.entropy_histogram: {what} is empty, or holds NaN or Inf; there is nothing to draw")
    return values
