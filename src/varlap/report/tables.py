"""The comparison of methods: numbers first, and from them HTML, Markdown, JSON and a table for the terminal."""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

from varlap.files import finite
from varlap.report.sections import Method

if TYPE_CHECKING:
    from rich.table import Table as RichTable

SECONDS = "seconds"
_DIGITS, _MOST_DECIMALS = 4, 3


@dataclass(frozen=True)
class Column:
    """A score: what it is called, which direction is better, and what it says."""

    key: str
    title: str
    direction: str = ""
    """↑, ↓, or nothing where neither is better"""
    meaning: str = ""
    percent: bool = False
    main: bool = True
    """whether it is in the short table"""

    @property
    def heading(self) -> str:
        """The title with its unit and direction.

        >>> Column("accuracy", "accuracy", "↑", percent=True).heading
        'accuracy (%) ↑'
        """
        return " ".join(part for part in (self.title, "(%)" if self.percent else "", self.direction) if part)


def _detection(uncertainty: str, words: str) -> list[Column]:
    by = f"in-distribution inputs against out-of-distribution inputs, by predictive {words}"
    return [
        Column(f"ood_auroc_{uncertainty}", f"OOD AUROC ({words})", "↑", f"{by}: a half is chance, 1 perfect"),
        Column(f"ood_aupr_{uncertainty}", f"OOD AUPR ({words})", "↑", f"{by}: area under precision-recall", main=False),
        Column(
            f"ood_fpr95_{uncertainty}",
            f"OOD FPR at 95% ({words})",
            "↓",
            f"{by}: false alarms where 95% are found",
            main=False,
        ),
    ]


KNOWN = (
    Column("nll", "NLL", "↓", "negative log-likelihood of the test items, in nats an item"),
    Column("accuracy", "accuracy", "↑", "share of items whose most probable class is right", percent=True),
    Column("top5_accuracy", "top-5 accuracy", "↑", "share with the right class among five", percent=True, main=False),
    Column("ece", "ECE", "↓", "expected calibration error: gap of confidence and accuracy, 15 bins"),
    Column("adaptive_ece", "adaptive ECE", "↓", "the same in bins of equally many items", main=False),
    Column("classwise_ece", "classwise ECE", "↓", "the same for each class, averaged", main=False),
    Column("brier", "Brier", "↓", "squared distance of the probabilities from the truth"),
    Column("aurc", "AURC", "↓", "error rate averaged over how many of the surest items are answered"),
    Column("rmse", "RMSE", "↓", "root mean squared error of the mean"),
    Column("log_likelihood", "log-likelihood", "↑", "of the test items, in nats an item", main=False),
    Column("crps", "CRPS", "↓", "continuous ranked probability score"),
    Column("coverage", "coverage", "", "share of targets inside the predictive interval", percent=True),
    Column("width", "width", "", "mean width of the predictive interval"),
    *_detection("entropy", "entropy"),
    *_detection("mutual_information", "mutual information"),
    *_detection("variance", "variance"),
    *_detection("epistemic_variance", "epistemic variance"),
)
_TIME = Column(SECONDS, "train seconds", "↓", "wall-clock time to train, on the hardware named with each run")


@dataclass(frozen=True)
class Cell:
    """A score of a method: one run's with its interval, or the mean over several with its standard error."""

    value: float
    low: float | None = None
    high: float | None = None
    standard_error: float | None = None
    num_runs: int = 1
    best: bool = False
    shown: str = ""
    """the value as tables print it, in per cent where the column says so"""
    shown_range: str = ""
    """the interval or the standard error, likewise"""


@dataclass(frozen=True)
class Row:
    """A method's scores."""

    name: str
    num_runs: int
    cells: Mapping[str, Cell]


@dataclass(frozen=True)
class Table:
    """Methods by scores."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    of: str = "method"
    """what a row is"""

    def short(self) -> "Table":
        """Return the table with the main columns only."""
        return replace(self, columns=tuple(column for column in self.columns if column.main))

    def to_json(self) -> dict[str, Any]:
        """Return plain data; a score that is not finite is None."""
        return {
            "columns": [
                {"key": c.key, "title": c.title, "direction": c.direction, "percent": c.percent} for c in self.columns
            ],
            "rows": [
                {
                    "name": row.name,
                    "runs": row.num_runs,
                    "scores": {key: _json_cell(cell) for key, cell in row.cells.items()},
                }
                for row in self.rows
            ],
        }

    def to_html(self, caption: str) -> str:
        """Return a `<table>`; names are escaped, best values are strong."""
        head = "".join(f'<th scope="col">{_html_heading(column)}</th>' for column in self.columns)
        body = "".join(
            f'<tr><th scope="row">{escape(row.name)}{_html_runs(row)}</th>'
            f"{''.join(_html_cell(row.cells.get(column.key)) for column in self.columns)}</tr>\n"
            for row in self.rows
        )
        return (
            f"<table>\n<caption>{escape(caption)}</caption>\n"
            f'<thead><tr><th scope="col">{escape(self.of)}</th>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>'
        )

    def to_markdown(self) -> str:
        """Return a pipe table; best values are bold."""
        lines = []
        for row in self.rows:
            name = f"{row.name} ({row.num_runs} runs)" if row.num_runs > 1 else row.name
            cells = [_markdown_cell(row.cells.get(column.key)) for column in self.columns]
            lines.append([markdown_text(name), *cells])
        return pipe_table([self.of, *(markdown_text(column.heading) for column in self.columns)], lines)

    def to_rich(self, title: str, *, ranges: bool = True, turned: bool = False) -> "RichTable":
        """Return a table for the terminal; turned, the methods stand side by side: narrower where they are few."""
        from rich.table import Table as RichTable
        from rich.text import Text

        # "OOD AUROC (entropy)" takes two lines, "accuracy (%)" one
        def broken(heading: str) -> str:
            return heading.replace(" (", "\n(").replace("\n(%)", " (%)")

        names = [f"{row.name}\n{row.num_runs} runs" if row.num_runs > 1 else row.name for row in self.rows]
        headings = [broken(column.heading) for column in self.columns]
        cells: list[list[Text]] = []
        for row in self.rows:
            cells.append([])
            for column in self.columns:
                cell = row.cells.get(column.key)
                text = "" if cell is None else "\n".join(filter(None, (cell.shown, cell.shown_range if ranges else "")))
                cells[-1].append(Text(text, style="bold green" if cell is not None and cell.best else ""))
        if turned:
            names, headings, cells = headings, names, [list(line) for line in zip(*cells, strict=True)]
        table = RichTable(title=Text(title))
        table.add_column("score" if turned else self.of, no_wrap=True)
        for heading in headings:
            table.add_column(Text(heading), justify="right", no_wrap=True)
        for name, line in zip(names, cells, strict=True):
            table.add_row(Text(name), *line)
        return table


def comparison(methods: Sequence[Method]) -> Table:
    """Compare methods by every score that one of them has.

    One run shows its interval, from NAME_low and NAME_high; several show their mean and its standard error. The best
    value of a column is marked, with those that print alike: a fourth decimal of one run says nothing.

    >>> from varlap.experiments import Evaluated
    >>> from varlap.report.sources import Entry
    >>> def method(name, *scores):
    ...     runs = [Evaluated(name, {"nll": score}, {"seed": seed}, {}) for seed, score in enumerate(scores)]
    ...     return Method(name, tuple(map(Entry, runs)))
    >>> print(comparison([method("MAP", 0.5), method("VL", 0.25, 0.75, 0.35)]).to_markdown())
    | method | NLL ↓ |
    | --- | ---: |
    | MAP | 0.500 |
    | VL (3 runs) | **0.450** ± 0.153 |
    """
    columns = _columns(methods)
    cells: dict[str, dict[str, Cell]] = {method.name: {} for method in methods}
    for column in columns:
        found = {method.name: _cell(method, column.key) for method in methods}
        for name, cell in printed(column, {name: cell for name, cell in found.items() if cell is not None}).items():
            cells[name][column.key] = cell
    return Table(columns, tuple(Row(method.name, len(method.entries), cells[method.name]) for method in methods))


def _columns(methods: Sequence[Method]) -> tuple[Column, ...]:
    """Return the columns that hold something: known ones, then others, then the time."""
    entries = [entry.evaluated for method in methods for entry in method.entries]
    there = dict.fromkeys(name for one in entries for name in one.scores if not _is_end(name, one.scores))
    known = {column.key: column for column in KNOWN}
    columns = [column for column in KNOWN if column.key in there]
    columns += [Column(name, name.replace("_", " ")) for name in there if name not in known]
    outside = {one.spec.get("ood") for one in entries if any(name.startswith("ood_") for name in one.scores)}
    if len(outside) > 1:  # scores against different images have no best
        columns = [replace(column, direction="") if column.key.startswith("ood_") else column for column in columns]
    if any(one.seconds is not None for one in entries):
        columns = [column for column in columns if column.key != SECONDS] + [_TIME]
    return tuple(columns)


def _is_end(name: str, scores: Mapping[str, float]) -> bool:
    """Tell an interval's end from a score."""
    return any(name.endswith(end) and name.removesuffix(end) in scores for end in ("_low", "_high"))


def _cell(method: Method, key: str) -> Cell | None:
    runs = [entry.evaluated for entry in method.entries]
    if key == SECONDS:
        values = [one.seconds for one in runs if one.seconds is not None]
    else:
        values = [one.scores[key] for one in runs if key in one.scores]
    if not values:
        return None
    if len(runs) == 1:
        scores = runs[0].scores
        return Cell(float(values[0]), scores.get(f"{key}_low"), scores.get(f"{key}_high"))
    if not all(map(math.isfinite, values)):
        return Cell(math.nan, num_runs=len(values))
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Cell(statistics.fmean(values), standard_error=error, num_runs=len(values))


def printed(column: Column, cells: Mapping[str, Cell]) -> dict[str, Cell]:
    """Print a column's values to the same number of decimals, and mark the best.

    >>> [cell.shown for cell in printed(Column("nll", "NLL", "↓"), {"a": Cell(0.5), "b": Cell(0.25)}).values()]
    ['0.500', '0.250']
    """
    scale = 100 if column.percent else 1
    largest = max((abs(cell.value) for cell in cells.values() if math.isfinite(cell.value)), default=0.0)
    decimals = min(_decimals(scale * largest), 1) if column.percent else _decimals(largest)
    shown = {name: _number(scale * cell.value, decimals) for name, cell in cells.items()}
    values = {name: float(shown[name]) for name, cell in cells.items() if math.isfinite(cell.value)}
    best = None
    if column.direction and len(cells) > 1 and values:
        best = max(values.values()) if column.direction == "↑" else min(values.values())
    result = {}
    for name, cell in cells.items():
        uncertain = ""
        if cell.standard_error is not None:
            uncertain = f"± {_number(scale * cell.standard_error, decimals)}"
        elif cell.low is not None and cell.high is not None:
            uncertain = f"[{_number(scale * cell.low, decimals)}, {_number(scale * cell.high, decimals)}]"
        is_best = name in values and values[name] == best
        result[name] = replace(cell, best=is_best, shown=shown[name], shown_range=uncertain)
    return result


def _decimals(largest: float) -> int:
    """Return how many show four digits of the largest value; tiny ones get more than four decimals."""
    if largest == 0:
        return _MOST_DECIMALS
    digits = _DIGITS - 1 - math.floor(math.log10(largest))
    return max(0, digits if largest < 1e-3 else min(digits, _MOST_DECIMALS))


def _number(value: float, decimals: int) -> str:
    return f"{value:.{decimals}f}" if math.isfinite(value) else str(value)


def pipe_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of cells, all but the first of a row to the right.

    >>> print(pipe_table(["data", "RMSE"], [["boston", "**3.1**"]]))
    | data | RMSE |
    | --- | ---: |
    | boston | **3.1** |
    """
    lines = [head, ["---", *("---:" for _ in head[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_text(text: str) -> str:
    """Return text that Markdown shows as it is.

    >>> markdown_text("a|b <i> *c*")
    'a\\\\|b &lt;i> \\\\*c\\\\*'
    """
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;"))


def _json_cell(cell: Cell) -> dict[str, Any]:
    numbers = finite({name: getattr(cell, name) for name in ("value", "low", "high", "standard_error")})
    return numbers | {"runs": cell.num_runs, "best": cell.best, "shown": cell.shown, "shown_range": cell.shown_range}


def _html_heading(column: Column) -> str:
    title = escape(column.title) + (" (%)" if column.percent else "")
    words = {"↑": "higher is better", "↓": "lower is better"}.get(column.direction)
    if words is None:
        return title
    return f'{title}&nbsp;<span title="{words}" aria-label="{words}" role="img">{column.direction}</span>'


def _html_runs(row: Row) -> str:
    return f" <small>{row.num_runs} runs</small>" if row.num_runs > 1 else ""


def _html_cell(cell: Cell | None) -> str:
    if cell is None:
        return '<td class="none">–</td>'
    shown = escape(cell.shown)
    value = f"<strong>{shown}</strong>" if cell.best else shown
    uncertain = f" <small>{cell.shown_range}</small>" if cell.shown_range else ""
    return f'<td class="best">{value}{uncertain}</td>' if cell.best else f"<td>{value}{uncertain}</td>"


def _markdown_cell(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    shown = markdown_text(cell.shown)
    return " ".join(part for part in (f"**{shown}**" if cell.best else shown, cell.shown_range) if part)
