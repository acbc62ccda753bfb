"""The one training step: forward, curvature, both gradients, KL and optimizer update, eager or compiled."""

import contextlib
import logging
import weakref
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from varlap import tree
from varlap.errors import ConfigError, NonFiniteError, VarlapError
from varlap.objectives.compiled import MAX_GRAPHS, Compiled
from varlap.objectives.mistakes import warn_about_outputs
from varlap.objectives.objective import Context, Objective
from varlap.objectives.situation import is_ready, kept_alive, runs_own_code, shape_of, situation
from varlap.objectives.traced import Around
from varlap.posterior.batch import Batch, checked_batch, require_divisible
from varlap.posterior.bnn import BNN
from varlap.streams import Streams, current_rank
from varlap.training.distributed import World
from varlap.training.signals import REQUESTS

log = logging.getLogger(__name__)

Precision = Literal["fp32", "bf16", "fp16"]
STEPS_BETWEEN_LOOKS = 100
LARGEST_SCALE = 2.0**16
STEPS_BEFORE_GROWTH = 1000


class TrainingStep:
    """One step of an objective's descent, by the fastest way that this network and machine allow.

    On CUDA the whole step is traced to one graph of primitive operations, compiled, and replayed as a CUDA graph. What
    cannot be traced runs eagerly, and the log says so once. On the CPU steps are eager: small networks gain nothing
    from the compiler there. Both ways draw the same numbers, but for dropout's in steps that renew a memory.

    A compiled step does not wait for the device, so labels are checked in the first batch only. Where its loss or a
    gradient is NaN or infinite, running statistics and memories stay as they were, and so do the weights if the
    optimizer is a fused one of torch; the error comes within 100 steps, or from `check`.

    Args:
        bnn: the network with its posterior.
        objective: MAP, VI, VL or VLHessian.
        optimizer: any optimizer of torch over `bnn.parameter_groups(...)`; on CUDA it must be capturable.
        precision: "bf16" computes the network in bfloat16; means, log σ and their updates stay as they are. "fp16" is
            for devices without bfloat16: gradients are scaled on their way so that they do not underflow, a step that
            overflows is taken again with half the scale, and nothing is compiled.
        compiled: "auto" compiles on CUDA.
        accumulate: compute a batch in so many parts, one after the other; each draws labels and squares gradients of
            its own.
        clip_norm: scale all gradients down together where their norm is larger.
        world: the ranks to average gradients with; each is called with its share of the batch.
        batch_size: compile for batches of so many items; by default as many as the first has.
        on_nonfinite: "raise", or "skip" a step with NaN or Inf.

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
        accumulate: int = 1,
        clip_norm: float | None = None,
        world: World | None = None,
        batch_size: int | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
    ) -> None:
        self._skips = on_nonfinite == "skip"
        self.bnn, self.objective, self.optimizer = bnn, objective, optimizer
        objective.prepare_for(bnn)
        self._around = _autocast(bnn.device, precision)
        wanted = (bnn.device.type == "cuda" if compiled == "auto" else compiled) and precision != "fp16"
        self.gradient_scale = (
            GradientScale(LARGEST_SCALE, largest=LARGEST_SCALE) if precision == "fp16" else GradientScale(1.0)
        )
        self._accumulate, self._clip_norm, self._world = accumulate, clip_norm, world
        # With several parts or ranks the update waits for all of them, and an optimizer that cannot skip an unsound
        # step by itself must wait for a look at it: then only the evaluations are compiled.
        guarded = self._guards_weights() or (compiled is True and not self._skips)
        alone = accumulate == 1 and world is None and guarded
        self._compiled = wanted and alone
        self._evaluates_eagerly = self._compiled or not wanted
        self._replays: dict[Hashable, tuple[Compiled, list[Any]]] = {}
        self._batch_size = batch_size
        self._shape: Hashable = None
        self._gradients: dict[str, Tensor] = {}
        self._seen: list[tuple[int, Tensor]] = []
        self.request = 0
        """one of `REQUESTS` to stop, if this rank has one; after a step of several ranks, one that any of them had"""

    def __call__(self, x: Any, y: Any, *, number: int, weights: Tensor | None = None) -> Tensor:
        """Take step `number` and return log-likelihood, curvature and KL per datum, as one tensor of three."""
        return self.take(x, y, number=number, weights=weights)[:3]

    def take(self, x: Any, y: Any, *, number: int, weights: Tensor | None = None) -> Tensor:
        """Take step `number` and return a fourth value besides: 1, or 0 where the step was not sound and not taken."""
        scale = self.gradient_scale.value
        while True:
            try:
                values = self._replayed(x, y, weights, number)
                if values is None:
                    values = self._eager(x, y, weights, number)
                self.gradient_scale.grow()
                return values
            except NonFiniteError as error:  # nothing was changed, so the step can be taken again
                if self.gradient_scale.shrink():
                    continue
                self.gradient_scale.value = scale  # it was not to blame
                if not self._skips:
                    raise
                log.warning("skipped a step: %s", error)
                return torch.zeros(4, device=self.bnn.device)

    def check(self) -> None:
        """Raise if a compiled step since the last look was not sound; waits for the device."""
        seen, self._seen = self._seen, []
        if self._skips and self._guards_weights():
            return
        if seen and not bool((sound := torch.stack([flag for _, flag in seen])).all()):
            number = seen[int((sound == 0).nonzero()[0])][0]
            taken = "nothing was changed" if self._guards_weights() else "the weights are of no use any more"
            raise NonFiniteError(
                f"step {number}: the loss or a gradient holds NaN or Inf; {taken}; look for NaN in the data, "
                f"{self.objective.after_a_nan}; compiled=False shows which tensor it is"
            )

    def _eager(self, x: Any, y: Any, weights: Tensor | None, number: int) -> Tensor:
        # Where a compiled step fills the gradients they hold its last ones, and must stay in their place.
        self.optimizer.zero_grad(set_to_none=not self._compiled)
        if self._compiled and self.bnn.device.type == "cuda":
            _make_adjustable(self.optimizer)  # now, so that a run carried on by an eager step has the same numbers
        with _restored_on_error(self.bnn, self.objective, always=self._accumulate > 1 or self._world is not None):
            values = self._evaluated_by_all(x, y, weights, number)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.bnn.parameters(), self._clip_norm)
        self.optimizer.step()
        self.objective.update_variances(self.bnn, step=number)
        return torch.cat([values, values.new_ones(1)])

    def _evaluated_by_all(self, x: Any, y: Any, weights: Tensor | None, number: int) -> Tensor:
        """Evaluate this rank's share and average with the others': values, gradients, running means and statistics.

        An error on one of them is an error on all, so that nobody waits for ever. All goes through one all-reduce, but
        for memories in the step that begins them: a rank that fails there has none.
        """
        if self._world is None:
            return self._evaluated(x, y, weights, number)
        num_items, failure = tree.leading_size(y) or 0, None
        dtype = torch.promote_types(next(self.bnn.parameters()).dtype, torch.float32)
        values = torch.zeros(3, dtype=dtype, device=self.bnn.device)
        remembers = is_ready(self.objective)  # on all ranks or on none
        buffers = [buffer for buffer in self.bnn.network.buffers() if buffer.is_floating_point()]
        before = [buffer.clone() for buffer in buffers]
        if num_items:
            try:
                values = self._evaluated(x, y, weights, number).to(dtype)
            except Exception as error:
                failure = error
        for parameter in self._trained():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # Of buffers their change is shared, so that masks of −∞ and other constants stay as they are, to the bit.
        changes = [torch.where(b == old, 0, b - old) for b, old in zip(buffers, before, strict=True)]
        shared = [values, *(p.grad for p in self._trained() if p.grad is not None), *changes]
        shared += self._memories() if remembers else []
        flags = [failure is not None, isinstance(failure, NonFiniteError), *(self.request == r for r in REQUESTS)]
        sums, (all_items, failures, unsound, *requests) = self._world.summed(shared, num_items, [num_items, *flags])
        self.request = next((request for request, count in zip(REQUESTS, requests, strict=True) if count), 0)
        if failure is not None and (unsound == failures or not isinstance(failure, NonFiniteError)):
            raise failure
        if failures:
            kind = NonFiniteError if unsound == failures else VarlapError
            found = "found NaN or Inf" if unsound == failures else "failed"
            raise kind(f"step {number}: another rank {found}; nothing was changed")
        for tensor, total in zip(shared, sums, strict=True):
            tensor.detach().copy_(total / all_items)
        for buffer, old, change in zip(buffers, before, changes, strict=True):
            buffer.copy_(old + change)
        if not remembers and (first := self._memories()):
            self._world.average(first, weight=num_items / all_items)
        return values

    def _memories(self) -> list[Tensor]:
        return [total for running in self.objective.running_means().values() for total in running.sums.values()]

    def _evaluated(self, x: Any, y: Any, weights: Tensor | None, number: int) -> Tensor:
        """Leave the gradients of a batch, part by part, and return its log-likelihood, curvature and KL."""
        num_items = tree.leading_size(y) or 0
        num_parts = max(1, min(self._accumulate, num_items // 2))  # batch norm needs two items
        chosen = torch.arange(num_items, device=self.bnn.device).tensor_split(num_parts)
        if len(chosen) > 1:
            purpose = f"accumulate={self._accumulate}"
            require_divisible(x, num_items, purpose=purpose, instead="leave accumulate out and use smaller batches")
        values = None
        for index, items in enumerate(chosen):
            part = (x, y, weights) if len(chosen) == 1 else tree.take((x, y, weights), items)
            eagerly = self.objective.eagerly() if self._evaluates_eagerly else contextlib.nullcontext()
            with self._around(), eagerly, self._scaled():
                terms = self.objective(self.bnn, *part[:2], step=number, micro_batch=index, weights=part[2])
            share = len(items) / num_items if len(chosen) > 1 else 1.0
            (share * terms.loss).backward()
            dtype = terms.kl.dtype
            own = share * torch.stack([terms.log_likelihood.to(dtype), terms.curvature.to(dtype), terms.kl])
            values = own if values is None else values + own
        assert values is not None
        return values

    @contextlib.contextmanager
    def _scaled(self) -> Iterator[None]:
        own, self.objective.gradient_scale = self.objective.gradient_scale, self.gradient_scale.value
        try:
            yield
        finally:
            self.objective.gradient_scale = own

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.bnn.parameters() if p.requires_grad]

    def _replayed(self, x: Any, y: Any, weights: Tensor | None, number: int) -> Tensor | None:
        """Take a compiled step, or return None where it is to be eager."""
        if not self._compiled or not is_ready(self.objective) or runs_own_code(self.bnn):
            return None
        if self._batch_size not in (None, tree.leading_size(y)):  # a run may be carried on at a smaller last batch
            return None
        shape = shape_of(x, y, weights)
        self._shape = self._shape or shape
        if shape != self._shape:  # a smaller last batch is not worth compiling for
            return None
        key = situation(self.objective, self.bnn, number)
        if key not in self._replays:
            batch = checked_batch(x, y, weights, num_data=self.objective.num_data, step=number)
            if len(self._replays) == MAX_GRAPHS:
                log.warning("the step runs eagerly from now on: the network changes too often to be compiled")
                self._compiled = False
                return None
            context = self._context(batch, number)
            self.objective.inspect(context)
            warn_about_outputs(context)
            try:
                self._replays[key] = self._compile(context), kept_alive(self.objective, self.bnn)
            except Exception as error:
                log.warning("the step runs eagerly, since it cannot be compiled: %s", str(error).split("\n")[0])
                self._compiled = False
                return None
        self.objective.last_step = number
        values = self._replays[key][0](self._context(Batch(x, y, weights, 0, trusted=True), number))
        self._note(number, values[3])
        return values

    def _compile(self, context: Context) -> Compiled:
        pool = next((replay.pool for replay, _ in self._replays.values()), None)

        step = weakref.proxy(self)  # which owns the replay: network and graphs are to be freed with it, at once

        def after(replay: Compiled) -> None:
            for parameter, gradient in replay.gradients.items():
                step.bnn.get_parameter(parameter).grad = gradient
            if step._clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(step.bnn.parameters(), step._clip_norm)
            with step._skipping(replay.unsound):
                step.optimizer.step()
            if step.objective.sets_variances:
                replay.update_variances()
            else:
                step.objective.update_variances(step.bnn, beta=replay.beta)

        return Compiled(
            self.objective,
            context,
            around=self._around,
            gradients=self._gradients,
            after=after,
            warm_up=lambda: _make_capturable(self.optimizer, self.bnn, self._gradients),
            pool=pool,
        )

    def _context(self, batch: Batch, number: int) -> Context:
        streams = Streams(self.objective.seed, number, 0, current_rank())
        return Context(self.bnn, batch, streams, self.objective.beta_at(number), self.objective.num_data, True)

    @contextlib.contextmanager
    def _skipping(self, unsound: Tensor) -> Iterator[None]:
        """Let the optimizer's step change nothing where a gradient is not sound."""
        if self._guards_weights():
            self.optimizer.found_inf = unsound  # type: ignore[attr-defined]
        try:
            yield
        finally:
            if self._guards_weights():
                del self.optimizer.found_inf  # type: ignore[attr-defined]

    def _guards_weights(self) -> bool:
        """Whether the optimizer skips an update by itself: torch's fused ones do, as a gradient scaler has them do."""
        return all(group.get("fused") for group in self.optimizer.param_groups)

    def _note(self, number: int, sound: Tensor) -> None:
        self._seen.append((number, sound))
        if len(self._seen) >= STEPS_BETWEEN_LOOKS:
            self.check()


@dataclass
class GradientScale:
    """A scale that keeps half-precision gradients in range: halved where they overflow, doubled after many steps.

    >>> scale = GradientScale(4.0)
    >>> scale.shrink(), scale.value
    (True, 2.0)
    """

    value: float
    num_sound: int = 0
    largest: float = 1.0

    def shrink(self) -> bool:
        """Halve it after an overflow; return False where it is 1 and cannot be the cause."""
        self.num_sound = 0
        if self.value == 1:
            return False
        self.value /= 2
        return True

    def grow(self) -> None:
        """Count a sound step, and double it after enough of them."""
        self.num_sound += 1
        if self.num_sound >= STEPS_BEFORE_GROWTH:
            self.value, self.num_sound = min(2 * self.value, self.largest), 0


@contextlib.contextmanager
def _restored_on_error(bnn: BNN, objective: Objective, always: bool) -> Iterator[None]:
    """Put buffers and memories back if a later part fails; a single evaluation does so by itself."""
    if not always:
        yield
        return
    kept = objective.state_dict()
    with bnn.buffers_restored(only_on_error=True):
        try:
            yield
        except BaseException:
            objective.load_state_dict(kept)
            raise


def _make_adjustable(optimizer: torch.optim.Optimizer) -> None:
    """Let a captured optimizer's learning rates be changed: they are tensors, in single precision."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)


def _make_capturable(optimizer: torch.optim.Optimizer, bnn: BNN, gradients: dict[str, Tensor]) -> None:
    """Let the optimizer's state exist before the capture."""
    _make_adjustable(optimizer)
    if optimizer.state:
        return
    for name, gradient in gradients.items():
        bnn.get_parameter(name).grad = gradient.zero_()
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    kept = [p.detach().clone() for p in parameters]
    optimizer.step()
    with torch.no_grad():
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
            for entry in optimizer.state[parameter].values():
                if isinstance(entry, Tensor):
                    entry.zero_()


def _autocast(device: torch.device, precision: Precision) -> Around:
    dtypes = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in dtypes:
        raise ConfigError(f"precision={precision!r}: choose 'fp32', 'bf16' or 'fp16'")
    dtype = dtypes[precision]
    return contextlib.nullcontext if dtype is None else lambda: torch.autocast(device.type, dtype)
