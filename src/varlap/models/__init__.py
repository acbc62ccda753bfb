"""Networks for the experiments, and the search for activations that VL cannot use."""

from varlap.models.convnet import convnet
from varlap.models.kinks import Kink, find_kinks
from varlap.models.mlp import mlp
from varlap.models.preact_resnet import PreactResNet, preact_resnet18
from varlap.models.smooth import smooth

__all__ = ["Kink", "PreactResNet", "convnet", "find_kinks", "mlp", "preact_resnet18", "smooth"]
