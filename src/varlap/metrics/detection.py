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
    return ranked_auroc(*ranks(inside, outside))


def aupr(inside: Tensor, outside: Tensor) -> float:
    """Return the area under precision against recall of the outside items (average precision); by chance their share.

    >>> round(aupr(inside=torch.tensor([0.1, 0.4]), outside=torch.tensor([0.3, 2.0])), 4)
    0.8333
    """
    return ranked_aupr(*ranks(inside, outside))


def fpr_at_tpr(inside: Tensor, outside: Tensor, tpr: float = 0.95) -> float:
    """Return the share of inside items that raise a false alarm where at least `tpr` of the outside ones are found.

    >>> fpr_at_tpr(inside=torch.tensor([0.1, 0.4]), outside=torch.tensor([0.3, 2.0]))
    0.5
    """
    if not 0 < tpr <= 1:
        raise ConfigError(f"fpr_at_tpr(tpr={tpr}) must be above 0 and at most 1; 0.95 is usual")
    return ranked_fpr(*ranks(inside, outside), tpr)


def ranks(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ranks of the scores among all, from 0 to 1; equal scores have equal ranks.

    For torchmetrics, which puts scores beyond 1 through a sigmoid, in which large ones become equal.
    """
    for name, scores in (("inside", inside), ("outside", outside)):
        if scores.ndim != 1:
            raise BatchError(
                f"{name} has shape {tuple(scores.shape)}; give one score for each item, for example the mean over its "
                "positions, scores.flatten(1).mean(1)"
            )
        if not len(scores):
            raise BatchError(f"{name} holds no scores; detection needs at least one item on each side")
        if bool(scores.isnan().any()):
            raise NonFiniteError(f"{name} holds NaN; did the network diverge?")
    values, rank = torch.cat([inside, outside.to(inside)]).unique(return_inverse=True)
    rank = wide(rank) / max(len(values) - 1, 1)
    return rank[: len(inside)], rank[len(inside) :]


def ranked_auroc(inside: Tensor, outside: Tensor) -> float:
    """Return the AUROC of scores between 0 and 1."""
    from torchmetrics.functional.classification import binary_auroc  # slow to import

    return float(binary_auroc(*_marked(inside, outside), validate_args=False))


def ranked_aupr(inside: Tensor, outside: Tensor) -> float:
    """Return the average precision of scores between 0 and 1."""
    from torchmetrics.functional.classification import binary_average_precision

    return float(binary_average_precision(*_marked(inside, outside), validate_args=False))


def ranked_fpr(inside: Tensor, outside: Tensor, tpr: float = 0.95) -> float:
    """Return the false alarms of scores between 0 and 1."""
    from torchmetrics.functional.classification import binary_roc

    false_alarms, found, _ = binary_roc(*_marked(inside, outside), validate_args=False)
    num_found = (found * len(outside)).round()  # a share in single precision may miss 0.95 by its last bit
    return float(false_alarms[num_found >= tpr * len(outside) - 1e-6][0])


def _marked(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Return all scores, and 1 for each that is outside."""
    scores = torch.cat([inside, outside])
    return scores, (torch.arange(len(scores), device=scores.device) >= len(inside)).long()
