"""Regression on the nine UCI tables with the field's usual network and splits."""

from varlap.experiments.uci.run import AllDivergedError, Progress, Tuned, UCIExperiment
from varlap.experiments.uci.spec import TableRecipe, TableRun, published
from varlap.experiments.uci.store import TableResult, TableStore

__all__ = [
    "AllDivergedError",
    "Progress",
    "TableRecipe",
    "TableResult",
    "TableRun",
    "TableStore",
    "Tuned",
    "UCIExperiment",
    "published",
]
