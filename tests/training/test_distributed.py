"""Two ranks train as one: equal parameters, averaged gradients, labels of their own; by gloo on loopback."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import varlap
from varlap.errors import BatchError
from varlap.metrics.accumulator import Scores
from varlap.training.distributed import World, join_world

RANKS = 2

# Of the bias in front of batch norm; the ranks, which are processes of their own, print it.
pytestmark = pytest.mark.filterwarnings("ignore:batch norm cancels in training:varlap.errors.VarlapWarning")


def _ranks(work: Callable[..., None], folder: Path, *args: Any, ranks: int = RANKS, backend: str = "gloo") -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_enter, args=(ranks, backend, port, str(folder), work, args), nprocs=ranks)


def _enter(
    rank: int, ranks: int, backend: str, port: int, folder: str, work: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    work(Path(folder), *args)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == ranks - 1:  # who leaves a barrier first must not hang up on the others
        store.set("left", "1")
    if rank == 0:
        store.wait(["left"])
    dist.destroy_process_group()
    os._exit(0)  # all has passed; threads of gloo that still run would now and then abort an ordinary exit


def _network() -> varlap.BNN:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Softplus(), nn.Linear(8, 3)
    return varlap.BNN(nn.Sequential(*layers)).train()


def _data(num_items: int = 41) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_items, 4, generator=generator), torch.arange(num_items) % 3


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    both = [torch.zeros_like(tensor, device="cpu") for _ in range(RANKS)]
    dist.all_gather(both, tensor.cpu().contiguous())
    return both


def _check_equal(bnn: varlap.BNN) -> None:
    for name, tensor in bnn.state_dict().items():
        one, other = _gathered(tensor)
        assert torch.equal(one, other), name


def _train_twenty_steps(folder: Path, device: str = "cpu") -> None:
    bnn = _network().to(device)
    if dist.get_rank():  # weights that differ at first: the first rank's count
        with torch.no_grad():
            bnn.network[0].weight += 1
    history = varlap.fit(bnn, varlap.VL(41, 0.1), _data(), epochs=4, batch_size=9, progress="none")
    assert history.epochs[-1]["step"] == 20
    _check_equal(bnn)
    assert history.epochs[-1]["elbo"] > history.epochs[0]["elbo"]


def test_two_ranks_have_the_same_parameters_after_twenty_steps(tmp_path: Path):
    _ranks(_train_twenty_steps, tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_ranks_on_a_gpu_have_the_same_parameters_after_twenty_steps(tmp_path: Path):
    _ranks(_train_twenty_steps, tmp_path, "cuda:0")


def _take_steps_alone_and_by_nccl(folder: Path) -> None:
    x, y = (tensor.cuda() for tensor in _data(9))
    ends = []
    for world in (None, World(rank=0, size=1, device=torch.device("cuda:0"))):
        bnn = _network().double().to("cuda:0")
        step = varlap.TrainingStep(bnn, varlap.VL(41, 0.1), varlap.adam(bnn, 1e-2), world=world, compiled=False)
        for number in range(9):
            step(x.double(), y, number=number)
        ends.append(bnn.state_dict())
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=0, atol=1e-10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_through_nccl_equal_those_of_a_process_of_its_own(tmp_path: Path):
    _ranks(_take_steps_alone_and_by_nccl, tmp_path, ranks=1, backend="nccl")  # a GPU serves one rank of NCCL


def _count_all_reduces(folder: Path) -> None:
    counts: list[int] = []
    all_reduce = dist.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        counts[-1] += 1
        return all_reduce(*args, **options)

    def augment(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        counts.append(0)  # a step begins
        return x

    dist.all_reduce = counted
    counts.append(0)
    varlap.fit(_network(), varlap.VL(40, 0.1), (torch.ones(40, 4), torch.arange(40) % 3), augment=augment, **ONE_EPOCH)
    dist.all_reduce = all_reduce
    # Before the steps come the checks of fit; the first step begins the curvature's memory.
    assert counts[-10:] == [2, *[1] * 9]


ONE_EPOCH: dict[str, Any] = {"epochs": 1, "batch_size": 4, "progress": "none"}


def test_a_step_is_one_all_reduce(tmp_path: Path):
    _ranks(_count_all_reduces, tmp_path)


def _compare_gradients(folder: Path) -> None:
    x, y = _data(10)
    rank, drawn = dist.get_rank(), []
    bnn = _network()
    world = join_world(bnn)
    assert world == World(rank, RANKS, torch.device("cpu"))
    sample = bnn.likelihood.sample
    bnn.likelihood.sample = lambda *args: drawn.append(sample(*args)) or drawn[-1]
    share = x[world.share], y[world.share]
    objective = varlap.VL(100, 0.5, curvature=varlap.Fisher())
    with bnn.buffers_restored():
        objective(bnn, *share, step=3).loss.backward()
    own = [p.grad.clone() for p in bnn.parameters() if p.grad is not None]
    optimizer = torch.optim.Adam(bnn.parameter_groups(1e-3))
    step = varlap.TrainingStep(bnn, varlap.VL(100, 0.5, curvature=varlap.Fisher()), optimizer, world=world)
    step(*share, number=3)
    averaged = [p.grad for p in bnn.parameters() if p.grad is not None]
    for mine, mean in zip(own, averaged, strict=True):
        torch.testing.assert_close(mean, sum(_gathered(mine)) / RANKS, rtol=0, atol=1e-6)
    assert torch.equal(drawn[0], drawn[1])
    one, other = _gathered(drawn[0])
    assert not torch.equal(one, other)


def test_the_gradient_is_the_mean_of_the_ranks_and_each_draws_its_own_labels(tmp_path: Path):
    _ranks(_compare_gradients, tmp_path)


def _find_nan(folder: Path) -> None:
    x, y = _data(10)
    x[1, 0] = float("nan")  # on the second rank
    bnn = _network()
    world = join_world(bnn)
    assert world is not None
    objective = varlap.VL(100, curvature=varlap.Fisher(every=2, memory=0.5))
    step = varlap.TrainingStep(bnn, objective, varlap.adam(bnn), world=world)
    sound_x, _ = _data(10)
    step(sound_x[world.share], y[world.share], number=0)
    before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    memory = objective.state_dict()["fisher"]
    message = "x holds NaN" if world.rank else "another rank found NaN or Inf"
    with pytest.raises(varlap.errors.NonFiniteError, match=f"step 2: {message}"):
        step(x[world.share], y[world.share], number=2)
    for name, tensor in bnn.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for name, total in objective.state_dict()["fisher"].items():
        assert torch.equal(total, memory[name]), name
    step(sound_x[world.share], y[world.share], number=2)
    _check_equal(bnn)


def test_a_nan_on_one_rank_is_an_error_on_all_and_changes_nothing(tmp_path: Path):
    _ranks(_find_nan, tmp_path)


def _fit_all(folder: Path, out: str) -> None:
    bnn = _network()
    settings: dict[str, Any] = {"epochs": 4, "batch_size": 9, "progress": "none", "out": out}
    history = varlap.fit(bnn, varlap.VL(41, 0.1), _data(), augment=_unchanged, **settings)
    if dist.get_rank() == 0:
        assert [row["epoch"] for row in history.epochs] == [0, 1, 2, 3]
    _check_equal(bnn)


def test_a_checkpoint_of_one_process_is_carried_on_by_two_ranks(tmp_path: Path):
    class Stopped(Exception):
        pass

    def augment(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        batches.append(len(x))
        if len(batches) == 9:
            raise Stopped
        return x

    batches: list[int] = []
    augment.__qualname__ = _unchanged.__qualname__
    settings: dict[str, Any] = {"epochs": 4, "batch_size": 9, "progress": "none", "out": tmp_path / "run"}
    with pytest.raises(Stopped):
        varlap.fit(_network(), varlap.VL(41, 0.1), _data(), augment=augment, **settings)
    _ranks(_fit_all, tmp_path, str(tmp_path / "run"))
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


def _unchanged(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x


def _stop_early(folder: Path, out: str, ranks_to_signal: int) -> None:
    bnn = _network()
    settings = {"epochs": 4, "batch_size": 9, "out": out, "progress": "none"}
    stop_at = 7

    def augment(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        stop_here.extend([1] * (len(x) > 1))
        if len(stop_here) == stop_at and dist.get_rank() < ranks_to_signal:
            os.kill(os.getpid(), 15)
        return x

    stop_here: list[int] = []
    augment.__qualname__ = _unchanged.__qualname__
    with pytest.raises(varlap.errors.Interrupted, match=r"SIGTERM .* step 7"):
        varlap.fit(bnn, varlap.VL(41, 0.1), _data(), augment=augment, **settings)


@pytest.mark.parametrize("ranks_to_signal", [1, 2])
def test_a_signal_stops_both_ranks_and_one_process_carries_on(tmp_path: Path, ranks_to_signal: int):
    _ranks(_stop_early, tmp_path, str(tmp_path / "run"), ranks_to_signal)
    bnn = _network()
    history = varlap.fit(
        bnn,
        varlap.VL(41, 0.1),
        _data(),
        augment=_unchanged,
        epochs=4,
        batch_size=9,
        out=tmp_path / "run",
        progress="none",
    )
    assert [row["epoch"] for row in history.epochs] == [0, 1, 2, 3]
    assert history.epochs[-1]["step"] == 20


def _fail_differently(folder: Path) -> None:
    x, y = _data(12)
    bnn = _network()
    world = join_world(bnn)
    assert world is not None
    step = varlap.TrainingStep(bnn, varlap.VL(100), varlap.adam(bnn), world=world)
    wrong = y.clone()
    wrong[0] = 7  # on the first rank
    kind, message = (
        (varlap.errors.VarlapError, "another rank failed")
        if world.rank
        else (
            varlap.errors.BatchError,
            "label 7 is out of range",
        )
    )
    with pytest.raises(kind, match=message):
        step(x[world.share], wrong[world.share], number=0)
    step(x[world.share], y[world.share], number=0)
    _check_equal(bnn)
    with pytest.raises(
        varlap.errors.ConfigError,
        match="is not empty and holds no run" if world.rank == 0 else "the first rank was refused",
    ):
        varlap.fit(bnn, varlap.VL(41, 0.1), _data(), epochs=1, out=folder, progress="none", batch_size=9)


def test_any_failure_of_one_rank_is_a_failure_of_all(tmp_path: Path):
    (tmp_path / "other").write_text("")
    _ranks(_fail_differently, tmp_path)


class Masked(nn.Linear):
    """With constants that averaging would spoil: 0 · −∞ of a rank without items, and 0.1 to the last bit."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, float("-inf")]))
        self.register_buffer("scale", torch.tensor(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale + self.mask.clamp(min=-1)


def _share_unevenly(folder: Path) -> None:
    data_set = torch.utils.data.TensorDataset(*_data(9))
    torch.manual_seed(0)
    bnn = varlap.BNN(Masked())
    constants = {name: buffer.clone() for name, buffer in bnn.network.named_buffers()}
    varlap.fit(bnn, varlap.VL(9, 0.1), data_set, epochs=2, batch_size=4, progress="none")  # the last batch has one
    _check_equal(bnn)
    for name, buffer in bnn.network.named_buffers():
        assert torch.equal(buffer, constants[name]), name
    with pytest.raises(varlap.errors.BatchError, match="batch norm cannot estimate the variance"):
        varlap.fit(_network(), varlap.VL(39, 0.1), _data(39), epochs=1, batch_size=9, progress="none")
    with pytest.raises(varlap.errors.BatchError, match="batches of 1 items cannot be shared by 2 ranks"):
        varlap.fit(bnn, varlap.VL(9, 0.1), data_set, epochs=1, batch_size=1, progress="none")
    loader = torch.utils.data.DataLoader(data_set, batch_size=4, shuffle=True, generator=torch.Generator())
    with pytest.raises(varlap.errors.ConfigError, match="some items would never be trained on"):
        varlap.fit(bnn, varlap.VL(9, 0.1), loader, epochs=1, progress="none")


def test_a_rank_without_items_takes_part_and_what_cannot_be_shared_is_refused(tmp_path: Path):
    _ranks(_share_unevenly, tmp_path)


def _gather_scores(folder: Path) -> None:
    scores, probs = Scores(), torch.eye(3)
    if not dist.get_rank():
        scores.add(varlap.Prediction(probs=probs), torch.arange(3))
    with pytest.raises(BatchError, match="a rank has scored nothing, or something else than another"):
        scores.gather()


def test_scores_of_a_rank_without_items_are_an_error_of_all(tmp_path: Path):
    _ranks(_gather_scores, tmp_path)


def _shard(folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    network = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 3))
    fully_shard(network, mesh=init_device_mesh("cpu", (RANKS,)))
    with pytest.raises(varlap.errors.NetworkError, match=r"parameter '0\.weight' is sharded over ranks"):
        varlap.BNN(network)


def test_a_sharded_network_is_refused_with_the_way_out(tmp_path: Path):
    _ranks(_shard, tmp_path)
