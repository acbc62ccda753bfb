"""Lightning trains to the bits of `fit`, resumes exactly, scores as `evaluate` does, and refuses what cannot work."""

import csv
import logging
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import varlap
from varlap.errors import BatchError, CheckpointError, ConfigError, NonFiniteError
from varlap.integrations.lightning import FitSampler, LightningBNN

lightning = pytest.importorskip("lightning.pytorch")
from lightning.pytorch import Trainer  # noqa: E402
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy  # noqa: E402

NUM_ITEMS = 48


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Softplus(), nn.Dropout(0.1), nn.Linear(8, 3)
    return nn.Sequential(*layers)


def make_data(seed: int = 1) -> TensorDataset:
    x = torch.randn(NUM_ITEMS, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))


def train_loader(batch_size: int = 16, seed: int = 0) -> DataLoader:
    data = make_data()
    return DataLoader(data, batch_size=batch_size, sampler=FitSampler(data, seed))


def make_trainer(folder: Path, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"max_epochs": 3, "logger": False, "enable_checkpointing": False} | options
    return Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        **settings,
    )


def noted(objective: Any) -> list[tuple[float, float, float]]:
    """Note the terms of every evaluation."""
    original, terms = objective.value_and_gradients, []

    def value_and_gradients(context: Any) -> Any:
        found = original(context)
        terms.append((float(found.log_likelihood), float(found.curvature), float(found.kl)))
        return found

    objective.value_and_gradients = value_and_gradients
    return terms


OBJECTIVES = {
    "VL": lambda: varlap.VL(NUM_ITEMS, 0.1, seed=3),
    "VL exact": lambda: varlap.VL(NUM_ITEMS, 0.1, curvature=varlap.Fisher()),
    "VL closed-form": lambda: varlap.VL(NUM_ITEMS, 0.1, variances="closed-form", beta_warmup_steps=4),
    "VI": lambda: varlap.VI(NUM_ITEMS, 0.1),
    "MAP": lambda: varlap.MAP(NUM_ITEMS, 0.1),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_weights_are_those_of_fit_to_the_bit(name: str, tmp_path: Path):
    ours, theirs = varlap.BNN(network()), varlap.BNN(network())
    objective, other = OBJECTIVES[name](), OBJECTIVES[name]()
    of_fit, of_lightning = noted(objective), noted(other)
    varlap.fit(ours, objective, make_data().tensors, epochs=3, batch_size=16, seed=5, lr=1e-2, progress="none")
    make_trainer(tmp_path).fit(LightningBNN(theirs, other, lr=1e-2), train_loader(seed=5))
    assert len(of_fit) == 9
    assert of_lightning == of_fit
    for key, tensor in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[key], tensor), key


def test_a_last_batch_with_fewer_items_is_that_of_fit(tmp_path: Path):
    ours, theirs = varlap.BNN(network()), varlap.BNN(network())
    varlap.fit(ours, varlap.VL(NUM_ITEMS), make_data().tensors, epochs=2, batch_size=20, progress="none")
    make_trainer(tmp_path, max_epochs=2).fit(LightningBNN(theirs, varlap.VL(NUM_ITEMS)), train_loader(20))
    assert torch.equal(ours.network[0].weight, theirs.network[0].weight)


def test_accumulation_clipping_schedule_and_optimizer_are_those_of_fit(tmp_path: Path):
    ours, theirs = varlap.BNN(network()), varlap.BNN(network())
    chosen = {"optimizer": "AdamW", "lr": 0.03, "schedule": "milestones", "milestones": (0.5,), "warmup_epochs": 1.5}
    varlap.fit(
        ours,
        varlap.VL(NUM_ITEMS, 0.1),
        make_data().tensors,
        epochs=4,
        batch_size=24,
        accumulate=2,
        clip_norm=0.1,
        progress="none",
        **chosen,
    )
    trainer = make_trainer(tmp_path, max_epochs=4, accumulate_grad_batches=2, gradient_clip_val=0.1)
    trainer.fit(LightningBNN(theirs, varlap.VL(NUM_ITEMS, 0.1), **chosen), train_loader(12))
    assert trainer.global_step == 8
    for key, tensor in ours.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[key], tensor, rtol=1e-6, atol=1e-6)


def test_bfloat16_is_that_of_fit(tmp_path: Path):
    ours, theirs, single = (varlap.BNN(network()) for _ in range(3))
    data = make_data().tensors
    varlap.fit(ours, varlap.VL(NUM_ITEMS), data, epochs=3, batch_size=16, precision="bf16", progress="none")
    varlap.fit(single, varlap.VL(NUM_ITEMS), data, epochs=3, batch_size=16, progress="none")
    make_trainer(tmp_path, precision="bf16-mixed").fit(LightningBNN(theirs, varlap.VL(NUM_ITEMS)), train_loader())
    assert torch.equal(ours.network[0].weight, theirs.network[0].weight)
    assert not torch.equal(single.network[0].weight, theirs.network[0].weight)
    assert theirs.log_sigma["0.weight"].dtype == torch.float32


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_clipping_in_bfloat16_is_that_of_fit(tmp_path: Path, optimizer: str):
    ours, theirs = varlap.BNN(network()), varlap.BNN(network())
    options = {"epochs": 3, "batch_size": 16, "precision": "bf16", "clip_norm": 0.1, "progress": "none"}
    varlap.fit(ours, varlap.VL(NUM_ITEMS), make_data().tensors, optimizer=optimizer, **options)
    trainer = make_trainer(tmp_path, precision="bf16-mixed", gradient_clip_val=0.1)
    trainer.fit(LightningBNN(theirs, varlap.VL(NUM_ITEMS), optimizer=optimizer), train_loader())
    torch.testing.assert_close(theirs.network[0].weight, ours.network[0].weight, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:SGD leaves log σ where it starts")
def test_an_optimizer_and_schedule_of_ones_own_are_used(tmp_path: Path):
    bnn, rates = varlap.BNN(network()), []

    def configure(bnn: varlap.BNN) -> Any:
        optimizer = torch.optim.SGD(bnn.parameter_groups(0.5))
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)]

    class Noted(lightning.Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
            rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    module = LightningBNN(bnn, varlap.VL(NUM_ITEMS), configure=configure)
    make_trainer(tmp_path, max_epochs=2, callbacks=[Noted()]).fit(module, train_loader())
    assert rates == [[0.5, 5.0], [pytest.approx(0.05), pytest.approx(0.5)]]


# -- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["VL", "VL closed-form"])
def test_a_run_carried_on_from_a_checkpoint_ends_with_the_same_bits(name: str, tmp_path: Path):
    keep = ModelCheckpoint(tmp_path / "all", save_top_k=-1, filename="{epoch}")
    whole = varlap.BNN(network())
    make_trainer(tmp_path, max_epochs=4, enable_checkpointing=True, callbacks=[keep]).fit(
        LightningBNN(whole, OBJECTIVES[name]()), train_loader()
    )
    carried_on = varlap.BNN(network())
    make_trainer(tmp_path, max_epochs=4).fit(
        LightningBNN(carried_on, OBJECTIVES[name]()), train_loader(), ckpt_path=tmp_path / "all" / "epoch=1.ckpt"
    )
    for key, tensor in whole.state_dict().items():
        assert torch.equal(carried_on.state_dict()[key], tensor), key


def test_a_checkpoint_loads_in_varlap_to_the_bit_and_old_ones_go_with_their_models(tmp_path: Path):
    keep = ModelCheckpoint(tmp_path, filename="{epoch}", save_last="link", monitor="validation_nll", save_top_k=1)
    bnn = varlap.BNN(network(), select="4.*")
    data = make_data()
    trainer = make_trainer(tmp_path, max_epochs=4, enable_checkpointing=True, callbacks=[keep])
    trainer.fit(LightningBNN(bnn, varlap.VL(NUM_ITEMS), lr=0.05), train_loader(), DataLoader(data, batch_size=16))
    files = sorted(path.name for path in tmp_path.iterdir())
    best = Path(keep.best_model_path)
    assert files == [best.name, f"{best.stem}.model", "last.ckpt"]
    for path in (best, tmp_path / "last.ckpt", tmp_path / f"{best.stem}.model"):
        again = varlap.load(path, network())
        assert list(again.means()) == ["4.weight", "4.bias"]
        saved = torch.load(best, weights_only=True)["state_dict"]
        for key, tensor in again.state_dict().items():
            assert torch.equal(tensor, saved[f"bnn.{key}"]), key
    scores = varlap.evaluate(varlap.load(best, network()), data.tensors)
    assert scores["nll"] == pytest.approx(float(keep.best_model_score), rel=1e-6)


def test_a_checkpoint_in_the_same_place_replaces_the_model(tmp_path: Path):
    bnn = varlap.BNN(network())
    trainer = make_trainer(tmp_path)
    trainer.fit(LightningBNN(bnn, varlap.VL(NUM_ITEMS)), train_loader())
    for value in (1.0, 2.0):
        with torch.no_grad():
            bnn.network[0].weight.fill_(value)
        trainer.save_checkpoint(tmp_path / "v0.5")  # a name without the usual end
    assert varlap.load(tmp_path / "v0.5", network()).network[0].weight[0, 0] == 2


def test_lightnings_own_way_to_load_restores_weights_and_memory(tmp_path: Path):
    bnn, objective = varlap.BNN(network()), OBJECTIVES["VL closed-form"]()
    trainer = make_trainer(tmp_path)
    trainer.fit(LightningBNN(bnn, objective), train_loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = OBJECTIVES["VL closed-form"]()
    again = LightningBNN.load_from_checkpoint(tmp_path / "a.ckpt", bnn=varlap.BNN(network()), objective=other)
    assert torch.equal(again.bnn.log_sigma["0.weight"], bnn.log_sigma["0.weight"])
    for name, total in objective.state_dict()["variance_fisher"].items():
        assert torch.equal(other.state_dict()["variance_fisher"][name], total), name
    assert other.last_step == objective.last_step == 8
    with pytest.raises(CheckpointError, match=r"does not fit MAP \(it was trained by VL\); give the objective that"):
        LightningBNN.load_from_checkpoint(tmp_path / "a.ckpt", bnn=bnn, objective=varlap.MAP(NUM_ITEMS))
    exact = varlap.VL(NUM_ITEMS, variances="closed-form", beta_warmup_steps=0, curvature=varlap.Fisher())
    torch.save(torch.load(tmp_path / "a.ckpt", weights_only=True) | {"varlap": {}}, tmp_path / "b.ckpt")
    with pytest.raises(CheckpointError, match="does not fit VL"):
        LightningBNN.load_from_checkpoint(tmp_path / "b.ckpt", bnn=bnn, objective=exact)


def test_a_pickle_without_its_model_is_refused_unread(tmp_path: Path):
    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "code ran",)

    torch.save({"state_dict": Trap()}, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"a\.ckpt is a file, which varlap does not read.*\(a\.model\)"):
        varlap.load(tmp_path / "a.ckpt", network())
    assert not (tmp_path / "code ran").exists()


# -- what is logged -------------------------------------------------------------------------------------------------


def test_epochs_are_logged_by_the_names_and_with_the_values_of_fit(tmp_path: Path):
    ours, theirs = varlap.BNN(network()), varlap.BNN(network())
    data = make_data()
    history = varlap.fit(
        ours,
        varlap.VL(NUM_ITEMS, 0.1),
        data.tensors,
        validation=make_data(2).tensors,
        epochs=3,
        batch_size=20,
        progress="none",
    )
    logger = CSVLogger(tmp_path, name="logs")
    trainer = make_trainer(tmp_path, logger=logger, callbacks=[LearningRateMonitor()])
    trainer.fit(
        LightningBNN(theirs, varlap.VL(NUM_ITEMS, 0.1)), train_loader(20), DataLoader(make_data(2), batch_size=7)
    )
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    epochs: list[dict[str, float]] = [{} for _ in range(3)]
    for row in rows:
        if row["epoch"]:
            epochs[int(row["epoch"])] |= {name: float(value) for name, value in row.items() if value}
    names = {"elbo", "log_likelihood", "curvature", "kl", "share_at_prior", "sigma_over_s_max"}
    names |= {"validation_nll", "validation_accuracy", "validation_ece"}
    for theirs_row, row in zip(epochs, history.epochs, strict=True):
        assert {n: theirs_row[n] for n in names} == pytest.approx({n: row[n] for n in names}, rel=1e-5, abs=1e-7)
    assert sum(bool(row["loss"]) for row in rows) == 9
    assert "beta: 0.1" in (Path(logger.log_dir) / "hparams.yaml").read_text()


def test_validation_test_and_prediction_are_those_of_the_mean_network(tmp_path: Path):
    bnn, data = varlap.BNN(network()), make_data()
    expected = varlap.evaluate(bnn, data.tensors)
    trainer, module = make_trainer(tmp_path), LightningBNN(bnn, varlap.VL(NUM_ITEMS))
    loader = DataLoader(data, batch_size=7)
    (validated,) = trainer.validate(module, loader, verbose=False)
    for name in ("nll", "accuracy", "ece"):
        assert validated[f"validation_{name}"] == pytest.approx(expected[name], rel=1e-5)
    tested = trainer.test(module, [loader, DataLoader(make_data(2), batch_size=7)], verbose=False)
    found = {name: value for part in tested for name, value in part.items()}
    assert found["test_nll/0"] == pytest.approx(expected["nll"], rel=1e-5)
    assert found["test_nll/1"] == pytest.approx(varlap.evaluate(bnn, make_data(2).tensors)["nll"], rel=1e-5)
    alone = DataLoader(data.tensors[0], batch_size=7), DataLoader(TensorDataset(data.tensors[0]), batch_size=7)
    for inputs in (loader, *alone):
        predictions = trainer.predict(module, inputs)
        assert [list(part) for part in predictions] == [["probs"]] * 7
        joined = torch.cat([part["probs"] for part in predictions])
        torch.testing.assert_close(joined, bnn.predict(data.tensors[0]).probs)


def test_early_stopping_reads_the_validation_nll(tmp_path: Path):
    stop = EarlyStopping("validation_nll", patience=1, min_delta=100.0)
    trainer = make_trainer(tmp_path, max_epochs=50, callbacks=[stop])
    module = LightningBNN(varlap.BNN(network()), varlap.MAP(NUM_ITEMS), schedule="constant")
    trainer.fit(module, train_loader(), DataLoader(make_data(2), batch_size=16))
    assert trainer.current_epoch == 2


def test_regression_with_dicts_and_batches_of_another_form(tmp_path: Path):
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    x = torch.randn(NUM_ITEMS, 4)
    rows = [{"x": row, "label": row.sum(0, keepdim=True)} for row in x]
    bnn = varlap.BNN(Named(), "gaussian")
    module = LightningBNN(
        bnn, varlap.VL(NUM_ITEMS, 0.1), lr=0.02, split=lambda batch: ({"x": batch["x"]}, batch["label"])
    )
    trainer = make_trainer(tmp_path, max_epochs=20)
    trainer.fit(module, DataLoader(rows, batch_size=16), DataLoader(rows, batch_size=16))
    assert float(trainer.callback_metrics["validation_rmse"]) < 1.5
    assert bnn.likelihood.log_noise.item() != 0


def test_the_code_of_the_page_runs_and_validates_on_what_it_does_not_train_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    page = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text()
    monkeypatch.chdir(tmp_path)  # where Lightning writes its checkpoints
    found: dict = {}
    exec(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[0], found)
    assert torch.equal(found["again"].network[-1].weight, found["bnn"].network[-1].weight)
    trainer = found["trainer"]
    assert "validation_nll" in trainer.callback_metrics
    trained, validated = (
        {*map(tuple, loader.dataset.tensors[0].tolist())}
        for loader in (trainer.train_dataloader, trainer.val_dataloaders)
    )
    assert not trained & validated


# -- refusals -------------------------------------------------------------------------------------------------------


def test_what_lightning_decides_is_said_so_and_typos_get_a_hint():
    bnn, objective = varlap.BNN(network()), varlap.VL(NUM_ITEMS)
    with pytest.raises(ConfigError, match=r"LightningBNN\(epochs=\.\.\.\) is Lightning's.*Trainer\(max_epochs="):
        LightningBNN(bnn, objective, epochs=3)
    with pytest.raises(ConfigError, match=r"LightningBNN\(device=\.\.\.\) is Lightning's.*Trainer\(accelerator="):
        LightningBNN(bnn, objective, device="cuda")
    with pytest.raises(ConfigError, match="no setting 'learning_rate'"):
        LightningBNN(bnn, objective, learning_rate=1)
    with pytest.raises(ConfigError, match="needs a BNN and an objective, got Sequential, VL"):
        LightningBNN(bnn.network, objective)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="makes the optimizer by itself; leave out lr"):
        LightningBNN(bnn, objective, configure=varlap.adam, lr=1)


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_precisions_in_which_log_sigma_cannot_follow_are_refused(precision: str, tmp_path: Path):
    module = LightningBNN(varlap.BNN(network()), varlap.VL(NUM_ITEMS))
    with pytest.raises(ConfigError, match=rf"Trainer\(precision='{precision}'\): log σ needs single precision"):
        make_trainer(tmp_path, precision=precision).fit(module, train_loader())


@pytest.mark.parametrize("base", [object, FSDPStrategy, DeepSpeedStrategy], ids=lambda base: base.__name__)
def test_a_strategy_that_shards_is_refused(base: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = LightningBNN(varlap.BNN(network()), varlap.VL(NUM_ITEMS))
    trainer = make_trainer(tmp_path)

    class Sharded(base):
        precision_plugin = trainer.strategy.precision_plugin

        def __init__(self) -> None:
            """Need no library that is not installed."""

    module.trainer = trainer
    monkeypatch.setattr(type(trainer), "strategy", Sharded())
    with pytest.raises(ConfigError, match=r"Sharded shards or moves the weights.*Trainer\(strategy='ddp'\)"):
        module.setup("fit")


def test_bad_data_and_endless_training_are_refused(tmp_path: Path):
    data = make_data()
    with pytest.raises(BatchError, match=r"have 48 items but the objective's num_data=24"):
        make_trainer(tmp_path).fit(LightningBNN(varlap.BNN(network()), varlap.VL(24)), train_loader())
    module = LightningBNN(varlap.BNN(network()), varlap.VL(NUM_ITEMS))
    with pytest.raises(BatchError, match=r"a batch is a Tensor, not a pair \(x, y\); .*split=lambda"):
        make_trainer(tmp_path).fit(module, DataLoader(data.tensors[0], batch_size=8))
    with pytest.raises(ConfigError, match=r"schedule='cosine' needs an end .*schedule='constant'"):
        make_trainer(tmp_path, max_epochs=-1).fit(module, train_loader())
    with pytest.raises(ConfigError, match="FitSampler needs data with at least one item"):
        FitSampler([])


def test_a_nan_ends_the_training_with_the_weights_of_the_step_before(tmp_path: Path):
    x, y = make_data().tensors
    broken = x.clone()
    broken[16:] = float("nan")
    bnn, sound = varlap.BNN(network()), varlap.BNN(network())
    module = LightningBNN(bnn, varlap.VL(NUM_ITEMS), schedule="constant")
    with pytest.raises(NonFiniteError, match="step 1: x holds NaN"):
        make_trainer(tmp_path).fit(module, DataLoader(TensorDataset(broken, y), batch_size=16))
    optimizer = varlap.adam(sound)
    varlap.VL(NUM_ITEMS)(sound.train(), x[:16], y[:16], step=0).loss.backward()
    optimizer.step()
    for key, tensor in sound.state_dict().items():
        assert torch.equal(bnn.state_dict()[key], tensor), key


def test_a_regression_has_its_curvature_before_anything_is_logged():
    module = LightningBNN(varlap.BNN(nn.Linear(2, 1), "gaussian"), varlap.VL(NUM_ITEMS))
    assert module.objective.curvature == varlap.curvature.DEFAULT_FOR_NUMBERS


def test_without_lightning_one_line_names_the_pip_command():
    code = """
import sys
sys.modules["lightning"] = None
import varlap
try:
    import varlap.integrations.lightning
except varlap.errors.MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    expected = (
        "varlap.integrations.lightning needs an optional dependency: pip install '.[lightning]' in the checkout\n"
    )
    assert done.stdout == expected, done.stderr
