"""The data term of VL and VL(H): the log-likelihood at the mean and a penalty on the curvature (Eqs. 19, 28)."""

from dataclasses import replace

import torch
from torch import Tensor

from varlap.curvature import Curvature
from varlap.curvature.differentiable import twice_differentiable
from varlap.curvature.protocol import Estimate
from varlap.errors import NetworkError
from varlap.objectives.map import mean_data_term
from varlap.objectives.objective import Context, DataTerm, Gradients, gradients_of
from varlap.objectives.running import RunningMean
from varlap.posterior.bnn import BNN


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
        return replace(data, log_sigma_gradients=unmoved if wanted and learn_variances else {})
    log_likelihood, estimate = _estimate(context, curvature)
    diagonal = estimate.diagonal()
    penalty, in_log_sigma = _penalty(bnn, diagonal, weight)
    if not wanted:
        return DataTerm(log_likelihood, penalty, {}, {}, diagonal)
    outputs, cotangents = _pull_back(bnn, estimate, weight)
    gradients = _pulled([log_likelihood, *outputs], [-torch.ones_like(log_likelihood), *cotangents], context)
    return DataTerm(log_likelihood, penalty, gradients, in_log_sigma if learn_variances else {}, diagonal)


def remembered_data_term(
    context: Context,
    curvature: Curvature,
    fisher: RunningMean,
    gradient: RunningMean,
    *,
    learn_variances: bool = True,
) -> DataTerm:
    """Return the same with weight 1 in every step, for running means of f and of the penalty's gradient in μ.

    They take in a new value in the steps that evaluate the curvature, and serve as they are in the others.
    """
    bnn = context.bnn
    if not curvature.weight(context.streams.step):
        data = mean_data_term(context)
        diagonal, in_means, updates, new = fisher.mean(), gradient.mean(), [], None
    else:
        log_likelihood, estimate = _estimate(context, curvature)
        new = estimate.diagonal()
        if not context.with_gradients:
            return DataTerm(log_likelihood, _penalty(bnn, fisher.including(new)[0], 1)[0], {}, {}, new)
        own = _pulled([log_likelihood], [-torch.ones_like(log_likelihood)], context, retain_graph=True)
        data = DataTerm(log_likelihood, torch.zeros_like(log_likelihood), own, {})
        outputs, cotangents = _pull_back(bnn, estimate, 1)
        pulled = _pulled(outputs, cotangents, context)
        diagonal, fisher_sums = fisher.including(new)
        # An input belongs to its own batch, so its gradient is not remembered.
        kept = {name: g for name, g in pulled.items() if not name.startswith("x")}
        in_means, gradient_sums = gradient.including(kept)
        updates = [(fisher, fisher_sums), (gradient, gradient_sums)]
    penalty, in_log_sigma = _penalty(bnn, diagonal, 1)
    if not context.with_gradients:
        return replace(data, curvature=penalty)
    gradients = {name: g + in_means[name] if name in in_means else g for name, g in data.gradients.items()}
    return DataTerm(data.log_likelihood, penalty, gradients, in_log_sigma if learn_variances else {}, new, updates)


def _estimate(context: Context, curvature: Curvature) -> tuple[Tensor, Estimate]:
    with twice_differentiable(context.bnn.network, curvature.num_derivatives):
        return curvature.estimate(context.bnn, context.batch, context.streams, create_graph=context.with_gradients)


def _pulled(
    outputs: list[Tensor], cotangents: list[Tensor], context: Context, *, retain_graph: bool = False
) -> Gradients:
    """Pull back under the kernels of the forward pass, which a checkpoint repeats here."""
    with twice_differentiable(context.bnn.network):
        try:
            return gradients_of(outputs, cotangents, context, retain_graph=retain_graph)
        except NotImplementedError as error:
            raise NetworkError(
                f"torch has no second derivative for a part of the network: {error} Use another layer there (for "
                "nn.EmbeddingBag: nn.Embedding and a mean), or an objective without curvature: varlap.VI or varlap.MAP"
            ) from error


def _penalty(bnn: BNN, diagonal: Gradients, weight: float) -> tuple[Tensor, Gradients]:
    """Return k · ½ Σ σ² f and its gradient in log σ, k · σ² f."""
    products = {name: weight * (2 * bnn.log_sigma[name].detach()).exp() * f for name, f in diagonal.items()}
    sums = [product.sum() for product in products.values()]
    penalty = 0.5 * torch.stack([value.to(sums[0].dtype) for value in sums]).sum()
    return penalty, {name: product.sum_to_size(bnn.log_sigma[name].shape) for name, product in products.items()}


def _pull_back(bnn: BNN, estimate: Estimate, weight: float) -> tuple[list[Tensor], list[Tensor]]:
    variance = {name: weight * (2 * log_sigma.detach()).exp() for name, log_sigma in bnn.log_sigma.items()}
    pairs = [pair for pair in estimate.pull_back(variance) if pair[0].requires_grad]
    return [tensor for tensor, _ in pairs], [cotangent for _, cotangent in pairs]
