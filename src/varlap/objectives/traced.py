"""An objective's value and gradients as one graph of primitive operations, which can be compiled."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from varlap import tree
from varlap.objectives.objective import Context, Evaluation, Objective, prepared
from varlap.posterior.batch import Batch
from varlap.posterior.bnn import BNN
from varlap.posterior.installed import installed
from varlap.streams import Draw, Streams, Tape

PURPOSES = {"labels": None, "weights": None, "probes": None, "subset": "cpu"}
Around = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Traced:
    """A graph of `Objective.value_and_gradients`, and what it must be called with.

    `graph(*inputs)` takes the tensors of `state`, batch, noise, β and `gradients`, in this order. It moves the buffers
    and running means among `state`, fills `gradients` and returns one tensor: log-likelihood, curvature, KL, and 1,
    or 0 where one of these or a gradient is NaN or infinite: then buffers and running means stay as they were.
    """

    graph: torch.fx.GraphModule
    state: dict[str, Tensor]
    gradients: dict[str, Tensor]
    draws: list[tuple[str, Draw]]

    def inputs(self, batch: Sequence[Tensor], noise: Sequence[Tensor], beta: Tensor) -> list[Tensor]:
        """Return all that the graph takes."""
        state, gradients = ([as_argument(t) for t in group.values()] for group in (self.state, self.gradients))
        return [*state, *batch, *noise, beta, *gradients]

    def noise(self, streams: Streams, device: torch.device) -> list[Tensor]:
        """Draw this step's numbers: the same that an eager evaluation would draw."""
        generators: dict[str, torch.Generator] = {}
        numbers = []
        for purpose, request in self.draws:
            if purpose not in generators:
                generators[purpose] = streams.generator(purpose, PURPOSES[purpose] or device)
            numbers.append(request.made_with(generators[purpose]).to(device))
        return numbers


def trace(objective: Objective, context: Context, *, around: Around = contextlib.nullcontext) -> Traced:
    """Trace the evaluation of a batch of this shape; `around` is entered with it (for autocast, say)."""
    bnn, batch = context.bnn, context.batch
    draws, sample = _rehearse(objective, context, around)
    weights_and_buffers = dict(bnn.named_parameters()) | dict(bnn.named_buffers())
    remembered = {f"{n}/{key}": t for n, r in objective.running_means().items() for key, t in r.sums.items()}
    state = weights_and_buffers | remembered
    movable = ("network.", "prior_scale.") if bnn.prior.learnt else ("network.",)
    buffers = [name for name, _ in bnn.named_buffers() if name.startswith(movable)]
    wanted = {f"network.{name}" for name in bnn.means()} | {n for n, t in state.items() if t.requires_grad}
    owner = _owners(bnn)
    asked = [name for name in sample.gradients if state[owner[name]].requires_grad]  # not those of frozen means
    gradients = {owner[name]: torch.zeros_like(state[owner[name]]) for name in asked}

    def evaluate(*inputs: Tensor) -> tuple[Tensor]:
        coming = iter(inputs)
        arguments = {name: next(coming) for name in state}
        given = {name: tensor.view(state[name].shape) for name, tensor in arguments.items()}
        given = {name: t.detach().requires_grad_() if name in wanted else t for name, t in given.items()}
        given |= {name: given[name].clone() for name in buffers}  # the network moves the copies
        x, y, weights = tree.map_tensors(lambda _: next(coming), (batch.x, batch.y, batch.weights))
        streams = replace(context.streams, tapes=_tapes(draws, coming))
        beta: Any = next(coming)
        with contextlib.ExitStack() as stack:
            stack.enter_context(installed(bnn, {name: given[name] for name in weights_and_buffers}))
            for name, running in objective.running_means().items():
                stack.enter_context(running.standing_in({key: given[f"{name}/{key}"] for key in running.sums}))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(around())
            traced_batch = Batch(x, y, weights, batch.size, trusted=True)
            evaluation = objective.value_and_gradients(Context(bnn, traced_batch, streams, beta, True))
            moved = {name: buffer for name, buffer in bnn.named_buffers() if name in buffers}
        moved |= _new_sums(objective, evaluation)
        summed: dict[str, Tensor] = {}
        for name in asked:
            gradient = evaluation.gradients[name]
            summed[owner[name]] = summed[owner[name]] + gradient if owner[name] in summed else gradient
        values = [evaluation.log_likelihood, evaluation.curvature, evaluation.kl]
        values = [value.detach().to(evaluation.kl.dtype) for value in values]
        totals = [gradient.detach().sum().to(evaluation.kl.dtype) for gradient in summed.values()]
        sound = torch.stack([*values, *totals]).isfinite().all()
        for name, new in moved.items():
            old = arguments[name]
            old.copy_(torch.where(sound, new.detach().view(old.shape).to(old.dtype), old))
        for gradient in summed.values():
            place = next(coming)
            place.copy_(gradient.view(place.shape))
        return (torch.stack([*values, sound.to(evaluation.kl.dtype)]),)

    noise = [request.made_with(torch.Generator(PURPOSES[p] or bnn.device)).to(bnn.device) for p, request in draws]
    traced = Traced(torch.fx.GraphModule({}, torch.fx.Graph()), state, gradients, draws)
    tensors = list(tree.tensors((batch.x, batch.y, batch.weights)))
    inputs = traced.inputs(tensors, noise, beta_tensor(context.beta, bnn.device))
    return replace(traced, graph=make_fx(evaluate, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs))


def as_argument(tensor: Tensor) -> Tensor:
    """Return a view to hand to the graph: Inductor's CPU code loses what is written into zero-dimensional inputs."""
    return tensor.detach().view(1) if not tensor.ndim else tensor.detach()


def beta_tensor(beta: float, device: torch.device) -> Tensor:
    """Return β as an input of the graph: a change of it compiles nothing again."""
    return torch.tensor(beta, device=device, dtype=torch.float64)


def _new_sums(objective: Objective, evaluation: Evaluation) -> dict[str, Tensor]:
    names = {id(running): name for name, running in objective.running_means().items()}
    return {f"{names[id(r)]}/{key}": total for r, sums in evaluation.updates for key, total in sums.items()}


def _rehearse(objective: Objective, context: Context, around: Around) -> tuple[list[tuple[str, Draw]], Evaluation]:
    """Evaluate once, eagerly and leaving nothing behind, to learn what is drawn and which gradients there are."""
    bnn = context.bnn
    order: list[tuple[str, Draw]] = []
    tapes = {p: _Noting(p, order, context.streams.generator(p, d or bnn.device)) for p, d in PURPOSES.items()}
    with prepared(context), bnn.buffers_restored(), around():
        sample = objective.value_and_gradients(replace(context, streams=replace(context.streams, tapes=tapes)))
    return order, sample


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
