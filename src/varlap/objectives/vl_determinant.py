"""The earlier Variational Laplace with the full log-determinant, Eq. 9: a reference for small networks."""

import torch
from torch import Tensor

from varlap.curvature.differentiable import twice_differentiable
from varlap.curvature.protocol import forward, gradients, mean_gradients
from varlap.errors import BatchError, ConfigError
from varlap.objectives.cancelled import cancelled
from varlap.objectives.first_look import first_look
from varlap.objectives.kinks import without_second_derivative
from varlap.objectives.map import refuse_learnt_prior
from varlap.objectives.objective import Context, DataTerm, Objective, gradients_of

MOST_WEIGHTS = 2_000


class VLDeterminant(Objective):
    """Eq. 9 per datum, with log|−H| (the sign that makes its logarithm exist) and its constants.

    The covariance is the best one, β (−H + β/s²)⁻¹, full and implied by μ, so `bnn.log_sigma` plays no part:

        elbo = log p(y|x, μ) − (β/2) Σ (μ − m)²/s² − (β/2) log|(−H + β S⁻¹) S/β|,    S = diag(s²)

    `terms.curvature` is the last term and `terms.kl` the quadratic one. The logarithm of a sum cannot be split into
    minibatches (Eq. 10), so each call must hold the whole training set.

    >>> import torch, varlap
    >>> bnn = varlap.BNN(torch.nn.Linear(2, 1), likelihood="gaussian")
    >>> x, y = torch.randn(8, 2), torch.randn(8, 1)
    >>> VLDeterminant(num_data=8)(bnn, x, y).loss.shape
    torch.Size([])
    """

    uses_variances = False

    def __init__(self, num_data: int | None = None, beta: float = 1.0, *, seed: int = 0) -> None:
        super().__init__(num_data, beta, seed)
        if self.beta == 0:
            raise ConfigError("VLDeterminant(beta=0): the log-determinant needs a positive beta")

    def inspect(self, context: Context) -> None:
        """Refuse minibatches, large networks and learnt priors."""
        refuse_learnt_prior(self, context)
        first_look(self, context, without_second_derivative, cancelled)
        if context.batch.size != self.num_data:
            raise BatchError(
                "VLDeterminant needs the whole training set in one call (Eq. 10 has no minibatches): "
                f"num_data={self.num_data}, but the batch has {context.batch.size} items; use varlap.VL for minibatches"
            )
        if context.bnn.num_weights() > MOST_WEIGHTS:
            raise ConfigError(
                f"VLDeterminant builds the full Hessian of {context.bnn.num_weights()} weights; it is a reference for "
                f"up to {MOST_WEIGHTS}; use varlap.VL"
            )

    def data_term(self, context: Context) -> DataTerm:
        """Evaluate the log-likelihood and (β/2N) log|(−H + β S⁻¹) S/β|."""
        bnn, beta = context.bnn, context.beta
        with twice_differentiable(bnn.network, num_derivatives=3):
            total = forward(bnn, context.batch).log_likelihood_sum(bnn)
        means = bnn.means()
        first = mean_gradients(bnn, total, create_graph=True)
        flat = torch.cat([g.flatten() for g in first.values()])
        entries = flat if flat.requires_grad else []  # constant where the log-likelihood is linear
        rows = [gradients([e], means, create_graph=context.with_gradients, retain_graph=True) for e in entries]
        hessian = _stack(rows, flat)
        scale = torch.cat([bnn.prior_scale[name].expand(mean.shape).flatten() for name, mean in means.items()])
        scaled = -hessian * (scale[:, None] * scale / beta) + torch.eye(len(scale)).to(hessian)
        factor, failed = torch.linalg.cholesky_ex(scaled)
        if failed and bool(hessian.isfinite().all()):
            raise BatchError(
                "Eq. 9 has no value here: −H + β/s² is not positive definite at these means, so its logarithm does not "
                "exist; train with varlap.MAP first, raise beta, or use varlap.VL, whose Fisher never fails"
            )
        log_likelihood = total / context.batch.size
        penalty = beta * factor.diagonal().log().sum() / context.batch.size
        found = {}
        if context.with_gradients:
            found = gradients_of([penalty - log_likelihood], [torch.ones_like(penalty)], context)
        return DataTerm(log_likelihood, penalty, found, {})


def _stack(rows: list[dict[str, Tensor]], like: Tensor) -> Tensor:
    if not rows:
        return torch.zeros(len(like), len(like), dtype=like.dtype, device=like.device)
    return torch.stack([torch.cat([block.flatten() for block in row.values()]) for row in rows])
