"""SGD for the means beside Adam for log σ: each half is torch's own, and together they are one optimizer."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import varlap
from varlap.errors import ConfigError, NetworkError
from varlap.objectives import compiled


def _bnn() -> varlap.BNN:
    torch.manual_seed(0)
    return varlap.BNN(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())


def _step(bnn: varlap.BNN, optimizers: Iterable[torch.optim.Optimizer], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(8, 3, dtype=torch.double, generator=generator), torch.arange(8) % 2
    varlap.VL(100, 0.1)(bnn, x, y, step=number).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _same_bits(one: varlap.BNN, other: varlap.BNN) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_means_move_by_sgd_and_log_sigma_by_adam(momentum: float):
    together, apart = _bnn(), _bnn()
    one = varlap.sgd(together, lr=0.1, momentum=momentum, log_sigma_lr=0.02)
    two = (
        torch.optim.SGD(apart.network.parameters(), lr=0.1, momentum=momentum, nesterov=momentum > 0, fused=True),
        torch.optim.Adam(apart.log_sigma.parameters(), lr=0.02, fused=True),
    )
    start = copy.deepcopy(together)
    for number in range(5):
        _step(together, [one], number)
        _step(apart, two, number)
    assert _same_bits(together, apart)
    assert not any(map(torch.equal, together.parameters(), start.parameters()))


Pair = tuple[varlap.BNN, torch.optim.Optimizer]


def _loaded(bnn: varlap.BNN, optimizer: torch.optim.Optimizer) -> Pair:
    twin = copy.deepcopy(bnn)
    other = varlap.sgd(twin, lr=5.0, log_sigma_lr=5.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return twin, other


def _copied(bnn: varlap.BNN, optimizer: torch.optim.Optimizer) -> Pair:
    return copy.deepcopy((bnn, optimizer))


@pytest.mark.parametrize("again", [_loaded, _copied])
def test_a_second_optimizer_goes_on_from_the_firsts_state(again: Callable[..., Pair]):
    bnn = _bnn()
    optimizer = varlap.sgd(bnn, lr=0.1)
    for number in range(3):
        _step(bnn, [optimizer], number)
    twin, other = again(bnn, optimizer)
    _step(bnn, [optimizer], 3)
    _step(twin, [other], 3)
    assert _same_bits(bnn, twin)


def test_a_scheduler_moves_both_rates():
    optimizer = varlap.sgd(_bnn(), lr=0.1, log_sigma_lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]


def test_a_cycle_of_rates_and_momenta_knows_its_momentum():
    optimizer = varlap.sgd(_bnn(), lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.01], total_steps=10)
    assert optimizer.param_groups[0]["momentum"] == 0.95


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_first_step_leaves_no_trace(fused: bool):
    bnn, alone = _bnn().float(), _bnn().float()
    optimizer, expected = varlap.sgd(bnn, lr=0.1, fused=fused), varlap.sgd(alone, lr=0.1, fused=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    for number, factor in enumerate((float("inf"), 1.0, 1.0)):
        scaler.scale(varlap.VL(100)(bnn, x, y, step=number).loss).backward()
        next(bnn.network.parameters()).grad.mul_(factor)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if number:
            varlap.VL(100)(alone, x, y, step=number).loss.backward()
            expected.step()
            expected.zero_grad()
    for one, other in zip(bnn.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("fused", [False, True])
def test_a_parameter_may_get_its_first_gradient_late(fused: bool):
    bnn = _bnn()
    optimizer = varlap.sgd(bnn, lr=0.1, fused=fused)
    late = bnn.network[2].bias  # type: ignore[index]
    before = late.detach().clone()
    for number in range(3):
        (late if number == 2 else next(bnn.network.parameters())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(late, before - 0.1 * 1.9)  # Nesterov's first step


def test_a_group_that_is_added_later_is_trained_by_sgd_and_copied():
    later, bnn = nn.Parameter(torch.ones(1)), _bnn()
    optimizer = varlap.sgd(bnn, lr=0.1)
    optimizer.add_param_group({"params": [later]})
    later.grad = torch.ones(1)
    optimizer.step()
    assert later.item() == pytest.approx(1 - 0.1 * 1.9)
    copied = copy.deepcopy(optimizer)
    copied.load_state_dict(optimizer.state_dict())
    (own,) = copied.param_groups[2]["params"]
    own.grad = torch.zeros(1)
    copied.step()
    assert own.item() == pytest.approx(later.item() - 0.1 * 0.9**2)


def test_a_closure_is_evaluated_once_and_its_loss_returned():
    bnn, calls = _bnn(), []
    optimizer = varlap.sgd(bnn, lr=0.1)

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        loss = sum(parameter.square().sum() for parameter in bnn.network.parameters())
        loss.backward()  # type: ignore[union-attr]
        return loss  # type: ignore[return-value]

    assert optimizer.step(closure).item() > 0
    assert calls == [True]


def test_an_unsound_step_moves_neither_half(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, _inputs: graph)
    bnn, x, y = _bnn(), torch.randn(8, 3).double(), torch.arange(8) % 2
    step = varlap.TrainingStep(bnn, varlap.VL(100), varlap.sgd(bnn, fused=True), compiled=True, on_nonfinite="skip")
    for number in range(6):
        assert step.take(x, y, number=number)[3] == 1
    before = copy.deepcopy(bnn)
    assert step.take(x * float("nan"), y, number=6)[3] == 0
    assert _same_bits(bnn, before)
    assert step.take(x, y, number=7)[3] == 1
    assert not _same_bits(bnn, before)


@pytest.mark.parametrize("kind", [varlap.MAP, varlap.VI, varlap.VL])
def test_a_traced_step_equals_the_eager_one(kind: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, _inputs: graph)
    found = []
    for compile_it in (False, True):
        bnn, x, y = _bnn(), torch.linspace(-1, 1, 24).double().reshape(8, 3), torch.arange(8) % 2
        optimizer = varlap.sgd(bnn, lr=0.1, fused=compile_it)
        step = varlap.TrainingStep(bnn, kind(100, 0.1), optimizer, compiled=compile_it)
        for number in range(6):
            step(x, y, number=number)
        found.append(bnn.state_dict().values())
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_fit_trains_by_it_with_a_rate_for_log_sigma_that_does_not_follow_the_means():
    x, y = torch.randn(64, 3).double(), torch.arange(64) % 2
    settings = {"epochs": 2, "batch_size": 16, "schedule": "constant", "progress": "none"}
    for lr in (0.1, 0.01):
        bnn = _bnn()
        history = varlap.fit(bnn, varlap.VL(64), (x, y), optimizer="SGD", momentum=0.9, lr=lr, **settings)
        assert (history.epochs[-1]["lr"], history.epochs[-1]["lr_log_sigma"]) == (lr, 0.01)
        moved = max(float((log_sigma - start).abs().max()) for log_sigma, start in _log_sigmas(bnn))
        assert 0.05 < moved < 0.09  # eight steps of Adam, by at most 0.01 each


def _log_sigmas(bnn: varlap.BNN) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (value.detach(), start) for value, start in zip(bnn.log_sigma.values(), _bnn().log_sigma.values(), strict=True)
    ]


def test_fit_by_sgd_learns_as_it_comes():
    digits = varlap.data.load("digits")
    x, y = digits.train_images.flatten(1), digits.train_labels
    torch.manual_seed(0)
    bnn = varlap.BNN(varlap.models.mlp(64, 10))
    varlap.fit(bnn, varlap.VL(len(y), 0.01), (x, y), epochs=20, optimizer="SGD", progress="none")
    assert varlap.evaluate(bnn, (digits.test_images.flatten(1), digits.test_labels))["accuracy"] > 0.85


def test_mistakes_are_named():
    with pytest.raises(NetworkError, match=r"sgd needs a BNN, got Linear; wrap the network: varlap\.BNN\(network\)"):
        varlap.sgd(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"sgd\(momentum=1\) must be in \[0, 1\); 0\.9 is usual, 0 is plain SGD"):
        varlap.sgd(_bnn(), momentum=1)
    for mistake in ({"lr": 0}, {"lr": float("inf")}, {"log_sigma_lr": -1}, {"log_sigma_lr": float("nan")}):
        ((name, value),) = mistake.items()
        with pytest.raises(ConfigError, match=rf"sgd\({name}={value}\) must be positive and finite"):
            varlap.sgd(_bnn(), **mistake)
    with pytest.raises(ConfigError, match=r"sgd\(momentum='a'\) must be in \[0, 1\)"):
        varlap.sgd(_bnn(), momentum="a")  # type: ignore[arg-type]


def test_a_second_weight_decay_is_refused():
    message = r"adam\(weight_decay=0\.1\): the prior is the weight decay, and a second one would count twice; .* beta"
    with pytest.raises(ConfigError, match=message):
        varlap.adam(_bnn(), weight_decay=0.1)
    assert varlap.adam(_bnn(), weight_decay=0.0).param_groups[0]["weight_decay"] == 0
