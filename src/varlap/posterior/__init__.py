"""The posterior: prior (Eq. 1), mean-field Gaussian (Eqs. 2, 4), KL (Eq. 12), and the network that carries them."""

from varlap.posterior.bnn import BNN
from varlap.posterior.prior import EmpiricalBayesPrior, FanInPrior, OneScalePrior, Prior, Weight

__all__ = ["BNN", "EmpiricalBayesPrior", "FanInPrior", "OneScalePrior", "Prior", "Weight"]
