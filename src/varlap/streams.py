"""Random streams derived from a seed: every draw is determined by (seed, purpose, step, micro-batch, rank).

Nothing here reads or moves the caller's global generators, and no random state has to be stored to repeat a
step: the same numbers give the same stream.
"""

import contextlib
import hashlib
import operator
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from varlap.errors import ConfigError

_LOCKS = [threading.RLock()]  # of the global generators
if hasattr(os, "register_at_fork"):  # a thread that held it is not in the child
    os.register_at_fork(after_in_child=lambda: _LOCKS.__setitem__(0, threading.RLock()))


@dataclass(eq=False)
class _Loan:
    """The CPU's global generator, lent to a loader: in which state it was found."""

    found: Tensor


_LOANS: list[_Loan] = []  # the latest last; guarded by the lock


def derive_seed(*parts: int | str) -> int:
    """Hash numbers and words to a seed of 63 bits, the same on every machine.

    >>> derive_seed(0, "labels", 7) == derive_seed(0, "labels", 7)
    True
    >>> derive_seed(0, "labels", 7) == derive_seed(0, "labels", 8)
    False
    """
    plain = tuple(part if isinstance(part, str) else operator.index(part) for part in parts)  # NumPy's 3 is 3
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class Draw:
    """A request for random numbers, which can be made again with another generator."""

    kind: Literal["normal", "uniform", "permutation"]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def made_with(self, generator: torch.Generator) -> Tensor:
        """Draw the numbers."""
        options = {"generator": generator, "device": generator.device, "dtype": self.dtype}
        if self.kind == "normal":
            return torch.randn(self.shape, **options)
        if self.kind == "uniform":
            return torch.rand(self.shape, **options)
        return torch.randperm(self.shape[0], **options)


@dataclass
class Tape:
    """Stands in for a generator where a computation is traced: notes the draws, or hands out numbers drawn before.

    >>> tape = Tape(torch.Generator().manual_seed(0))
    >>> numbers = draw("uniform", (2,), torch.float32, tape)
    >>> again = Tape(numbers=[d.made_with(torch.Generator().manual_seed(0)) for d in tape.draws])
    >>> torch.equal(numbers, draw("uniform", (2,), torch.float32, again))
    True
    """

    source: torch.Generator | None = None
    numbers: list[Tensor] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where the numbers are made."""
        return self.source.device if self.source is not None else self.numbers[0].device

    def next(self, request: Draw) -> Tensor:
        """Draw from the source and note the request, or hand out the next numbers."""
        self.draws.append(request)
        return self.numbers[len(self.draws) - 1] if self.source is None else request.made_with(self.source)


Generator = torch.Generator | Tape


def draw(
    kind: Literal["normal", "uniform", "permutation"],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: Generator,
) -> Tensor:
    """Draw random numbers on the generator's device, or take those that a traced step was handed.

    >>> draw("permutation", (3,), torch.int64, torch.Generator().manual_seed(0)).sort().values
    tensor([0, 1, 2])
    """
    request = Draw(kind, tuple(shape), dtype)
    return generator.next(request) if isinstance(generator, Tape) else request.made_with(generator)


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """Return numbers on a device. A GPU is not waited for, as it would be by a copy out of ordinary memory.

    >>> sent(torch.arange(3), torch.device("cpu"))
    tensor([0, 1, 2])
    """
    leaves_the_cpu = device.type == "cuda" and numbers.device.type == "cpu"
    return (numbers.pin_memory() if leaves_the_cpu else numbers).to(device, non_blocking=leaves_the_cpu)


@dataclass(frozen=True)
class Streams:
    """The random streams of one step on one rank.

    >>> streams = Streams(seed=0, step=3)
    >>> first = torch.rand(2, generator=streams.generator("labels", "cpu"))
    >>> again = torch.rand(2, generator=streams.generator("labels", "cpu"))
    >>> torch.equal(first, again)
    True
    """

    seed: int
    step: int
    micro_batch: int = 0
    rank: int = 0
    tapes: Mapping[str, Tape] | None = field(default=None, compare=False)

    def generator(self, purpose: str, device: torch.device | str) -> "torch.Generator":
        """Make the generator that draws for one purpose ("labels", "weights", ...) in this step."""
        if self.tapes is not None:
            return self.tapes[purpose]  # type: ignore[return-value]  # stands in for one
        seed = derive_seed(self.seed, purpose, self.step, self.micro_batch, self.rank)
        return torch.Generator(device=device).manual_seed(seed)

    @contextlib.contextmanager
    def around_network(self, device: torch.device) -> Iterator[None]:
        """Give dropout and its like a stream of this step, and put the global generators back afterwards.

        These are the whole process's, so one thread at a time has them.
        """
        devices = [device] if device.type not in ("cpu", "mps", "meta") else []
        with _LOCKS[0], torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
            seed = derive_seed(self.seed, "network", self.step, self.micro_batch, self.rank)
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                index = torch.cuda.current_device() if device.index is None else device.index
                torch.cuda.default_generators[index].manual_seed(seed)
            elif devices:
                getattr(torch, device.type).manual_seed(seed)
            yield

    @contextlib.contextmanager
    def around_loader(self) -> Iterator[None]:
        """Give what a loader draws from the CPU's global generator a stream of this step, and put the caller's back.

        A loader may wait, for a disk or for a thread that itself wants the generators, so none is kept from them
        meanwhile. `around_network` in another thread leaves the generator as it found it. Of two loaders the later
        one has it, and the first may be done before it: then the later one puts back what the first had found. Whatever
        the order, the last to leave puts back the caller's. Loaders that draw at the same time mix their numbers.
        """
        with _LOCKS[0]:
            loan = _Loan(torch.get_rng_state())
            _LOANS.append(loan)
            torch.default_generator.manual_seed(
                derive_seed(self.seed, "loader", self.step, self.micro_batch, self.rank)
            )
        try:
            yield
        finally:
            with _LOCKS[0]:
                place = _LOANS.index(loan)
                del _LOANS[place]
                if place == len(_LOANS):
                    torch.set_rng_state(loan.found)
                else:
                    _LOANS[place].found = loan.found


def current_rank() -> int:
    """Return this process's rank under torch.distributed, 0 without it."""
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def as_generator(source: torch.Generator | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Turn a seed into a generator; a generator passes through.

    >>> as_generator(3).initial_seed()
    3
    """
    if isinstance(source, torch.Generator):
        return source
    if isinstance(source, int) and not isinstance(source, bool):
        return torch.Generator(device=device).manual_seed(source)
    raise ConfigError(
        f"randomness is an argument: expected a torch.Generator or an int seed, got {source!r}; "
        "pass for example torch.Generator().manual_seed(0)"
    )
