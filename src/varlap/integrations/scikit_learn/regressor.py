"""Numbers for the rows of a table."""

from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import validate_data
from torch import Tensor, nn

from varlap.errors import ConfigError
from varlap.integrations.scikit_learn.base import NetworkFn, VLEstimator, total_of
from varlap.integrations.scikit_learn.flat import LITTLE, better_defaults, explained, warn_of_flat_fit
from varlap.integrations.scikit_learn.sizing import NOISE_BETA, NOISE_HIDDEN, NOISE_LR, NUMBERS, Sizing, steps_again
from varlap.likelihoods import Gaussian, Likelihood, Prediction
from varlap.likelihoods.centred import Centred
from varlap.models import mlp
from varlap.posterior import BNN, Prior
from varlap.streams import Streams


class VLRegressor(RegressorMixin, VLEstimator):
    """A Bayesian neural network for numbers, trained by Variational Laplace.

    Inputs are standardised, the network is sized to the table, and small tables are trained on all their rows in every
    step, with nothing left to chance: there a weight of 2 is a row given twice.

    Args:
        hidden: sizes of the hidden layers; by default one layer of 50 units, two from 2,000 rows on, and two of 100
            from 20,000 rows on.
        network: a function of (num_inputs, num_outputs) that makes your own `nn.Module` instead; it gets standardised
            inputs. A `def` can be pickled, a lambda cannot.
        noise: "varying" trains a second, small network on the residuals, which says how large the noise is for each
            row; "constant" has one noise for all rows, and takes about 70 % of the time.
        beta: tempering of the KL; by default 0.6, or 0.1 from 2,000 rows on. "cv" chooses among 0.01, 0.03, 0.1, 0.3,
            0.6 and 1 by the likelihood of held-out rows, a list among its own numbers.
        epochs: passes over the rows; by default by their number, from 80 to some 4,000 steps. With `beta`, `epochs` and
            `batch_size` left to their defaults, a small table whose mean explains less than a fifth of the targets'
            variance is trained again, longer and with β = 0.3 or 0.1, if that predicts a held-out quarter of the rows
            clearly better than their mean.
        batch_size: rows a step; by default all of a small table (fewer than 2,000 rows, and rows × targets × weights of
            the network up to two million), else 128, or 256 from 2,000 rows on.
        lr: learning rate of Adam, which falls to zero along a cosine; by default 0.03 for a small table and from 20,000
            rows on, 0.01 for others.
        prior: of the weights, such as `varlap.OneScalePrior(1.0)`; by default `varlap.EmpiricalBayesPrior()`, or
            `varlap.FanInPrior()` from 2,000 rows on.
        how: the way to predict, "mean", "linearised" or "sampled"; by default linearised, in closed form: the mean
            network's mean, and a variance that grows a little away from the data, less than the error does.
        cv: folds, or a splitter of scikit-learn, for `beta="cv"`.
        device: where to train, such as "cuda".
        random_state: a seed, or a generator of numpy.

    Attributes:
        bnn_: the network with its posterior; inputs as they are after standardising, in `bnn_`'s precision (double for
            a small table).
        network_: the mean network, an ordinary module.
        noise_bnn_: the network of the noise: log scales relative to the likelihood's one noise; None if constant.
        beta_: the β that was used, and `beta_scores_` the mean negative log-likelihood of each that was tried.
        n_iter_: passes over the rows.
        history_: what `varlap.fit` returned.

    >>> import numpy as np
    >>> X = np.linspace(-1, 1, 50)[:, None]
    >>> model = VLRegressor(random_state=0).fit(X, np.sin(3 * X[:, 0]))
    >>> mean, std = model.predict([[0.0], [3.0]], return_std=True)
    >>> bool(std[1] > std[0])
    True
    """

    _defaults = NUMBERS

    def __init__(
        self,
        hidden: int | Sequence[int] | None = None,
        *,
        network: NetworkFn | None = None,
        noise: Literal["varying", "constant"] = "varying",
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
        super().__init__(
            hidden,
            network=network,
            beta=beta,
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            prior=prior,
            how=how,
            cv=cv,
            device=device,
            random_state=random_state,
        )
        self.noise = noise

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Take one more pass, over these rows, after which the noise is the same for all.

        Args:
            X: some rows.
            y: their targets.
            sample_weight: one for each row.
        """
        if not hasattr(self, "bnn_"):
            self._forget()
        return self._partial_fit(X, y, sample_weight)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return the mean of each row's target; with `return_std` also its standard deviation, of noise and weights.

        Args:
            X: the rows.
            return_std: whether to return the standard deviation of the predictive distribution as well.
        """
        how = self.how or "linearised"
        inputs = self._checked_inputs(X)
        # Linearising leaves the mean as it is.
        prediction = self._predict(self.bnn_, inputs, "mean" if how == "linearised" and not return_std else how)
        assert prediction.mean is not None
        mean = self._restored(prediction.mean)
        return (mean, np.sqrt(self._scaled_back(self._variance(prediction, inputs)))) if return_std else mean

    # -- noise ------------------------------------------------------------------------------------------------------

    def _check_settings(self) -> None:
        super()._check_settings()
        if self.noise not in ("varying", "constant"):
            raise ConfigError(f"{type(self).__name__}(noise={self.noise!r}): choose 'varying' or 'constant'")

    def _look_back(self, X: Any, y: Any, weights: Any) -> None:
        part = self._explained(X, y, weights)
        chose_nothing = self.beta is None and self.epochs is None and self.batch_size is None
        if part < LITTLE and chose_nothing and self._sizing.small:
            defaults = better_defaults(self, X, y, weights)
            if defaults is not None:
                self.beta_ = defaults.beta
                self._prepare(X, y, weights, Sizing(defaults, small=True))
                self._train(X, y, weights, steps_again(total_of(weights, X)), schedule="cosine")
                part = self._explained(X, y, weights)
        if part < LITTLE:
            warn_of_flat_fit(part)

    def _explained(self, X: Any, y: Any, weights: Any) -> float:
        fitted = self._predict(self.bnn_, self._inputs(X), "mean").mean
        assert fitted is not None
        return explained(self._encoded(y).double().numpy(), fitted.double().cpu().numpy(), weights)

    def _forget_noise(self) -> None:
        self.noise_bnn_ = None

    def _learn_noise(self, X: Any, y: Any, weights: Any) -> None:
        """Train a second network on the residuals: the log of their scale, relative to the one noise of all rows.

        E_q (y − f)² is what the weights' ELBO asks of the noise: the squared residual and the weights' variance.
        """
        if self.noise == "constant":
            return
        inputs = self._inputs(X)
        prediction = self._predict(self.bnn_, inputs, "linearised")
        assert prediction.mean is not None
        assert prediction.epistemic_variance is not None
        squares = (self._encoded(y) - prediction.mean.cpu()).square() + prediction.epistemic_variance.cpu()
        with Streams(self._seed, 0).around_network(torch.device("cpu")):
            network = mlp(self.n_features_in_, self._num_outputs, NOISE_HIDDEN, nn.Tanh)
        bnn = BNN(network, Centred()).to(self.device, self._plan.dtype)
        self._run(
            bnn,
            (inputs, squares.sqrt() / self._shared_noise()),
            weights,
            NOISE_BETA,
            epochs=self._plan.noise_epochs,
            lr=NOISE_LR,
            schedule="cosine",
            warmup_steps=0,
            purpose="noise",
        )
        self.noise_bnn_ = bnn

    def _shared_noise(self) -> Tensor:
        """Return the standard deviation of the noise that the network was trained with, for each target."""
        likelihood = self.bnn_.likelihood
        assert isinstance(likelihood, Gaussian)
        return likelihood.log_noise.detach().exp().cpu()

    def _variance(self, prediction: Prediction, inputs: Tensor) -> Tensor:
        assert prediction.variance is not None
        if self.noise_bnn_ is None:
            return prediction.variance
        ratio = self._predict(self.noise_bnn_, inputs, "mean").variance
        assert ratio is not None
        noise = self._shared_noise().square() * ratio.cpu()
        return noise if prediction.epistemic_variance is None else prediction.epistemic_variance.cpu() + noise

    # -- targets ----------------------------------------------------------------------------------------------------

    def _checked(self, X: Any, y: Any, reset: bool) -> tuple[Any, Any]:
        X, y = validate_data(self, X, y, reset=reset, dtype=(np.float64, np.float32), multi_output=True, y_numeric=True)
        return X, y

    def _forget(self) -> None:
        self._target_scaler: Any = StandardScaler()

    def _learn_targets(self, y: Any, weights: Any) -> None:
        self._target_scaler.partial_fit(y.reshape(len(y), -1).astype(np.float64), sample_weight=weights)
        self._one_column = y.ndim == 1

    def _encoded(self, y: Any) -> Tensor:
        scaled = self._target_scaler.transform(y.reshape(len(y), -1).astype(np.float64))
        return torch.as_tensor(scaled, dtype=self._plan.dtype)

    def _likelihood(self) -> Likelihood:
        return Gaussian(num_outputs=self._num_outputs)

    @property
    def _num_outputs(self) -> int:
        return len(self._target_scaler.mean_)

    def _restored(self, mean: Tensor) -> np.ndarray:
        values = self._target_scaler.inverse_transform(mean.double().cpu().numpy())
        return values[:, 0] if self._one_column else values

    def _scaled_back(self, variance: Tensor) -> np.ndarray:
        values = variance.double().cpu().numpy() * np.square(self._target_scaler.scale_)
        return values[:, 0] if self._one_column else values

    def _nll(self, X: Any, y: Any, sample_weight: Any) -> float:
        mean, std = self.predict(X, return_std=True)
        values = 0.5 * np.square((y - mean) / std) + np.log(std) + 0.5 * np.log(2 * np.pi)
        return float(np.average(values.reshape(len(y), -1).sum(1), weights=sample_weight))

    def __sklearn_tags__(self) -> Any:
        """Say that several targets at once are fine."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
