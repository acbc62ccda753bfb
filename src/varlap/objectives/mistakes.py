"""Warnings about what runs without an error and learns little: probabilities for logits, raw targets, variances left
alone, a batch's size for that of the data."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from varlap import tree
from varlap.errors import warn
from varlap.likelihoods import Bernoulli, Categorical, Gaussian, Heteroscedastic
from varlap.posterior.batch import Batch
from varlap.posterior.bnn import BNN

if TYPE_CHECKING:
    from varlap.objectives.objective import Context

CALLS_WITHOUT_UPDATE = 100  # more than the parts of an accumulated step
SUMS_TO_ONE = 1e-2  # bfloat16 rounds
FAR, SHIFTED = 100, 10
ITEMS_FOR_A_SPREAD = 8

_looked_at: "weakref.WeakSet[BNN]" = weakref.WeakSet()


def warn_about_outputs(context: "Context") -> None:
    """Look once at a network's outputs, by a forward pass that leaves no trace: probabilities where likelihoods take
    logits, numbers of another size than the targets."""
    bnn, look = context.bnn, _look_of(context.bnn)
    if bnn in _looked_at:
        return
    if look is not None:
        with torch.no_grad(), bnn.buffers_restored(), context.streams.around_network(bnn.device):
            found = look(bnn, bnn.outputs(tree.copied(context.batch.x)), context.batch.y)
        if found is not None:
            warn(found)
    _looked_at.add(bnn)  # only now: a batch that does not fit must not swallow the warning


def _look_of(bnn: BNN) -> Callable[[BNN, Any, Any], str | None] | None:
    if isinstance(bnn.likelihood, Categorical | Bernoulli):
        return _probabilities
    # Not a class derived from these: its `predict` need not be fit for a training, which a look must not end.
    return _other_size if type(bnn.likelihood) in (Gaussian, Heteroscedastic) else None


def _probabilities(bnn: BNN, outputs: Any, targets: Any) -> str | None:  # noqa: ARG001
    found = _ending(bnn, outputs)
    if found is None:
        return None
    return (
        f"the network's outputs are probabilities ({found}), and the likelihood takes logits, so that they go "
        "through a softmax or a sigmoid twice: let the network end without one"
    )


def _other_size(bnn: BNN, outputs: Any, targets: Any) -> str | None:
    prediction = bnn.likelihood.predict(outputs)
    mean, variance = prediction.mean, prediction.variance
    if mean is None or variance is None or not isinstance(targets, Tensor) or mean.shape != targets.shape:
        return None
    difference, noise = (targets - mean).double(), variance.double().mean().sqrt()
    distance, offset = difference.square().mean().sqrt(), difference.mean(0).abs()
    far = bool(distance > FAR * noise.clamp(min=1))  # NaN is told of elsewhere
    # A constant offset is dearer to learn than what varies; a few targets say little of how much they vary.
    spread = targets.double().std(0) if len(targets) >= ITEMS_FOR_A_SPREAD else offset
    shifted = bool(((offset > SHIFTED * spread) & (offset > SHIFTED * noise) & (spread > 0)).any())
    if not far and not shifted:
        return None
    against = f"more than {FAR} times the noise" if far else f"more than {SHIFTED} of their standard deviations"
    return (
        f"the targets are {float(distance):.3g} from the network's outputs, {against}, which takes very many steps to "
        "close: standardise them, (y - y.mean()) / y.std(), and scale predictions back"
    )


def _ending(bnn: BNN, outputs: Any) -> str | None:
    """Say by what the outputs are seen to be probabilities."""
    if not isinstance(outputs, Tensor) or outputs.ndim == 0 or not bool(((outputs >= 0) & (outputs <= 1)).all()):
        return None
    if isinstance(bnn.likelihood, Categorical):
        add_up = outputs.ndim > 1 and bool(((outputs.float().sum(1) - 1).abs() <= SUMS_TO_ONE).all())
        return "they add up to 1" if add_up else None
    # Logits may all lie between 0 and 1 by chance, so here the last module has to be one.
    last = list(bnn.network.modules())[-1]
    return "a Sigmoid is the last module" if isinstance(last, nn.Sigmoid) else None


class VarianceWatch:
    """Warns once if log σ stands still while the means move, though the objective gives gradients to both."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._at_first: list[Tensor] = []
        self._network: weakref.ref[BNN] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy watches the network that it sees next."""
        return vars(self) | {"_network": None}

    def see(self, bnn: BNN, what: str) -> None:
        """Count a call."""
        if self._network is None or self._network() is not bnn:
            self._num_calls, self._network = 0, weakref.ref(bnn)
        if self._num_calls > CALLS_WITHOUT_UPDATE:
            return
        watched = [min(tensors, key=Tensor.numel) for tensors in (bnn.means().values(), bnn.log_sigma.values())]
        if self._num_calls == 0:
            self._at_first = [tensor.detach().clone() for tensor in watched]
        self._num_calls += 1
        if self._num_calls > CALLS_WITHOUT_UPDATE:
            moved = [not _equal(*pair) for pair in zip(self._at_first, watched, strict=True)]
            self._at_first = []
            if watched[1].requires_grad and moved == [True, False]:
                warn(
                    f"log σ has not changed in {CALLS_WITHOUT_UPDATE} calls of {what}, so the variances are those of "
                    "the start: give the optimizer bnn.parameter_groups(lr) instead of the network's parameters, or "
                    "use varlap.adam(bnn, lr)"
                )


class SizeWatch:
    """Warns once if two batches of `num_data` items hold different targets: there are more data than that."""

    def __init__(self) -> None:
        self._is_over = False
        self._at_first: list[Tensor] = []

    def see(self, batch: Batch, num_data: int, what: str) -> None:
        """Look at the targets of a first and a second batch, in whatever order they come."""
        if self._is_over:
            return
        if batch.size < num_data:
            self._is_over = True
            return
        targets = [tensor.detach().flatten().sort().values for tensor in tree.tensors(batch.y)]
        if not self._at_first:
            self._at_first = [tensor.clone() for tensor in targets]
            return
        same = all(map(_equal, self._at_first, targets))
        self._is_over, self._at_first = True, []
        if not same:
            warn(
                f"num_data={num_data} is the size of a batch, and other batches hold other targets, so the training "
                f"set is larger and the KL weighs too much: give its whole size, {what}(num_data=len(train_set))"
            )


def _equal(first: Tensor, now: Tensor) -> bool:
    return first.shape == now.shape and bool((first.to(now) == now).all())
