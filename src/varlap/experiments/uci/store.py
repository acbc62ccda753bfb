"""Results of the UCI experiment: a JSON file for each table, a line for each run."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varlap.data import UCI_SETS
from varlap.errors import CheckpointError, DataError, VarlapError
from varlap.experiments.uci.spec import TableRun
from varlap.files import alone, replace_file

Scores = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class TableResult:
    """What came out of a run: scores by way of predicting, in the table's own units.

    >>> run = TableRun("boston", "vl", split=0, beta=0.1, epochs=10, batch_size=64)
    >>> TableResult(run, {"mean": {"log_likelihood": -2.5, "rmse": 3.0}}, seconds=1.0).scores["mean"]["rmse"]
    3.0
    """

    run: TableRun
    scores: Scores
    """`log_likelihood` and `rmse` by way: mean, sampled, linearised, or laplace-BETA; of test rows, or of held-out ones
    where β is chosen; empty where the training diverged"""
    seconds: float
    """time to train"""
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """versions, hardware and day"""
    failure: str | None = None
    """what a training that diverged said"""


class TableStore:
    """Results by run, in a folder that can be committed: NAME.json for each table.

    Several processes may write into it, but on Windows, where files cannot be locked so, only one.

    >>> import tempfile
    >>> store = TableStore(tempfile.mkdtemp())
    >>> run = TableRun("boston", "vl", split=0, beta=0.1, epochs=10, batch_size=64)
    >>> store.get(run) is None
    True
    >>> store.put(TableResult(run, {"mean": {"log_likelihood": -2.5, "rmse": 3.0}}, seconds=1.0))
    >>> TableStore(store.folder).get(run).scores["mean"]["rmse"]
    3.0
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).expanduser()
        self._results: dict[str, dict[TableRun, TableResult]] = {}

    def get(self, run: TableRun) -> TableResult | None:
        """Return the result of a run, or None where it has not been computed."""
        return self._of(run.data).get(run)

    def put(self, result: TableResult) -> None:
        """Keep a result: the table's file is replaced by one that holds it too, whole or not at all."""
        data = result.run.data
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with alone(self.folder / ".lock"):  # what another process has kept since this one read the file stays
                self._results.pop(data, None)
                results = self._of(data)
                results[result.run] = result
                lines = [json.dumps(dataclasses.asdict(one), allow_nan=False) for one in results.values()]
                content = '{"runs": [\n' + ",\n".join(lines) + "\n]}\n"
                replace_file(self._path(data), content.encode())
        except VarlapError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"the results in {self.folder} cannot be written: {error}; choose another out"
            ) from error

    def tables(self) -> list[str]:
        """Return the tables of which there are results.

        >>> TableStore("nowhere").tables()
        []
        """
        return [name for name in UCI_SETS if self._path(name).is_file()]

    def results(self, data: str) -> list[TableResult]:
        """Return all results of a table, in the order in which they came."""
        return list(self._of(data).values())

    def _of(self, data: str) -> dict[TableRun, TableResult]:
        if data not in self._results:
            path = self._path(data)
            found = _read(path) if path.is_file() else []
            self._results[data] = {result.run: result for result in found}
        return self._results[data]

    def _path(self, data: str) -> Path:
        return self.folder / f"{data}.json"


def _read(path: Path) -> list[TableResult]:
    try:
        rows = json.loads(path.read_text())["runs"]
        return [TableResult(**row | {"run": TableRun(**row["run"])}) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"the results {path} cannot be read ({error}); delete it, and it is computed again") from error
