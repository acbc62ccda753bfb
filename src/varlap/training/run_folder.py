"""The folder of a run: its spec, its metrics and its checkpoints, and whose it is."""

import dataclasses
import itertools
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

import varlap
from varlap.errors import CheckpointError, ConfigError
from varlap.files import locked, replace_file
from varlap.likelihoods import Gaussian
from varlap.objectives import Objective
from varlap.posterior import BNN
from varlap.training.checkpoint import (
    Checkpoint,
    checkpoint_path,
    newest_checkpoint,
    prune,
    write_checkpoint,
)
from varlap.training.model_file import describe
from varlap.training.records import Records
from varlap.training.settings import FitSettings

log = logging.getLogger(__name__)

Resume = Literal["auto", "never"]
NOT_OF_THE_SPEC = {"num_calls", "last_step", "compiled", "gradient_scale"}
NOT_COMPARED = {"num_checkpoints", "num_workers", "save_every", "save_pause_s", "compiled"}


def spec_of(
    bnn: BNN,
    objective: Objective,
    settings: FitSettings,
    data: Mapping[str, Any],
    label: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return all that decides what a run computes, and the versions that it was begun with.

    >>> bnn = BNN(torch.nn.Linear(2, 3))
    >>> spec = spec_of(bnn, varlap.VL(num_data=10), FitSettings(epochs=1), data={"num_items": 10})
    >>> spec["objective"]["beta"], spec["network"]
    (1.0, 'Linear(in_features=2, out_features=3, bias=True)')
    """
    own = {name: value for name, value in vars(objective).items() if not name.startswith("_")}
    described = {name: _plain(value) for name, value in own.items() if name not in NOT_OF_THE_SPEC}
    decays = {f"decay of {name}": running.decay for name, running in objective.running_means().items()}
    model = describe(bnn) | _fixed_noise(bnn)
    return {
        "label": dict(label or {}),
        "objective": {"class": type(objective).__name__, **described, **decays},
        "settings": {name: _plain(value) for name, value in dataclasses.asdict(settings).items()},
        "network": repr(bnn.network),
        "model": {name: value for name, value in model.items() if name not in ("varlap", "torch", "modules")},
        "data": dict(data),
        "versions": {"varlap": varlap.__version__, "torch": torch.__version__},
    }


class RunFolder:
    """A folder that belongs to one run, and to one process at a time.

    `spec.json` says which run, `metrics.jsonl` has a row for each epoch, `checkpoints` the newest states. Where a run
    has left its spec alone, such as one that diverged at once, there is nothing to lose and another may take its place.
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
        try:
            if self._spec_path.exists():
                self._check_owner(spec, resume)
            elif _visible(path):
                raise ConfigError(f"out={str(path)!r} is not empty and holds no run; choose another folder")
            else:
                _write_spec(self._spec_path, spec)
        except BaseException:
            self._lock.close()
            raise
        self.records = Records(path / "metrics.jsonl")

    def newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint; newer ones are damaged and set aside: their steps will come again."""
        found = _find(self.path)
        if found is None:
            return None
        for path in self._checkpoints.glob("step-*"):
            if path.name > found[0].name:
                aside = next(n for n in itertools.count() if not (path.parent / f"damaged-{n}-{path.name}").exists())
                path.rename(path.parent / f"damaged-{aside}-{path.name}")
        return found[1]

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
        try:
            own = json.loads(self._spec_path.read_text())
            differences = _differences(own, spec)
        except (ValueError, AttributeError, OSError) as error:
            raise CheckpointError(f"{self._spec_path} cannot be read: {error}; choose another out") from error
        if spec.keys() <= own.keys() and _visible(self.path) == {self._spec_path.name}:
            _write_spec(self._spec_path, spec)
            return
        if resume == "never":
            raise ConfigError(
                f"out={str(self.path)!r} holds a run already; choose another folder, or resume='auto' to carry it on"
            )
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


def _visible(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}


def _differences(own: dict[str, Any], spec: dict[str, Any]) -> list[str]:
    differences = []
    for part in ("label", "objective", "settings", "model", "network", "data"):
        old, new = own.get(part), spec[part]
        if isinstance(old, dict) and isinstance(new, dict):
            free = NOT_COMPARED | _free_of_consequence(new)
            names = [name for name in (old.keys() | new.keys()) - free if old.get(name) != new.get(name)]
            called: dict[str, str] = {"fingerprint": "data of fingerprint"}  # which alone says nothing
            differences += [f"it has {_pair(called.get(n) or n, old.get(n), new.get(n))}" for n in sorted(names)]
        elif old != new:
            differences.append(f"it has {_pair(part, old, new)}")
    return differences


def _fixed_noise(bnn: BNN) -> dict[str, Any]:
    """Tell a noise that is not learnt: the weights follow from it, and a checkpoint would bring back its own."""
    if not isinstance(bnn.likelihood, Gaussian) or isinstance(bnn.likelihood.log_noise, torch.nn.Parameter):
        return {}
    log_noise = bnn.likelihood.log_noise
    noise = [float(f"{math.exp(value):.6g}") for value in log_noise.flatten().tolist()]  # other devices round otherwise
    return {"noise": noise if log_noise.ndim else noise[0]}


def _free_of_consequence(settings: dict[str, Any]) -> set[str]:
    """Return what changes nothing beside these settings: nobody goes by validations, or those of each epoch."""
    return {"validate_every"} if (settings.get("patience"), settings.get("keep")) == (None, "last") else set()


def _pair(name: str, old: Any, new: Any) -> str:
    texts = [text if len(text) < 60 else f"{text[:60]}…" for text in (repr(old), repr(new))]
    return f"another {name}" if texts[0] == texts[1] else f"{name}={texts[0]}, not {texts[1]}"


def _plain(value: Any) -> Any:
    """Return what JSON gives back as it was: an object by its class and its plain attributes."""
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    own = getattr(value, "__dict__", {})
    simple = {name: entry for name, entry in own.items() if isinstance(entry, bool | int | float | str | None)}
    return {"class": type(value).__name__, **simple}


def _locked(path: Path) -> BinaryIO:
    lock = locked(path / ".lock")
    if lock is None:
        raise ConfigError(f"another process is writing to {path}; wait for it, or choose another out")
    return lock


def _write_spec(path: Path, spec: dict[str, Any]) -> None:
    try:
        replace_file(path, (json.dumps(spec, indent=1) + "\n").encode())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}; free space or choose another out") from error
