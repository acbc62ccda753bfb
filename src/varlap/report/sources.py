"""What a report is made of: evaluations on disk or in memory, and the folders of the runs that they judge."""

import json
import shlex
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from varlap.data import UCI_SETS
from varlap.errors import DataError, warn
from varlap.experiments import Evaluated, Store
from varlap.experiments.evaluation import SCORES
from varlap.training.records import Records

_FIGURES, _EVALUATIONS = "figures", "evaluations"
_OF_A_RUN = ("spec.json", "metrics.jsonl", _FIGURES)


@dataclass(frozen=True)
class Entry:
    """One evaluation, where it lies, and the run that it judges.

    >>> Entry(Evaluated("VL", {"nll": 0.3}, {"seed": 1}, {})).pictures
    []
    """

    evaluated: Evaluated
    place: str = ""
    """its folder, as seen from the folder that was asked for; empty for an evaluation in memory"""
    run: Path | None = None
    """the folder that `fit` wrote"""
    run_spec: Mapping[str, Any] = field(default_factory=dict)
    """that folder's spec.json"""
    source: int = 0
    """which of the folders that were asked for it was found in"""

    @property
    def metrics(self) -> Path | None:
        """The file with the run's epochs, where there is one."""
        path = None if self.run is None else self.run / "metrics.jsonl"
        return path if path is not None and path.is_file() else None

    @property
    def pictures(self) -> list[Path]:
        """The pictures that lie in the run's folder."""
        folder = None if self.run is None else self.run / _FIGURES
        if folder is None or not folder.is_dir():
            return []
        return sorted(path for path in folder.iterdir() if path.suffix.lower() in (".svg", ".png"))


def collect(sources: Path | str | Evaluated | Iterable[Path | str | Evaluated]) -> list[Entry]:
    """Return the evaluations below folders, in the order of their paths, and those that are given as they are.

    A folder that lies in another one is read once.

    >>> [entry.evaluated.name for entry in collect(Evaluated("VL", {"nll": 0.3}, {}, {}))]
    ['VL']
    """
    given = [sources] if isinstance(sources, Path | str | Evaluated) else list(sources)
    if not given:
        raise DataError("there is nothing to report: give a folder of runs, or evaluations")
    entries: list[Entry] = []
    seen: set[Path] = set()
    for number, source in enumerate(given):
        if isinstance(source, Evaluated):
            entries.append(Entry(_checked(source, f"the evaluation {source.name!r}")))
            continue
        root = Path(source).expanduser()
        if not root.is_dir():
            raise DataError(f"{source} is not a folder; give the folder of a run, or one with runs below")
        below = sorted(path.parent for path in root.rglob(SCORES))
        stores = _stores_below(root)
        if not below:
            raise DataError(_why_nothing(root, stores))
        if stores:
            warn(f"stores of `varlap reproduce` below {root} have pages of their own: {', '.join(stores)}")
        for folder in below:
            if folder.resolve() not in seen:
                seen.add(folder.resolve())
                entries.append(_read(folder, root, number))
        if left_out := _never_evaluated(root, {entry.run for entry in entries}):
            warn(f"runs below {root} were never evaluated, so they are not in the comparison: {', '.join(left_out)}")
    return entries


def _never_evaluated(root: Path, judged: Container[Path | None]) -> list[str]:
    """Return the commands that evaluate the finished runs of `varlap train` which nobody has evaluated."""
    runs = [path.parent for path in sorted(root.rglob("result.json")) if path.with_name("spec.json").is_file()]
    return [f"`varlap evaluate {shlex.quote(str(run))}`" for run in runs if run.resolve() not in judged]


def _stores_below(root: Path) -> list[str]:
    """Return the commands that write the pages of what `varlap reproduce` has left below a folder."""
    commands = []
    for folder in sorted({path.parent for path in root.rglob("*.json")} - {root}):
        if _has_tables(folder):
            commands.append(f"`varlap reproduce uci --out {shlex.quote(str(folder))}`")
        elif Store.is_one(folder):
            commands.append(f"`varlap report {shlex.quote(str(folder))}`")
    return commands


def _has_tables(folder: Path) -> bool:
    return any((folder / f"{name}.json").is_file() for name in UCI_SETS)


def _why_nothing(root: Path, stores: Sequence[str]) -> str:
    """Say what a folder without evaluations is, and which command makes its page."""
    if _has_tables(root):
        return (
            f"{root} holds results of `varlap reproduce uci`, whose page is {root / 'report.md'}; "
            f"`varlap reproduce uci --out {root}` writes it, and computes what is missing"
        )
    if Store.is_one(root):
        return f"{root} is a store of `varlap reproduce`, with a page of its own; give it alone: `varlap report {root}`"
    if stores:
        return f"{root} has no evaluations below, but stores of `varlap reproduce`: {', '.join(stores)}"
    return (
        f"there are no evaluations below {root} (no {SCORES}); write them by `varlap evaluate RUN`, "
        "or by varlap.experiments.Evaluated(...).write(FOLDER)"
    )


def flat(spec: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return a spec without nesting.

    >>> flat({"data": {"name": "digits", "parts": [1, 2]}, "seed": 0})
    {'data.name': 'digits', 'data.parts': [1, 2], 'seed': 0}
    """
    result: dict[str, Any] = {}
    for name, value in spec.items():
        if isinstance(value, Mapping) and value:
            result |= flat(value, f"{before}{name}.")
        else:
            result[f"{before}{name}"] = value
    return result


def _read(folder: Path, root: Path, number: int) -> Entry:
    place = Path(root.resolve().name, folder.relative_to(root)).as_posix()
    run = _run_of(folder)
    evaluated = _checked(Evaluated.read(folder), f"the evaluation in {folder}")
    entry = Entry(evaluated, place, run, {} if run is None else _spec_of(run), number)
    if entry.metrics is not None:
        Records(entry.metrics).rows()  # a damaged one is named before anything is drawn
    return entry


def _run_of(folder: Path) -> Path | None:
    """An evaluation lies in RUN/evaluations/NAME, or in the run's folder itself."""
    resolved = folder.resolve()
    above = [resolved.parent.parent] if resolved.parent.name == _EVALUATIONS else []
    for candidate in [*above, resolved]:
        if any((candidate / name).exists() for name in _OF_A_RUN):
            return candidate
    return None


def _spec_of(run: Path) -> dict[str, Any]:
    path = run / "spec.json"
    if not path.exists():
        return {}
    try:
        spec = json.loads(path.read_text())
        if not isinstance(spec, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged ({error}); mend it, or move it out of the folder") from error
    return spec


def _checked(evaluated: Evaluated, what: str) -> Evaluated:
    """Refuse what `Evaluated` would not have written."""
    wrong = None
    for name in ("scores", "spec", "origin"):
        if not isinstance(getattr(evaluated, name), Mapping):
            wrong = f"its {name} are no JSON object"
    if not isinstance(evaluated.name, str) or not evaluated.name:
        wrong = "it has no name"
    if wrong is None:
        numbers = {**evaluated.scores, **({} if evaluated.seconds is None else {"seconds": evaluated.seconds})}
        odd = [name for name, value in numbers.items() if isinstance(value, bool) or not isinstance(value, int | float)]
        wrong = f"{odd[0]} is no number" if odd else None
    if wrong is None and "labels" in evaluated.predictions and "probs" in evaluated.predictions:
        labels, probs = evaluated.predictions["labels"], evaluated.predictions["probs"]
        if len(labels) != len(probs):
            wrong = f"it has {len(labels)} labels for {len(probs)} predictions"
    if wrong is not None:
        raise DataError(f"{what} is damaged ({wrong}); make it again by `varlap evaluate`")
    return evaluated
