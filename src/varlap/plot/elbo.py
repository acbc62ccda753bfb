"""What the ELBO was made of, epoch by epoch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from varlap.errors import ConfigError, DataError
from varlap.plot import style
from varlap.training.loop import History
from varlap.training.records import Records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NEEDED = ("elbo", "log_likelihood", "curvature")
_FEW_EPOCHS = 15


def elbo_terms(history: History | str | Path | Sequence[Mapping[str, float]], *, ax: "Axes | None" = None) -> "Axes":
    """Draw the ELBO over the epochs as the sum of its parts: log-likelihood, −curvature and −β·KL, all per datum.

    The curvature is left out where there is none, as for MAP and VI. While β warms up, β·KL is that of each step.

    Args:
        history: what `fit` returned, its rows, or the folder of a run (its `metrics.jsonl` is read).
        ax: where to draw; a new figure if None.

    >>> row = {"epoch": 0, "elbo": -1.0, "log_likelihood": -0.5, "curvature": 0.25, "kl": 0.5}
    >>> ax = elbo_terms([row])
    >>> {line.get_label(): line.get_ydata().tolist() for line in ax.lines}
    {'ELBO': [-1.0], 'log-likelihood': [-0.5], '−β·KL': [-0.25], '−curvature': [-0.25]}
    """
    epochs = _rows(history)
    columns = {name: np.array([row[name] for row in epochs], float) for name in _NEEDED}
    likelihood, curvature, elbo = (columns[name] for name in ("log_likelihood", "curvature", "elbo"))
    # What is left is β·KL, also in epochs in which β was still rising.
    parts = {"log-likelihood": likelihood, "−β·KL": elbo - likelihood + curvature, "−curvature": -curvature}
    if not np.nan_to_num(curvature).any():
        del parts["−curvature"]
    ax = style.axes_for(ax, "elbo_terms")
    x = np.array([row.get("epoch", index) for index, row in enumerate(epochs)]) + 1
    few = len(x) <= _FEW_EPOCHS
    # Wide and pale, for where a part hides it: with a small β the ELBO is nearly the log-likelihood.
    ax.plot(x, elbo, color=style.BLUE, alpha=0.5, linewidth=4, label="ELBO", marker="o" if few else None)
    for index, (name, values) in enumerate(parts.items(), start=1):
        drawn: dict[str, Any] = {"color": style.colour(index), "linestyle": style.dashes(index), "label": name}
        ax.plot(x, values, **drawn, marker=style.marker(index) if few else None, markersize=4)
    style.tidy(ax, "epoch", "nats per datum")
    ax.xaxis.set_major_locator(style.whole_numbers())
    style.legend(ax)
    return ax


def _rows(history: History | str | Path | Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, Any]]:
    origin = "the history"
    if isinstance(history, History):
        found: Sequence[Mapping[str, Any]] = history.epochs
    elif isinstance(history, str | Path):
        path = Path(history).expanduser()
        path = path / "metrics.jsonl" if path.is_dir() else path
        if not path.is_file():
            raise DataError(f"{path} is not there; give the folder of a run, the out= of varlap.fit")
        origin, found = str(path), Records(path).rows()
    else:
        found = history
    if not found:
        raise ConfigError(f"{origin} has no epochs yet; plot.elbo_terms needs one at least")
    for index, row in enumerate(found):
        missing = [name for name in _NEEDED if name not in row]
        if missing:
            raise ConfigError(
                f"{origin}: row {index} has no {' and no '.join(missing)}; plot.elbo_terms draws the rows of varlap.fit"
            )
    return found
