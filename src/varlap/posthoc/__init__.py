"""After training: Laplace's method (Eqs. 7, 23), temperature scaling, and whether the variances have converged."""

from varlap.posthoc.laplace import laplace
from varlap.posthoc.temperature import fit_temperature
from varlap.posthoc.variance_gap import VarianceGap, variance_gap

__all__ = ["VarianceGap", "fit_temperature", "laplace", "variance_gap"]
