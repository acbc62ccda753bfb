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
    "ood_auroc_entropy": ("OOD AUROC\n↑", max),
    "ood_auroc_mutual_information": ("by mutual\ninformation ↑", max),
}


def comparison_table(found: Sequence[Evaluated], title: str) -> Table:
    """Return a table of the scores that all have, the best of each column marked, intervals below where there are."""
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
            cells.append(_marked(f"{each.seconds:.1f}", fastest and len(found) > 1))
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


def _cell(name: str, each: Evaluated, found: Sequence[Evaluated]) -> str:
    best = COLUMNS[name][1](other.scores[name] for other in found)
    text = _marked(f"{each.scores[name]:.4f}", each.scores[name] == best and len(found) > 1)
    if f"{name}_low" in each.scores:
        text += f"\n[dim]{each.scores[f'{name}_low']:.4f} to {each.scores[f'{name}_high']:.4f}[/]"
    return text


def _marked(text: str, best: bool) -> str:
    return f"[bold green]{text}[/]" if best else text
