"""The data term of VL and VL(H): the log-likelihood at the mean and a penalty on the curvature (Eqs. 19, 28)."""

import torch

from varlap.curvature import Curvature
from varlap.curvature.differentiable import twice_differentiable
from varlap.objectives.map import mean_data_term
from varlap.objectives.objective import Context, DataTerm, gradients_of


def curvature_data_term(context: Context, curvature: Curvature, *, learn_variances: bool = True) -> DataTerm:
    """Return log p(y|x, μ) and k · ½ Σ σ² f, with gradients, for a diagonal curvature f of weight k in this step.

    In μ the penalty's gradient is one product of a Hessian with a vector, pulled back together with that of
    the log-likelihood; in log σ it is closed form, k · σ² f.
    """
    bnn, wanted = context.bnn, context.with_gradients
    weight = curvature.weight(context.streams.step)
    if not weight:
        data = mean_data_term(context)
        unmoved = {name: torch.zeros_like(log_sigma) for name, log_sigma in bnn.log_sigma.items()}
        return DataTerm(
            data.log_likelihood, data.curvature, data.gradients, unmoved if wanted and learn_variances else {}
        )
    with twice_differentiable(bnn.network):
        log_likelihood, estimate = curvature.estimate(bnn, context.batch, context.streams, create_graph=wanted)
    diagonal = estimate.diagonal()
    variance = {name: weight * (2 * log_sigma.detach()).exp() for name, log_sigma in bnn.log_sigma.items()}
    in_log_sigma = {name: variance[name] * f for name, f in diagonal.items()}
    penalty = 0.5 * torch.stack([term.sum().to(log_likelihood.dtype) for term in in_log_sigma.values()]).sum()
    if not wanted:
        return DataTerm(log_likelihood, penalty, {}, {}, diagonal)
    outputs, cotangents = [log_likelihood], [-torch.ones_like(log_likelihood)]
    for tensor, cotangent in estimate.pull_back(variance):
        if tensor.requires_grad:
            outputs.append(tensor)
            cotangents.append(cotangent)
    return DataTerm(
        log_likelihood,
        penalty,
        gradients_of(outputs, cotangents, context),
        {name: term.sum_to_size(bnn.log_sigma[name].shape) for name, term in in_log_sigma.items()}
        if learn_variances
        else {},
        diagonal,
    )
