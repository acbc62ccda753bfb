"""Reports: one page that compares what runs have left behind. It reads result files and never trains.

`varlap.report.write("runs", "runs/report")` reads every evaluation below the folder and writes `report.html`, which
holds its pictures and loads nothing, with the same numbers in `report.md` and `report.json`. Pictures need the extra
`varlap[plot]`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from varlap.experiments import Evaluated
    from varlap.report.tables import Table

__all__ = ["compare", "write"]


def write(
    sources: "Path | str | Evaluated | Iterable[Path | str | Evaluated]", out: Path | str, title: str | None = None
) -> Path:
    """Compare evaluations on one self-contained page, and write the same numbers as Markdown and JSON beside it.

    Methods are compared where they share a test set; each test set has its own section. Runs of one name that differ in
    their seed (or `split`) alone become one row: the mean and its standard error. The same files give the same bytes.

    Args:
        sources: a folder with runs below, several of them, or what `varlap.experiments.Evaluated` holds in memory.
        out: the folder to write `report.html`, `report.md` and `report.json` to.
        title: the page's; by default the methods and the data.

    Returns:
        The path of the page.

    >>> import tempfile, torch
    >>> from varlap.experiments import Evaluated
    >>> kept = {"probs": torch.tensor([[0.9, 0.1], [0.4, 0.6]]), "labels": torch.tensor([0, 1])}
    >>> evaluated = [Evaluated(name, {"nll": nll}, {"data": "toy"}, kept) for name, nll in [("MAP", 0.4), ("VL", 0.3)]]
    >>> path = write(evaluated, tempfile.mkdtemp())
    >>> path.name, "<title>MAP and VL on toy</title>" in path.read_text()
    ('report.html', True)
    """
    from varlap.report.build import write_parts  # here, since few who import varlap write a report
    from varlap.report.sections import sections
    from varlap.report.sources import collect

    return write_parts(sections(collect(sources)), out, title)


def compare(sources: "Path | str | Evaluated | Iterable[Path | str | Evaluated]") -> "dict[str, Table]":
    """Return the table of each test set, by its name: what `write` would show.

    >>> from varlap.experiments import Evaluated
    >>> evaluated = [Evaluated(name, {"nll": nll}, {"data": "toy"}, {}) for name, nll in [("MAP", 0.4), ("VL", 0.3)]]
    >>> print(compare(evaluated)["toy"].to_markdown())
    | method | NLL ↓ |
    | --- | ---: |
    | MAP | 0.400 |
    | VL | **0.300** |
    """
    from varlap.report.sections import sections
    from varlap.report.sources import collect
    from varlap.report.tables import comparison

    return {section.title: comparison(section.methods) for section in sections(collect(sources))}
