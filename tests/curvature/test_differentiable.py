"""Claims about networks whose fused kernels have no second derivative: VL trains them, with the right gradients."""

import contextlib
import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import varlap
from cases import Attention
from varlap.curvature.differentiable import twice_differentiable
from varlap.errors import NetworkError

S, K, N, BETA = 5, 3, 50, 0.3


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def tokens() -> Tensor:
    return torch.arange(S * 3).reshape(S, 3) % 7


class HandWritten(Attention):
    """The same attention, with its products and softmax written out."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(self.embed(x))).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.head((weights @ v).mean(1))


class MultiHead(nn.Module):
    """nn.MultiheadAttention, which takes another way through torch when no weights are asked for."""

    def __init__(self, need_weights: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(4, K)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=self.need_weights)[0].mean(1))


class Recurrent(nn.Module):
    """The last state of a recurrent layer, classified."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(layer.hidden_size * (2 if layer.bidirectional else 1), K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Pairs(nn.Module):
    """nn.Bilinear of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear, self.head = nn.Bilinear(2, 3, 4), nn.Linear(4, K)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.tanh(self.bilinear(left, right)))


def encoder(dropout: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=dropout, activation=F.gelu, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(12, K))


def image_network(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 2, bias=False), *layers, nn.Softplus(), nn.Flatten(), nn.LazyLinear(K))


NETWORKS = {
    "attention": (Attention, tokens),
    "multihead-weights": (lambda: MultiHead(True), lambda: numbers(S, 3, 4)),
    "multihead-no-weights": (lambda: MultiHead(False), lambda: numbers(S, 3, 4)),
    "transformer-layer": (encoder, lambda: numbers(S, 3, 4)),
    "lstm": (lambda: Recurrent(nn.LSTM(2, 3, batch_first=True)), lambda: numbers(S, 4, 2)),
    "gru": (lambda: Recurrent(nn.GRU(2, 3, batch_first=True)), lambda: numbers(S, 4, 2)),
    "rnn": (lambda: Recurrent(nn.RNN(2, 3, batch_first=True)), lambda: numbers(S, 4, 2)),
    "deep-two-way-lstm": (
        lambda: Recurrent(nn.LSTM(2, 2, num_layers=2, bidirectional=True, batch_first=True)),
        lambda: numbers(S, 3, 2),
    ),
    "rms-norm": (lambda: nn.Sequential(nn.Linear(4, 5), nn.RMSNorm(5), nn.Linear(5, K)), lambda: numbers(S, 4)),
    "layer-norm": (lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, K)), lambda: numbers(S, 4)),
    "instance-norm": (lambda: image_network(nn.InstanceNorm2d(2, affine=True)), lambda: numbers(S, 1, 4, 4)),
    "tracked-instance-norm": (
        lambda: image_network(nn.InstanceNorm2d(2, affine=True, track_running_stats=True)),
        lambda: numbers(S, 1, 4, 4),
    ),
    "batch-norm-without-weights": (
        lambda: image_network(nn.BatchNorm2d(2, affine=False)),
        lambda: numbers(S, 1, 4, 4),
    ),
    "transposed-convolution": (
        lambda: image_network(nn.ConvTranspose2d(2, 2, 2, stride=2)),
        lambda: numbers(S, 1, 3, 3),
    ),
    "embedding-bag": (lambda: nn.Sequential(nn.EmbeddingBag(7, 4), nn.Tanh(), nn.Linear(4, K)), tokens),
    "bilinear": (Pairs, lambda: (numbers(S, 2), numbers(S, 3))),
}

# torch has no derivative of _embedding_bag_backward, and varlap no other way yet: nn.Embedding and a mean are one.
NO_SECOND_DERIVATIVE = {"embedding-bag": pytest.mark.xfail(raises=(NotImplementedError, NetworkError), strict=True)}


class Spy(varlap.Categorical):
    """Notes the labels that it drew."""

    def sample(self, outputs, generator, targets=None):
        self.drawn = super().sample(outputs, generator, targets)
        return self.drawn


def wrapped(network: nn.Module, x, dtype=torch.float64) -> tuple[varlap.BNN, object, Tensor]:
    x = tuple(t.to(dtype) for t in x) if isinstance(x, tuple) else x.to(dtype) if x.is_floating_point() else x
    network = network.to(dtype)
    network(*x) if isinstance(x, tuple) else network(x)  # gives a lazy layer its shape
    bnn = varlap.BNN(network, Spy(), prior=varlap.OneScalePrior(0.8)).train()
    with torch.no_grad():
        for log_sigma in bnn.log_sigma.parameters():
            log_sigma.copy_(-1 + 0.3 * torch.randn(log_sigma.shape))
    return bnn, x, torch.arange(S) % K


def gradients_of_vl(bnn, x, y) -> tuple[Tensor, list[Tensor]]:
    loss = varlap.VL(num_data=N, beta=BETA, curvature=varlap.Fisher())(bnn, x, y).loss  # the paper's: the whole batch
    tensors = [*bnn.means().values(), *bnn.log_sigma.values()]
    return loss.detach(), list(torch.autograd.grad(loss, tensors))


def gradients_of_equation_30(bnn, x, y, labels) -> tuple[Tensor, list[Tensor]]:
    """Eq. 30 as printed, in plain autograd, for the labels that were drawn."""
    means, log_sigmas = list(bnn.means().values()), list(bnn.log_sigma.values())
    with sdpa_kernel(SDPBackend.MATH):
        outputs = bnn.outputs(x)
    g_bar = torch.autograd.grad(-F.cross_entropy(outputs, labels), means, create_graph=True)
    loss = F.cross_entropy(outputs, y)
    for g, mean, log_sigma in zip(g_bar, means, log_sigmas, strict=True):
        variance, prior = (2 * log_sigma).exp(), 0.8**2
        kl = 0.5 * ((variance + mean.square()) / prior - 1 + math.log(prior) - 2 * log_sigma).sum()
        loss = loss + S / 2 * (variance * g.square()).sum() + BETA / N * kl
    return loss.detach(), list(torch.autograd.grad(loss, means + log_sigmas))


def assert_same(found, expected, **tolerance) -> None:
    torch.testing.assert_close(found[0], expected[0], **tolerance)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, {"rtol": 1e-9, "atol": 1e-11}), (torch.float32, {"rtol": 1e-4, "atol": 1e-5})],
    ids=["double", "single"],
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=NO_SECOND_DERIVATIVE.get(name, ())) for name in NETWORKS])
def test_gradients_of_vl_are_those_of_equation_30_in_plain_autograd(name, dtype, tolerance):
    make, x = NETWORKS[name]
    bnn, x, y = wrapped(make(), x(), dtype)
    naive = copy.deepcopy(bnn)  # running statistics move with each pass
    found = gradients_of_vl(bnn, x, y)
    assert_same(found, gradients_of_equation_30(naive, x, y, bnn.likelihood.drawn), **tolerance)


class Distances(nn.Module):
    """Logits that are distances from centres."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.centres = nn.Embedding(7, 4), nn.Parameter(numbers(K, 4))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(self.embed(x).mean(1), self.centres)


class Unfinished(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


EVALUATIONS = {
    "VL": lambda bnn, x, y: varlap.VL(num_data=N)(bnn, x, y),
    "VLHessian": lambda bnn, x, y: varlap.VLHessian(num_data=N)(bnn, x, y),
    "hessian_diagonal": lambda bnn, x, y: varlap.hessian_diagonal(bnn, (x, y)),
}


@pytest.mark.parametrize("evaluate", EVALUATIONS.values(), ids=EVALUATIONS)
@pytest.mark.parametrize("network", [Distances, NETWORKS["embedding-bag"][0]], ids=["cdist", "embedding-bag"])
def test_what_has_no_second_derivative_is_named_with_a_way_out(network, evaluate):
    bnn, x, y = wrapped(network(), tokens())
    message = (
        "torch has no second derivative for a part .*_backward' is not .* without curvature: varlap.VI or varlap.MAP"
    )
    with pytest.raises(NetworkError, match=message):
        evaluate(bnn, x, y)


@pytest.mark.parametrize("evaluate", EVALUATIONS.values(), ids=EVALUATIONS)
def test_a_forward_that_is_not_implemented_is_not_mistaken_for_a_derivative(evaluate):
    with pytest.raises(NotImplementedError, match='missing the required "forward"'):
        evaluate(varlap.BNN(Unfinished()), tokens(), torch.arange(S) % K)


@pytest.mark.parametrize("objective", [varlap.VL, varlap.VLHessian])
def test_a_network_that_was_compiled_after_it_was_wrapped_is_refused(objective):
    bnn, x, y = wrapped(nn.Sequential(nn.Linear(4, K)), numbers(S, 4))
    bnn.network[0].compile(backend="eager")
    with pytest.raises(NetworkError, match=r"its part '0' was compiled by .* derivative; leave out \.compile\(\)"):
        objective(num_data=N)(bnn, x, y)


@pytest.mark.parametrize("objective", [varlap.VL, varlap.VLHessian, varlap.MAP])
def test_fused_attention_has_the_derivatives_of_attention_written_out_by_hand(objective):
    """VL needs the second derivative; of VLHessian the value, since torch's LayerNorm has no right third one."""
    results = []
    for network in (Attention(), HandWritten()):
        torch.manual_seed(0)
        for parameter in network.parameters():
            nn.init.normal_(parameter)
        bnn, x, y = wrapped(network, tokens())
        loss = objective(num_data=N, seed=4)(bnn, x, y).loss
        means = list(bnn.means().values())
        gradients = [] if objective is varlap.VLHessian else list(torch.autograd.grad(loss, means))
        results.append((loss.detach(), gradients))
    assert_same(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_the_switch_fused_attention_has_no_second_derivative(dtype):
    """What the switch is for. When torch learns this derivative, this test says that the switch can go."""
    bnn, x, y = wrapped(Attention(), tokens(), dtype)
    first = torch.autograd.grad(F.cross_entropy(bnn.outputs(x), y), bnn.network.qkv.weight, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"derivative for .*attention.* is not implemented"):
        first.square().sum().backward()
    with twice_differentiable(bnn.network):
        outputs = bnn.outputs(x)
    first = torch.autograd.grad(F.cross_entropy(outputs, y), bnn.network.qkv.weight, create_graph=True)[0]
    first.square().sum().backward()
    assert bnn.network.qkv.weight.grad.abs().sum() > 0


def kernel_settings() -> list[bool]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    kinds = (cuda.flash_sdp_enabled, cuda.math_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled)
    return [*(kind() for kind in kinds), cudnn.enabled, cudnn.benchmark, cudnn.deterministic]


@pytest.mark.parametrize("network", [nn.Linear(2, 2), nn.LSTM(2, 2)], ids=["linear", "lstm"])
def test_the_callers_choice_of_kernels_is_put_back_after_errors_too(network):
    before = kernel_settings()
    with twice_differentiable(network):
        assert torch.backends.cuda.math_sdp_enabled()
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cudnn.enabled == isinstance(network, nn.Linear)  # cuDNN's LSTM has no second derivative
    assert kernel_settings() == before
    with pytest.raises(ZeroDivisionError), twice_differentiable(network):
        raise ZeroDivisionError
    assert kernel_settings() == before


@pytest.mark.parametrize("name", ["multihead-weights", "multihead-no-weights", "transformer-layer", "lstm", "gru"])
def test_networks_with_dropout_train_under_vl_in_training_mode(name):
    """Single precision, Adam, 40 steps on five items: the observed labels become likelier, and all stays finite."""
    networks = {
        "multihead-weights": lambda: MultiHead(True, dropout=0.1),
        "multihead-no-weights": lambda: MultiHead(False, dropout=0.1),
        "transformer-layer": lambda: encoder(dropout=0.1),
    }
    make, x = NETWORKS[name]
    bnn, x, y = wrapped(networks.get(name, make)(), x(), torch.float32)
    objective, optimizer = varlap.VL(num_data=10_000, beta=0.1), varlap.adam(bnn, lr=0.02, log_sigma_lr_multiplier=1)
    history = []
    for _ in range(40):
        terms = objective(bnn, x, y)
        terms.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert terms.curvature > 0
        history.append(terms.log_likelihood.item())
    assert sum(history[-5:]) > sum(history[:5]) + 1  # a mean over five steps that is 0.2 nats better
    assert bnn.network.training
    assert all(parameter.isfinite().all() for parameter in bnn.parameters())


@pytest.mark.parametrize(
    ("of", "written_out"),
    [
        (nn.utils.parametrizations.weight_norm, True),
        (nn.utils.weight_norm, True),
        (nn.utils.parametrizations.spectral_norm, False),
        (nn.utils.parametrizations.orthogonal, False),
        (lambda layer: layer, False),
    ],
    ids=["weight norm", "old weight norm", "spectral norm", "orthogonal", "none"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_of_reparametrised_layers_weight_norm_alone_pays_for_a_look_at_each_call_of_torch(of, written_out, monkeypatch):
    orders = []

    def recording(num_derivatives):
        orders.append(num_derivatives)
        return contextlib.nullcontext()

    monkeypatch.setattr("varlap.curvature.differentiable.WrittenOut", recording)
    with twice_differentiable(nn.Sequential(of(nn.Linear(4, 4)), nn.Tanh())):
        pass
    assert orders == ([2] if written_out else [])
