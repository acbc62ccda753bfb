"""A LightningModule that trains a `BNN` by an objective. It holds no mathematics: Lightning runs the loop."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varlap import tree
from varlap.errors import BatchError, CheckpointError, ConfigError, needs_extra
from varlap.metrics.accumulator import Scores
from varlap.objectives import Objective
from varlap.posterior import BNN
from varlap.predict.inputs import inputs_of
from varlap.training.distributed import World
from varlap.training.loop import VALIDATION_SCORES, describe_variances
from varlap.training.model_file import beside, describe, save_tensors
from varlap.training.optimizer import make_optimizer
from varlap.training.run_folder import spec_of
from varlap.training.sampler import FitSampler
from varlap.training.settings import FitSettings

with needs_extra("lightning", "varlap.integrations.lightning", "lightning"):
    from lightning.pytorch import LightningModule
    from lightning.pytorch.plugins.io import CheckpointIO
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy

__all__ = ["FitSampler", "LightningBNN"]

OWN_SETTINGS = ("optimizer", "momentum", "lr", "log_sigma_lr_multiplier", "schedule", "milestones", "warmup_epochs")
ELSEWHERE = {
    "epochs": "Trainer(max_epochs=...)",
    "batch_size": "DataLoader(batch_size=...)",
    "num_workers": "DataLoader(num_workers=...)",
    "seed": "DataLoader(sampler=FitSampler(data, seed=...))",
    "accumulate": "Trainer(accumulate_grad_batches=...)",
    "clip_norm": "Trainer(gradient_clip_val=...)",
    "precision": "Trainer(precision=...)",
    "compiled": "objective.compiled = ...",
    "validate_every": "Trainer(check_val_every_n_epoch=...)",
    "patience": "EarlyStopping(monitor='validation_nll', patience=...)",
    "keep": "ModelCheckpoint(monitor='validation_nll')",
    "save_every": "ModelCheckpoint(every_n_train_steps=...)",
    "num_checkpoints": "ModelCheckpoint(save_top_k=...)",
    "device": "Trainer(accelerator=...)",
}
PRECISIONS = ("32-true", "64-true", "bf16-mixed")
STATE = "varlap"  # the key of a checkpoint's dict

Split = Callable[[Any], tuple[Any, Any]]


class LightningBNN(LightningModule):
    """Trains a `BNN` with Lightning's `Trainer`, to the same weights as `varlap.fit` for the same seed and data.

    Batches are pairs (x, y). The terms of the ELBO are logged each epoch by the names of `fit`'s history, `loss` each
    step, and after validation or testing `validation_nll` or `test_nll` and so on. Beside each checkpoint NAME.ckpt,
    whose format is a pickle, a folder NAME.model is kept, which `varlap.load` reads.

    Args:
        bnn: the network with its posterior; it is trained in place.
        objective: VL, VI, MAP or VLHessian; its `num_data` counts the items of all ranks.
        configure: a function of the BNN that returns what Lightning's `configure_optimizers` may return; by default
            the optimizer and the schedule of `fit`.
        split: a function of a batch that returns (x, y), where the loader gives something else.
        settings: of `FitSettings`: `optimizer`, `momentum`, `lr`, `log_sigma_lr_multiplier`, `schedule`, `milestones`
            and `warmup_epochs`.

    >>> import varlap
    >>> module = LightningBNN(varlap.BNN(torch.nn.Linear(2, 3)), varlap.VL(num_data=64, beta=0.1), lr=1e-2)
    >>> module.settings.schedule, module(torch.ones(4, 2)).shape
    ('cosine', torch.Size([4, 3]))
    """

    def __init__(
        self,
        bnn: BNN,
        objective: Objective,
        *,
        configure: Callable[[BNN], Any] | None = None,
        split: Split | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if not isinstance(bnn, BNN) or not isinstance(objective, Objective):
            given = ", ".join(type(argument).__name__ for argument in (bnn, objective))
            raise ConfigError(
                f"LightningBNN needs a BNN and an objective, got {given}: "
                "LightningBNN(varlap.BNN(network), varlap.VL(...))"
            )
        for name in settings:
            if name in ELSEWHERE:
                raise ConfigError(f"LightningBNN({name}=...) is Lightning's to decide: {ELSEWHERE[name]}")
        if configure is not None and settings:
            raise ConfigError(
                f"LightningBNN(configure=...) makes the optimizer by itself; leave out {', '.join(settings)}"
            )
        self.bnn, self.objective = bnn, objective
        objective.prepare_for(bnn)
        self.settings = FitSettings.of({"epochs": 10**9, **settings})  # how many there are, the Trainer says later
        self._configure, self._split = configure, split
        self._scores: dict[int, Scores] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network at the means."""
        return self.bnn(*args, **kwargs)

    # -- training -----------------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch; its draws follow from the seed, the optimizer's step, micro-batch and rank."""
        x, y = self._pair(batch)
        micro_batch = batch_idx % self.trainer.accumulate_grad_batches
        terms = self.objective(self.bnn, x, y, step=self.trainer.global_step, micro_batch=micro_batch)
        values = {name: getattr(terms, name) for name in ("elbo", "log_likelihood", "curvature", "kl")}
        size = tree.leading_size(y)
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=size, sync_dist=self.trainer.world_size > 1)
        self.log("loss", terms.loss.detach(), on_step=True, on_epoch=False, prog_bar=True, batch_size=size)
        if self.trainer.world_size == 1:
            return terms.loss
        # Data-parallel training waits for the gradient of every parameter, also where log σ has none.
        return terms.loss + sum(0.0 * log_sigma.sum() for log_sigma in self.bnn.log_sigma.parameters())

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Take the optimizer's step; then average what the ranks remember, and set variances in closed form."""
        super().optimizer_step(*args, **kwargs)
        remembered = [t for running in self.objective.running_means().values() for t in running.sums.values()]
        if self.trainer.world_size > 1 and remembered:
            world = World(self.trainer.global_rank, self.trainer.world_size, self.bnn.device)
            world.average(remembered, weight=1 / world.size)
        self.objective.update_variances(self.bnn)

    def on_train_epoch_end(self) -> None:
        """Log the distribution of σ/s, as `fit` does; learning rates are for Lightning's `LearningRateMonitor`."""
        self.log_dict(describe_variances(self.bnn), sync_dist=self.trainer.world_size > 1)

    def configure_optimizers(self) -> Any:
        """Make `fit`'s optimizer and schedule, over as many steps as the Trainer will take."""
        if self._configure is not None:
            return self._configure(self.bnn)
        settings = self.settings
        # In mixed precision Lightning refuses to clip the gradients of a fused optimizer.
        optimizer = make_optimizer(self.bnn, settings, fused=not self.trainer.gradient_clip_val)
        if settings.schedule == "constant" and not settings.warmup_epochs:
            return optimizer
        total = self.trainer.estimated_stepping_batches
        if not 0 < total < math.inf:
            raise ConfigError(
                f"schedule={settings.schedule!r} needs an end of the training: Trainer(max_epochs=...) or max_steps, "
                "or LightningBNN(..., schedule='constant')"
            )
        per_epoch = math.ceil(self.trainer.num_training_batches / self.trainer.accumulate_grad_batches)
        chosen = {name: getattr(settings, name) for name in OWN_SETTINGS}
        known = FitSettings(epochs=max(1, round(total / per_epoch)), **chosen)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: known.lr_factor(step / total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # -- scores and predictions ---------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Begin to score."""
        self._scores = {}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:  # noqa: ARG002
        """Score a batch by the mean network."""
        x, y = self._pair(batch)
        if dataloader_idx not in self._scores:
            self._scores[dataloader_idx] = Scores(VALIDATION_SCORES)
        self._scores[dataloader_idx].add(self.bnn.predict(x), y)

    def on_validation_epoch_end(self) -> None:
        """Log NLL, accuracy and calibration error, or RMSE, of all ranks' items."""
        self._log_scores("validation")

    def on_test_epoch_start(self) -> None:
        """Begin to score."""
        self._scores = {}

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Score a batch by the mean network."""
        self.validation_step(batch, batch_idx, dataloader_idx)

    def on_test_epoch_end(self) -> None:
        """Log the same scores for test data."""
        self._log_scores("test")

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Return what the mean network predicts: `probs`, or `mean` and `variance`.

        A batch is inputs alone, as a tensor or the (x,) of a TensorDataset, or a pair whose targets are not read.
        """
        prediction = self.bnn.predict(inputs_of(batch) if self._split is None else self._pair(batch)[0])
        found = {name: getattr(prediction, name) for name in ("probs", "mean", "variance")}
        return {name: value for name, value in found.items() if value is not None}

    def _log_scores(self, stage: str) -> None:
        for number, scores in self._scores.items():
            if self.trainer.world_size > 1:
                scores.gather()
            suffix = f"/{number}" if len(self._scores) > 1 else ""
            # Each rank has the scores of all, so that averaging them again would change nothing.
            found = {f"{stage}_{name}{suffix}": value for name, value in scores.compute().items()}
            self.log_dict(found, prog_bar=number == 0, sync_dist=self.trainer.world_size > 1)

    # -- what is checked, saved and loaded ----------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Refuse what cannot work before anything runs; have each checkpoint saved as a model too."""
        if stage == "fit" and self.trainer.precision not in PRECISIONS:
            raise ConfigError(
                f"Trainer(precision={self.trainer.precision!r}): log σ needs single precision, and half-precision "
                "gradients would underflow before a scaler sees them; choose '32-true', 'bf16-mixed' or '64-true'"
            )
        strategy = self.trainer.strategy
        # DeepSpeed's is a subclass of DDP's, but has its own backward pass and keeps parts of the state on each rank.
        if isinstance(strategy, DeepSpeedStrategy) or not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
            raise ConfigError(
                f"{type(strategy).__name__} shards or moves the weights, which then have no second derivative; choose "
                "Trainer(strategy='ddp')"
            )
        own = strategy.checkpoint_io
        strategy.checkpoint_io = ModelBeside(own.inner if isinstance(own, ModelBeside) else own, self.bnn)

    def on_train_start(self) -> None:
        """Check `num_data`, and tell the loggers what is trained."""
        data = getattr(self.trainer.train_dataloader, "dataset", None)
        num_items = len(data) if data is not None and hasattr(data, "__len__") else 0
        if self.objective.num_data < num_items:
            raise BatchError(
                f"the training data have {num_items} items but the objective's num_data={self.objective.num_data}"
            )
        spec = spec_of(self.bnn, self.objective, self.settings, {"num_items": num_items})
        chosen = {name: spec["settings"][name] for name in OWN_SETTINGS} if self._configure is None else {}
        for logger in self.trainer.loggers:
            logger.log_hyperparams({"objective": spec["objective"], **chosen, "model": spec["model"]})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what the objective remembers."""
        checkpoint[STATE] = {"objective": type(self.objective).__name__, "state": self.objective.state_dict()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over what the objective remembered."""
        saved = checkpoint.get(STATE, {})
        try:
            if saved["objective"] != type(self.objective).__name__:
                raise ValueError(f"it was trained by {saved['objective']}")
            self.objective.load_state_dict(saved["state"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the checkpoint does not fit {type(self.objective).__name__} ({error}); give the objective that it "
                "was trained with, or only its model: varlap.load(path, network)"
            ) from error

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        pair = batch if self._split is None else self._split(batch)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise BatchError(
                f"a batch is a {type(pair).__name__}, not a pair (x, y); have the data set return (x, y), or pass "
                "LightningBNN(..., split=lambda batch: (x, y))"
            )
        return pair[0], pair[1]


class ModelBeside(CheckpointIO):
    """Writes a folder for `varlap.load` beside each checkpoint that Lightning writes, and removes it with it.

    Lightning's file is a pickle, which can run code when it is read; the folder holds the same weights in a format
    that cannot, each file with its SHA-256. Where checkpoints go to another machine (`s3://...`) there is no folder.
    """

    def __init__(self, inner: CheckpointIO, bnn: BNN) -> None:
        self.inner, self._bnn = inner, bnn

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save both."""
        self.inner.save_checkpoint(checkpoint, path, storage_options=storage_options)
        folder, prefix = _folder_of(path), "bnn."
        if folder is not None:
            tensors = {n.removeprefix(prefix): t for n, t in checkpoint["state_dict"].items() if n.startswith(prefix)}
            save_tensors(folder, tensors, describe(self._bnn))

    def remove_checkpoint(self, path: Any) -> None:
        """Remove both."""
        self.inner.remove_checkpoint(path)
        folder = _folder_of(path)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load Lightning's file."""
        return self.inner.load_checkpoint(*args, **kwargs)

    def teardown(self) -> None:
        """Let the other finish."""
        self.inner.teardown()


def _folder_of(path: Any) -> Path | None:
    return None if "://" in str(path) else beside(Path(path))
