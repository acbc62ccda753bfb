"""The choice of β by cross-validation."""

from typing import Any

import numpy as np
from sklearn.base import clone, is_classifier
from sklearn.model_selection import check_cv

from varlap.integrations.scikit_learn.sizing import Sizing


def best_beta(estimator: Any, betas: list[float], X: Any, y: Any, weights: Any, sizing: Sizing) -> dict[float, float]:
    """Return the mean negative log-likelihood of held-out rows for each β.

    A β is right for one network, one prior and one way to train: folds get those of the whole table, by its `sizing`.
    """
    splitter: Any = check_cv(estimator.cv, y, classifier=is_classifier(estimator))
    splits = list(splitter.split(X, y))
    scores = {}
    for beta in betas:
        one: Any = clone(estimator)
        one.set_params(beta=beta, random_state=estimator._seed)
        folds = []
        for train, test in splits:
            one._fit(X[train], y[train], None if weights is None else weights[train], sizing)
            folds.append(one._nll(X[test], y[test], None if weights is None else weights[test]))
        sizes = [len(test) if weights is None else weights[test].sum() for _, test in splits]
        scores[beta] = float(np.average(folds, weights=sizes))
    return scores
