"""Which numbers are seeds."""

import operator
from typing import SupportsIndex

from varlap.errors import ConfigError


def checked_seed(seed: SupportsIndex, owner: str | None = None) -> int:
    """Refuse what torch's generators do not take.

    >>> checked_seed(3)
    3
    >>> checked_seed(2**64, "fit")
    Traceback (most recent call last):
    varlap.errors.ConfigError: fit(seed=18446744073709551616) must be a whole number from -2**63 to 2**64 - 1, which ...
    """
    is_whole = isinstance(seed, SupportsIndex) and not isinstance(seed, bool)
    if not is_whole or not -(2**63) <= operator.index(seed) < 2**64:
        said = f"seed={seed!r}" if owner is None else f"{owner}(seed={seed!r})"
        raise ConfigError(f"{said} must be a whole number from -2**63 to 2**64 - 1, which torch's generators take")
    return operator.index(seed)
