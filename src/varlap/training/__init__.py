"""Training: optimizers."""

from varlap.training.optimizer import adam

__all__ = ["adam"]
