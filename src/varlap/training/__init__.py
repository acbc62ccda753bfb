"""Training: the one step, and the loop around it."""

from varlap.training.fit import FitSettings, History, fit
from varlap.training.optimizer import adam
from varlap.training.step import TrainingStep

__all__ = ["FitSettings", "History", "TrainingStep", "adam", "fit"]
