"""`predict`: one call for every way of predicting."""

import math
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from varlap.errors import ConfigError, did_you_mean, warn
from varlap.likelihoods import Prediction
from varlap.posterior import BNN
from varlap.predict.average import average, predicted
from varlap.predict.closed_form import closed_form as closed_form_prediction, drawn_outputs, output_gaussian
from varlap.predict.collapse import tell_of_untrained_variances, warn_of_batch_statistics, warn_of_collapse
from varlap.predict.draws import checked_num_samples
from varlap.predict.inputs import Inputs
from varlap.predict.linearised import linearised_outputs
from varlap.predict.mean import mean_outputs
from varlap.predict.sampled import sampled_outputs
from varlap.streams import Streams

How = Literal["mean", "sampled", "linearised"]

DEFAULT_SAMPLES = 10  # the paper's number for VI
DEFAULT_LINEARISED = 30


@torch.inference_mode(False)  # in which nothing could be linearised
@torch.no_grad()
def predict(
    bnn: BNN,
    x: Any,
    how: How = "mean",
    *,
    num_samples: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    temperature: float | None = None,
    statistics: Any = None,
    closed_form: bool = False,
) -> Prediction:
    """Predict in evaluation mode and without gradients, and leave network and random generators as they were.

    Args:
        bnn: the network and its posterior.
        x: inputs as in training, tensors or arrays, moved to the network's device; or a DataLoader of them, or of pairs
            (x, y), that does not shuffle.
        how: "mean" uses the mean network; "sampled" averages networks whose weights are drawn from the
            posterior; "linearised" averages over the same draws of a network that is linear in its weights, f(x, μ) +
            J(x)(w − μ).
        num_samples: draws of the weights: by default 10 for "sampled", 30 for "linearised".
        seed: draw k of the weights is determined by (seed, k) on a kind of device, the same for every input and batch.
        batch_size: inputs at a time, where all at once are too many. Where weights are drawn on a CPU, 128 are faster
            than a thousand, and take less memory.
        temperature: divides the logits, for classes: what `varlap.fit_temperature` returns.
        statistics: for "sampled", training data or a part of them: each draw gets running statistics of
            batch norm of its own by a pass over them.
        closed_form: for "linearised", use the outputs' mean and covariance J diag(σ²) Jᵀ instead of draws of the
            weights: exact for a Gaussian likelihood, MacKay's probit approximation for classes. With `num_samples`,
            outputs are drawn from that Gaussian in place of the formula. Takes a Jacobian for each item.

    >>> import varlap
    >>> bnn = varlap.BNN(torch.nn.Linear(2, 3))
    >>> x = torch.zeros(4, 2)
    >>> predict(bnn, x).mutual_information is None
    True
    >>> predict(bnn, x, "linearised").mutual_information.shape
    torch.Size([4])
    """
    _check_how(how)
    if isinstance(temperature, str) or (temperature is not None and not 0 < temperature < math.inf):
        raise ConfigError(f"predict(temperature={temperature!r}) must be a positive number; 1 changes nothing")
    if statistics is not None and how != "sampled":
        raise ConfigError(
            f"predict(how={how!r}) has no use for statistics: they are estimated again for each draw of "
            "how='sampled'; for the mean network use varlap.reestimate_statistics(bnn, data)"
        )
    if num_samples is not None and how == "mean":
        warn(
            f"num_samples={num_samples} draws nothing by how='mean', the mean network; say how='linearised' or "
            "how='sampled'"
        )
    if closed_form and how != "linearised":
        raise ConfigError(f"predict(how={how!r}) has no closed form; closed_form=True goes with how='linearised'")
    if how != "mean":
        tell_of_untrained_variances(bnn)
    if how == "sampled":
        warn_of_collapse(bnn)
    if how != "mean" and statistics is None:
        warn_of_batch_statistics(bnn)
    inputs = Inputs(bnn, x, batch_size)
    # The lock on the generators comes first: of two threads each would put back what the other one has set.
    with Streams(seed, 0).around_network(bnn.device), bnn.evaluating(), bnn.spare_buffers():
        if how == "mean":
            outputs = _tempered(bnn, mean_outputs(bnn, inputs), temperature)
            return replace(predicted(bnn.likelihood, outputs), outputs=[outputs], likelihood=bnn.likelihood)
        if closed_form:
            return _in_closed_form(bnn, inputs, num_samples, seed, temperature)
        if how == "sampled":
            number = checked_num_samples(num_samples, DEFAULT_SAMPLES)
            draws = sampled_outputs(bnn, inputs, number, seed, statistics)
        else:
            draws = linearised_outputs(bnn, inputs, checked_num_samples(num_samples, DEFAULT_LINEARISED), seed)
        return average(bnn.likelihood, [_tempered(bnn, outputs, temperature) for outputs in draws])


def require_tempered(bnn: BNN) -> Any:
    """Return the likelihood's `tempered`, or say why a temperature makes no sense."""
    tempered_fn = getattr(bnn.likelihood, "tempered", None)
    if tempered_fn is None:
        raise ConfigError(
            f"the likelihood {type(bnn.likelihood).__name__} has no temperature: it is for classes, whose logits it "
            "divides; for regression learn the noise instead, as varlap.Gaussian() does by default (an own likelihood "
            "may define tempered(outputs, temperature))"
        )
    return tempered_fn


def _check_how(how: str) -> None:
    choices = get_args(How)
    if how not in choices:
        raise ConfigError(f"predict(how={how!r}): {did_you_mean(how, choices)}")


def _tempered(bnn: BNN, outputs: Any, temperature: float | None) -> Any:
    return outputs if temperature is None else require_tempered(bnn)(outputs, temperature)


def _in_closed_form(
    bnn: BNN, inputs: Inputs, num_samples: int | None, seed: int, temperature: float | None
) -> Prediction:
    mean, covariance = output_gaussian(bnn, inputs)
    if temperature is not None:
        mean, covariance = _tempered(bnn, mean, temperature), covariance / temperature**2
    if num_samples is None:
        return closed_form_prediction(bnn.likelihood, mean, covariance, seed)
    draws: list[Tensor] = drawn_outputs(mean, covariance, checked_num_samples(num_samples, 1), seed)
    return average(bnn.likelihood, draws)
