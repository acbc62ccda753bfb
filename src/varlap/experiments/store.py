"""A folder of results, one JSON file a run: what is there is not computed again."""

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from varlap.errors import CheckpointError, DataError
from varlap.experiments.spec import RunSpec
from varlap.files import finite, replace_file

FAR_WORSE_THAN_A_GUESS = 50.0
"""nats a datum; a guess among a thousand classes costs seven"""


@dataclass(frozen=True)
class Result:
    """What came out of a run, with its spec and its origin.

    >>> Result(RunSpec("digits", "vl", 0.1), {"mean": {"nll": 0.3}}, {}, {}, seconds=1.0).test["mean"]["nll"]
    0.3
    """

    spec: RunSpec
    test: Mapping[str, Mapping[str, float]]
    """scores on the test images by way of predicting: mean, sampled, linearised, scaled. What was fitted is among them:
    `temperature` of scaled, and of linearised `laplace_beta` with the ends of what was tried"""
    validation: Mapping[str, Mapping[str, float]]
    """the same on held-out training images; empty where none were held out"""
    origin: Mapping[str, Any]
    seconds: float
    """time to train"""
    history: tuple[Mapping[str, float], ...] = ()
    """what was logged of each epoch"""
    ood: str | None = None
    """the images from elsewhere that the scores `ood_...` are about"""
    evaluation_seconds: float | None = None
    """time to evaluate, where it was measured"""
    failure: str | None = None
    """why a run counts as diverged: what its error said, or that its mean network is far worse than a guess. Its NLL
    counts as infinite, whatever its scores are"""

    def __post_init__(self) -> None:
        part, scores = ("held-out", self.validation) if self.validation else ("test", self.test)
        nll = scores.get("mean", {}).get("nll", 0.0)
        if self.failure is None and nll > FAR_WORSE_THAN_A_GUESS:
            told = f"its mean network has an NLL of {nll:.3g} on {part} images, far worse than a guess"
            object.__setattr__(self, "failure", told)

    @property
    def seconds_per_epoch(self) -> float:
        """The median time of an epoch without validation; the first, in which a GPU compiles, counts if it is alone.

        >>> rows = tuple({"seconds": seconds} for seconds in (60.0, 2.0, 3.0, 2.5))
        >>> Result(RunSpec("digits", "vl", 0.1), {}, {}, {}, 67.5, rows).seconds_per_epoch
        2.5
        """
        times = [row["seconds"] for row in self.history[1:] or self.history]
        return statistics.median(times) if times else math.nan

    def nll(self, part: Literal["test", "validation"], way: str) -> float:
        """Return the NLL of a way of predicting; infinite where the run diverged or the NLL is none.

        >>> Result(RunSpec("digits", "vl", 0.1), {}, {}, {}, 1.0, failure="the loss is NaN").nll("test", "mean")
        inf
        """
        found = math.inf if self.failure is not None else getattr(self, part)[way]["nll"]
        return found if math.isfinite(found) else math.inf


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
        self.folder = Path(folder).expanduser()

    def get(self, spec: RunSpec) -> Result | None:
        """Return the result of a spec, or None where it has not been computed."""
        return _read(self._path(spec))

    def put(self, result: Result) -> None:
        """Keep a result, whole or not at all; a full disk is a `CheckpointError`."""
        path = self._path(result.spec)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, _text(result).encode())
        except OSError as error:
            raise CheckpointError(
                f"the result {path} cannot be written ({error.strerror or error}); make room there, and the same "
                "command carries on"
            ) from error

    def __iter__(self) -> Iterator[Result]:
        found = (_read(path) for path in sorted(self.folder.glob("*-beta*.json")))
        return (result for result in found if result is not None)

    @staticmethod
    def is_one(folder: Path | str) -> bool:
        """Tell whether a folder holds results.

        >>> Store.is_one("no-such-folder")
        False
        """
        return any(path.is_file() and "-seed" in path.name for path in Path(folder).expanduser().glob("*-beta*.json"))

    def _path(self, spec: RunSpec) -> Path:
        return self.folder / f"{spec.key()}.json"


def _text(result: Result) -> str:
    """Return JSON to be read by people and to be committed: an epoch a line, six digits a number."""
    content = finite(dataclasses.asdict(result), digits=6) | {"spec": dataclasses.asdict(result.spec)}
    rows = content.pop("history")
    epochs = ",\n  ".join(json.dumps(row, allow_nan=False) for row in rows)
    head = json.dumps(content, indent=1, allow_nan=False).removesuffix("\n}")
    return head + ',\n "history": [' + (f"\n  {epochs}\n " if rows else "") + "]\n}\n"


def _read(path: Path) -> Result | None:
    """Read a result; None where there is none, also where somebody has just deleted it."""
    try:
        content = json.loads(path.read_text())
        unknown = set(content["spec"]) - {field.name for field in dataclasses.fields(RunSpec)}
        if not unknown:
            content["spec"] = RunSpec.of(content["spec"])
            for part in ("test", "validation"):
                content[part] = {way: _numbers(scores) for way, scores in content[part].items()}
            content["history"] = tuple(map(_numbers, content["history"]))
            return Result(**content)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"the result {path} cannot be read ({error}); delete it, and it is computed again") from error
    raise DataError(
        f"the result {path} has the setting {min(unknown)!r}, which this version of varlap does not know; use the one "
        "that wrote it, or another folder"
    )


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in row.items()}
