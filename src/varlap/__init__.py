"""Variational Laplace for PyTorch: train any network as a Bayesian neural network without sampling its weights."""

from varlap import data, errors, metrics, models, plot, report
from varlap.curvature import (
    Curvature,
    EmpiricalFisher,
    ExactFisher,
    Fisher,
    Hessian,
    fisher_diagonal,
    hessian_diagonal,
)
from varlap.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Heteroscedastic,
    Likelihood,
    Poisson,
    Prediction,
)
from varlap.metrics import evaluate
from varlap.models import find_kinks, smooth
from varlap.objectives import (
    MAP,
    VI,
    VL,
    Terms,
    UnboundedVariances,
    VLDeterminant,
    VLHessian,
    unbounded_variances,
)
from varlap.posterior import BNN, EmpiricalBayesPrior, FanInPrior, OneScalePrior, Prior, Weight
from varlap.posthoc import VarianceGap, fit_temperature, laplace, variance_gap
from varlap.predict import reestimate_statistics
from varlap.training import FitSettings, History, TrainingStep, adam, fit, load

__version__ = "0.1.0.dev0"

__all__ = [
    "BNN",
    "MAP",
    "VI",
    "VL",
    "Bernoulli",
    "Categorical",
    "Curvature",
    "EmpiricalBayesPrior",
    "EmpiricalFisher",
    "ExactFisher",
    "FanInPrior",
    "Fisher",
    "FitSettings",
    "Gaussian",
    "Hessian",
    "Heteroscedastic",
    "History",
    "Likelihood",
    "OneScalePrior",
    "Poisson",
    "Prediction",
    "Prior",
    "Terms",
    "TrainingStep",
    "UnboundedVariances",
    "VLDeterminant",
    "VLHessian",
    "VarianceGap",
    "Weight",
    "adam",
    "data",
    "errors",
    "evaluate",
    "find_kinks",
    "fisher_diagonal",
    "fit",
    "fit_temperature",
    "hessian_diagonal",
    "laplace",
    "load",
    "metrics",
    "models",
    "plot",
    "reestimate_statistics",
    "report",
    "smooth",
    "unbounded_variances",
    "variance_gap",
]
