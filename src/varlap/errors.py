"""The one tree of errors and warnings. Each message says what is wrong, where, and how to fix it."""


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


class MissingExtraError(VarlapError, ImportError):
    """An optional dependency that is not installed; the message holds the pip command."""


class VarlapWarning(UserWarning):
    """Base of every warning that varlap issues."""


def missing_extra(extra: str, what: str) -> MissingExtraError:
    """Say which pip command brings an optional dependency.

    >>> print(missing_extra("sklearn", "the digits data set"))
    the digits data set needs an optional dependency: pip install 'varlap[sklearn]'
    """
    return MissingExtraError(f"{what} needs an optional dependency: pip install 'varlap[{extra}]'")
