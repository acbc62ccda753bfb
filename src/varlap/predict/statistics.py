"""Running statistics of batch norm, estimated again for the weights as they are."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from varlap import tree
from varlap.data import as_batches, as_tensors
from varlap.data.batches import is_arrays
from varlap.errors import BatchError
from varlap.posterior import BNN
from varlap.posterior.buffers import KeptBuffers
from varlap.streams import Streams

BATCH_SIZE = 128
Layers = list[nn.modules.batchnorm._NormBase]


@torch.no_grad()
def reestimate_statistics(bnn: BNN, data: Any, *, batch_size: int = BATCH_SIZE, seed: int = 0) -> int:
    """Set the running statistics of batch norm to those of the data at the present means.

    VI trains at sampled weights, so what it leaves in the running statistics is not what the mean network sees;
    where a bias in front of batch norm has kept its prior's variance, the difference is large. Each layer gets the
    average of the statistics of the batches, weighted by their size, from one pass over the data in which only batch
    norm is in training mode.

    Args:
        bnn: the network.
        data: the training data or a part of it: a tuple (x, y), a Dataset or a DataLoader.
        batch_size: items in a batch, as in training.
        seed: of networks that draw random numbers in evaluation mode too.

    Returns:
        how many layers have new statistics: 0 for a network without batch norm.

    >>> from torch import nn
    >>> bnn = BNN(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)))
    >>> reestimate_statistics(bnn, (torch.tensor([[1.0], [3.0]]), torch.tensor([0, 1])))
    1
    >>> bnn.network[0].running_mean, bnn.network[0].running_var
    (tensor([2.]), tensor([2.]))
    """
    kept = KeptBuffers(bnn.network)
    try:
        with Streams(seed, 0).around_network(bnn.device), bnn.evaluating():
            return reestimate(bnn, data, batch_size, seed)
    except BaseException:
        kept.put_back()
        raise


def reestimate(bnn: BNN, data: Any, batch_size: int = BATCH_SIZE, seed: int = 0) -> int:
    """Move the running statistics to those of the data; the rest of the network is in evaluation mode already."""
    layers = layers_with_statistics(bnn.network)
    if not layers:
        return 0
    num_items = 0
    with moving(layers):
        for x, y in as_batches(_shuffled(data, seed, bnn.dtype), batch_size, bnn.dtype):
            size = tree.leading_size(y) or 0
            if num_items and size == 1:
                continue  # one item has no variance: torch refuses it where a channel has one value an item
            num_items += size
            for layer in layers:
                layer.momentum = size / max(num_items, 1)  # makes the running average the weighted one so far
            bnn.outputs(tree.to_device(x, bnn.device))
    if not num_items:
        raise BatchError("the data for batch norm's statistics hold no items; give at least a batch of training data")
    return len(layers)


def layers_with_statistics(network: nn.Module) -> Layers:
    """Return the layers that keep running statistics."""
    norms = (module for module in network.modules() if isinstance(module, nn.modules.batchnorm._NormBase))
    return [norm for norm in norms if norm.running_mean is not None]


def _shuffled(data: Any, seed: int, dtype: torch.dtype) -> Any:
    """Mix the items, as training does: of batches sorted by class the variances would be too small. Loaders stay."""
    is_set = isinstance(data, Dataset) and hasattr(data, "__len__")
    if not is_set and not is_arrays(data):
        return data
    generator = Streams(seed, 0).generator("order", "cpu")
    if is_set:
        return Subset(data, torch.randperm(len(data), generator=generator).tolist())  # type: ignore[arg-type]
    x, y = as_tensors(data, dtype)
    order = torch.randperm(tree.leading_size(y) or 0, generator=generator)
    return tree.map_tensors(lambda tensor: tensor[order.to(tensor.device)], (x, y))


@contextlib.contextmanager
def moving(layers: Layers, momentum: float | None = None) -> Iterator[None]:
    """Let these layers use and follow the statistics of each batch, from zero; momentum 1 keeps the last one's."""
    settings = [(layer, layer.training, layer.momentum) for layer in layers]
    try:
        for layer in layers:
            layer.reset_running_stats()
            layer.training = True
            layer.momentum = momentum
        yield
    finally:
        for layer, training, before in settings:
            layer.training = training
            layer.momentum = before
