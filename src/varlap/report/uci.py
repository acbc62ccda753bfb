"""The UCI experiment's tables beside published figures, as Markdown and JSON."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from varlap.experiments.uci import published
from varlap.experiments.uci.summary import LABELS, TableSummary
from varlap.report.build import DATA, MARKDOWN, write_files
from varlap.report.tables import markdown_text, pipe_table

CLEARLY = (
    "Clearly: by a paired t test at 5 %, split by split. The splits share training rows, so standard errors are "
    "somewhat too small, and of many comparisons one in twenty looks clear by chance."
)
TITLES = {"log_likelihood": "Test log-likelihood ↑", "rmse": "Test RMSE ↓"}


def write_uci(found: Sequence[TableSummary], out: Path | str, left_out: Sequence[str] = ()) -> Path:
    """Write report.md and report.json into a folder, and return the path of the first.

    Args:
        found: what to show.
        out: the folder.
        left_out: which tables are not there, and why: see `all_diverged`.

    >>> import tempfile
    >>> values = {"log_likelihood": {"VL": [1.0, 2.0]}, "rmse": {"VL": [3.0, 3.0]}}
    >>> write_uci([TableSummary("boston", 20, {}, values)], tempfile.mkdtemp()).name
    'report.md'
    """
    content = json.dumps(uci_json(found, left_out), indent=1, ensure_ascii=False) + "\n"
    contents = {MARKDOWN: uci_markdown(found, left_out), DATA: content}
    return write_files(out, {name: text.encode() for name, text in contents.items()}) / MARKDOWN


def uci_json(found: Sequence[TableSummary], left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return all that the tables show, and each split's value, as plain data."""
    theirs = published()
    return {
        "tables": [
            {
                "data": one.name,
                "splits": {"done": one.num_done, "of": one.num_splits, "diverged": one.num_failed},
                "chosen": {
                    LABELS[name]: {
                        "beta": tuned.beta,
                        "held_out_log_likelihood": tuned.log_likelihood,
                        "trials": tuned.num_trials,
                        "edge": tuned.edge,
                    }
                    for name, tuned in one.tuned.items()
                },
                "seconds": dict(one.seconds),
                **{score: _scores_json(one, score) for score in TITLES},
            }
            for one in found
        ],
        "left_out": list(left_out),
        "published": {
            "sources": theirs["methods"],
            **{score: theirs[score] for score in TITLES},
        },
    }


def uci_markdown(found: Sequence[TableSummary], left_out: Sequence[str] = ()) -> str:
    """Return the tables with their notes.

    >>> rmse = {"MAP": [3.0, 3.0], "VL": [3.0, 3.0]}
    >>> values = {"log_likelihood": {"MAP": [0.0, 1.0], "VL": [1.0, 2.0]}, "rmse": rmse}
    >>> print(uci_markdown([TableSummary("boston", 20, {}, values)]).splitlines()[8])
    | boston | 2 of 20 | 0.500 ± 0.500 | **1.50 ± 0.50** | -2.57 ± 0.09 | -2.46 ± 0.06 | -2.39 ± 0.05 | -2.41 ± 0.25 |
    """
    theirs = published()
    lines = ["# UCI regression", ""]
    if left_out:
        lines += ["Left out:", "", *(f"- {markdown_text(one)}" for one in left_out), ""]
    for score, title in TITLES.items():
        lines += [f"## {title}", "", "Mean ± standard error over splits, in the table's own units.", ""]
        lines += [_against_published(found, score, theirs), ""]
    lines += [
        f"Bold: the best of ours, and those that do not clearly differ from it. {CLEARLY}",
        "",
        "## VL minus the others, log-likelihood",
        "",
        "Mean ± standard error of the difference, split by split; bold where it is clear.",
        "",
        _differences(found),
        "",
        "## β chosen on held-out rows",
        "",
        "Every method had as many trials; smallest and largest are the ends of what was tried.",
        "",
        _chosen(found),
        "",
        "## Log-likelihood by way of predicting",
        "",
        "At the chosen β. In the tables above all but MAP are linearised.",
        "",
        _by_way(found),
        "",
        "## Published figures: sources and protocols",
        "",
        *(f"- **{name}**: {source}." for name, source in theirs["methods"].items()),
        "",
    ]
    return "\n".join(lines)


def estimate_text(one: TableSummary, score: str, method: str) -> str:
    """Return a method's mean score with its standard error, in as many digits as say something.

    >>> estimate_text(TableSummary("naval", 20, {}, {"rmse": {"VL": [0.0018, 0.0020]}}), "rmse", "VL")
    '0.00190 ± 0.00010'
    """
    found = one.estimate(score, method)
    size = abs(found.mean)  # the targets of kin8nm and naval are small numbers
    digits = 2 + (size < 1) + (size < 0.2) + (size < 0.02)
    error = "" if found.standard_error is None else f" ± {found.standard_error:.{digits}f}"
    return f"{found.mean:.{digits}f}{error}"


def _methods(found: Sequence[TableSummary], score: str) -> list[str]:
    return list(found[0].values[score]) if found else []


def _against_published(found: Sequence[TableSummary], score: str, theirs: dict[str, Any]) -> str:
    methods = _methods(found, score)
    rows = []
    for one in found:
        best = one.best(score)
        cells = [_bold(estimate_text(one, score, method), method in best) for method in methods]
        cells += [f"{mean:.2f} ± {error:.2f}" for mean, error in (table[one.data] for table in theirs[score].values())]
        rows.append([one.name, _splits(one), *cells])
    return pipe_table(["data", "splits", *methods, *theirs[score]], rows)


def _differences(found: Sequence[TableSummary]) -> str:
    others = [method for method in _methods(found, "log_likelihood") if method != "VL"]
    differences = {one.name: [one.difference("log_likelihood", "VL", method) for method in others] for one in found}
    rows = []
    for name, estimates in differences.items():
        errors = ["" if one.standard_error is None else f" ± {one.standard_error:.3f}" for one in estimates]
        pairs = zip(estimates, errors, strict=True)
        rows.append([name, *(_bold(f"{one.mean:+.3f}{error}", one.is_clear) for one, error in pairs)])
    for word, sign in (("better", 1), ("worse", -1)) if found else ():
        clear = [[one.is_clear and sign * one.mean > 0 for one in estimates] for estimates in differences.values()]
        rows.append([f"VL clearly {word}", *(f"{sum(column)} of {len(found)}" for column in zip(*clear, strict=True))])
    return pipe_table(["data", *others], rows)


def _chosen(found: Sequence[TableSummary]) -> str:
    rows = []
    for one in found:
        cells = [f"{tuned.beta:g}" + (f", {tuned.edge}" if tuned.edge else "") for tuned in one.tuned.values()]
        trials = sorted({tuned.num_trials for tuned in one.tuned.values()})
        rows.append([one.name, ", ".join(map(str, trials)), *cells])
    return pipe_table(["data", "trials", *(f"β of {label}" for label in LABELS.values())], rows)


def _by_way(found: Sequence[TableSummary]) -> str:
    ways = list(found[0].ways.get("log_likelihood", {})) if found else []
    rows = [
        [one.name, *(f"{statistics.fmean(v):.2f}" for v in one.ways.get("log_likelihood", {}).values())]
        for one in found
    ]
    return pipe_table(["data", *ways], rows)


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


def _splits(one: TableSummary) -> str:
    failed = f", {one.num_failed} diverged" if one.num_failed else ""
    return f"{one.num_done} of {one.num_splits}{failed}"


def _bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text
