"""Loaders whose samplers choose the items: told apart by what they do, begun anew in each epoch, never shared twice."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import SETTINGS, Stopped, at_step, made_bnn, made_data, made_objective, noise, same_bits, stop
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

import varlap
from varlap.training.sampler import FitSampler
from varlap.training.source import as_source

ITEMS = TensorDataset(torch.arange(8.0)[:, None], torch.arange(8) % 2)
SAMPLERS: dict[str, dict[str, Any]] = {
    "shuffle": {"shuffle": True, "batch_size": 4},
    "subset": {"sampler": SubsetRandomSampler(range(8)), "batch_size": 4},
    "batches of a random sampler": {"batch_sampler": BatchSampler(RandomSampler(ITEMS), 4, drop_last=False)},
    "distributed": {"sampler": DistributedSampler(ITEMS, 2, 0), "batch_size": 4},
    "fit's": {"sampler": FitSampler(ITEMS), "batch_size": 4},
    "one of one's own": {"batch_sampler": type("Own", (list,), {"sampler": object()})([[0, 1], [2, 3]])},
    "a shard of batches": {"batch_sampler": type("Shard", (BatchSampler,), {})(SequentialSampler(ITEMS), 4, False)},
}


def _source(loader: Any, share: slice = slice(None), resumable: bool = False) -> Any:
    settings = {"batch_size": 4, "seed": 0, "device": torch.device("cpu")}
    return as_source(loader, share=share, resumable=resumable, **settings)


class Loader:
    """Not torch's, but with a sampler as torch's has."""

    sampler, batch_size = RandomSampler(ITEMS), 4

    def __iter__(self):
        yield from DataLoader(ITEMS, batch_size=4, sampler=self.sampler)


def test_a_sampler_of_another_loader_is_refused_on_several_ranks_too():
    with pytest.raises(varlap.errors.ConfigError, match="the loader's RandomSampler chooses"):
        _source(Loader(), share=slice(0, None, 2))


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_that_chooses_is_refused_on_several_ranks(name: str):
    with pytest.raises(varlap.errors.ConfigError, match="some items would never be trained on; give fit the Dataset"):
        _source(DataLoader(ITEMS, **SAMPLERS[name]), share=slice(0, None, 2))


@pytest.mark.parametrize(
    "batches", [{"batch_size": 4}, {"batch_sampler": BatchSampler(SequentialSampler(ITEMS), 4, False)}]
)
def test_several_ranks_see_all_items_of_a_loader_in_order(batches: dict[str, Any]):
    loader = DataLoader(ITEMS, **batches)
    seen = [x for rank in (0, 1) for x, _, _ in _source(loader, share=slice(rank, None, 2)).epoch(0, 0)]
    assert torch.cat(seen).flatten().sort().values.tolist() == list(range(8))


def test_batches_of_a_random_sampler_are_not_called_the_same_in_every_epoch(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    loader = DataLoader(ITEMS, **SAMPLERS["batches of a random sampler"])
    _source(loader)
    assert caplog.text == ""
    _source(loader, resumable=True)
    assert caplog.text == ""


@pytest.mark.parametrize("sampler", [FitSampler(ITEMS), DistributedSampler(ITEMS, 1, 0)], ids=["fit's", "torch's"])
def test_a_sampler_of_epochs_is_told_which_one_it_is(sampler: Any):
    def order(epoch: int) -> list[float]:
        return [float(x) for batch, _, _ in source.epoch(epoch, 0) for x in batch]

    source = _source(DataLoader(ITEMS, batch_size=4, sampler=sampler))
    first, second = order(0), order(1)
    assert first != second
    assert order(0) == first


def test_a_run_by_a_sampler_of_epochs_is_carried_on_exactly(tmp_path: Path):
    def trained(**settings: Any) -> varlap.BNN:
        torch.manual_seed(0)
        bnn = varlap.BNN(varlap.models.mlp(1, 2))
        loader = DataLoader(ITEMS, batch_size=4, sampler=FitSampler(ITEMS, seed=3))
        varlap.fit(bnn, varlap.MAP(8), loader, epochs=4, progress="none", **settings)
        return bnn

    def stop(row: Any, step: int) -> None:
        if step == 4:
            raise KeyboardInterrupt

    logger = type("Logger", (), {"log_metrics": staticmethod(stop)})()
    with pytest.raises(KeyboardInterrupt):
        trained(out=tmp_path / "run", save_every=2, loggers=[logger])
    carried_on, alone = trained(out=tmp_path / "run", save_every=2), trained()
    assert all(torch.equal(a, b) for a, b in zip(carried_on.parameters(), alone.parameters(), strict=True))


def _check_it_is_carried_on_exactly(train: Any, folder: Path) -> None:
    """Stop a run in the middle of its second epoch, and carry it on; the caller's generator decides nothing."""

    def trained(augment: Any, **settings: Any) -> varlap.BNN:
        bnn = made_bnn()
        torch.seed()
        varlap.fit(bnn, made_objective(), train, augment=augment, **(SETTINGS | {"epochs": 3} | settings))
        return bnn

    alone, kept = trained(noise), {"out": folder, "save_every": 2}
    with pytest.raises(Stopped):
        trained(at_step(7, stop), **kept)
    assert same_bits(alone, trained(noise, **kept))
    assert not same_bits(alone, trained(noise, seed=1))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_run_by_a_loader_that_shuffles_is_carried_on_exactly(tmp_path: Path, num_workers: int):
    train = DataLoader(TensorDataset(*made_data()), 8, shuffle=True, num_workers=num_workers)
    _check_it_is_carried_on_exactly(train, tmp_path / "run")


class Noisy(Dataset):
    """Transforms its items by torch's global generator."""

    def __init__(self) -> None:
        self._x, self._y = made_data()

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[index] + torch.randn(4), self._y[index]


@pytest.mark.parametrize(
    "train", [Noisy(), DataLoader(Noisy(), 8), DataLoader(Noisy(), 8, num_workers=1)], ids=["set", "loader", "worker"]
)
def test_random_transforms_are_repeated_by_a_run_that_is_carried_on_within_an_epoch(tmp_path: Path, train: Any):
    _check_it_is_carried_on_exactly(train, tmp_path / "run")


def test_a_batch_that_is_no_pair_is_named_by_its_number_in_the_epoch_that_is_carried_on():
    source = as_source(TensorDataset(*3 * [torch.zeros(8)]), batch_size=4, seed=0, device=torch.device("cpu"))
    with pytest.raises(varlap.errors.BatchError, match="batch 1 is a list of 3, not a pair"):
        next(source.epoch(0, 1))


def test_a_loader_shuffles_anew_in_each_epoch_and_alike_for_a_seed():
    def order(source: Any, epoch: int) -> list[float]:
        return [float(x) for batch, _, _ in source.epoch(epoch, 0) for x in batch]

    first, again = (_source(DataLoader(ITEMS, **SAMPLERS["shuffle"])) for _ in range(2))
    orders = [order(first, epoch) for epoch in range(4)]
    assert [order(again, epoch) for epoch in range(4)] == orders
    assert len({tuple(one) for one in orders}) == 4


def test_a_loaders_own_generator_decides_its_order():
    own, expected = (
        DataLoader(ITEMS, generator=torch.Generator().manual_seed(3), **SAMPLERS["shuffle"]) for _ in range(2)
    )
    pairs = zip(_source(own).epoch(0, 0), expected, strict=True)
    assert all(torch.equal(x, one) for (x, _, _), (one, _) in pairs)


@pytest.mark.filterwarnings("ignore:fit_temperature ended at the highest temperature")  # the labels are noise
@pytest.mark.parametrize(
    "use",
    [
        varlap.evaluate,
        lambda bnn, loader: varlap.fit(bnn, varlap.VL(37), loader, epochs=2, progress="none"),
        lambda bnn, loader: varlap.fit(bnn, varlap.VL(37), made_data(), validation=loader, epochs=1, progress="none"),
        varlap.laplace,
        varlap.fit_temperature,
        varlap.reestimate_statistics,
    ],
    ids=["evaluate", "fit", "validation", "laplace", "temperature", "statistics"],
)
def test_reading_a_loader_leaves_the_global_generator_alone(use: Any):
    loader = DataLoader(TensorDataset(*made_data()), 8, shuffle=True)
    bnn = made_bnn()
    before = torch.get_rng_state()
    use(bnn, loader)
    assert torch.equal(torch.get_rng_state(), before)
