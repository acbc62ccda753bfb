"""Classes of the rows of a table."""

from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.metrics import log_loss
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data
from torch import Tensor

from varlap.integrations.scikit_learn.base import VLEstimator
from varlap.integrations.scikit_learn.sizing import CLASSES
from varlap.likelihoods import Categorical, Likelihood


class VLClassifier(ClassifierMixin, VLEstimator):
    """A Bayesian neural network for classes, trained by Variational Laplace.

    Inputs are standardised, the network is sized to the table, and small tables are trained on all their rows in every
    step, with nothing left to chance: there a weight of 2 is a row given twice.

    Args:
        hidden: sizes of the hidden layers; by default one layer of 50 units, or of 100 from 1,000 rows on.
        network: a function of (num_inputs, num_outputs) that makes your own `nn.Module` instead; it gets standardised
            inputs. A `def` can be pickled, a lambda cannot.
        beta: tempering of the KL; by default 0.1, or 0.03 from 1,000 rows on. "cv" chooses among 0.01, 0.03, 0.1, 0.3,
            0.6 and 1 by the likelihood of held-out rows, a list among its own numbers.
        epochs: passes over the rows; by default by their number, from 80 to some 4,000 steps.
        batch_size: rows a step; by default all of a small table (fewer than 2,000 rows, and rows × classes × weights of
            the network up to two million), else 128.
        lr: learning rate of Adam, which falls to zero along a cosine; by default 0.01.
        prior: of the weights, such as `varlap.EmpiricalBayesPrior()`; by default `varlap.FanInPrior()`.
        how: the way to predict, "mean", "linearised" or "sampled"; by default by the mean network, which has the best
            probabilities near the data.
        cv: folds, or a splitter of scikit-learn, for `beta="cv"`.
        device: where to train, such as "cuda".
        random_state: a seed, or a generator of numpy.

    Attributes:
        bnn_: the network with its posterior; inputs as they are after standardising, in `bnn_`'s precision (double for
            a small table).
        network_: the mean network, an ordinary module.
        beta_: the β that was used, and `beta_scores_` the mean negative log-likelihood of each that was tried.
        n_iter_: passes over the rows.
        history_: what `varlap.fit` returned.
        classes_: the classes, in the order of the probabilities.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> model = VLClassifier(random_state=0).fit(X, y)
    >>> model.predict_proba(X[::60]).round(1)
    array([[1., 0., 0.],
           [0., 1., 0.],
           [0., 0., 1.]])
    """

    _defaults = CLASSES

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Take one more pass, over these rows.

        Args:
            X: some rows.
            y: their classes.
            classes: all classes there are; needed in the first call, if these rows do not have them all.
            sample_weight: one for each row.
        """
        if not hasattr(self, "bnn_"):
            self._forget()
            if classes is not None:
                self.classes_ = np.unique(classes)
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(f"classes={classes!r} are not those of the first call, {self.classes_}")
        return self._partial_fit(X, y, sample_weight)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class, in the order of `classes_`."""
        probs = self._prediction(X, self.how or "mean").probs
        assert probs is not None
        return probs.double().cpu().numpy()

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Return the logarithm of `predict_proba`, −inf where a probability is 0."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each row."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(1)]

    # -- targets ----------------------------------------------------------------------------------------------------

    def _checked(self, X: Any, y: Any, reset: bool) -> tuple[Any, Any]:
        X, y = validate_data(self, X, y, reset=reset, dtype=(np.float64, np.float32))
        check_classification_targets(y)
        return X, column_or_1d(y)

    def _forget(self) -> None:
        if hasattr(self, "classes_"):
            del self.classes_

    def _learn_targets(self, y: Any, weights: Any) -> None:  # noqa: ARG002
        classes = getattr(self, "classes_", None)
        classes = np.unique(y) if classes is None else classes
        if len(classes) < 2:
            raise ValueError(f"y has one class only, {classes[0]}; give rows of at least two")
        self.classes_ = classes
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(f"class {unknown[0]} is none of {self.classes_}; give them all in partial_fit(classes=)")

    def _encoded(self, y: Any) -> Tensor:
        return torch.as_tensor(np.searchsorted(self.classes_, y), dtype=torch.int64)

    def _likelihood(self) -> Likelihood:
        return Categorical()

    @property
    def _num_outputs(self) -> int:
        return len(self.classes_)

    def _nll(self, X: Any, y: Any, sample_weight: Any) -> float:
        probs = np.clip(self.predict_proba(X), np.finfo(np.float64).tiny, None)
        return log_loss(y, probs, sample_weight=sample_weight, labels=self.classes_)
