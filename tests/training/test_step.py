"""The traced step does what the eager one does, to rounding, for every network of the shared list."""

import gc
import weakref
from typing import Any

import pytest
import torch

import varlap
from cases import CASES, Case
from varlap import Fisher
from varlap.objectives import compiled, vl

CURVATURES = {
    "exact": Fisher(),
    "every": Fisher(every=2),
    "memory": Fisher(every=2, memory=0.8),
    "part": Fisher(every=2, memory=0.8, fraction=0.6, groups=2, batch_norm="part"),
    "quiet-gradient": Fisher(every=2, memory=0.8, fraction=0.6, batch_norm="part", gradient="quiet"),
    "whole-gradient": Fisher(every=2, memory=0.8, fraction=0.6, batch_norm="part", gradient="whole"),
}
OBJECTIVES: dict[str, Any] = {
    "map": lambda: varlap.MAP(100, 0.5),
    "vi": lambda: varlap.VI(100, 0.5, num_samples=2, antithetic=True),
    "vl-hessian": lambda: varlap.VLHessian(100, 0.5),
    "closed-form": lambda: varlap.VL(100, 0.5, curvature=Fisher(every=2), variances="closed-form", beta_warmup_steps=3),
    **{name: lambda c=c: varlap.VL(100, 0.5, curvature=c, beta_warmup_steps=2) for name, c in CURVATURES.items()},
}
FULLY_TRIED = ("mlp-gaussian", "batch-norm", "attention")
NOT_TRACEABLE = {"mlp-poisson"}  # torch.poisson takes a generator of its own


def _uncompiled(graph: Any, _inputs: Any) -> Any:
    """The graph itself, without Inductor's minutes."""
    return graph


def _train(case: Case, objective: Any, *, compile_it: bool, steps: int = 3) -> tuple[list[torch.Tensor], bool]:
    bnn, x, y = case.make()
    step = varlap.TrainingStep(bnn, objective, varlap.adam(bnn, 1e-2), compiled=compile_it)
    values = [step(x, y, number=number).clone() for number in range(steps)]
    return [*bnn.state_dict().values(), *values], step._compiled


EVERYWHERE = ("vi", "exact", "part")
PAIRS = [(case, name) for case in CASES for name in OBJECTIVES if name in EVERYWHERE or case.name in FULLY_TRIED]


@pytest.mark.parametrize(("case", "name"), PAIRS, ids=lambda value: getattr(value, "name", value))
def test_traced_step_equals_the_eager_one(case: Case, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "compile_graph", _uncompiled)
    eager, _ = _train(case, OBJECTIVES[name](), compile_it=False)
    traced, was_traced = _train(case, OBJECTIVES[name](), compile_it=True)
    sampled_labels = name not in ("map", "vi", "vl-hessian", "whole-gradient")
    assert was_traced == (case.name not in NOT_TRACEABLE or not sampled_labels)
    for one, other in zip(eager, traced, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_a_smaller_last_batch_takes_the_same_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "compile_graph", _uncompiled)
    results = []
    for compile_it in (False, True):
        bnn, x, y = CASES[0].make()
        step = varlap.TrainingStep(bnn, varlap.VL(100), varlap.adam(bnn, 1e-2), compiled=compile_it)
        for number, size in enumerate((5, 5, 3, 5)):
            step(x[:size], y[:size], number=number)
        results.append(bnn.state_dict())
    for one, other in zip(results[0].values(), results[1].values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_what_cannot_be_traced_runs_eagerly_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture):
    class Looks(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if bool(x.sum() > 0) else super().forward(-x)

    bnn = varlap.BNN(Looks(4, 3))
    step = varlap.TrainingStep(bnn, varlap.VL(100), varlap.adam(bnn), compiled=True)
    for number in range(3):
        step(torch.randn(5, 4), torch.arange(5) % 3, number=number)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("varlap")]
    assert len(said) == 1
    assert "runs eagerly, since it cannot be compiled" in said[0]


def test_a_change_of_beta_seed_or_learning_rate_traces_nothing_again(monkeypatch: pytest.MonkeyPatch):
    graphs: list[Any] = []
    monkeypatch.setattr(compiled, "compile_graph", lambda *args: graphs.append(args) or _uncompiled(*args))
    bnn, x, y = CASES[0].make()
    objective = varlap.VL(100, 0.5, curvature=Fisher(every=2, memory=0.5))
    optimizer = varlap.adam(bnn, 1e-2)
    step = varlap.TrainingStep(bnn, objective, optimizer, compiled=True)
    for number in range(4):
        step(x, y, number=number)
    num_graphs = len(graphs)
    assert num_graphs == 4  # two evaluations, a renewal, and the writing of its result
    objective.beta, objective.seed = 0.1, 5
    optimizer.param_groups[0]["lr"] = 1e-3
    for number in range(4, 8):
        step(x, y, number=number)
    assert len(graphs) == num_graphs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch-norm", "mlp-gaussian", "empirical-bayes"])  # two with zero-dimensional state
def test_compiled_step_equals_the_eager_one_on_this_machine(name: str):
    case = next(case for case in CASES if case.name == name)
    make = OBJECTIVES["memory"]
    eager, _ = _train(case, make(), compile_it=False, steps=4)
    inductor, was_compiled = _train(case, make(), compile_it=True, steps=4)
    assert was_compiled
    for one, other in zip(eager, inductor, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["memory", "closed-form"])
def test_replayed_cuda_graph_equals_the_eager_step(name: str):
    results = []
    for compile_it in (False, True):
        case = next(case for case in CASES if case.name == "batch-norm")
        bnn, x, y = case.make()
        bnn.cuda()
        # A captured step keeps its learning rates in single precision, so they are powers of two here.
        optimizer = varlap.adam(bnn, 2**-7, log_sigma_lr_multiplier=8, capturable=True, fused=True)
        step = varlap.TrainingStep(bnn, OBJECTIVES[name](), optimizer, compiled=compile_it)
        values = [step(x.cuda(), y.cuda(), number=number).clone() for number in range(7)]
        assert step._compiled == compile_it
        results.append([*bnn.state_dict().values(), *values])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-8)


def test_frozen_means_stay_where_they_are_in_a_traced_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "compile_graph", _uncompiled)
    bnn, x, y = CASES[0].make()
    bnn.network[0].weight.requires_grad_(False)
    before = bnn.network[0].weight.clone()
    step = varlap.TrainingStep(bnn, varlap.VL(100), torch.optim.SGD(bnn.parameters(), 0.1), compiled=True)
    with pytest.warns(varlap.errors.VarlapWarning, match="SGD trains log σ and the means at one learning rate"):
        step(x, y, number=0)
    assert torch.equal(bnn.network[0].weight, before)
    assert step._compiled


def test_a_buffer_that_the_network_replaces_moves_in_a_traced_step(monkeypatch: pytest.MonkeyPatch):
    class Counts(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return super().forward(x)

    monkeypatch.setattr(compiled, "compile_graph", _uncompiled)
    bnn = varlap.BNN(Counts()).train()
    step = varlap.TrainingStep(bnn, varlap.VL(100), varlap.adam(bnn), compiled=True)
    for number in range(3):
        step(torch.randn(5, 4), torch.arange(5) % 3, number=number)
    assert bnn.network.count == 3
    assert step._compiled


def test_a_renewal_that_is_not_finite_is_not_remembered(monkeypatch: pytest.MonkeyPatch):
    """A traced step whose loss and gradients are sound, but whose new curvature is NaN, changes nothing."""
    renewed = vl.renewed

    def poisoned(context: Any, *args: Any) -> Any:
        diagonal, updates = renewed(context, *args)
        factor = torch.where(context.batch.x.abs().sum() == 0, torch.nan, 1.0)
        return diagonal, [(running, {n: t * factor for n, t in sums.items()}) for running, sums in updates]

    monkeypatch.setattr(compiled, "compile_graph", _uncompiled)
    monkeypatch.setattr(vl, "renewed", poisoned)
    bnn, x, y = CASES[0].make()
    objective = varlap.VL(100, curvature=Fisher(every=2, memory=0.5))
    step = varlap.TrainingStep(bnn, objective, varlap.adam(bnn, fused=True), compiled=True)
    for number in range(4):
        assert step.take(x, y, number=number)[3] == 1
    before = [t.clone() for t in (*bnn.state_dict().values(), *objective.running_means()["fisher"].sums.values())]
    assert step.take(torch.zeros_like(x), y, number=4)[3] == 0
    after = [*bnn.state_dict().values(), *objective.running_means()["fisher"].sums.values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert step.take(x, y, number=5)[3] == 1
    with pytest.raises(varlap.errors.NonFiniteError, match="step 4: the loss or a gradient holds NaN or Inf"):
        step.check()


@pytest.mark.parametrize("unsound", [False, True])
def test_closed_form_variances_stay_where_a_traced_step_is_not_sound(unsound: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "compile_graph", _uncompiled)
    bnn, x, y = CASES[0].make()
    objective = varlap.VL(100, curvature=Fisher(), variances="closed-form", beta_warmup_steps=20)
    step = varlap.TrainingStep(bnn, objective, varlap.adam(bnn, fused=True), compiled=True, on_nonfinite="skip")
    for number in range(4):
        step(x, y, number=number)
    before = bnn.log_sigma["0.weight"].clone()
    step(x * float("nan") if unsound else x, y, number=4)
    assert torch.equal(bnn.log_sigma["0.weight"], before) == unsound


def test_an_unsound_step_is_skipped_by_any_optimizer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "compile_graph", _uncompiled)
    bnn, x, y = CASES[0].make()
    step = varlap.TrainingStep(bnn, varlap.VL(100), varlap.adam(bnn), compiled=True, on_nonfinite="skip")
    for number in range(6):
        step(x, y, number=number)
    before = [tensor.clone() for tensor in bnn.state_dict().values()]
    assert step.take(x * float("nan"), y, number=6)[3] == 0
    assert all(map(torch.equal, before, bnn.state_dict().values()))
    step.check()


def test_an_unknown_precision_is_refused():
    bnn, _, _ = CASES[0].make()
    with pytest.raises(varlap.errors.ConfigError, match="precision='fp8': choose 'fp32', 'bf16' or 'fp16'"):
        varlap.TrainingStep(bnn, varlap.VL(100), varlap.adam(bnn), precision="fp8")  # type: ignore[arg-type]


def test_a_compiled_step_frees_its_network_without_waiting_for_the_collector(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "compile_graph", lambda graph, _: graph)
    torch.optim.Adam(torch.nn.Linear(1, 1).parameters())  # torch's first one is held by its own imports

    def weights_of_a_finished_run() -> weakref.ref[torch.Tensor]:
        bnn = varlap.BNN(torch.nn.Linear(2, 3))
        step = varlap.TrainingStep(bnn, varlap.VL(num_data=100), varlap.adam(bnn), compiled=True)
        for number in range(5):
            step(torch.ones(4, 2), torch.tensor([0, 1, 2, 0]), number=number)
        return weakref.ref(bnn.network.weight)

    gc.collect()
    gc.disable()
    try:
        assert weights_of_a_finished_run()() is None
    finally:
        gc.enable()


def test_an_objective_of_ones_own_sets_variances_in_compiled_steps_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "compile_graph", _uncompiled)
    calls = []

    class Own(varlap.VL):
        def update_variances(self, bnn: varlap.BNN, **options: Any) -> None:
            calls.append(options)

    case = next(case for case in CASES if case.name == "batch-norm")
    bnn, x, y = case.make()
    step = varlap.TrainingStep(bnn, Own(100, 0.5, curvature=Fisher()), varlap.adam(bnn, 1e-2), compiled=True)
    for number in range(3):
        step(x, y, number=number)
    assert len(calls) == 3


@pytest.mark.parametrize(
    "options", [{"prior": varlap.EmpiricalBayesPrior()}, {"variances": "one"}], ids=["prior", "one"]
)
def test_traced_closed_form_variances_follow_learnt_scales_and_shared_variances(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compiled, "compile_graph", _uncompiled)
    states = []
    for compile_it in (False, True):
        bnn, x, y = CASES[0].make(**options)
        before = {name: value.clone() for name, value in bnn.state_dict().items()}
        step = varlap.TrainingStep(bnn, OBJECTIVES["closed-form"](), varlap.adam(bnn, 1e-2), compiled=compile_it)
        for number in range(5):
            step(x, y, number=number)
        states.append(bnn.state_dict())
        moved = {name.split(".")[0] for name, value in bnn.state_dict().items() if not torch.equal(value, before[name])}
        assert moved >= {"network", "log_sigma"} | ({"prior_scale"} if "prior" in options else set())
    for one, other in zip(states[0].values(), states[1].values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
