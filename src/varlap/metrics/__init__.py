"""Metrics: how good the probabilities are. Functions of tensors; `score` and `evaluate` give all that apply."""

from varlap.metrics.accumulator import Scores, score
from varlap.metrics.calibration import (
    ReliabilityBins,
    adaptive_ece,
    aurc,
    classwise_ece,
    ece,
    reliability_bins,
    risk_coverage,
)
from varlap.metrics.detection import aupr, auroc, fpr_at_tpr
from varlap.metrics.evaluate import evaluate
from varlap.metrics.regression import coverage, crps, log_likelihood, rmse, width
from varlap.metrics.scores import accuracy, brier, nll, top_k_accuracy

__all__ = [
    "ReliabilityBins",
    "Scores",
    "accuracy",
    "adaptive_ece",
    "aupr",
    "aurc",
    "auroc",
    "brier",
    "classwise_ece",
    "coverage",
    "crps",
    "ece",
    "evaluate",
    "fpr_at_tpr",
    "log_likelihood",
    "nll",
    "reliability_bins",
    "risk_coverage",
    "rmse",
    "score",
    "top_k_accuracy",
    "width",
]
