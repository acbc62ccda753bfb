"""An evaluation compiled for one shape of batch; on CUDA it is replayed as one graph."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from varlap import tree
from varlap.objectives.objective import Context, Objective
from varlap.objectives.traced import Around, beta_tensor, trace

# Small kernels (one for each of many weights) go into few launches. Inductor keeps what it compiled on disk.
OPTIONS = {"combo_kernels": True}
MAX_GRAPHS = 8  # a network that changes more often than that is not worth compiling


class Compiled:
    """An objective's value and gradients for batches of one shape, as one compiled graph.

    A call leaves the gradients in `gradients`, by the names of `bnn.named_parameters()`, moves buffers and running
    means, and returns log-likelihood, curvature, KL and 1; the last is 0, and nothing but the gradients has changed,
    where one of them is NaN or infinite. It does not wait for the device.

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
        self._traced = trace(objective, context, around=around)
        for name in self._traced.gradients:
            if gradients is not None:
                self._traced.gradients[name] = gradients.setdefault(name, self._traced.gradients[name])
        self.gradients = self._traced.gradients
        batch = (context.batch.x, context.batch.y, context.batch.weights)
        self._batch = [tensor.detach().clone() for tensor in tree.tensors(batch)]
        self.beta = beta_tensor(context.beta, self._device)
        self._noise = self._traced.noise(context.streams, self._device)
        self._inputs = self._traced.inputs(self._batch, self._noise, self.beta)
        with torch.no_grad():
            self._graph_fn = compile_graph(self._traced.graph, self._inputs)
        self._after = after
        self.values: Tensor | None = None
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
        for place, numbers in zip(self._noise, self._traced.noise(context.streams, self._device), strict=True):
            place.copy_(numbers, non_blocking=True)
        self.beta.fill_(context.beta)
        with context.streams.around_network(self._device):
            if self._graph is None:
                self._run()
            else:
                self._graph.replay()
        assert self.values is not None
        return self.values.clone()  # the next replay writes there

    def _run(self) -> None:
        with torch.no_grad():
            (self.values,) = self._graph_fn(*self._inputs)
        if self._after is not None:
            self._after(self)

    def _capture(self, context: Context, warm_up: Callable[[], None] | None, pool: Any) -> None:
        """Warm up and capture; running statistics and memories are put back afterwards."""
        own = {id(parameter) for parameter in context.bnn.parameters()}
        moved = [(t, t.clone()) for t in self._traced.state.values() if id(t) not in own]
        # Let cuDNN try its kernels once: this step will run many times.
        cudnn = torch.backends.cudnn
        kernels = cudnn.flags(cudnn.enabled, True, cudnn.benchmark_limit, cudnn.deterministic, cudnn.allow_tf32)
        try:
            with torch.cuda.device(self._device), kernels:
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream), torch.no_grad():
                    for _ in range(3):
                        self._graph_fn(*self._inputs)
                    if warm_up is not None:
                        warm_up()
                torch.cuda.current_stream().wait_stream(stream)
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, pool=pool):
                    self._run()
        finally:
            with torch.no_grad():
                for tensor, kept in moved:
                    tensor.copy_(kept)


def compile_graph(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compile a graph of primitive operations by Inductor, without the detour through Dynamo."""
    from torch._inductor import standalone_compile  # slow to import

    options = {"config_patches": OPTIONS} if inputs[0].is_cuda else None
    return standalone_compile(graph, [*inputs], dynamic_shapes="from_example_inputs", options=options)
