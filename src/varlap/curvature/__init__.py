"""Curvature: the Fisher's diagonal (Eqs. 25-26), the Hessian's (Eq. 15), and double backward passes done fast."""

from varlap.curvature.diagonal import fisher_diagonal, hessian_diagonal
from varlap.curvature.exact_fisher import ExactFisher
from varlap.curvature.fisher import DEFAULT, DEFAULT_FOR_NUMBERS, EmpiricalFisher, Fisher
from varlap.curvature.hessian import Hessian
from varlap.curvature.protocol import Curvature, Estimate

__all__ = [
    "DEFAULT",
    "DEFAULT_FOR_NUMBERS",
    "Curvature",
    "EmpiricalFisher",
    "Estimate",
    "ExactFisher",
    "Fisher",
    "Hessian",
    "fisher_diagonal",
    "hessian_diagonal",
]
