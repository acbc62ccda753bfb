"""Probabilities and labels that belong together, brought to one form and checked."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from varlap.errors import BatchError, NonFiniteError

IGNORED_LABEL = -100  # as torch's cross-entropy and varlap.Categorical have it
ALL_IGNORED = "there is nothing to score: every label is the ignored one; give at least one that counts"


@dataclass(frozen=True)
class Rows:
    """The labels of n items, P positions each: probabilities [n, P, K] of K classes, or [n, P] of a yes."""

    probs: Tensor
    labels: Tensor
    """[n, P]; 0 where ignored"""
    counted: Tensor
    """[n, P]: 1 for a label that counts, 0 for an ignored one; no labels are dropped, since that would synchronise"""
    exclusive: bool

    @property
    def num_items(self) -> int:
        """Items in the batch."""
        return len(self.labels)

    def per_item(self, values: Tensor) -> Tensor:
        """Sum values [n, P] over the labels of each item that count."""
        return (values * self.counted).sum(1)

    def mean(self, values: Tensor) -> float:
        """Average values [n, P] over all labels that count."""
        return float(wide(self.per_item(values)).sum() / self.counted.sum())

    @cached_property
    def confidence(self) -> Tensor:
        """Probability of the predicted label."""
        return self.probs.amax(-1) if self.exclusive else torch.maximum(self.probs, 1 - self.probs)

    @cached_property
    def hits(self) -> Tensor:
        """1 where the predicted label is right."""
        guess = self.probs.argmax(-1) if self.exclusive else (self.probs > 0.5).long()
        return (guess == self.labels).to(self.probs.dtype)

    @property
    def claims(self) -> tuple[Tensor, Tensor]:
        """Probabilities [n, P] with the outcomes they speak of: of the predicted class, or of a yes."""
        return (self.confidence, self.hits) if self.exclusive else (self.probs, self.labels.to(self.probs.dtype))


def wide(tensor: Tensor) -> Tensor:
    """Return double precision, in which sums are taken, where the device has it."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


def as_rows(
    probs: Tensor, labels: Tensor, exclusive: bool | None = None, ignored_label: int = IGNORED_LABEL, *, check: bool
) -> Rows:
    """Bring probabilities [S, K, ...] with labels [S, ...], or of a yes with labels of their shape, to one form.

    >>> as_rows(torch.full((4, 3, 2), 1 / 3), torch.zeros(4, 2).long(), check=True).probs.shape
    torch.Size([4, 2, 3])
    """
    for name, value in (("probs", probs), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise BatchError(f"{name} must be a tensor, got {type(value).__name__}; use torch.as_tensor({name})")
    if not probs.is_floating_point():
        raise BatchError(f"probs must be real numbers, got {probs.dtype}; probs come first, then labels")
    if exclusive is None:
        exclusive = probs.shape != labels.shape
    expected = probs.shape[:1] + probs.shape[2:] if exclusive else probs.shape
    if not probs.ndim or labels.shape != expected or (exclusive and probs.ndim < 2):
        raise BatchError(
            f"probs of shape {tuple(probs.shape)} do not fit labels of shape {tuple(labels.shape)}: classes need probs "
            "[S, K, ...] with class numbers [S, ...], yes-or-no labels need probs of a yes in the labels' shape "
            "(and Prediction(exclusive=False))"
        )
    if not labels.numel():
        raise BatchError("there is nothing to score: probs and labels are empty; give at least one item")
    if exclusive and probs.shape[1] < 2:
        raise BatchError(
            f"probs of shape {tuple(probs.shape)} have one class only; for yes-or-no labels give the probability of a "
            "yes in the labels' shape, as by probs[:, 0]"
        )
    num_items = len(labels)
    given, probs = probs.dtype, probs.detach().to(torch.promote_types(probs.dtype, torch.float32))
    if check:
        _check_probs(probs, exclusive, slack=1e-2 if torch.finfo(given).bits < 32 else 1e-3)
    if not exclusive:
        flat = labels.reshape(num_items, -1)
        if check and bool(((flat != 0) & (flat != 1)).any()):
            raise BatchError("yes-or-no labels must be 0 or 1; for class numbers give probs [S, K, ...]")
        return Rows(probs.reshape(num_items, -1), flat.long(), torch.ones_like(flat, dtype=probs.dtype), False)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise BatchError(f"labels must be class numbers, got {labels.dtype}; use labels.long()")
    flat = labels.reshape(num_items, -1).long()
    counted = flat != ignored_label
    if check:
        _check_labels(flat, counted, probs.shape[1], ignored_label)
    rows = probs.movedim(1, -1).reshape(num_items, -1, probs.shape[1])
    return Rows(rows, flat * counted, counted.to(probs.dtype), True)


def checked_rows(probs: Tensor, labels: Tensor) -> Rows:
    """Check everything about probabilities and labels that are all there is."""
    rows = as_rows(probs, labels, check=True)
    if not bool(rows.counted.any()):
        raise BatchError(ALL_IGNORED)
    return rows


def _check_probs(probs: Tensor, exclusive: bool, slack: float) -> None:
    if not bool(probs.isfinite().all()):
        raise NonFiniteError("probs hold NaN or Inf; did the network diverge, or were logits of -inf averaged?")
    low, high = float(probs.min()), float(probs.max())
    if low < 0 or high > 1 + slack:
        raise BatchError(
            f"probs hold {low if low < 0 else high:.4g}, which is no probability; of logits take the "
            f"{'softmax(1)' if exclusive else 'sigmoid()'} first"
        )
    if exclusive:
        sums = probs.sum(1)
        wrong = (sums - 1).abs() > slack
        if bool(wrong.any()):
            raise BatchError(
                f"probs of a label sum to {float(sums[wrong][0]):.4g}, not to 1; divide by probs.sum(1, keepdim=True), "
                "or take logits.softmax(1)"
            )


def _check_labels(labels: Tensor, counted: Tensor, num_classes: int, ignored_label: int) -> None:
    wrong = counted.bool() & ((labels < 0) | (labels >= num_classes))
    if bool(wrong.any()):
        raise BatchError(
            f"label {labels[wrong][0].item()} is out of range: probs have {num_classes} classes, so labels go from 0 "
            f"to {num_classes - 1} (ignored: {ignored_label})"
        )
