"""Inputs as a network takes them: tensors on its device, in batches."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from varlap import tree
from varlap.data import inputs_as_tensors
from varlap.data.batches import SHUFFLING, read, samplers_of
from varlap.errors import BatchError, ConfigError
from varlap.posterior import BNN


class Inputs:
    """An input for prediction, read batch by batch as often as needed and moved to the network's device.

    Arrays become tensors; those of floating-point numbers take the type of the weights. A DataLoader has batches of its
    own, of inputs alone or of pairs (x, y), whose targets are not read.

    >>> import numpy as np, torch
    >>> bnn = BNN(torch.nn.Linear(2, 1), likelihood="gaussian")
    >>> [len(part) for part in Inputs(bnn, np.zeros((5, 2)), batch_size=2)]
    [2, 2, 1]
    """

    def __init__(self, bnn: BNN, x: Any, batch_size: int | None) -> None:
        if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int)):
            raise ConfigError(f"predict(batch_size={batch_size!r}) must be a whole number of items, or None for all")
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"predict(batch_size={batch_size}) must be at least 1, or None for all at once")
        if isinstance(x, list) and x and _holds_numbers_alone(x):
            raise BatchError("x is a list of numbers; give a tensor or an array, such as torch.tensor(x)")
        self._device, self._dtype = bnn.device, bnn.dtype
        self._loader = x if isinstance(x, DataLoader) else None
        if self._loader is not None:
            _check_loader(self._loader, batch_size)
            return
        if isinstance(x, Dataset):
            raise BatchError(
                f"x is the Dataset {type(x).__name__}; give a DataLoader of it: DataLoader(x, batch_size=128)"
            )
        self._x = self._as_tensors(x)
        self._batch_size = batch_size
        self._num_items = tree.leading_size(self._x)
        if batch_size is not None and self._num_items is None:
            shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tree.named_tensors(self._x, "x"))
            raise BatchError(
                f"predict(batch_size={batch_size}) splits the first dimension, which the tensors of x do not share "
                f"({shapes or 'there are none'}); leave batch_size out"
            )

    def __iter__(self) -> Iterator[Any]:
        if self._loader is not None:
            for batch in read(self._loader):
                yield tree.to_device(self._as_tensors(inputs_of(batch)), self._device)
            return
        if self._batch_size is None or not self._num_items:
            yield tree.to_device(self._x, self._device)
            return
        for start in range(0, self._num_items, self._batch_size):
            yield tree.to_device(tree.take(self._x, slice(start, start + self._batch_size)), self._device)

    def _as_tensors(self, x: Any) -> Any:
        # No derivative could be taken through an inference tensor.
        return tree.map_tensors(lambda t: t.clone() if t.is_inference() else t, inputs_as_tensors(x, self._dtype))


def inputs_of(batch: Any) -> Any:
    """Return the inputs of a loader's batch: of a pair (x, y), of the (x,) of a TensorDataset, or the batch itself.

    >>> inputs_of(["x", "y"]), inputs_of(("x",)), inputs_of("x")
    ('x', 'x', 'x')
    """
    return batch[0] if isinstance(batch, tuple | list) and len(batch) in (1, 2) else batch


def _check_loader(loader: Any, batch_size: int | None) -> None:
    if batch_size is not None:
        raise ConfigError(
            f"predict(batch_size={batch_size}) does not go with a DataLoader, which makes its own batches"
        )
    mixing = [type(sampler).__name__ for sampler in samplers_of(loader) if isinstance(sampler, SHUFFLING)]
    if mixing:
        raise ConfigError(
            f"the DataLoader's {mixing[0]} mixes the items, and nothing would tell which "
            "prediction is whose; predict by one with shuffle=False"
        )


def _holds_numbers_alone(x: Any) -> bool:
    return all(map(_holds_numbers_alone, x)) if isinstance(x, list | tuple) else isinstance(x, int | float)


def join(outputs: list[Any]) -> Any:
    """Put the outputs of several batches together."""
    return outputs[0] if len(outputs) == 1 else tree.concatenate(outputs)
