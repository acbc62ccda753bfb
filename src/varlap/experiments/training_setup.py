"""What a run's spec says how to train: its data, network and objective, and its settings of `fit`."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from varlap.curvature import DEFAULT, Fisher
from varlap.experiments.image_task import ImageTask
from varlap.experiments.spec import RunSpec
from varlap.objectives import MAP, VI, VL, Objective
from varlap.posterior import BNN, OneScalePrior

OBJECTIVES: dict[str, Callable[..., Objective]] = {"map": MAP, "vi": VI, "vl": VL}
"""by the name of a method that is trained"""
USUAL_BATCH = 128  # whose curvature the library's default is about
HELD_OUT_SEED = 0


def task_of(spec: RunSpec) -> ImageTask:
    """Return the data. The same images are held out whatever the run's seed is, so that runs compare.

    >>> task_of(RunSpec("digits", "vl", 0.1, seed=1)) == task_of(RunSpec("digits", "map", 0.3, seed=2))
    True
    """
    return _task(spec.data, spec.model, spec.validation, spec.num_train, spec.width)


@functools.lru_cache(maxsize=1)  # the runs of a grid share their data, and it takes a while to read
def _task(data: str, model: str, validation: float, num_train: int | None, width: int) -> ImageTask:
    return ImageTask(data, model, validation, seed=HELD_OUT_SEED, num_train=num_train, width=width)


def network_of(spec: RunSpec, task: ImageTask) -> BNN:
    """Return the network with its posterior, before any training.

    >>> network_of(RunSpec("digits", "vl", 0.1, prior_scale=2.0), ImageTask("digits", "mlp")).prior
    OneScalePrior(value=2.0, centre='zero', learnt=False)
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)  # all methods start from the same weights
        network = task.network()
    return BNN(network, prior=None if spec.prior_scale is None else OneScalePrior(spec.prior_scale))


def objective_of(spec: RunSpec, num_data: int) -> Objective:
    """Return the objective of training on so many images.

    >>> objective_of(RunSpec("digits", "vl", 0.1, variances="closed-form"), 1280).beta_warmup_steps  # of 2000
    600
    """
    num_steps = spec.epochs * math.ceil(num_data / spec.batch_size)
    settings: dict[str, Any] = {"seed": spec.seed, "beta_warmup_steps": round(spec.beta_rise * num_steps)}
    if spec.method == "vl":
        settings |= {"curvature": _curvature(spec), "variances": spec.variances}
    return OBJECTIVES[spec.method](num_data, spec.beta, **settings)


def settings_of(spec: RunSpec) -> dict[str, Any]:
    """Return the arguments of `fit` that decide what is learnt.

    >>> settings_of(RunSpec("digits", "vl", 0.1, epochs=20, warmup=0.05))["warmup_epochs"]
    1.0
    """
    same = ("epochs", "batch_size", "lr", "schedule", "optimizer", "momentum", "clip_norm", "log_sigma_lr_multiplier")
    settings = {name: getattr(spec, name) for name in (*same, "precision", "seed")}
    return settings | {"warmup_epochs": spec.warmup * spec.epochs}


def _curvature(spec: RunSpec) -> Fisher:
    """Return the paper's curvature, or the library's: of a sixteenth of the images, whatever the batch size is.

    More at a time would hardly be more precise: S ḡ² has the noise of one squared gradient, whatever S is.
    """
    if spec.curvature == "exact":
        return Fisher(gradient=spec.gradient)
    most = round(DEFAULT.every / DEFAULT.fraction)  # steps, of which then one is evaluated as a whole
    every = min(most, max(1, round(DEFAULT.every * USUAL_BATCH / spec.batch_size)))
    return dataclasses.replace(DEFAULT, every=every, fraction=every / most, gradient=spec.gradient)
