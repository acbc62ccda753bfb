"""Maximum a posteriori, Eq. 6: the mode that Laplace's method and all comparisons start from."""

import torch

from varlap.curvature.protocol import check_differentiable, forward
from varlap.errors import ConfigError
from varlap.objectives.objective import Context, DataTerm, Objective, gradients_of


class MAP(Objective):
    """Eq. 6 per datum: (1/S) Σ log p(y|x, μ) − (β/N) Σ ½ (μ − m)²/s². The variances stay as they are.

    >>> import torch, varlap
    >>> bnn = varlap.BNN(torch.nn.Linear(2, 3))
    >>> terms = MAP(num_data=100)(bnn, torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))
    >>> terms.loss.backward()
    >>> bnn.network.weight.grad.shape, bnn.log_sigma["weight"].grad
    (torch.Size([3, 2]), None)
    """

    uses_variances = False

    def __init__(
        self, num_data: int | None = None, beta: float = 1.0, *, seed: int = 0, beta_warmup_steps: int = 0
    ) -> None:
        super().__init__(num_data, beta, seed, beta_warmup_steps)

    def inspect(self, context: Context) -> None:
        """Refuse a learnt prior, which would shrink without bound."""
        refuse_learnt_prior(self, context)

    def data_term(self, context: Context) -> DataTerm:
        """Evaluate log p(y|x, μ)."""
        return mean_data_term(context)


def mean_data_term(context: Context) -> DataTerm:
    """Return the log-likelihood at the means alone, with its gradient."""
    total = forward(context.bnn, context.batch).log_likelihood_sum(context.bnn)
    log_likelihood = total / context.batch.size
    gradients = {}
    if context.with_gradients:
        check_differentiable(log_likelihood)
        gradients = gradients_of([log_likelihood], [-torch.ones_like(log_likelihood)], context)
    return DataTerm(log_likelihood, torch.zeros_like(log_likelihood), gradients, {})


def refuse_learnt_prior(objective: Objective, context: Context) -> None:
    """Raise for an empirical-Bayes prior: without variances the objective grows without bound as s → 0."""
    if context.bnn.prior.learnt:
        name = type(objective).__name__
        raise ConfigError(
            f"{name} cannot learn the prior's scale: without variances its objective is unbounded as s goes to 0; use "
            "varlap.FanInPrior() or varlap.OneScalePrior(s), or a method with variances such as varlap.VL"
        )
