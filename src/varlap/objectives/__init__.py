"""Objectives: MAP (Eq. 6), VI (Eqs. 5, 11), VL (Eqs. 29-30), VL(H) (Eq. 20) and the full determinant (Eq. 9)."""

from varlap.objectives.map import MAP
from varlap.objectives.objective import Objective
from varlap.objectives.terms import Terms
from varlap.objectives.vi import VI
from varlap.objectives.vl import VL
from varlap.objectives.vl_determinant import VLDeterminant
from varlap.objectives.vl_hessian import UnboundedVariances, VLHessian, unbounded_variances

__all__ = [
    "MAP",
    "VI",
    "VL",
    "Objective",
    "Terms",
    "UnboundedVariances",
    "VLDeterminant",
    "VLHessian",
    "unbounded_variances",
]
