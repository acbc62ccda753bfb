"""What runs without an error and learns little is told of, once, and nothing else is."""

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import varlap
from varlap.errors import VarlapWarning

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
OBJECTIVES = [lambda: varlap.VL(100), lambda: varlap.MAP(100), lambda: varlap.VI(100)]


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).softmax(-1)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("network", [lambda: nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), Functional])
def test_a_network_that_ends_in_a_softmax_is_named_once(network: Any, objective: Any):
    bnn = varlap.BNN(network())
    with pytest.warns(
        VarlapWarning, match=r"outputs are probabilities \(they add up to 1\), and the likelihood takes"
    ) as said:
        objective()(bnn, X, Y)
    assert said[0].filename == __file__  # the user's own line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objective()(bnn, X, Y)


def test_a_warning_of_a_training_points_at_the_users_line():
    bnn = varlap.BNN(nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)))
    with pytest.warns(VarlapWarning, match="outputs are probabilities") as said:
        varlap.fit(bnn, varlap.MAP(len(Y)), (X, Y), epochs=1, progress="none")
    assert said[0].filename == __file__


def test_a_network_that_ends_in_a_sigmoid_is_named():
    bnn = varlap.BNN(nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), "bernoulli")
    with pytest.warns(VarlapWarning, match="a Sigmoid is the last module"):
        varlap.VL(100)(bnn, X, (Y > 1).float()[:, None])


def test_fit_names_it_too():
    with pytest.warns(VarlapWarning, match="outputs are probabilities"):
        varlap.fit(varlap.BNN(Functional()), varlap.VL(8), (X, Y), epochs=1, progress="none")


@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic"])
@pytest.mark.parametrize(("offset", "scale"), [(50_000.0, 3.0), (0.0, 1e4)])
def test_targets_of_another_size_than_the_outputs_are_named_once(offset: float, scale: float, likelihood: str):
    bnn = varlap.BNN(nn.Linear(4, 1 if likelihood == "gaussian" else 2), likelihood)
    y = offset + scale * X[:, :1]
    with pytest.warns(VarlapWarning, match=r"more than 100 times the noise.*standardise them") as said:
        varlap.VL(100)(bnn, X, y)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        varlap.VL(100)(bnn, X, y)


@pytest.mark.parametrize("likelihood", [varlap.Gaussian, varlap.Heteroscedastic])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_likelihood_of_ones_own_whose_predict_fails_trains_without_it(objective: Any, likelihood: type):
    class WithoutPredict(likelihood):
        def predict(self, outputs: torch.Tensor) -> Any:
            raise RuntimeError("no predict here")

    bnn = varlap.BNN(nn.Linear(4, 2), WithoutPredict())
    y = X[:, : 1 if likelihood is varlap.Heteroscedastic else 2]
    objective()(bnn, X, y).loss.backward()
    assert bool(bnn.network.weight.grad.any())


def test_targets_that_are_only_shifted_are_named_too():
    """As years, ages and temperatures are: the mean alone takes thousands of steps of Adam."""
    with pytest.warns(VarlapWarning, match=r"more than 10 of their standard deviations.*standardise them"):
        varlap.MAP(100)(varlap.BNN(nn.Linear(4, 1), "gaussian"), X, 50 + 2 * X[:, :1])


@pytest.mark.parametrize("noise", [1e-3, 1.0])
def test_standardised_targets_are_no_mistake_whatever_the_noise(noise: float):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        varlap.VL(100)(varlap.BNN(nn.Linear(4, 1), varlap.Gaussian(noise, learnt=False)), X, X[:, :1])


@pytest.mark.parametrize(
    ("network", "likelihood", "y"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1)), "categorical", Y),  # as good as logits
        (nn.Sequential(nn.Linear(4, 3), nn.Sigmoid()), "gaussian", torch.rand(8, 3)),  # outputs between 0 and 1
        (nn.Linear(4, 1), "bernoulli", (Y > 1).float()[:, None]),
    ],
)
def test_others_are_left_in_peace(network: nn.Module, likelihood: str, y: torch.Tensor):
    if likelihood == "bernoulli":
        nn.init.zeros_(network.weight)  # logits that all lie between 0 and 1
        nn.init.constant_(network.bias, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        varlap.VL(100)(varlap.BNN(network, likelihood), X, y)


@pytest.mark.parametrize("objective", [lambda: varlap.VL(100), lambda: varlap.VI(100)])
def test_variances_that_no_optimizer_has_are_named(objective: Any):
    bnn, loss = varlap.BNN(nn.Linear(4, 3)), objective()
    optimizer = torch.optim.Adam(bnn.network.parameters(), lr=1e-3)

    def train(num_steps: int) -> None:
        for _ in range(num_steps):
            loss(bnn, X, Y).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    train(100)
    with pytest.warns(VarlapWarning, match="log σ has not changed in 100 calls of V[LI]") as said:
        train(1)
    assert said[0].filename == __file__
    train(120)  # it is said once


@pytest.mark.parametrize(
    ("objective", "train"),
    [
        (lambda: varlap.VL(100), True),
        (lambda: varlap.MAP(100), False),  # which has none
        (lambda: varlap.VL(100, variances="closed-form", beta_warmup_steps=0), False),
    ],
)
def test_variances_that_move_or_have_no_gradient_are_not(objective: Any, train: bool):
    bnn, loss = varlap.BNN(nn.Linear(4, 3)), objective()
    parameters = bnn.parameter_groups(1e-3) if train else bnn.network.parameters()
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(120):
            loss(bnn, X, Y).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.update_variances(bnn)


@pytest.mark.parametrize("objective", [varlap.VL, varlap.MAP, varlap.VI])
def test_the_size_of_a_batch_given_for_that_of_the_data_is_told_once(objective: Any):
    bnn, loss = varlap.BNN(nn.Linear(4, 3)), objective(num_data=4)
    loss(bnn, X[:4], Y[:4])
    with pytest.warns(VarlapWarning, match=r"num_data=4 is the size of a batch, and other batches hold other") as said:
        loss(bnn, X[4:], Y[4:])
    assert said[0].filename == __file__
    assert f"{objective.__name__}(num_data=len(train_set))" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(bnn, X[:4], Y[:4])


def test_the_whole_data_in_another_order_are_left_in_peace():
    bnn, y = varlap.BNN(nn.Linear(4, 2), "gaussian"), torch.randn(8, 2)
    loss = varlap.VL(num_data=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for order in (torch.arange(8), torch.randperm(8), torch.randperm(8)):
            loss(bnn, X[order], y[order])
        smaller = varlap.VL(num_data=100)
        for part in (slice(0, 4), slice(4, 8)):
            smaller(bnn, X[part], y[part])


def test_steps_that_never_have_curvature_are_named_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("varlap.objectives.vl.CALLS_WITHOUT_CURVATURE", 10)
    bnn = varlap.BNN(nn.Linear(4, 3))
    message = r"no turn in 10 calls: Fisher\(every=4, .*; pass consecutive numbers as step"

    def take(steps: Iterable[int]) -> None:
        objective = varlap.VL(len(Y))
        for step in steps:
            objective(bnn, X, Y, step=step)

    with pytest.warns(VarlapWarning, match=message) as said:
        take(range(1, 60, 2))
    assert len(said) == 1
    # The settings of pytest would make a warning an error.
    take(range(30))
    take([0, *[1] * 30])  # many parts of one step
