"""`fit`: the training loop that can be left alone, by the fastest step that the network and the machine allow."""

import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from varlap.curvature.fisher import couples_items
from varlap.curvature.protocol import check_targets
from varlap.errors import BatchError, ConfigError
from varlap.objectives import Objective
from varlap.posterior import BNN
from varlap.predict.mean import probed_outputs
from varlap.training.distributed import World, join_world
from varlap.training.loop import History, Loop
from varlap.training.optimizer import make_optimizer
from varlap.training.progress import Progress, choose_progress
from varlap.training.records import LoggerLike
from varlap.training.run_folder import Resume, RunFolder, spec_of
from varlap.training.settings import FitSettings
from varlap.training.source import Arrays, Augmentation, Source, as_source

log = logging.getLogger(__name__)


def fit(
    bnn: BNN,
    objective: Objective,
    train: Any,
    *,
    weights: Any = None,
    validation: Any = None,
    augment: Augmentation | None = None,
    out: str | Path | None = None,
    resume: Resume = "auto",
    label: Mapping[str, Any] | None = None,
    loggers: Sequence[LoggerLike] = (),
    progress: Literal["auto", "bars", "lines", "none"] | Progress = "auto",
    time_limit_s: float | None = None,
    **settings: Any,
) -> History:
    """Train means and log σ, and return the history.

    With `out` the run can be stopped at any moment, by a signal or by pulling the plug; the same call carries it on,
    and ends with the same bits as if nothing had happened. Under torchrun it trains data-parallel.

    Args:
        bnn: the network with its posterior; it is trained in place, and left in training mode.
        objective: VL, VI, MAP or VLHessian.
        train: a tuple (x, y) of tensors or arrays, which are moved to the device once; a map-style Dataset; or a
            DataLoader. What a loader draws from torch's global generator, such as the order of `shuffle=True`, follows
            from `seed` and the epoch, and is repeated by a run that is carried on; one with a `generator` of its own
            cannot be. Floating-point arrays of numpy take the type of the weights.
        weights: one for each item of a tuple (x, y), which multiplies its log-likelihood; their square root enters the
            sampled gradient. N stays the objective's `num_data`.
        validation: data to score after each epoch, or after every `validate_every`-th, in any of these forms.
        augment: a function of (inputs, generator) that is applied to each batch on the device, such as
            `varlap.data.crop_and_flip`. Random transforms belong here: inside a Dataset that `num_workers` processes
            read, a run that is carried on from within an epoch does not repeat them.
        out: the folder of the run: its spec, metrics and checkpoints.
        resume: "auto" carries on the run that `out` holds; "never" refuses to.
        label: what else tells this run from others, such as the name of its data: plain numbers and words that go
            into the spec; a folder with another label is refused.
        loggers: objects with `log_metrics(dict, step)`, called once an epoch.
        progress: "bars" or "lines" on stderr, "none", or "auto": bars on a terminal.
        time_limit_s: stop between two steps once so many seconds are over, with a checkpoint and
            `varlap.errors.OutOfTime`; the same call carries on.
        settings: the fields of `FitSettings`.

    >>> import torch, varlap
    >>> bnn = varlap.BNN(torch.nn.Linear(2, 3))
    >>> train = torch.randn(64, 2), torch.arange(64) % 3
    >>> history = fit(bnn, varlap.VL(num_data=64), train, epochs=2, batch_size=16, progress="none")
    >>> len(history.epochs), history.epochs[-1]["epoch"]
    (2, 1)
    """
    if not isinstance(bnn, BNN) or not isinstance(objective, Objective):
        given = ", ".join(type(argument).__name__ for argument in (bnn, objective))
        raise ConfigError(
            f"fit needs a BNN and an objective, got {given}: fit(varlap.BNN(network), varlap.VL(...), ...)"
        )
    if not isinstance(progress, str) and not hasattr(progress, "start"):
        raise ConfigError(f"fit(progress={progress!r}): choose 'auto', 'bars', 'lines' or 'none'")
    if time_limit_s is not None and not (isinstance(time_limit_s, Real) and time_limit_s > 0):
        raise ConfigError(f"fit(time_limit_s={time_limit_s!r}) must be a positive number of seconds")
    for logger in loggers:
        if not hasattr(logger, "log_metrics"):
            raise ConfigError(f"fit(loggers=...): {logger!r} has no log_metrics(metrics, step)")
    chosen = FitSettings.of(settings)
    own_size = getattr(train, "batch_size", None)  # a loader's
    if "batch_size" in settings and own_size not in (None, chosen.batch_size):
        raise ConfigError(
            f"fit(batch_size={chosen.batch_size}) does not go with a loader that makes batches of {own_size}; leave it "
            "out, or give fit the loader's dataset"
        )
    if validation is None and (chosen.patience is not None or chosen.keep == "best"):
        raise ConfigError("fit(patience=...) and fit(keep='best') need validation data: fit(..., validation=(x, y))")
    objective.prepare_for(bnn)
    world = join_world(bnn)
    share = slice(None) if world is None else world.share
    source = as_source(
        train,
        batch_size=chosen.batch_size,
        seed=chosen.seed,
        device=bnn.device,
        dtype=bnn.dtype,
        num_workers=chosen.num_workers,
        share=share,
        weights=None if weights is None else torch.as_tensor(weights).to(next(bnn.network.parameters()).dtype),
        resumable=out is not None,
    )
    _check_data(bnn, objective, source, world, chosen, augment)
    if isinstance(progress, str):
        progress = choose_progress(progress if world is None or world.rank == 0 else "none")
    with contextlib.ExitStack() as stack:
        folder = None
        if out is not None:
            named = {"augment": None if augment is None else _name_of(augment), "validation": validation is not None}
            spec = spec_of(bnn, objective, chosen, source.describe() | named, label)
            folder = _open_folder(Path(out), spec, resume, world)
        if folder is not None:
            stack.callback(folder.close)
        _prefer_channels_last(bnn)
        loop = Loop(
            bnn=bnn,
            objective=objective,
            source=source,
            settings=chosen,
            optimizer=make_optimizer(bnn, chosen),
            out=out,
            folder=folder,
            world=world,
            augment=augment,
            validation=validation,
            loggers=loggers,
            progress=progress,
            time_limit_s=time_limit_s,
        )
        if out is not None:
            loop.carry_on(Path(out))
        return loop.run()


def _open_folder(path: Path, spec: dict[str, Any], resume: Resume, world: World | None) -> RunFolder | None:
    """Open the folder on the first rank; where it is refused, all ranks hear of it."""
    folder, refusal = None, None
    if world is None or world.rank == 0:
        try:
            folder = RunFolder(path, spec, resume)
        except Exception as error:
            refusal = error
    if refusal is None and world is not None and world.largest(0.0):
        raise ConfigError(f"the first rank was refused the folder {path}; see its message")
    if refusal is not None:
        if world is not None:
            world.largest(1.0)
        raise refusal
    return folder


def _name_of(value: Any) -> str:
    """Name a callable and what it was given, so that a run is not carried on with another one.

    >>> _name_of(functools.partial(_name_of, (4, "same"), flip=True, table=torch.zeros(2)))
    "_name_of((4, 'same'), flip=True, table=Tensor)"
    """
    if isinstance(value, functools.partial):
        given = [_name_of(argument) for argument in value.args]
        given += [f"{name}={_name_of(argument)}" for name, argument in sorted(value.keywords.items())]
        return f"{_name_of(value.func)}({', '.join(given)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_name_of, value))})"
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _check_data(
    bnn: BNN,
    objective: Objective,
    source: Source,
    world: World | None,
    settings: FitSettings,
    augment: Augmentation | None,
) -> None:
    if objective.num_data < source.num_items:
        raise BatchError(
            f"the training data have {source.num_items} items but the objective's num_data={objective.num_data}"
        )
    if objective.num_data > source.num_items:
        log.warning(
            "num_data=%d, but the training data have %d items: the KL weighs as for num_data items",
            objective.num_data,
            source.num_items,
        )
    num_ranks = 1 if world is None else world.size
    if min(source.num_items, settings.batch_size) < num_ranks:
        raise BatchError(
            f"batches of {min(source.num_items, settings.batch_size)} items cannot be shared by {num_ranks} ranks; "
            "batch_size counts the items of all ranks"
        )
    last = getattr(source, "num_items_of_last", 0)
    alone = 0 < last < 2 * num_ranks  # a rank has one item, or none
    if alone and source.num_items > 1 and couples_items(bnn.train().network):
        raise BatchError(
            f"the last batch of an epoch has {last} item{'s' * (last > 1)}, and batch norm cannot estimate the variance"
            f" of one; choose another batch_size, such as batch_size={source.num_items} or one that leaves more"
        )
    if isinstance(source, Arrays):  # once and for all, since a compiled step cannot look at its targets
        first = source.first()
        if augment is not None:
            first = augment(first, torch.Generator(bnn.device).manual_seed(0))
        check_targets(bnn, probed_outputs(bnn, first), source.targets, source.num_items)


def _prefer_channels_last(bnn: BNN) -> None:
    """Lay convolutions out as tensor cores want them."""
    convolves = any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in bnn.network.modules())
    if bnn.device.type == "cuda" and convolves:
        bnn.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
