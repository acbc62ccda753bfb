"""The ways of predicting that belong to a method, each scored on held-out and on test images."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from varlap.errors import NonFiniteError, without_warnings
from varlap.experiments.image_task import ImageTask, Pair
from varlap.experiments.spec import Method, RunSpec
from varlap.metrics import evaluate
from varlap.posterior import BNN
from varlap.posthoc import fit_temperature, laplace

log = logging.getLogger(__name__)

Way = Literal["mean", "sampled", "scaled", "linearised"]
Key = tuple[Method, Way]

NAMES: dict[Key, str] = {
    ("vl", "mean"): "VL",
    ("vi", "mean"): "VI (mean)",
    ("vi", "sampled"): "VI (10 samples)",
    ("map", "mean"): "MAP",
    ("map", "scaled"): "MAP + temperature scaling",
    ("map", "linearised"): "MAP + linearised Laplace",
    ("vi", "scaled"): "VI + temperature scaling",
    ("vl", "scaled"): "VL + temperature scaling",
    ("vl", "linearised"): "VL, linearised",
}
"""What a table calls them: the paper's four rows, then the baselines that it lacks."""
PAPERS: tuple[Key, ...] = (("vl", "mean"), ("vi", "mean"), ("vi", "sampled"), ("map", "mean"))
"""The rows of the paper's Table 1."""

LAPLACE_BETAS = (0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.1, 1.0)
"""what β of variances that are set after training is chosen from, by held-out images"""
LEAST, MOST = "laplace_beta_least", "laplace_beta_most"
"""the ends of what was tried, kept beside the chosen `laplace_beta`"""
_EARLIER_ENDS = (0.0003, 1.0)  # of results that were kept without them
NUM_DRAWS = 10  # as many as the paper has for VI
MOST_TO_CHOOSE_BY = 2_000  # held-out images that choose β of the variances
MOST_FOR_FISHER = 2_000  # training images that the curvature of PreactResNet-18 is estimated from: a minute for 10,000
MOST_OUTSIDE = 10_000

Scores = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Evaluation:
    """Scores of a trained network, by way of predicting."""

    test: Scores
    validation: Scores


def evaluate_ways(bnn: BNN, spec: RunSpec, task: ImageTask, outside: Tensor | None = None) -> Evaluation:
    """Score a trained network by every way of its method, with images from elsewhere to be told apart.

    What a way has to fit, the temperature or the β of Laplace's variances, is fitted on the held-out images; without
    such images there is the mean, and VI's samples, alone. A temperature is that of the mean network, for VI too. A way
    that gives NaN is left out; of the mean network it is an error.
    Laplace's variances replace those of `bnn`.

    >>> task = ImageTask("digits", "mlp", validation=0.2)
    >>> bnn = BNN(task.network())
    >>> sorted(evaluate_ways(bnn, RunSpec("digits", "map", 0.1, model="mlp"), task).test)
    ['linearised', 'mean', 'scaled']
    """
    images: dict[str, Any] = {"ood": None if outside is None else outside[:MOST_OUTSIDE]}
    found = Evaluation({}, {})

    def score(way: Way, fitted: Mapping[str, float], **options: Any) -> None:
        try:
            with without_warnings():  # samples may collapse; their scores say so
                test = evaluate(bnn, task.test, **options, **images)
                held_out = None if task.held_out is None else evaluate(bnn, task.held_out, **options)
        except NonFiniteError as error:
            if way == "mean":
                raise
            log.warning("%s is left out: %s", NAMES[spec.method, way], error)
            return
        found.test[way] = test | dict(fitted)
        if held_out is not None:
            found.validation[way] = held_out | dict(fitted)

    score("mean", {})
    if spec.method == "vi":
        score("sampled", {}, how="sampled", num_samples=NUM_DRAWS)
    if task.held_out is None:
        return found
    with without_warnings():  # of a few images all may be right
        temperature = fit_temperature(bnn, task.held_out)
    score("scaled", {"temperature": temperature}, temperature=temperature)
    if spec.linearised and spec.method != "vi":
        try:
            beta = _choose_variances(bnn, spec, task, task.held_out)
        except NonFiniteError as error:  # a training is not lost for its curvature
            log.warning("no variances of Laplace's method: %s", error)
            if spec.method == "map":
                return found
            beta = None
        fitted = {} if beta is None else {"laplace_beta": beta, LEAST: min(LAPLACE_BETAS), MOST: max(LAPLACE_BETAS)}
        score("linearised", fitted, how="linearised", num_samples=NUM_DRAWS)
    return found


def variances_at_an_end(scores: Mapping[str, float]) -> bool:
    """Tell whether the chosen β of Laplace's variances is the smallest or the largest of those tried.

    >>> ends = {LEAST: 0.00003, MOST: 1.0}
    >>> variances_at_an_end({"laplace_beta": 0.0003, **ends}), variances_at_an_end({"laplace_beta": 0.00003, **ends})
    (False, True)
    >>> variances_at_an_end({"laplace_beta": 0.0003}), variances_at_an_end({"nll": 0.3})
    (True, False)
    """
    least, most = _EARLIER_ENDS
    return scores.get("laplace_beta") in (scores.get(LEAST, least), scores.get(MOST, most))


def _choose_variances(bnn: BNN, spec: RunSpec, task: ImageTask, held_out: Pair) -> float | None:
    """Set the variances of the best linearised NLL: those of training (None), or Laplace's for some β.

    Also for VL: with batch norm, variances from evaluation mode predict better than those of training.
    """
    few = tuple(part[:MOST_TO_CHOOSE_BY] for part in held_out)

    def nll() -> float:
        try:
            return evaluate(bnn, few, how="linearised", num_samples=NUM_DRAWS, only=["nll"])["nll"]
        except NonFiniteError:  # variances that overflow are never chosen
            return math.inf

    trained = {name: value.detach().clone() for name, value in bnn.log_sigma.items()}
    trained_nll = nll() if spec.method == "vl" else math.inf
    large = task.chosen_model == "preact-resnet-18"
    part = tuple(part[:MOST_FOR_FISHER] for part in task.training) if large else task.training
    num_data = len(task.training[1])
    labels = "sampled-fisher" if large else "fisher"
    fisher = laplace(bnn, part, curvature=labels, num_data=num_data, batch_size=512)
    beta, best_nll = set_best_variances(bnn, fisher, num_data, LAPLACE_BETAS, nll)
    if best_nll < trained_nll or spec.method != "vl":
        return beta
    for name, value in trained.items():
        bnn.log_sigma[name].data.copy_(value)
    return None


def set_best_variances(
    bnn: BNN, fisher: Mapping[str, Tensor], num_data: int, betas: Sequence[float], nll_fn: Callable[[], float]
) -> tuple[float, float]:
    """Set Laplace's variances for the β of the least NLL; return both.

    >>> import torch
    >>> bnn = BNN(torch.nn.Linear(1, 1, bias=False))
    >>> fisher = {"weight": torch.ones(1, 1)}
    >>> set_best_variances(bnn, fisher, 10, (0.1, 1.0), lambda: bnn.log_sigma["weight"].exp().item() ** 2)
    (0.1, 0.00995...)
    """
    nlls = {}
    for beta in betas:
        bnn.set_optimal_variances(fisher, num_data, beta)
        nlls[beta] = nll_fn()
    best = min(nlls, key=nlls.__getitem__)
    bnn.set_optimal_variances(fisher, num_data, best)
    return best, nlls[best]
