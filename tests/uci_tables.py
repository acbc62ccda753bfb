"""Small tables in the form of the UCI repository, for tests."""

import io
import tarfile
from pathlib import Path

import numpy as np

NUM_ROWS, NUM_SPLITS = 60, 3
TARGET = 2  # in the middle: columns are chosen by the index files, not by their place


def uci_files(num_rows: int = NUM_ROWS, num_splits: int = NUM_SPLITS, seed: int = 0) -> dict[str, str]:
    """Return the texts of a table's files: y = 3 + 2 (x₀ − x₁) and a little noise, in column 2 of 4."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(num_rows, 3)) * [1.0, 1.0, 50.0] + [0.0, 5.0, 1000.0]
    y = 3 + 2 * (x[:, 0] - x[:, 1]) + 0.1 * random.normal(size=num_rows)
    rows = np.column_stack([x[:, :2], y, x[:, 2]])
    files = {"data.txt": _text(rows, "%.8e") + "\n", "index_features.txt": "0\n1\n3\n", "index_target.txt": "2\n"}
    for number in range(num_splits):
        order = random.permutation(num_rows)
        files[f"index_train_{number}.txt"] = _text(order[num_rows // 10 :], "%.18e")
        files[f"index_test_{number}.txt"] = _text(order[: num_rows // 10], "%d")
    return files | {"n_hidden.txt": "50\n", "split_data_train_test.py": "raise SystemExit\n"}


def write_uci(folder: Path, name: str = "yacht", files: dict[str, str] | None = None) -> Path:
    """Write a table's files below a data folder; return where."""
    place = folder / "uci" / name / "data"
    place.mkdir(parents=True)
    for file, text in (uci_files() if files is None else files).items():
        (place / file).write_text(text)
    return place


def pack_uci(path: Path, files: dict[str, str], root: str = "UCI_Datasets", name: str = "yacht") -> Path:
    """Pack a table's files as they lie in the repository's archive."""
    with tarfile.open(path, f"w:{path.suffix[1:]}") as archive:
        for file, text in files.items():
            member = tarfile.TarInfo(f"{root}/{name}/data/{file}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def _text(values: np.ndarray, form: str) -> str:
    buffer = io.StringIO()
    np.savetxt(buffer, values, fmt=form)
    return buffer.getvalue()
