"""Which whole numbers are seeds, and which are counts."""

import operator
from typing import Any, SupportsIndex

from varlap.errors import ConfigError


def checked_seed(seed: SupportsIndex, owner: str | None = None) -> int:
    """Refuse what torch's generators do not take.

    >>> checked_seed(3)
    3
    >>> checked_seed(2**64, "fit")
    Traceback (most recent call last):
    varlap.errors.ConfigError: fit(seed=18446744073709551616) must be a whole number from -2**63 to 2**64 - 1, which ...
    """
    number = _whole(seed)
    if number is None or not -(2**63) <= number < 2**64:
        said = f"seed={seed!r}" if owner is None else f"{owner}(seed={seed!r})"
        raise ConfigError(f"{said} must be a whole number from -2**63 to 2**64 - 1, which torch's generators take")
    return number


def checked_count(owner: str, name: str, value: SupportsIndex, least: int = 1) -> int:
    """Refuse what is no whole number of at least so much.

    >>> checked_count("ece", "bins", 15)
    15
    >>> checked_count("ece", "bins", 1.5)
    Traceback (most recent call last):
    varlap.errors.ConfigError: ece(bins=1.5) must be a whole number of at least 1
    """
    number = _whole(value)
    if number is None or number < least:
        raise ConfigError(f"{owner}({name}={value!r}) must be a whole number of at least {least}")
    return number


def _whole(value: Any) -> int | None:
    """Return a whole number of any library as Python's own, and None for everything else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:  # a tensor has the method, whatever it holds
        return None
