"""`VLClassifier` and `VLRegressor`: Variational Laplace as scikit-learn estimators."""

from varlap.errors import needs_extra

with needs_extra("sklearn", "varlap.VLClassifier and varlap.VLRegressor", "sklearn"):
    import sklearn  # noqa: F401

from varlap.integrations.scikit_learn.classifier import VLClassifier
from varlap.integrations.scikit_learn.regressor import VLRegressor

__all__ = ["VLClassifier", "VLRegressor"]
