"""Two ranks under Lightning train as two ranks of `fit` do, and score together; by gloo on loopback."""

import logging
import os
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import varlap

pytest.importorskip("lightning.pytorch")

RANKS, NUM_ITEMS = 2, 48


def _network() -> varlap.BNN:
    torch.manual_seed(0)
    return varlap.BNN(nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Dropout(0.1), nn.Linear(8, 3)))


def _data(num_items: int = NUM_ITEMS) -> TensorDataset:
    x = torch.randn(num_items, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1))


def _objectives() -> dict[str, Any]:
    return {
        "VL": varlap.VL(NUM_ITEMS, 0.1),
        "VL closed-form": varlap.VL(NUM_ITEMS, 0.1, variances="closed-form", beta_warmup_steps=4),
        "MAP": varlap.MAP(NUM_ITEMS, 0.1),
    }


def _train_both_ways(folder: Path) -> None:
    from lightning.pytorch import Trainer

    from varlap.integrations.lightning import FitSampler, LightningBNN

    data, outside = _data(), _data(31)  # an odd number: the sampler of Lightning repeats one item
    for name, objective in _objectives().items():
        bnn = _network()
        options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(
            accelerator="cpu",
            devices=RANKS,
            strategy="ddp",
            max_epochs=3,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **options,
        )
        drawn: list[torch.Tensor] = []
        sample = bnn.likelihood.sample
        bnn.likelihood.sample = lambda *args, to=drawn, by=sample: to.append(by(*args)) or to[-1]
        loader = DataLoader(data, batch_size=8, sampler=FitSampler(data))
        trainer.fit(LightningBNN(bnn, objective, lr=1e-2), loader, DataLoader(outside, batch_size=8))
        assert trainer.world_size == RANKS
        _check_equal(bnn, objective)
        if drawn:
            one, other = _gathered(drawn[0])
            assert not torch.equal(one, other), "each rank draws labels of its own"
        repeated = torch.cat([torch.arange(31), torch.tensor([0])])
        expected = varlap.evaluate(bnn, outside[repeated])
        for score in ("nll", "accuracy", "ece"):
            assert float(trainer.callback_metrics[f"validation_{score}"]) == pytest.approx(expected[score], rel=1e-5)
        trainer.save_checkpoint(folder / f"{name}.ckpt")

        again, same = _network(), _objectives()[name]
        varlap.fit(again, same, data.tensors, epochs=3, batch_size=16, lr=1e-2, progress="none")
        for key, tensor in again.state_dict().items():
            torch.testing.assert_close(bnn.state_dict()[key], tensor, rtol=1e-6, atol=1e-6, msg=f"{name}: {key}")


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    both = [torch.zeros_like(tensor) for _ in range(RANKS)]
    dist.all_gather(both, tensor.contiguous())
    return both


def _check_equal(bnn: varlap.BNN, objective: Any) -> None:
    remembered = {f"{r}/{n}": t for r, running in objective.running_means().items() for n, t in running.sums.items()}
    for name, tensor in (bnn.state_dict() | remembered).items():
        one, other = _gathered(tensor)
        assert torch.equal(one, other), name


def _enter(rank: int, port: int, folder: str) -> None:
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "TORCHELASTIC_RUN_ID": "test",  # by this Lightning knows that the processes are there already
        "GROUP_RANK": "0",
    }
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    _train_both_ways(Path(folder))
    dist.barrier()
    dist.destroy_process_group()  # whose threads would abort a process that ends before them


def test_two_ranks_train_as_those_of_fit_draw_their_own_labels_and_score_together(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_enter, args=(port, str(tmp_path)), nprocs=RANKS)
    for name in _objectives():
        loaded = varlap.load(tmp_path / f"{name}.ckpt", _network().network)
        assert varlap.evaluate(loaded, _data().tensors)["nll"] < 1.2
