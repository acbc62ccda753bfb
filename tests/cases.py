"""The shared list of cases: small float64 networks of every kind, each with a likelihood, a batch and targets.

@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_...(case): bnn, x, y = case.make()
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import varlap

S = 5  # items in a batch
FAST = varlap.Fisher(every=4, fraction=0.25, memory=0.9, batch_norm="part")  # less curvature work, remembered
K = 3  # classes


@dataclass(frozen=True)
class Case:
    """A recipe for a network with its likelihood, inputs and targets; the same numbers at each call."""

    name: str
    network: Callable[[], nn.Module]
    likelihood: Any
    x: Callable[[], Any]
    y: Callable[[], Tensor]
    options: dict[str, Any]

    def make(self, **overrides: Any) -> tuple[varlap.BNN, Any, Any]:
        """Build the BNN in float64 and training mode, with log σ moved off its start, and a batch."""
        torch.manual_seed(1)
        bnn = varlap.BNN(self.network(), self.likelihood(), **(self.options | overrides)).double()
        with torch.no_grad():
            for log_sigma in bnn.log_sigma.parameters():
                log_sigma.add_(0.3 * torch.randn_like(log_sigma))
        return bnn.train(), self.x(), self.y()


class Attention(nn.Module):
    """Self-attention by the fused function, which has no second derivative of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.qkv = nn.Linear(4, 12)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, K)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(self.embed(tokens))).unsqueeze(1).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v).mean((1, 2)))


class Recurrent(nn.Module):
    """An LSTM or GRU over a short sequence."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(2, 3, batch_first=True)
        self.head = nn.Linear(3, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Shared(nn.Module):
    """One linear layer used twice, a frozen one, and a parameter that no forward pass touches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(4, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.again(self.frozen(torch.tanh(self.first(x))))))


class Structured(nn.Module):
    """Takes two named inputs and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.left(left)) * self.right(right)
        return {"hidden": hidden, "logits": hidden.cumsum(1)}


class Exponential:
    """A user's own likelihood, without a score: waiting times at rate exp(outputs)."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - outputs.exp() * targets).sum(1)

    def sample(self, outputs: Tensor, generator: torch.Generator, targets: Any = None) -> Tensor:
        return torch.empty_like(outputs).exponential_(generator=generator) / outputs.exp()

    def predict(self, outputs: Tensor) -> varlap.Prediction:
        return varlap.Prediction(mean=(-outputs).exp(), variance=(-2 * outputs).exp())


def _draw(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _mlp(num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, num_outputs))


def _convnet(*norm: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1, bias=not norm),
        *norm,
        nn.Softplus(),
        nn.Conv2d(3, 2, 2, stride=2),
        nn.Flatten(),
        nn.Linear(8, K),
    )


def _classes() -> Tensor:
    return torch.arange(S) % K


def case(
    name: str,
    network: Callable[[], nn.Module],
    likelihood: Any = varlap.Categorical,
    x: Callable[[], Any] = lambda: _draw(S, 4),
    y: Callable[[], Tensor] = _classes,
    **options: Any,
) -> Case:
    """Make a case; by default classes from four numbers."""
    return Case(name, network, likelihood, x, y, options)


def _pixel_labels() -> Tensor:
    labels = torch.arange(S * 4).reshape(S, 2, 2) % K
    labels[0, 0, 0] = labels[1] = -100
    return labels


CASES = [
    case("mlp-categorical", lambda: _mlp(K)),
    case("mlp-bernoulli", lambda: _mlp(2), varlap.Bernoulli, y=lambda: (_draw(S, 2, seed=3) > 0).double()),
    case("mlp-gaussian", lambda: _mlp(2), lambda: varlap.Gaussian(noise=0.7), y=lambda: _draw(S, 2, seed=3)),
    case("mlp-heteroscedastic", lambda: _mlp(2), varlap.Heteroscedastic, y=lambda: _draw(S, 1, seed=3)),
    case("mlp-poisson", lambda: _mlp(2), varlap.Poisson, y=lambda: (torch.arange(S * 2).reshape(S, 2) % 4).double()),
    case(
        "segmentation",
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Softplus(), nn.Conv2d(2, K, 2)),
        x=lambda: _draw(S, 1, 4, 4),
        y=_pixel_labels,
    ),
    case("convnet", _convnet, x=lambda: _draw(S, 1, 4, 4)),
    case("batch-norm", lambda: _convnet(nn.BatchNorm2d(3)), x=lambda: _draw(S, 1, 4, 4)),
    case("group-norm", lambda: _convnet(nn.GroupNorm(3, 3)), x=lambda: _draw(S, 1, 4, 4)),
    case("attention", Attention, x=lambda: torch.arange(S * 3).reshape(S, 3) % 7),
    case("lstm", lambda: Recurrent(nn.LSTM), x=lambda: _draw(S, 3, 2)),
    case("gru", lambda: Recurrent(nn.GRU), x=lambda: _draw(S, 3, 2)),
    case("shared-frozen-unused", Shared),
    case("dicts", Structured, x=lambda: {"left": _draw(S, 4), "right": _draw(S, 2, seed=4)}, output="logits"),
    case("tuples", Structured, x=lambda: (_draw(S, 4), _draw(S, 2, seed=4)), output="logits"),
    case("subset", lambda: _mlp(K), select="2.*"),
    case("one-variance", lambda: _mlp(K), variances="one"),
    case("empirical-bayes", lambda: _mlp(K), prior=varlap.EmpiricalBayesPrior()),
    case("pretrained-centre", lambda: _mlp(K), prior=varlap.FanInPrior(centre="network")),
]

LIKELIHOOD_CASES = CASES[:6]
