"""What lines call runs."""

import dataclasses
from collections.abc import Sequence

from varlap.experiments.spec import RunSpec

_ALWAYS_TOLD = ("data", "method", "beta", "log_sigma_lr_multiplier", "seed")
"""where they are not the usual ones"""


def names(specs: Sequence[RunSpec]) -> dict[RunSpec, str]:
    """Return a name for each run of a grid, with every setting in which its runs differ: no two share a name.

    >>> by_rate = [RunSpec("digits", "vl", 0.1, lr=lr) for lr in (1e-4, 1e-3)]
    >>> list(names(by_rate).values()), list(names(by_rate[:1]).values())
    (['digits vl β 0.1 lr 0.0001', 'digits vl β 0.1 lr 0.001'], ['digits vl β 0.1'])
    """
    others = [field.name for field in dataclasses.fields(RunSpec) if field.name not in _ALWAYS_TOLD]
    different = [name for name in others if len({getattr(spec, name) for spec in specs}) > 1]
    return {
        spec: " ".join([_usual(spec), *(f"{name} {_text(getattr(spec, name))}" for name in different)])
        for spec in specs
    }


def _usual(spec: RunSpec) -> str:
    words = f"{spec.data} {spec.method} β {_text(spec.beta)}"
    if spec.log_sigma_lr_multiplier != 10:
        words += f" multiplier {_text(spec.log_sigma_lr_multiplier)}"
    return words + (f" seed {spec.seed}" if spec.seed else "")


def _text(value: object) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)
