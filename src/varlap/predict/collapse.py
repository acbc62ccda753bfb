"""When draws of the weights tell little: they predict far worse than the mean network, or nothing has set σ."""

import logging
import weakref

import torch
from torch import Tensor, nn

from varlap.errors import warn
from varlap.posterior import BNN
from varlap.posterior.bnn import LOG_SIGMA_START

log = logging.getLogger(__name__)

MOST_RELATIVE_NOISE = 0.8

_told: "weakref.WeakSet[BNN]" = weakref.WeakSet()
_nothing_to_tell: "weakref.WeakSet[BNN]" = weakref.WeakSet()  # of batch norm: variances are right, or it was told
_cancelled: "weakref.WeakKeyDictionary[BNN, str]" = weakref.WeakKeyDictionary()


@torch.no_grad()
def relative_noise(bnn: BNN) -> float:
    """Return Σσ²/Σμ² over the Bayesian matrices and kernels: how much a draw of the weights adds to them.

    A layer's output for a typical input has a signal in proportion to Σμ² and, at sampled weights, a noise in
    proportion to Σσ². The ratio grows with weights × β / data, which the posterior does not know: the best variance
    is at most β/(N f), so more of it means more weights whose variance the data do not hold down. Biases and scales
    of norms are left out, since their size says nothing of the signal.

    >>> import varlap
    >>> bnn = BNN(torch.nn.Linear(2, 2), prior=varlap.OneScalePrior(1.0))
    >>> _ = torch.nn.init.ones_(bnn.network.weight), torch.nn.init.zeros_(bnn.log_sigma["weight"])
    >>> relative_noise(bnn)
    1.0
    """
    matrices = {name: mean for name, mean in bnn.means().items() if mean.ndim > 1}
    noise = sum(_total_variance(bnn, name, mean) for name, mean in matrices.items())
    signal = sum(float(mean.square().sum()) for mean in matrices.values())
    return noise / max(signal, torch.finfo(torch.float32).tiny)


def _total_variance(bnn: BNN, name: str, mean: Tensor) -> float:
    variance = (2 * bnn.log_sigma[name]).exp().expand(mean.shape)
    constant = bnn.padding_rows.get(name, [])  # no draw adds to these
    return float(variance.sum()) - float(variance[constant].sum())


def warn_of_collapse(bnn: BNN) -> None:
    """Warn where a draw adds about as much noise as there is signal.

    The limit of 0.8 was measured on VL posteriors of an MLP, a wider one and a convnet with batch norm, for 300 and
    1,000 digits and β from 0.001 to 1: every run that lost more than 0.1 of NLL by sampling was above 0.8, and of the
    runs below it the worst lost 0.06. Some runs above it lose little: a wide network averages its noise.
    """
    noise = relative_noise(bnn)
    if noise > MOST_RELATIVE_NOISE:
        warn(
            "weight samples of this posterior are likely to predict far worse than the mean network: a draw adds "
            f"{noise:.2g} times the sum of squares of the mean weights (limit {MOST_RELATIVE_NOISE}), as happens where "
            "weights × beta / data is large; use how='linearised', with batch norm after varlap.laplace(bnn, data, "
            "beta), or how='mean' for the best NLL"
        )


@torch.no_grad()
def tell_of_untrained_variances(bnn: BNN) -> None:
    """Log, once for a network, that its variances are those it began with, as after MAP."""
    if bnn in _told:
        return
    moved = (bnn.log_sigma[name] - bnn.prior_scale[name].log() - LOG_SIGMA_START for name in bnn.log_sigma)
    if all(float(change.abs().max()) < 1e-5 for change in moved):
        _told.add(bnn)
        log.warning(
            "the variances are those of the start: MAP does not train them, nor does VL in closed form without "
            "update_variances, so what draws of the weights leave open means nothing; set them by "
            "varlap.laplace(bnn, data), or train by varlap.VL or varlap.VI"
        )


def note_variances_of_evaluation(bnn: BNN) -> None:
    """Note that the variances were estimated in evaluation mode, as prediction sees the network."""
    _nothing_to_tell.add(bnn)


def note_cancelled(bnn: BNN, names: str) -> None:
    """Note the weights that batch norm was seen to cancel in training, for the warning below."""
    _cancelled[bnn] = names


def warn_of_batch_statistics(bnn: BNN) -> None:
    """Warn, once for a network, that variances learnt beside a batch's statistics are not those of evaluation mode."""
    names = _cancelled.get(bnn)
    if bnn in _nothing_to_tell or not (names or _weights_before_statistics(bnn)):
        return
    _nothing_to_tell.add(bnn)
    worst = f" (far worse for {names}: cancelled there, so that nothing held the variances)" if names else ""
    warn(
        "batch norm follows Bayesian weights: where their variances were learnt in training, with the statistics of "
        f"batches, draws may predict worse than they could{worst}; varlap.laplace(bnn, train, beta), with the beta of "
        "the training, estimates the variances again as prediction sees the network, and leaves the means"
    )


def _weights_before_statistics(bnn: BNN) -> bool:
    """Whether batch norm was registered behind Bayesian weights, which tells only roughly what it follows."""
    bayesian, found = {id(mean) for mean in bnn.means().values()}, False
    for module in bnn.network.modules():
        if found and isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            return True
        found = found or any(id(parameter) in bayesian for parameter in module.parameters(recurse=False))
    return False
