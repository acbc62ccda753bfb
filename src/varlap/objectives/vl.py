"""Variational Laplace, Eqs. 29 and 30."""

import contextlib
import math
import weakref
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from varlap.curvature import DEFAULT, DEFAULT_FOR_NUMBERS, Curvature, Hessian
from varlap.curvature.protocol import checked_curvature
from varlap.errors import ConfigError, warn
from varlap.likelihoods import Bernoulli, Categorical
from varlap.likelihoods.protocol import of_log_prob
from varlap.objectives.cancelled import cancelled
from varlap.objectives.curvature_term import curvature_data_term, renewed, with_remembered, without_curvature
from varlap.objectives.first_look import first_look
from varlap.objectives.kinks import without_second_derivative
from varlap.objectives.map import mean_data_term
from varlap.objectives.mistakes import CALLS_WITHOUT_UPDATE
from varlap.objectives.objective import Context, DataTerm, Gradients, Objective
from varlap.objectives.running import RunningMean, Updates
from varlap.posterior.bnn import BNN

CALLS_WITHOUT_CURVATURE = 1000  # more than the parts of many accumulated steps of a training that was carried on
Variances = Literal["learnt", "closed-form"]


class VL(Objective):
    """Eq. 30: (1/S) Σ log p(y|x, μ) − (S/2) Σ σ² ḡ² − (β/N) KL, with ḡ the gradient for labels drawn from the model.

    In `varlap.objectives.curvature_term`, `curvature_data_term` is the first two terms (where the curvature has a
    memory, `with_remembered` adds the middle one) and `penalty` the middle one; S ḡ² is
    `varlap.curvature.fisher.SquaredGradients`.

    Args:
        num_data: number of items in the training set, N.
        beta: tempering of the KL: 1 is Bayes, smaller values often predict better.
        curvature: how the Fisher is estimated: by default on a quarter of the batch in every fourth step, remembered in
            between, `Fisher(every=4, fraction=0.25, memory=0.9, batch_norm="part")`. Where the likelihood is neither
            categorical nor bernoulli and has a `score`, also `gradient="whole"`: the attribute `curvature` says so once
            the objective has seen its network. `Fisher()` is the paper's: the whole batch in every step, at three times
            the cost of MAP.
        variances: "learnt" by the optimizer (the paper's way), or "closed-form": log σ gets no gradient, and
            `update_variances(bnn)`, called after each optimizer step, sets σ² = β/(N f + β/s²) from a running mean.
        fisher_decay: of that running mean.
        seed: of the drawn labels.
        beta_warmup_steps: ramp β up over so many steps, from the first of each training. Closed-form variances need it,
            about 30 % of all steps: without it they jump to the prior's before the network has learnt anything, with
            lasting harm.

    >>> import torch, varlap
    >>> bnn = varlap.BNN(torch.nn.Linear(2, 3))
    >>> objective = VL(num_data=100, beta=0.1)
    >>> terms = objective(bnn, torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))
    >>> terms.loss.backward()
    >>> bool(terms.curvature > 0), bnn.log_sigma["weight"].grad.shape
    (True, torch.Size([3, 2]))
    """

    def __init__(
        self,
        num_data: int | None = None,
        beta: float = 1.0,
        *,
        curvature: Curvature | None = None,
        variances: Variances = "learnt",
        fisher_decay: float = 0.99,
        seed: int = 0,
        beta_warmup_steps: int | None = None,
    ) -> None:
        if variances not in ("learnt", "closed-form"):
            raise ConfigError(f"VL(variances={variances!r}): choose 'learnt' or 'closed-form'")
        if variances == "closed-form" and beta_warmup_steps is None:
            raise ConfigError(
                "VL(variances='closed-form') needs beta_warmup_steps, about 30 % of all training steps: without a "
                "warm-up the variances jump to the prior's; pass 0 if that is what you want"
            )
        super().__init__(num_data, beta, seed, beta_warmup_steps or 0)
        self.curvature = checked_curvature("VL", replace(DEFAULT) if curvature is None else curvature)
        self._stand_in = self.curvature if curvature is None else None  # what the likelihood may change
        if variances == "closed-form" and isinstance(self.curvature, Hessian):
            raise ConfigError(
                "VL(variances='closed-form') needs a curvature that is never negative: a Fisher, no Hessian"
            )
        self.variances: Variances = variances
        self._variance_fisher = RunningMean(fisher_decay)
        self._fisher, self._gradient = (RunningMean(self.curvature.memory) for _ in range(2))
        self._owner: weakref.ref[BNN] | None = None
        self._calls_since_update, self._calls_without_curvature = 0, 0.0
        if variances == "closed-form" and self.beta == 0:
            raise ConfigError("VL(variances='closed-form', beta=0): the closed form needs a positive beta")

    @property
    def sets_variances(self) -> bool:
        """Whether σ has its closed form, and log σ no gradient."""
        return self.variances == "closed-form"

    @property
    def after_a_nan(self) -> str:
        """Advice after a NaN: a remembered gradient is a stale one."""
        if not self.curvature.memory:
            return super().after_a_nan
        return (
            "lower the learning rate or beta, evaluate the curvature in every step, VL(curvature=varlap.Fisher()), or "
            "look for an overflow in the network"
        )

    def prepare_for(self, bnn: BNN) -> None:
        """Choose the curvature by the likelihood, where the caller has left it open and no network is remembered."""
        remembers = self._fisher and self._owner is not None
        if self.curvature is self._stand_in and not remembers:
            labels = isinstance(bnn.likelihood, Bernoulli | Categorical)
            chosen = DEFAULT if labels or of_log_prob(bnn.likelihood, "score") is None else DEFAULT_FOR_NUMBERS
            if chosen != self.curvature:
                self.curvature = self._stand_in = replace(chosen)
        self._fisher.decay = self._gradient.decay = self.curvature.memory  # also of one that was assigned

    def inspect(self, context: Context) -> None:
        """Warn once about activations that lose their curvature; keep the memories of two networks apart."""
        first_look(self, context, without_second_derivative, cancelled)
        remembered = [running for running in self.running_means().values() if running]
        if remembered and context.with_gradients and self._owner is not None and self._owner() is not context.bnn:
            raise ConfigError(
                "this VL remembers the curvature of another network; make one objective for each: "
                f"VL(num_data={self.num_data}, ...)"
            )
        for running in remembered:
            running.move_to(context.bnn.device)
        if context.with_gradients:
            self._owner = weakref.ref(context.bnn)
            if self.curvature.weight(context.streams.step):
                self._calls_without_curvature = -math.inf  # there was one, so that steps are counted as they should be
            self._calls_without_curvature += 1
            if self._calls_without_curvature == CALLS_WITHOUT_CURVATURE:
                warn(
                    f"VL's curvature had no turn in {CALLS_WITHOUT_CURVATURE} calls: {self.curvature!r} is evaluated "
                    "where `step` is a multiple of `every`; pass consecutive numbers as step=..., or leave it out"
                )
        if self.sets_variances and context.with_gradients:
            self._calls_since_update += 1
            if self._calls_since_update == CALLS_WITHOUT_UPDATE:
                warn(
                    f"VL(variances='closed-form') was called {CALLS_WITHOUT_UPDATE} times without an update; "
                    "call objective.update_variances(bnn) after each optimizer.step()"
                )

    def data_term(self, context: Context) -> DataTerm:
        """Evaluate the log-likelihood and the curvature penalty: from one forward pass, or as it is remembered."""
        if not self.curvature.memory:
            return curvature_data_term(context, self.curvature)
        data = mean_data_term(context)
        context = replace(context, batch=replace(context.batch, trusted=True))  # by the forward pass just made
        updates = self.renewal(context) if context.renews else []
        with contextlib.ExitStack() as stack:
            for running, sums in [] if self._fisher else updates:  # the first ones serve at once
                stack.enter_context(running.standing_in(sums))
            if self._fisher:
                data = with_remembered(data, context, self._fisher, self._gradient)
            else:
                data = without_curvature(data, context)
        return replace(data, updates=updates)

    def renews(self, step: int) -> bool:
        """Whether a step evaluates the curvature anew for its memory: at its turn, and where nothing is remembered."""
        return bool(self.curvature.memory and (self.curvature.weight(step) or not self._fisher))

    def renewal(self, context: Context) -> Updates:
        """Evaluate the curvature for the steps to come; without gradients only where nothing is remembered yet."""
        if not self.renews(context.streams.step) or (self._fisher and not context.with_gradients):
            return []
        diagonal, updates = renewed(context, self.curvature, self._fisher, self._gradient)
        return updates + self._variance_updates(diagonal)

    def update_variances(self, bnn: BNN, *, step: int | None = None, beta: float | Tensor | None = None) -> None:
        """Set log σ to its closed form for the running Fisher (Eq. 23); does nothing where the optimizer learns it.

        β is that of the last call, or of `step`, or the one given.

        >>> import torch, varlap
        >>> bnn = varlap.BNN(torch.nn.Linear(2, 3))
        >>> objective = VL(num_data=100, variances="closed-form", beta_warmup_steps=0)
        >>> _ = objective(bnn, torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))
        >>> objective.update_variances(bnn)
        >>> bool((bnn.log_sigma["weight"] <= bnn.prior_scale["weight"].log()).all())
        True
        """
        self._calls_since_update = 0
        if not (self.sets_variances and self._variance_fisher):
            return
        bnn.refit_prior()
        if beta is None:
            beta = self.beta_at(self.last_step if step is None else step)
        bnn.set_optimal_variances(self._variance_fisher.mean(), self.num_data, beta)

    def updates_after(self, data: DataTerm) -> Updates:
        """Add this step's Fisher to the running mean for the closed form; the weight of skipped steps never enters."""
        return [] if data.diagonal is None else self._variance_updates(data.diagonal)

    def _variance_updates(self, diagonal: Gradients) -> Updates:
        return [(self._variance_fisher, self._variance_fisher.including(diagonal)[1])] if self.sets_variances else []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that `state_dict` returned; the next network is the one that it is about."""
        super().load_state_dict(state)
        self._owner, self._calls_without_curvature = None, -math.inf

    def __getstate__(self) -> dict[str, Any]:
        """A copy goes on with the network that it is called with next."""
        return super().__getstate__() | {"_owner": None}

    def running_means(self) -> dict[str, RunningMean]:
        """Return the running Fisher of the closed form, and what `Fisher(memory=...)` remembers."""
        running = {"variance_fisher": self._variance_fisher} if self.sets_variances else {}
        if self.curvature.memory:
            running |= {"fisher": self._fisher, "gradient": self._gradient}
        return running
