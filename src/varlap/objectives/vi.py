"""Variational inference with sampled weights, Eqs. 3-5 and 11: the method that VL replaces."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from varlap.curvature.protocol import check_differentiable, forward
from varlap.errors import ConfigError
from varlap.objectives.cancelled import cancelled
from varlap.objectives.first_look import first_look
from varlap.objectives.objective import Context, DataTerm, Gradients, Objective, gradients_of
from varlap.seeds import checked_count


class VI(Objective):
    """Eq. 11 per datum, with E[log p(y|x, w)] estimated from weights w = μ + σ ε (Eqs. 4, 5) and the KL exact.

    Args:
        num_data: number of items in the training set.
        beta: tempering of the KL.
        num_samples: weight samples a step.
        antithetic: use each ε together with −ε (an even number of samples).
        seed: of the weight samples.
        beta_warmup_steps: ramp β up over so many steps, from the first of each training.

    >>> import torch, varlap
    >>> bnn = varlap.BNN(torch.nn.Linear(2, 3))
    >>> objective = VI(num_data=100, num_samples=2, antithetic=True)
    >>> objective(bnn, torch.ones(4, 2), torch.tensor([0, 1, 2, 0])).loss.backward()
    >>> bnn.log_sigma["weight"].grad.shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        num_data: int | None = None,
        beta: float = 1.0,
        *,
        num_samples: int = 1,
        antithetic: bool = False,
        seed: int = 0,
        beta_warmup_steps: int = 0,
    ) -> None:
        super().__init__(num_data, beta, seed, beta_warmup_steps)
        self.num_samples = checked_count("VI", "num_samples", num_samples)
        if antithetic and num_samples % 2:
            raise ConfigError(f"VI(antithetic=True) uses samples in pairs: num_samples={num_samples} must be even")
        self.antithetic = antithetic

    def inspect(self, context: Context) -> None:
        """Warn once about weights that batch norm cancels."""
        first_look(self, context, cancelled)

    def data_term(self, context: Context) -> DataTerm:
        """Average the log-likelihood over weight samples."""
        return _average(self._terms(context), self.num_samples)

    def _terms(self, context: Context) -> Iterator[DataTerm]:
        bnn = context.bnn
        for number, noise in enumerate(self._noises(context)):
            # Running statistics move once a step, however many samples there are.
            with bnn.perturbed(noise), bnn.spare_buffers() if number else contextlib.nullcontext():
                term = _sampled_term(context, noise)
            yield term

    def _noises(self, context: Context) -> Iterator[dict[str, Tensor]]:
        generator = context.streams.generator("weights", context.bnn.device)
        for _ in range(self.num_samples // (2 if self.antithetic else 1)):
            noise = context.bnn.draw_noise(generator)
            yield noise
            if self.antithetic:
                yield {name: -epsilon for name, epsilon in noise.items()}


def _sampled_term(context: Context, noise: dict[str, Tensor]) -> DataTerm:
    """Evaluate one weight sample: with g the gradient in w, that in μ is g and that in log σ is g σ ε."""
    bnn = context.bnn
    log_likelihood = forward(bnn, context.batch).log_likelihood_sum(bnn) / context.batch.size
    gradients: Gradients = {}
    log_sigma_gradients: Gradients = {}
    if context.with_gradients:
        check_differentiable(log_likelihood)
        gradients = gradients_of([log_likelihood], [-torch.ones_like(log_likelihood)], context)
        for name, epsilon in noise.items():
            log_sigma = bnn.log_sigma[name].detach()
            product = gradients[f"network.{name}"] * log_sigma.exp() * epsilon
            log_sigma_gradients[name] = product.sum_to_size(log_sigma.shape)
    return DataTerm(log_likelihood.detach(), torch.zeros_like(log_likelihood), gradients, log_sigma_gradients)


def _average(terms: Iterator[DataTerm], num_samples: int) -> DataTerm:
    """Average over samples as they come, so that two of them are held at a time."""
    total = next(terms)
    for term in terms:
        total = DataTerm(
            total.log_likelihood + term.log_likelihood,
            total.curvature,
            {name: gradient + term.gradients[name] for name, gradient in total.gradients.items()},
            {name: g + term.log_sigma_gradients[name] for name, g in total.log_sigma_gradients.items()},
        )
    return DataTerm(
        total.log_likelihood / num_samples,
        total.curvature,
        {name: gradient / num_samples for name, gradient in total.gradients.items()},
        {name: gradient / num_samples for name, gradient in total.log_sigma_gradients.items()},
    )
