"""Claims about as_batches and count_items."""

import threading
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

import varlap
from varlap.data import as_batches, count_items
from varlap.errors import BatchError, ConfigError
from varlap.streams import Streams

X, Y = torch.arange(14.0).reshape(7, 2), torch.arange(7)


class Inputs(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class NoLength(Dataset):
    def __getitem__(self, index):
        return X[index], Y[index]


FORMS = {
    "tensors": (X, Y),
    "list of two tensors": [X, Y],
    "arrays": (X.numpy(), Y.numpy()),
    "tensor and array": (X, Y.numpy()),
    "map-style data set": TensorDataset(X, Y),
    "loader": DataLoader(TensorDataset(X, Y), batch_size=3),
    "list of batches": [(X[:3], Y[:3]), (X[3:6], Y[3:6]), [X[6:], Y[6:]]],
    "loader of a stream": DataLoader(Stream(), batch_size=3),
}


@pytest.mark.parametrize("data", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_same_batches_twice(data):
    batches = as_batches(data, 3)
    for _ in range(2):
        xs, ys = zip(*batches, strict=True)
        assert [len(y) for y in ys] == [3, 3, 1]
        assert torch.equal(torch.cat(xs), X)
        assert torch.equal(torch.cat(ys), Y)


@pytest.mark.parametrize("data", FORMS.values(), ids=FORMS)
def test_every_form_counts_the_same_items(data):
    assert count_items(data) == 7


def test_number_of_batches_is_known_where_it_can_be():
    for name in ("tensors", "map-style data set", "loader", "list of batches"):
        assert len(as_batches(FORMS[name], 3)) == 3


def test_inputs_may_be_a_dict_or_a_tuple_of_arrays():
    for x, y in as_batches(({"a": X, "b": (X.numpy(), Y)}, Y), 3):
        assert torch.equal(x["a"], x["b"][0])
        assert torch.equal(x["b"][1], y)
    first, _ = next(iter(as_batches((Inputs(X, Y), Y), 3)))
    assert torch.equal(first.left, X[:3])


@pytest.mark.parametrize("x", [X, {"a": X, "b": X}])
def test_targets_may_be_a_dict_or_a_tuple_of_arrays(x):
    for y in ({"a": Y, "b": Y.numpy()}, (Y, Y)):
        assert count_items((x, y)) == 7
        batches = list(as_batches((x, y), 3))
        parts = [list(part.values()) if isinstance(part, dict) else part for _, part in batches]
        for one in zip(*parts, strict=True):
            assert torch.equal(torch.cat(one), Y)


def test_two_dicts_in_a_list_are_batches_that_are_no_pairs():
    with pytest.raises(BatchError, match="batch 0 is a dict, not a pair"):
        list(as_batches([{"x": X, "y": Y}, {"x": X, "y": Y}], 3))


def test_two_pairs_in_a_tuple_are_two_batches():
    data = ((X[:3], Y[:3]), (X[3:], Y[3:]))
    assert [len(y) for _, y in as_batches(data, 100)] == [3, 4]
    assert count_items(data) == 7


class Noisy(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + torch.randn(2), Y[index]


RANDOM = {
    "shuffling loader": DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True),
    "loader with a worker": DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=1),
    "random transform": DataLoader(Noisy(), batch_size=3),
    "data set with a random transform": Noisy(),
}


@pytest.mark.parametrize("data", [*FORMS.values(), *RANDOM.values()], ids=[*FORMS, *RANDOM])
def test_reading_data_leaves_the_global_generator_alone(data):
    before = torch.get_rng_state()
    for _ in as_batches(data, 3):
        assert torch.equal(torch.get_rng_state(), before)
    count_items(data)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("data", RANDOM.values(), ids=RANDOM)
def test_what_a_loader_draws_follows_from_the_seed_alone(data):
    def inputs(seed: int) -> torch.Tensor:
        torch.seed()
        return torch.cat([x for x, _ in as_batches(data, 3, seed=seed)])

    assert torch.equal(inputs(0), inputs(0))
    assert not torch.equal(inputs(0), inputs(1))


def test_batches_of_one_pass_are_transformed_by_different_numbers():
    noises = torch.cat([x - X[y] for x, y in as_batches(Noisy(), 3)])
    assert len({round(value, 6) for value in noises.flatten().tolist()}) == noises.numel()


def test_what_a_caller_draws_between_two_batches_is_the_callers_own():
    torch.manual_seed(5)
    expected = [torch.rand(()) for _ in range(3)]
    torch.manual_seed(5)
    assert [torch.rand(()) for _ in as_batches(RANDOM["shuffling loader"], 3)] == expected


def test_a_loader_that_fails_leaves_the_global_generator_alone():
    def collate(items):
        torch.rand(1)
        raise KeyError(len(items))

    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        list(as_batches(DataLoader(TensorDataset(X, Y), batch_size=3, collate_fn=collate), 3))
    assert torch.equal(torch.get_rng_state(), before)


class Asking(Dataset):
    """Waits for another thread, which predicts."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        bnn = varlap.BNN(torch.nn.Linear(2, 2))
        thread = threading.Thread(target=bnn.predict, args=(X[:1],), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), "the thread waits for the loader"
        return X[index], Y[index]


@pytest.mark.parametrize("use", [lambda bnn, data: list(as_batches(data, 4)), varlap.evaluate])
def test_a_loader_may_wait_for_a_thread_that_predicts(use):
    bnn = varlap.BNN(torch.nn.Linear(2, 7))
    use(bnn, DataLoader(Asking(), batch_size=4))


def test_a_loader_draws_other_numbers_than_the_network_of_that_step():
    class Drawn(Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return torch.rand(4), 0

    ((x, _),) = as_batches(Drawn(), 1)
    for step in (0, 1):
        with Streams(0, step).around_network(torch.device("cpu")):
            assert not torch.equal(x[0], torch.rand(4))


def test_read_only_and_reversed_arrays_are_taken():
    array = X.numpy().copy()
    array.flags.writeable = False
    ((x, _),) = as_batches((array, Y.numpy()[::-1]), 7)
    assert torch.equal(x, X)


def test_count_is_that_of_the_data_set_unless_the_sampler_takes_a_subset():
    data_set = TensorDataset(X, Y)
    assert count_items(DataLoader(data_set, batch_size=3, drop_last=True)) == 7
    assert count_items(DataLoader(data_set, sampler=SubsetRandomSampler([1, 2]))) == 2
    nested = BatchSampler(SubsetRandomSampler([1, 2, 4]), batch_size=2, drop_last=False)
    assert count_items(DataLoader(data_set, batch_sampler=nested)) == 3


@pytest.mark.parametrize("function", [count_items, lambda data: as_batches(data, 3)])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y[:5]), "x and y must have as many items as each other, but x has 7, y has 5"),
        (({"a": X, "b": X[:2]}, Y), "but x['a'] has 7, x['b'] has 2, y has 7"),
        ((X[:0], Y[:0]), "the data hold no items; give at least one"),
        ((X, torch.tensor(1)), "y has no dimensions; the first one must count the items"),
        (([1, 2], Y[:2]), "x is a list; give a tensor or an array, or a dict or tuple of them"),
        ((np.array(["a", "b"]), Y[:2]), "x is an array of <U1; give numbers, such as float32 or int64"),
        (zip(X, Y, strict=True), "data is a zip, which can be read only once, but it is needed again every epoch"),
        ((pair for pair in [(X, Y)]), "data is a generator, which can be read only once"),
        (X, "data is a Tensor; give a tuple (x, y) of tensors or arrays, a map-style Dataset, a DataLoader, or a"),
        ({"x": X, "y": Y}, "data is a dict; give a tuple (x, y)"),
        (None, "data is a NoneType; give a tuple (x, y)"),
        (Stream(), "data is the IterableDataset Stream; wrap it in a DataLoader that makes its batches"),
        (NoLength(), "data is the Dataset NoLength without __len__; add it, or give"),
    ],
)
def test_data_of_another_form_are_refused_with_the_fix(function, data, message):
    with pytest.raises(BatchError) as error:
        function(data)
    assert message in str(error.value)


@pytest.mark.parametrize(("batch", "what"), [((X, Y, Y), "tuple of 3"), ({"x": X, "y": Y}, "dict"), (X, "Tensor")])
def test_batch_that_is_no_pair_is_named_with_the_fix(batch, what):
    batches = as_batches([(X, Y), batch, (X, Y)], 3)
    with pytest.raises(BatchError, match=rf"batch 1 is a {what}, not a pair \(x, y\); have the data set or the"):
        list(batches)


def test_empty_loaders_and_batches_without_tensors_are_not_counted():
    with pytest.raises(BatchError, match="the data hold no items; give at least one"):
        count_items([])
    with pytest.raises(BatchError, match="no tensor whose first dimension counts its items; give num_data yourself"):
        count_items([("a", "b")])


@pytest.mark.parametrize("batch_size", [0, 2.5, True, None])
def test_batch_size_must_be_a_positive_whole_number(batch_size):
    with pytest.raises(ConfigError, match=f"as_batches: batch_size is {batch_size}; give a whole number of at"):
        as_batches((X, Y), batch_size)
