"""What is kept of an evaluation: scores with their origin, and the predictions that plots are drawn from."""

import contextlib
import functools
import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

import varlap
from varlap.errors import DataError
from varlap.files import replace_file
from varlap.likelihoods import Prediction

SCORES, PREDICTIONS = "scores.json", "predictions.safetensors"


@dataclass(frozen=True)
class Evaluated:
    """One method's predictions on one test set, in a folder of two files: `scores.json` and `predictions.safetensors`.

    >>> import tempfile
    >>> found = Evaluated("VL", {"nll": 0.3}, {"beta": 0.1}, {"probs": torch.eye(2), "labels": torch.arange(2)})
    >>> found.write(tempfile.mkdtemp() + "/vl")
    >>> found.name, sorted(found.predictions)
    ('VL', ['labels', 'probs'])
    """

    name: str
    """what a table calls it"""
    scores: Mapping[str, float]
    """as `varlap.evaluate` returns them, intervals as NAME_low and NAME_high"""
    spec: Mapping[str, Any]
    """all that decides the result: data, method, beta, epochs, seed, how, temperature, ..."""
    predictions: Mapping[str, Tensor]
    """`labels`, `probs` (or `targets`, `mean`, `variance`); where there are: `entropy`, `mutual_information` of the
    test items, `ood_entropy`, `ood_mutual_information` of the others; `least_sure` (item numbers) and their `images`"""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """versions, hardware and time: see `origin()`"""
    seconds: float | None = None
    """time to train"""

    def write(self, folder: Path | str) -> None:
        """Write both files, each whole or not at all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.predictions.items()}
        replace_file(folder / PREDICTIONS, save(tensors))
        content = {
            "name": self.name,
            "scores": dict(self.scores),
            "spec": dict(self.spec),
            "origin": dict(self.origin) or origin(),
            "seconds": self.seconds,
        }
        replace_file(folder / SCORES, (json.dumps(content, indent=1) + "\n").encode())

    @staticmethod
    def read(folder: Path | str) -> "Evaluated":
        """Read what `write` wrote, or say which file is missing or damaged."""
        folder = Path(folder)
        try:
            content = json.loads((folder / SCORES).read_text())
            predictions = load((folder / PREDICTIONS).read_bytes())
            return Evaluated(predictions=predictions, **content)
        except OSError as error:
            raise DataError(f"{folder} holds no evaluation ({error}); write one by `varlap evaluate RUN`") from error
        except (ValueError, TypeError, SafetensorError) as error:
            raise DataError(
                f"the evaluation in {folder} is damaged ({error}); make it again by `varlap evaluate`"
            ) from error

    @staticmethod
    def read_all(folder: Path | str) -> list["Evaluated"]:
        """Read every evaluation below a folder, in the order of their paths."""
        return [Evaluated.read(path.parent) for path in sorted(Path(folder).rglob(SCORES))]

    def prediction(self) -> Prediction:
        """Return the predictions as an object, for `varlap.plot` and `varlap.metrics`."""
        kept = self.predictions
        result = Prediction(probs=kept.get("probs"), mean=kept.get("mean"), variance=kept.get("variance"))
        if result.variance is not None and "epistemic_variance" in kept:
            epistemic = kept["epistemic_variance"]
            result = replace(result, noise_variance=result.variance - epistemic, epistemic_variance=epistemic)
        if result.probs is None:
            return result
        # Labels of the probabilities' own shape are yes or no, each for itself.
        result = replace(result, exclusive="labels" not in kept or kept["labels"].shape != result.probs.shape)
        epistemic = kept.get("mutual_information")
        if epistemic is not None and epistemic.shape == result.entropy.shape:  # else it is a mean over positions
            result = replace(result, expected_entropy=result.entropy - epistemic)
        return result


def origin(device: torch.device | str | None = None) -> dict[str, Any]:
    """Return where a result comes from: versions, hardware and the day; and of a checkout of varlap its git commit.

    Args:
        device: what computed; None means the GPU where there is one.

    >>> sorted(set(origin("cpu")) - {"commit"})
    ['date', 'hardware', 'python', 'torch', 'varlap']
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    commit = _commit(Path(varlap.__file__).parent)
    return {
        "varlap": varlap.__version__,
        **({} if commit is None else {"commit": commit}),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "hardware": _hardware(torch.device(device)),
        "date": time.strftime("%Y-%m-%d"),
    }


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu() if device.type == "cpu" else f"{platform.machine()} {device.type.upper()}"


def _cpu(told: Path = Path("/proc/cpuinfo")) -> str:
    """Name the processor, as far as the system tells."""
    with contextlib.suppress(OSError):
        for line in told.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return f"{platform.machine()} CPU"


@functools.cache  # what runs is what was imported
def _commit(package: Path) -> str | None:
    """Return the short hash, with "-dirty" where the package differs from it; None where git does not know it."""
    # A hook or a rebase sets variables that point to another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=10)

    try:
        # An installed package may lie inside a checkout of something else, which does not track it.
        if git("ls-files", "--error-unmatch", "__init__.py").returncode:
            return None
        found = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--", ".")
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    if found.returncode or changed.returncode:
        return None
    return found.stdout.strip() + ("-dirty" if changed.stdout.strip() else "")
