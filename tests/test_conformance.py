"""One test that drives every exported objective with every likelihood, prior and curvature through the same calls."""

import copy
import inspect
import math

import numpy as np
import pytest
import torch
from torch import distributions, nn

import varlap
from cases import Exponential
from varlap.errors import BatchError, ConfigError
from varlap.objectives import Objective
from varlap.posterior.prior import weights_of

pytestmark = pytest.mark.filterwarnings("ignore:batch norm follows Bayesian weights:varlap.errors.VarlapWarning")

S = 6  # items: a batch and the whole training set, which VLDeterminant asks for


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- what is driven -----------------------------------------------------------------------------------------------

OBJECTIVES = {
    "map": lambda: varlap.MAP(S, beta=0.5),
    "vi": lambda: varlap.VI(S),
    "vi-antithetic": lambda: varlap.VI(S, beta=0.5, num_samples=2, antithetic=True, beta_warmup_steps=3),
    "vl": lambda: varlap.VL(S),
    "vl-paper": lambda: varlap.VL(S, curvature=varlap.Fisher()),
    "vl-parts": lambda: varlap.VL(S, beta=0.5, curvature=varlap.Fisher(every=2, fraction=0.5, groups=2)),
    "vl-quiet": lambda: varlap.VL(S, curvature=varlap.Fisher(gradient="quiet")),
    "vl-whole": lambda: varlap.VL(S, curvature=varlap.Fisher(gradient="whole")),
    "vl-exact": lambda: varlap.VL(S, curvature=varlap.ExactFisher()),
    "vl-empirical": lambda: varlap.VL(S, curvature=varlap.EmpiricalFisher(fraction=0.5)),
    "vl-closed-form": lambda: varlap.VL(S, variances="closed-form", beta_warmup_steps=2),
    "vl-hessian": lambda: varlap.VLHessian(S, curvature=varlap.Hessian(num_probes=2)),
    "vl-determinant": lambda: varlap.VLDeterminant(S, beta=100.0),  # so large that −H + β/s² is positive definite
}
WITH_EVERY_PRIOR = (
    "map",
    "vi-antithetic",
    "vl",
    "vl-hessian",
    "vl-determinant",
)  # one of each class; the others have one
WITHOUT_LEARNT_VARIANCES = {"map", "vl-closed-form", "vl-determinant"}
NEEDS_A_SCORE = {"vl-whole", "vl-exact"}
REFUSES_A_LEARNT_PRIOR = {"map", "vl-determinant"}


# name: (likelihood, number of outputs, targets)
LIKELIHOODS = {
    "categorical": (varlap.Categorical, 3, lambda: torch.arange(S) % 3),
    "bernoulli": (varlap.Bernoulli, 2, lambda: (numbers(S, 2, seed=1) > 0).double()),
    "gaussian": (lambda: varlap.Gaussian(noise=0.8), 2, lambda: numbers(S, 2, seed=1)),
    "heteroscedastic": (varlap.Heteroscedastic, 2, lambda: numbers(S, 1, seed=1)),
    "poisson": (varlap.Poisson, 2, lambda: (torch.arange(2 * S).reshape(S, 2) % 4).double()),
    "own": (Exponential, 2, lambda: numbers(S, 2, seed=1).exp()),
}


class Halved:
    """A user's own prior: half the default scale."""

    centre = "zero"
    learnt = False

    def scale(self, weight):
        return 0.5 * varlap.FanInPrior().scale(weight)


PRIORS = {
    "fan-in": varlap.FanInPrior,
    "one-scale": lambda: varlap.OneScalePrior(0.7),
    "empirical-bayes": varlap.EmpiricalBayesPrior,
    "centred": lambda: varlap.FanInPrior(centre="network"),
    "centred-empirical-bayes": lambda: varlap.EmpiricalBayesPrior(centre="network"),
    "own": Halved,
}


def exported(*methods: str) -> set[type]:
    """The exported classes with these methods, protocols left out."""
    classes = [getattr(varlap, name) for name in varlap.__all__ if inspect.isclass(getattr(varlap, name))]
    return {c for c in classes if all(hasattr(c, m) for m in methods) and not getattr(c, "_is_protocol", False)}


def test_nothing_exported_is_forgotten():
    own = {Exponential, Halved}
    objectives = {type(make()) for make in OBJECTIVES.values()}
    assert objectives == {c for c in exported() if issubclass(c, Objective)}
    assert objectives == {type(OBJECTIVES[name]()) for name in WITH_EVERY_PRIOR}
    assert {type(make()) for make, *_ in LIKELIHOODS.values()} - own == exported("log_prob", "sample", "predict")
    assert {type(make()) for make in PRIORS.values()} - own == exported("scale")
    curvatures = {type(make().curvature) for make in OBJECTIVES.values() if hasattr(make(), "curvature")}
    assert curvatures == exported("estimate", "weight")


def moved_by(mean: torch.Tensor) -> torch.Tensor:
    return 0.1 * numbers(*mean.shape, seed=2)


def make_bnn(likelihood: str, prior: str) -> tuple[varlap.BNN, torch.Tensor, torch.Tensor]:
    build, num_outputs, targets = LIKELIHOODS[likelihood]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.BatchNorm1d(2), nn.Linear(2, num_outputs))
    bnn = varlap.BNN(network.double(), build(), prior=PRIORS[prior]()).double()
    with torch.no_grad():
        for mean in bnn.means().values():
            mean.add_(moved_by(mean))  # away from a prior that is centred on them
    return bnn.train(), numbers(S, 1), targets()


PAIRS = [
    (objective, prior)
    for objective in OBJECTIVES
    for prior in (PRIORS if objective in WITH_EVERY_PRIOR else ["empirical-bayes"])
]


def refusal(objective: str, likelihood: str, prior: str) -> str | None:
    """What the documentation says cannot be combined, and its message."""
    if objective in REFUSES_A_LEARNT_PRIOR and "empirical-bayes" in prior:
        return "cannot learn the prior's scale: without variances its objective is unbounded as s goes to 0; use varlap"
    if objective in NEEDS_A_SCORE and likelihood == "own":
        return "the likelihood Exponential has no `score`, which the whole gradient and the exact Fisher need"
    return None


def kl_by_torch(bnn: varlap.BNN, prior: str, whole: bool) -> torch.Tensor:
    """Eq. 12 summed, by torch's own formula for two normals; or, for methods without variances, its quadratic part."""
    total = torch.zeros((), dtype=torch.float64)
    for weight in weights_of(bnn.network):
        mean, sigma = weight.value.detach(), bnn.log_sigma[weight.name].detach().exp()
        centre = mean - moved_by(mean) if "centred" in prior else torch.zeros_like(mean)
        scale = torch.tensor(bnn.prior.scale(weight), dtype=torch.float64)
        if "empirical-bayes" in prior:
            scale = (sigma.square() + (mean - centre).square()).mean().sqrt()
        posterior, before = distributions.Normal(mean, sigma), distributions.Normal(centre, scale)
        terms = distributions.kl_divergence(posterior, before) if whole else (mean - centre).square() / scale**2 / 2
        total += terms.sum()
    return total


# ---- the drive ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize(("objective_name", "prior"), PAIRS)
def test_every_objective_with_every_likelihood_and_every_prior(objective_name, likelihood, prior):
    objective = OBJECTIVES[objective_name]()
    bnn, x, y = make_bnn(likelihood, prior)
    state = torch.get_rng_state()

    if message := refusal(objective_name, likelihood, prior):
        before = copy.deepcopy(bnn.state_dict())
        with pytest.raises(ConfigError, match=message):
            objective(bnn, x, y)
        assert all(torch.equal(value, before[key]) for key, value in bnn.state_dict().items())
        assert objective.num_calls == 0
        return

    # Forward: the terms are finite scalars, and the loss is minus the ELBO.
    kl = kl_by_torch(bnn, prior, whole=objective_name not in ("map", "vl-determinant"))
    terms = objective(bnn, x, y)
    for value in (terms.log_likelihood, terms.curvature, terms.kl, terms.elbo):
        assert value.shape == ()
        assert value.isfinite()
        assert not value.requires_grad
    expected = terms.log_likelihood - terms.curvature - terms.beta * terms.kl
    torch.testing.assert_close(terms.elbo, expected, rtol=0, atol=0)
    torch.testing.assert_close(-terms.loss.detach(), expected, rtol=0, atol=0)
    torch.testing.assert_close(terms.kl, kl / S, rtol=1e-6, atol=1e-9)  # scales were made in single precision
    assert (terms.curvature != 0) == objective_name.startswith("vl")

    # Backward and a step of the optimizer: gradients where they belong, and nothing else moves.
    optimizer = varlap.adam(bnn, lr=1e-3)
    terms.loss.backward()
    learns_variances = objective_name not in WITHOUT_LEARNT_VARIANCES
    assert all(mean.grad.isfinite().all() and mean.grad.abs().sum() > 0 for mean in bnn.means().values())
    assert all((log_sigma.grad is not None) == learns_variances for log_sigma in bnn.log_sigma.values())
    assert all(parameter.grad.isfinite() for parameter in bnn.point_estimates().values())
    before = {name: parameter.detach().clone() for name, parameter in bnn.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    moved = {name for name, parameter in bnn.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in before if learns_variances or not name.startswith("log_sigma")}
    if objective_name == "vl-closed-form":
        objective.update_variances(bnn)
        assert all(not torch.equal(p, before[f"log_sigma.{name}"]) for name, p in bnn.log_sigma.items())

    # The state of network and objective is all there is: a copy that loads both goes on with the same numbers.
    twin, _, _ = make_bnn(likelihood, prior)
    twin.load_state_dict(bnn.state_dict())
    if not isinstance(bnn.likelihood, nn.Module):
        twin.likelihood = bnn.likelihood
    resumed = OBJECTIVES[objective_name]()
    resumed.load_state_dict(objective.state_dict())
    assert resumed.num_calls == objective.num_calls == 1
    first, second = objective(bnn, x, y, step=2), resumed(twin, x, y, step=2)
    assert torch.equal(first.loss, second.loss)
    first.loss.backward()
    second.loss.backward()
    for (name, one), two in zip(bnn.named_parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        assert one.grad is None or torch.equal(one.grad, two.grad), name

    # Values without gradients are the same values; weights per item are taken by all.
    with torch.no_grad():
        values = objective(bnn, x, y, step=2)
        weighted = objective(bnn, x, y, step=2, weights=torch.ones(S, dtype=torch.float64))
    assert not values.loss.requires_grad
    torch.testing.assert_close(values.loss, first.loss.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(weighted.loss, first.loss.detach(), rtol=1e-12, atol=1e-12)

    # Evaluation and prediction, in evaluation mode, which they put back.
    scores = varlap.evaluate(bnn, (x, y))
    assert math.isfinite(scores["nll"])
    classes = ["accuracy", "brier", "ece", "adaptive_ece", *["classwise_ece"] * (likelihood == "categorical"), "aurc"]
    regression = ["log_likelihood", "rmse", "coverage", "width", "crps"]
    assert list(scores) == ["nll", *(classes if likelihood in ("categorical", "bernoulli") else regression)]
    prediction = bnn.predict(x)
    given = prediction.probs if likelihood in ("categorical", "bernoulli") else prediction.mean
    assert given.shape[0] == S
    assert given.isfinite().all()
    linearised = bnn.predict(x, how="linearised", num_samples=2, seed=1)
    assert linearised.log_prob(y).isfinite().all()
    assert (linearised.mutual_information if linearised.mean is None else linearised.epistemic_variance).max() > 0
    assert bnn.network.training

    assert torch.equal(torch.get_rng_state(), state)


# ---- the other documented refusals --------------------------------------------------------------------------------


def test_the_determinant_needs_the_whole_training_set_and_a_small_network():
    bnn, x, y = make_bnn("categorical", "fan-in")
    with pytest.raises(BatchError, match=r"whole training set in one call \(Eq. 10 has no minibatches\): num_data=10"):
        varlap.VLDeterminant(100)(bnn, x, y)
    large = varlap.BNN(nn.Linear(700, 3))
    with pytest.raises(ConfigError, match="builds the full Hessian of 2103 weights; it is a reference for up to 2000"):
        varlap.VLDeterminant(S)(large, torch.zeros(S, 700), y)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_refuses_to_guess_the_number_of_data(objective):
    kind = type(OBJECTIVES[objective]())
    with pytest.raises(ConfigError, match=rf"{kind.__name__} needs num_data, the number of items in the whole"):
        kind()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_without_a_step_counts_its_calls_and_only_those_with_gradients(objective):
    bnn, x, y = make_bnn("categorical", "fan-in")
    other, counted, told = copy.deepcopy(bnn), OBJECTIVES[objective](), OBJECTIVES[objective]()
    for step in range(3):
        with torch.no_grad():
            counted(copy.deepcopy(bnn), x, y)
        assert torch.equal(counted(bnn, x, y).loss, told(other, x, y, step=step).loss)
    assert (counted.num_calls, told.num_calls) == (3, 0)


def test_a_step_is_the_same_whatever_kind_of_whole_number_it_is():
    bnn, x, y = make_bnn("categorical", "fan-in")
    values = [varlap.VL(100)(bnn, x, y, step=step).loss for step in (3, np.int64(3), torch.tensor(3))]  # type: ignore[arg-type]
    assert values[0] == values[1] == values[2]
