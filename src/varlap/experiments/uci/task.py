"""One split of a table, standardised for training, and scores in the table's own units."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from varlap.data import TableData
from varlap.errors import DataError
from varlap.likelihoods import Prediction

HELD_OUT_SEED = 20_000  # of the held-out rows, apart from all others


@dataclass(frozen=True, eq=False)
class TableTask:
    """Training rows and rows to score, standardised by the mean and the deviation of the training rows alone.

    >>> from varlap.data import Split
    >>> table = TableData("tiny", torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([10.0, 30.0, 20.0]),
    ...                   (Split(torch.tensor([0, 1]), torch.tensor([2])),))
    >>> task = TableTask.of(table, 0)
    >>> task.training[0].flatten(), task.scored[0].flatten(), task.target_scale
    (tensor([-1.,  1.]), tensor([5.]), 10.0)
    """

    training: tuple[Tensor, Tensor]
    """features [N, D] and targets [N, 1], single precision"""
    scored: tuple[Tensor, Tensor]
    """test rows, or held-out rows of the training part"""
    target_scale: float
    """standard deviation of the training rows' targets"""

    @staticmethod
    def of(table: TableData, split: int, *, held_out: float = 0.0, seed: int = 0) -> "TableTask":
        """Take a split; with `held_out`, score that part of its training rows and leave the test rows alone."""
        rows = table.part(split)
        train, scored = rows.train, rows.test
        if held_out:
            generator = torch.Generator().manual_seed(HELD_OUT_SEED + 1000 * seed + split)
            order = train[torch.randperm(len(train), generator=generator)]
            num_held_out = max(1, round(held_out * len(train)))
            train, scored = order[num_held_out:], order[:num_held_out]
        x_mean, x_scale = _moments(table.features[train])
        y_mean, y_scale = _moments(table.targets[train, None])
        if not y_scale > 0:
            raise DataError(f"{table.name}, split {split}: all targets of the training rows are the same")
        x_scale = torch.where(x_scale > 0, x_scale, 1.0)  # a constant feature says nothing

        def part(chosen: Tensor) -> tuple[Tensor, Tensor]:
            x = (table.features[chosen] - x_mean) / x_scale
            y = (table.targets[chosen, None] - y_mean) / y_scale
            return x.float(), y.float()

        return TableTask(part(train), part(scored), float(y_scale))

    @torch.no_grad()
    def score(self, prediction: Prediction) -> dict[str, float]:
        """Return the mean log-likelihood and the RMSE of the scored rows, in the table's own units."""
        targets = self.scored[1]
        assert prediction.mean is not None
        log_prob = prediction.log_prob(targets).double().mean() - math.log(self.target_scale)
        error = (prediction.mean - targets).double().square().mean().sqrt() * self.target_scale
        return {"log_likelihood": float(log_prob), "rmse": float(error)}


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.mean(0), values.std(0, correction=0)
