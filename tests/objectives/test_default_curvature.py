"""Which curvature VL takes where the caller leaves it open: the likelihood decides."""

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import varlap
from varlap.curvature import DEFAULT, DEFAULT_FOR_NUMBERS
from varlap.likelihoods import Prediction

COUNTS = torch.arange(4.0).unsqueeze(1)
X = torch.linspace(-1, 1, 8).view(4, 2)


class Exponential:
    """A likelihood of a user's own."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - outputs.exp() * targets).sum(1)

    def sample(self, outputs: Tensor, generator: torch.Generator, targets: Any = None) -> Tensor:
        return torch.empty_like(outputs).exponential_(generator=generator) / outputs.exp()

    def predict(self, outputs: Tensor) -> Prediction:
        return Prediction(mean=(-outputs).exp(), variance=(-2 * outputs).exp())


class WithScore(Exponential):
    def score(self, outputs: Tensor, noise: Tensor, targets: Any = None) -> Tensor:
        return noise  # the rate's logarithm has a Fisher information of 1


class StudentT(varlap.Gaussian):
    """Three degrees of freedom by another `log_prob`, beside which the Gaussian's `score` is wrong."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._around(outputs).log_prob(targets).sum(1)

    def sample(self, outputs: Tensor, generator: torch.Generator, targets: Any = None) -> Tensor:
        normals = torch.randn(4, *outputs.shape, generator=generator, dtype=outputs.dtype)
        return outputs + self.log_noise.exp() * normals[0] / normals[1:].square().mean(0).sqrt()

    def _around(self, outputs: Tensor) -> torch.distributions.StudentT:
        return torch.distributions.StudentT(3.0, outputs, self.log_noise.exp())


class Declined(varlap.Gaussian):
    score = None  # type: ignore[assignment]


class SaidAgain(StudentT):
    def score(self, outputs: Tensor, noise: Tensor, targets: Any = None) -> Tensor:
        return noise * (4 / 6) ** 0.5 / self.log_noise.exp()


LIKELIHOODS = {
    "categorical": ("categorical", 3, torch.tensor([0, 1, 2, 0]), DEFAULT),
    "bernoulli": ("bernoulli", 1, COUNTS % 2, DEFAULT),
    "gaussian": ("gaussian", 1, COUNTS, DEFAULT_FOR_NUMBERS),
    "heteroscedastic": ("heteroscedastic", 2, COUNTS, DEFAULT_FOR_NUMBERS),
    "poisson": ("poisson", 1, COUNTS, DEFAULT_FOR_NUMBERS),
    "a user's own": (Exponential(), 1, COUNTS, DEFAULT),
    "a user's own with a score": (WithScore(), 1, COUNTS, DEFAULT_FOR_NUMBERS),
    "a log_prob of its own": (StudentT(), 1, COUNTS, DEFAULT),
    "a score that is None": (Declined(), 1, COUNTS, DEFAULT),
    "a score of its own too": (SaidAgain(), 1, COUNTS, DEFAULT_FOR_NUMBERS),
}


def _bnn(name: str) -> tuple[varlap.BNN, Tensor]:
    likelihood, num_outputs, y, _ = LIKELIHOODS[name]
    torch.manual_seed(0)
    return varlap.BNN(nn.Linear(2, num_outputs), likelihood), y


class Level(nn.Module):
    """A mean and a log scale, whatever the input is."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_scale = nn.Parameter(torch.zeros(())), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.mean, self.log_scale]).expand(len(x), 2)


@pytest.mark.parametrize(("gradient", "times"), [("whole", 1), ("held", 2)])
def test_held_labels_press_on_a_noise_that_the_network_puts_out_twice_as_hard_as_the_fisher_does(
    gradient: Any, times: int
):
    bnn = varlap.BNN(Level().double(), "heteroscedastic", select="mean")
    x, y = torch.zeros(4, 1, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64)
    log_scale = bnn.network.get_parameter("log_scale")
    (of_map,) = torch.autograd.grad(varlap.MAP(4)(bnn, x, y).loss, log_scale)
    draws = []
    for seed in range(400):
        objective = varlap.VL(4, curvature=varlap.Fisher(gradient=gradient), seed=seed)
        (found,) = torch.autograd.grad(objective(bnn, x, y).loss, log_scale)
        draws.append(found - of_map)
    draws = torch.stack(draws)
    # The penalty is ½ σ²/s², with σ the posterior's width of the mean and s the likelihood's scale.
    fisher = (-2 * log_scale.detach()).exp()
    true = -(2 * bnn.log_sigma["mean"].detach()).exp() * fisher
    error = draws.std() / len(draws) ** 0.5
    assert abs(draws.mean() - times * true) < 4 * error
    assert abs(draws.mean() - (3 - times) * true) > 4 * error


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("way", ["call", "step", "fit"])
def test_the_likelihood_chooses_in_every_way_of_training(name: str, way: str):
    bnn, y = _bnn(name)
    objective = varlap.VL(4)
    if way == "call":
        objective(bnn, X, y)
    elif way == "step":
        varlap.TrainingStep(bnn, objective, varlap.adam(bnn))
    else:
        varlap.fit(bnn, objective, (X, y), epochs=1, batch_size=4, progress="none")
    assert objective.curvature == LIKELIHOODS[name][-1]


@pytest.mark.parametrize("likelihood", [StudentT(), SaidAgain()])
def test_the_curvature_is_the_fisher_of_the_likelihoods_own_log_prob(likelihood: Any):
    bnn = varlap.BNN(nn.Linear(2, 1).double(), likelihood.double())
    x, y = X.double(), COUNTS.double()
    with torch.no_grad():
        bnn.likelihood.log_noise.fill_(-0.5)
    draws = []
    for seed in range(1000):
        with torch.no_grad():  # the first evaluation serves at once
            draws.append(varlap.VL(4, seed=seed)(bnn, x, y, step=0).curvature)
    sigma_squared = {name: (2 * log_sigma.detach()).exp() for name, log_sigma in bnn.log_sigma.items()}
    of_mean = math.exp(1.0) * (3 + 1) / (3 + 3)  # the Fisher information of a Student-t's mean
    expected = 0.5 * of_mean * (sigma_squared["weight"] * x.square().mean(0)).sum()
    expected = expected + 0.5 * of_mean * sigma_squared["bias"].sum()
    found = torch.stack(draws)
    assert abs(found.mean() - expected) < 4 * found.std() / len(found) ** 0.5


def test_a_score_that_is_inherited_beside_another_log_prob_is_no_score_of_it():
    bnn, y = _bnn("a log_prob of its own")
    for asked in (
        lambda: varlap.fisher_diagonal(bnn, (X, y)),
        lambda: varlap.VL(4, curvature=varlap.ExactFisher())(bnn, X, y),
        lambda: varlap.VL(4, curvature=varlap.Fisher(gradient="whole"))(bnn, X, y),
    ):
        with pytest.raises(varlap.errors.ConfigError, match="StudentT has no `score`"):
            asked()
    assert set(varlap.fisher_diagonal(bnn, (X, y), labels="sampled")) == {"weight", "bias"}


def test_what_the_caller_gave_stays():
    bnn, y = _bnn("gaussian")
    objective = varlap.VL(4, curvature=DEFAULT)
    objective(bnn, X, y)
    assert objective.curvature == DEFAULT


@pytest.mark.parametrize("name", ["categorical", "gaussian"])
@pytest.mark.parametrize("called", [0, 3])
def test_a_loop_carried_on_from_a_saved_state_goes_on_as_it_would_have(name: str, called: int):
    bnn, y = _bnn(name)
    objective, resumed = varlap.VL(4), varlap.VL(4)
    for _ in range(called):
        objective(bnn, X, y)
    resumed.load_state_dict(objective.state_dict())
    copied = pickle.loads(pickle.dumps(objective))
    expected = objective(bnn, X, y)
    for one in (resumed, copied):
        assert torch.equal(one(bnn, X, y).loss, expected.loss)
        assert one.curvature == LIKELIHOODS[name][-1]


def test_the_network_that_is_remembered_decides():
    (labels, y_labels), (numbers, y_numbers) = _bnn("categorical"), _bnn("gaussian")
    objective = varlap.VL(4)
    with torch.no_grad():
        objective(labels, X, y_labels)
        objective(numbers, X, y_numbers)
    assert objective.curvature == DEFAULT_FOR_NUMBERS
    objective(labels, X, y_labels)
    chosen = objective.curvature
    assert chosen == DEFAULT
    objective.prepare_for(numbers)
    assert objective.curvature is chosen


@pytest.mark.parametrize("way", ["call", "fit"])
def test_a_refused_likelihood_leaves_no_choice_behind(way: str):
    numbers, y = _bnn("gaussian")
    mistaken, objective = varlap.BNN(nn.Linear(2, 1)), varlap.VL(4)  # for classes

    def train(bnn: varlap.BNN) -> None:
        if way == "call":
            objective(bnn, X, y)
        else:
            varlap.fit(bnn, objective, (X, y), epochs=1, batch_size=4, progress="none")

    with pytest.raises(varlap.errors.BatchError):
        train(mistaken)
    train(numbers)
    assert objective.curvature == DEFAULT_FOR_NUMBERS


def test_a_curvature_that_is_assigned_stays():
    bnn, y = _bnn("gaussian")
    objective = varlap.VL(4)
    objective.curvature = varlap.Fisher()
    objective(bnn, X, y)
    assert objective.curvature == varlap.Fisher()


def test_a_curvature_that_is_assigned_remembers_by_its_own_decay():
    bnn, y = _bnn("gaussian")
    given, assigned = varlap.VL(4, curvature=varlap.Fisher(memory=0.5)), varlap.VL(4)
    assigned.curvature = varlap.Fisher(memory=0.5)
    for _ in range(3):
        expected = given(bnn, X, y).loss
        assert torch.equal(assigned(bnn, X, y).loss, expected)


def test_the_spec_of_a_run_has_the_curvature_that_it_is_trained_with(tmp_path: Path):
    bnn, y = _bnn("gaussian")
    varlap.fit(bnn, varlap.VL(4), (X, y), epochs=1, batch_size=4, progress="none", out=tmp_path)
    told = json.loads((tmp_path / "spec.json").read_text())["objective"]
    assert told["curvature"]["gradient"] == "whole"
