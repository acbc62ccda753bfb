"""`VLClassifier` and `VLRegressor`: Variational Laplace as scikit-learn estimators."""

from varlap.errors import missing_extra

try:
    import sklearn  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "sklearn":  # what it needs itself is another matter
        raise
    raise missing_extra("sklearn", "varlap.VLClassifier and varlap.VLRegressor") from error

from varlap.integrations.scikit_learn.classifier import VLClassifier
from varlap.integrations.scikit_learn.regressor import VLRegressor

__all__ = ["VLClassifier", "VLRegressor"]
