"""What a sweep has chosen for the final runs, kept beside the results so that the report shows exactly that."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varlap.errors import CheckpointError, DataError
from varlap.experiments.spec import Method, RunSpec
from varlap.experiments.store import Result, Store
from varlap.experiments.ways import NAMES, Key, Way
from varlap.files import alone, replace_file

FINAL = "final"
"""The folder in a store that says which β were chosen for final runs, a JSON file a choice."""
BY_METHOD = ("seeds", "sweep_epochs", "sweep_betas", "sweep_seeds")


@dataclass(frozen=True)
class FinalRow:
    """The β of a method and a way of predicting."""

    method: Method
    way: Way
    beta: float
    own: bool = True
    """False where the sweep has not scored this way, and the β is that of the method's mean network"""


@dataclass(frozen=True)
class FinalLine:
    """The final runs of one data set and recipe: which β, and by which sweep.

    >>> row = FinalRow("vl", "mean", 0.1)
    >>> sweep = {"vl": 50}, {"vl": (0.01, 0.1)}, {"vl": (0,)}
    >>> line = FinalLine(RunSpec("digits", "vl", 1.0), {"vl": (0,)}, *sweep, rows=(row,))
    >>> line.beta(("vl", "mean")), line.beta(("map", "mean"))
    (0.1, None)
    """

    spec: RunSpec
    """what the runs share; its method, β and seed say nothing"""
    seeds: Mapping[str, tuple[int, ...]]
    """of each method's final runs"""
    sweep_epochs: Mapping[str, int]
    """of the sweep that chose for a method: one call may choose for some methods, and another for others"""
    sweep_betas: Mapping[str, tuple[float, ...]]
    """what each method was tried with"""
    sweep_seeds: Mapping[str, tuple[int, ...]]
    rows: tuple[FinalRow, ...]

    def beta(self, key: Key) -> float | None:
        """Return the β of a method and a way of predicting."""
        return next((row.beta for row in self.rows if (row.method, row.way) == key), None)

    def runs(self, key: Key, results: Sequence[Result]) -> list[Result]:
        """Return the runs that a row is about, in the order of their seeds."""
        beta = self.beta(key)
        found = [
            result
            for result in results
            if (result.spec.method, result.spec.beta) == (key[0], beta)
            and result.spec.seed in self.seeds.get(key[0], ())
            and self.is_about(result.spec)
        ]
        return sorted(found, key=lambda result: result.spec.seed)

    def is_about(self, spec: RunSpec) -> bool:
        """Tell whether a run is one of these, whether or not it has linearised predictions."""
        return dataclasses.replace(shared_spec(spec), linearised=self.spec.linearised) == self.spec

    @property
    def borrowed(self) -> list[str]:
        """The names of the rows that have the β of their method's mean network."""
        return [NAMES[row.method, row.way] for row in self.rows if not row.own]


def shared_spec(spec: RunSpec) -> RunSpec:
    """Return what the runs of a final line share.

    >>> shared_spec(RunSpec("digits", "map", 0.1, seed=2)) == shared_spec(RunSpec("digits", "vl", 1.0))
    True
    """
    return dataclasses.replace(spec, method="vl", beta=1.0, seed=0)


def record(lines: Sequence[FinalLine], store: Store) -> None:
    """Keep final lines, each in a file of its own; other methods that are recorded there stay as they are.

    >>> import tempfile
    >>> of_vl = {"vl": (0,)}, {"vl": 50}, {"vl": (0.01, 0.1)}, {"vl": (0,)}, (FinalRow("vl", "mean", 0.1),)
    >>> line = FinalLine(RunSpec("digits", "vl", 1.0), *of_vl)
    >>> store = Store(tempfile.mkdtemp())
    >>> record([line], store)
    >>> recorded(store) == [line]
    True
    """
    folder = store.folder / FINAL
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder / ".lock"):  # another command may record other methods there
            for given in lines:
                line = _with_other_methods(given, store)
                content = dataclasses.asdict(line) | {"spec": line.spec.stated()}
                replace_file(_path(line, store), (json.dumps(content, indent=1) + "\n").encode())
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written ({error.strerror or error}); choose another one") from error


def _with_other_methods(line: FinalLine, store: Store) -> FinalLine:
    """Add the rows of methods that another call has chosen for, and by which sweep."""
    if not (path := _path(line, store)).is_file():
        return line
    old = _read(path)
    rows = [row for row in old.rows if row.method not in line.sweep_betas]
    in_order = sorted([*rows, *line.rows], key=lambda row: list(NAMES).index((row.method, row.way)))
    by_method = {name: {**getattr(old, name), **getattr(line, name)} for name in BY_METHOD}
    return dataclasses.replace(line, **by_method, rows=tuple(in_order))


def recorded(store: Store) -> list[FinalLine]:
    """Return the final lines of a store."""
    return [_read(path) for path in sorted((store.folder / FINAL).glob("*.json"))]


def _path(line: FinalLine, store: Store) -> Path:
    spec = line.spec
    digest = hashlib.sha256(spec.key().encode()).hexdigest()[:10]
    return store.folder / FINAL / f"{spec.data}-{spec.recipe}-{spec.epochs}-epochs-{digest}.json"


def _read(path: Path) -> FinalLine:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        content["spec"] = RunSpec.of(content["spec"])
        content["rows"] = tuple(FinalRow(**row) for row in content["rows"])
        for name in ("seeds", "sweep_betas", "sweep_seeds"):
            content[name] = {method: tuple(values) for method, values in content[name].items()}
        return FinalLine(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} cannot be read ({error}); delete it, and --final writes it again") from error
