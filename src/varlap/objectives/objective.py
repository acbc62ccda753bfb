"""The one way from (network, posterior, batch, noise) to a value and its gradients, shared by every objective."""

import contextlib
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import Tensor, nn

from varlap import tree
from varlap.curvature.protocol import gradients
from varlap.errors import ConfigError, NetworkError, NonFiniteError
from varlap.objectives.mistakes import SizeWatch, VarianceWatch, warn_about_outputs
from varlap.objectives.running import RunningMean, Updates, write
from varlap.objectives.terms import Terms, combine, with_gradients
from varlap.posterior.batch import Batch, check_finite, checked_batch
from varlap.posterior.bnn import BNN
from varlap.posterior.kl import kl_gradient_in_mean, kl_with_gradients, quadratic_part
from varlap.seeds import checked_seed
from varlap.streams import Streams, current_rank

if TYPE_CHECKING:
    from varlap.objectives.automatic import Automatic

Gradients = dict[str, Tensor]
WEIGHTS_IN_HALF = (
    "the weights are float16, which ends at 65,504 and in which Adam's 1e-8 is 0: keep them in single precision, "
    "network.float(), and compute in half by fit(precision='fp16') or torch.autocast"
)


@dataclass(frozen=True)
class Context:
    """Everything that one evaluation depends on besides the objective's own settings."""

    bnn: BNN
    batch: Batch
    streams: Streams
    beta: float
    num_data: float
    """as β an input of a compiled evaluation: training on more data compiles nothing again"""
    with_gradients: bool
    scale: float = 1.0
    """what gradients are multiplied with on their way through the network, and divided by at its end"""
    renews: bool = True
    """whether the data term takes in `Objective.renewal`; a compiled step computes that beside it"""

    @functools.cached_property
    def variances(self) -> Gradients:
        """σ² by parameter name, shared by all terms that it enters."""
        return {name: (2 * log_sigma.detach()).exp() for name, log_sigma in self.bnn.log_sigma.items()}

    def tensors(self) -> Gradients:
        """Return what the data term's gradient must reach: Bayesian means, point estimates, inputs that ask for it."""
        means = {f"network.{name}": mean for name, mean in self.bnn.means().items()}
        inputs = {name: t for name, t in tree.named_tensors(self.batch.x, "x") if t.requires_grad}
        return means | self.bnn.point_estimates() | inputs


@dataclass(frozen=True)
class DataTerm:
    """What a batch says, per datum: E[log p(y|x, w)] ≈ log_likelihood − curvature, with gradients where wanted."""

    log_likelihood: Tensor
    curvature: Tensor
    gradients: Gradients
    """of curvature − log_likelihood in `Context.tensors()`; empty when values alone are wanted"""
    log_sigma_gradients: Gradients
    """the same in log σ, by parameter name; empty where log σ does not enter"""
    diagonal: Gradients | None = None
    """the curvature f per datum by parameter name, where the objective estimates one"""
    updates: Updates = field(default_factory=list)
    """what the objective will remember of this call, once it is known to be sound"""


@dataclass(frozen=True)
class Evaluation:
    """The value of an objective for one batch, term by term, and its gradients by name."""

    log_likelihood: Tensor
    curvature: Tensor
    kl: Tensor
    gradients: Gradients
    diagonal: Gradients | None
    updates: Updates
    sound: Tensor | None = None
    """whether values and gradients are finite, where that is known"""


class Objective(ABC):
    """A loss per datum, −E[log p(y|x, w)] + β KL/N, with gradients in means and log σ.

    A subclass says what the expected log-likelihood is; everything else is here, once.
    """

    uses_variances = True
    """whether log σ enters, so that the KL is the whole of Eq. 12"""
    sets_variances = False
    """whether `update_variances` sets log σ, which then has no gradient"""
    after_a_nan = "lower the learning rate, or look for an overflow in the network"
    """what an error advises where a value or a gradient is not finite"""

    def __init__(self, num_data: int | None, beta: float, seed: int, beta_warmup_steps: int = 0) -> None:
        name = type(self).__name__
        if num_data is None:
            raise ConfigError(
                f"{name} needs num_data, the number of items in the whole training set: it scales the KL and cannot be "
                f"read off a batch; for example {name}(num_data=len(train_set))"
            )
        if isinstance(num_data, bool) or not isinstance(num_data, Real) or num_data < 1 or num_data % 1 != 0:
            raise ConfigError(f"{name}(num_data={num_data!r}) must be a whole number of items, at least 1")
        if not isinstance(beta, Real):
            raise ConfigError(
                f"{name}(beta={beta!r}) must be a number, such as 0.01; of a string or a tensor take float(beta)"
            )
        if not (beta >= 0 and math.isfinite(beta)):
            raise ConfigError(f"{name}(beta={beta!r}) must be finite and not negative; 1 is Bayes, less is tempered")
        if not isinstance(beta_warmup_steps, Real) or beta_warmup_steps < 0:
            raise ConfigError(f"{name}(beta_warmup_steps={beta_warmup_steps!r}) must be a number that is not negative")
        self.num_data = int(num_data)
        self.beta = float(beta)
        self.seed = checked_seed(seed, name)
        self.beta_warmup_steps = beta_warmup_steps
        self.num_calls = 0
        self.last_step = 0
        self.compiled: bool | Literal["auto"] = "auto"
        """whether calls are compiled: "auto" does on CUDA, once some have been of the same kind"""
        self.gradient_scale = 1.0
        """keeps half-precision gradients from underflow; it does not change what they are"""
        self._automatic: Automatic | None = None
        self._watch, self._size_watch = VarianceWatch(), SizeWatch()

    def __repr__(self) -> str:
        """Tell the settings.

        >>> from varlap import VI
        >>> VI(num_data=100, beta=0.1)
        VI(num_data=100, beta=0.1)
        """
        told = {name: getattr(self, name) for name in ("curvature", "variances") if hasattr(self, name)}
        listed = "".join(f", {name}={value!r}" for name, value in told.items())
        return f"{type(self).__name__}(num_data={self.num_data}, beta={self.beta:g}{listed})"

    @final
    def __call__(
        self,
        bnn: BNN,
        x: Any,
        y: Any,
        *,
        step: int | None = None,
        micro_batch: int = 0,
        weights: Tensor | None = None,
    ) -> Terms:
        """Evaluate a batch. `terms.loss.backward()` then gives every trainable parameter its gradient.

        Args:
            bnn: the network with its posterior.
            x: inputs, as the network takes them.
            y: targets, as the likelihood takes them.
            step: determines every draw together with the seed; without it the objective counts its own calls.
            micro_batch: number of this batch within an accumulated step, so that each has its own draws.
            weights: one for each item; the log-likelihood is weighted by it.
        """
        if not isinstance(bnn, BNN):
            raise NetworkError(f"an objective needs a BNN, got {type(bnn).__name__}; wrap it: varlap.BNN(network)")
        self.prepare_for(bnn)
        with_grad = torch.is_grad_enabled()
        at = self.num_calls if step is None else step
        batch = checked_batch(x, y, weights, num_data=self.num_data, step=at)
        streams = Streams(self.seed, at, micro_batch, current_rank())
        context = Context(bnn, batch, streams, self.beta_at(at), self.num_data, with_grad, self.gradient_scale)
        self.inspect(context)
        warn_about_outputs(context)
        evaluation = self._compiled_evaluation(context)
        if evaluation is not None:
            self._check(evaluation, at)  # where it is not finite, the graph has changed nothing
        else:
            with prepared(context):
                evaluation = self.value_and_gradients(context)
                self._check(evaluation, at)
        if with_grad:
            self._size_watch.see(batch, self.num_data, type(self).__name__)
            if self.uses_variances and not self.sets_variances:
                self._watch.see(bnn, type(self).__name__)
            write(evaluation.updates)
            self.num_calls += step is None
            self.last_step = at
        return _as_terms(context, evaluation)

    @final
    def value_and_gradients(self, context: Context) -> Evaluation:
        """Compute the objective and its gradients from the weights as they are, the batch and the noise; no more.

        It has no effect but the network's own (running statistics), so it can be traced and compiled.
        """
        data = self.data_term(context)
        scale = context.beta / context.num_data
        context.bnn.refit_prior()
        with torch.no_grad():
            kl, from_prior = self._prior_term(context)
            kl = (kl / context.num_data).to(kl.dtype)  # a compiled evaluation has N in double precision
            gradients = dict(data.gradients)
            if not self.sets_variances:
                gradients |= {f"log_sigma.{name}": g for name, g in data.log_sigma_gradients.items()}
            for name, gradient in from_prior.items():
                if name in gradients:  # in place, since new memory costs a CPU more than the arithmetic
                    gradients[name] = gradient.mul_(scale).add_(gradients[name])
        updates = data.updates + self.updates_after(data) if context.with_gradients else []
        values = (data.log_likelihood.detach(), data.curvature.detach(), kl)
        return Evaluation(*values, gradients, data.diagonal, updates)

    @contextlib.contextmanager
    def eagerly(self) -> Iterator[None]:
        """Let nothing be compiled inside the `with` block."""
        policy, self.compiled = self.compiled, False
        try:
            yield
        finally:
            self.compiled = policy

    def beta_at(self, step: int) -> float:
        """Return β, ramped up linearly over the warm-up steps."""
        if step >= self.beta_warmup_steps:
            return self.beta
        return self.beta * (step + 1) / self.beta_warmup_steps

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: the count of calls, and the running Fisher where there is one."""
        counts = {"num_calls": self.num_calls, "last_step": self.last_step}
        return counts | {name: running.state_dict() for name, running in self.running_means().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that `state_dict` returned."""
        missing = [name for name in ("num_calls", "last_step", *self.running_means()) if name not in state]
        if missing:
            raise ConfigError(
                f"the state has no {missing[0]!r}, which {type(self).__name__} needs: it is that of another objective; "
                "make this one with the curvature and the variances that the saved one had"
            )
        self.num_calls, self.last_step = int(state["num_calls"]), int(state["last_step"])
        for name, running in self.running_means().items():
            running.load_state_dict(state[name])

    def __getstate__(self) -> dict[str, Any]:
        """A copy compiles for itself."""
        return vars(self) | {"_automatic": None}

    @abstractmethod
    def data_term(self, context: Context) -> DataTerm:
        """Evaluate the expected log-likelihood of the batch, per datum, and its gradients."""

    def prepare_for(self, bnn: BNN) -> None:  # noqa: B027
        """Choose what the caller has left to the network."""

    def inspect(self, context: Context) -> None:  # noqa: B027
        """Refuse or warn about what only this objective minds, before anything is computed."""

    def renews(self, step: int) -> bool:  # noqa: ARG002
        """Whether a step has a `renewal`."""
        return False

    def renewal(self, context: Context) -> Updates:  # noqa: ARG002
        """Evaluate what later steps will remember and this one does not use."""
        return []

    def updates_after(self, data: DataTerm) -> Updates:  # noqa: ARG002
        """Return what else is to be remembered of a call."""
        return []

    def update_variances(  # noqa: B027
        self, bnn: BNN, *, step: int | None = None, beta: float | Tensor | None = None
    ) -> None:
        """Set variances that have a closed form, after the optimizer's step; does nothing where there are none."""

    def running_means(self) -> dict[str, RunningMean]:
        """Return what the objective remembers from step to step."""
        return {}

    def _compiled_evaluation(self, context: Context) -> Evaluation | None:
        if not self.compiled or (self.compiled == "auto" and context.bnn.device.type != "cuda"):
            return None
        if context.scale != 1:  # it changes from step to step
            return None
        if self._automatic is None:
            from varlap.objectives.automatic import CALLS_BEFORE_COMPILING, Automatic  # it is made of what is here

            self._automatic = Automatic(0 if self.compiled is True else CALLS_BEFORE_COMPILING)
        return self._automatic.evaluation(self, context)

    def _check(self, evaluation: Evaluation, step: int) -> None:
        half = any(gradient.dtype == torch.float16 for gradient in evaluation.gradients.values())
        _check_evaluation(evaluation, step, WEIGHTS_IN_HALF if half else self.after_a_nan)

    def _prior_term(self, context: Context) -> tuple[Tensor, Gradients]:
        """Return the KL, or its quadratic part, summed over all weights; and its gradients."""
        bnn, values, gradients = context.bnn, [], {}
        for name, mean in bnn.means().items():
            prior = bnn.prior_mean_of(name), bnn.prior_scale[name]
            if self.uses_variances:
                sigma = bnn.log_sigma[name], context.variances[name]
                value, in_mean, gradients[f"log_sigma.{name}"] = kl_with_gradients(mean, *sigma, *prior)
            else:
                value, in_mean = quadratic_part(mean, *prior), kl_gradient_in_mean(mean, *prior)
            gradients[f"network.{name}"] = in_mean
            values.append(value)
        return torch.stack([value.to(values[0].dtype) for value in values]).sum(), gradients


def gradients_of(outputs: Sequence[Tensor], cotangents: Sequence[Tensor], context: Context) -> Gradients:
    """Pull cotangents back to all of `Context.tensors()`; what nothing depends on gets zeros."""
    if context.scale == 1:
        return gradients(outputs, context.tensors(), cotangents)
    found = gradients(outputs, context.tensors(), [context.scale * cotangent for cotangent in cotangents])
    return {name: gradient / context.scale for name, gradient in found.items()}


@contextlib.contextmanager
def prepared(context: Context) -> Iterator[None]:
    """Surround an evaluation: gradients on, dropout seeded, and the network's buffers put back if anything fails."""
    bnn = context.bnn
    with (
        torch.enable_grad(),
        bnn.means_differentiable(),
        _hooks_waiting(bnn.parameters()),
        context.streams.around_network(bnn.device),
        bnn.buffers_restored(only_on_error=True),
    ):
        yield


@contextlib.contextmanager
def _hooks_waiting(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let hooks on parameters see the gradient that `loss.backward()` leaves, once, and none on the way to it."""
    tables = [parameter._backward_hooks for parameter in parameters if parameter._backward_hooks]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.update(dict.fromkeys(table, _nothing))
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update({key: hook for key, hook in hooks.items() if key in table})  # others were removed meanwhile


def _nothing(_: Tensor) -> None:
    pass


def _check_evaluation(evaluation: Evaluation, step: int, advice: str) -> None:
    if evaluation.sound is not None and bool(evaluation.sound):
        return
    named = [
        ("the log-likelihood", evaluation.log_likelihood),
        ("the curvature", evaluation.curvature),
        ("the KL", evaluation.kl),
        *((f"the gradient of {name}", gradient) for name, gradient in evaluation.gradients.items()),
        *((f"the curvature of {name}", total) for _, sums in evaluation.updates for name, total in sums.items()),
    ]
    check_finite(named, step=step, advice=advice)
    if evaluation.sound is not None:  # a graph keeps what it has renewed to itself
        raise NonFiniteError(f"step {step}: the new curvature holds NaN or Inf; nothing was changed; {advice}")


def _as_terms(context: Context, evaluation: Evaluation) -> Terms:
    """Wrap values and gradients so that `loss.backward()` works as on any scalar."""
    values = (evaluation.log_likelihood, evaluation.curvature, evaluation.kl)
    loss = -combine(*values, context.beta)
    if context.with_gradients:
        leaves = context.tensors() | {f"log_sigma.{name}": t for name, t in context.bnn.log_sigma.items()}
        wanted = [name for name in evaluation.gradients if leaves[name].requires_grad]
        gradients = [evaluation.gradients[name].to(leaves[name].dtype) for name in wanted]
        loss = with_gradients(loss, [leaves[name] for name in wanted], gradients)
    return Terms(*values, beta=context.beta, loss=loss)
