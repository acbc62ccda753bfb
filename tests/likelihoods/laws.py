"""Built-in likelihoods beside torch's distributions of the same laws."""

import pytest
import torch
from torch import distributions

import varlap
from varlap.likelihoods.centred import Centred

DOUBLE = torch.float64

# name: (how it is made, channels of the outputs, its law as torch writes it)
BUILT_IN = {
    "categorical": (varlap.Categorical, 4, lambda lik, o: distributions.Categorical(logits=o.movedim(1, -1))),
    "bernoulli": (varlap.Bernoulli, 3, lambda lik, o: distributions.Bernoulli(logits=o)),
    "gaussian": (lambda: varlap.Gaussian(0.7), 3, lambda lik, o: distributions.Normal(o, lik.log_noise.exp())),
    "gaussian-known": (
        lambda: varlap.Gaussian(2.0, learnt=False),
        3,
        lambda lik, o: distributions.Normal(o, lik.log_noise.exp()),
    ),
    "heteroscedastic": (
        varlap.Heteroscedastic,
        4,
        lambda lik, o: distributions.Normal(o.chunk(2, 1)[0], o.chunk(2, 1)[1].exp()),
    ),
    "centred": (Centred, 3, lambda lik, o: distributions.Normal(torch.zeros_like(o), o.exp())),
    "poisson": (varlap.Poisson, 3, lambda lik, o: distributions.Poisson(o.exp())),
}
over_likelihoods = pytest.mark.parametrize("name", BUILT_IN)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
