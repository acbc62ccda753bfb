"""The words and numbers of a progress display."""

from collections.abc import Mapping
from typing import TextIO


def terms(values: Mapping[str, float]) -> list[str]:
    """Say how a step or an epoch went."""
    parts = []
    if "elbo" in values:
        parts.append(f"elbo {number(values['elbo'])}")
    if "nll" in values:
        parts.append(f"nll {number(values['nll'])}")
    elif "log_likelihood" in values:
        parts.append(f"nll {number(-values['log_likelihood'])}")
    if "accuracy" in values:
        parts.append(f"acc {values['accuracy']:.1%}")
    return parts


def validation(row: Mapping[str, float]) -> list[str]:
    """Say how the validation data scored."""
    parts = []
    if "validation_nll" in row:
        parts.append(f"val nll {number(row['validation_nll'])}")
    if "validation_accuracy" in row:
        parts.append(f"val acc {row['validation_accuracy']:.1%}")
    return parts


def number(value: float) -> str:
    """Write a term in few digits."""
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1000 else f"{value:.2e}"


def short(value: float) -> str:
    """Write a large count with a letter for its size."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Write a time as people say it."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody may be watching."""
    return stream is not None and not stream.closed and stream.isatty()
