"""Experiments: what was run, and what came out of it."""

from varlap.experiments.assessment import assess, draw_figures
from varlap.experiments.evaluation import Evaluated, origin
from varlap.experiments.grid import Experiment
from varlap.experiments.grid_run import run_grid
from varlap.experiments.image_task import ImageTask
from varlap.experiments.outside import outside
from varlap.experiments.spec import RunSpec
from varlap.experiments.store import Result, Store
from varlap.experiments.trained_run import TrainedRun

__all__ = [
    "Evaluated",
    "Experiment",
    "ImageTask",
    "Result",
    "RunSpec",
    "Store",
    "TrainedRun",
    "assess",
    "draw_figures",
    "origin",
    "outside",
    "run_grid",
]
