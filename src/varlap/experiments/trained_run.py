"""A run that `varlap train` finished, opened again."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from varlap.errors import CheckpointError, ConfigError
from varlap.experiments.image_task import ImageTask
from varlap.posterior import BNN
from varlap.training import load

TOLD = ("data", "model", "method", "beta", "epochs", "seed", "validation")
NEEDED = (*TOLD, "augment", "normaliser", "seconds")
SHOWN_SETTINGS = ("lr", "batch_size", "precision", "log_sigma_lr_multiplier", "schedule")
NAMES = {"map": "MAP", "vi": "VI", "vl": "VL", "vl-hessian": "VL(H)", "laplace": "Laplace"}


@dataclass(frozen=True)
class TrainedRun:
    """The folder of a run, and what `result.json` says of it.

    >>> TrainedRun.open("no-such-run")
    Traceback (most recent call last):
    varlap.errors.ConfigError: no-such-run is no folder; give one that `varlap train DATA --out RUN` wrote
    """

    folder: Path
    result: dict[str, Any]

    @staticmethod
    def open(folder: Path | str) -> "TrainedRun":
        """Open a finished run, or say in one line what the folder is instead."""
        folder = Path(folder)
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; give one that `varlap train DATA --out RUN` wrote")
        if not (folder / "result.json").is_file():
            raise ConfigError(_not_finished(folder))
        result = _read(folder / "result.json")
        missing = [name for name in NEEDED if name not in result]
        if missing:
            raise ConfigError(
                f"{folder}/result.json does not say {', '.join(missing)}: another version of varlap wrote it; repeat "
                "its `varlap train` command, which trains nothing again and writes the file anew"
            )
        return TrainedRun(folder, result)

    @cached_property
    def task(self) -> ImageTask:
        """Its data, as it was normalised and split."""
        try:
            held_out_seed = self.result.get("held_out_seed", self.result["seed"])
            return ImageTask.described(self.result | {"seed": held_out_seed})
        except (TypeError, AttributeError, KeyError) as error:
            raise CheckpointError(f"{self.folder}/result.json is damaged ({error}); train again") from error

    def bnn(self, device: torch.device | str = "cpu") -> BNN:
        """Build the network and load what was trained."""
        with torch.random.fork_rng(devices=[]):  # the first weights come from there, and are replaced
            network = self.task.network()
        return load(self.folder / "model", network).to(device)

    @property
    def name(self) -> str:
        """What a table calls it."""
        method = str(self.result["method"])
        return NAMES.get(method, method)

    @property
    def seconds(self) -> float:
        """The time that its epochs took."""
        return self.result["seconds"]

    def spec(self) -> dict[str, Any]:
        """Return what decided the run: the words of `varlap train`."""
        path = self.folder / "spec.json"
        written = _read(path) if path.is_file() else {}
        settings = written.get("settings", {})
        told = {name: self.result[name] for name in TOLD}
        if self.result["augment"]:
            told["augment"] = True
        of_the_recipe = self.result.get("spec", {})
        return of_the_recipe | told | {name: settings[name] for name in SHOWN_SETTINGS if name in settings}


def _not_finished(folder: Path) -> str:
    if not (folder / "spec.json").is_file():
        return f"{folder} holds no run; give a folder that `varlap train DATA --out RUN` wrote"
    if "data" not in _read(folder / "spec.json").get("label", {}):
        return (
            f"{folder} is a run of varlap.fit, which does not tell its network or data; evaluate it in Python, by "
            "varlap.load and varlap.evaluate"
        )
    return f"the training in {folder} is not finished; repeat its `varlap train` command, which carries it on"


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        return content
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; repeat the `varlap train` command") from error
