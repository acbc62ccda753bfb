"""Weights that batch norm cancels in training are named once, before they are trained, and no others."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import varlap
from varlap.errors import VarlapWarning
from varlap.predict.statistics import layers_with_statistics

S = 16


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def convnet(*first: nn.Module) -> nn.Module:
    return nn.Sequential(*first, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


class Residual(nn.Module):
    """A branch whose norm begins at zero, as is usual: no gradient arrives behind it."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=bias)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 3)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((x + self.norm(self.conv(x))).relu().mean((2, 3)))


class WithoutUse(nn.Module):
    """A parameter that nothing uses, and a unit that never fires."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.dead = nn.Parameter(torch.ones(3)), nn.Linear(4, 5)
        self.rest = nn.Sequential(nn.Linear(9, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 3))
        nn.init.constant_(self.dead.bias, -1e3)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(torch.cat([x, self.dead(x).relu()], 1))


class WithRareFlag(nn.Module):
    """A module sees the first input alone, which is the same for all items: batch norm cancels what is made of it."""

    def __init__(self, of_flag: nn.Module) -> None:
        super().__init__()
        self.of_flag = of_flag
        self.rest = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        flag = torch.zeros_like(x.flatten(1)[:, :1])
        flag = flag.flatten().long() if isinstance(self.of_flag, nn.Embedding) else flag
        return self.rest(torch.cat([x.flatten(1)[:, :4], self.of_flag(flag)], 1))


class WithTable(nn.Module):
    """A table of the network's own, of which all items take one row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, 4))
        self.rest = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)[:, :4]
        return self.rest(torch.cat([x, self.table[:1].expand_as(x)], 1))


def conv(bias: bool = True) -> nn.Module:
    return nn.Conv2d(1, 4, 3, padding=1, bias=bias)


def with_zero_head() -> nn.Module:
    network = convnet(conv(), nn.BatchNorm2d(4))
    nn.init.zeros_(network[-1].weight)
    return network


def warned(network: nn.Module, x: Tensor, objective: type = varlap.VI, **options: Any) -> list[str]:
    bnn = varlap.BNN(network, **options).train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            objective(num_data=100)(bnn, x, torch.arange(len(x)) % 3)
    return [str(one.message) for one in caught if "batch norm cancels" in str(one.message)]


CANCELLED = {
    "convolution": (lambda: convnet(conv(), nn.BatchNorm2d(4)), "'0.bias'"),
    "two layers": (
        lambda: nn.Sequential(*[part for _ in "ab" for part in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh())]),
        "'0.bias', '3.bias'",
    ),
    "dropout between": (lambda: convnet(conv(), nn.Dropout(0.5), nn.BatchNorm2d(4)), None),
    "zero-initialised branch": (lambda: Residual(bias=True), "'conv.bias'"),
    "zero-initialised head": (with_zero_head, "'0.bias'"),
    "one scale and shift for all inputs": (
        lambda: nn.Sequential(
            nn.BatchNorm2d(1), conv(False), nn.Flatten(), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 3)
        ),
        "'0.weight', '0.bias'",
    ),
}
IN_PEACE = {
    "no bias": lambda: convnet(conv(False), nn.BatchNorm2d(4)),
    "group norm": lambda: convnet(conv(), nn.GroupNorm(2, 4)),
    "a norm that cancels in evaluation mode too": lambda: convnet(
        conv(), nn.InstanceNorm2d(4), nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)
    ),
    "an activation between": lambda: convnet(conv(), nn.Tanh(), nn.BatchNorm2d(4)),
    "zero-initialised branch": lambda: Residual(bias=False),
    "statistics that stand still": lambda: convnet(conv(), nn.BatchNorm2d(4, track_running_stats=False)),
    "frozen norm": lambda: convnet(conv(), AlwaysEvaluating(4)),
    "embedding of a rare flag": lambda: WithRareFlag(nn.Embedding(2, 4)),
    "table of a rare flag": WithTable,
    "layers that see a rare flag alone": lambda: WithRareFlag(
        nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh())
    ),
}


class AlwaysEvaluating(nn.BatchNorm2d):
    def train(self, mode: bool = True) -> "AlwaysEvaluating":
        return super().train(False)


class AlwaysEvaluating1d(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> "AlwaysEvaluating1d":
        return super().train(False)


def images(name: str) -> Tensor:
    return numbers(S, 16) if name == "two layers" else numbers(S, 1, 4, 4)


@pytest.mark.filterwarnings("ignore:V[LH].*needs second derivatives:varlap.errors.VarlapWarning")
@pytest.mark.parametrize("objective", [varlap.VI, varlap.VL, varlap.VLHessian])
@pytest.mark.parametrize("name", CANCELLED)
def test_what_batch_norm_cancels_is_named_once(name, objective):
    network, names = CANCELLED[name]
    torch.manual_seed(0)
    said = warned(network(), images(name), objective)
    assert len(said) == (names is not None)
    if names:
        assert f"batch norm cancels in training: {names}. Nothing then holds the variances" in said[0]
        assert f"select=lambda name, parameter: name not in {{{names}}})" in said[0]


@pytest.mark.parametrize("scale", [1.0, 255.0])
@pytest.mark.parametrize("name", IN_PEACE)
def test_other_weights_are_left_in_peace(name, scale):
    torch.manual_seed(0)
    assert warned(IN_PEACE[name](), scale * images(name)) == []


def test_unused_weights_and_dead_units_are_left_in_peace():
    assert warned(WithoutUse(), numbers(S, 4)) == []


def test_a_batch_of_equal_items_in_which_all_is_cancelled_says_nothing():
    network = nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 3))
    assert warned(network, torch.ones(S, 4)) == []


def test_advice_is_followed_by_silence():
    torch.manual_seed(0)
    select = lambda name, parameter: name not in {"0.bias"}  # noqa: E731
    assert warned(convnet(conv(), nn.BatchNorm2d(4)), images(""), select=select) == []


def test_a_map_solution_has_no_variances_to_warn_of():
    assert warned(convnet(conv(), nn.BatchNorm2d(4)), images(""), varlap.MAP) == []


def test_many_names_are_cut_short():
    blocks = [part for _ in range(9) for part in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh())]
    (said,) = warned(nn.Sequential(*blocks), images("two layers"))
    assert "'18.bias', '21.bias' and 1 more})" in said


def test_the_look_leaves_no_trace():
    results = []
    for seed in (0, 0):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
        bnn = varlap.BNN(network).train()
        before = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
        state = torch.get_rng_state()
        for attempt in range(1 + len(results)):
            bnn.load_state_dict(before)
            with pytest.warns(VarlapWarning) if not attempt else warnings.catch_warnings():
                loss = varlap.VI(100)(bnn, numbers(S, 4), torch.arange(S) % 3, step=0).loss
        assert torch.equal(torch.get_rng_state(), state)
        assert all(module.training for module in network.modules())
        assert network[1].momentum == 0.1
        results.append([loss.detach(), *(buffer.clone() for buffer in network.buffers())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_small_batches_and_evaluation_mode_put_the_look_off():
    torch.manual_seed(0)
    network, objective = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), varlap.VI(100)
    bnn = varlap.BNN(network).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objective(bnn, numbers(3, 4), torch.arange(3))
        objective(bnn.eval(), numbers(S, 4), torch.arange(S) % 3)
    with pytest.warns(VarlapWarning, match="batch norm cancels in training: '0.bias'"):
        objective(bnn.train(), numbers(S, 4), torch.arange(S) % 3)


@pytest.mark.parametrize("size", [2, S])
@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(8), lambda: AlwaysEvaluating1d(8)], ids=["none", "frozen"])
def test_a_network_without_moving_batch_norm_is_searched_once_at_most(norm, size, monkeypatch):
    searches = []
    search = lambda network: searches.append(network) or layers_with_statistics(network)  # noqa: E731
    monkeypatch.setattr("varlap.objectives.cancelled.layers_with_statistics", search)
    bnn, objective = varlap.BNN(nn.Sequential(nn.Linear(4, 8), norm(), nn.Linear(8, 3))).train(), varlap.VI(100)
    for _ in range(3):
        objective(bnn, numbers(size, 4), torch.arange(size) % 3)
    assert len(searches) == (size == S)
