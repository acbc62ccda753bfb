"""Claims about linearised prediction: draws against a dense Jacobian, the closed form against exact predictives."""

import copy
import logging
import math

import pytest
import torch
from torch import distributions, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import varlap
from cases import CASES
from varlap.errors import BatchError, ConfigError, NetworkError
from varlap.predict.closed_form import drawn_outputs, output_gaussian
from varlap.predict.draws import deviations
from varlap.predict.inputs import Inputs
from varlap.predict.linearised import Products, differentiable

pytestmark = pytest.mark.filterwarnings("ignore:batch norm follows Bayesian weights:varlap.errors.VarlapWarning")

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense_jacobian(bnn, x):
    """∂ outputs / ∂ weight by the real parameters, one output of one item at a time: [S, D, P], and the σ of each."""
    twin = copy.deepcopy(bnn).eval()
    means = twin.means()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        outputs = twin.outputs(x)
    rows = []
    for value in outputs.flatten():
        found = torch.autograd.grad(value, list(means.values()), retain_graph=True, allow_unused=True)
        parts = zip(found, means.values(), strict=True)
        rows.append(torch.cat([(torch.zeros_like(m) if g is None else g).flatten() for g, m in parts]))
    sigma = [twin.log_sigma[name].detach().exp().expand(mean.shape).flatten() for name, mean in means.items()]
    return outputs.detach(), torch.stack(rows).reshape(len(outputs), -1, bnn.num_weights()), torch.cat(sigma)


def assert_close(found, expected, tolerance=1e-10):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance


def assert_within_standard_errors(values, expected, most=4.0):
    """The mean over the first dimension is the expected one."""
    error = values.std(0) / math.sqrt(len(values))
    assert ((values.mean(0) - expected).abs() <= most * error + 1e-12).all()


class Encoder(nn.Module):
    """nn.MultiheadAttention and a whole encoder layer, whose fused paths have no derivative."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, activation="gelu"), 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(self.attention(x, x, x)[0]).mean(1))


class OldFunction(Function):
    """Without a jvp and without vmap, as users write them."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


class OnceFunction(OldFunction):
    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


class WithFunction(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.first, self.last = function, nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.function.apply(self.first(x)))


class Scaled(nn.Module):
    """With a weight that is a number, and one that is none at all."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return self.scale * self.layer(x) + self.nothing.sum()


def test_a_weight_that_is_a_number_counts_in_closed_form_and_none_at_all_is_left_out():
    torch.manual_seed(0)
    bnn, x = varlap.BNN(Scaled().double(), "gaussian"), torch.randn(5, 4, dtype=torch.float64)
    assert "nothing" not in bnn.log_sigma
    plain = torch.cat([x, torch.ones(5, 1, dtype=torch.float64)], 1).square()
    layer, scale = (bnn.log_sigma[name].exp().square() for name in ("layer.weight", "scale"))
    bias = bnn.log_sigma["layer.bias"].exp().square()
    of_layer = 1.5**2 * (plain @ torch.cat([layer, bias[:, None]], 1).T)
    expected = of_layer + bnn.network.layer(x).square() * scale
    found = bnn.predict(x, how="linearised", closed_form=True)
    torch.testing.assert_close(found.epistemic_variance, expected.detach(), rtol=1e-10, atol=0)
    varlap.laplace(bnn, (x.repeat(1000, 1), torch.zeros(5000, 3, dtype=torch.float64)))
    assert bnn.predict(x, how="sampled").epistemic_variance is not None


# -- draws ----------------------------------------------------------------------------------------------------------


@by_case
def test_draws_are_those_of_the_dense_jacobian(case):
    bnn, x, _ = case.make()
    outputs, jacobian, _ = dense_jacobian(bnn, x)
    prediction = bnn.predict(x, how="linearised", num_samples=7, seed=3)
    assert len(prediction.outputs) == 7
    for number, found in enumerate(prediction.outputs):
        change = torch.cat([part.flatten() for part in deviations(bnn, 3, number).values()])
        assert_close(found, outputs + (jacobian @ change).reshape(outputs.shape))


@pytest.mark.parametrize(
    ("network", "x"),
    [(Encoder, (5, 3, 4)), (lambda: WithFunction(OldFunction), (5, 4))],
    ids=["multi-head-attention", "own-function"],
)
def test_fused_attention_and_functions_without_a_forward_derivative_are_linearised_too(network, x):
    bnn, x = varlap.BNN(network()).double(), draw(*x)
    outputs, jacobian, sigma = dense_jacobian(bnn, x)
    prediction = bnn.predict(x, how="linearised", num_samples=2)
    for number, found in enumerate(prediction.outputs):
        change = torch.cat([part.flatten() for part in deviations(bnn, 0, number).values()])
        assert_close(found, outputs + jacobian @ change)
    covariance = output_gaussian(bnn.eval(), Inputs(bnn, x, None))[1]
    assert_close(covariance, (jacobian * sigma**2) @ jacobian.mT)


@by_case
def test_both_routes_of_differentiation_give_the_same_products(case, caplog):
    bnn, x, _ = case.make()
    bnn.eval()
    vectors = {name: draw(2, *mean.shape) for name, mean in bnn.means().items()}
    with differentiable(bnn.network):
        products = Products(bnn)
        assert_close(products._by_double_backward(x, vectors), products._by_forward_mode(x, vectors))


def test_the_second_route_is_noted_and_taken_only_where_the_first_fails(caplog):
    caplog.set_level(logging.INFO)
    x = draw(5, 4)
    varlap.BNN(nn.Linear(4, 3)).double().predict(x, how="linearised")
    assert "double backward" not in caplog.text
    varlap.BNN(WithFunction(OldFunction)).double().predict(x, how="linearised", num_samples=12)
    assert caplog.text.count("linearised by double backward, since forward-mode differentiation failed") == 1


def test_a_network_without_either_derivative_is_refused():
    bnn = varlap.BNN(WithFunction(OnceFunction)).double()
    message = (
        r"how='linearised' needs a network that can be differentiated forwards, or backwards twice, and this one "
        r"allows neither \(.*once_differentiable.*\); give its autograd.Function a jvp or a backward that can be "
        r"differentiated, or use how='sampled'"
    )
    with pytest.raises(NetworkError, match=message):
        bnn.predict(draw(5, 4), how="linearised")


def test_an_error_of_the_network_itself_is_passed_on():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        varlap.BNN(nn.Linear(4, 3)).predict(torch.zeros(2, 5), how="linearised")


@pytest.mark.parametrize(
    ("returned", "kind", "entry"),
    [
        (lambda outputs, x: (outputs, x), "a tuple", 0),
        (lambda outputs, x: {"x": x, "logits": outputs}, r"a dict with keys \['logits', 'x'\]", "logits"),
        (lambda outputs, x: {"scores": outputs, "x": x}, r"a dict with keys \['scores', 'x'\]", "scores"),
    ],
    ids=["tuple", "dict with logits", "dict without logits"],
)
def test_structured_outputs_are_refused_where_an_entry_must_be_chosen(returned, kind, entry):
    class Structured(nn.Linear):
        def forward(self, x):
            return returned(super().forward(x), x)

    class OwnLikelihood(varlap.Categorical):
        def predict(self, outputs):
            return super().predict(outputs[entry])

    bnn, x = varlap.BNN(Structured(4, 3), OwnLikelihood()), torch.zeros(2, 4)
    assert bnn.predict(x, how="sampled").probs.shape == (2, 3)
    message = (
        rf"how='linearised' needs one tensor, but the network returned {kind}; say which entry it is, "
        rf"for example BNN\(network, \.\.\., output={entry!r}\), or use how='sampled'"
    )
    chosen = varlap.BNN(Structured(4, 3), output=entry)
    for closed_form in (False, True):
        with pytest.raises(BatchError, match=message):
            bnn.predict(x, how="linearised", closed_form=closed_form)
        assert chosen.predict(x, how="linearised", closed_form=closed_form).probs.shape == (2, 3)


@pytest.mark.parametrize("closed_form", [False, True])
@pytest.mark.parametrize("network", [lambda: varlap.models.mlp(4, 3), lambda: WithFunction(OldFunction)])
def test_it_works_under_inference_mode_and_autocast(network, closed_form):
    bnn, x = varlap.BNN(network()), torch.randn(5, 4)
    expected = bnn.predict(x, how="linearised", closed_form=closed_form)
    with torch.inference_mode():
        found = bnn.predict(x * 1, how="linearised", closed_form=closed_form)
    torch.testing.assert_close(found.probs, expected.probs)
    with torch.autocast("cpu", torch.bfloat16):
        half = bnn.predict(x, how="linearised", closed_form=closed_form)
    assert half.probs.dtype == torch.float32
    torch.testing.assert_close(half.probs, expected.probs, rtol=0, atol=0.02)


# -- the closed form ------------------------------------------------------------------------------------------------


@by_case
def test_covariance_is_that_of_the_dense_jacobian(case):
    bnn, x, _ = case.make()
    outputs, jacobian, sigma = dense_jacobian(bnn, x)
    mean, covariance = output_gaussian(bnn.eval(), Inputs(bnn, x, None))
    assert_close(mean.detach(), outputs)
    assert_close(covariance, (jacobian * sigma**2) @ jacobian.mT)


def linear_gaussian_model(num_outputs=1):
    """A linear model whose features are orthogonal, so that its exact posterior has no correlations."""
    features = torch.linalg.qr(draw(20, 3)).Q * torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    targets = features @ draw(3, num_outputs, seed=1) + draw(20, num_outputs, seed=2)
    network = nn.Linear(3, num_outputs, bias=False)
    likelihood = varlap.Gaussian(noise=1.0, learnt=False)
    bnn = varlap.BNN(network, likelihood, prior=varlap.OneScalePrior(2.0)).double()
    covariance = torch.linalg.inv(features.T @ features + torch.eye(3, dtype=torch.float64) / 4)
    with torch.no_grad():
        network.weight.copy_((covariance @ features.T @ targets).T)
    varlap.laplace(bnn, (features, targets))
    return bnn, covariance


@pytest.mark.filterwarnings("ignore:weight samples of this posterior")  # of a linear model they are exact
@pytest.mark.parametrize("num_outputs", [1, 2])
def test_linear_gaussian_model_has_the_exact_predictive(num_outputs):
    bnn, covariance = linear_gaussian_model(num_outputs)
    x, y = draw(6, 3, seed=4), draw(6, num_outputs, seed=5)
    epistemic = ((x @ covariance) * x).sum(1, keepdim=True).expand(-1, num_outputs)
    exact = distributions.Normal(x @ bnn.network.weight.detach().T, (epistemic + 1).sqrt())

    found = bnn.predict(x, how="linearised", closed_form=True)
    assert_close(found.mean, exact.mean)
    assert_close(found.variance, exact.variance)
    assert_close(found.epistemic_variance, epistemic)
    assert_close(found.log_prob(y), exact.log_prob(y).sum(1))
    # Linear in its weights as it is, so weight samples are samples of the same predictive.
    for how in ("sampled", "linearised"):
        outputs = torch.stack(list(bnn.predict(x, how=how, num_samples=4000).outputs))
        assert_within_standard_errors(outputs, exact.mean)
        assert_within_standard_errors((outputs - exact.mean).square(), epistemic)


def test_outputs_that_share_weights_are_scored_jointly():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x):
            return self.layer(x).expand(-1, 2) * torch.tensor([1.0, 3.0])

    bnn = varlap.BNN(Twice(), varlap.Gaussian(noise=1.0, learnt=False)).double()
    x, y = draw(4, 2), draw(4, 2, seed=1)
    outputs, jacobian, sigma = dense_jacobian(bnn, x)
    covariance = (jacobian * sigma**2) @ jacobian.mT + torch.eye(2)
    exact = distributions.MultivariateNormal(outputs, covariance)
    found = bnn.predict(x, how="linearised", closed_form=True)
    assert_close(found.log_prob(y), exact.log_prob(y))
    assert_close(found.likelihood.predict(found.outputs[0]).variance, found.variance)
    drawn = torch.stack(
        [found.likelihood.sample(found.outputs[0], torch.Generator().manual_seed(k)) for k in range(4000)]
    )
    assert_within_standard_errors(drawn, exact.mean)
    centred = drawn - exact.mean
    assert_within_standard_errors(centred[..., 0] * centred[..., 1], covariance[:, 0, 1])


@pytest.mark.parametrize("name", ["mlp-gaussian", "mlp-poisson", "mlp-heteroscedastic"])
def test_moments_of_the_closed_form_are_those_of_many_linearised_draws(name):
    bnn, x, y = next(case for case in CASES if case.name == name).make()
    with torch.no_grad():
        for log_sigma in bnn.log_sigma.parameters():
            log_sigma.add_(1)  # so wide that the weights matter
    exact = bnn.predict(x, how="linearised", closed_form=True)
    drawn = bnn.predict(x, how="linearised", num_samples=4000)
    parts = [bnn.likelihood.predict(outputs) for outputs in drawn.outputs]
    means, noise = torch.stack([part.mean for part in parts]), torch.stack([part.variance for part in parts])
    assert_within_standard_errors(means, exact.mean)
    assert_within_standard_errors(noise, exact.noise_variance)
    assert_within_standard_errors((means - exact.mean).square() + noise, exact.variance)
    assert_close(exact.variance, exact.noise_variance + exact.epistemic_variance, 1e-12)
    # Of 100 draws of the outputs, where the density itself has no closed form.
    assert (exact.log_prob(y) - drawn.log_prob(y)).abs().max() < 0.2


@pytest.mark.parametrize("name", ["mlp-categorical", "mlp-bernoulli", "segmentation"])
def test_probit_is_near_many_linearised_draws_and_draws_of_outputs_are_nearer(name):
    bnn, x, _ = next(case for case in CASES if case.name == name).make()
    with torch.no_grad():
        for mean, log_sigma in zip(bnn.means().values(), bnn.log_sigma.values(), strict=True):
            mean.mul_(3)
            log_sigma.add_(2)  # so wide that the weights matter
    drawn = bnn.predict(x, how="linearised", num_samples=4000)
    probit = bnn.predict(x, how="linearised", closed_form=True)
    monte_carlo = bnn.predict(x, how="linearised", closed_form=True, num_samples=4000, seed=1)
    moved = (drawn.probs - bnn.predict(x).probs).abs().max()
    assert moved > 0.02
    assert (probit.probs - drawn.probs).abs().max() < 0.05
    probs = torch.stack([bnn.likelihood.predict(outputs).probs for outputs in monte_carlo.outputs])
    two_errors = math.sqrt(2) * probs.std(0) / math.sqrt(len(probs))
    assert ((monte_carlo.probs - drawn.probs).abs() <= 4 * two_errors).all()
    torch.testing.assert_close(
        probit.outputs[0].softmax(1) if probit.exclusive else probit.outputs[0].sigmoid(), probit.probs
    )


def test_probit_matches_the_integral_over_one_logit():
    mean, variance = torch.tensor([[0.5], [-1.0], [2.0]]).double(), torch.tensor([0.5, 1.0, 2.0]).double()
    grid = torch.linspace(-12, 12, 20001, dtype=torch.float64)
    density = torch.exp(-0.5 * grid**2) / math.sqrt(2 * math.pi)
    logits = mean + variance.sqrt()[:, None] * grid
    exact = torch.trapezoid(logits.sigmoid() * density, grid)
    found = varlap.Bernoulli().predict_from_gaussian(mean, variance[:, None, None])
    assert (found.probs[:, 0] - exact).abs().max() < 0.01
    assert (found.probs[:, 0] - mean[:, 0].sigmoid()).abs().max() > 0.03


def test_drawn_outputs_have_the_mean_and_covariance_asked_for():
    factor = draw(4, 3, 2)
    mean, covariance = draw(4, 3, seed=1), factor @ factor.mT  # singular
    values = torch.stack(drawn_outputs(mean, covariance, 8000, seed=0))
    assert_within_standard_errors(values, mean)
    centred = values - mean
    assert_within_standard_errors(centred[..., :, None] * centred[..., None, :], covariance)


def test_one_output_without_a_dimension_of_its_own_has_a_closed_form():
    class Flat(nn.Linear):
        def forward(self, x):
            return super().forward(x)[:, 0]

    bnn = varlap.BNN(Flat(2, 1), varlap.Gaussian(noise=1.0, learnt=False)).double()
    x, y = draw(4, 2), draw(4, seed=1)
    found = bnn.predict(x, how="linearised", closed_form=True)
    exact = distributions.Normal(found.mean, found.variance.sqrt())
    assert found.mean.shape == (4,)
    assert_close(found.log_prob(y), exact.log_prob(y))


class TwoSided(varlap.Gaussian):
    """Targets around the outputs by a Laplace distribution, which a Gaussian's formula is not about."""

    def log_prob(self, outputs, targets):
        return distributions.Laplace(outputs, self.log_noise.exp()).log_prob(targets).sum(1)


def test_a_closed_form_that_is_inherited_beside_another_log_prob_is_not_taken():
    bnn, x, y = varlap.BNN(nn.Linear(4, 2), TwoSided()).double(), draw(3, 4), draw(3, 2, seed=1)
    mean, covariance = output_gaussian(bnn, Inputs(bnn, x, None))
    values = [bnn.likelihood.log_prob(outputs, y) for outputs in drawn_outputs(mean, covariance, 100, seed=0)]
    expected = torch.stack(values).logsumexp(0) - math.log(100)
    assert_close(bnn.predict(x, how="linearised", closed_form=True).log_prob(y), expected)


def test_what_has_no_closed_form_says_so(monkeypatch):
    x = torch.zeros(4, 2)
    coupled = varlap.BNN(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=False)))
    with pytest.raises(NetworkError, match=r"closed_form=True needs each item's own Jacobian.* leave closed_form out"):
        coupled.predict(x, how="linearised", closed_form=True)
    assert coupled.predict(x, how="linearised").probs.shape == (4, 3)
    monkeypatch.setattr("varlap.predict.closed_form.MOST_ENTRIES_OF_ONE_JACOBIAN", 20)
    message = r"closed_form=True builds a Jacobian of 3 outputs × 9 weights for each item, .* leave closed_form out"
    with pytest.raises(ConfigError, match=message):
        varlap.BNN(nn.Linear(2, 3)).predict(x, how="linearised", closed_form=True)


def test_jacobians_in_small_chunks_give_the_same_covariance(monkeypatch):
    bnn, x = varlap.BNN(varlap.models.mlp(4, 3)).double(), draw(7, 4)
    whole = bnn.predict(x, how="linearised", closed_form=True)
    monkeypatch.setattr("varlap.predict.closed_form.ENTRIES_AT_ONCE", 2 * 3 * bnn.num_weights())
    assert_close(bnn.predict(x, how="linearised", closed_form=True).probs, whole.probs, 1e-12)


def test_laplace_with_linearised_prediction_is_one_call_each():
    x = draw(30, 2)
    y = (x[:, 0] > 0).long()
    bnn = varlap.BNN(varlap.models.mlp(2, 2, hidden=(8,))).double()
    before = bnn.predict(x, how="linearised").mutual_information.mean()
    varlap.laplace(bnn, (x, y))
    assert bnn.predict(x, how="linearised").mutual_information.mean() > 2 * before


class _Centred(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class _Shared(nn.Linear):
    def forward(self, x, shared):
        return super().forward(x * shared.mean(0))


@pytest.mark.parametrize(
    ("network", "x"),
    [(_Centred(3, 1), torch.randn(4, 3)), (_Shared(3, 1), (torch.randn(4, 3), torch.randn(5, 3)))],
    ids=["coupled", "shared"],
)
def test_the_closed_form_is_refused_where_an_output_is_not_its_items_own(network, x):
    bnn = varlap.BNN(network, likelihood="gaussian")
    with pytest.raises(varlap.errors.NetworkError, match="depends on other items, or on an input that they share"):
        bnn.predict(x, how="linearised", closed_form=True)


def test_a_closed_form_that_leaves_nothing_out_draws_no_outputs(monkeypatch):
    x = draw(6, 3)
    bnn = varlap.BNN(varlap.models.mlp(3, 2, hidden=(4,)), varlap.Gaussian(num_outputs=2)).double()
    expected = bnn.predict(x, how="linearised", closed_form=True)
    monkeypatch.setattr("varlap.predict.closed_form.drawn_outputs", None)  # whoever calls it fails
    found = bnn.predict(x, how="linearised", closed_form=True)
    assert torch.equal(found.variance, expected.variance)
    assert torch.equal(found.log_prob(draw(6, 2)), expected.log_prob(draw(6, 2)))
