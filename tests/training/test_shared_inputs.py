"""Claims about inputs that all items of a batch share: they are never divided as if their rows were the items'."""

import copy

import pytest
import torch
from torch import Tensor, nn

import varlap
from varlap.data import count_items
from varlap.errors import BatchError
from varlap.training import TrainingStep
from varlap.training.source import as_source

NUM_ITEMS = 20
REMEDY = r"give it a row for each item, keep what items share in the network \(register_buffer\), or "


class Looked(nn.Module):
    """Looks features up in a table by attention: every item sees all of its rows."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, features, table):
        return self.out((features @ table.T).softmax(1) @ table)


def _bnn() -> varlap.BNN:
    torch.manual_seed(0)
    return varlap.BNN(Looked())


def _batch(num_rows: int = 60) -> tuple[tuple[Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    features, table = torch.randn(NUM_ITEMS, 3, generator=generator), torch.randn(num_rows, 3, generator=generator)
    return (features, table), torch.arange(NUM_ITEMS) % 2


def test_accumulating_over_a_shared_input_is_refused_and_changes_nothing():
    bnn, (x, y) = _bnn(), _batch()
    before = [tensor.clone() for tensor in bnn.state_dict().values()]
    message = r"accumulate=2 divides a batch of 20 items along the first dimension, but x\[1\] has shape \(60, 3\); "
    with pytest.raises(BatchError, match=message + REMEDY + "leave accumulate out"):
        varlap.fit(bnn, varlap.MAP(NUM_ITEMS), [(x, y)], epochs=1, accumulate=2, progress="none")
    assert all(torch.equal(one, two) for one, two in zip(before, bnn.state_dict().values(), strict=True))
    step = TrainingStep(bnn, varlap.MAP(NUM_ITEMS), varlap.adam(bnn), accumulate=2)
    with pytest.raises(BatchError, match=r"but x\[1\] has shape \(60, 3\), x\[2\] has shape \(\); "):
        step((*x, torch.tensor(1.0)), y, number=0)


def test_accumulating_divides_what_has_a_row_for_each_item():
    x, y = _batch()
    network, found = nn.Linear(3, 2), []
    for parts in (1, 2):
        bnn = varlap.BNN(copy.deepcopy(network))
        found.append(TrainingStep(bnn, varlap.MAP(NUM_ITEMS), varlap.adam(bnn), accumulate=parts)(x[0], y, number=0))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("num_rows", [60, 5], ids=["more rows than items", "fewer rows than items"])
def test_what_divides_no_batch_works_with_a_shared_input(num_rows):
    bnn, (x, y) = _bnn(), _batch(num_rows)
    varlap.fit(bnn, varlap.VL(NUM_ITEMS), [(x, y)], validation=[(x, y)], epochs=2, progress="none")
    varlap.hessian_diagonal(bnn, [(x, y)])
    assert bnn.predict(x).probs.shape == (NUM_ITEMS, 2)


@pytest.mark.parametrize("num_rows", [60, 5], ids=["more rows than items", "fewer rows than items"])
def test_the_fisher_of_a_part_is_that_of_outputs_that_saw_all_of_a_shared_input(num_rows):
    (features, table), y = _batch(num_rows)
    bnn = _bnn()
    looked = (features @ table.T).softmax(1) @ table
    alone = varlap.BNN(bnn.network.out)
    for fraction, groups in ((0.25, 1), (1.0, 4)):
        objective = [varlap.VL(NUM_ITEMS, curvature=varlap.Fisher(fraction=fraction, groups=groups)) for _ in range(2)]
        shared = objective[0](bnn, (features, table), y, step=0)
        plain = objective[1](alone, looked, y, step=0)
        torch.testing.assert_close(shared.curvature, plain.curvature)


@pytest.mark.parametrize("labels", ["exact", "sampled"])
def test_the_fisher_of_single_items_is_refused_for_a_shared_input(labels):
    message = r"the Fisher of single items divides a batch of 20 items .* but x\[1\] has shape \(60, 3\); "
    with pytest.raises(BatchError, match=message + REMEDY + "use the Hessian's diagonal"):
        varlap.fisher_diagonal(_bnn(), [_batch()], labels=labels)


def test_ranks_do_not_share_out_an_input_that_all_items_share():
    x, y = _batch()
    source = as_source([(x, y)], batch_size=1, seed=0, device=torch.device("cpu"), share=slice(0, None, 2))
    with pytest.raises(BatchError, match=r"training on several ranks divides a batch of 20 .* or train in one process"):
        next(source.epoch(0, first=0))
    source = as_source([(x[0], y)], batch_size=1, seed=0, device=torch.device("cpu"), share=slice(0, None, 2))
    first, targets, _ = next(source.epoch(0, first=0))
    assert torch.equal(first, x[0][::2])
    assert torch.equal(targets, y[::2])


def test_items_are_counted_by_the_targets_not_by_the_rows_of_a_shared_input():
    (features, table), y = _batch()
    assert count_items([((table, features), y)]) == NUM_ITEMS
