"""The UCI experiment's tables beside published figures, as Markdown and JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from varlap.errors import ConfigError
from varlap.experiments.uci import published
from varlap.experiments.uci.summary import LABELS, TableSummary
from varlap.files import replace_file

MARKDOWN, DATA = "report.md", "report.json"
TITLES = {"log_likelihood": "Test log-likelihood ↑", "rmse": "Test RMSE ↓"}


def write_uci(found: Sequence[TableSummary], out: Path | str) -> Path:
    """Write report.md and report.json into a folder, and return the path of the first.

    >>> import tempfile
    >>> values = {"log_likelihood": {"VL": [1.0, 2.0]}, "rmse": {"VL": [3.0, 3.0]}}
    >>> write_uci([TableSummary("boston", 20, {}, values)], tempfile.mkdtemp()).name
    'report.md'
    """
    out = Path(out).expanduser()
    contents = {MARKDOWN: uci_markdown(found), DATA: json.dumps(uci_json(found), indent=1, ensure_ascii=False) + "\n"}
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            replace_file(out / name, text.encode())
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {out}: {error}; choose another folder") from error
    return out / MARKDOWN


def uci_json(found: Sequence[TableSummary]) -> dict[str, Any]:
    """Return all that the tables show, and each split's value, as plain data."""
    theirs = published()
    return {
        "tables": [
            {
                "data": one.data,
                "splits": {"done": one.num_done, "of": one.num_splits, "diverged": one.num_failed},
                "chosen": {
                    LABELS[name]: {"beta": c.beta, "by": c.way, "held_out_log_likelihood": c.log_likelihood}
                    for name, c in one.choices.items()
                },
                "seconds": dict(one.seconds),
                **{score: _scores_json(one, score) for score in TITLES},
            }
            for one in found
        ],
        "published": {
            "sources": theirs["methods"],
            **{score: theirs[score] for score in TITLES},
        },
    }


def uci_markdown(found: Sequence[TableSummary]) -> str:
    """Return the tables with their notes.

    >>> rmse = {"MAP": [3.0, 3.0], "VL": [3.0, 3.0]}
    >>> values = {"log_likelihood": {"MAP": [0.0, 1.0], "VL": [1.0, 2.0]}, "rmse": rmse}
    >>> print(uci_markdown([TableSummary("boston", 20, {}, values)]).splitlines()[8])
    | boston | 2 of 20 | 0.500 ± 0.500 | **1.50 ± 0.50** | -2.57 ± 0.09 | -2.46 ± 0.06 | -2.39 ± 0.05 | -2.41 ± 0.25 |
    """
    theirs = published()
    lines = ["# UCI regression", ""]
    for score, title in TITLES.items():
        lines += [f"## {title}", "", "Mean ± standard error over splits, in the table's own units.", ""]
        lines += [*_against_published(found, score, theirs), ""]
    lines += [
        "Bold: the best of ours, and those that differ from it by less than two standard errors of the paired "
        "difference. The splits share training rows, so standard errors are somewhat too small.",
        "",
        "## VL minus the others, log-likelihood",
        "",
        "Mean ± standard error of the difference, split by split; bold where it is more than two of them.",
        "",
        *_differences(found),
        "",
        "## What was chosen on held-out rows",
        "",
        *_chosen(found),
        "",
        "## Log-likelihood by way of predicting",
        "",
        "At the chosen β, whichever way was chosen.",
        "",
        *_by_way(found),
        "",
        "## Published figures: sources and protocols",
        "",
        *(f"- **{name}**: {source}." for name, source in theirs["methods"].items()),
        "",
    ]
    return "\n".join(lines)


def _against_published(found: Sequence[TableSummary], score: str, theirs: dict[str, Any]) -> list[str]:
    methods = list(found[0].values[score]) if found else []
    lines = [*_header(["data", "splits", *methods, *theirs[score]])]
    for one in found:
        best = one.best(score)
        cells = [_bold(_estimate(one, score, method), method in best) for method in methods]
        cells += [f"{mean:.2f} ± {error:.2f}" for mean, error in (table[one.data] for table in theirs[score].values())]
        lines.append(_row([one.data, _splits(one), *cells]))
    return lines


def _differences(found: Sequence[TableSummary]) -> list[str]:
    others = [method for method in found[0].values["log_likelihood"] if method != "VL"] if found else []
    lines = _header(["data", *others])
    for one in found:
        cells = []
        for method in others:
            estimate = one.difference("log_likelihood", "VL", method)
            error = "" if estimate.standard_error is None else f" ± {estimate.standard_error:.3f}"
            clear = bool(error) and one.differ("log_likelihood", "VL", method)
            cells.append(_bold(f"{estimate.mean:+.3f}{error}", clear))
        lines.append(_row([one.data, *cells]))
    return lines


def _chosen(found: Sequence[TableSummary]) -> list[str]:
    lines = _header(["data", *(f"β of {label}" for label in LABELS.values())])
    for one in found:
        cells = [f"{c.beta:g}, {c.way.split('-')[0]}" for c in one.choices.values()]
        lines.append(_row([one.data, *cells]))
    return lines


def _by_way(found: Sequence[TableSummary]) -> list[str]:
    ways = list(found[0].ways.get("log_likelihood", {})) if found else []
    lines = _header(["data", *ways])
    for one in found:
        cells = [f"{sum(v) / len(v):.2f}" for v in one.ways.get("log_likelihood", {}).values()]
        lines.append(_row([one.data, *cells]))
    return lines


def _scores_json(one: TableSummary, score: str) -> dict[str, Any]:
    best = one.best(score)
    ours = {
        method: {
            "mean": one.estimate(score, method).mean,
            "standard_error": one.estimate(score, method).standard_error,
            "best": method in best,
            "splits": list(values),
        }
        for method, values in one.values[score].items()
    }
    return ours | {way: {"splits": list(values)} for way, values in one.ways.get(score, {}).items()}


def _estimate(one: TableSummary, score: str, method: str) -> str:
    found = one.estimate(score, method)
    size = abs(found.mean)  # the targets of kin8nm and naval are small numbers
    digits = 2 + (size < 1) + (size < 0.2) + (size < 0.02)
    error = "" if found.standard_error is None else f" ± {found.standard_error:.{digits}f}"
    return f"{found.mean:.{digits}f}{error}"


def _splits(one: TableSummary) -> str:
    failed = f", {one.num_failed} diverged" if one.num_failed else ""
    return f"{one.num_done} of {one.num_splits}{failed}"


def _header(names: Sequence[str]) -> list[str]:
    return [_row(names), _row(["---", *["---:"] * (len(names) - 1)])]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text
