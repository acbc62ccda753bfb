"""The data term of VL and VL(H): the log-likelihood at the mean and a penalty on the curvature (Eqs. 19, 28, 30)."""

from dataclasses import replace

import torch
from torch import Tensor

from varlap.curvature import Curvature
from varlap.curvature.differentiable import twice_differentiable
from varlap.curvature.protocol import Estimate
from varlap.objectives.map import mean_data_term
from varlap.objectives.objective import Context, DataTerm, Gradients, gradients_of
from varlap.objectives.running import RunningMean, Updates


def curvature_data_term(context: Context, curvature: Curvature) -> DataTerm:
    """Return log p(y|x, μ) and k · ½ Σ σ² f, with gradients, for a diagonal curvature f of weight k in this step.

    These are the first term of Eq. 30 and, by `penalty`, its middle one; `Objective` adds the KL. In μ the gradient of
    the penalty is one product of a Hessian with a vector, pulled back together with that of the log-likelihood; in
    log σ it is closed form, k · σ² f.
    """
    weight = curvature.weight(context.streams.step)
    if not weight:
        return without_curvature(mean_data_term(context), context)
    log_likelihood, estimate = _estimate(context, curvature)
    diagonal = estimate.diagonal()
    middle_term, in_log_sigma = penalty(context.variances, diagonal, weight)
    if not context.with_gradients:
        return DataTerm(log_likelihood, middle_term, {}, {}, diagonal)
    outputs, cotangents = _pull_back(context.variances, estimate, weight)
    gradients = _pulled([log_likelihood, *outputs], [-torch.ones_like(log_likelihood), *cotangents], context)
    return DataTerm(log_likelihood, middle_term, gradients, in_log_sigma, diagonal)


def penalty(variances: Gradients, diagonal: Gradients, weight: float) -> tuple[Tensor, Gradients]:
    """Return k · ½ Σ σ² f with f = S ḡ², Eq. 30, the middle term without its minus; and its gradient in log σ, k σ² f.

    >>> penalty({"weight": torch.tensor([[1.0]])}, {"weight": torch.tensor([[3.0]])}, weight=2)
    (tensor(3.), {'weight': tensor([[6.]])})
    """
    products = _weighted(weight, {name: variances[name] * f for name, f in diagonal.items()})
    sums = [product.sum() for product in products.values()]
    total = 0.5 * torch.stack([value.to(sums[0].dtype) for value in sums]).sum()
    return total, {name: product.sum_to_size(variances[name].shape) for name, product in products.items()}


def without_curvature(data: DataTerm, context: Context) -> DataTerm:
    """Return the data term of a step in which the penalty moves nothing, log σ included."""
    if not context.with_gradients:
        return data
    unmoved = {name: torch.zeros_like(log_sigma) for name, log_sigma in context.bnn.log_sigma.items()}
    return replace(data, log_sigma_gradients=unmoved)


def renewed(
    context: Context, curvature: Curvature, fisher: RunningMean, gradient: RunningMean
) -> tuple[Gradients, Updates]:
    """Evaluate the curvature in a pass of its own: f, and new running means of f and of the penalty's gradient in μ.

    Nothing else in a step depends on it, so that a compiled step can compute it beside the rest.
    """
    bnn = context.bnn
    with bnn.spare_buffers():  # running statistics move once a step, by the pass over the real batch
        _, estimate = _estimate(context, curvature)
        new = estimate.diagonal()
        updates = [(fisher, fisher.including(new)[1])]
        if context.with_gradients:
            pulled = _pulled(*_pull_back(context.variances, estimate, 1), context)
            # An input belongs to its own batch, so its gradient is not remembered.
            kept = {name: g for name, g in pulled.items() if not name.startswith("x")}
            updates.append((gradient, gradient.including(kept)[1]))
    return new, updates


def with_remembered(data: DataTerm, context: Context, fisher: RunningMean, gradient: RunningMean) -> DataTerm:
    """Add Eq. 30's middle term, with f and its gradient in μ as they are remembered, and with weight 1."""
    middle_term, in_log_sigma = penalty(context.variances, fisher.mean(), 1)
    if not context.with_gradients:
        return replace(data, curvature=middle_term)
    in_means = gradient.mean()
    gradients = {name: g + in_means[name] if name in in_means else g for name, g in data.gradients.items()}
    return replace(data, curvature=middle_term, gradients=gradients, log_sigma_gradients=in_log_sigma)


def _estimate(context: Context, curvature: Curvature) -> tuple[Tensor, Estimate]:
    with twice_differentiable(context.bnn.network, curvature.num_derivatives):
        return curvature.estimate(context.bnn, context.batch, context.streams, create_graph=context.with_gradients)


def _pulled(outputs: list[Tensor], cotangents: list[Tensor], context: Context) -> Gradients:
    """Pull back under the kernels of the forward pass, which a checkpoint repeats here."""
    with twice_differentiable(context.bnn.network):
        return gradients_of(outputs, cotangents, context)


def _pull_back(variances: Gradients, estimate: Estimate, weight: float) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [pair for pair in estimate.pull_back(_weighted(weight, variances)) if pair[0].requires_grad]
    return [tensor for tensor, _ in pairs], [cotangent for _, cotangent in pairs]


def _weighted(weight: float, tensors: Gradients) -> Gradients:
    return tensors if weight == 1 else {name: weight * tensor for name, tensor in tensors.items()}
