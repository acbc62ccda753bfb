"""Claims where everything is known: linear regression with known noise, for which VL is exact.

The oracle writes the posterior down: with Φ = [x, 1], noise² = v and prior precisions β/s², each output's posterior is
N(A⁻¹ Φᵀy/v, β A⁻¹) with A = ΦᵀΦ/v + β/s². Mean field keeps the mean, and its variances are β / diag(A).
"""

import math

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence

import varlap
from cases import CASES

N, D, K = 11, 3, 2


def model(bias=True, orthogonal=False):
    """Linear regression in float64 with correlated (or orthogonal) inputs and a noise that is known."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    x = x @ torch.tensor([[1.0, 0.8, 0.0], [0.0, 0.6, 0.3], [0.0, 0.0, 0.9]], dtype=torch.float64)
    if orthogonal:  # also to the column of ones
        ones = torch.ones(N, 1, dtype=torch.float64)
        x = torch.linalg.qr(torch.cat([ones, x], 1))[0][:, 1:] * torch.tensor([3.0, 2.0, 1.0])
    y = torch.randn(N, K, generator=generator, dtype=torch.float64) + x[:, :1]
    bnn = varlap.BNN(nn.Linear(D, K, bias=bias).double(), varlap.Gaussian(noise=0.6, learnt=False).double())
    return bnn, x, y


def flat(bnn, tensors):
    """Rows of outputs, columns of Φ."""
    parts = [tensors["weight"], *([tensors["bias"][:, None]] if "bias" in tensors else [])]
    return torch.cat([part.detach().expand(K, -1) for part in parts], 1)


class Posterior:
    """The closed form."""

    def __init__(self, bnn, x, y, beta=1.0):
        bias = "bias" in bnn.log_sigma
        self.phi = torch.cat([x, torch.ones(N, 1, dtype=x.dtype)], 1) if bias else x
        self.y, self.beta = y, beta
        self.noise = bnn.likelihood.log_noise.exp()
        scales = [bnn.prior_scale["weight"]] * D + ([bnn.prior_scale["bias"]] if bias else [])
        self.prior_scale = torch.stack(scales)
        self.precision = self.phi.T @ self.phi / self.noise**2 + torch.diag(beta / self.prior_scale**2)
        self.mean = torch.linalg.solve(self.precision, self.phi.T @ y / self.noise**2).T
        self.variance = (beta / self.precision.diagonal()).expand(K, -1)

    def log_evidence(self):
        covariance = self.phi * self.prior_scale**2 @ self.phi.T + self.noise**2 * torch.eye(N, dtype=torch.float64)
        return MultivariateNormal(torch.zeros(N, dtype=torch.float64), covariance).log_prob(self.y.T).sum()

    def elbo(self, mean, log_sigma):
        """E_q[log p(y|w)] − β KL, summed over the data: the residual, and what the weights' variances add to it."""
        residual = (self.y.T - mean @ self.phi.T).square().sum()
        spread = ((2 * log_sigma).exp() @ self.phi.square().T).sum()
        constant = -N * K * (0.5 * math.log(2 * math.pi) + self.noise.log())
        kl = kl_divergence(Normal(mean, log_sigma.exp()), Normal(torch.zeros_like(mean), self.prior_scale)).sum()
        return constant - (residual + spread) / (2 * self.noise**2) - self.beta * kl


def exact_vl(beta=1.0):
    return varlap.VL(N, beta, curvature=varlap.ExactFisher())


def minimise(bnn, objective, x, y):
    """LBFGS, then Newton's method on the gradient with a differenced Jacobian, down to rounding."""
    parameters = [*bnn.means().values(), *bnn.log_sigma.values()]

    def loss_at(point):
        with torch.no_grad():
            nn.utils.vector_to_parameters(point, parameters)
        bnn.zero_grad()
        loss = N / objective.beta * objective(bnn, x, y).loss
        loss.backward()
        return loss.detach(), torch.cat([p.grad.flatten() for p in parameters])

    optimizer = torch.optim.LBFGS(parameters, max_iter=30, line_search_fn="strong_wolfe")
    optimizer.step(lambda: loss_at(nn.utils.parameters_to_vector(parameters))[0])
    point, width = nn.utils.parameters_to_vector(parameters).detach(), 1e-5
    for _ in range(2):
        shifts = width * torch.eye(len(point), dtype=point.dtype)
        jacobian = torch.stack([loss_at(point + s)[1] - loss_at(point - s)[1] for s in shifts]) / (2 * width)
        point = point - torch.linalg.solve(jacobian, loss_at(point)[1])
    assert loss_at(point)[1].abs().max() < 1e-9


def put(bnn, mean, variance):
    """Set means and variances from rows [output, column of Φ]."""
    with torch.no_grad():
        for target, rows in ((bnn.means(), mean), (bnn.log_sigma, 0.5 * variance.log())):
            target["weight"].copy_(rows[:, :D])
            if "bias" in bnn.log_sigma:
                target["bias"].copy_(rows[:, D])


# -- the optimum -------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:LBFGS trains")  # the optimizer here knows curvature, and needs no multiplier
@pytest.mark.parametrize("beta", [1.0, 0.1, 3.0])
@pytest.mark.parametrize("bias", [True, False])
def test_optimum_equals_the_mean_field_closed_form(beta, bias):
    bnn, x, y = model(bias)
    exact = Posterior(bnn, x, y, beta)
    minimise(bnn, exact_vl(beta), x, y)
    assert (flat(bnn, bnn.means()) - exact.mean).abs().max() < 1e-10
    assert ((2 * flat(bnn, bnn.log_sigma)).exp() - exact.variance).abs().max() < 1e-10


@pytest.mark.parametrize("beta", [1.0, 0.1, 3.0])
def test_gradient_vanishes_at_the_mean_field_closed_form_and_only_there(beta):
    bnn, x, y = model()
    exact = Posterior(bnn, x, y, beta)
    put(bnn, exact.mean, exact.variance)
    exact_vl(beta)(bnn, x, y).loss.backward()
    trained = [*bnn.means().values(), *bnn.log_sigma.values()]
    assert max(p.grad.abs().max() for p in trained) < 1e-12
    put(bnn, exact.mean + 1e-3, exact.variance * 1.01)
    bnn.zero_grad()
    exact_vl(beta)(bnn, x, y).loss.backward()
    assert min(p.grad.abs().max() for p in trained) > 1e-6


# -- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_elbo_equals_the_exact_elbo_anywhere(beta):
    bnn, x, y = model()
    exact = Posterior(bnn, x, y, beta)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        draws = torch.randn(2, K, D + 1, generator=generator, dtype=torch.float64)
        put(bnn, draws[0], draws[1].exp())
        expected = exact.elbo(flat(bnn, bnn.means()), flat(bnn, bnn.log_sigma))
        terms = exact_vl(beta)(bnn, x, y)
        assert abs(N * terms.elbo - expected) < 1e-10 * (1 + abs(expected))
        assert abs(terms.loss + terms.elbo) == 0


def test_elbo_at_the_optimum_misses_the_evidence_by_the_kl_between_mean_field_and_full_posterior():
    bnn, x, y = model()
    exact = Posterior(bnn, x, y)
    put(bnn, exact.mean, exact.variance)
    mean_field = MultivariateNormal(exact.mean, torch.diag_embed(exact.variance))
    gap = kl_divergence(mean_field, MultivariateNormal(exact.mean, exact.precision.inverse())).sum()
    assert gap > 0.1  # the inputs are correlated
    assert abs(N * exact_vl()(bnn, x, y).elbo - (exact.log_evidence() - gap)) < 1e-10


def test_determinant_objective_equals_the_log_evidence_at_its_optimum():
    bnn, x, y = model()
    exact = Posterior(bnn, x, y)
    put(bnn, exact.mean, exact.variance)
    terms = varlap.VLDeterminant(N)(bnn, x, y)
    assert abs(N * terms.elbo - exact.log_evidence()) < 1e-10
    terms.loss.backward()
    assert max(mean.grad.abs().max() for mean in bnn.means().values()) < 1e-12
    put(bnn, exact.mean + 0.01, exact.variance)
    assert N * varlap.VLDeterminant(N)(bnn, x, y).elbo < exact.log_evidence() - 1e-4


@pytest.mark.parametrize("beta", [0.3, 2.0])
def test_determinant_objective_equals_the_tempered_evidence(beta):
    """β log ∫ p(y|w)^(1/β) p(w) dw: for a Gaussian, the evidence with noise β v and its constants put back."""
    bnn, x, y = model()
    exact = Posterior(bnn, x, y, beta)
    put(bnn, exact.mean, exact.variance)
    wide = beta * exact.noise**2
    covariance = exact.phi * exact.prior_scale**2 @ exact.phi.T + wide * torch.eye(N, dtype=torch.float64)
    evidence = MultivariateNormal(torch.zeros(N, dtype=torch.float64), covariance).log_prob(y.T).sum()
    widened = N * K * 0.5 * (torch.log(2 * math.pi * wide) - torch.log(2 * math.pi * exact.noise**2) / beta)
    assert abs(N * varlap.VLDeterminant(N, beta)(bnn, x, y).elbo - beta * (evidence + widened)) < 1e-10


@pytest.mark.parametrize("antithetic", [False, True])
def test_sampled_weights_average_to_the_exact_elbo(antithetic):
    """800 draws; |z| < 4.5 has a false-alarm rate of 7e-6 for each of the two tests."""
    bnn, x, y = model()
    exact = Posterior(bnn, x, y, 0.5)
    put(bnn, exact.mean + 0.3, 4 * exact.variance)
    objective = varlap.VI(N, 0.5, num_samples=2, antithetic=antithetic)
    with torch.no_grad():
        values = torch.stack([N * objective(bnn, x, y, step=step).elbo for step in range(800)])
    expected = exact.elbo(flat(bnn, bnn.means()), flat(bnn, bnn.log_sigma))
    at_mean = N * varlap.MAP(N, beta=0.0)(bnn, x, y).elbo - 0.5 * bnn.kl().detach()
    standard_error = values.std() / math.sqrt(len(values))
    assert abs(values.mean() - expected) < 4.5 * standard_error
    assert abs(values.mean() - at_mean) > 10 * standard_error  # the variances' share is seen
    assert (values > at_mean).any() == (not antithetic)  # a pair of ε and −ε cancels what is linear in ε


def test_hessian_objective_equals_the_fisher_one_on_an_orthogonal_design():
    """There H = −F, and Hutchinson's probes are exact, since H is diagonal."""
    bnn, x, y = model(orthogonal=True)
    found, expected = varlap.VLHessian(N, 0.5)(bnn, x, y), exact_vl(0.5)(bnn, x, y)
    assert expected.curvature > 1e-3
    assert abs(found.curvature - expected.curvature) < 1e-12
    assert abs(found.loss - expected.loss) < 1e-12


# -- minibatches -------------------------------------------------------------------------------------------------


def loss_and_gradients(bnn, objective, x, y):
    bnn.zero_grad()
    loss = objective(bnn, x, y).loss
    loss.backward()
    return [loss.detach()] + [p.grad.clone() for p in bnn.parameters() if p.grad is not None]


def test_minibatch_losses_weighted_by_size_average_to_the_full_loss():
    bnn, x, y = model()
    whole = loss_and_gradients(bnn, exact_vl(0.5), x, y)
    parts = [(3, loss_and_gradients(bnn, exact_vl(0.5), x[:3], y[:3]))]
    parts += [(N - 3, loss_and_gradients(bnn, exact_vl(0.5), x[3:], y[3:]))]
    for position, expected in enumerate(whole):
        average = sum(size / N * part[position] for size, part in parts)
        assert (average - expected).abs().max() < 1e-12


def take(x, items):
    if isinstance(x, dict):
        return {name: part[items] for name, part in x.items()}
    return tuple(part[items] for part in x) if isinstance(x, tuple) else x[items]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_minibatch_losses_average_to_the_full_loss_on_any_network_that_does_not_couple_its_items(case):
    """Batch norm couples them in training mode, where the claim fails; in evaluation mode it holds again."""
    bnn, x, y = case.make()
    objective = varlap.VL(20, 0.5, curvature=varlap.ExactFisher())

    def error():
        whole = loss_and_gradients(bnn, objective, x, y)
        first = loss_and_gradients(bnn, objective, take(x, slice(2)), y[:2])
        second = loss_and_gradients(bnn, objective, take(x, slice(2, None)), y[2:])
        averages = [0.4 * a + 0.6 * b for a, b in zip(first, second, strict=True)]
        return max((a - b).abs().max().item() for a, b in zip(averages, whole, strict=True))

    if case.name == "batch-norm":
        assert error() > 1e-3
        bnn.eval()
    assert error() < 1e-12


# -- Laplace's method --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [1.0, 0.1])
@pytest.mark.parametrize("curvature", ["fisher", "hessian"])
def test_laplace_gives_the_mean_field_variances_and_vl_agrees(curvature, beta):
    bnn, x, y = model()
    exact = Posterior(bnn, x, y, beta)
    put(bnn, exact.mean, torch.ones_like(exact.variance))
    varlap.laplace(bnn, (x, y), beta, curvature=curvature, batch_size=4)
    assert ((2 * flat(bnn, bnn.log_sigma)).exp() - exact.variance).abs().max() < 1e-10
    exact_vl(beta)(bnn, x, y).loss.backward()
    assert max(p.grad.abs().max() for p in bnn.log_sigma.values()) < 1e-12


def test_laplace_with_sampled_labels_is_right_on_average():
    """300 seeds, 8 weights: |z| < 4.5 for all has a false-alarm rate below 8 × 7e-6 = 6e-5."""
    bnn, x, y = model()
    exact = Posterior(bnn, x, y)
    found = torch.stack(
        [
            flat(bnn, varlap.laplace(bnn, (x, y), curvature="sampled-fisher", seed=seed, batch_size=4))
            for seed in range(300)
        ]
    )
    expected = (exact.phi.square().sum(0) / exact.noise**2 / N).expand(K, -1)
    z = (found.mean(0) - expected) / (found.std(0) / math.sqrt(len(found)))
    assert z.abs().max() < 4.5
    spread = (2 * exact.phi.pow(4).sum(0)).sqrt() / exact.noise**2 / N  # of one draw: var ε² = 2
    assert (found.std(0) / spread - 1).abs().max() < 0.3
