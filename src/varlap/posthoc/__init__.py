"""After training: Laplace's method (Eqs. 7, 23), and whether the variances have converged."""

from varlap.posthoc.laplace import laplace
from varlap.posthoc.variance_gap import VarianceGap, variance_gap

__all__ = ["VarianceGap", "laplace", "variance_gap"]
