"""Claims about fast_second_order: the same derivatives as torch's own, by a shorter way."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from varlap.curvature.second_order import fast_second_order

CONVOLUTIONS = [
    (nn.Conv1d(2, 3, 3), (2, 2, 7)),
    (nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), (2, 4, 9)),
    (nn.Conv1d(2, 3, 4, padding="same", dilation=3, bias=False), (2, 2, 8)),
    (nn.Conv2d(2, 3, 3, padding=1), (2, 2, 5, 6)),
    (nn.Conv2d(2, 3, 3, bias=False), (2, 2, 5, 6)),
    (nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2)), (2, 2, 7, 5)),
    (nn.Conv2d(2, 3, 3, stride=2), (2, 2, 6, 8)),  # the last row and column are never seen
    (nn.Conv2d(2, 3, 3, dilation=2, padding=1), (2, 2, 6, 6)),
    (nn.Conv2d(4, 6, 3, groups=2, padding=1), (2, 4, 5, 5)),
    (nn.Conv2d(3, 6, 3, groups=3), (2, 3, 5, 5)),
    (nn.Conv2d(2, 3, 1), (2, 2, 4, 4)),
    (nn.Conv2d(2, 3, 3, padding="valid"), (2, 2, 5, 5)),
    (nn.Conv2d(2, 3, 3, padding="same"), (2, 2, 5, 5)),
    (nn.Conv2d(2, 3, (2, 4), padding="same"), (2, 2, 5, 6)),
    (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 2, 5, 5)),
    (nn.Conv2d(2, 3, 3, padding="same", padding_mode="circular"), (2, 2, 5, 5)),
    (nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=1), (2, 2, 4, 4, 3)),
    (nn.Conv3d(2, 2, (1, 2, 3), padding="same", groups=2), (2, 2, 3, 4, 4)),
    (nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1), (2, 2, 5)),
    (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (2, 4, 4, 4)),
    (nn.ConvTranspose2d(2, 3, 3, dilation=2, bias=False), (2, 2, 4, 4)),
    (nn.ConvTranspose3d(2, 3, 2, stride=2, padding=1), (2, 2, 3, 3, 3)),
]
BATCH_NORMS = [
    (nn.BatchNorm1d(3), (5, 3)),
    (nn.BatchNorm1d(3), (4, 3, 6)),
    (nn.BatchNorm2d(3, eps=1e-2, momentum=0.3), (4, 3, 2, 5)),
    (nn.BatchNorm2d(3, momentum=None), (4, 3, 2, 5)),
    (nn.BatchNorm2d(3, track_running_stats=False), (4, 3, 2, 5)),
    (nn.BatchNorm3d(2), (2, 2, 3, 2, 2)),
]


def name(value):
    return str(value).replace(" ", "") if isinstance(value, nn.Module) else "x".join(map(str, value))


over_layers = pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS + BATCH_NORMS, ids=name)


@pytest.fixture(autouse=True)
def same_numbers_in_every_run():
    torch.manual_seed(0)


def double(layer, shape):
    """A copy in float64 with parameters away from their special initial values, and an input."""
    layer = copy.deepcopy(layer).double()
    for p in layer.parameters():
        nn.init.normal_(p)
    return layer, torch.randn(shape, dtype=torch.float64, requires_grad=True)


def derivatives(layer, x, mode, create_graph=False):
    """Output, first gradients, and the gradients through these in x, the parameters and the output's gradient."""
    with mode():
        y = layer(x)
    generator = torch.Generator().manual_seed(1)

    def noise(t):
        return torch.empty_like(t).copy_(torch.randn(t.shape, generator=generator, dtype=t.dtype))

    sources = [t for t in (x, *layer.parameters()) if t.requires_grad]
    g = noise(y).requires_grad_()
    first = torch.autograd.grad(y, sources, g, create_graph=True)
    second = torch.autograd.grad(
        first, [g, *sources], [noise(f) for f in first], create_graph=create_graph, materialize_grads=True
    )
    return y, first, second


def assert_same(ours, torchs, **tolerance):
    tolerance = tolerance or {"rtol": 1e-10, "atol": 1e-10}
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def is_ours(y):
    return type(y.grad_fn).__name__ in ("_ConvBackward", "_BatchNormBackward")


@over_layers
def test_first_and_second_gradients_equal_torchs_own(layer, shape):
    layer, x = double(layer, shape)
    y, first, second = derivatives(copy.deepcopy(layer), x, fast_second_order)
    y0, first0, second0 = derivatives(layer, x, nullcontext)
    assert is_ours(y)
    assert not is_ours(y0)
    torch.testing.assert_close(y, y0, rtol=0, atol=0)
    assert_same(first, first0)
    assert_same(second, second0)


@pytest.mark.parametrize("frozen", [("x",), ("weight",), ("bias",), ("x", "bias"), ("weight", "bias"), ("x", "weight")])
@pytest.mark.parametrize("layer", [nn.Conv2d(2, 3, 3), nn.ConvTranspose2d(2, 3, 3), nn.BatchNorm2d(2)], ids=name)
def test_any_part_may_be_frozen(layer, frozen):
    layer, x = double(layer, (3, 2, 5, 5))
    for which in frozen:
        (x if which == "x" else getattr(layer, which)).requires_grad_(False)
    _, first, second = derivatives(layer, x, fast_second_order)
    _, first0, second0 = derivatives(layer, x, nullcontext)
    assert_same(first, first0)
    assert_same(second, second0)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(2, 2, 2, stride=2, padding=1), (2, 2, 4)),
        (nn.Conv2d(2, 2, 2, groups=2, padding="same"), (1, 2, 3, 2)),
        (nn.ConvTranspose2d(2, 1, 2, stride=2, output_padding=1), (1, 2, 2, 2)),
        (nn.BatchNorm1d(2), (3, 2, 2)),
    ],
    ids=name,
)
def test_second_and_third_derivatives_equal_differences(layer, shape):
    layer, x = double(layer, shape)
    inputs = (x, layer.weight, layer.bias)

    def forward(x, weight, bias):
        with fast_second_order():
            return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    def backward(g, *inputs):
        return torch.autograd.grad(forward(*inputs), inputs, g, create_graph=True)

    g = torch.randn_like(forward(*inputs)).requires_grad_()
    assert torch.autograd.gradgradcheck(forward, inputs)
    assert torch.autograd.gradgradcheck(backward, (g, *inputs))


def test_third_derivative_of_a_convolution_equals_torchs_own():
    layer, x = double(nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 2, 5, 5))

    def third(mode):
        *_, second = derivatives(layer, x, mode, create_graph=True)
        return torch.autograd.grad(sum(s.pow(3).sum() for s in second), (x, layer.weight))

    assert_same(third(fast_second_order), third(nullcontext))


class Count(TorchDispatchMode):
    """The operations that reach the device: their names, and how they were called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))

    def __getitem__(self, kind):
        return [args for called, args in self.calls if called == kind]


def test_double_backward_of_a_convolution_is_two_convolutions_and_one_backward():
    layer, x = double(nn.Conv2d(2, 3, 3), (2, 2, 5, 5))
    with fast_second_order():
        y = layer(x)
    g = torch.randn_like(y).requires_grad_()
    with Count() as first:
        gx, gw = torch.autograd.grad(y, (x, layer.weight), g, create_graph=True)
    with Count() as second:
        torch.autograd.grad([gx, gw], (x, layer.weight, g), [x.detach(), layer.weight.detach()])
    assert (len(first["convolution"]), len(first["convolution_backward"])) == (0, 1)
    assert (len(second["convolution"]), len(second["convolution_backward"])) == (2, 1)


def test_gradient_of_data_is_never_computed():
    layer, x = double(nn.Conv2d(2, 3, 3), (2, 2, 5, 5))
    with Count() as count:
        derivatives(layer, x.detach(), fast_second_order)
    assert [args[-1] for args in count["convolution_backward"]] == [[False, True, False]]


class Then(nn.Module):
    """A layer after a softplus, called in its own autocast region if asked to."""

    def __init__(self, layer, autocast=None):
        super().__init__()
        self.layer, self.autocast = layer, autocast

    def forward(self, x):
        with nullcontext() if self.autocast is None else torch.autocast("cpu", enabled=self.autocast):
            return self.layer(F.softplus(x))


@pytest.mark.parametrize("layer", [nn.Conv2d(2, 3, 3), nn.ConvTranspose1d(2, 3, 3), nn.BatchNorm1d(2)], ids=name)
@pytest.mark.parametrize("inside", [None, False], ids=["autocast", "layer_exempt"])
def test_autocast_gives_the_dtypes_of_torchs_own(layer, inside):
    x = torch.randn(4, 2, *[6] * (layer.weight.dim() - 2 or 1), requires_grad=True)

    def values(mode):
        with torch.autocast("cpu", torch.bfloat16):  # the derivatives are taken inside, too
            y, first, second = derivatives(Then(layer, inside), x, mode)
        return [y, *first, *second]

    ours, torchs = values(fast_second_order), values(nullcontext)
    assert ours[0].dtype == (torch.float32 if inside is False or "Norm" in name(layer) else torch.bfloat16)
    assert [t.dtype for t in ours] == [t.dtype for t in torchs]
    tolerance = 1e-4 if ours[0].dtype == torch.float32 else 0.05
    assert all((a - b).norm() <= tolerance * b.norm() for a, b in zip(ours, torchs, strict=True))


def test_autocast_leaves_double_precision_alone():
    layer, x = double(nn.Conv2d(2, 3, 3), (2, 2, 5, 5))
    with torch.autocast("cpu", torch.bfloat16), fast_second_order():
        assert layer(x).dtype == torch.float64


def test_batch_norm_of_bfloat16_is_as_exact_as_torchs():
    layer, x = double(nn.BatchNorm2d(2), (8, 2, 6, 6))
    x = x.detach().bfloat16()
    *_, true = derivatives(layer, x.double().requires_grad_(), nullcontext)
    *_, ours = derivatives(layer.float(), x.requires_grad_(), fast_second_order)
    *_, torchs = derivatives(layer, x, nullcontext)
    assert [t.dtype for t in ours] == [t.dtype for t in torchs]
    for a, b, c in zip(ours, torchs, true, strict=True):
        assert (a - c).norm() <= 1.1 * (b - c).norm() + 1e-6


@pytest.mark.parametrize("layer", [nn.Conv2d(4, 8, 3), nn.BatchNorm2d(4)], ids=name)
def test_channels_last_is_kept(layer):
    layer = layer.to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    y, (gx, *_), (cg, cx, *_) = derivatives(layer, x, fast_second_order)
    for t in (y, gx, cg, cx):
        assert t.is_contiguous(memory_format=torch.channels_last)


# Batch norm


@pytest.mark.parametrize(("layer", "shape"), BATCH_NORMS, ids=name)
def test_running_statistics_are_bitwise_those_of_torch(layer, shape):
    ours, torchs = copy.deepcopy(layer), copy.deepcopy(layer)
    for _ in range(3):
        x = torch.randn(shape)
        torchs(x)
        with fast_second_order():
            ours(x)
    assert_same(ours.buffers(), torchs.buffers(), rtol=0, atol=0)


def test_batch_norm_with_zero_weight_has_finite_second_gradients():
    layer, x = double(nn.BatchNorm2d(2), (3, 2, 4, 4))
    nn.init.zeros_(layer.weight)
    assert_same(derivatives(layer, x, fast_second_order)[2], derivatives(layer, x, nullcontext)[2])


def test_third_derivative_of_batch_norm_is_that_of_its_formula():
    # torch's own is not: its double backward takes the batch's mean and variance for constants.
    layer, x = double(nn.BatchNorm1d(2, track_running_stats=False), (4, 2, 3))

    def formula(x):
        var, mean = torch.var_mean(x, (0, 2), correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(var + layer.eps) * layer.weight[:, None] + layer.bias[:, None]

    def third(norm, mode):
        with mode():
            z = norm(x).exp()
        (first,) = torch.autograd.grad(z.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(second.pow(2).sum(), x)

    assert_same(third(layer, fast_second_order), third(formula, nullcontext))


# What goes to torch, and what surrounds the call


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Conv2d(2, 3, 3), torch.randn(2, 5, 5)),
        (nn.ConvTranspose1d(2, 3, 3), torch.randn(2, 5)),
        (nn.Conv1d(2, 3, 3, dtype=torch.complex64), torch.randn(1, 2, 5, dtype=torch.complex64)),
        (nn.BatchNorm2d(2).eval(), torch.randn(2, 2, 5, 5)),
        (nn.BatchNorm2d(2, affine=False), torch.randn(2, 2, 5, 5, requires_grad=True)),
    ],
    ids=["unbatched", "unbatched_transposed", "complex", "evaluation", "without_weight"],
)
def test_the_rest_is_torchs(layer, x):
    with fast_second_order():
        y = layer(x)
    assert not is_ours(y)
    torch.testing.assert_close(y, layer(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.conv2d(torch.ones(1, 2, 5, 5), torch.ones(3, 4, 3, 3)),
        lambda: F.conv2d(torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3), stride=2, padding="same"),
        lambda: F.conv2d(torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3), padding="sane"),
        lambda: F.conv2d(torch.ones(1, 2, 5, 5, 5), torch.ones(3, 2, 3, 3, 3)),
        lambda: F.conv2d(torch.ones(1, 2, 5, 5, dtype=torch.float64), torch.ones(3, 2, 3, 3)),
        lambda: F.conv2d(torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3), padding=(1, 1, 1)),
        lambda: nn.BatchNorm1d(2)(torch.ones(1, 2)),
    ],
    ids=["channels", "strided_same", "unknown_padding", "dimensions", "dtypes", "lengths", "one_value"],
)
def test_errors_are_torchs(call):
    with pytest.raises((RuntimeError, ValueError)) as torchs:
        call()
    with fast_second_order(), pytest.raises(torchs.type) as ours:
        call()
    assert str(ours.value).split(",")[0] == str(torchs.value).split(",")[0]


class Subclass(torch.Tensor):
    pass


def test_a_tensor_subclass_keeps_its_own_rules():
    layer, x = nn.Conv2d(2, 3, 3), torch.randn(1, 2, 5, 5).as_subclass(Subclass)
    with fast_second_order():
        y = layer(x)
    assert type(y) is Subclass
    assert not is_ours(y)


def test_a_call_by_keywords_is_served():
    x, weight = torch.randn(2, 2, 5), torch.randn(3, 2, 3, requires_grad=True)
    with fast_second_order():
        y = F.conv1d(input=x, weight=weight, padding=[1], stride=torch.Size([2]))
    assert is_ours(y)
    torch.testing.assert_close(y, F.conv1d(x, weight, None, 2, 1))


def test_nothing_stays_behind():
    layer, x = double(nn.Conv1d(2, 3, 3), (2, 2, 5))
    with pytest.raises(ZeroDivisionError), fast_second_order():
        _ = 1 / 0
    assert not is_ours(layer(x))


@pytest.mark.parametrize("until", ["forward", "backward"])
def test_a_checkpointed_network_works_whether_or_not_the_mode_outlasts_the_forward_pass(until):
    network, x = Network(running=True), torch.randn(4, 2, 4, 4, dtype=torch.float64)
    sources = list(network.parameters())

    def second(forward, backward):
        with forward:
            loss = torch.utils.checkpoint.checkpoint(network, x, use_reentrant=False).exp().mean()
        with backward:
            first = torch.autograd.grad(loss, sources, create_graph=True)
            return torch.autograd.grad(sum(f.square().sum() for f in first), sources)

    backward = fast_second_order() if until == "backward" else nullcontext()
    assert_same(second(fast_second_order(), backward), second(nullcontext(), nullcontext()))


# Other ways to differentiate


class Network(nn.Sequential):
    def __init__(self, running=False):
        norm = nn.BatchNorm2d(3, track_running_stats=running)
        super().__init__(nn.Conv2d(2, 3, 3, padding=1), norm, nn.Softplus(), nn.ConvTranspose2d(3, 2, 2, 2))
        self.double()

    def penalty(self, parameters, x, mode):
        """The sum of squared gradients, by torch.func."""

        def loss(parameters):
            with mode():
                return torch.func.functional_call(self, parameters, (x,)).exp().mean()

        return sum(g.square().sum() for g in torch.func.grad(loss)(parameters).values())


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.grad(f),
        lambda f: lambda p: torch.func.jvp(torch.func.grad(f), (p,), (p,))[1],
        lambda f: torch.func.vmap(torch.func.grad(f)),
    ],
    ids=["grad", "jvp_of_grad", "vmap_of_grad"],
)
def test_functional_transforms_give_the_same(transform, request):
    network, x = Network(), torch.randn(4, 2, 4, 4, dtype=torch.float64)
    copies = 2 if "vmap" in request.node.name else None
    parameters = {
        k: p.detach() if copies is None else torch.stack([p.detach()] * copies) * 1.5
        for k, p in network.named_parameters()
    }
    ours, torchs = (
        transform(lambda p, mode=mode: network.penalty(p, x, mode))(parameters)
        for mode in (fast_second_order, nullcontext)
    )
    assert_same(ours.values(), torchs.values())


@pytest.mark.parametrize("tracing", ["real", "symbolic"])
def test_a_traced_double_backward_equals_the_eager_one(tracing):
    network = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Softplus(), nn.Conv2d(3, 2, 2))
    tensors = dict(network.named_parameters()) | dict(network.named_buffers())

    def step(state, x):
        parameters = {k: v.detach().requires_grad_() for k, v in state.items() if tensors[k].requires_grad}
        with fast_second_order():
            loss = torch.func.functional_call(network, state | parameters, (x,)).square().mean()
        sources = list(parameters.values())
        first = torch.autograd.grad(loss, sources, create_graph=True)
        return torch.autograd.grad(loss + sum(f.square().sum() for f in first), sources)

    def fresh():
        return {k: t.detach().clone() for k, t in tensors.items()}

    x = torch.randn(4, 2, 5, 5)
    traced = make_fx(step, tracing_mode=tracing)(fresh(), x)
    eager_state, traced_state = fresh(), fresh()
    assert_same(traced(traced_state, x), step(eager_state, x), rtol=1e-6, atol=1e-6)
    assert_same(traced_state.values(), eager_state.values(), rtol=0, atol=0)
    kinds = [str(node.target) for node in traced.graph.nodes]
    assert kinds.count("aten.convolution.default") == 2 + 3  # forward; then x ∗ cw of both and cx ∗ w of the second


def test_dynamo_traces_the_network_with_torchs_own_rules():
    network, x = Network(), torch.randn(4, 2, 4, 4, dtype=torch.float64)
    parameters = {k: p.detach() for k, p in network.named_parameters()}
    gradient = torch.func.grad(lambda p: network.penalty(p, x, fast_second_order))
    compiled = torch.compile(gradient, backend="eager", fullgraph=True)
    assert_same(compiled(parameters).values(), gradient(parameters).values())
