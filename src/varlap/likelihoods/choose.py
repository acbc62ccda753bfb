"""From a likelihood's name to the likelihood."""

from collections.abc import Callable

from varlap.errors import ConfigError, did_you_mean
from varlap.likelihoods.bernoulli import Bernoulli
from varlap.likelihoods.categorical import Categorical
from varlap.likelihoods.gaussian import Gaussian
from varlap.likelihoods.heteroscedastic import Heteroscedastic
from varlap.likelihoods.poisson import Poisson
from varlap.likelihoods.protocol import Likelihood

BUILT_IN: dict[str, Callable[[], Likelihood]] = {
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": Gaussian,
    "heteroscedastic": Heteroscedastic,
    "poisson": Poisson,
}


USUAL_NAMES = {
    **dict.fromkeys(("cross_entropy", "crossentropy", "cross-entropy", "softmax", "classification"), "categorical"),
    **dict.fromkeys(("bce", "binary", "sigmoid", "logistic"), "bernoulli"),
    **dict.fromkeys(("mse", "l2", "normal", "regression"), "gaussian"),
}
"""what losses and tasks are called elsewhere"""


def choose_likelihood(likelihood: str | Likelihood) -> Likelihood:
    """Return the built-in likelihood of that name, or the user's own object.

    >>> choose_likelihood("poisson")
    Poisson()
    """
    if isinstance(likelihood, str):
        if likelihood in BUILT_IN:
            return BUILT_IN[likelihood]()
        meant = USUAL_NAMES.get(likelihood.lower())
        hint = did_you_mean(likelihood, BUILT_IN) if meant is None else f"did you mean {meant!r}?"
        raise ConfigError(f"unknown likelihood {likelihood!r}: {hint}")
    if isinstance(likelihood, type) or not isinstance(likelihood, Likelihood):
        missing = [name for name in ("log_prob", "sample", "predict") if not hasattr(likelihood, name)]
        what = f"lacks {', '.join(missing)}" if missing else "is a class; pass an object of it"
        raise ConfigError(
            f"likelihood {likelihood!r} {what}; it must follow varlap.Likelihood, or be one of {', '.join(BUILT_IN)}"
        )
    return likelihood
