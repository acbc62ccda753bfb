"""Where a command computes."""

import os

import torch

from varlap.errors import ConfigError, warn
from varlap.experiments.spec import USUAL_WIDTH


def choose_device(wanted: str | None) -> torch.device:
    """Choose the device; under torchrun each rank has its own GPU.

    >>> choose_device("gpu")
    Traceback (most recent call last):
    varlap.errors.ConfigError: --device gpu is none that torch knows; choose cpu or cuda...
    """
    try:
        device = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:  # which lists some twenty, most of them of no use here
        mps = ", or mps" if torch.backends.mps.is_available() else ""
        raise ConfigError(f"--device {wanted} is none that torch knows; choose cpu or cuda{mps}") from error
    try:
        if device.type == "cuda" and "LOCAL_RANK" in os.environ:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {wanted} cannot be used here; try cpu ({str(error).splitlines()[0]})") from error
    return device


def warn_if_slow(device: torch.device, model: str, width: int, instead: str) -> None:
    """Say before hours of silence that a network is too large for a CPU."""
    if device.type == "cpu" and model == "preact-resnet-18" and width >= USUAL_WIDTH:
        warn(
            "PreactResNet-18 takes seconds a step on a CPU, and a long training days; for a first look take a smaller "
            f"network: {instead}"
        )
