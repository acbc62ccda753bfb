"""What all plots share: colours, where they are drawn, and words on them."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from varlap.errors import needs_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.lines import Line2D
    from matplotlib.ticker import Formatter, Locator

# Paul Tol's bright scheme, whose colours can be told apart by the colour-blind; markers tell them apart in grey.
BLUE, RED, GREEN, PURPLE, CYAN, YELLOW = PALETTE = ("#4477aa", "#ee6677", "#228833", "#aa3377", "#66ccee", "#ccbb44")
DARK_RED = "#bb2233"  # words in the palette's red would be too pale
GREY = "#888888"  # seen on white and on black
MARKERS = "osD^vP"
_DASHES = ("-", "--", "-.", ":")
SEQUENTIAL = "viridis"
SMALL = "small"  # relative to the caller's font size

_SIZE = (4.2, 3.2)  # inches: the usual 10 points stay readable at half the width of a page
_DPI = 150
_FEWEST_TICKS, _MOST_TICKS = 3, 12


def axes_for(ax: "Axes | None", function: str, size: tuple[float, float] = _SIZE) -> "Axes":
    """Return the given axes, or those of a new figure that pyplot does not keep.

    >>> axes_for(None, "reliability").figure.get_size_inches()
    array([4.2, 3.2])
    """
    return panels(function, 1, size)[0] if ax is None else ax


def panels(function: str, number: int, size: tuple[float, float]) -> "list[Axes]":
    """Return the axes of a new figure that pyplot does not keep, side by side, with one scale on the left.

    >>> len(panels("reliability", 3, (9.0, 3.0)))
    3
    """
    with needs_extra("plot", f"varlap.plot.{function}", "matplotlib"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    return list(figure.subplots(1, number, sharey=True, squeeze=False)[0])


def colour(index: int) -> str:
    """Return the colour of one of several things, by its place among them from 0.

    >>> colour(0) == colour(6)
    True
    """
    return PALETTE[index % len(PALETTE)]


def marker(index: int) -> str:
    """Return its marker.

    >>> marker(1)
    's'
    """
    return MARKERS[index % len(MARKERS)]


def dashes(index: int) -> str:
    """Return its kind of line.

    >>> dashes(1)
    '--'
    """
    return _DASHES[index % len(_DASHES)]


def rgb(name: str) -> tuple[float, float, float]:
    """Return a colour's parts.

    >>> rgb("#ff0000")
    (1.0, 0.0, 0.0)
    """
    from matplotlib.colors import to_rgb

    return to_rgb(name)


def percent() -> "Formatter":
    """Return what writes 0.5 as 50%.

    >>> percent()(0.5)
    '50%'
    """
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{100 * value:g}%")


def whole_numbers() -> "Locator":
    """Return what puts ticks at whole numbers only.

    >>> whole_numbers().tick_values(0, 2).tolist()
    [0.0, 1.0, 2.0]
    """
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 5, 10])


def log_ticks(low: float, high: float) -> list[float]:
    """Return ticks between two positive numbers for a log scale: 1, 2 and 5 times powers of ten if they suffice.

    >>> log_ticks(0.04, 2.5)
    [0.05, 0.1, 0.2, 0.5, 1.0, 2.0]
    >>> log_ticks(0.21, 0.45), log_ticks(1e-5, 20)[:2], log_ticks(0.201, 0.208)
    ([0.25, 0.3, 0.35, 0.4, 0.45], [1e-05, 0.0001], [0.202, 0.204, 0.206, 0.208])
    """
    from matplotlib.ticker import MaxNLocator

    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1,)):
        ticks = [float(f"{digit}e{power}") for power in powers for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= _MOST_TICKS:
            break
    if len(ticks) >= _FEWEST_TICKS:
        return ticks
    even = MaxNLocator(nbins=6, steps=[1, 2, 5, 10]).tick_values(low, high)
    return [tick for value in even if low <= (tick := float(f"{value:.6g}")) <= high]


def plain_number(value: float) -> str:
    """Return a number without a power of ten.

    >>> plain_number(0.2), plain_number(1e-5), plain_number(20.0)
    ('0.2', '0.00001', '20')
    """
    return f"{value:.12f}".rstrip("0").rstrip(".")


def diverging() -> "Colormap":
    """Return a colour map from blue to red that is lightest in the middle; points of the palette can be seen on it.

    >>> [round(float(part), 2) for part in diverging()(0.5)[:3]]
    [0.97, 0.97, 0.97]
    """
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("varlap", ["#7ba3cc", "#f7f7f7", "#f29aa5"], N=257)


def tidy(ax: "Axes", xlabel: str, ylabel: str) -> None:
    """Label the axes and take away the frame's upper and right side."""
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.spines[["top", "right"]].set_visible(False)


def note(ax: "Axes", text: str) -> None:
    """Print words in the upper left corner, on the axes' own background so that what is drawn does not hide them."""
    ax.text(
        0.03,
        0.96,
        text,
        transform=ax.transAxes,
        va="top",
        fontsize=SMALL,
        zorder=10,
        bbox={"facecolor": ax.get_facecolor(), "edgecolor": "none", "alpha": 0.8, "boxstyle": "round,pad=0.2"},
    )


def legend(ax: "Axes", loc: Any = "best", **options: Any) -> None:
    """Say what is what, in little room."""
    ax.legend(loc=loc, fontsize=SMALL, framealpha=0.9, edgecolor="none", handlelength=1.5, **options)


def legend_above(panels: "Sequence[Axes]", marks: "Sequence[Line2D]") -> None:
    """Say what is what in one line above axes that stand side by side."""
    panels[0].figure.legend(
        handles=marks, loc="outside upper center", ncols=len(marks), fontsize=SMALL, edgecolor="none", handlelength=1.5
    )
