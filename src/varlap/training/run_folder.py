"""The folder of a run: its spec, its metrics and its checkpoints, and whose it is."""

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import varlap
from varlap.errors import CheckpointError, ConfigError
from varlap.objectives import Objective
from varlap.posterior import BNN
from varlap.training.checkpoint import (
    Checkpoint,
    checkpoint_path,
    newest_checkpoint,
    prune,
    write_checkpoint,
)
from varlap.training.records import Records
from varlap.training.settings import FitSettings

try:
    import fcntl
except ImportError:  # there is none on Windows
    fcntl = None

log = logging.getLogger(__name__)

Resume = Literal["auto", "never"]
NOT_OF_THE_SPEC = {"num_calls", "last_step", "compiled", "gradient_scale"}
NOT_COMPARED = {"num_checkpoints", "num_workers", "save_every", "compiled"}


def spec_of(bnn: BNN, objective: Objective, settings: FitSettings, num_items: int) -> dict[str, Any]:
    """Return all that decides what a run computes, and the versions that it was begun with.

    >>> bnn = BNN(torch.nn.Linear(2, 3))
    >>> spec = spec_of(bnn, varlap.VL(num_data=10), FitSettings(epochs=1), num_items=10)
    >>> spec["objective"]["beta"], spec["network"]["weight"]
    (1.0, [3, 2])
    """
    own = {name: value for name, value in vars(objective).items() if not name.startswith("_")}
    described = {name: _plain(value) for name, value in own.items() if name not in NOT_OF_THE_SPEC}
    return {
        "objective": {"class": type(objective).__name__, **described},
        "settings": {name: _plain(value) for name, value in dataclasses.asdict(settings).items()},
        "network": {name: list(mean.shape) for name, mean in bnn.network.named_parameters()},
        "bayesian": list(bnn.means()),
        "likelihood": type(bnn.likelihood).__name__,
        "prior": repr(bnn.prior),
        "num_items": num_items,
        "versions": {"varlap": varlap.__version__, "torch": torch.__version__},
    }


class RunFolder:
    """A folder that belongs to one run, and to one process at a time.

    `spec.json` says which run, `metrics.jsonl` has a row for each epoch, `checkpoints` the newest states.
    """

    def __init__(self, path: Path, spec: dict[str, Any], resume: Resume = "auto") -> None:
        self.path, self._checkpoints = path, path / "checkpoints"
        self._spec_path = path / "spec.json"
        if resume not in ("auto", "never"):
            raise ConfigError(f"fit(resume={resume!r}): choose 'auto' or 'never'")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"the run's folder {path} cannot be made: {error}; choose another out") from error
        self._lock = _locked(path)
        if self._spec_path.exists():
            self._check_owner(spec, resume)
        elif any(not entry.name.startswith(".") for entry in path.iterdir()):
            raise ConfigError(f"out={str(path)!r} is not empty and holds no run; choose another folder")
        else:
            _write_text(self._spec_path, json.dumps(spec, indent=1) + "\n")
        self.records = Records(path / "metrics.jsonl")

    def set_damaged_aside(self) -> None:
        """Rename checkpoints that are newer than the newest whole one: their steps will be written again."""
        found = _find(self.path)
        if found is None:
            return
        for path in self._checkpoints.glob("step-*"):
            if path.name > found[0].name:
                path.rename(path.with_name(f"damaged-{path.name}-{os.getpid()}"))

    def save(self, step: int, tensors: dict[str, dict[str, Tensor]], documents: dict[str, Any], keep: int) -> None:
        """Write a checkpoint and delete those that are too many."""
        path = checkpoint_path(self._checkpoints, step)
        if not path.exists():
            write_checkpoint(path, tensors, documents)
        prune(self._checkpoints, keep)

    def close(self) -> None:
        """Let other processes use the folder."""
        self._lock.close()

    def _check_owner(self, spec: dict[str, Any], resume: Resume) -> None:
        if resume == "never":
            raise ConfigError(
                f"out={str(self.path)!r} holds a run already; choose another folder, or resume='auto' to carry it on"
            )
        try:
            own = json.loads(self._spec_path.read_text())
            differences = _differences(own, spec)
        except (ValueError, AttributeError, OSError) as error:
            raise CheckpointError(f"{self._spec_path} cannot be read: {error}; choose another out") from error
        if differences:
            raise ConfigError(
                f"out={str(self.path)!r} belongs to another run: {'; '.join(differences[:3])}; choose another folder "
                "for this one, or repeat that run's settings to carry it on"
            )
        if own.get("versions") != spec["versions"]:
            log.warning("carrying on a run that was begun with %s, now with %s", own.get("versions"), spec["versions"])


def newest(path: Path) -> Checkpoint | None:
    """Return the newest whole checkpoint of a run; any rank may read it."""
    found = _find(path)
    return None if found is None else found[1]


def _find(path: Path) -> tuple[Path, Checkpoint] | None:
    checkpoints = path / "checkpoints"
    found = newest_checkpoint(checkpoints) if checkpoints.exists() else None
    damaged = sorted(checkpoints.glob("step-*")) if found is None else []
    if damaged:
        raise CheckpointError(
            f"{path} holds a run, but none of its {len(damaged)} checkpoints can be read; start anew in another folder"
        )
    return found


def _differences(own: dict[str, Any], spec: dict[str, Any]) -> list[str]:
    differences = []
    for part in ("objective", "settings", "network", "bayesian", "likelihood", "prior", "num_items"):
        old, new = own.get(part), spec[part]
        if isinstance(old, dict) and isinstance(new, dict):
            names = [name for name in (old.keys() | new.keys()) - NOT_COMPARED if old.get(name) != new.get(name)]
            differences += [f"it has {n}={old.get(n)!r}, not {new.get(n)!r}" for n in sorted(names)]
        elif old != new:
            differences.append(f"it has {part}={old!r}, not {new!r}")
    return differences


def _plain(value: Any) -> Any:
    """Return what JSON gives back as it was."""
    if isinstance(value, bool | int | float | str | None):
        return value
    return list(value) if isinstance(value, tuple | list) else repr(value)


def _locked(path: Path) -> Any:
    lock = (path / ".lock").open("w")
    if fcntl is None:
        return lock
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError(f"another process is writing to {path}; wait for it, or choose another out") from error
    return lock


def _write_text(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written: {error}; free space or choose another out") from error
