"""An evaluation compiled for one shape of batch; on CUDA it is replayed as one graph."""

import collections
import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from varlap import tree
from varlap.errors import NetworkError
from varlap.objectives.objective import Context, Objective
from varlap.objectives.traced import (
    Around,
    Traced,
    as_argument,
    settings_of,
    trace,
    trace_commit,
    trace_renewal,
    trace_variances,
)
from varlap.posterior.batch import Batch
from varlap.posterior.bnn import BNN
from varlap.streams import Streams

# Small kernels (one for each of many weights) go into few launches. Inductor keeps what it compiled on disk.
OPTIONS = {"combo_kernels": True}
MAX_GRAPHS = 8  # a network that changes more often than that is not worth compiling


class Compiled:
    """An objective's value and gradients for batches of one shape, as one compiled graph.

    A call leaves the gradients in `gradients`, by the names of `bnn.named_parameters()`, moves buffers and running
    means, and returns log-likelihood, curvature, KL and 1; the last is 0, and nothing but the gradients has changed,
    where one of them is NaN or infinite. It does not wait for the device.

    Where the step renews what later ones remember, that is compiled apart and runs beside the rest: its kernels are too
    small to fill a GPU.

    Args:
        objective: whose evaluation it is.
        context: the first batch; all others have its shape.
        around: entered around the computation (for autocast, say).
        gradients: where to put the gradients; made here if not given.
        after: run after each evaluation with its result, as a part of the CUDA graph.
        warm_up: run once before the capture, to make what `after` needs.
        pool: the memory of other CUDA graphs that never run at the same time.
    """

    def __init__(
        self,
        objective: Objective,
        context: Context,
        *,
        around: Around = contextlib.nullcontext,
        gradients: dict[str, Tensor] | None = None,
        after: Callable[["Compiled"], None] | None = None,
        warm_up: Callable[[], None] | None = None,
        pool: Any = None,
    ) -> None:
        self._device = context.bnn.device
        context = replace(context, batch=_placed(context.batch, context.bnn))
        batch = (context.batch.x, context.batch.y, context.batch.weights)
        self._batch = list(tree.tensors(batch))
        settings = settings_of(context)
        self.beta, self._beta = settings[0], context.beta
        traced = trace(objective, context, around=around)
        for name in traced.gradients:
            if gradients is not None:
                traced.gradients[name] = gradients.setdefault(name, traced.gradients[name])
        self.gradients = traced.gradients
        self._main = _Part(traced, context.streams, self._batch, settings)
        self._renewal: _Part | None = None
        if objective.renews(context.streams.step):
            renewal = trace_renewal(objective, context, around=around)
            self._renewal = _Part(renewal, context.streams, self._batch, settings)
        self._commit_fn: Callable[..., Any] | None = None
        self._after = after
        self.values: Tensor | None = None
        self.unsound = torch.zeros((), device=self._device)
        self._one = torch.ones((), device=self._device)
        self._variances_fn: Callable[[], Any] | None = None
        if objective.sets_variances and after is not None:  # else the caller sets them
            graph, inputs = trace_variances(objective, context.bnn, self.unsound, self.beta)
            self._variances_fn = functools.partial(compile_graph(graph, inputs), *inputs)
        self._graph: torch.cuda.CUDAGraph | None = None
        if self._device.type == "cuda":
            self._capture(context, warm_up, pool)

    @property
    def pool(self) -> Any:
        """The memory of the CUDA graph."""
        return None if self._graph is None else self._graph.pool()

    def __call__(self, context: Context) -> Tensor:
        """Copy the batch and this step's numbers into place, and run."""
        batch = (context.batch.x, context.batch.y, context.batch.weights)
        for place, tensor in zip(self._batch, tree.tensors(batch), strict=True):
            place.copy_(tensor, non_blocking=True)
        for part in self._parts():
            part.draw(context.streams)
        if context.beta != self._beta:  # else spare the device a launch
            self._beta = context.beta
            self.beta.fill_(self._beta)
        with context.streams.around_network(self._device):
            if self._graph is None:
                self._run()
                self._finish()
            else:
                self._graph.replay()
        assert self.values is not None
        return self.values.clone()  # the next replay writes there

    @torch.no_grad()
    def update_variances(self) -> None:
        """Set log σ to its closed form, where the objective has it so, unless the last evaluation was not sound."""
        if self._variances_fn is not None:
            self._variances_fn()

    def _parts(self) -> list["_Part"]:
        return [self._main] if self._renewal is None else [self._main, self._renewal]

    @torch.no_grad()
    def _run(self) -> None:
        """Evaluate, and let buffers and memories move if all is finite."""
        with _beside(self._device) as beside:
            with beside:
                renewed = () if self._renewal is None else self._renewal()
            values, *moved = self._main()
        olds = [part.traced.state[name] for part in self._parts() for name in part.traced.moved]
        news = [*moved, *renewed]
        self.unsound.zero_()
        by_dtype: dict[torch.dtype, list[Tensor]] = collections.defaultdict(list)
        for tensor in (values, *self.gradients.values(), *renewed):
            by_dtype[tensor.dtype].append(tensor)
        for dtype, tensors in by_dtype.items():
            if dtype == torch.bfloat16:  # torch has no kernel for it on CUDA
                found = torch.stack([~tensor.isfinite().all() for tensor in tensors]).any()
                self.unsound.copy_(torch.maximum(self.unsound, found.to(self.unsound.dtype)))
                continue
            # torch's own check, a launch for many tensors; it multiplies them by 1
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, self.unsound, self._one)  # pyright: ignore
        if olds:
            if self._commit_fn is None:
                inputs = [self.unsound, *map(as_argument, olds), *news]
                self._commit_fn = compile_graph(trace_commit(olds, news, self.unsound), inputs)
            self._commit_fn(self.unsound, *map(as_argument, olds), *news)
        self.values = torch.cat([values, (1 - self.unsound).to(values.dtype)[None]])

    def _finish(self) -> None:
        if self._after is not None:
            self._after(self)

    def _capture(self, context: Context, warm_up: Callable[[], None] | None, pool: Any) -> None:
        """Warm up and capture; running statistics and memories are put back afterwards."""
        own = {id(parameter) for parameter in context.bnn.parameters()}
        moved = [(t, t.clone()) for t in self._main.traced.state.values() if id(t) not in own]
        # Let cuDNN try all of its kernels once: this step will run many times. Another time another one may be the
        # fastest, so one who asks for the same bits gets those that it would take untried.
        cudnn = torch.backends.cudnn
        kernels = cudnn.flags(cudnn.enabled, not cudnn.deterministic, 0, cudnn.deterministic, cudnn.allow_tf32)
        try:
            with torch.cuda.device(self._device), kernels:
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream), torch.no_grad():
                    for _ in range(3):
                        self._run()
                    if warm_up is not None:
                        warm_up()
                    self.unsound.fill_(1)  # so that this changes nothing
                    self.update_variances()
                torch.cuda.current_stream().wait_stream(stream)
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, pool=pool):
                    self._run()
                    self._finish()
        finally:
            with torch.no_grad():
                for tensor, kept in moved:
                    tensor.copy_(kept)


class _Part:
    """A traced computation, compiled, with its inputs in place."""

    def __init__(self, traced: Traced, streams: Streams, batch: Sequence[Tensor], settings: list[Tensor]) -> None:
        self.traced = traced
        self._device = settings[0].device
        self._noise = traced.noise(streams, self._device)
        self._inputs = traced.inputs(batch, self._noise, settings)
        with torch.no_grad():
            self._compiled_fn = compile_graph(traced.graph, self._inputs)

    def __call__(self) -> tuple[Tensor, ...]:
        return self._compiled_fn(*self._inputs)

    def draw(self, streams: Streams) -> None:
        """Put a step's random numbers into their place."""
        for place, numbers in zip(self._noise, self.traced.noise(streams, self._device), strict=True):
            place.copy_(numbers, non_blocking=True)


def _placed(batch: Batch, bnn: BNN) -> Batch:
    """Return a copy to be overwritten by each batch, images in the memory format of the network's kernels."""
    kernels = [weight for weight in bnn.network.parameters() if weight.ndim == 4]
    last = any(k.is_contiguous(memory_format=torch.channels_last) and not k.is_contiguous() for k in kernels)

    def place(tensor: Tensor) -> Tensor:
        images = last and tensor.ndim == 4
        return tensor.detach().clone(memory_format=torch.channels_last if images else torch.preserve_format)

    x, y, weights = tree.map_tensors(place, (batch.x, batch.y, batch.weights))
    return replace(batch, x=x, y=y, weights=weights)


@contextlib.contextmanager
def _beside(device: torch.device) -> Any:
    """Give a context whose work runs on a stream of its own, beside the rest of the block; both have ended after it."""
    if device.type != "cuda":
        yield contextlib.nullcontext()
        return
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(main)
    try:
        yield torch.cuda.stream(side)
    finally:
        main.wait_stream(side)


def _draws_numbers(graph: torch.fx.GraphModule) -> bool:
    return any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in graph.graph.nodes)


def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compile a graph of primitive operations by Inductor, without the detour through Dynamo."""
    if not inputs[0].is_cuda and _draws_numbers(graph):
        raise NetworkError(
            "the network draws numbers, as dropout does, and what the compiler makes of several such passes on the CPU "
            "is wrong"
        )
    from torch._inductor import standalone_compile  # slow to import

    options = {"config_patches": OPTIONS} if inputs[0].is_cuda else None
    return standalone_compile(graph, [*inputs], dynamic_shapes="from_example_inputs", options=options)
