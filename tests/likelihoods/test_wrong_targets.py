"""Claims about what bad targets and outputs get, how a likelihood is chosen, and a user's own."""

import math

import pytest
import torch
from laws import BUILT_IN, DOUBLE, generator, over_likelihoods
from torch import Tensor, nn

import varlap
from cases import Exponential
from varlap.errors import BatchError, ConfigError
from varlap.likelihoods import choose_likelihood

# -- what bad input gets ---------------------------------------------------------------------------------------------


CATEGORICAL, BERNOULLI, GAUSSIAN = varlap.Categorical(), varlap.Bernoulli(), varlap.Gaussian()


HETEROSCEDASTIC, POISSON = varlap.Heteroscedastic(), varlap.Poisson()


ZEROS = torch.zeros


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "message"),
    [
        (
            CATEGORICAL,
            ZEROS(4),
            ZEROS(4).long(),
            r"categorical likelihood needs outputs of shape \[S, K\] or \[S, K, \.\.\.\], got \(4,\); for one item "
            r"give x\[None\], for one logit per item use likelihood='bernoulli'",
        ),
        (
            CATEGORICAL,
            ZEROS(4, 3),
            ZEROS(4, 3).long(),
            r"categorical likelihood needs targets of shape \(4,\) for outputs of shape \(4, 3\), got \(4, 3\); "
            r"targets are class numbers, not one-hot rows",
        ),
        (CATEGORICAL, ZEROS(4, 3, 2, 2), ZEROS(4, 2).long(), r"needs targets of shape \(4, 2, 2\) .* got \(4, 2\)"),
        (CATEGORICAL, ZEROS(4, 3), ZEROS(4), r"needs integer labels, got torch\.float32; use targets\.long\(\)"),
        (CATEGORICAL, ZEROS(4, 3), ZEROS(4).bool(), r"needs integer labels, got torch\.bool; use targets\.long\(\)"),
        (
            CATEGORICAL,
            ZEROS(2, 3),
            torch.tensor([0, 3]),
            r"label 3 is out of range: the network has 3 outputs, so labels go from 0 to 2 \(ignored: -100\); fix the "
            r"labels, the number of outputs, or pass likelihood=varlap\.Categorical\(ignored_label=\.\.\.\)",
        ),
        (CATEGORICAL, ZEROS(2, 3), torch.tensor([-1, 0]), r"label -1 is out of range: .* from 0 to 2"),
        (
            BERNOULLI,
            ZEROS(4, 3),
            ZEROS(4),
            r"bernoulli likelihood needs targets of the outputs' shape \(4, 3\), got \(4,\); the network must return "
            r"one number for each target$",
        ),
        (
            BERNOULLI,
            ZEROS(2, 1),
            torch.tensor([[1.0], [2.0]]),
            r"target 2\.0 is no yes or no: the bernoulli likelihood needs 0 and 1; for class numbers use "
            r"likelihood='categorical'",
        ),
        (BERNOULLI, ZEROS(1, 1), torch.tensor([[0.5]]), r"target 0\.5 is no yes or no"),
        (
            GAUSSIAN,
            ZEROS(4, 1),
            ZEROS(4),
            r"gaussian likelihood needs targets of the outputs' shape \(4, 1\), got \(4,\); reshape them, for example "
            r"targets\.reshape\(outputs\.shape\)",
        ),
        (
            GAUSSIAN,
            ZEROS(4, 2),
            ZEROS(4, 1),
            r"got \(4, 1\); the network must return one number for each target, or two for "
            r"likelihood='heteroscedastic'",
        ),
        (GAUSSIAN, ZEROS(4), ZEROS(4, 1), r"got \(4, 1\); inputs of one feature are a column too, x\.unsqueeze\(1\)"),
        (
            HETEROSCEDASTIC,
            ZEROS(4, 3),
            ZEROS(4, 1),
            r"heteroscedastic likelihood needs outputs of shape \[S, 2D, \.\.\.\] \(means, then log scales\), got "
            r"\(4, 3\); give the last layer twice as many outputs as there are targets",
        ),
        (HETEROSCEDASTIC, ZEROS(4), ZEROS(4), r"needs outputs of shape \[S, 2D, \.\.\.\] .* got \(4,\)"),
        (
            HETEROSCEDASTIC,
            ZEROS(4, 2),
            ZEROS(4),
            r"heteroscedastic likelihood needs targets of shape \(4, 1\), half of the outputs' \(4, 2\), got \(4,\); "
            r"reshape them, for example targets\.unsqueeze\(1\)",
        ),
        (
            POISSON,
            ZEROS(4, 1),
            ZEROS(4),
            r"poisson likelihood needs targets of the outputs' shape \(4, 1\), got \(4,\)",
        ),
        (
            POISSON,
            ZEROS(2, 1),
            torch.tensor([[1.0], [-2.0]]),
            r"target -2\.0 is no count: the poisson likelihood needs 0, 1, 2, \.\.\.; for real numbers use "
            r"likelihood='gaussian'",
        ),
        (POISSON, ZEROS(1, 1), torch.tensor([[1.5]]), r"target 1\.5 is no count"),
    ],
)
def test_targets_that_cannot_be_right_are_refused_with_the_fix(likelihood, outputs, targets, message):
    with pytest.raises(BatchError, match=message):
        likelihood.check(outputs, targets)
    if "needs" in message and "is no" not in message:  # shapes are seen to wherever broadcasting could hide a mistake
        with pytest.raises(BatchError, match=message):
            likelihood.log_prob(outputs, targets)


@over_likelihoods
@pytest.mark.parametrize(
    ("outputs", "kind", "example"),
    [
        ({"logits": ZEROS(2, 4), "aux": ZEROS(2)}, r"a dict with keys \['aux', 'logits'\]", r"output='logits'"),
        ((ZEROS(2, 4), ZEROS(2)), "a tuple", "output=0"),
        ([ZEROS(2, 4)], "a list", "output=0"),
    ],
    ids=["dict", "tuple", "list"],
)
def test_structured_outputs_are_refused_with_the_argument_that_picks_one(name, outputs, kind, example):
    likelihood = BUILT_IN[name][0]()
    message = (
        rf"the {name.removesuffix('-known')} likelihood needs one tensor, but the network returned {kind}; say which "
    )
    message += rf"entry it is, for example BNN\(network, \.\.\., {example}\)"
    calls = [
        lambda: likelihood.log_prob(outputs, ZEROS(2)),
        lambda: likelihood.sample(outputs, generator()),
        lambda: likelihood.predict(outputs),
        lambda: likelihood.check(outputs, ZEROS(2)),
    ]
    for call in calls:
        with pytest.raises(BatchError, match=message):
            call()


def test_the_message_about_a_network_reaches_the_user_from_the_objective():
    class Two(nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x)}

    bnn = varlap.BNN(Two(2, 3))
    with pytest.raises(BatchError, match=r"returned a dict with keys \['logits'\]; say which entry"):
        varlap.VL(num_data=10)(bnn, ZEROS(4, 2), ZEROS(4).long())


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan, math.inf, "1"])
def test_a_noise_that_is_no_standard_deviation_is_refused(noise):
    with pytest.raises(ConfigError, match=rf"Gaussian\(noise={noise!r}\) must be positive and finite; it is a stand"):
        varlap.Gaussian(noise=noise)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8], ids=str)
def test_labels_may_be_integers_of_any_size(dtype):
    outputs, targets = torch.randn(5, 200, dtype=DOUBLE), torch.tensor([0, 1, 99, 100, 127])
    small = targets.to(dtype)
    assert torch.equal(CATEGORICAL.log_prob(outputs, small), CATEGORICAL.log_prob(outputs, targets))
    CATEGORICAL.check(outputs, small)
    assert torch.equal(CATEGORICAL.sample(outputs, generator(), small), CATEGORICAL.sample(outputs, generator()))


def test_a_label_of_eight_bits_is_not_mistaken_for_the_ignored_one():
    """As unsigned bytes, −100 is 156."""
    outputs, targets = torch.randn(1, 200, dtype=DOUBLE), torch.tensor([156], dtype=torch.uint8)
    assert CATEGORICAL.log_prob(outputs, targets) == outputs.log_softmax(1)[0, 156]
    assert CATEGORICAL.sample(outputs, generator(), targets) >= 0
    assert CATEGORICAL.score(outputs, torch.ones_like(outputs), targets).abs().sum() > 0


# -- choosing one ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("categorical", varlap.Categorical),
        ("bernoulli", varlap.Bernoulli),
        ("gaussian", varlap.Gaussian),
        ("heteroscedastic", varlap.Heteroscedastic),
        ("poisson", varlap.Poisson),
    ],
)
def test_a_name_stands_for_its_likelihood_which_follows_the_protocol(name, kind):
    likelihood = varlap.BNN(nn.Linear(2, 2).double(), name).likelihood
    assert type(likelihood) is kind
    assert isinstance(likelihood, varlap.Likelihood)
    assert all(parameter.dtype == DOUBLE for parameter in likelihood.parameters())  # it goes with the network


def test_an_object_of_ones_own_is_taken_as_it_is():
    likelihood = Exponential()
    assert choose_likelihood(likelihood) is likelihood


class NoSample:
    def log_prob(self, outputs, targets): ...


@pytest.mark.parametrize(
    ("likelihood", "message"),
    [
        (
            "categorial",
            r"unknown likelihood 'categorial': did you mean 'categorical'\?$",
        ),
        (
            "student-t",
            r"unknown likelihood 'student-t': choose 'categorical', 'bernoulli', 'gaussian', 'heteroscedastic' or 'p",
        ),
        (
            NoSample(),
            r"likelihood .*NoSample.* lacks sample, predict; it must follow varlap\.Likelihood, or be one of cat",
        ),
        (nn.MSELoss(), r"likelihood MSELoss\(\) lacks log_prob, sample, predict; it must follow varlap\.Likelihood"),
        (Exponential, r"likelihood <class .*Exponential'> is a class; pass an object of it; it must follow"),
        (varlap.Gaussian, r"likelihood <class .*Gaussian'> is a class; pass an object of it"),
        (None, r"likelihood None lacks log_prob, sample, predict"),
    ],
    ids=lambda value: str(value).split(" at 0x")[0],
)
def test_what_is_no_likelihood_is_refused_with_what_it_lacks(likelihood, message):
    with pytest.raises(ConfigError, match=message):
        varlap.BNN(nn.Linear(2, 2), likelihood)


# -- a user's own ----------------------------------------------------------------------------------------------------


class Laplacian(nn.Module):
    """A user's own, with a parameter to learn: p(y) = exp(−|y − m|/b)/2b, and a check."""

    def __init__(self):
        super().__init__()
        self.log_b = nn.Parameter(torch.zeros(()))

    def log_prob(self, outputs, targets):
        return (-(targets - outputs).abs() / self.log_b.exp() - self.log_b - math.log(2)).sum(1)

    def sample(self, outputs, generator, targets=None):
        uniform = torch.rand(outputs.shape, generator=generator, dtype=outputs.dtype) - 0.5
        return outputs - self.log_b.exp() * uniform.sign() * torch.log1p(-2 * uniform.abs())

    def predict(self, outputs):
        return varlap.Prediction(mean=outputs, variance=(2 * (2 * self.log_b).exp()).expand_as(outputs))

    def check(self, outputs, targets):
        if (targets > 1e6).any():
            raise BatchError("too far out")


def own_bnn(likelihood) -> tuple[varlap.BNN, Tensor, Tensor]:
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(6, 3, generator=generator(), dtype=DOUBLE)
    return varlap.BNN(network, likelihood).double(), x, x[:, :2].exp()


OBJECTIVES = {
    "map": lambda: varlap.MAP(6),
    "vi": lambda: varlap.VI(6, num_samples=2),
    "vl": lambda: varlap.VL(6),
    "vl-parts": lambda: varlap.VL(6, curvature=varlap.Fisher(fraction=0.5, groups=2)),
    "vl-empirical": lambda: varlap.VL(6, curvature=varlap.EmpiricalFisher()),
    "vl-hessian": lambda: varlap.VLHessian(6),
    "vl-determinant": lambda: varlap.VLDeterminant(6, beta=10.0),
}


@pytest.mark.parametrize("likelihood", [Exponential, Laplacian])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_likelihood_of_ones_own_serves_every_objective(objective, likelihood):
    bnn, x, y = own_bnn(likelihood())
    terms = OBJECTIVES[objective]()(bnn, x, y, step=0)
    terms.loss.backward()
    if objective != "vi":  # whose log-likelihood is not that of the means
        torch.testing.assert_close(terms.log_likelihood, bnn.likelihood.log_prob(bnn(x), y).mean().detach())
    assert all(mean.grad.isfinite().all() and mean.grad.abs().sum() > 0 for mean in bnn.means().values())
    if likelihood is Laplacian:
        assert bnn.likelihood.log_b.grad.abs() > 0  # a point estimate, learnt
    scores = varlap.evaluate(bnn, (x, y))
    assert scores["nll"] == pytest.approx(-bnn.likelihood.log_prob(bnn(x), y).mean().item(), rel=1e-12)
    torch.testing.assert_close(
        scores["rmse"], (bnn.predict(x).mean - y).square().mean().sqrt().item(), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("curvature", [varlap.Fisher(gradient="whole"), varlap.ExactFisher()], ids=["whole", "exact"])
def test_what_needs_a_score_says_so_to_a_likelihood_without_one(curvature):
    bnn, x, y = own_bnn(Exponential())
    message = r"the likelihood Exponential has no `score`, which the whole gradient and the exact Fisher need; add "
    message += r"score\(outputs, noise, targets=None\) to it, or use Fisher\(gradient='held'\), "
    with pytest.raises(ConfigError, match=message):
        varlap.VL(6, curvature=curvature)(bnn, x, y)


def test_adding_a_score_makes_the_whole_gradient_and_the_exact_fisher_available():
    class WithScore(Exponential):
        def score(self, outputs, noise, targets=None):
            return noise  # the Fisher information of a log rate is 1

    bnn, x, y = own_bnn(WithScore())
    for curvature in (varlap.Fisher(gradient="whole"), varlap.ExactFisher()):
        terms = varlap.VL(6, curvature=curvature)(bnn, x, y)
        terms.loss.backward()
        assert terms.curvature > 0
    assert set(varlap.fisher_diagonal(bnn, (x, y))) == set(bnn.means())


def test_a_check_of_ones_own_is_called():
    bnn, x, y = own_bnn(Laplacian())
    with pytest.raises(BatchError, match="too far out"):
        varlap.MAP(6)(bnn, x, y + 1e7)


def test_a_log_prob_that_is_not_one_value_per_item_is_refused():
    class Unsummed(Exponential):
        def log_prob(self, outputs, targets):
            return outputs - outputs.exp() * targets

    bnn, x, y = own_bnn(Unsummed())
    message = (
        r"log_prob returned shape \(6, 2\) for 6 items; it must return one value per item, shape \(6,\), summed over"
    )
    with pytest.raises(BatchError, match=message):
        varlap.MAP(6)(bnn, x, y)
