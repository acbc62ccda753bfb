"""Out-of-distribution detection from uncertainties.

**What is outside is the positive side**, and a higher score must mean "more likely outside", as entropy, mutual
information and variance do; for a confidence give its negative. `inside` and `outside` hold one score for each item.
"""

import torch
from torch import Tensor

from varlap.errors import BatchError, ConfigError, NonFiniteError
from varlap.metrics.rows import wide


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Return the probability that an outside item scores higher than an inside one (ties count half).

    >>> auroc(inside=torch.tensor([0.1, 0.4]), outside=torch.tensor([0.3, 2.0]))
    0.75
    """
    from torchmetrics.functional.classification import binary_auroc  # slow to import

    return float(binary_auroc(*_ranked(inside, outside), validate_args=False))


def aupr(inside: Tensor, outside: Tensor) -> float:
    """Return the area under precision against recall of the outside items (average precision); by chance their share.

    >>> round(aupr(inside=torch.tensor([0.1, 0.4]), outside=torch.tensor([0.3, 2.0])), 4)
    0.8333
    """
    from torchmetrics.functional.classification import binary_average_precision

    return float(binary_average_precision(*_ranked(inside, outside), validate_args=False))


def fpr_at_tpr(inside: Tensor, outside: Tensor, tpr: float = 0.95) -> float:
    """Return the share of inside items that raise a false alarm where at least `tpr` of the outside ones are found.

    >>> fpr_at_tpr(inside=torch.tensor([0.1, 0.4]), outside=torch.tensor([0.3, 2.0]))
    0.5
    """
    if not 0 < tpr <= 1:
        raise ConfigError(f"fpr_at_tpr(tpr={tpr}) must be above 0 and at most 1; 0.95 is usual")
    from torchmetrics.functional.classification import binary_roc

    scores, is_outside = _ranked(inside, outside)
    false_alarms, found, _ = binary_roc(scores, is_outside, validate_args=False)
    # As a count: a share in single precision may miss 0.95 by its last bit.
    enough = (found * len(outside)).round() >= tpr * outside.numel() * (1 - 1e-12)
    return float(false_alarms[enough][0])


def _ranked(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Return ranks from 0 to 1 of all scores, with 1 for the outside items.

    Ranks, since torchmetrics puts scores beyond 1 through a sigmoid, in which large ones become equal.
    """
    for name, scores in (("inside", inside), ("outside", outside)):
        if not scores.numel():
            raise BatchError(f"{name} holds no scores; detection needs at least one item on each side")
        if scores.ndim != 1:
            raise BatchError(
                f"{name} has shape {tuple(scores.shape)}; give one score for each item, for example the mean over its "
                "positions, scores.flatten(1).mean(1)"
            )
        if bool(scores.isnan().any()):
            raise NonFiniteError(f"{name} holds NaN; did the network diverge?")
    scores = torch.cat([inside, outside.to(inside)])
    values, rank = scores.unique(return_inverse=True)
    is_outside = torch.arange(len(scores), device=scores.device) >= len(inside)
    return wide(rank) / max(len(values) - 1, 1), is_outside.long()
