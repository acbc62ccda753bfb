"""Score a network on held-out data."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from varlap import tree
from varlap.data import as_batches, as_tensors
from varlap.errors import BatchError, NonFiniteError, without_warnings
from varlap.likelihoods import Prediction
from varlap.metrics.accumulator import Scores
from varlap.metrics.bootstrap import checked_bootstrap
from varlap.posterior import BNN
from varlap.posterior.batch import CLEAN, find_nonfinite, shaped_batch
from varlap.predict import predict
from varlap.predict.dispatch import How


@torch.no_grad()
def evaluate(
    bnn: BNN,
    data: Any,
    *,
    how: How = "mean",
    num_samples: int | None = None,
    seed: int = 0,
    temperature: float = 1.0,
    closed_form: bool = False,
    ood: Any = None,
    only: Iterable[str] | None = None,
    bootstrap: int = 0,
    level: float = 0.95,
    batch_size: int | None = None,
) -> dict[str, float]:
    """Return the scores of a network's predictions, in nats where they have a unit.

    For classes: `nll`, `accuracy`, `top5_accuracy` (of more than 5 classes), `brier`, `ece`, `adaptive_ece`,
    `classwise_ece` (15 bins each) and `aurc`; for yes-or-no labels the same without the top five and the classwise one.
    For regression: `nll`, `log_likelihood` (−nll), `rmse`, `coverage`, `width` and `crps`. NLL and log-likelihood are
    per item, summed over its positions (pixels, tokens) or labels; the others count each of them but ignored ones.

    With `ood`: `ood_auroc_entropy`, `ood_aupr_entropy`, `ood_fpr95_entropy`, and the same by `mutual_information` where
    the prediction has it; for regression by `variance` and `epistemic_variance`. Outside is the positive side; the
    uncertainty of an item is the mean over its positions. See `varlap.metrics` for each.

    The data are read in batches and need not fit in memory: a few numbers are kept for each item, and for
    `adaptive_ece` and `aurc` for each position.

    Args:
        bnn: the network.
        data: a tuple (x, y), a Dataset, a DataLoader or a list of batches.
        how: the way to predict: the mean network, or an average over draws.
        num_samples: how many draws; None leaves it to the way of predicting.
        seed: of these draws and of the bootstrap.
        temperature: divides the outputs before they become probabilities.
        closed_form: for "linearised", use the outputs' Gaussian in place of draws, as in `bnn.predict`.
        ood: inputs from elsewhere (a tensor, an array or a dict of them), or data in the forms above, whose targets are
            not read.
        only: names of the scores that are wanted; None for all that apply.
        bootstrap: how often to draw the items anew for intervals `NAME_low` and `NAME_high`; 1000 is usual, 20 the
            least, 0 for none.
        level: of the predictive intervals that `coverage` and `width` judge, and of the bootstrap's.
        batch_size: items in a batch; by default 512, or 128 on a CPU where weights are drawn.

    >>> from torch import nn
    >>> scores = evaluate(BNN(nn.Linear(2, 3)), (torch.zeros(4, 2), torch.tensor([0, 1, 2, 0])))
    >>> sorted(scores)
    ['accuracy', 'adaptive_ece', 'aurc', 'brier', 'classwise_ece', 'ece', 'nll']
    """
    checked_bootstrap("evaluate", bootstrap)
    predict_fn = predictor(bnn, how, num_samples, seed, temperature, closed_form)
    scores = Scores(only, level=level, bootstrap=bootstrap, seed=seed, trusted=True)
    batch_size = items_at_once(bnn, how, batch_size)
    for y, prediction in predictions(bnn, data, batch_size, predict_fn):
        scores.add(prediction, y)
    if ood is not None:
        for prediction in outside_predictions(bnn, ood, batch_size, predict_fn):
            scores.add_ood(prediction)
    return scores.compute()


PredictFn = Callable[[Any], Prediction]


def items_at_once(bnn: BNN, how: How, wanted: int | None = None) -> int:
    """Return the size of a batch that is wanted, or the usual one: larger ones are slower for draws on a CPU.

    >>> items_at_once(BNN(torch.nn.Linear(2, 3)), "mean"), items_at_once(BNN(torch.nn.Linear(2, 3)), "linearised")
    (512, 128)
    """
    usual = 128 if how != "mean" and bnn.device.type == "cpu" else 512  # which would take gigabytes there
    return usual if wanted is None else wanted


def predictor(
    bnn: BNN, how: How, num_samples: int | None, seed: int, temperature: float, closed_form: bool = False
) -> PredictFn:
    """Return what predicts batch after batch in one way; the first alone warns, since the others would say the same.

    >>> predictor(BNN(torch.nn.Linear(2, 3)), "sampled", 5, 0, 1.0)(torch.zeros(4, 2)).probs.shape
    torch.Size([4, 3])
    """
    scaled: dict[str, Any] = {} if temperature == 1.0 else {"temperature": temperature}  # some likelihoods have none
    warned = False

    def predicted(x: Any) -> Prediction:
        nonlocal warned
        with without_warnings() if warned else contextlib.nullcontext():
            warned = True
            return predict(bnn, x, how=how, num_samples=num_samples, seed=seed, closed_form=closed_form, **scaled)

    return predicted


def predictions(bnn: BNN, data: Any, batch_size: int, predict_fn: PredictFn) -> Iterator[tuple[Any, Prediction]]:
    """Yield targets and prediction of each batch, checked and on the network's device.

    >>> bnn, data = BNN(torch.nn.Linear(2, 3)), (torch.zeros(5, 2), torch.zeros(5).long())
    >>> [len(prediction.probs) for _, prediction in predictions(bnn, data, 2, bnn.predict)]
    [2, 2, 1]
    """
    for number, (x, y) in enumerate(as_batches(data, batch_size, bnn.dtype)):
        shaped_batch(x, y)
        _check_finite([*tree.named_tensors(x, "x"), *tree.named_tensors(y, "y")], number)
        prediction = predict_fn(tree.to_device(x, bnn.device))
        y = tree.to_device(y, bnn.device)
        _check_targets(prediction, y)
        yield y, prediction


def outside_predictions(bnn: BNN, ood: Any, batch_size: int, predict_fn: PredictFn) -> Iterator[Prediction]:
    """Yield the prediction of each batch of out-of-distribution inputs, in the forms that `evaluate` takes.

    >>> bnn = BNN(torch.nn.Linear(2, 3))
    >>> [len(prediction.probs) for prediction in outside_predictions(bnn, torch.ones(3, 2), 2, bnn.predict)]
    [2, 1]
    """
    for x in _inputs(ood, batch_size, bnn.dtype):
        yield predict_fn(tree.to_device(x, bnn.device))


def _check_targets(prediction: Prediction, targets: Any) -> None:
    check = getattr(prediction.likelihood, "check", None)  # a closed form has one of its own
    if check is not None and prediction.outputs:
        check(prediction.outputs[0], targets)


def _check_finite(named: list[tuple[str, Tensor]], number: int) -> None:
    """Refuse NaN and infinities where the data are: on the CPU that does not wait for the device."""
    if found := find_nonfinite(named):
        raise NonFiniteError(f"{found}, in batch {number} (the first is 0); {CLEAN}")


def _inputs(ood: Any, batch_size: int, dtype: torch.dtype) -> Iterator[Any]:
    """Yield batches of the inputs of out-of-distribution data, checked for NaN."""
    if isinstance(ood, Mapping) or hasattr(ood, "__array__"):
        x, _ = as_tensors((ood, torch.zeros(0)), dtype)
        size = tree.leading_size(x)
        ood = (x, torch.zeros(size)) if size else []
    number = -1
    for number, (x, _) in enumerate(as_batches(ood, batch_size, dtype)):
        _check_finite([*tree.named_tensors(x, "ood x")], number)
        yield x
    if number < 0:
        raise BatchError("ood holds no items, counted by the first dimension; give at least one, or leave it out")
