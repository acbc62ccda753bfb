"""An objective's value and gradients as one graph of primitive operations, which can be compiled."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from varlap.objectives.objective import Context, Evaluation, Objective, prepared
from varlap.objectives.running import write, zero_sums
from varlap.posterior.batch import Batch
from varlap.posterior.bnn import BNN
from varlap.posterior.installed import installed
from varlap.streams import Draw, Streams, Tape

PURPOSES = {"labels": None, "weights": None, "probes": None, "subset": "cpu"}


@dataclass(frozen=True)
class Traced:
    """A graph of `Objective.value_and_gradients`, and what it must be called with.

    `graph(state, x, y, weights, noise, beta, gradients)` moves the buffers among `state`, fills `gradients` and
    returns the stacked log-likelihood, curvature and KL.
    """

    graph: torch.fx.GraphModule
    state: dict[str, Tensor]
    gradients: dict[str, Tensor]
    draws: list[tuple[str, Draw]]

    def noise(self, streams: Streams, device: torch.device) -> list[Tensor]:
        """Draw this step's numbers: the same that an eager evaluation would draw."""
        generators: dict[str, torch.Generator] = {}
        numbers = []
        for purpose, request in self.draws:
            if purpose not in generators:
                generators[purpose] = streams.generator(purpose, PURPOSES[purpose] or device)
            numbers.append(request.made_with(generators[purpose]).to(device))
        return numbers


def trace(objective: Objective, context: Context, *, around: Callable[[], Any] = contextlib.nullcontext) -> Traced:
    """Trace the evaluation of a batch of this shape; `around` is entered with it (for autocast, say)."""
    bnn, size = context.bnn, context.batch.size
    draws, sample = _rehearse(objective, context, around)
    weights_and_buffers = dict(bnn.named_parameters()) | dict(bnn.named_buffers())
    for running, sums in sample.updates:
        if not running:
            running.sums = zero_sums(sums)
    remembered = {f"{n}/{key}": t for n, r in objective.running_means().items() for key, t in r.sums.items()}
    state = weights_and_buffers | remembered
    wanted = {f"network.{name}" for name in bnn.means()} | {n for n, t in state.items() if t.requires_grad}
    owner = _owners(bnn)
    asked = [name for name in sample.gradients if state[owner[name]].requires_grad]  # not those of frozen means
    gradients = {owner[name]: torch.zeros_like(state[owner[name]]) for name in asked}

    def evaluate(tensors: list[Tensor], x: Any, y: Any, weights: Any, noise: Any, beta: Any, into: Any) -> Tensor:
        given = {name: tensor.view(state[name].shape) for name, tensor in zip(state, tensors, strict=True)}
        given = {name: t.detach().requires_grad_() if name in wanted else t for name, t in given.items()}
        streams = replace(context.streams, tapes=_tapes(draws, noise))
        with contextlib.ExitStack() as stack:
            stack.enter_context(installed(bnn, {name: given[name] for name in weights_and_buffers}))
            for name, running in objective.running_means().items():
                stack.enter_context(running.standing_in({key: given[f"{name}/{key}"] for key in running.sums}))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(around())
            batch = Batch(x, y, weights, size, trusted=True)
            evaluation = objective.value_and_gradients(Context(bnn, batch, streams, beta, True))
            write(evaluation.updates)
            for name, buffer in bnn.named_buffers():
                if buffer is not given[name]:  # the network put another tensor in its place
                    given[name].copy_(buffer.detach())
        sums: dict[str, Tensor] = {}
        for name in asked:
            gradient = evaluation.gradients[name]
            sums[owner[name]] = sums[owner[name]] + gradient if owner[name] in sums else gradient
        for place, gradient in zip(into, sums.values(), strict=True):
            place.view(gradient.shape).copy_(gradient)
        values = (evaluation.log_likelihood, evaluation.curvature, evaluation.kl)
        return torch.stack([value.detach().to(evaluation.kl.dtype) for value in values])

    noise = [request.made_with(torch.Generator(PURPOSES[p] or bnn.device)).to(bnn.device) for p, request in draws]
    beta = torch.tensor(context.beta, device=bnn.device, dtype=torch.float64)
    batch = context.batch
    tensors, places = ([as_argument(t) for t in group.values()] for group in (state, gradients))
    graph = make_fx(evaluate, tracing_mode="fake", _allow_non_fake_inputs=True)(
        tensors, batch.x, batch.y, batch.weights, noise, beta, places
    )
    return Traced(graph, state, gradients, draws)


def as_argument(tensor: Tensor) -> Tensor:
    """Return a view to hand to the graph: Inductor's CPU code loses what is written into zero-dimensional inputs."""
    return tensor.detach().view(1) if not tensor.ndim else tensor.detach()


def _rehearse(
    objective: Objective, context: Context, around: Callable[[], Any]
) -> tuple[list[tuple[str, Draw]], Evaluation]:
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


def _tapes(draws: list[tuple[str, Draw]], noise: list[Tensor]) -> dict[str, Tape]:
    numbers: dict[str, list[Tensor]] = {purpose: [] for purpose in PURPOSES}
    for (purpose, _), tensor in zip(draws, noise, strict=True):
        numbers[purpose].append(tensor)
    return {purpose: Tape(numbers=tensors) for purpose, tensors in numbers.items()}


def _owners(bnn: BNN) -> dict[str, str]:
    """Map each parameter's names to the one that torch lists it under: weights may share one log σ."""
    listed = {id(parameter): name for name, parameter in bnn.named_parameters()}
    return {name: listed[id(p)] for name, p in bnn.named_parameters(remove_duplicate=False)}
