"""The user's own loop takes the compiled path where it is sure to be the same, and gives the same results there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import varlap
from cases import CASES, Case
from varlap import Fisher
from varlap.objectives import automatic, compiled

CURVATURES = [Fisher(), Fisher(every=2, memory=0.8, fraction=0.6, batch_norm="part")]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Take the traced graph for the compiled one, and list what is compiled."""
    seen: list[Any] = []

    def compile_graph(graph: Any, _inputs: Any) -> Callable[..., Any]:
        seen.append(graph)
        return graph

    monkeypatch.setattr(compiled, "compile_graph", compile_graph)
    return seen


def _loop(bnn: varlap.BNN, objective: Any, x: Any, y: Any, steps: int = 4) -> list[torch.Tensor]:
    optimizer = varlap.adam(bnn, 1e-2)
    for _ in range(steps):
        terms = objective(bnn, x, y)
        terms.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*bnn.state_dict().values(), terms.elbo.detach(), terms.loss.detach()]


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Softplus(), nn.Dropout(0.2), nn.Linear(8, 3)
    return nn.Sequential(*layers).double().train()


def _batch(size: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 4, generator=generator, dtype=torch.float64), torch.arange(size) % 3


@pytest.mark.parametrize("curvature", CURVATURES, ids=["exact", "remembered"])
@pytest.mark.parametrize("case", [case for case in CASES if case.name != "mlp-poisson"], ids=lambda case: case.name)
def test_a_compiled_own_loop_equals_the_eager_one(case: Case, curvature: Fisher, graphs: list[Any]):
    results = []
    for compile_it in (False, True):
        bnn, x, y = case.make()
        objective = varlap.VL(100, 0.5, curvature=curvature)
        objective.compiled = compile_it
        results.append(_loop(bnn, objective, x, y))
    assert graphs
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_gradients_of_two_compiled_calls_add_up(graphs: list[Any]):
    results = []
    for compile_it in (False, True):
        bnn = varlap.BNN(_network())
        objective = varlap.VL(100, curvature=Fisher())
        objective.compiled = compile_it
        for micro_batch in range(2):
            objective(bnn, *_batch(), step=0, micro_batch=micro_batch).loss.backward()
        results.append([p.grad.clone() for p in bnn.parameters() if p.grad is not None])
    assert len(graphs) == 1
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "change",
    [
        lambda bnn: setattr(bnn.network[3], "p", 0.5),
        lambda bnn: bnn.eval(),
        lambda bnn: bnn.network[0].weight.requires_grad_(False),
        lambda bnn: setattr(bnn.network[0], "weight", nn.Parameter(bnn.network[0].weight.detach() + 1)),
    ],
    ids=["dropout", "mode", "frozen", "another tensor"],
)
def test_a_change_of_the_network_is_compiled_again(change: Callable[[Any], Any], graphs: list[Any]):
    bnn, objective = varlap.BNN(_network()), varlap.VL(100, curvature=Fisher())
    objective.compiled = True
    objective(bnn, *_batch(), step=0)
    change(bnn)
    changed = objective(bnn, *_batch(), step=1)
    assert len(graphs) == 2
    with objective.eagerly(), bnn.buffers_restored():
        torch.testing.assert_close(changed.elbo, objective(bnn, *_batch(), step=1).elbo, rtol=0, atol=1e-10)


def test_a_network_with_hooks_stays_eager(graphs: list[Any]):
    bnn, objective = varlap.BNN(_network()), varlap.VL(100)
    objective.compiled = True
    calls = []
    bnn.network[0].register_forward_hook(lambda *_: calls.append(1))
    for _ in range(3):
        objective(bnn, *_batch())
    assert not graphs
    assert len(calls) >= 3


def test_inputs_that_want_a_gradient_stay_eager(graphs: list[Any]):
    bnn, objective = varlap.BNN(_network()), varlap.VL(100)
    objective.compiled = True
    x, y = _batch()
    objective(bnn, x.requires_grad_(), y).loss.backward()
    assert not graphs
    assert x.grad is not None


def test_a_network_that_counts_its_calls_stays_eager(graphs: list[Any], monkeypatch: pytest.MonkeyPatch):
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return super().forward(x)

    bnn, objective = varlap.BNN(Counts(4, 3).double()), varlap.VL(100)
    objective._automatic = automatic.Automatic(calls_before=2)
    objective.compiled = True
    for _ in range(20):
        objective(bnn, *_batch())
    assert not graphs
    assert bnn.network.calls >= 20


def test_only_many_calls_of_one_kind_are_compiled(graphs: list[Any]):
    bnn, objective = varlap.BNN(_network()), varlap.VL(100, curvature=Fisher())
    objective._automatic = automatic.Automatic(calls_before=3)
    objective.compiled = True
    for _ in range(3):
        objective(bnn, *_batch())
    objective(bnn, *_batch(7))
    assert not graphs
    objective(bnn, *_batch())
    assert len(graphs) == 1


def test_on_the_cpu_calls_stay_eager_by_default(graphs: list[Any]):
    bnn, objective = varlap.BNN(_network()), varlap.VL(100, curvature=Fisher())
    for _ in range(automatic.CALLS_BEFORE_COMPILING + 2):
        objective(bnn, *_batch())
    assert not graphs


def test_a_compiled_call_that_is_not_finite_changes_nothing_and_names_the_gradient(graphs: list[Any]):
    bnn, objective = varlap.BNN(_network()), varlap.VL(100, curvature=Fisher(every=2, memory=0.5))
    objective.compiled = True
    objective(bnn, *_batch(), step=0)
    with torch.no_grad():
        bnn.network[4].weight[0, 0] = float("inf")
    kept = {name: buffer.clone() for name, buffer in bnn.named_buffers()}
    memory = objective.state_dict()
    with pytest.raises(varlap.errors.NonFiniteError, match="step 2: the log-likelihood holds NaN; nothing was changed"):
        objective(bnn, *_batch(), step=2)
    assert len(graphs) == 1
    for name, buffer in bnn.named_buffers():
        torch.testing.assert_close(buffer, kept[name], rtol=0, atol=0)
    for name, total in objective.state_dict()["fisher"].items():
        torch.testing.assert_close(total, memory["fisher"][name], rtol=0, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_own_loop_on_cuda_compiles_itself_and_equals_the_eager_one(caplog: pytest.LogCaptureFixture):
    results = []
    for compile_it in (False, "auto"):
        case = next(case for case in CASES if case.name == "batch-norm")
        bnn, x, y = case.make()
        bnn.cuda()
        objective = varlap.VL(100, 0.5, curvature=Fisher())
        objective.compiled = compile_it
        results.append(_loop(bnn, objective, x.cuda(), y.cuda(), steps=automatic.CALLS_BEFORE_COMPILING + 4))
    assert objective._automatic is not None
    assert len(objective._automatic._graphs) == 1
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-8)
