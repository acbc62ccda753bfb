"""Claims about numpy's arrays on their way to a network: they take the precision of its weights."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import varlap
from varlap.data import as_batches, as_tensors, count_items
from varlap.predict.statistics import reestimate_statistics

QUIET = {"epochs": 1, "batch_size": 8, "progress": "none"}
CALLS = {
    "fit": lambda bnn, data: varlap.fit(bnn, varlap.VL(12), data, **QUIET),
    "fit's validation": lambda bnn, data: varlap.fit(bnn, varlap.MAP(12), data, validation=data, **QUIET),
    "evaluate": lambda bnn, data: varlap.evaluate(bnn, data),
    "evaluate's ood": lambda bnn, data: varlap.evaluate(bnn, data, ood=data),
    "laplace": lambda bnn, data: varlap.laplace(bnn, data),
    "hessian_diagonal": lambda bnn, data: varlap.hessian_diagonal(bnn, data),
    "reestimate_statistics": lambda bnn, data: reestimate_statistics(bnn, data),
}


class Items(Dataset):
    """Items as numpy gives them: an array, or a dict of them, and a number."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return varlap.tree.map_leaves(lambda _, leaf: leaf[index], self.x, ""), self.y[index]


FORMS = {
    "arrays": lambda x, y: (x, y),
    "a dict of arrays": lambda x, y: ({"input": x}, y),
    "a tuple of arrays": lambda x, y: ((x,), y),
    "a Dataset": Items,
    "a Dataset of dicts": lambda x, y: Items({"input": x}, y),
    "a list of batches": lambda x, y: [(x[:8], y[:8]), (x[8:], y[8:])],
}


def _regression(dtype: torch.dtype) -> varlap.BNN:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    return varlap.BNN(network, varlap.Gaussian().to(dtype))


def _arrays(dtype: type = np.float64) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(12, 3)).astype(dtype), random.normal(size=(12, 1)).astype(dtype)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_doubles_of_numpy_are_taken_wherever_data_are(call, dtype, form):
    call(_regression(dtype), form(*_arrays()))


@pytest.mark.parametrize("given", [np.float16, np.float32])
@pytest.mark.parametrize("call", [*CALLS.values(), lambda bnn, data: bnn.predict(data[0])], ids=[*CALLS, "predict"])
def test_narrower_numbers_of_numpy_are_widened_for_a_double_network(call, given):
    call(_regression(torch.float64), _arrays(given))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_array_is_scored_and_trained_on_as_the_tensor_of_its_numbers_is(form):
    x, y = _arrays()
    results = []
    for data in (form(x, y), form(torch.tensor(x).float(), torch.tensor(y).float())):
        bnn = _regression(torch.float32)
        history = varlap.fit(bnn, varlap.VL(12), data, **QUIET)
        results.append((history.epochs[0]["elbo"], varlap.evaluate(bnn, data)))
    assert results[0] == results[1]


def test_arrays_take_the_weights_type_through_dicts_and_tuples_and_tensors_and_integers_keep_theirs():
    x, y = _arrays()
    given = {"a": x, "b": (torch.tensor(x), np.arange(12)), "c": x > 0}
    found, targets = as_tensors((given, y), torch.bfloat16)
    dtypes = [tensor.dtype for tensor in varlap.tree.tensors(found)]
    assert dtypes == [torch.bfloat16, torch.float64, torch.int64, torch.bool]
    assert targets.dtype == torch.float32  # the targets of a half-precision network stay exact
    assert as_tensors((x, y))[0].dtype == torch.float64


def test_batches_of_arrays_are_counted_and_what_holds_no_numbers_is_left_to_the_network():
    x, y = _arrays()
    words = np.array(["a"] * 12)
    data = [((x, words), y)]
    assert count_items(data) == 12
    (((found, kept), _),) = as_batches(data, 1, torch.float32)
    assert found.dtype == torch.float32
    assert kept is words
