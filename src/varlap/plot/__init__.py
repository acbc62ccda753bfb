"""Plots of what was learnt: calibration, variances, training, and predictions with their uncertainty.

Each function draws on the `ax` that it is given and returns it. Without one it makes a figure of its own, which pyplot
does not know, so that it needs no closing: `varlap.plot.elbo_terms(history).figure.savefig("elbo.png")`; a notebook
shows `ax.figure`. To see a window, pass an `ax` of `plt.subplots()`. Tensors may be on any device, arrays are as good,
and a prediction is what `bnn.predict` returns. Nothing here changes matplotlib's settings; it comes with the extra
`varlap[plot]` and is imported by the first plot.
"""

from varlap.plot.calibration import reliability, risk_coverage
from varlap.plot.decision import decision_2d
from varlap.plot.detection import entropy_histogram
from varlap.plot.elbo import elbo_terms
from varlap.plot.images import least_sure
from varlap.plot.regression import regression_band
from varlap.plot.variances import sigma_over_s, travelling_variances

__all__ = [
    "decision_2d",
    "elbo_terms",
    "entropy_histogram",
    "least_sure",
    "regression_band",
    "reliability",
    "risk_coverage",
    "sigma_over_s",
    "travelling_variances",
]
