"""Prediction: one file a mode, and `predict`, which chooses."""

from varlap.predict.dispatch import How, predict
from varlap.predict.statistics import reestimate_statistics

__all__ = ["How", "predict", "reestimate_statistics"]
