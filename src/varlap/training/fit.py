"""`fit`: the training loop that can be left alone, by the fastest step that the network and the machine allow."""

import contextlib
import logging
import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from varlap import tree
from varlap.curvature.fisher import couples_items
from varlap.curvature.protocol import check_targets
from varlap.errors import BatchError, CheckpointError, ConfigError, Interrupted, NonFiniteError
from varlap.metrics import evaluate
from varlap.objectives import Objective
from varlap.objectives.terms import combine
from varlap.posterior import BNN
from varlap.streams import Streams
from varlap.training.distributed import World, join_world
from varlap.training.model_file import describe
from varlap.training.progress import Progress, choose_progress
from varlap.training.records import LoggerLike
from varlap.training.run_folder import Resume, RunFolder, newest, spec_of
from varlap.training.settings import FitSettings
from varlap.training.signals import StopRequests
from varlap.training.source import Augmentation, Source, as_source
from varlap.training.state import SUMS, RunState, from_checkpoint, to_tensors
from varlap.training.step import TrainingStep

log = logging.getLogger(__name__)

AT_THE_PRIOR = 0.95  # a weight whose σ is at least so much of its prior's s has learnt nothing
RUNAWAY = 100.0  # σ/s beyond which the variances have lost their footing
STEPS_BETWEEN_VALUES = 20
FUSED_OPTIONS = {"Adam": ("fused", "capturable"), "AdamW": ("fused", "capturable"), "SGD": ("fused",)}


@dataclass
class History:
    """What happened: the settings, and a row for each epoch.

    >>> History(FitSettings(epochs=1)).epochs
    []
    """

    settings: FitSettings
    epochs: list[dict[str, float]] = field(default_factory=list)
    """elbo, log_likelihood, curvature and kl, averaged over the epoch's items, learning rates, the distribution of
    log(σ/s), the share of weights at their prior, steps that were skipped, seconds and memory; validation scores"""


def fit(
    bnn: BNN,
    objective: Objective,
    train: Any,
    *,
    validation: Any = None,
    augment: Augmentation | None = None,
    out: str | Path | None = None,
    resume: Resume = "auto",
    label: Mapping[str, Any] | None = None,
    loggers: Sequence[LoggerLike] = (),
    progress: Literal["auto", "bars", "lines", "none"] | Progress = "auto",
    **settings: Any,
) -> History:
    """Train means and log σ, and return the history.

    With `out` the run can be stopped at any moment, by a signal or by pulling the plug; the same call carries it on,
    and ends with the same bits as if nothing had happened. Under torchrun it trains data-parallel.

    Args:
        bnn: the network with its posterior; it is trained in place.
        objective: VL, VI, MAP or VLHessian.
        train: a tuple (x, y) of tensors or arrays, which are moved to the device once; a map-style Dataset; or a
            DataLoader (one that shuffles by itself cannot be carried on exactly).
        validation: data to score after each epoch, in any of these forms.
        augment: a function of (inputs, generator) that is applied to each batch on the device, such as
            `varlap.data.crop_and_flip`.
        out: the folder of the run: its spec, metrics and checkpoints.
        resume: "auto" carries on the run that `out` holds; "never" refuses to.
        label: what else tells this run from others, such as the name of its data: plain numbers and words that go
            into the spec; a folder with another label is refused.
        loggers: objects with `log_metrics(dict, step)`, called once an epoch.
        progress: "bars" or "lines" on stderr, "none", or "auto": bars on a terminal.
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
    for logger in loggers:
        if not hasattr(logger, "log_metrics"):
            raise ConfigError(f"fit(loggers=...): {logger!r} has no log_metrics(metrics, step)")
    chosen = FitSettings.of(settings)
    if validation is None and (chosen.patience is not None or chosen.keep == "best"):
        raise ConfigError("fit(patience=...) and fit(keep='best') need validation data: fit(..., validation=(x, y))")
    world = join_world(bnn)
    share = slice(None) if world is None else world.share
    source = as_source(
        train,
        batch_size=chosen.batch_size,
        seed=chosen.seed,
        device=bnn.device,
        num_workers=chosen.num_workers,
        share=share,
    )
    _check_data(bnn, objective, source, world, chosen, augment)
    if isinstance(progress, str):
        progress = choose_progress(progress if world is None or world.rank == 0 else "none")
    with contextlib.ExitStack() as stack:
        folder = None
        if out is not None:
            named = {"augment": getattr(augment, "__qualname__", None), "validation": validation is not None}
            spec = spec_of(bnn, objective, chosen, source.describe() | named, label)
            folder = _open_folder(Path(out), spec, resume, world)
        if folder is not None:
            stack.callback(folder.close)
        loop = _Loop(bnn, objective, source, chosen, out, folder, world, augment, validation, loggers, progress)
        if out is not None:
            loop.carry_on(Path(out))
        return loop.run()


class _Loop:
    """A training run from where it is to its end."""

    def __init__(
        self,
        bnn: BNN,
        objective: Objective,
        source: Source,
        settings: FitSettings,
        out: str | Path | None,
        folder: RunFolder | None,
        world: World | None,
        augment: Augmentation | None,
        validation: Any,
        loggers: Sequence[LoggerLike],
        progress: Progress,
    ) -> None:
        self._bnn, self._objective, self._source, self._settings = bnn, objective, source, settings
        self._out, self._folder, self._world = out, folder, world
        self._augment, self._validation = augment, validation
        self._loggers, self._progress = loggers, progress
        self._optimizer = _make_optimizer(bnn, settings)
        self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._step = TrainingStep(
            bnn,
            objective,
            self._optimizer,
            precision=settings.precision,
            compiled=settings.compiled,
            accumulate=settings.accumulate,
            clip_norm=settings.clip_norm,
            world=world,
            on_nonfinite=settings.on_nonfinite,
        )
        self._state = RunState(sums=_zero_sums(bnn.device), gradient_scale=self._step.gradient_scale)
        self._history = History(settings)
        self._outputs: Any = None
        self._total = settings.epochs * source.steps_per_epoch

    def carry_on(self, out: Path) -> None:
        """Go to where the folder's newest checkpoint was, on every rank."""
        checkpoint = newest(out) if self._folder is None else self._folder.newest()
        step = -1 if checkpoint is None else checkpoint.documents["state"]["step"]
        if self._folder is not None:
            self._folder.records.truncate_after(step)
            self._history.epochs = self._folder.records.rows()
        if self._world is not None and self._world.largest(step) != -self._world.largest(-step):
            raise ConfigError(
                f"the ranks see different checkpoints in {out}; out must be a folder that all of them share"
            )
        if checkpoint is not None:
            self._state = from_checkpoint(checkpoint, self._bnn, self._optimizer, self._objective)
            self._step.gradient_scale = self._state.gradient_scale
            log.info("carrying on from step %d", self._state.step)

    def run(self) -> History:
        """Take the steps that are left."""
        if self._world is not None:
            self._world.broadcast([*self._bnn.parameters(), *self._bnn.buffers()])
        self._bnn.train()
        per_epoch = self._source.steps_per_epoch
        self._progress.start(num_epochs=self._settings.epochs, steps_per_epoch=per_epoch, first_step=self._state.step)
        try:
            with StopRequests() as stop:
                while self._state.step < self._total and not self._state.stopped:
                    epoch, first = divmod(self._state.step, per_epoch)
                    self._train_epoch(epoch, first, stop)
                stop.raise_if_requested(self._state.step, saved=self._out is not None)
        finally:
            self._progress.close()
        if self._settings.keep == "best" and self._state.best:
            self._bnn.load_state_dict(self._state.best)
        return self._history

    def _train_epoch(self, epoch: int, first: int, stop: StopRequests) -> None:
        started, state, num_batches = time.perf_counter(), self._state, first
        for x, y in self._source.epoch(epoch, first):
            self._take(x, y)
            num_batches += 1
            last_of_epoch = state.step % self._source.steps_per_epoch == 0
            if requested := self._stop_requested(stop):
                if last_of_epoch:
                    self._end_epoch(epoch, time.perf_counter() - started)
                self._save(last=True)
                raise Interrupted(requested, state.step, saved=self._out is not None)
            if last_of_epoch:
                break
            if self._settings.save_every and state.step % self._settings.save_every == 0:
                self._save()
        if num_batches != self._source.steps_per_epoch:
            raise BatchError(
                f"epoch {epoch} had {num_batches} batches, not {self._source.steps_per_epoch}; a loader must give as "
                "many in every epoch as its length says"
            )
        self._end_epoch(epoch, time.perf_counter() - started)

    def _take(self, x: Any, y: Any) -> None:
        bnn, state, number = self._bnn, self._state, self._state.step
        factor = self._settings.lr_factor(number / self._total)
        _set_rates(self._optimizer, [rate * factor for rate in self._rates])
        num_items = tree.leading_size(y) or 0
        if not hasattr(self._source, "targets") and num_items:  # those were checked at once
            self._check_targets(x, y, num_items)
        x, y = tree.to_device(x, bnn.device), tree.to_device(y, bnn.device)
        if self._augment is not None and num_items:
            x = self._augment(x, Streams(self._settings.seed, number).generator("augment", bnn.device))
        values = self._step.take(x, y, number=number)
        log_likelihood, curvature, kl, sound = values
        elbo = combine(log_likelihood, curvature, kl, self._objective.beta_at(number))
        row = torch.stack([elbo, log_likelihood, curvature, kl, torch.ones_like(kl), torch.zeros_like(kl)])
        skipped = torch.zeros_like(row)
        skipped[-1] = 1
        state.sums += torch.where(sound > 0, num_items * row, skipped).to(state.sums)
        state.step += 1
        shown = {"elbo": float(elbo), "nll": -float(log_likelihood)} if number % STEPS_BETWEEN_VALUES == 0 else None
        self._progress.step(number, num_items, shown)

    def _end_epoch(self, epoch: int, seconds: float) -> None:
        state = self._state
        self._step.check()
        row: dict[str, float] = {"epoch": epoch, "step": state.step}
        sums = dict(zip(SUMS, state.sums.tolist(), strict=True))
        for name in ("elbo", "log_likelihood", "curvature", "kl"):
            row[name] = sums[name] / sums["items"] if sums["items"] else math.nan
        row["skipped"] = sums["skipped"]
        means, log_sigma = self._optimizer.param_groups
        row |= {"lr": float(means["lr"]), "lr_log_sigma": float(log_sigma["lr"])}
        row |= _variances(self._bnn)
        if self._validation is not None:
            scores = self._validated(epoch)
            row |= {f"validation_{name}": value for name, value in scores.items()}
            self._judge(scores["nll"])
        row |= {"seconds": seconds, "memory_mb": _memory_mb(self._bnn.device)}
        state.sums = _zero_sums(self._bnn.device)
        self._history.epochs.append(row)
        if self._folder is not None:
            try:
                self._folder.records.append(row)
            except OSError as error:
                log.error("epoch %d is not in the metrics, the training goes on: %s", epoch, error)
        if self._world is None or self._world.rank == 0:
            self._tell_loggers(row)
        self._progress.epoch(row)
        if row["sigma_over_s_max"] > RUNAWAY and self._objective.uses_variances:
            log.warning("epoch %d: the largest σ is %.0f times its prior's s", epoch, row["sigma_over_s_max"])
        self._save(last=state.step == self._total or state.stopped)

    def _tell_loggers(self, row: dict[str, float]) -> None:
        for logger in self._loggers:
            try:
                logger.log_metrics({name: float(value) for name, value in row.items()}, self._state.step)
            except Exception as error:  # a server that is down must not end a training
                log.error("%s failed, the training goes on: %s", type(logger).__name__, error)

    def _validated(self, epoch: int) -> dict[str, float]:
        """Score the validation data; all ranks go by the first one's NLL."""
        try:
            scores = evaluate(self._bnn, self._validation)
        except NonFiniteError as error:
            raise NonFiniteError(
                f"after epoch {epoch}, in the validation data (step counts its batches): {error}"
            ) from error
        if self._world is not None:
            nll = torch.tensor(scores["nll"], dtype=torch.float64, device=self._bnn.device)
            self._world.broadcast([nll])
            scores["nll"] = nll.item()
        return scores

    def _check_targets(self, x: Any, y: Any, num_items: int) -> None:
        """Check a batch's targets where they are, before a compiled step that cannot look at them."""
        if self._outputs is None:
            with torch.no_grad(), self._bnn.evaluating():
                first = tree.take(x, slice(0, 1)) if tree.leading_size(x) is not None else x
                if self._augment is not None:
                    first = self._augment(first, torch.Generator(self._bnn.device).manual_seed(0))
                outputs = self._bnn.outputs(tree.to_device(first, self._bnn.device))
            self._outputs = tree.map_tensors(Tensor.cpu, outputs)
        check_targets(self._bnn, self._outputs, tree.map_tensors(Tensor.cpu, y), num_items)

    def _judge(self, nll: float) -> None:
        """Remember the best validation NLL, and stop where there was no better one for too long."""
        state = self._state
        if state.best_nll is None or nll < state.best_nll:
            state.best_nll, state.epochs_since_best = nll, 0
            if self._settings.keep == "best":
                state.best = {name: tensor.detach().clone() for name, tensor in self._bnn.state_dict().items()}
        else:
            state.epochs_since_best += 1
        if self._settings.patience is not None and state.epochs_since_best >= self._settings.patience:
            state.stopped = True

    def _save(self, *, last: bool = False) -> None:
        """Write a checkpoint. A full disk does not end the training; only the last one must be written."""
        self._step.check()  # an unsound state is not worth keeping
        if self._folder is None:
            return
        tensors, document = to_tensors(self._bnn, self._optimizer, self._objective, self._state)
        try:
            documents = {"state": document, "model": describe(self._bnn)}
            self._folder.save(self._state.step, tensors, documents, self._settings.num_checkpoints)
        except CheckpointError as error:
            if last:
                raise
            log.error("no checkpoint at step %d, the training goes on: %s", self._state.step, error)

    def _stop_requested(self, stop: StopRequests) -> int:
        """Return the signal that asks for an end, on any rank, or 0."""
        requested = stop.requested or 0
        return requested if self._world is None else int(self._world.largest(requested))


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
    targets = getattr(source, "targets", None)
    if targets is not None:  # once and for all, since a compiled step cannot look at its targets
        first = source.first()
        if augment is not None:
            first = augment(first, torch.Generator(bnn.device).manual_seed(0))
        with torch.no_grad(), bnn.evaluating():
            check_targets(bnn, bnn.outputs(first), targets, source.num_items)


def _make_optimizer(bnn: BNN, settings: FitSettings) -> torch.optim.Optimizer:
    on_cuda = bnn.device.type == "cuda"
    if on_cuda and any(isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in bnn.network.modules()):
        bnn.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # what tensor cores want
    kind = getattr(torch.optim, settings.optimizer)
    options = dict.fromkeys(FUSED_OPTIONS.get(settings.optimizer, ()), True) if on_cuda else {}
    return kind(bnn.parameter_groups(settings.lr, settings.log_sigma_lr_multiplier), **options)


def _set_rates(optimizer: torch.optim.Optimizer, rates: list[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)  # a captured step reads it there
        else:
            group["lr"] = rate


def _zero_sums(device: torch.device) -> Tensor:
    return torch.zeros(len(SUMS), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)


@torch.no_grad()
def _variances(bnn: BNN) -> dict[str, float]:
    """Say how σ/s is distributed: quantiles of its logarithm, its largest value, the share of weights at the prior."""
    logs = torch.cat([(sigma - bnn.prior_scale[name].log()).flatten().float() for name, sigma in bnn.log_sigma.items()])
    some = logs[:: max(1, len(logs) // 1_000_000)]  # quantiles of a million are good enough
    low, middle, high = some.quantile(torch.tensor([0.05, 0.5, 0.95], device=logs.device)).tolist()
    return {
        "log_sigma_over_s_q05": low,
        "log_sigma_over_s_median": middle,
        "log_sigma_over_s_q95": high,
        "sigma_over_s_max": float(logs.max().exp()),
        "share_at_prior": float((logs >= torch.tensor(AT_THE_PRIOR).log()).float().mean()),
    }


def _memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
