"""Temperature scaling: one number, fitted on held-out data, that divides the logits."""

import math
from collections.abc import Callable
from typing import Any

import torch

from varlap import tree
from varlap.errors import BatchError, warn
from varlap.likelihoods.prediction import Prediction
from varlap.metrics.evaluate import items_at_once, predictions, predictor
from varlap.metrics.rows import wide
from varlap.posterior import BNN
from varlap.predict import How
from varlap.predict.dispatch import require_tempered

LOWEST, HIGHEST = 0.01, 100.0
NUM_COARSE = 41  # of the first look, which finds the valley where an average of draws has several
TOLERANCE = 1e-6  # of log T


@torch.no_grad()
def fit_temperature(
    bnn: BNN,
    held_out: Any,
    how: How = "mean",
    *,
    num_samples: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
) -> float:
    """Return the temperature T between 0.01 and 100 that minimises the NLL of held-out data, for a way of predicting.

    Predict with it by `bnn.predict(x, how, temperature=T)`; `varlap.evaluate` takes `temperature=T` too. T divides the
    logits of every draw; labels do not change for the mean network, probabilities do. Nothing is trained.

    Args:
        bnn: a network for classes (categorical or bernoulli, or an own likelihood with `tempered`).
        held_out: data that served neither training nor testing: a tuple (x, y), a Dataset or a DataLoader.
        how: as in `bnn.predict`; fit for the way in which you will predict.
        num_samples: as in `bnn.predict`.
        seed: as in `bnn.predict`: the same seed means the same draws.
        batch_size: inputs at a time; by default as in `varlap.evaluate`.

    >>> from torch import nn
    >>> bnn = BNN(nn.Linear(1, 2, bias=False))
    >>> _ = nn.init.constant_(bnn.network.weight, 0.0), nn.init.constant_(bnn.network.weight[1], 4.0)
    >>> x, y = torch.ones(4, 1), torch.tensor([1, 1, 1, 0])  # logits (0, 4), yet only three of four are right
    >>> round(fit_temperature(bnn, (x, y)), 3), round(4 / math.log(3), 3)
    (3.641, 3.641)
    """
    tempered_fn = require_tempered(bnn)
    predict_fn = predictor(bnn, how, num_samples, seed, temperature=1.0)
    batch_size = items_at_once(bnn, how, batch_size)
    targets: list[Any] = []
    parts: list[Prediction] = []
    for y, prediction in predictions(bnn, held_out, batch_size, predict_fn):
        targets.append(y)
        parts.append(prediction)
    if not parts:
        raise BatchError("fit_temperature: the held-out data hold no items; give at least one batch")
    draws = [
        tree.map_tensors(lambda t: wide(t) if t.is_floating_point() else t, draw)
        for draw in Prediction.concatenate(parts).outputs
    ]
    y = tree.concatenate(targets)

    def nll(log_temperature: float) -> float:
        outputs = [tempered_fn(draw, math.exp(log_temperature)) for draw in draws]
        return -float(Prediction(outputs=outputs, likelihood=bnn.likelihood).log_prob(y).mean())

    low, high = math.log(LOWEST), math.log(HIGHEST)
    best = _minimise(nll, low, high)
    if min(best - low, high - best) < 1e-3:
        end = "lowest" if best - low < high - best else "highest"
        why = "every label is predicted right" if end == "lowest" else "the predictions are no better than chance"
        warn(
            f"fit_temperature ended at the {end} temperature it tries, {math.exp(best):.3g}: on these "
            f"{tree.leading_size(y)} held-out items {why}, or nearly; use more of them"
        )
    return math.exp(best)


def _minimise(fn: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function of one number is least: a coarse grid, then golden sections around its best point.

    >>> round(_minimise(lambda t: (t - 0.3) ** 2, -4.0, 4.0), 5)
    0.3
    """
    step = (high - low) / (NUM_COARSE - 1)
    values = [fn(low + i * step) for i in range(NUM_COARSE)]
    centre = low + min(range(NUM_COARSE), key=values.__getitem__) * step
    left, right = max(low, centre - step), min(high, centre + step)
    ratio = (math.sqrt(5) - 1) / 2
    inner, outer = right - ratio * (right - left), left + ratio * (right - left)
    at_inner, at_outer = fn(inner), fn(outer)
    while right - left > TOLERANCE:
        if at_inner <= at_outer:
            right, outer, at_outer = outer, inner, at_inner
            inner = right - ratio * (right - left)
            at_inner = fn(inner)
        else:
            left, inner, at_inner = inner, outer, at_outer
            outer = left + ratio * (right - left)
            at_outer = fn(outer)
    return (left + right) / 2
