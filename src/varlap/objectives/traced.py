"""An objective's value and gradients as one graph of primitive operations, which can be compiled."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from varlap import tree
from varlap.objectives.objective import Context, Objective, prepared
from varlap.objectives.running import Updates
from varlap.posterior.batch import Batch
from varlap.posterior.bnn import BNN
from varlap.posterior.installed import installed
from varlap.streams import Draw, Streams, Tape, sent

PURPOSES = {"labels": None, "weights": None, "probes": None, "subset": "cpu"}
Result = TypeVar("Result")
Around = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Traced:
    """A graph of one evaluation, and what it must be called with.

    `graph(*inputs)` takes the tensors of `state`, batch, noise, β and N, and `gradients`, in this order. It fills
    `gradients` and returns `values` (log-likelihood, curvature and KL in one tensor; none for a renewal) and then the
    new value of each tensor of `moved`: buffers and running means, which it leaves as they are.
    """

    graph: torch.fx.GraphModule
    state: dict[str, Tensor]
    gradients: dict[str, Tensor]
    moved: list[str]
    draws: list[tuple[str, Draw]]

    def inputs(self, batch: Sequence[Tensor], noise: Sequence[Tensor], settings: Sequence[Tensor]) -> list[Tensor]:
        """Return all that the graph takes."""
        state, gradients = ([as_argument(t) for t in group.values()] for group in (self.state, self.gradients))
        return [*state, *batch, *noise, *settings, *gradients]

    def noise(self, streams: Streams, device: torch.device) -> list[Tensor]:
        """Draw this step's numbers: the same that an eager evaluation would draw."""
        generators: dict[str, torch.Generator] = {}
        numbers = []
        for purpose, request in self.draws:
            if purpose not in generators:
                generators[purpose] = streams.generator(purpose, PURPOSES[purpose] or device)
            numbers.append(sent(request.made_with(generators[purpose]), device))
        return numbers


def trace(objective: Objective, context: Context, *, around: Around = contextlib.nullcontext) -> Traced:
    """Trace value and gradients for a batch of this shape; `around` is entered with it (for autocast, say)."""
    bnn = context.bnn
    evaluate_fn = objective.value_and_gradients
    draws, sample = _rehearsed(evaluate_fn, replace(context, renews=False), around)
    state = _state(objective, bnn)
    movable = ("network.", "prior_scale.") if bnn.prior.learnt else ("network.",)
    buffers = [name for name, _ in bnn.named_buffers() if name.startswith(movable)]
    owner = _owners(bnn)
    asked = [name for name in sample.gradients if state[owner[name]].requires_grad]  # not those of frozen means
    gradients = {owner[name]: torch.zeros_like(state[owner[name]]) for name in asked}

    def compute(traced_context: Context, places: Iterator[Tensor]) -> tuple[Tensor, ...]:
        evaluation = evaluate_fn(replace(traced_context, renews=False))
        moved = dict(bnn.named_buffers()) | _new_sums(objective, evaluation.updates)
        summed: dict[str, Tensor] = {}
        for name in asked:
            gradient = evaluation.gradients[name]
            summed[owner[name]] = summed[owner[name]] + gradient if owner[name] in summed else gradient
        for gradient in summed.values():
            place = next(places)
            place.copy_(gradient.view(place.shape))
        values = [evaluation.log_likelihood, evaluation.curvature, evaluation.kl]
        values = torch.stack([value.detach().to(evaluation.kl.dtype) for value in values])
        return values, *(moved[name].detach() for name in result.moved)

    moved = [*buffers, *_new_sums(objective, sample.updates)]
    result = Traced(torch.fx.GraphModule({}, torch.fx.Graph()), state, gradients, moved, draws)
    return _traced(result, objective, context, around, compute)


def trace_renewal(objective: Objective, context: Context, *, around: Around = contextlib.nullcontext) -> Traced:
    """Trace `objective.renewal` for a batch of this shape."""
    draws, updates = _rehearsed(objective.renewal, context, around)
    moved = list(_new_sums(objective, updates))

    def compute(traced_context: Context, _: Iterator[Tensor]) -> tuple[Tensor, ...]:
        new = _new_sums(objective, objective.renewal(traced_context))
        return tuple(new[name].detach() for name in moved)

    empty = torch.fx.GraphModule({}, torch.fx.Graph())
    result = Traced(empty, _state(objective, context.bnn), {}, moved, draws)
    return _traced(result, objective, context, around, compute)


def _traced(
    traced: Traced,
    objective: Objective,
    context: Context,
    around: Around,
    compute: Callable[[Context, Iterator[Tensor]], tuple[Tensor, ...]],
) -> Traced:
    """Trace a computation with weights, buffers, memories, batch and noise as its inputs."""
    bnn, batch, state = context.bnn, context.batch, traced.state
    wanted = {f"network.{name}" for name in bnn.means()} | {n for n, t in state.items() if t.requires_grad}

    def computed(*inputs: Tensor) -> tuple[Tensor, ...]:
        coming = iter(inputs)
        given = {name: next(coming).view(tensor.shape) for name, tensor in state.items()}
        given = {name: t.detach().requires_grad_() if name in wanted else t for name, t in given.items()}
        given |= {name: given[name].clone() for name, _ in bnn.named_buffers()}  # the network moves the copies
        x, y, weights = tree.map_tensors(lambda _: next(coming), (batch.x, batch.y, batch.weights))
        streams = replace(context.streams, tapes=_tapes(traced.draws, coming))
        beta: Any = next(coming)
        num_data: Any = next(coming)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_standing_in(objective, bnn, given))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(around())
            traced_batch = Batch(x, y, weights, batch.size, trusted=True)
            return compute(Context(bnn, traced_batch, streams, beta, num_data, True), coming)

    noise = [d.made_with(torch.Generator(PURPOSES[p] or bnn.device)).to(bnn.device) for p, d in traced.draws]
    tensors = list(tree.tensors((batch.x, batch.y, batch.weights)))
    inputs = traced.inputs(tensors, noise, settings_of(context))
    return replace(traced, graph=make_fx(computed, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs))


def trace_commit(olds: Sequence[Tensor], news: Sequence[Tensor], unsound: Tensor) -> torch.fx.GraphModule:
    """Trace a graph of (unsound, old, ..., new, ...) that makes new values the present ones unless `unsound` is 1."""

    def commit(unsound: Tensor, *tensors: Tensor) -> tuple[()]:
        half = len(tensors) // 2
        for old, new in zip(tensors[:half], tensors[half:], strict=True):
            old.copy_(torch.where(unsound == 0, new.view(old.shape).to(old.dtype), old))
        return ()

    return make_fx(commit, tracing_mode="fake")(unsound, *map(as_argument, olds), *news)


def trace_variances(objective: Objective, bnn: BNN, unsound: Tensor, beta: Tensor) -> tuple[Any, list[Tensor]]:
    """Trace `objective.update_variances`, unless `unsound` is 1; return the graph and all that it takes."""
    state = _state(objective, bnn)
    moved = [name for name in state if name.startswith(("log_sigma.", "prior_scale."))]

    def settle(unsound: Tensor, beta: Tensor, *tensors: Tensor) -> tuple[()]:
        olds = dict(zip(state, tensors, strict=True))
        news = {name: old.view(state[name].shape).clone() for name, old in olds.items()}
        with _standing_in(objective, bnn, news):
            objective.update_variances(bnn, beta=beta)
        for name in moved:
            olds[name].copy_(torch.where(unsound == 0, news[name].view(olds[name].shape), olds[name]))
        return ()

    inputs = [unsound, beta, *map(as_argument, state.values())]
    return make_fx(settle, tracing_mode="fake")(*inputs), inputs


@contextlib.contextmanager
def _standing_in(objective: Objective, bnn: BNN, given: Mapping[str, Tensor]) -> Iterator[None]:
    """Put tensors in the place of weights, buffers and memories, by the names that `_state` has for them."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(installed(bnn, {name: tensor for name, tensor in given.items() if "/" not in name}))
        for name, running in objective.running_means().items():
            stack.enter_context(running.standing_in({key: given[f"{name}/{key}"] for key in running.sums}))
        yield


def as_argument(tensor: Tensor) -> Tensor:
    """Return a view to hand to the graph: Inductor's CPU code loses what is written into zero-dimensional inputs."""
    return tensor.detach().view(1) if not tensor.ndim else tensor.detach()


def settings_of(context: Context) -> list[Tensor]:
    """Return β and N as inputs of the graph: for other ones it is not compiled again, but found on disk."""
    numbers = (context.beta, context.num_data)
    return [torch.tensor(number, device=context.bnn.device, dtype=torch.float64) for number in numbers]


def _state(objective: Objective, bnn: BNN) -> dict[str, Tensor]:
    remembered = {f"{n}/{key}": t for n, r in objective.running_means().items() for key, t in r.sums.items()}
    return dict(bnn.named_parameters()) | dict(bnn.named_buffers()) | remembered


def _new_sums(objective: Objective, updates: Updates) -> dict[str, Tensor]:
    names = {id(running): name for name, running in objective.running_means().items()}
    return {f"{names[id(r)]}/{key}": total for r, sums in updates for key, total in sums.items()}


def _rehearsed(
    compute: Callable[[Context], Result], context: Context, around: Around
) -> tuple[list[tuple[str, Draw]], Result]:
    """Compute once, eagerly and leaving nothing behind, to learn what is drawn and what comes out."""
    bnn = context.bnn
    order: list[tuple[str, Draw]] = []
    tapes = {p: _Noting(p, order, context.streams.generator(p, d or bnn.device)) for p, d in PURPOSES.items()}
    with prepared(context), bnn.buffers_restored(), around():
        result = compute(replace(context, streams=replace(context.streams, tapes=tapes)))
    return order, result


class _Noting(Tape):
    """A tape that notes its draws in one list with the other purposes'."""

    def __init__(self, purpose: str, order: list[tuple[str, Draw]], source: torch.Generator) -> None:
        super().__init__(source)
        self._purpose, self._order = purpose, order

    def next(self, request: Draw) -> Tensor:
        self._order.append((self._purpose, request))
        return super().next(request)


def _tapes(draws: list[tuple[str, Draw]], coming: Iterator[Tensor]) -> dict[str, Tape]:
    numbers: dict[str, list[Tensor]] = {purpose: [] for purpose in PURPOSES}
    for purpose, _ in draws:
        numbers[purpose].append(next(coming))
    return {purpose: Tape(numbers=tensors) for purpose, tensors in numbers.items()}


def _owners(bnn: BNN) -> dict[str, str]:
    """Map each parameter's names to the one that torch lists it under: weights may share one log σ."""
    listed = {id(parameter): name for name, parameter in bnn.named_parameters()}
    return {name: listed[id(p)] for name, p in bnn.named_parameters(remove_duplicate=False)}
