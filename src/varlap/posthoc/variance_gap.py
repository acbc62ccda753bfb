"""Have the variances converged? The early stopping of the paper's section 5.1, as a number."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from varlap.errors import ConfigError
from varlap.posterior import BNN
from varlap.posterior.kl import kl_divergence
from varlap.posterior.mean_field import optimal_log_sigmas

TOLERANCE = 0.03  # one per cent of the start's distance: rounding must not count as out of reach


@dataclass(frozen=True)
class VarianceGap:
    """How far the log σ are from their optimum, how far they can still go, and what that costs.

    >>> VarianceGap(3.0, 3.5, reach=3.9, share_out_of_reach=0.0, elbo_lost=0.1).can_converge
    True
    """

    median_distance: float
    """median of |log σ − log σ*| over the weights"""
    largest_distance: float
    reach: float
    """how far Adam can still move a log σ: the sum of its learning rates over the steps left"""
    share_out_of_reach: float
    """share of weights whose optimum is farther than that"""
    elbo_lost: float
    """ELBO per datum that the present variances lose against the best ones at these means"""

    @property
    def can_converge(self) -> bool:
        """Whether every log σ can still reach its optimum."""
        return self.share_out_of_reach == 0


@torch.no_grad()
def variance_gap(
    bnn: BNN,
    curvature: Mapping[str, Tensor],
    *,
    num_data: int,
    beta: float,
    log_sigma_lr: float | Sequence[float],
    steps_left: int | None = None,
) -> VarianceGap:
    """Compare each log σ with its optimum for a curvature f per datum (`varlap.fisher_diagonal` gives one).

    Adam moves a parameter by about its learning rate a step at most (Eq. 32), so it can still go `steps_left` times
    that, or the sum over a schedule if `log_sigma_lr` is a sequence.

    >>> import torch, varlap
    >>> bnn = varlap.BNN(torch.nn.Linear(2, 1), likelihood="gaussian")
    >>> nothing = {name: torch.zeros_like(mean) for name, mean in bnn.means().items()}
    >>> gap = variance_gap(bnn, nothing, num_data=50_000, beta=1.0, log_sigma_lr=1e-4, steps_left=39_000)
    >>> round(gap.largest_distance, 3), round(gap.reach, 3), gap.can_converge  # 3 to move, 4 possible
    (3.0, 3.9, True)
    """
    if not beta > 0:
        raise ConfigError(f"variance_gap(beta={beta}) must be positive: at 0 the best variance is 0")
    if isinstance(log_sigma_lr, Sequence):
        reach = sum(log_sigma_lr)
    elif steps_left is None:
        raise ConfigError("variance_gap needs steps_left with one learning rate, or a learning rate for each step left")
    else:
        reach = log_sigma_lr * steps_left
    optimum = optimal_log_sigmas(bnn.log_sigma, curvature, bnn.prior_scale, num_data, beta)
    distances: list[Tensor] = []
    lost = 0.0
    for name, mean in bnn.means().items():
        f, scale = curvature[name], bnn.prior_scale[name]
        log_sigma = bnn.log_sigma[name].expand(mean.shape)
        best = optimum[name].expand(mean.shape)
        distances.append((log_sigma - best).abs().flatten())
        for sign, candidate in ((1, log_sigma), (-1, best)):
            penalty = 0.5 * ((2 * candidate).exp() * f).sum()
            kl = kl_divergence(mean, candidate, bnn.prior_mean_of(name), scale)
            lost += sign * float(penalty + beta * kl / num_data)
    distance = torch.cat(distances)
    out_of_reach = float((distance > reach + TOLERANCE).double().mean())
    return VarianceGap(float(distance.median()), float(distance.max()), float(reach), out_of_reach, lost)
