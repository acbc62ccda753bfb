"""Variational Laplace for PyTorch: train any network as a Bayesian neural network without sampling its weights."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

__version__ = "0.1.0.dev0"

# Where each public name lives. It is imported when it is first used, so that `import varlap` costs next to nothing;
# `__init__.pyi` tells type checkers and the documentation the same.
_HOMES = {
    "curvature": (
        "Curvature",
        "EmpiricalFisher",
        "ExactFisher",
        "Fisher",
        "Hessian",
        "fisher_diagonal",
        "hessian_diagonal",
    ),
    "likelihoods": ("Bernoulli", "Categorical", "Gaussian", "Heteroscedastic", "Likelihood", "Poisson", "Prediction"),
    "integrations.scikit_learn": ("VLClassifier", "VLRegressor"),
    "metrics": ("evaluate",),
    "models": ("find_kinks", "smooth"),
    "objectives": (
        "MAP",
        "VI",
        "VL",
        "Terms",
        "UnboundedVariances",
        "VLDeterminant",
        "VLHessian",
        "unbounded_variances",
    ),
    "posterior": ("BNN", "EmpiricalBayesPrior", "FanInPrior", "OneScalePrior", "Prior", "Weight"),
    "posthoc": ("VarianceGap", "fit_temperature", "laplace", "variance_gap"),
    "predict": ("reestimate_statistics",),
    "training": ("FitSettings", "History", "TrainingStep", "adam", "fit", "load", "sgd"),
}
_MODULES = ("data", "errors", "metrics", "models", "plot", "report")
_NEEDS = {"integrations.scikit_learn": "sklearn"}  # where it is missing, `from varlap import *` goes without the names
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

_MISSING = {home for home, package in _NEEDS.items() if find_spec(package) is None}

__all__ = sorted((*(name for name, home in _HOME_OF.items() if home not in _MISSING), *_MODULES))  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"varlap.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'varlap' has no attribute {name!r}")
    value = getattr(import_module(f"varlap.{_HOME_OF[name]}"), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
