"""Experiments: what was run, and what came out of it."""

from varlap.experiments.assessment import assess, draw_figures
from varlap.experiments.evaluation import Evaluated, origin
from varlap.experiments.image_task import ImageTask
from varlap.experiments.outside import outside
from varlap.experiments.trained_run import TrainedRun

__all__ = ["Evaluated", "ImageTask", "TrainedRun", "assess", "draw_figures", "origin", "outside"]
