"""Variational Laplace with the Hessian instead of the Fisher, Eq. 20: right to second order, and pathological."""

from dataclasses import dataclass

import torch
from torch import Tensor

from varlap.curvature import Hessian
from varlap.curvature.protocol import checked_curvature
from varlap.errors import ConfigError
from varlap.objectives.cancelled import cancelled
from varlap.objectives.curvature_term import curvature_data_term
from varlap.objectives.first_look import first_look
from varlap.objectives.kinks import without_second_derivative
from varlap.objectives.objective import Context, DataTerm, Objective
from varlap.posterior.bnn import BNN


class VLHessian(Objective):
    """Eq. 20 per datum: (1/S) Σ log p(y|x, μ) + ½ Σ σ² h − (β/N) KL, with h the Hessian's diagonal per datum.

    Where N h > β/s² the objective grows without bound in σ (Eq. 24), which is why the paper turns to the Fisher.
    `unbounded_variances` counts such weights.

    Args:
        num_data: number of items in the training set, N.
        beta: tempering of the KL.
        curvature: `Hessian(every=..., num_probes=...)`, Hutchinson's estimate.
        seed: of the probes.
        beta_warmup_steps: ramp β up over so many steps, from the first of each training.

    >>> import torch, varlap
    >>> bnn = varlap.BNN(torch.nn.Linear(2, 3))
    >>> objective = VLHessian(num_data=100)
    >>> objective(bnn, torch.ones(4, 2), torch.tensor([0, 1, 2, 0])).loss.backward()
    >>> bnn.log_sigma["bias"].grad.shape
    torch.Size([3])
    """

    def __init__(
        self,
        num_data: int | None = None,
        beta: float = 1.0,
        *,
        curvature: Hessian | None = None,
        seed: int = 0,
        beta_warmup_steps: int = 0,
    ) -> None:
        super().__init__(num_data, beta, seed, beta_warmup_steps)
        self.curvature = checked_curvature("VLHessian", Hessian() if curvature is None else curvature)
        if self.curvature.memory:
            raise ConfigError(
                f"VLHessian(curvature={self.curvature!r}) cannot remember a curvature; leave memory out, or use VL"
            )

    def inspect(self, context: Context) -> None:
        """Warn once about activations that lose their curvature."""
        first_look(self, context, without_second_derivative, cancelled)

    def data_term(self, context: Context) -> DataTerm:
        """Evaluate the log-likelihood and ½ Σ σ² h from one forward pass."""
        return curvature_data_term(context, self.curvature)


@dataclass(frozen=True)
class UnboundedVariances:
    """How many weights have N h > β/s², by parameter: there VLHessian's σ has no optimum.

    >>> UnboundedVariances({"weight": 3, "bias": 1}, num_weights=20).count
    4
    """

    by_parameter: dict[str, int]
    num_weights: int

    @property
    def count(self) -> int:
        """The number of such weights in the whole network."""
        return sum(self.by_parameter.values())


@torch.no_grad()
def unbounded_variances(bnn: BNN, hessian: dict[str, Tensor], num_data: int, beta: float) -> UnboundedVariances:
    """Count the weights for which the paper predicts a variance without bound (Eq. 24, tempered): N h > β/s².

    `hessian` is the Hessian's diagonal per datum, as `varlap.hessian_diagonal(bnn, data)` returns it.

    >>> import torch, varlap
    >>> bnn = varlap.BNN(torch.nn.Linear(2, 1), likelihood="gaussian")
    >>> flat = {"weight": torch.tensor([[0.5, -1.0]]), "bias": torch.tensor([-1.0])}
    >>> unbounded_variances(bnn, flat, num_data=100, beta=1.0).count
    1
    """
    counts = {name: int((num_data * h > beta / bnn.prior_scale[name].square()).sum()) for name, h in hessian.items()}
    return UnboundedVariances(counts, bnn.num_weights())
