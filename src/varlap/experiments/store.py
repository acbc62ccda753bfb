"""A folder of results, one JSON file a run: what is there is not computed again."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varlap.errors import DataError
from varlap.experiments.spec import RunSpec
from varlap.training.records import replace_file


@dataclass(frozen=True)
class Result:
    """What came out of a run, with its spec and its origin.

    >>> Result(RunSpec("digits", "vl", 0.1), {"mean": {"nll": 0.3}}, {}, {}, seconds=1.0).test["mean"]["nll"]
    0.3
    """

    spec: RunSpec
    test: Mapping[str, Mapping[str, float]]
    """scores on the test images by way of predicting: mean, sampled, linearised, scaled"""
    validation: Mapping[str, Mapping[str, float]]
    """the same on held-out training images; empty where none were held out"""
    origin: Mapping[str, Any]
    seconds: float
    """time to train"""
    history: tuple[Mapping[str, float], ...] = ()
    """what was logged of each epoch"""


class Store:
    """Results by spec, in a folder that can be committed.

    >>> import tempfile
    >>> store = Store(tempfile.mkdtemp())
    >>> spec = RunSpec("digits", "vl", 0.1)
    >>> store.get(spec) is None
    True
    >>> store.put(Result(spec, {"mean": {"nll": 0.3}}, {}, {}, seconds=1.0))
    >>> store.get(spec).test["mean"]["nll"], len(list(store))
    (0.3, 1)
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    def get(self, spec: RunSpec) -> Result | None:
        """Return the result of a spec, or None where it has not been computed."""
        path = self._path(spec)
        return _read(path) if path.is_file() else None

    def put(self, result: Result) -> None:
        """Keep a result, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps(dataclasses.asdict(result), indent=1) + "\n"
        replace_file(self._path(result.spec), content.encode())

    def __iter__(self) -> Iterator[Result]:
        return (_read(path) for path in sorted(self.folder.glob("*.json")))

    def _path(self, spec: RunSpec) -> Path:
        return self.folder / f"{spec.key()}.json"


def _read(path: Path) -> Result:
    try:
        content = json.loads(path.read_text())
        content |= {"spec": RunSpec.of(content["spec"]), "history": tuple(content["history"])}
        return Result(**content)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"the result {path} cannot be read ({error}); delete it, and it is computed again") from error
