"""Likelihoods: what the network's outputs say about the targets. One file each."""

from varlap.likelihoods.bernoulli import Bernoulli
from varlap.likelihoods.categorical import Categorical
from varlap.likelihoods.choose import choose_likelihood
from varlap.likelihoods.gaussian import Gaussian
from varlap.likelihoods.heteroscedastic import Heteroscedastic
from varlap.likelihoods.poisson import Poisson
from varlap.likelihoods.prediction import Prediction
from varlap.likelihoods.protocol import Likelihood

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Heteroscedastic",
    "Likelihood",
    "Poisson",
    "Prediction",
    "choose_likelihood",
]
