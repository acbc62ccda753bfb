"""The one training step: forward, curvature, both gradients, KL and optimizer update, eager or compiled."""

import contextlib
import logging
from collections.abc import Callable, Hashable
from typing import Any, Literal

import torch
from torch import Tensor

from varlap import tree
from varlap.errors import ConfigError
from varlap.objectives.objective import Context, Objective
from varlap.posterior.batch import checked_batch
from varlap.posterior.bnn import BNN
from varlap.streams import Streams, current_rank
from varlap.training.traced import Traced, as_argument, trace

log = logging.getLogger(__name__)

Precision = Literal["fp32", "bf16"]


class TrainingStep:
    """One step of an objective's descent, by the fastest way that this network and machine allow.

    On CUDA the whole step is traced to one graph of primitive operations, compiled, and replayed as a CUDA graph. What
    cannot be traced runs eagerly, and the log says so once. On the CPU steps are eager: small networks gain nothing
    from the compiler there. Both ways draw the same numbers. A compiled step cannot look at its values: labels are
    checked in the first batch only, and a NaN shows in what the step returns.

    Args:
        bnn: the network with its posterior.
        objective: MAP, VI, VL or VLHessian.
        optimizer: any optimizer of torch over `bnn.parameter_groups(...)`; on CUDA it must be capturable.
        precision: "bf16" computes the network in bfloat16; means, log σ and their updates stay as they are.
        compiled: "auto" compiles on CUDA.

    >>> import torch, varlap
    >>> bnn = varlap.BNN(torch.nn.Linear(2, 3))
    >>> step = TrainingStep(bnn, varlap.VL(num_data=100), varlap.adam(bnn))
    >>> log_likelihood, curvature, kl = step(torch.ones(4, 2), torch.tensor([0, 1, 2, 0]), number=0)
    """

    def __init__(
        self,
        bnn: BNN,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        *,
        precision: Precision = "fp32",
        compiled: bool | Literal["auto"] = "auto",
    ) -> None:
        self.bnn, self.objective, self.optimizer = bnn, objective, optimizer
        self._around = _autocast(bnn.device, precision)
        self._compiled = bnn.device.type == "cuda" if compiled == "auto" else compiled
        self._replays: dict[Hashable, _Replay] = {}
        self._shape: Hashable = None
        self._memory: Any = None

    def __call__(self, x: Any, y: Any, *, number: int, weights: Tensor | None = None) -> Tensor:
        """Take step `number` and return log-likelihood, curvature and KL per datum, as one tensor of three."""
        if self._compiled:
            shape = _shape_of(x, y, weights)
            self._shape = self._shape or shape
            if shape == self._shape:  # a smaller last batch is not worth compiling for
                replay = self._replay(x, y, weights, number)
                if replay is not None:
                    return replay(x, y, weights, number)
        return self._eager(x, y, weights, number)

    def _eager(self, x: Any, y: Any, weights: Tensor | None, number: int) -> Tensor:
        with self._around():
            terms = self.objective(self.bnn, x, y, step=number, weights=weights)
        # Where a compiled step fills the gradients they hold its last ones, and must stay in their place.
        self.optimizer.zero_grad(set_to_none=not self._compiled)
        terms.loss.backward()
        self.optimizer.step()
        self.objective.update_variances(self.bnn, step=number)
        return torch.stack([terms.log_likelihood.to(terms.kl.dtype), terms.curvature.to(terms.kl.dtype), terms.kl])

    def _replay(self, x: Any, y: Any, weights: Tensor | None, number: int) -> "_Replay | None":
        curvature = getattr(self.objective, "curvature", None)
        # Steps with and without curvature are two graphs; without, it matters whether there is a memory yet.
        remembered = tuple(map(bool, self.objective.running_means().values()))
        key = "with curvature" if curvature is not None and curvature.weight(number) else remembered
        if key not in self._replays:
            batch = checked_batch(x, y, weights, num_data=self.objective.num_data, step=number)
            streams = Streams(self.objective.seed, number, 0, current_rank())
            context = Context(self.bnn, batch, streams, self.objective.beta_at(number), True)
            try:
                self.objective.inspect(context)
                self._replays[key] = _Replay(self, context)
            except Exception as error:
                log.warning("the step runs eagerly, since it cannot be compiled: %s", str(error).split("\n")[0])
                self._compiled = False
                return None
        return self._replays[key]


class _Replay:
    """One compiled step for one shape of batch; on CUDA, one graph that is replayed."""

    def __init__(self, step: TrainingStep, context: Context) -> None:
        self._bnn, self._objective, self._optimizer = step.bnn, step.objective, step.optimizer
        self._device = step.bnn.device
        self._traced: Traced = trace(step.objective, context, around=step._around)
        self._state = [as_argument(tensor) for tensor in self._traced.state.values()]
        self._graph_fn: Callable[..., Tensor] = torch.compile(self._traced.graph, fullgraph=True, dynamic=False)
        for name, gradient in self._traced.gradients.items():
            parameter = step.bnn.get_parameter(name)
            if parameter.grad is None:
                parameter.grad = gradient  # several replays fill the same one
            self._traced.gradients[name] = parameter.grad
        batch = context.batch
        self._x, self._y = (tree.map_tensors(Tensor.clone, part) for part in (batch.x, batch.y))
        self._weights = None if batch.weights is None else batch.weights.clone()
        self._beta = torch.tensor(context.beta, dtype=torch.float64, device=self._device)
        self._noise = self._traced.noise(context.streams, self._device)
        self._values: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        if self._device.type == "cuda":
            self._capture(step)

    def __call__(self, x: Any, y: Any, weights: Tensor | None, number: int) -> Tensor:
        """Copy the batch and this step's numbers into place, and run."""
        for place, tensor in zip(self._places(), tree.tensors((x, y, weights)), strict=True):
            place.copy_(tensor, non_blocking=True)
        streams = Streams(self._objective.seed, number, 0, current_rank())
        for place, numbers in zip(self._noise, self._traced.noise(streams, self._device), strict=True):
            place.copy_(numbers, non_blocking=True)
        self._beta.fill_(self._objective.beta_at(number))
        self._objective.last_step = number
        with streams.around_network(self._device):
            if self._graph is None:
                return self._run()
            self._graph.replay()
        assert self._values is not None
        return self._values.clone()  # the next replay writes there

    def _places(self) -> list[Tensor]:
        return list(tree.tensors((self._x, self._y, self._weights)))

    def _gradients(self) -> Tensor:
        with torch.no_grad():
            return self._graph_fn(
                self._state,
                self._x,
                self._y,
                self._weights,
                self._noise,
                self._beta,
                [as_argument(place) for place in self._traced.gradients.values()],
            )

    def _run(self) -> Tensor:
        values = self._gradients()
        self._optimizer.step()
        self._objective.update_variances(self._bnn, beta=self._beta)
        return values

    def _capture(self, step: TrainingStep) -> None:
        """Warm up and capture the step as a CUDA graph; running statistics and memories are put back afterwards."""
        own = {id(parameter) for parameter in step.bnn.parameters()}
        moved = [(t, t.clone()) for t in self._traced.state.values() if id(t) not in own]
        # Let cuDNN try its kernels once: this step will run many times.
        cudnn = torch.backends.cudnn
        kernels = cudnn.flags(cudnn.enabled, True, cudnn.benchmark_limit, cudnn.deterministic, cudnn.allow_tf32)
        try:
            with torch.cuda.device(self._device), kernels:
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(3):
                        self._gradients()
                    _make_capturable(self._optimizer)
                torch.cuda.current_stream().wait_stream(stream)
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, pool=step._memory):
                    self._values = self._run()
            step._memory = self._graph.pool()
        finally:
            with torch.no_grad():
                for tensor, kept in moved:
                    tensor.copy_(kept)


def _make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer's state exist before the capture, and let its learning rates be changed after it."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
    if optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    kept = [p.detach().clone() for p in parameters]
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.zero_()
    optimizer.step()
    with torch.no_grad():
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
            for entry in optimizer.state[parameter].values():
                if isinstance(entry, Tensor):
                    entry.zero_()


def _shape_of(x: Any, y: Any, weights: Tensor | None) -> Hashable:
    return tuple((name, t.shape, t.dtype) for name, t in tree.named_tensors((x, y, weights), "batch"))


def _autocast(device: torch.device, precision: Precision) -> Callable[[], Any]:
    if precision not in ("fp32", "bf16"):
        raise ConfigError(f"precision={precision!r}: choose 'fp32' or 'bf16'")
    if precision == "fp32":
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, torch.bfloat16)
