"""Metrics: how good the probabilities are."""

from varlap.metrics.evaluate import evaluate

__all__ = ["evaluate"]
