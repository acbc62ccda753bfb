"""What `varlap train` trains, and how: by its own options alone, or by a recipe around them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from varlap.cli.settings import with_settings
from varlap.errors import ConfigError
from varlap.experiments import ImageTask, RunSpec
from varlap.experiments.grid import RECIPES
from varlap.experiments.run import SAVE_PAUSE_S
from varlap.experiments.spec import Method as RunMethod
from varlap.experiments.training_setup import (
    HELD_OUT_SEED,
    OBJECTIVES,
    network_of,
    objective_of,
    settings_of,
    task_of,
)
from varlap.objectives import MAP, Objective, VLHessian
from varlap.posterior import BNN

Method = Literal[RunMethod, "vl-hessian", "laplace"]

_OBJECTIVES = OBJECTIVES | {"vl-hessian": VLHessian, "laplace": MAP}  # Laplace's variances come at the end
ELSEWHERE = {
    "data": "it is the command's first argument",
    "method": "choose it by --method",
    "beta": "choose it by --beta",
    "seed": "choose it by --seed",
    "linearised": "it is about how `varlap reproduce` evaluates; see `varlap evaluate RUN --how linearised`",
}
"""Settings of a run that --set does not change here, and why."""


@dataclass(frozen=True)
class Training:
    """A training that only has to be begun."""

    task: ImageTask
    bnn: BNN
    objective: Objective
    augment: bool
    settings: dict[str, Any]
    """of `fit`"""
    label: dict[str, Any]
    """what the run is called in its folder"""
    told: dict[str, Any]
    """what else its result says"""


def by_options(data: str, method: Method, beta: float, seed: int, given: Mapping[str, Any]) -> Training:
    """Return the training that the options say; `given` has those that were given.

    >>> by_options("digits", "map", 0.1, 0, {"model": "mlp", "epochs": 3}).settings["epochs"]
    3
    """
    task = ImageTask(data, given.get("model", "auto"), given.get("validation", 0.0), seed)
    torch.manual_seed(seed)
    bnn = BNN(task.network())
    usual = {"epochs": 40, "batch_size": 128, "precision": "fp32"}
    usual["lr"] = 1e-3 if task.chosen_model == "preact-resnet-18" else 3e-3
    return Training(
        task,
        bnn,
        _OBJECTIVES[method](len(task.training[1]), beta=beta, seed=seed),
        given.get("augment", False),
        {name: given.get(name, value) for name, value in usual.items()} | {"seed": seed},
        label={"data": data, "method": method, "model": task.chosen_model, "validation": task.validation},
        told={"seed": seed},
    )


def by_recipe(
    recipe: str,
    data: str,
    method: Method,
    beta: float,
    seed: int,
    given: Mapping[str, Any],
    pairs: Sequence[str],
    device: torch.device,
) -> Training:
    """Return the training of `varlap reproduce` by that recipe, but for the options and the settings that were given.

    >>> made = by_recipe("sgd", "digits", "vl", 0.1, 0, {"epochs": 3}, ["model=mlp"], torch.device("cpu"))
    >>> made.settings["momentum"], made.objective.variances, made.label["precision"]
    (0.9, 'closed-form', 'fp32')
    """
    if method == "vl-hessian":
        raise ConfigError(f"--recipe {recipe} is for map, vi, vl and laplace; leave it out for --method vl-hessian")
    settings = RECIPES[recipe] | {"precision": "bf16" if device.type == "cuda" else "fp32"}
    options = {name: (f"--{name.replace('_', '-')}", value) for name, value in given.items()}
    settings |= with_settings(options, pairs, ELSEWHERE)
    if "model" not in settings:
        settings["model"] = ImageTask(data).chosen_model
    trained = "map" if method == "laplace" else method
    spec = RunSpec.of({"data": data, "method": trained, "beta": beta, "seed": seed} | settings)
    task = task_of(spec)
    return Training(
        task,
        network_of(spec, task),
        objective_of(spec, len(task.training[1])),
        spec.augment,
        settings_of(spec) | {"save_pause_s": SAVE_PAUSE_S},
        label=spec.stated() | {"method": method, "model": spec.model, "validation": spec.validation},
        told={"seed": seed, "held_out_seed": HELD_OUT_SEED, "spec": spec.stated()},
    )
