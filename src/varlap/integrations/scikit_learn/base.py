"""What both estimators share: checks, standardised inputs, the network, training and the choice of β."""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, clone
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from varlap.errors import ConfigError, did_you_mean
from varlap.integrations.scikit_learn.sizing import BySize, Plan, Sizing, is_small, plan
from varlap.integrations.scikit_learn.tempering import best_beta
from varlap.likelihoods import Likelihood, Prediction
from varlap.models import mlp
from varlap.objectives import VL
from varlap.posterior import BNN, Prior
from varlap.streams import Streams, derive_seed
from varlap.training import History, fit

NetworkFn = Callable[[int, int], nn.Module]
WAYS = ("mean", "linearised", "sampled")
ROWS_AT_ONCE = 1024  # of a prediction
MOST_WEIGHTS_IN_CLOSED_FORM = 2**20
BETAS = (0.01, 0.03, 0.1, 0.3, 0.6, 1.0)  # what "cv" chooses from
_LOCK, _BEFORE = threading.Lock(), list[int]()  # how many threads torch had, once for each block that is in use


class VLEstimator(BaseEstimator, ABC):
    """A table's network, its posterior and its training; the targets are the subclasses' part."""

    _defaults: ClassVar[BySize]
    n_features_in_: int

    def __init__(
        self,
        hidden: int | Sequence[int] | None = None,
        *,
        network: NetworkFn | None = None,
        beta: float | Literal["cv"] | Sequence[float] | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
        prior: Prior | None = None,
        how: Literal["mean", "linearised", "sampled"] | None = None,
        cv: Any = 5,
        device: str = "cpu",
        random_state: Any = None,
    ) -> None:
        self.hidden = hidden
        self.network = network
        self.beta = beta
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.prior = prior
        self.how = how
        self.cv = cv
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on a table from scratch.

        Args:
            X: one row for each item, one column for each feature; an array or a DataFrame.
            y: the targets.
            sample_weight: one for each row: a weight of 2 counts like the row given twice, one of 0 like none.
        """
        return self._fit(X, y, sample_weight, None)

    def _fit(self, X: Any, y: Any, sample_weight: Any, sizing: Sizing | None) -> Self:
        """Train from scratch, by the size of these rows or by that of the table that they are a part of."""
        self._check_settings()
        X, y = self._checked(X, y, reset=True)
        weights = self._weights(X, sample_weight)
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        vars(self).pop("beta_scores_", None)
        self.beta_ = self._chosen_beta(X, y, weights)
        self._prepare(X, y, weights, sizing)
        self._train(X, y, weights, self._plan.epochs, schedule="cosine")
        if sizing is None:  # not a part of the table, whose fit is to be judged by others
            self._look_back(X, y, weights)
        self._learn_noise(X, y, weights)
        return self

    def _prepare(self, X: Any, y: Any, weights: Any, sizing: Sizing | None) -> None:
        self._forget()
        self._learn_targets(y, weights)
        self._scaler = StandardScaler()
        self._scaler.fit(X, sample_weight=weights)
        self._num_seen, self._num_calls = 0.0, 0
        self._make_network(len(X), total_of(weights, X), sizing)

    def _partial_fit(self, X: Any, y: Any, sample_weight: Any) -> Self:
        """Take one more pass, over these rows; N counts all rows seen so far."""
        self._check_settings()
        first = not hasattr(self, "bnn_")
        X, y = self._checked(X, y, reset=first)
        weights = self._weights(X, sample_weight)
        if first:
            self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
            if self.beta is not None and not isinstance(self.beta, Real):
                raise ConfigError(f"partial_fit sees too little to choose beta={self.beta!r}; give a number")
            self.beta_ = self._chosen_beta(X, y, weights)
            self._scaler = StandardScaler()
            self._num_seen, self._num_calls = 0.0, 0
        self._learn_targets(y, weights)
        self._scaler.partial_fit(X, sample_weight=weights)
        if first:
            defaults = self._defaults.of(total_of(weights, X))
            self._make_network(len(X), total_of(weights, X), Sizing(defaults, small=False))
        self._train(X, y, weights, 1, schedule="constant")
        return self

    # -- what the subclasses say ------------------------------------------------------------------------------------

    @abstractmethod
    def _checked(self, X: Any, y: Any, reset: bool) -> tuple[Any, Any]:
        """Return arrays of the right shapes and types, or say what is wrong."""

    @abstractmethod
    def _learn_targets(self, y: Any, weights: Any) -> None:
        """Learn what the targets are encoded by: their classes, or their mean and scale."""

    @abstractmethod
    def _encoded(self, y: Any) -> Tensor:
        """Return targets as the likelihood takes them."""

    @abstractmethod
    def _likelihood(self) -> Likelihood:
        """Make the likelihood of the encoded targets."""

    @property
    @abstractmethod
    def _num_outputs(self) -> int:
        """How many outputs the network has."""

    @abstractmethod
    def _nll(self, X: Any, y: Any, sample_weight: Any) -> float:
        """Return the mean negative log-likelihood of targets, by which β is chosen."""

    def _check_settings(self) -> None:
        """Refuse settings that a fit would come upon late."""
        if self.how is not None and self.how not in WAYS:
            raise ConfigError(f"{type(self).__name__}(how={self.how!r}): {did_you_mean(self.how, WAYS)}")
        for name in ("epochs", "batch_size", "lr"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Real) and float(value) > 0):
                raise ConfigError(
                    f"{type(self).__name__}({name}={value!r}) must be positive; None chooses by the size of the table"
                )
        if self.network is not None and (isinstance(self.network, nn.Module) or not callable(self.network)):
            raise ConfigError(
                f"{type(self).__name__}(network=...) must be a function that makes a network, so that each fit has a "
                f"new one, but it is a {type(self.network).__name__}; give for example "
                "network=lambda num_inputs, num_outputs: torch.nn.Linear(num_inputs, num_outputs)"
            )
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError, TypeError) as error:
            reason = str(error).split("\n")[0]
            raise ConfigError(
                f"{type(self).__name__}(device={self.device!r}): torch {torch.__version__} has no such device here "
                f"({reason}); leave device out for the CPU"
            ) from error

    def _forget(self) -> None:
        """Drop what an earlier fit has learnt of the targets."""

    def _forget_noise(self) -> None:
        """Drop what was learnt of the noise around a network that is about to change."""

    def _look_back(self, X: Any, y: Any, weights: Any) -> None:
        """Look at what the network has learnt; train again or warn, if it is next to nothing."""

    def _learn_noise(self, X: Any, y: Any, weights: Any) -> None:
        """Learn how the noise depends on the inputs, once the network is trained."""

    # -- training ---------------------------------------------------------------------------------------------------

    def _make_network(self, num_rows: int, num_data: float, sizing: Sizing | None) -> None:
        defaults = self._defaults.of(num_data) if sizing is None else sizing.defaults
        chosen = (self.hidden,) if isinstance(self.hidden, int) else self.hidden
        hidden = defaults.hidden if chosen is None else tuple(chosen)
        num_inputs, num_outputs = self.n_features_in_, self._num_outputs
        with Streams(self._seed, 0).around_network(torch.device("cpu")):
            network = mlp(num_inputs, num_outputs, hidden, nn.Tanh) if self.network is None else self._own_network()
        bnn = BNN(network, self._likelihood(), prior=defaults.prior if self.prior is None else self.prior)
        small = is_small(bnn, num_rows, num_data, num_outputs) if sizing is None else sizing.small
        self._sizing = Sizing(defaults, small)
        chosen = {"batch_size": self.batch_size, "epochs": self.epochs, "lr": self.lr, "device": str(self.device)}
        self._plan: Plan = plan(num_rows, num_data, small, defaults, **chosen)
        self.bnn_ = bnn.to(self.device, self._plan.dtype)
        self.network_ = bnn.network

    def _own_network(self) -> nn.Module:
        assert self.network is not None
        network = self.network(self.n_features_in_, self._num_outputs)
        if not isinstance(network, nn.Module):
            raise ConfigError(
                f"{type(self).__name__}(network=...) must make an nn.Module of (num_inputs, num_outputs), but it "
                f"returned {type(network).__name__}"
            )
        return network

    def _train(self, X: Any, y: Any, weights: Any, epochs: int, schedule: str) -> None:
        self._forget_noise()
        total = total_of(weights, X)
        self._num_seen += total
        self._num_calls += 1
        self.history_ = self._run(
            self.bnn_,
            (self._inputs(X), self._encoded(y)),
            weights,
            self.beta_ * total / self._num_seen,
            epochs=epochs,
            lr=self._plan.lr,
            schedule=schedule,
            warmup_steps=self._plan.warmup_steps if schedule == "cosine" else 0,
            purpose=self._num_calls,
        )
        self.n_iter_ = len(self.history_.epochs) + (self.n_iter_ if self._num_calls > 1 else 0)

    def _run(
        self,
        bnn: BNN,
        data: tuple[Tensor, Tensor],
        weights: Any,
        beta: float,
        *,
        epochs: int,
        lr: float,
        schedule: str,
        warmup_steps: int,
        purpose: int | str,
    ) -> History:
        """Train one network on these rows, with draws of its own for each purpose."""
        num_rows = len(data[0])
        # Weights of mean 1 beside N rows, with β scaled to their true sum, which need be no whole number.
        total = num_rows if weights is None else weights.sum()
        objective = VL(
            num_rows,
            beta * num_rows / total,
            curvature=self._plan.curvature,
            seed=derive_seed(self._seed, "labels", purpose),
            beta_warmup_steps=warmup_steps,
        )
        with _one_thread(self.network is None):
            return fit(
                bnn,
                objective,
                data,
                weights=None if weights is None else weights * (num_rows / total),
                epochs=epochs,
                batch_size=self._plan.batch_size,
                lr=lr,
                schedule=schedule,
                seed=derive_seed(self._seed, "order", purpose),
                progress="none",
            )

    def _chosen_beta(self, X: Any, y: Any, weights: Any) -> float:
        if self.beta is None or isinstance(self.beta, Real):
            return self._defaults.of(total_of(weights, X)).beta if self.beta is None else float(self.beta)
        betas: Any = BETAS if isinstance(self.beta, str) and self.beta == "cv" else self.beta
        if isinstance(betas, str) or not len(betas):
            raise ConfigError(
                f"{type(self).__name__}(beta={self.beta!r}): give a number, 'cv', or the numbers that cross-validation "
                "chooses from, such as [0.03, 0.1, 0.3]"
            )
        sizing = self._sizing_of(X, y, weights)
        self.beta_scores_ = best_beta(self, [float(beta) for beta in betas], X, y, weights, sizing)
        return min(self.beta_scores_, key=self.beta_scores_.__getitem__)

    def _sizing_of(self, X: Any, y: Any, weights: Any) -> Sizing:
        """Return how this table would be trained, and leave an earlier fit as it is."""
        other: Any = clone(self)
        other._seed, other.n_features_in_ = self._seed, self.n_features_in_
        other._prepare(X, y, weights, None)
        return other._sizing

    def _weights(self, X: Any, sample_weight: Any) -> Any:
        if sample_weight is None:
            return None
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64)
        if (weights < 0).any() or not weights.sum() > 0:
            raise ConfigError("sample_weight must not be negative, and not all of it zero")
        return weights

    # -- prediction -------------------------------------------------------------------------------------------------

    def _inputs(self, X: Any) -> Tensor:
        standardised = self._scaler.transform(X)
        return torch.as_tensor(np.asarray(standardised), dtype=self._plan.dtype)

    def _prediction(self, X: Any, how: Any) -> Prediction:
        inputs = self._checked_inputs(X)
        return self._predict(self.bnn_, inputs, how)

    def _checked_inputs(self, X: Any) -> Tensor:
        check_is_fitted(self, "bnn_")
        return self._inputs(validate_data(self, X, reset=False))

    def _predict(self, bnn: BNN, inputs: Tensor, how: Any) -> Prediction:
        options: dict[str, Any] = {"batch_size": ROWS_AT_ONCE}
        if how == "linearised" and bnn.num_weights() <= MOST_WEIGHTS_IN_CLOSED_FORM:
            options["closed_form"] = True
        with _one_thread(self.network is None):
            return bnn.predict(inputs, how=how, **options)


def total_of(weights: Any, X: Any) -> float:
    """Return the number of data that rows of these weights are.

    >>> total_of(None, np.zeros((3, 1))), total_of(np.array([1.0, 0.5]), np.zeros((2, 1)))
    (3.0, 1.5)
    """
    return float(len(X) if weights is None else weights.sum())


@contextlib.contextmanager
def _one_thread(wanted: bool) -> Iterator[None]:
    """Compute in one thread: for a small network more are slower, and another number of them gives other bits."""
    if not wanted:
        yield
        return
    with _LOCK:  # fits in threads of Python all give back what was there before the first of them
        _BEFORE.append(_BEFORE[0] if _BEFORE else torch.get_num_threads())
    try:
        torch.set_num_threads(1)
        yield
    finally:
        with _LOCK:
            torch.set_num_threads(_BEFORE.pop())
