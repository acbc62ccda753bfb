"""The user's own loop takes the compiled path where it is sure to be the same, and gives the same results there."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import varlap
from cases import CASES, Case
from varlap import Fisher
from varlap.objectives import automatic, compiled, traced

CURVATURES = [Fisher(), Fisher(every=2, memory=0.8, fraction=0.6, batch_norm="part")]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Take the traced graph for the compiled one, and list the evaluations that are compiled."""
    seen: list[Any] = []

    def trace(*args: Any, **options: Any) -> Any:
        seen.append(args)
        return traced.trace(*args, **options)

    monkeypatch.setattr(compiled, "trace", trace)
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, _: graph)
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
    layers = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Softplus(), nn.Dropout(0.2), nn.Linear(8, 3)
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


class Odd(nn.Module):
    """A network that reads attributes of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.drop, self.last = (
            nn.Linear(4, 8, bias=False),
            nn.Tanh(),
            nn.Dropout(0.2),
            nn.Linear(8, 3),
        )
        self.norm = nn.BatchNorm1d(8)
        self.factors, self.options, self.function = (1.0, 2.0), {"shift": 0.5}, torch.sin
        self.constant = torch.ones(3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.act(self.norm(self.first(x * self.factors[0]))))
        return self.function(self.last(hidden) + self.options["shift"]) * self.factors[1] + self.constant


def _prior(bnn: Any) -> None:
    bnn.prior = varlap.EmpiricalBayesPrior()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda bnn: setattr(bnn.network.drop, "p", 0.5),
    "mode": lambda bnn: bnn.eval(),
    "frozen": lambda bnn: bnn.network.first.weight.requires_grad_(False),
    "another tensor": lambda bnn: setattr(
        bnn.network.first, "weight", nn.Parameter(bnn.network.first.weight.detach() + 1)
    ),
    "another module": lambda bnn: setattr(bnn.network, "act", nn.Sigmoid()),
    "a tuple": lambda bnn: setattr(bnn.network, "factors", (1.0, 3.0)),
    "a dict": lambda bnn: bnn.network.options.update(shift=1.5),
    "a function": lambda bnn: setattr(bnn.network, "function", torch.cos),
    "a plain tensor": lambda bnn: setattr(bnn.network, "constant", torch.arange(3.0).double()),
    "the prior": _prior,
    "another log σ": lambda bnn: setattr(
        bnn.log_sigma.first, "weight", nn.Parameter(bnn.log_sigma["first.weight"].detach() + 1)
    ),
    "another s": lambda bnn: setattr(bnn.prior_scale.first, "weight", 2 * bnn.prior_scale["first.weight"]),
    "a patched forward": lambda bnn: setattr(bnn.network.act, "forward", torch.sigmoid),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_network_is_noticed(change: Callable[[Any], Any], graphs: list[Any]):
    torch.manual_seed(0)
    bnn, objective = varlap.BNN(Odd().double()).train(), varlap.VL(100, curvature=Fisher())
    objective.compiled = True
    before = objective(bnn, *_batch(), step=1)
    assert len(graphs) == 1
    change(bnn)
    with bnn.buffers_restored():
        changed = objective(bnn, *_batch(), step=1)
    assert changed.elbo != before.elbo or not bnn.network.first.weight.requires_grad
    with objective.eagerly(), bnn.buffers_restored():
        torch.testing.assert_close(changed.elbo, objective(bnn, *_batch(), step=1).elbo, rtol=0, atol=1e-10)


def test_a_network_that_draws_numbers_is_not_compiled_on_the_cpu(caplog: pytest.LogCaptureFixture):
    values = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        bnn = varlap.BNN(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 3)).double())
        objective = varlap.VL(500, curvature=Fisher(groups=2))
        objective.compiled = compile_it
        values.append(objective(bnn, *_batch(), step=0).loss)
    assert "evaluations stay eager, since they cannot be compiled: the network draws numbers" in caplog.text
    assert torch.equal(*values)


def test_what_is_no_tensor_in_a_batch_is_noticed(graphs: list[Any]):
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            return super().forward(x * scale)

    bnn, objective = varlap.BNN(Scaled(4, 3).double()), varlap.VL(100, curvature=Fisher())
    objective.compiled = True
    x, y = _batch()
    for scale in (1.0, 5.0):
        compiled_terms = objective(bnn, {"x": x, "scale": scale}, y, step=0)
        with objective.eagerly():
            eager_terms = objective(bnn, {"x": x, "scale": scale}, y, step=0)
        torch.testing.assert_close(compiled_terms.elbo, eager_terms.elbo, rtol=0, atol=1e-10)
    assert len(graphs) == 2


def test_a_copied_objective_compiles_for_its_own_network(graphs: list[Any]):
    bnn, objective = varlap.BNN(_network()), varlap.VL(100, curvature=Fisher())
    objective.compiled = True
    objective(bnn, *_batch(), step=0)
    copied_bnn, copied = copy.deepcopy((bnn, objective))
    with torch.no_grad():
        copied_bnn.network[0].weight.add_(1)
    terms = copied(copied_bnn, *_batch(), step=0)
    with copied.eagerly(), copied_bnn.buffers_restored():
        torch.testing.assert_close(terms.elbo, copied(copied_bnn, *_batch(), step=0).elbo, rtol=0, atol=1e-10)


def test_targets_are_checked_in_compiled_calls_too(graphs: list[Any]):
    bnn, objective = varlap.BNN(_network()), varlap.VL(100, curvature=Fisher())
    objective.compiled = True
    x, y = _batch()
    objective(bnn, x, y)
    y[3] = 9
    with pytest.raises(varlap.errors.BatchError, match="label 9 is out of range"):
        objective(bnn, x, y)
    assert len(graphs) == 1


def test_nothing_is_compiled_before_there_is_something_to_remember(graphs: list[Any]):
    bnn, objective = varlap.BNN(_network()), varlap.VL(100, curvature=Fisher(memory=0.5))
    objective.compiled = True
    objective(bnn, *_batch(), step=0)
    assert not graphs
    objective(bnn, *_batch(), step=1)
    assert len(graphs) == 1


def test_a_change_of_the_objective_or_the_likelihood_is_compiled_again(graphs: list[Any]):
    class Tempered(varlap.Categorical):
        temperature = 1.0

        def log_prob(self, outputs: Any, targets: Any) -> torch.Tensor:
            return super().log_prob(outputs / self.temperature, targets)

    bnn, objective = varlap.BNN(_network(), Tempered()), varlap.VL(100, curvature=Fisher())
    objective.compiled = True
    objective(bnn, *_batch(), step=0)
    for holder, name, value in ((objective, "num_data", 50), (bnn.likelihood, "temperature", 3.0)):
        setattr(holder, name, value)
        changed = objective(bnn, *_batch(), step=1)
        with objective.eagerly():
            torch.testing.assert_close(changed.elbo, objective(bnn, *_batch(), step=1).elbo, rtol=0, atol=1e-10)
    objective.beta, objective.seed = 0.3, 7
    objective(bnn, *_batch(), step=2)
    assert len(graphs) == 3


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


def test_a_compiled_call_whose_new_curvature_alone_overflows_is_refused_as_an_eager_one_is(graphs: list[Any]):
    """It serves in later steps only, so that values and gradients of this one are finite."""
    network = nn.Linear(2, 3)
    torch.nn.init.zeros_(network.weight)
    bnn, objective = varlap.BNN(network), varlap.VL(100, curvature=Fisher(memory=0.9))
    x, y = torch.ones(8, 2), torch.arange(8) % 3
    objective.compiled = True
    for step in range(3):
        objective(bnn, x, y, step=step)
    memory = objective.state_dict()["fisher"]
    x[:, 0] = 3e20  # whose square is not a number of single precision
    with pytest.raises(varlap.errors.NonFiniteError, match="step 3: the new curvature holds NaN or Inf"):
        objective(bnn, x, y, step=3)
    assert graphs
    for name, total in objective.state_dict()["fisher"].items():
        torch.testing.assert_close(total, memory[name], rtol=0, atol=0)


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


def test_other_numbers_give_the_same_graph_which_is_then_found_on_disk(monkeypatch: pytest.MonkeyPatch):
    codes: list[str] = []

    def compile_graph(graph: Any, _: Any) -> Any:
        codes.append(graph.code)
        return graph

    monkeypatch.setattr(compiled, "compile_graph", compile_graph)
    for num_data, beta, seed in [(100, 0.5, 0), (300, 0.1, 7)]:
        objective = varlap.VL(num_data, beta, seed=seed, curvature=Fisher())
        objective.compiled = True
        _loop(varlap.BNN(_network()), objective, *_batch(), steps=1)
    evaluations, commits = codes[::2], codes[1::2]
    assert evaluations[0] == evaluations[1]
    assert commits[0] == commits[1]


def test_compiling_leaves_the_global_generator_alone_where_the_network_draws_in_evaluation_mode(graphs: list[Any]):
    class DrawsAlways(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input + torch.randn_like(input))

    x, y = _batch()
    bnn, objective = varlap.BNN(DrawsAlways(4, 3).double()), varlap.VL(100)
    objective.compiled = True
    state = torch.get_rng_state()
    for _ in range(2):  # the first call is eager, to learn what is remembered
        objective(bnn, x, y)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(graphs) == 1
