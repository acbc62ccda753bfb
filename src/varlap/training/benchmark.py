"""How long a step takes: MAP, VI, VL and the obvious double backward, interleaved in one run."""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import varlap
from varlap.curvature import DEFAULT, Fisher
from varlap.errors import ConfigError
from varlap.models import convnet, mlp
from varlap.models.preact_resnet import PreactResNet
from varlap.objectives import MAP, VI, VL, Objective
from varlap.posterior import BNN
from varlap.posterior.kl import kl_divergence
from varlap.training.optimizer import FUSED_ON
from varlap.training.step import Precision, TrainingStep

NUM_DATA = 50_000
BETA = 0.01

METHODS = (
    "MAP",
    "VI",
    "VL exact",
    "VL default",
    "VL exact, own loop",
    "plain torch loop",
    "obvious double backward",
)
COMPARED_IN_GROWTH = ("MAP", "VL exact", "VL default")


@dataclass(frozen=True)
class BenchModel:
    """A network of some width and depth for inputs of one shape."""

    build: Callable[[int, int], nn.Module]
    input_shape: tuple[int, ...]
    width: int
    depth: int
    other_widths: tuple[int, ...]
    other_depths: tuple[int, ...]


MODELS = {
    "preact-resnet-18": BenchModel(
        lambda width, depth: PreactResNet(10, 3, width, blocks_per_stage=depth), (3, 32, 32), 64, 2, (32, 128), (1, 4)
    ),
    "convnet": BenchModel(lambda width, depth: _convnet(width, depth), (1, 28, 28), 16, 3, (8, 32), (4, 6)),
    "mlp": BenchModel(lambda width, depth: mlp(784, 10, (width,) * depth), (784,), 100, 2, (50, 200), (1, 4)),
}


@dataclass(frozen=True)
class BenchSpec:
    """What is measured."""

    model: str = "preact-resnet-18"
    """one of preact-resnet-18, convnet, mlp"""
    width: int | None = None
    """the model's width; its own default otherwise"""
    depth: int | None = None
    """blocks a stage, convolutions or hidden layers; the model's own default otherwise"""
    batch_size: int = 128
    """items a step"""
    device: str = "cpu"
    """cpu or cuda"""
    precision: Precision = "fp32"
    """of the network's computation, except for the obvious double backward, which is fp32"""
    rounds: int = 5
    """how often each method's turn comes"""
    steps: int = 24
    """steps a turn; rounded up to whole periods of the default curvature"""
    methods: tuple[str, ...] = METHODS
    """which to measure; MAP, the reference, is always among them"""
    compiled: bool | str = "auto"
    """as in `fit`"""

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(f"bench: unknown model {self.model!r}; choose one of {', '.join(MODELS)}")
        if self.precision not in ("fp32", "bf16"):
            raise ConfigError(f"bench: precision {self.precision!r} is not known; choose fp32 or bf16")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError("bench: there is no CUDA device here; use --device cpu")
        for name in ("width", "depth", "batch_size", "rounds", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"bench: {name}={value} must be at least 1")
        unknown = [method for method in self.methods if method not in METHODS]
        if unknown or "MAP" not in self.methods:
            raise ConfigError(f"bench: methods are {', '.join(METHODS)}, MAP among them; got {', '.join(self.methods)}")

    def network(self) -> nn.Module:
        """Build the network."""
        model = MODELS[self.model]
        return model.build(self.width or model.width, self.depth or model.depth)

    def growth(self) -> "list[BenchSpec]":
        """Return this spec, and those with another batch size, width or depth.

        >>> [(spec.batch_size, spec.width, spec.depth) for spec in BenchSpec(model="mlp").growth()]
        [(128, 100, 2), (64, 100, 2), (256, 100, 2), (128, 50, 2), (128, 200, 2), (128, 100, 1), (128, 100, 4)]
        """
        model = MODELS[self.model]
        base = replace(self, width=self.width or model.width, depth=self.depth or model.depth)
        batches = (self.batch_size // 2, 2 * self.batch_size)
        others = {"batch_size": batches, "width": model.other_widths, "depth": model.other_depths}
        return [base, *(replace(base, **{name: size}) for name, sizes in others.items() for size in sizes)]


@dataclass
class Timing:
    """What was measured of one method."""

    setup_s: float
    peak_memory_mb: float | None
    ms_per_step: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.ms_per_step)


def bench_step(spec: BenchSpec, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure every method in turn, round by round, and return all times with their origin.

    >>> result = bench_step(BenchSpec(model="mlp", batch_size=8, rounds=1, steps=2, methods=("MAP", "VL exact")))
    >>> sorted(result["methods"]), result["methods"]["MAP"]["ratio_to_map"]
    (['MAP', 'VL exact'], 1.0)
    """
    device = torch.device(spec.device)
    shape = MODELS[spec.model].input_shape
    num_steps = DEFAULT.every * math.ceil(spec.steps / DEFAULT.every)
    noise = torch.Generator().manual_seed(0)
    x = torch.randn(spec.batch_size, *shape, generator=noise).to(device)
    if x.ndim == 4 and device.type == "cuda":
        x = x.to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (spec.batch_size,), generator=noise).to(device)
    steppers: dict[str, Callable[[int], Any]] = {}
    timings: dict[str, Timing] = {}
    for method in spec.methods:
        progress(f"setting up {method}")
        before = _reset_memory(device)
        started = time.perf_counter()
        steppers[method] = _stepper(method, spec, device, x, y)
        for number in range(_period(method)):
            steppers[method](number)
        _synchronise(device)
        setup_s = time.perf_counter() - started
        for number in range(num_steps):
            steppers[method](number)
        timings[method] = Timing(setup_s, _peak_memory(device, before))
    for turn in range(spec.rounds):
        progress(f"round {turn + 1} of {spec.rounds}")
        for method, stepper in steppers.items():
            _synchronise(device)
            started = time.perf_counter()
            for number in range(num_steps):
                stepper(number)
            _synchronise(device)
            timings[method].ms_per_step.append(1e3 * (time.perf_counter() - started) / num_steps)
    return _result(spec, timings, device)


def _result(spec: BenchSpec, timings: dict[str, Timing], device: torch.device) -> dict[str, Any]:
    reference = timings["MAP"].ms_per_step
    methods = {}
    for method, timing in timings.items():
        ratios = [own / base for own, base in zip(timing.ms_per_step, reference, strict=True)]
        methods[method] = {
            "median_ms": timing.median_ms,
            "min_ms": min(timing.ms_per_step),
            "max_ms": max(timing.ms_per_step),
            "ratio_to_map": statistics.median(ratios),
            "ratio_to_map_min": min(ratios),
            "ratio_to_map_max": max(ratios),
            "setup_s": timing.setup_s,
            "peak_memory_mb": timing.peak_memory_mb,
            "ms_per_step": timing.ms_per_step,
        }
    hardware = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    )
    origin = {
        "varlap": varlap.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": hardware,
        "num_threads": torch.get_num_threads(),
        "default_curvature": repr(DEFAULT),
        "malloc": {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")},
    }
    return {"spec": asdict(spec), "origin": origin, "methods": methods}


def _period(method: str) -> int:
    """How many steps it takes until all that has to be compiled is."""
    return DEFAULT.every + 1 if method == "VL default" else 1


def _stepper(
    method: str, spec: BenchSpec, device: torch.device, x: torch.Tensor, y: torch.Tensor
) -> Callable[[int], Any]:
    torch.manual_seed(0)
    network = spec.network().to(device).train()
    if method == "obvious double backward":
        return _obvious(BNN(network), x.contiguous(), y)
    if x.ndim == 4 and device.type == "cuda":
        network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if method == "plain torch loop":
        return _plain(network, spec, x, y)
    objective = _objective(method)
    bnn = BNN(network)
    groups: Sequence[dict[str, Any]] = bnn.parameter_groups(1e-4)
    fused, on_cuda = device.type in FUSED_ON, device.type == "cuda"
    optimizer = torch.optim.Adam(groups[:1] if method == "MAP" else groups, fused=fused, capturable=on_cuda)
    if method == "VL exact, own loop":
        return _own_loop(bnn, objective, optimizer, spec, x, y)
    step = TrainingStep(bnn, objective, optimizer, precision=spec.precision, compiled=spec.compiled)  # type: ignore[arg-type]
    return lambda number: step(x, y, number=number)


def _objective(method: str) -> Objective:
    if method == "MAP":
        return MAP(NUM_DATA, BETA)
    if method == "VI":
        return VI(NUM_DATA, BETA)
    return VL(NUM_DATA, BETA) if method == "VL default" else VL(NUM_DATA, BETA, curvature=Fisher())


def _convnet(width: int, depth: int) -> nn.Module:
    """The small convnet of three convolutions, with further ones before its last layer for a greater depth."""
    *layers, flatten, head = convnet(width=width)
    for _ in range(depth - 3):
        layers += [nn.Conv2d(4 * width, 4 * width, 3, padding=1), nn.Softplus()]
    return nn.Sequential(*layers, flatten, head)


def _own_loop(
    bnn: BNN, objective: Objective, optimizer: torch.optim.Optimizer, spec: BenchSpec, x: torch.Tensor, y: torch.Tensor
) -> Callable[[int], Any]:
    """The loop of the README; on CUDA the objective compiles its evaluation by itself, here at once."""
    objective.compiled = x.device.type == "cuda"

    def step(number: int) -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=spec.precision == "bf16"):
            terms = objective(bnn, x, y, step=number)
        terms.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _obvious(bnn: BNN, x: torch.Tensor, y: torch.Tensor) -> Callable[[int], Any]:
    """Eq. 30 as one would first write it: eager, single precision, torch's own double backward."""
    optimizer = torch.optim.Adam(bnn.parameter_groups(1e-4))
    means = bnn.means()

    def step(_number: int) -> None:
        logits = bnn(x)
        drawn = torch.distributions.Categorical(logits=logits.detach()).sample()
        sampled = torch.autograd.grad(-F.cross_entropy(logits, drawn), list(means.values()), create_graph=True)
        loss = F.cross_entropy(logits, y)
        for (name, mean), gradient in zip(means.items(), sampled, strict=True):
            log_sigma = bnn.log_sigma[name]
            loss = loss + 0.5 * len(y) * ((2 * log_sigma).exp() * gradient.square()).sum()
            loss = loss + BETA / NUM_DATA * kl_divergence(mean, log_sigma, 0.0, bnn.prior_scale[name])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _plain(network: nn.Module, spec: BenchSpec, x: torch.Tensor, y: torch.Tensor) -> Callable[[int], Any]:
    """An ordinary training loop without varlap, with a fused Adam: on CUDA torch.compile with CUDA graphs."""
    on_cuda = x.device.type == "cuda"
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4, fused=x.device.type in FUSED_ON, weight_decay=0.0)
    model: Any = torch.compile(network, mode="reduce-overhead") if on_cuda else network

    def step(_number: int) -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=spec.precision == "bf16"):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak_memory(device: torch.device, before: int) -> float | None:
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20 if device.type == "cuda" else None
