"""Experiments: what was run, and what came out of it."""

from varlap.experiments.evaluation import Evaluated, origin

__all__ = ["Evaluated", "origin"]
