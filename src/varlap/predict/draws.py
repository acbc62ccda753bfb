"""Draws of the weights that a seed determines, the same for every input and every batch size."""

from torch import Tensor

from varlap.errors import ConfigError
from varlap.posterior import BNN
from varlap.streams import Streams


def deviations(bnn: BNN, seed: int, number: int) -> dict[str, Tensor]:
    """Return w − μ = σ ε of the posterior's draw of this number, by parameter name.

    >>> import torch
    >>> bnn = BNN(torch.nn.Linear(2, 1))
    >>> torch.equal(deviations(bnn, 0, 3)["weight"], deviations(bnn, 0, 3)["weight"])
    True
    """
    noise = weight_noise(bnn, seed, number)
    return {
        name: (bnn.log_sigma[name].detach().exp() * noise[name]).to(mean.dtype) for name, mean in bnn.means().items()
    }


def weight_noise(bnn: BNN, seed: int, number: int) -> dict[str, Tensor]:
    """Draw ε for every Bayesian weight from the stream of (seed, number)."""
    return bnn.draw_noise(Streams(seed, number).generator("weights", bnn.device))


def checked_num_samples(num_samples: int | None, default: int) -> int:
    """Return the number of draws, or say what is wrong with it."""
    if num_samples is None:
        return default
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise ConfigError(f"predict(num_samples={num_samples!r}) must be a whole number of at least 1")
    return num_samples
