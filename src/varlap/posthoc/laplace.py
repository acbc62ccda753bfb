"""Laplace's method, Eqs. 7 and 23: variances from the curvature at the present mean."""

import math
from numbers import Real
from typing import Any, Literal

from torch import Tensor

from varlap.curvature import fisher_diagonal, hessian_diagonal
from varlap.data import count_items
from varlap.errors import ConfigError, warn
from varlap.posterior import BNN
from varlap.posterior.batch import check_finite
from varlap.posthoc.best_scales import set_best_scales
from varlap.predict.collapse import note_variances_of_evaluation


def laplace(
    bnn: BNN,
    data: Any,
    beta: float = 1.0,
    *,
    curvature: Literal["fisher", "sampled-fisher", "hessian"] = "fisher",
    num_data: int | None = None,
    num_probes: int | None = None,
    batch_size: int = 128,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Set every variance to σ² = β/(N f + β/s²) for the curvature f per datum at the present mean, in evaluation mode.

    After MAP this is Laplace's method, made for `bnn.predict(x, how="linearised")`. After VL or VI on a network with
    batch norm, with the same beta, it estimates the variances again as prediction sees the network: with running
    statistics instead of those of a batch, which predicts better. The means stay. The scales of an empirical-Bayes
    prior are set together with the variances, so that each are the best for the other; one that fits to a thousandth
    of its square stays, and one that the data leave open stays with a warning.

    Args:
        bnn: the network, at any mean: a MAP solution for Laplace's method proper.
        data: the training data: a tuple (x, y), a Dataset or a DataLoader.
        beta: tempering, as in training.
        curvature: "fisher" sums over the outputs' directions; "sampled-fisher" makes one draw an item, K times
            cheaper for K outputs; "hessian" is Eq. 7 as printed, and fails where it is not a maximum.
        num_data: N, where `data` is only a part of the training set; else it is counted.
        num_probes: for "hessian" on networks of more than 2,000 weights: Hutchinson's estimate.
        batch_size: items in memory at a time.
        seed: of the drawn labels or probes.

    Returns:
        f by parameter name, which `varlap.variance_gap` and the like can use again.

    >>> import torch, varlap
    >>> bnn = varlap.BNN(torch.nn.Linear(1, 1, bias=False), varlap.Gaussian(noise=1.0, learnt=False),
    ...                  prior=varlap.OneScalePrior(1.0))
    >>> _ = laplace(bnn, (torch.tensor([[1.0], [1.0], [1.0]]), torch.zeros(3, 1)))
    >>> bnn.log_sigma["weight"].exp().item()  # 1/√(3 + 1)
    0.5
    """
    if not (isinstance(beta, Real) and 0 < beta < math.inf):
        raise ConfigError(f"laplace(beta={beta!r}) must be a positive, finite number; 1 is Bayes")
    num_data = count_items(data) if num_data is None else num_data
    if not (isinstance(num_data, Real) and num_data >= 1):
        raise ConfigError(f"laplace(num_data={num_data!r}) must be at least 1: the number of items in the training set")
    if curvature == "fisher" or curvature == "sampled-fisher":
        labels = "exact" if curvature == "fisher" else "sampled"
        diagonal = fisher_diagonal(bnn, data, labels=labels, batch_size=batch_size, seed=seed)
    elif curvature == "hessian":
        hessian = hessian_diagonal(bnn, data, num_probes=num_probes, batch_size=batch_size, seed=seed)
        diagonal = {name: -h for name, h in hessian.items()}
    else:
        raise ConfigError(f"laplace(curvature={curvature!r}): choose 'fisher', 'sampled-fisher' or 'hessian'")
    named = [(f"the curvature of {name}", f) for name, f in diagonal.items()]
    check_finite(named, step=0, advice="look for weights or inputs that are not finite")
    _set_variances(bnn, diagonal, num_data, beta)
    note_variances_of_evaluation(bnn)
    return diagonal


def _set_variances(bnn: BNN, diagonal: dict[str, Tensor], num_data: int, beta: float) -> None:
    """Set the variances, and with them an empirical-Bayes prior's scales, each the best for the other."""
    before = {name: scale.clone() for name, scale in bnn.prior_scale.items()}
    left_open = set_best_scales(bnn, diagonal, num_data, beta) if bnn.prior.learnt else []
    if message := _negative_precisions(bnn, diagonal, num_data, beta):
        for name, scale in before.items():
            bnn.prior_scale[name].copy_(scale)
        raise ConfigError(message)
    bnn.set_optimal_variances(diagonal, num_data, beta)
    if left_open:
        warn(
            f"laplace: the prior's scale of {left_open[0]!r} has no optimum, or none near, so it stays: the data say "
            "hardly anything about these weights; give the BNN a prior that is not learnt, such as "
            "varlap.OneScalePrior(1.0), or leave them out by select"
        )


def _negative_precisions(bnn: BNN, diagonal: dict[str, Tensor], num_data: int, beta: float) -> str | None:
    """Say how many weights have no variance, if any."""
    wrong = {
        name: int((num_data * f + beta / bnn.prior_scale[name].square() <= 0).sum()) for name, f in diagonal.items()
    }
    if not any(wrong.values()):
        return None
    worst = max(wrong, key=lambda name: wrong[name])
    return (
        f"laplace(curvature='hessian'): {sum(wrong.values())} of {bnn.num_weights()} weights have no variance, "
        f"since the log-joint curves upwards there (most in {worst!r}); train to a maximum first, or use "
        "curvature='fisher'"
    )
