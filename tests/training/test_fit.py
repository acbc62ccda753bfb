"""`fit` trains, repeats itself, and refuses what cannot be right."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import varlap
from varlap import tree
from varlap.errors import BatchError, ConfigError
from varlap.training.source import as_source


def _blobs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(90) % 3
    return torch.randn(90, 2, generator=generator) + 3 * torch.eye(3)[y][:, :2], y


def _fit(**settings):
    torch.manual_seed(0)
    bnn = varlap.BNN(varlap.models.mlp(2, 3, hidden=(8,)))
    history = varlap.fit(bnn, varlap.VL(90, 0.1), _blobs(), **({"epochs": 3, "batch_size": 20, "lr": 1e-2} | settings))
    return bnn, history


def test_fit_improves_the_elbo_and_logs_each_epoch():
    _, history = _fit(epochs=15)
    assert len(history.epochs) == 15
    assert history.epochs[-1]["elbo"] > history.epochs[0]["elbo"] + 0.2
    row = history.epochs[-1]
    assert row["elbo"] == pytest.approx(row["log_likelihood"] - row["curvature"] - 0.1 * row["kl"])


def test_fit_repeats_itself_to_the_bit_and_leaves_the_global_generator_alone():
    first, _ = _fit()
    state = torch.get_rng_state()
    second, _ = _fit()
    for one, other in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    torch.manual_seed(0)
    varlap.BNN(varlap.models.mlp(2, 3, hidden=(8,)))
    assert torch.equal(torch.get_rng_state(), state)


class _DrawsAlways(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input + torch.randn_like(input))


@pytest.mark.parametrize("by_loader", [False, True], ids=["arrays", "loader"])
def test_a_network_that_draws_in_evaluation_mode_leaves_the_global_generator_alone(by_loader: bool):
    bnn, data = varlap.BNN(_DrawsAlways(2, 3)), _blobs()
    train: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), 30) if by_loader else data
    state = torch.get_rng_state()
    varlap.fit(bnn, varlap.VL(90), train, epochs=1, progress="none")
    assert torch.equal(torch.get_rng_state(), state)


def test_augmentation_is_applied_with_a_stream_of_its_own():
    seen = []

    def augment(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if len(x) > 1:  # before the first step, one item is tried
            seen.append(float(torch.rand((), generator=generator)))
        return x + 1

    with_augmentation, _ = _fit(augment=augment)
    without, _ = _fit()
    assert len(seen) == len(set(seen)) == 15
    assert not torch.equal(with_augmentation.network[0].weight, without.network[0].weight)


FORMS = {"arrays": lambda x, y: (x, y), "Dataset": TensorDataset, "batches": lambda x, y: [(x, y)]}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_augmentation_sees_only_what_was_moved_to_the_device(form, monkeypatch):
    moved, seen, move = [], [], tree.to_device

    def moving(part, device):
        copied = move(tree.map_tensors(torch.clone, part), device)  # as one on another device would be
        moved.extend(tensor.untyped_storage().data_ptr() for tensor in tree.tensors(copied))
        return copied

    def augment(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        seen.append(x.untyped_storage().data_ptr() in moved)
        return x

    monkeypatch.setattr(tree, "to_device", moving)
    varlap.fit(varlap.BNN(nn.Linear(2, 3)), varlap.MAP(90), form(*_blobs()), augment=augment, epochs=1, progress="none")
    assert seen == [True, True]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_augmentation_of_any_form_of_data_can_draw_on_the_gpu(form):
    def augment(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=generator, device=generator.device)

    bnn = varlap.BNN(nn.Linear(2, 3).cuda())
    assert varlap.fit(bnn, varlap.MAP(90), form(*_blobs()), augment=augment, epochs=1, progress="none").epochs


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [1, 1, 1]), ("cosine", [1, 0.5, 0]), ("milestones", [1, 0.1, 0.01])],
)
def test_schedules_are_the_papers_and_the_usual_ones(schedule, expected):
    settings = varlap.FitSettings(epochs=200, schedule=schedule)
    assert [settings.lr_factor(progress) for progress in (0.0, 0.5, 1.0)] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, r"fit\(epochs=0\) must be a whole number of at least 1"),
        ({"batch_size": 2.5}, r"fit\(batch_size=2.5\) must be a whole number"),
        ({"milestones": ("a",)}, r"fit\(milestones=\('a',\)\) must be parts of the training, such as \(0\.5, 0\.75\)"),
        ({"schedule": "linear"}, "choose 'constant', 'cosine' or 'milestones'"),
        ({"precision": "fp8"}, "choose 'fp32', 'bf16' or 'fp16'"),
        ({"optimizer": "SGD", "momentum": 1.0}, r"fit\(momentum=1\.0\) must be in \[0, 1\); 0\.9 is usual"),
        ({"momentum": 0.9}, r"fit\(momentum=0\.9\) is SGD's, not Adam's; leave it out"),
        ({"save_pause_s": -1}, r"fit\(save_pause_s=-1\) must be a number of seconds, at least 0"),
        ({"time_limit_s": 0}, r"fit\(time_limit_s=0\) must be a positive number of seconds"),
        (
            {"device": "cpu"},
            r"fit has no setting 'device'; training is where the network is: move it by bnn.to\(device\)",
        ),
        ({"seed": 10**20}, r"fit\(seed=1(0{20})\) must be a whole number from -2\*\*63 to 2\*\*64 - 1"),
        ({"epoch": 3}, "fit has no setting 'epoch'; did you mean 'epochs'"),
        ({"learning_rate": 0.1}, r"fit has no setting 'learning_rate'; did you mean 'lr'\?"),
        ({"random_state": 0}, r"fit has no setting 'random_state'; did you mean 'seed'\?"),
        ({"early_stopping": True}, r"fit has no setting 'early_stopping'; did you mean 'patience'\?"),
        ({"weight_decay": 0.1}, r"no setting 'weight_decay'; the prior does .*: varlap.BNN\(network, prior=...\)"),
        ({"shuffle": True}, "no setting 'shuffle'; arrays and Datasets are shuffled in every epoch"),
        (
            {"optimizer": torch.optim.Adam([torch.zeros(1)])},
            r"^fit\(optimizer=Adam\) must be the name of an optimizer of torch.optim, such as 'Adam' or 'SGD', .* one "
            "that is made already, as by varlap.adam, belongs to a loop of your own$",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(varlap.errors.ConfigError, match=message):
        _fit(**settings)


def test_a_label_out_of_range_anywhere_in_the_data_is_found_before_training():
    x, y = _blobs()
    y[77] = 3
    bnn = varlap.BNN(varlap.models.mlp(2, 3))
    with pytest.raises(varlap.errors.BatchError, match="label 3 is out of range"):
        varlap.fit(bnn, varlap.VL(90), (x, y), epochs=1)


def test_num_data_smaller_than_the_training_set_is_refused():
    bnn = varlap.BNN(varlap.models.mlp(2, 3))
    with pytest.raises(varlap.errors.BatchError, match="90 items but the objective's num_data=50"):
        varlap.fit(bnn, varlap.VL(50), _blobs(), epochs=1)


def test_num_data_larger_than_the_training_set_is_told_of(caplog: pytest.LogCaptureFixture):
    for num_data in (90, 900):
        varlap.fit(varlap.BNN(varlap.models.mlp(2, 3)), varlap.VL(num_data), _blobs(), epochs=1, progress="none")
    assert caplog.text.count("num_data=900, but the training data have 90 items") == 1
    assert "num_data=90," not in caplog.text


def test_a_batch_size_that_is_not_the_loaders_is_refused():
    bnn, loader = varlap.BNN(varlap.models.mlp(2, 3)), DataLoader(TensorDataset(*_blobs()), batch_size=30)
    with pytest.raises(ConfigError, match=r"fit\(batch_size=10\) does not go with a loader that makes batches of 30"):
        varlap.fit(bnn, varlap.VL(90), loader, epochs=1, batch_size=10, progress="none")
    varlap.fit(bnn, varlap.VL(90), loader, epochs=1, batch_size=30, progress="none")


def test_closed_form_variances_are_set_during_fit():
    torch.manual_seed(0)
    bnn = varlap.BNN(varlap.models.mlp(2, 3, hidden=(8,)))
    objective = varlap.VL(90, 0.1, variances="closed-form", beta_warmup_steps=5)
    varlap.fit(bnn, objective, _blobs(), epochs=3, batch_size=20)
    name = "0.weight"
    expected = 0.1 / (90 * objective.running_means()["variance_fisher"].mean()[name] + 0.1 / bnn.prior_scale[name] ** 2)
    torch.testing.assert_close((2 * bnn.log_sigma[name]).exp().detach(), expected)


def test_epoch_values_average_over_items_not_batches():
    torch.manual_seed(0)
    bnn = varlap.BNN(varlap.models.mlp(2, 3, hidden=(8,)))
    x, y = _blobs()
    history = varlap.fit(bnn, varlap.MAP(90, 0.0), (x, y), epochs=1, batch_size=80, lr=1e-12)
    assert history.epochs[0]["log_likelihood"] == pytest.approx(-varlap.evaluate(bnn, (x, y))["nll"], rel=1e-5)


def test_every_form_of_data_is_taken_and_one_of_them_gives_the_same_bits():
    x, y = _blobs()
    results = []
    for train in ((x, y), (x.numpy(), y.numpy()), torch.utils.data.TensorDataset(x, y)):
        torch.manual_seed(0)
        bnn = varlap.BNN(varlap.models.mlp(2, 3))
        varlap.fit(bnn, varlap.VL(90), train, epochs=2, batch_size=20)
        results.append(list(bnn.state_dict().values()))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)
    bnn = varlap.BNN(varlap.models.mlp(2, 3))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=20)
    assert len(varlap.fit(bnn, varlap.VL(90), loader, epochs=2).epochs) == 2


@pytest.mark.parametrize("kept", [True, False])
def test_a_loader_that_shuffles_by_a_generator_of_its_own_is_named_where_the_run_could_be_carried_on(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, kept: bool
):
    data_set = torch.utils.data.TensorDataset(*_blobs())
    loader = torch.utils.data.DataLoader(data_set, batch_size=20, shuffle=True, generator=torch.Generator())
    out = tmp_path / "run" if kept else None
    varlap.fit(varlap.BNN(varlap.models.mlp(2, 3)), varlap.VL(90), loader, epochs=1, out=out)
    assert ("the DataLoader shuffles by a generator of its own, so" in caplog.text) == kept


@pytest.mark.parametrize(("batch_size", "named"), [(20, True), (90, False)])
def test_a_loader_that_never_shuffles_is_named(caplog: pytest.LogCaptureFixture, batch_size: int, named: bool):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*_blobs()), batch_size=batch_size)
    varlap.fit(varlap.BNN(varlap.models.mlp(2, 3)), varlap.VL(90), loader, epochs=1)
    assert ("gives its items in the same order in every epoch" in caplog.text) == named


def test_epochs_are_needed():
    with pytest.raises(varlap.errors.ConfigError, match="fit needs epochs"):
        varlap.fit(varlap.BNN(varlap.models.mlp(2, 3)), varlap.VL(90), _blobs())


# ---- weights ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [12, 5])
def test_weights_reach_the_objective_with_the_items_they_belong_to(batch_size):
    x, y, weights = torch.randn(12, 2).double(), torch.arange(12) % 3, torch.rand(12).double()
    network = nn.Linear(2, 3).double()
    settings = {"epochs": 1, "batch_size": batch_size, "optimizer": "SGD", "momentum": 0, "progress": "none"}
    settings |= {"schedule": "constant"}
    fitted, by_hand = varlap.BNN(copy.deepcopy(network)), varlap.BNN(network)
    varlap.fit(fitted, varlap.MAP(12), (x, y), weights=weights.numpy(), lr=0.1, **settings)
    source = as_source((x, y), batch_size=batch_size, seed=0, device=torch.device("cpu"), weights=weights)
    optimizer = torch.optim.SGD(by_hand.network.parameters(), lr=0.1)
    for step, (x_part, y_part, weights_part) in enumerate(source.epoch(0, 0)):
        matches = (x_part[:, None] == x).all(2).float().argmax(1)
        torch.testing.assert_close(weights_part, weights[matches])
        optimizer.zero_grad()
        varlap.MAP(12)(by_hand, x_part, y_part, step=step, weights=weights_part).loss.backward()
        optimizer.step()
    torch.testing.assert_close(fitted.network.weight, by_hand.network.weight)


def test_weights_are_part_of_what_a_run_is(tmp_path):
    x, y = torch.randn(12, 2), torch.arange(12) % 3
    for weights, refused in ((torch.ones(12), False), (torch.rand(12), True)):
        bnn = varlap.BNN(nn.Linear(2, 3))
        with pytest.raises(ConfigError) if refused else contextlib.nullcontext():
            varlap.fit(bnn, varlap.MAP(12), (x, y), weights=weights, epochs=1, out=tmp_path / "run", progress="none")


def test_weights_that_fit_no_items_are_refused():
    x, y = torch.randn(12, 2), torch.arange(12) % 3
    bnn = varlap.BNN(nn.Linear(2, 3))
    with pytest.raises(BatchError, match=r"fit\(weights=...\) must have shape \(12,\), one per item, got \(11,\)"):
        varlap.fit(bnn, varlap.MAP(12), (x, y), weights=torch.ones(11), epochs=1)
    with pytest.raises(ConfigError, match=r"fit\(weights=...\) goes with a tuple \(x, y\) of arrays.*objective\(bnn"):
        varlap.fit(bnn, varlap.MAP(12), TensorDataset(x, y), weights=torch.ones(12), epochs=1)


def test_a_validation_nll_that_is_no_number_is_never_the_best(monkeypatch, tmp_path):
    nlls = iter([float("nan"), 0.5, 0.4, float("inf"), 0.3])
    scores = lambda *_, **__: {"nll": next(nlls)}  # noqa: E731
    monkeypatch.setattr("varlap.training.loop.evaluate", scores)
    _, history = _fit(epochs=5, validation=_blobs(), patience=2, keep="best", out=tmp_path)
    assert len(history.epochs) == 5, "neither stopped by the NaN nor kept from writing its checkpoints"


def test_validation_may_be_every_few_epochs_and_is_always_after_the_last():
    _, history = _fit(epochs=5, validation=_blobs(), validate_every=2)
    assert ["validation_nll" in row for row in history.epochs] == [False, True, False, True, True]


def test_patience_counts_epochs_however_rarely_they_are_validated(monkeypatch):
    nlls = iter([0.5, 0.6, 0.6, 0.6])
    monkeypatch.setattr("varlap.training.loop.evaluate", lambda *_, **__: {"nll": next(nlls)})
    _, history = _fit(epochs=30, validation=_blobs(), validate_every=3, patience=6)
    assert len(history.epochs) == 9, "the best was after 3"


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.body(x)
        return {"kind": out[:, :2], "size": out[:, 2]}


class _OfBoth(nn.Module):
    def log_prob(self, outputs, targets):
        kind = -nn.functional.cross_entropy(outputs["kind"], targets["kind"], reduction="none")
        return kind - 0.5 * (outputs["size"] - targets["size"]).square()

    def sample(self, outputs, generator, targets=None):
        kind = torch.multinomial(outputs["kind"].softmax(-1), 1, generator=generator)[:, 0]
        return {"kind": kind, "size": outputs["size"] + torch.randn(len(kind), generator=generator)}

    def predict(self, outputs):
        return varlap.Prediction(probs=outputs["kind"].softmax(-1))


def test_targets_in_parts_train_as_arrays_and_as_a_data_set():
    x, y = torch.randn(12, 2), {"kind": torch.arange(12) % 2, "size": torch.randn(12)}
    items = [(x[i], {name: part[i] for name, part in y.items()}) for i in range(12)]
    data_set = type(
        "Items", (torch.utils.data.Dataset,), {"__len__": lambda _: 12, "__getitem__": lambda _, i: items[i]}
    )()
    found = []
    for train in ((x, y), data_set):
        torch.manual_seed(0)
        bnn = varlap.BNN(_TwoHeads(), _OfBoth())
        varlap.fit(bnn, varlap.VL(12), train, epochs=3, batch_size=5, progress="none")
        found.append([parameter.detach() for parameter in bnn.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
