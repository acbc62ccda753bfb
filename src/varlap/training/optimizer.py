"""Adam with a faster log σ."""

from typing import Any

import torch

from varlap.errors import NetworkError
from varlap.posterior import BNN


def adam(bnn: BNN, lr: float = 1e-3, log_sigma_lr_multiplier: float = 10.0, **options: Any) -> torch.optim.Adam:
    """Return Adam over the means at `lr` and over log σ at a multiple of it (paper, section 5.1).

    It is short for `torch.optim.Adam(bnn.parameter_groups(lr, log_sigma_lr_multiplier), **options)`, on CUDA with
    `fused=True` unless you say otherwise.

    >>> optimizer = adam(BNN(torch.nn.Linear(2, 1)), lr=1e-4)
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.0001, 0.001]
    """
    if not isinstance(bnn, BNN):
        raise NetworkError(f"adam needs a BNN, got {type(bnn).__name__}; wrap the network: varlap.BNN(network)")
    if bnn.device.type == "cuda" and not options.keys() & {"fused", "foreach"}:
        options["fused"] = True
    return torch.optim.Adam(bnn.parameter_groups(lr, log_sigma_lr_multiplier), **options)
