"""Where a small table's network has learnt next to nothing: is there something to learn, and by which settings?"""

from typing import Any

import numpy as np
from sklearn.base import clone

from varlap.errors import warn
from varlap.integrations.scikit_learn.base import total_of
from varlap.integrations.scikit_learn.sizing import AGAIN, Defaults, Sizing, steps_again

LITTLE = 0.2  # of the targets' variance: a fit that explains less is nearly flat
FEWEST_ROWS = 40  # distinct ones, of which a quarter is held out
CLEARLY = 0.15  # nats a held-out row


def explained(targets: np.ndarray, fitted: np.ndarray, weights: Any) -> float:
    """Return the part of the training targets' variance that a fit explains; there is nothing to explain in constants.

    >>> explained(np.array([[-1.0], [1.0]]), np.zeros((2, 1)), None)
    0.0
    """
    around = targets - np.average(targets, axis=0, weights=weights)
    total = np.average(np.square(around), axis=0, weights=weights).sum()
    left = np.average(np.square(targets - fitted), axis=0, weights=weights).sum()
    return float(1 - left / total) if total else 1.0


def better_defaults(estimator: Any, X: Any, y: Any, weights: Any) -> Defaults | None:
    """Return the defaults that predict held-out rows best, if they do so clearly better than a guess.

    With few steps and a strong prior the weights may be pruned before they have learnt. Others of these defaults take
    more steps and hold less strongly; alone, they would overfit where noise prevails.
    """
    counting = np.arange(len(X)) if weights is None else np.flatnonzero(weights)
    parts = _held_out(X[counting], y[counting], estimator._seed)
    if parts is None:
        return None
    train, test = (counting[part] for part in parts)
    own = (None, None) if weights is None else (weights[train], weights[test])
    nlls = []
    for defaults in AGAIN:
        one: Any = clone(estimator)
        # The noise is learnt from the mean's residuals, so the mean is judged beside the same noise for all rows.
        one.set_params(beta=defaults.beta, noise="constant", random_state=estimator._seed)
        one.set_params(epochs=steps_again(total_of(own[0], train)))
        one._fit(X[train], y[train], own[0], Sizing(defaults, small=True))
        nlls.append(one._nll(X[test], y[test], own[1]))
        if one.score(X[test], y[test], own[1]) <= 0:
            break  # It learnt nothing that holds for other rows; the next ones learn less, so they are left out.
    best = np.argsort(nlls)[0]  # what is not a number comes last
    return AGAIN[best] if nlls[best] < _nll_of_guess(y[train], y[test], *own) - CLEARLY else None


def warn_of_flat_fit(part: float) -> None:
    """Say that the fitted mean is nearly flat, and what to try."""
    warn(
        f"VLRegressor's mean explains {max(part, 0):.1%} of the variance of its training targets, so it predicts "
        "little more than their mean; if there is something to learn, try beta='cv', a smaller beta such as 0.1, or "
        "more epochs"
    )


def _held_out(X: Any, y: Any, seed: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Divide rows into three quarters and one; equal rows stay together, so that two are as one of weight 2."""
    rows = np.column_stack([X, y])
    _, number_of = np.unique(rows, axis=0, return_inverse=True)
    num_distinct = number_of.max() + 1
    if num_distinct < FEWEST_ROWS:
        return None
    chosen = np.random.default_rng(seed).permutation(num_distinct)[: num_distinct // 4]
    is_test = np.isin(number_of.reshape(-1), chosen)
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def _nll_of_guess(y: Any, y_test: Any, weights: Any, weights_test: Any) -> float:
    """Return the mean negative log-likelihood of a Gaussian with the training targets' mean and variance."""
    mean = np.average(y, axis=0, weights=weights)
    variance = np.average(np.square(y - mean), axis=0, weights=weights)
    with np.errstate(divide="ignore", invalid="ignore"):  # of a constant target, which nothing beats
        values = 0.5 * (np.square(y_test - mean) / variance + np.log(2 * np.pi * variance))
    return float(np.average(values.reshape(len(y_test), -1).sum(1), weights=weights_test))
