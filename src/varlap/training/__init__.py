"""Training: the one step, `fit`, its settings, checkpoints and progress."""

from varlap.training.fit import fit
from varlap.training.loop import History
from varlap.training.model_file import load
from varlap.training.optimizer import adam, sgd
from varlap.training.settings import FitSettings
from varlap.training.step import TrainingStep

__all__ = ["FitSettings", "History", "TrainingStep", "adam", "fit", "load", "sgd"]
