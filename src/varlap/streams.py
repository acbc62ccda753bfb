"""Random streams derived from a seed: every draw is determined by (seed, purpose, step, micro-batch, rank).

Nothing here reads or moves the caller's global generators, and no random state has to be stored to repeat a
step: the same numbers give the same stream.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from varlap.errors import ConfigError


def derive_seed(*parts: int | str) -> int:
    """Hash numbers and words to a seed of 63 bits, the same on every machine.

    >>> derive_seed(0, "labels", 7) == derive_seed(0, "labels", 7)
    True
    >>> derive_seed(0, "labels", 7) == derive_seed(0, "labels", 8)
    False
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


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

    def generator(self, purpose: str, device: torch.device | str) -> torch.Generator:
        """Make the generator that draws for one purpose ("labels", "weights", ...) in this step."""
        seed = derive_seed(self.seed, purpose, self.step, self.micro_batch, self.rank)
        return torch.Generator(device=device).manual_seed(seed)

    @contextlib.contextmanager
    def around_network(self, device: torch.device) -> Iterator[None]:
        """Give dropout and its like a stream of this step, and put the global generators back afterwards."""
        devices = [device] if device.type not in ("cpu", "mps", "meta") else []
        with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
            seed = derive_seed(self.seed, "network", self.step, self.micro_batch, self.rank)
            torch.default_generator.manual_seed(seed)
            if devices:
                getattr(torch, device.type).manual_seed(seed)
            yield


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
