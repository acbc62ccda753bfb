"""Claims about any network: VL trains what nobody changed for it."""

import copy
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

import varlap
from cases import FAST
from varlap.errors import NetworkError, VarlapWarning

S, K = 6, 3


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- the zoo --------------------------------------------------------------------------------------------------------


def convnet(batch_norm=False):
    return varlap.models.convnet(image_size=8, num_classes=K, width=4, batch_norm=batch_norm)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.GRU(2, 5, num_layers=2, batch_first=True), nn.Linear(5, K)

    def forward(self, x):
        return self.head(self.layer(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, activation="gelu", batch_first=True)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, K)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.head(self.encoder(x)[:, 0])


class LanguageModel(nn.Module):
    """Input and output embeddings are one matrix; outputs are [S, K, T]."""

    def __init__(self, num_tokens=7):
        super().__init__()
        self.embed = nn.Embedding(num_tokens, 6)
        self.layer = nn.LSTM(6, 6, batch_first=True)
        self.head = nn.Linear(6, num_tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens))[0]).transpose(1, 2)


class Checkpointed(nn.Module):
    """Any body, computed again in the backward pass instead of being kept."""

    def __init__(self, body, head, enabled=True):
        super().__init__()
        self.body, self.head, self.enabled = body, head, enabled

    def forward(self, x):
        hidden = checkpoint(self.body, x, use_reentrant=False) if self.enabled else self.body(x)
        return self.head(hidden)


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = convnet(batch_norm=True)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.body(x)


class TakesAndReturnsDicts(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 5), nn.Linear(2, 5)
        self.head = nn.Linear(5, K)

    def forward(self, left, right, scale=1.0):
        hidden = torch.tanh(self.left(left) * self.right(right))
        return {"hidden": hidden, "logits": scale * self.head(hidden)}


class TakesAndReturnsTuples(TakesAndReturnsDicts):
    def forward(self, left, right):
        returned = super().forward(left, right)
        return returned["hidden"], returned["logits"]


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class TakesOneTuple(TakesAndReturnsDicts):
    def forward(self, pair):
        left, right = pair
        return super().forward(left, right)["logits"]


class TakesOneDict(TakesAndReturnsDicts):
    def forward(self, batch):
        return super().forward(batch["left"], batch["right"])["logits"]


class ReassignsItsBuffer(nn.Module):
    """A running mean kept as `self.centre = ...`, not in place."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, K)
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
            self.count = self.count + 1
        return self.head(x - self.centre)


def hooked():
    network = varlap.models.mlp(4, K)
    network[0].register_forward_hook(lambda module, args, output: output * 2)
    network[2].register_forward_pre_hook(lambda module, args: (args[0] - 1,))
    network[0].weight.register_hook(lambda gradient: gradient * 1.0)
    return network


@dataclass(frozen=True)
class Member:
    name: str
    network: Callable[[], nn.Module]
    x: Callable[[], Any] = lambda: draw(S, 4)
    y: Callable[[], torch.Tensor] = lambda: torch.arange(S) % K
    likelihood: str = "categorical"
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, seed=0):
        torch.manual_seed(seed)
        return varlap.BNN(self.network(), self.likelihood, **self.options), self.x(), self.y()


def images(size=8, num_items=S):
    return lambda: draw(num_items, 1, size, size)


def next_tokens():
    tokens = torch.arange(S * 5).reshape(S, 5) * 3 % 7
    tokens[0, 2:] = tokens[3] = -100  # padding, and an item without any label
    return tokens


def both():
    return {"left": draw(S, 4), "right": draw(S, 2, seed=1)}


ZOO = [
    Member("mlp", lambda: varlap.models.mlp(4, K)),
    Member("convnet", lambda: convnet(), images()),
    Member("batch-norm", lambda: convnet(batch_norm=True), images()),
    Member(
        "preact-resnet",
        lambda: varlap.models.preact_resnet18(num_classes=K, num_channels=1, width=4),
        images(32, 2),
        lambda: torch.arange(2),
    ),
    Member("gru", Recurrent, lambda: draw(S, 4, 2)),
    Member("transformer", Transformer, lambda: draw(S, 3, 8)),
    Member("tied-language-model", LanguageModel, lambda: torch.arange(S * 5).reshape(S, 5) % 7, next_tokens),
    Member(
        "checkpoint",
        lambda: Checkpointed(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, K)),
    ),
    Member("weight-norm", lambda: nn.Sequential(weight_norm(nn.Linear(4, 8)), nn.Tanh(), weight_norm(nn.Linear(8, K)))),
    Member("spectral-norm", lambda: nn.Sequential(spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, K))),
    Member("autocast", Autocast, images()),
    Member("dicts", TakesAndReturnsDicts, both, options={"output": "logits"}),
    Member("dict-with-a-default", TakesAndReturnsDicts, lambda: both() | {"scale": 2.0}, options={"output": "logits"}),
    Member("tuples", TakesAndReturnsTuples, lambda: tuple(both().values()), options={"output": 1}),
    Member("one-tuple", TakesOneTuple, lambda: tuple(both().values())),
    Member("one-named-tuple", TakesOneTuple, lambda: Pair(**both())),
    Member("one-dict", TakesOneDict, both),
    Member("reassigned-buffer", ReassignsItsBuffer),
    Member("hooks", hooked),
    Member("dropout", lambda: nn.Sequential(nn.Linear(4, 20), nn.Dropout(0.3), nn.Tanh(), nn.Linear(20, K))),
    Member(
        "transposed-convolution",
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.GroupNorm(2, 4), nn.SiLU(), nn.ConvTranspose2d(4, 1, 4, 2)),
        images(),
        images(),
        "gaussian",
    ),
]  # fmt: skip
NAMED = {member.name: member for member in ZOO}
by_member = pytest.mark.parametrize("member", ZOO, ids=lambda member: member.name)


def train(bnn, objective, x, y, num_steps, lr=0.01):
    optimizer = varlap.adam(bnn, lr=lr)
    losses = []
    for _ in range(num_steps):
        terms = objective(bnn, x, y)
        terms.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(terms.loss.item())
    return losses


@by_member
def test_five_steps_of_vl_are_finite_and_move_every_weight_and_variance(member):
    bnn, x, y = member.make()
    before = {name: p.detach().clone() for name, p in bnn.named_parameters()}
    random_state = torch.get_rng_state()
    losses = train(bnn, varlap.VL(num_data=60, beta=0.1), x, y, num_steps=5)
    assert all(math.isfinite(loss) for loss in losses)
    for name, p in bnn.named_parameters():
        assert bool(p.isfinite().all()), name
        assert not torch.equal(p, before[name]), name
    assert torch.equal(torch.get_rng_state(), random_state)
    prediction = bnn.predict(x)
    assert bool((prediction.mean if prediction.probs is None else prediction.probs).isfinite().all())


@pytest.mark.parametrize(
    "member", [m for m in ZOO if m.name in ("mlp", "batch-norm", "transformer")], ids=lambda m: m.name
)
def test_thirty_steps_on_one_batch_lower_the_loss(member):
    bnn, x, y = member.make()
    losses = train(bnn, varlap.VL(num_data=60, beta=0.1), x, y, num_steps=30)
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-5:]) < sum(losses[:5])
    assert losses[-1] < losses[0] - 0.1


@by_member
def test_curvature_reaches_every_bayesian_tensor(member):
    """Without the KL, the gradient in log σ is σ² f: positive where drawn labels pull at a weight."""
    bnn, x, y = member.make()
    found = gradients(bnn, x, y, varlap.VL(num_data=60, beta=0.0))
    for name in bnn.log_sigma:
        f = found[f"log_sigma.{name}"]
        assert bool((f >= 0).all()), name
        assert f.max() > 0, name


@by_member
def test_network_is_called_in_the_same_way_in_training_and_prediction(member):
    bnn, x, _ = member.make()
    bnn.eval()
    expected, found = bnn.likelihood.predict(bnn.outputs(x)), bnn.predict(x)
    for name in ("probs", "mean", "variance"):
        torch.testing.assert_close(getattr(expected, name), getattr(found, name))


# -- single members, closer -----------------------------------------------------------------------------------------


def gradients(bnn, x, y, objective):
    objective(bnn, x, y).loss.backward()
    found = {name: p.grad for name, p in bnn.named_parameters()}
    assert all(gradient is not None for gradient in found.values())
    return found


BODIES = {
    "linear": lambda: (nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 5)), 5),
    "convolution": lambda: (nn.Sequential(nn.Conv2d(1, 2, 3), nn.Softplus(), nn.Conv2d(2, 2, 3), nn.Flatten()), 8),
    "batch-norm": lambda: (
        nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Softplus(), nn.Flatten()),
        32,
    ),
    "dropout": lambda: (nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Dropout(), nn.Tanh()), 5),
    "attention": lambda: (
        nn.Sequential(
            nn.Flatten(1, 2),
            nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, activation="gelu", batch_first=True),
            nn.Flatten(),
        ),
        36,
    ),
}


@pytest.mark.parametrize("curvature", [varlap.Fisher(), FAST], ids=["whole batch", "remembered part"])
@pytest.mark.parametrize("body", BODIES)
def test_gradient_with_a_checkpoint_equals_the_gradient_without(body, curvature):
    found = []
    for enabled in (True, False):
        torch.manual_seed(0)
        inside, width = BODIES[body]()
        bnn = varlap.BNN(Checkpointed(inside, nn.Linear(width, K), enabled)).double()
        found.append(gradients(bnn, draw(S, 1, 6, 6).double(), torch.arange(S) % K, varlap.VL(60, curvature=curvature)))
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-10, atol=1e-13, msg=name)


by_curvature = pytest.mark.parametrize("curvature", [varlap.Fisher(), FAST], ids=["whole batch", "remembered part"])


@by_curvature
def test_reassigned_buffer_moves_once_a_step_as_in_ordinary_training(curvature):
    bnn, x, y = NAMED["reassigned-buffer"].make()
    plain = copy.deepcopy(bnn.network)
    vl, vi = varlap.VL(num_data=60, curvature=curvature), varlap.VI(num_data=60, num_samples=3)
    for objective in (vl, vi, varlap.VLHessian(num_data=60), varlap.MAP(num_data=60)):
        objective(bnn, x, y)
        plain(x)
        assert bnn.network.count == plain.count
        torch.testing.assert_close(bnn.network.centre, plain.centre, rtol=0, atol=0)


@pytest.mark.parametrize("objective", [varlap.MAP, varlap.VI, varlap.VL, varlap.VLHessian])
def test_batch_norm_moves_its_statistics_once_a_step(objective):
    bnn, x, y = NAMED["batch-norm"].make()
    twin = copy.deepcopy(bnn.network)
    for step in range(1, 4):
        objective(num_data=60)(bnn, x, y)
        assert bnn.network[1].num_batches_tracked == step
    if objective is not varlap.VI:  # its network has other weights
        for _ in range(3):
            twin(x)
        torch.testing.assert_close(bnn.network[1].running_var, twin[1].running_var)


@by_curvature
def test_spectral_norm_moves_its_vectors_once_a_step(curvature):
    bnn, x, y = NAMED["spectral-norm"].make()
    twin = copy.deepcopy(bnn.network)
    varlap.VL(num_data=60, curvature=curvature)(bnn, x, y)
    twin(x)
    for (name, buffer), (_, expected) in zip(bnn.network.named_buffers(), twin.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, msg=name)


def test_layer_without_a_second_derivative_is_named():
    """torch has none for EmbeddingBag; its own error names a private function and no way out."""
    network = nn.Sequential(nn.EmbeddingBag(9, 6), nn.GELU(), nn.Linear(6, K))
    bnn, x, y = varlap.BNN(network), torch.arange(S * 3).reshape(S, 3) % 9, torch.arange(S) % K
    varlap.MAP(num_data=60)(bnn, x, y).loss.backward()
    varlap.VI(num_data=60)(bnn, x, y).loss.backward()
    with pytest.raises(NetworkError, match="EmbeddingBag"):
        varlap.VL(num_data=60)(bnn, x, y)


def test_items_whose_labels_are_all_ignored_leave_no_mark():
    member = NAMED["tied-language-model"]
    bnn, tokens, y = member.make()
    bnn.double()
    assert bool((y[3] == -100).all())
    other = tokens.clone()
    other[3] = (tokens[3] + 1) % 7
    one, two = (gradients(copy.deepcopy(bnn), inputs, y, varlap.VL(num_data=60)) for inputs in (tokens, other))
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, two[name], rtol=1e-12, atol=1e-15, msg=name)


def test_tied_weights_are_one_weight_with_the_gradient_of_both_places():
    bnn, tokens, y = NAMED["tied-language-model"].make()
    assert "head.weight" not in bnn.log_sigma
    assert bnn.num_weights() == sum(p.numel() for p in bnn.network.parameters())
    varlap.MAP(num_data=60)(bnn, tokens, y).loss.backward()
    assert bnn.network.head.weight is bnn.network.embed.weight
    plain = copy.deepcopy(bnn.network)
    plain.zero_grad()
    loss = F.cross_entropy(plain(tokens), y, reduction="sum", ignore_index=-100) / S
    loss = loss + sum(0.5 * (p / bnn.prior_scale[n]).square().sum() for n, p in plain.named_parameters()) / 60
    loss.backward()
    torch.testing.assert_close(bnn.network.embed.weight.grad, plain.embed.weight.grad, rtol=1e-5, atol=1e-6)


def test_the_same_seed_and_step_draw_the_same_dropout_mask():
    member = NAMED["dropout"]
    bnn, x, y = member.make()
    objective = varlap.MAP(num_data=60)
    first, again, other = (objective(bnn, x, y, step=step).loss for step in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_outer_autocast_gives_bfloat16_accuracy_and_single_precision_gradients():
    bnn, x, y = NAMED["convnet"].make()
    exact = gradients(copy.deepcopy(bnn), x, y, varlap.VL(num_data=60))
    with torch.autocast("cpu", torch.bfloat16):
        terms = varlap.VL(num_data=60)(bnn, x, y)
    terms.loss.backward()
    assert terms.loss.dtype == torch.float32
    flat = [torch.cat([t.flatten() for t in found]) for found in (exact.values(), [p.grad for p in bnn.parameters()])]
    assert flat[1].dtype == torch.float32
    assert 0 < (flat[0] - flat[1]).norm() / flat[0].norm() < 0.05


# -- activations without a second derivative ------------------------------------------------------------------------


class FunctionalRelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, K)

    def forward(self, x):
        return self.head(F.relu(self.body(x)))


KINKED = {
    "module": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, K)), r"ReLU at 1\."),
    "function": (FunctionalRelu, r"relu at test_any_network\.py:\d+ in forward\."),
}
by_kink = pytest.mark.parametrize(("network", "place"), KINKED.values(), ids=KINKED)


def caught_warnings(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [w for w in caught if issubclass(w.category, VarlapWarning)]


@by_kink
@pytest.mark.parametrize("objective", [varlap.VL, varlap.VLHessian], ids=lambda objective: objective.__name__)
def test_relu_warns_once_and_names_the_place(network, place, objective):
    bnn, tries = varlap.BNN(network()), objective(num_data=60)
    x, y = draw(S, 4), torch.arange(S) % K
    message = (
        rf"^{objective.__name__} needs second derivatives, and the network has activations without one: {place} "
        r"The means' gradient then loses the activations' curvature \(variances are unaffected\)\. "
        r"Before training, swap modules by network = varlap\.smooth\(network\), and write functional calls as F\.silu, "
        r"F\.gelu or F\.softplus$"
    )
    with pytest.warns(VarlapWarning, match=message) as caught:
        tries(bnn, x, y)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert caught_warnings(lambda: tries(bnn, x, y)) == []
    assert caught_warnings(lambda: objective(num_data=60)(bnn, x, y)) == []


class FineTuned(nn.Module):
    """A body with kinks of both kinds, and a head on it."""

    def __init__(self, *head):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), FunctionalRelu(), nn.Linear(K, 8))
        self.head = nn.Sequential(nn.Linear(8, 8), *head, nn.Linear(8, K))

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("objective", [varlap.VL, varlap.VLHessian], ids=lambda objective: objective.__name__)
def test_kinks_that_no_bayesian_weight_reaches_are_left_in_peace_since_the_gradient_is_right(frozen, objective):
    torch.manual_seed(0)
    network = FineTuned(nn.Tanh()).double()
    network.body.requires_grad_(not frozen)
    bnn, x, y = varlap.BNN(network, select="head.*"), draw(S, 4).double(), torch.arange(S) % K
    trained = [p for p in network.parameters() if p.requires_grad]
    tries = objective(num_data=60)
    assert caught_warnings(lambda: tries(bnn, x, y, step=0).loss.backward()) == []
    assert trained == [p for p in network.parameters() if p.requires_grad]
    for parameter in trained:
        values, h, entry = [], 1e-5, parameter.detach().view(-1)
        for offset in (h, -2 * h):
            entry[0] += offset
            values.append(objective(num_data=60)(bnn, x, y, step=0).loss.item())
        entry[0] += h
        difference = (values[0] - values[1]) / (2 * h)
        assert parameter.grad.view(-1)[0].item() == pytest.approx(difference, rel=1e-4, abs=1e-8)


def test_of_several_kinks_those_behind_bayesian_weights_are_named_alone():
    network = FineTuned(nn.Linear(8, 4), FunctionalRelu(), nn.Linear(K, 8), nn.ReLU())
    bnn, x, y = varlap.BNN(network, select="head.0.*"), draw(S, 4), torch.arange(S) % K
    (said,) = caught_warnings(lambda: varlap.VL(num_data=60)(bnn, x, y))
    assert re.search(r"without one: ReLU at head\.4, relu at test_any_network\.py:\d+ in forward\. ", str(said.message))


@by_kink
def test_methods_without_second_derivatives_do_not_warn(network, place):
    bnn, x, y = varlap.BNN(network()), draw(S, 4), torch.arange(S) % K
    assert caught_warnings(lambda: varlap.MAP(num_data=60)(bnn, x, y).loss.backward()) == []
    assert caught_warnings(lambda: varlap.VI(num_data=60)(bnn, x, y).loss.backward()) == []
    assert caught_warnings(lambda: varlap.laplace(bnn, (x, y))) == []
    assert caught_warnings(lambda: bnn.predict(x)) == []


def test_warning_comes_though_the_first_batch_was_refused():
    bnn, objective = varlap.BNN(KINKED["module"][0]()), varlap.VL(num_data=60)
    with pytest.raises(RuntimeError):
        objective(bnn, draw(S, 5), torch.arange(S) % K)
    assert len(caught_warnings(lambda: objective(bnn, draw(S, 4), torch.arange(S) % K))) == 1


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class OnceSquare(Square):
    backward = staticmethod(torch.autograd.function.once_differentiable(Square.backward))


class NumpySquare(Square):
    @staticmethod
    def backward(ctx, grad):
        return torch.from_numpy(2 * ctx.saved_tensors[0].detach().numpy() * grad.detach().numpy())


class WithSkip(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.first, self.inner, self.last = function, nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, K)

    def forward(self, x):
        h = self.first(x)
        return self.last(h + self.function.apply(self.inner(h)))


@pytest.mark.parametrize("function", [OnceSquare, NumpySquare])
@pytest.mark.parametrize("objective", [varlap.VL, varlap.VLHessian], ids=lambda objective: objective.__name__)
def test_a_backward_pass_without_a_derivative_warns_once_and_names_what_lies_behind_it(function, objective):
    bnn, x, y = varlap.BNN(WithSkip(function)), draw(S, 4), torch.arange(S) % K
    message = (
        rf"^{objective.__name__} needs second derivatives, and a backward pass in the network has none, such as that of"
        r" a once_differentiable function .* loses the curvature behind it, that of inner\.weight, inner\.bias wholly"
    )
    with pytest.warns(VarlapWarning, match=message) as caught:
        objective(num_data=60)(bnn, x, y)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert caught_warnings(lambda: objective(num_data=60)(bnn, x, y)) == []


@pytest.mark.parametrize("function", [Square, None], ids=["own", "rounded"])
def test_a_backward_pass_with_a_derivative_does_not_warn(function):
    class Rounded(nn.Linear):  # whose gradient is zero, of which nothing is lost
        def forward(self, x):
            return super().forward(x).round()

    network = Rounded(4, K) if function is None else WithSkip(function)
    bnn, x, y = varlap.BNN(network), draw(S, 4), torch.arange(S) % K
    assert caught_warnings(lambda: varlap.VL(num_data=60)(bnn, x, y)) == []


def test_long_list_of_places_is_cut_short():
    layers = [module for _ in range(10) for module in (nn.Linear(4, 4), nn.ReLU())]
    bnn = varlap.BNN(nn.Sequential(*layers, nn.Linear(4, K)))
    (warning,) = caught_warnings(lambda: varlap.VL(num_data=60)(bnn, draw(S, 4), torch.arange(S) % K))
    assert "ReLU at 1, ReLU at 3," in str(warning.message)
    assert "ReLU at 15 and 2 more." in str(warning.message)


def test_smooth_removes_the_warning_and_trains():
    network = varlap.smooth(KINKED["module"][0]())
    bnn, objective = varlap.BNN(network), varlap.VL(num_data=60)
    x, y = draw(S, 4), torch.arange(S) % K
    assert caught_warnings(lambda: objective(bnn, x, y)) == []
    assert isinstance(network[1], nn.SiLU)


@pytest.mark.parametrize(
    "objective",
    [varlap.MAP, varlap.VI, varlap.VLHessian, lambda n: varlap.VL(n, curvature=varlap.Fisher())],
    ids=["MAP", "VI", "VLHessian", "VL"],
)
def test_the_first_call_sees_the_inputs_as_they_are_though_the_network_works_in_place(objective):
    class Halves(nn.Module):
        def forward(self, x):
            return x.mul_(0.5)

    layers = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Softplus(), nn.Linear(8, K)
    bnn, x, y = varlap.BNN(nn.Sequential(Halves(), *layers)), draw(S, 4), torch.arange(S) % K
    halved = x / 2
    objective(60)(bnn, x, y)
    assert torch.equal(x, halved)


def test_looking_for_kinks_leaves_no_trace():
    """The first step of VL equals the same step of a network that was looked at before."""
    results = []
    for looked_before in (False, True):
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(), nn.Softplus(), nn.Linear(8, K)
        )
        bnn, x, y = varlap.BNN(network), draw(S, 4), torch.arange(S) % K
        if looked_before:
            state = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
            varlap.VL(num_data=60)(bnn, x, y)
            bnn.load_state_dict(state)
        found = gradients(bnn, x, y, varlap.VL(num_data=60))
        results.append({**found, **dict(bnn.network.named_buffers())})
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name
