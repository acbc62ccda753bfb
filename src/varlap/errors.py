"""The one tree of errors and warnings. Each message says what is wrong, where, and how to fix it."""

import contextlib
import contextvars
import difflib
import sys
import warnings
from collections.abc import Iterable, Iterator
from signal import Signals


class VarlapError(Exception):
    """Base of every error that varlap raises on purpose."""


class ConfigError(VarlapError, ValueError):
    """A setting that cannot be right, such as a negative beta or a missing num_data."""


class NetworkError(VarlapError, TypeError):
    """A network that cannot be wrapped, or whose outputs cannot be used."""


class BatchError(VarlapError, ValueError):
    """A batch whose shapes, types or labels do not fit the network and the likelihood."""


class NonFiniteError(VarlapError, ArithmeticError):
    """A NaN or an infinity in a batch, a loss or a gradient. Nothing was changed."""


class DataError(VarlapError, FileNotFoundError):
    """A data set that is not where it should be, or not what it should be."""


class CheckpointError(VarlapError, OSError):
    """A file that is damaged, of another format, or cannot be written."""


class MissingExtraError(VarlapError, ImportError):
    """An optional dependency that is not installed; the message holds the pip command."""


class Interrupted(KeyboardInterrupt):
    """A training that a signal stopped between two steps.

    No `VarlapError`: as with Python's own KeyboardInterrupt, `except Exception` lets it pass.

    Args:
        signal: the signal's number, such as that of SIGTERM.
        step: how many steps are done.
        saved: whether a checkpoint holds them.

    >>> error = Interrupted(15, step=120, saved=True)
    >>> print(error)
    SIGTERM stopped the training; a checkpoint was saved at step 120 and the same command carries on from there
    >>> error.exit_status
    143
    """

    def __init__(self, signal: int, step: int, saved: bool) -> None:
        name = Signals(signal).name if signal in set(Signals) else f"signal {signal}"
        after = (
            f"a checkpoint was saved at step {step} and the same command carries on from there"
            if saved
            else f"the weights of step {step} are in the network alone, and nothing carries on from there; train with "
            "a run folder, fit(..., out=...), to keep them"
        )
        super().__init__(f"{name} stopped the training; {after}")
        self.signal = signal
        self.step = step
        self.saved = saved
        self.exit_status = 128 + signal  # what a shell reports of a program that the signal ended

    def __reduce__(self) -> tuple[type["Interrupted"], tuple[int, int, bool]]:
        return Interrupted, (self.signal, self.step, self.saved)  # by default a pickle gives the message alone


class OutOfTime(VarlapError, TimeoutError):
    """A training that stopped between two steps since its time was over.

    Args:
        step: how many steps are done.
        saved: whether a checkpoint holds them.

    >>> print(OutOfTime(step=120, saved=True))
    the time was over after step 120; a checkpoint was saved and the same call carries on from there
    """

    def __init__(self, step: int, saved: bool) -> None:
        after = (
            "a checkpoint was saved and the same call carries on from there"
            if saved
            else "its weights are in the network alone, and nothing carries on from there; train with a run folder, "
            "fit(..., out=...), to keep them"
        )
        super().__init__(f"the time was over after step {step}; {after}")
        self.step = step
        self.saved = saved

    def __reduce__(self) -> tuple[type["OutOfTime"], tuple[int, bool]]:
        return OutOfTime, (self.step, self.saved)  # by default a pickle gives the message alone


class VarlapWarning(UserWarning):
    """Base of every warning that varlap issues."""


_quiet = contextvars.ContextVar("_quiet", default=False)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Issue no `VarlapWarning` in the block; Python's own filters are those of all threads.

    >>> with without_warnings():
    ...     warn("mind the gap")
    """
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def warn(message: str) -> None:
    """Issue a `VarlapWarning` at the line outside of varlap and torch that led to it.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn("mind the gap")
    >>> caught[0].message
    VarlapWarning('mind the gap')
    """
    if _quiet.get():
        return
    level, frame = 1, sys._getframe(0)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("varlap", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, VarlapWarning, stacklevel=level)


def did_you_mean(word: object, known: Iterable[str], otherwise: str | None = None) -> str:
    """Name the known word that a mistaken one looks like; if there is none, say `otherwise`, or list them all.

    >>> did_you_mean("metod", ["method", "beta"])
    "did you mean 'method'?"
    >>> did_you_mean("colour", ["method", "beta"])
    "choose 'method' or 'beta'"
    """
    by_lower = {name.lower(): name for name in known}
    if close := difflib.get_close_matches(str(word).lower(), by_lower, n=1):
        return f"did you mean {by_lower[close[0]]!r}?"
    if otherwise is not None:
        return otherwise
    *others, last = map(repr, by_lower.values())
    return f"choose {', '.join(others)} or {last}" if others else f"choose {last}"


@contextlib.contextmanager
def needs_extra(extra: str, what: str, module: str) -> Iterator[None]:
    """Say which extra brings a module that is not there; an import that fails otherwise is not mistaken for that.

    >>> with needs_extra("plot", "varlap.plot", "no_such_module"):
    ...     import no_such_module
    Traceback (most recent call last):
    varlap.errors.MissingExtraError: varlap.plot needs an optional dependency: pip install '.[plot]' in the checkout
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module:  # what it needs itself is another matter
            raise
        raise missing_extra(extra, what) from error


def missing_extra(extra: str, what: str) -> MissingExtraError:
    """Say which pip command brings an optional dependency.

    >>> print(missing_extra("sklearn", "the digits data set"))
    the digits data set needs an optional dependency: pip install '.[sklearn]' in the checkout
    """
    return MissingExtraError(f"{what} needs an optional dependency: pip install '.[{extra}]' in the checkout")
