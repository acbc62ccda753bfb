"""The loop of `fit`: steps, epochs, what is written of them, and where a run goes on."""

import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varlap import tree
from varlap.curvature.protocol import check_targets
from varlap.errors import BatchError, CheckpointError, ConfigError, Interrupted, NonFiniteError, OutOfTime
from varlap.metrics import evaluate
from varlap.objectives import Objective
from varlap.objectives.terms import combine
from varlap.posterior import BNN
from varlap.posterior.batch import is_divisible
from varlap.predict.mean import probed_outputs
from varlap.streams import Streams
from varlap.training.distributed import World
from varlap.training.model_file import describe
from varlap.training.progress import Progress
from varlap.training.records import LoggerLike
from varlap.training.run_folder import RunFolder, newest
from varlap.training.settings import FitSettings
from varlap.training.signals import TIME_IS_UP, StopRequests
from varlap.training.source import Arrays, Augmentation, Source
from varlap.training.state import SUMS, RunState, from_checkpoint, to_tensors
from varlap.training.step import TrainingStep

log = logging.getLogger(__name__)

AT_THE_PRIOR = 0.95  # a weight whose σ is at least so much of its prior's s has learnt nothing
RUNAWAY = 100.0  # σ/s beyond which the variances have lost their footing
SECONDS_BETWEEN_VALUES = 0.5  # to read one waits for the device, which then has nothing to do for a while
VALIDATION_SCORES = ("nll", "accuracy", "ece", "rmse")  # cheap ones, each epoch; those that apply


@dataclass
class History:
    """What happened: the settings, and a row for each epoch.

    >>> History(FitSettings(epochs=2), [{"elbo": -0.5}])
    History(1 of 2 epochs, elbo -0.5000)
    """

    settings: FitSettings
    epochs: list[dict[str, float]] = field(default_factory=list)
    """elbo, log_likelihood, curvature and kl, averaged over the epoch's items, learning rates, the distribution of
    log(σ/s), the share of weights at their prior, steps that were skipped, seconds and memory; validation scores"""

    def __repr__(self) -> str:
        last = self.epochs[-1] if self.epochs else {}
        shown = ("elbo", "validation_nll", "validation_accuracy")
        told = "".join(f", {name} {last[name]:.4f}" for name in shown if name in last)
        return f"History({len(self.epochs)} of {self.settings.epochs} epochs{told})"


@dataclass
class Loop:
    """A training run from where it is to its end."""

    bnn: BNN
    objective: Objective
    source: Source
    settings: FitSettings
    optimizer: torch.optim.Optimizer
    out: str | Path | None
    folder: RunFolder | None
    """None without `out`, and on all ranks but the first"""
    world: World | None
    augment: Augmentation | None
    validation: Any
    loggers: Sequence[LoggerLike]
    progress: Progress
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        settings = self.settings
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._step = TrainingStep(
            self.bnn,
            self.objective,
            self.optimizer,
            precision=settings.precision,
            compiled=settings.compiled,
            accumulate=settings.accumulate,
            clip_norm=settings.clip_norm,
            world=self.world,
            batch_size=self.source.batch_size,
            on_nonfinite=settings.on_nonfinite,
        )
        self._state = RunState(sums=_zero_sums(self.bnn.device), gradient_scale=self._step.gradient_scale)
        # Made once, since to write a Python number into a tensor of a GPU waits for the GPU.
        self._skipped = torch.eye(len(SUMS))[SUMS.index("skipped")].to(self._state.sums)
        self._counts = torch.tensor([1.0, 0.0]).to(self._state.sums)  # of items and of skipped steps
        self._history = History(settings)
        self._outputs: Any = None
        self._total = settings.epochs * self.source.steps_per_epoch
        self._deadline = math.inf if self.time_limit_s is None else time.monotonic() + self.time_limit_s
        self._saved_at = self._shown_at = -math.inf
        self._epoch_began = 0.0
        self._runaway = RUNAWAY

    def carry_on(self, out: Path) -> None:
        """Go to where the folder's newest checkpoint was, on every rank."""
        checkpoint = newest(out) if self.folder is None else self.folder.newest()
        step = -1 if checkpoint is None else checkpoint.documents["state"]["step"]
        if self.folder is not None:
            self.folder.records.truncate_after(step)
            self._history.epochs = self.folder.records.rows()
        if self.world is not None and self.world.largest(step) != -self.world.largest(-step):
            raise ConfigError(
                f"the ranks see different checkpoints in {out}; out must be a folder that all of them share"
            )
        if checkpoint is not None:
            self._state = from_checkpoint(checkpoint, self.bnn, self.optimizer, self.objective)
            self._step.gradient_scale = self._state.gradient_scale
            log.info("%s: %s at step %d", out, "finished" if self._is_finished else "carrying on", self._state.step)

    def run(self) -> History:
        """Take the steps that are left."""
        if self.world is not None:
            self.world.broadcast([*self.bnn.parameters(), *self.bnn.buffers()])
        self.bnn.train()
        per_epoch = self.source.steps_per_epoch
        self.progress.start(num_epochs=self.settings.epochs, steps_per_epoch=per_epoch, first_step=self._state.step)
        try:
            with StopRequests() as stop:
                while not self._is_finished:
                    epoch, first = divmod(self._state.step, per_epoch)
                    self._train_epoch(epoch, first, stop)
                stop.raise_if_requested(self._state.step, saved=self.out is not None)
        finally:
            self.progress.close()
        if self.settings.keep == "best" and self._state.best:
            self.bnn.load_state_dict(self._state.best)
        return self._history

    @property
    def _is_finished(self) -> bool:
        return self._state.step == self._total or self._state.stopped

    def _train_epoch(self, epoch: int, first: int, stop: StopRequests) -> None:
        state, num_batches = self._state, first
        self._epoch_began = time.perf_counter() - state.epoch_seconds  # a part of it was done before
        for x, y, weights in self.source.epoch(epoch, first):
            self._take(x, y, weights, stop)
            num_batches += 1
            last_of_epoch = state.step % self.source.steps_per_epoch == 0
            if requested := self._own_request(stop) if self.world is None else self._step.request:
                if last_of_epoch:
                    self._end_epoch(epoch)
                self._save(last=True)
                if requested == TIME_IS_UP:
                    if self._is_finished:
                        return  # just in time
                    raise OutOfTime(state.step, saved=self.out is not None)
                raise Interrupted(requested, state.step, saved=self.out is not None)
            if last_of_epoch:
                break
            if self.settings.save_every and state.step % self.settings.save_every == 0:
                self._save()
        if num_batches != self.source.steps_per_epoch:
            raise BatchError(
                f"epoch {epoch} had {num_batches} batches, not {self.source.steps_per_epoch}; a loader must give as "
                "many in every epoch as its length says"
            )
        self._end_epoch(epoch)

    def _take(self, x: Any, y: Any, weights: Tensor | None, stop: StopRequests) -> None:
        bnn, state, number = self.bnn, self._state, self._state.step
        factor = self.settings.lr_factor(number / self._total)
        _set_rates(self.optimizer, [rate * factor for rate in self._rates])
        num_items = tree.leading_size(y) or 0
        if not isinstance(self.source, Arrays) and num_items:  # those were checked at once
            self._check_targets(x, y, num_items)
        x, y = tree.to_device(x, bnn.device), tree.to_device(y, bnn.device)
        if self.augment is not None and num_items:
            x = self.augment(x, Streams(self.settings.seed, number).generator("augment", bnn.device))
        if self.world is not None:
            self._step.request = self._own_request(stop)  # the step tells all ranks
        values = self._step.take(x, y, number=number, weights=weights)
        log_likelihood, curvature, kl, sound = values
        elbo = combine(log_likelihood, curvature, kl, self.objective.beta_at(number))
        row = torch.cat([elbo[None], values[:3], self._counts])
        state.sums += torch.where(sound > 0, num_items * row, self._skipped)
        state.step += 1
        shown = None
        if time.monotonic() - self._shown_at >= SECONDS_BETWEEN_VALUES:
            shown = {"elbo": float(elbo), "nll": -float(log_likelihood)}
            self._shown_at = time.monotonic()
        num_ranks = 1 if self.world is None else self.world.size
        self.progress.step(number, num_items * num_ranks, shown)

    def _end_epoch(self, epoch: int) -> None:
        state = self._state
        self._step.check()
        row: dict[str, float] = {"epoch": epoch, "step": state.step}
        sums = dict(zip(SUMS, state.sums.tolist(), strict=True))  # waits for the last steps, whose time counts too
        seconds = time.perf_counter() - self._epoch_began
        for name in ("elbo", "log_likelihood", "curvature", "kl"):
            row[name] = sums[name] / sums["items"] if sums["items"] else math.nan
        row["skipped"] = sums["skipped"]
        means, log_sigma = self.optimizer.param_groups
        row |= {"lr": float(means["lr"]), "lr_log_sigma": float(log_sigma["lr"])}
        row |= describe_variances(self.bnn)
        to_validate = (epoch + 1) % self.settings.validate_every == 0 or epoch + 1 == self.settings.epochs
        if self.validation is not None and to_validate:
            scores = self._validated(epoch)
            row |= {f"validation_{name}": value for name, value in scores.items()}
            self._judge(scores["nll"])
        row |= {"seconds": seconds, "memory_mb": _memory_mb(self.bnn.device)}
        state.sums, state.epoch_seconds = _zero_sums(self.bnn.device), 0.0
        self._history.epochs.append(row)
        if self.folder is not None:
            try:
                self.folder.records.append(row)
            except OSError as error:
                log.error("epoch %d is not in the metrics, the training goes on: %s", epoch, error)
        if self.world is None or self.world.rank == 0:
            self._tell_loggers(row)
        self.progress.epoch(row)
        if row["sigma_over_s_max"] > self._runaway and self.objective.uses_variances:
            log.warning("epoch %d: the largest σ is %.0f times its prior's s", epoch, row["sigma_over_s_max"])
            self._runaway = 10 * row["sigma_over_s_max"]  # said again where it has grown so much
        due = self.settings.save_every and state.step % self.settings.save_every == 0
        if self._is_finished or due or time.monotonic() - self._saved_at >= self.settings.save_pause_s:
            self._save(last=self._is_finished)

    def _tell_loggers(self, row: dict[str, float]) -> None:
        for logger in self.loggers:
            try:
                logger.log_metrics({name: float(value) for name, value in row.items()}, self._state.step)
            except Exception as error:  # a server that is down must not end a training
                log.error("%s failed, the training goes on: %s", type(logger).__name__, error)

    def _validated(self, epoch: int) -> dict[str, float]:
        """Score the validation data; all ranks go by the first one's NLL."""
        try:
            scores = evaluate(self.bnn, self.validation, only=VALIDATION_SCORES)
        except NonFiniteError as error:
            raise NonFiniteError(f"after epoch {epoch}, in the validation data: {error}") from error
        if self.world is not None:
            nll = torch.tensor(scores["nll"], dtype=torch.float64, device=self.bnn.device)
            self.world.broadcast([nll])
            scores["nll"] = nll.item()
        return scores

    def _check_targets(self, x: Any, y: Any, num_items: int) -> None:
        """Check a batch's targets where they are, before a compiled step that cannot look at them."""
        if self._outputs is None:
            first = tree.take(x, slice(0, 1)) if is_divisible(x, num_items) else x
            first = tree.to_device(first, self.bnn.device)
            if self.augment is not None:
                first = self.augment(first, torch.Generator(self.bnn.device).manual_seed(0))
            self._outputs = tree.map_tensors(Tensor.cpu, probed_outputs(self.bnn, first))
        check_targets(self.bnn, self._outputs, tree.map_tensors(Tensor.cpu, y), num_items)

    def _judge(self, nll: float) -> None:
        """Remember the best validation NLL, and stop where there was no better one for too long."""
        state = self._state
        if math.isfinite(nll) and (state.best_nll is None or nll < state.best_nll):
            state.best_nll, state.epochs_since_best = nll, 0
            if self.settings.keep == "best":
                state.best = {name: tensor.detach().clone() for name, tensor in self.bnn.state_dict().items()}
        else:
            state.epochs_since_best += self.settings.validate_every
        patience = self.settings.patience
        if patience is not None and state.epochs_since_best >= patience:
            state.stopped = True
            log.info(
                "stopped early: no better validation NLL than %s for %d epochs", state.best_nll, state.epochs_since_best
            )

    def _save(self, *, last: bool = False) -> None:
        """Write a checkpoint. A full disk does not end the training; only the last one must be written."""
        self._step.check()  # an unsound state is not worth keeping
        if self.folder is None:
            return
        is_within = self._state.step % self.source.steps_per_epoch > 0
        self._state.epoch_seconds = time.perf_counter() - self._epoch_began if is_within else 0.0
        tensors, document = to_tensors(self.bnn, self.optimizer, self.objective, self._state)
        try:
            documents = {"state": document, "model": describe(self.bnn)}
            self.folder.save(self._state.step, tensors, documents, self.settings.num_checkpoints)
            self._saved_at = time.monotonic()
        except CheckpointError as error:
            if last:
                raise
            log.error("no checkpoint at step %d, the training goes on: %s", self._state.step, error)

    def _own_request(self, stop: StopRequests) -> int:
        """Return the signal that asks this rank for an end, or `TIME_IS_UP`, or 0."""
        return stop.requested or (TIME_IS_UP if time.monotonic() >= self._deadline else 0)


def _set_rates(optimizer: torch.optim.Optimizer, rates: list[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)  # a captured step reads it there
        else:
            group["lr"] = rate


def _zero_sums(device: torch.device) -> Tensor:
    return torch.zeros(len(SUMS), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)


@torch.no_grad()
def describe_variances(bnn: BNN) -> dict[str, float]:
    """Say how σ/s is distributed: quantiles of its logarithm, its largest value, the share of weights at the prior.

    >>> round(describe_variances(BNN(torch.nn.Linear(2, 3)))["log_sigma_over_s_median"], 3)
    -3.0
    """
    logs = torch.cat([(sigma - bnn.prior_scale[name].log()).flatten().float() for name, sigma in bnn.log_sigma.items()])
    some = logs[:: max(1, len(logs) // 1_000_000)]  # quantiles of a million are good enough
    low, middle, high = some.quantile(some.new_tensor([0.05, 0.5, 0.95])).tolist()
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
    try:
        import resource  # there is none on Windows
    except ImportError:
        return math.nan
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
