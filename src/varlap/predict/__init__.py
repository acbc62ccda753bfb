"""Prediction: one function a mode."""

from varlap.predict.mean import predict

__all__ = ["predict"]
