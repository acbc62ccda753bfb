"""Evaluations side by side in the terminal."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from varlap.experiments import Evaluated

# The better end of each score that a table shows, with what its column is called.
COLUMNS = {
    "accuracy": ("accuracy\n↑", max),
    "nll": ("NLL\n↓", min),
    "ece": ("ECE\n↓", min),
    "brier": ("Brier\n↓", min),
    "ood_auroc_entropy": ("OOD\nAUROC ↑", max),
}


def comparison_table(found: Sequence[Evaluated], title: str) -> Table:
    """Return a table of the scores that all have, a row a method, the best of each column in green."""
    shown = [name for name in COLUMNS if all(name in each.scores for each in found)]
    table = Table("method", "predicts by", title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in shown:
        table.add_column(COLUMNS[name][0], justify="right")
    timed = all(each.seconds is not None for each in found)
    if timed:
        table.add_column("seconds\n↓", justify="right")
    for each in found:
        cells = [_cell(name, each, found) for name in shown]
        if timed:
            fastest = each.seconds == min(other.seconds or 0.0 for other in found)
            cells.append(_marked(f"{each.seconds:.1f}", fastest))
        table.add_row(each.name, way(each), *cells)
    return table


def way(found: Evaluated) -> str:
    """Say by which network a prediction was made.

    >>> way(Evaluated("VI", {}, {"how": "sampled", "num_samples": 5, "temperature": 1.0}, {}))
    '5 samples'
    """
    how, number, temperature = found.spec["how"], found.spec["num_samples"], found.spec["temperature"]
    words = {"mean": "mean", "sampled": f"{number} samples", "linearised": f"{number} linearised"}[how]
    return words if temperature == 1.0 else f"{words}, T = {temperature:.2f}"


def score_table(found: Sequence[Evaluated], title: str) -> Table:
    """Return a table of all scores, a row a score, with their intervals where there are some."""
    table = Table("", title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for each in found:
        table.add_column(f"{each.name}\n{way(each)}", justify="right")
    ends = ("_low", "_high")
    for name in (name for name in found[0].scores if not name.endswith(ends)):
        table.add_row(name, *(_with_interval(name, each) for each in found))
    return table


def _with_interval(name: str, each: Evaluated) -> str:
    text = f"{each.scores[name]:.4f}"
    if f"{name}_low" in each.scores:
        text += f" [dim]({each.scores[f'{name}_low']:.4f}–{each.scores[f'{name}_high']:.4f})[/]"
    return text


def _cell(name: str, each: Evaluated, found: Sequence[Evaluated]) -> str:
    best = COLUMNS[name][1](other.scores[name] for other in found)
    return _marked(f"{each.scores[name]:.4f}", each.scores[name] == best)


def _marked(text: str, best: bool) -> str:
    return f"[bold green]{text}[/]" if best else text
