"""Claims about what else `fit` does: parts of a batch, clipping, precisions, rates, logs."""

import copy
import gc
import itertools
import json
import logging
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from runs import (
    Stopped,
    at_step,
    fit_small,
    made_bnn,
    made_data,
    made_objective,
    same_bits,
    stop,
)
from torch import nn

import varlap
from varlap.errors import ConfigError
from varlap.training.state import _give_back_types, _lay_out_as_parameters


@pytest.fixture(autouse=True)
def _logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)


def test_early_stopping_keeps_the_best_weights(tmp_path: Path):
    bnn = made_bnn()
    history = fit_small(bnn, validation=made_data(20), epochs=60, patience=3, keep="best", lr=0.1, out=tmp_path)
    nlls = [row["validation_nll"] for row in history.epochs]
    best = min(range(len(nlls)), key=nlls.__getitem__)
    assert len(nlls) == best + 4 < 60
    assert varlap.evaluate(bnn, made_data(20))["nll"] == pytest.approx(nlls[best], rel=1e-6)
    saved = max((tmp_path / "checkpoints").glob("step-*"))
    assert same_bits(varlap.load(saved, made_bnn().network), bnn)


def test_trainings_in_threads_are_those_of_one_after_another():
    """Dropout draws from a generator that all threads of a process share."""

    def trained(seed: int) -> varlap.BNN:
        bnn = bnns[seed]
        fit_small(bnn, seed=seed, augment=None)
        return bnn

    found = []
    for workers in (1, 4):
        bnns = [made_bnn() for _ in range(4)]
        before = torch.get_rng_state()
        with ThreadPoolExecutor(workers) as threads:
            found.append(list(threads.map(trained, range(4))))
        assert torch.equal(torch.get_rng_state(), before)
    assert all(itertools.starmap(same_bits, zip(*found, strict=True)))


def test_best_weights_need_validation_data():
    with pytest.raises(ConfigError, match="need validation data"):
        fit_small(made_bnn(), keep="best")


def test_parts_of_a_batch_add_up_to_its_gradient():
    results = []
    for accumulate in (1, 4):
        torch.manual_seed(0)
        bnn = varlap.BNN(varlap.models.mlp(4, 3).double())
        x, y = made_data(10)
        step = varlap.TrainingStep(bnn, varlap.MAP(37, 0.1), varlap.adam(bnn, 1e-9), accumulate=accumulate)
        values = step(x.double(), y, number=0)
        results.append([values, *(p.grad for p in bnn.parameters() if p.grad is not None)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_each_part_of_a_batch_draws_its_own_labels():
    bnn, drawn = made_bnn(), []
    sample = bnn.likelihood.sample
    bnn.likelihood.sample = lambda outputs, generator, targets=None: (
        drawn.append(generator.initial_seed()) or sample(outputs, generator, targets)
    )
    fit_small(bnn, objective=made_objective(curvature=varlap.Fisher()), epochs=1, accumulate=4)
    assert len(drawn) == len(set(drawn)) == 4 * 4 + 2  # parts of a smaller last batch have two items or more


def test_large_gradients_are_clipped_together():
    bnn = made_bnn()
    step = varlap.TrainingStep(bnn, made_objective(), torch.optim.Adam(bnn.parameter_groups(1e-6)), clip_norm=0.01)
    step(*made_data(10), number=0)
    norm = torch.stack([p.grad.norm() for p in bnn.parameters() if p.grad is not None]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-4)


def test_a_scale_of_the_gradients_changes_nothing_but_their_range():
    results = []
    for scale in (1.0, 1024.0):
        bnn, objective = made_bnn().double().train(), made_objective(curvature=varlap.Fisher())
        objective.gradient_scale = scale
        x, y = made_data(10)
        objective(bnn, x.double(), y, step=0).loss.backward()
        results.append([p.grad for p in bnn.parameters() if p.grad is not None])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def test_half_precision_trains_like_single_and_is_carried_on(tmp_path: Path):
    single, half, carried_on = made_bnn(), made_bnn(), made_bnn()
    expected = fit_small(single).epochs
    rows = fit_small(half, precision="fp16").epochs
    assert [row["elbo"] for row in rows] == pytest.approx([row["elbo"] for row in expected], rel=0.05)
    with pytest.raises(Stopped):
        fit_small(made_bnn(), at_step(11, stop), out=tmp_path, precision="fp16", save_every=1)
    fit_small(carried_on, out=tmp_path, precision="fp16", save_every=1)
    assert same_bits(half, carried_on)
    assert not same_bits(half, single)


def test_a_scale_halves_where_gradients_overflow_and_grows_again():
    bnn = made_bnn()
    step = varlap.TrainingStep(bnn, made_objective(), varlap.adam(bnn), precision="fp16")
    step.gradient_scale.value = 2.0**40  # far beyond half precision
    step(*made_data(10), number=0)
    assert 1 < step.gradient_scale.value < 2.0**40
    value = step.gradient_scale.value
    step.gradient_scale.num_sound = 999
    step(*made_data(10), number=1)
    assert step.gradient_scale.value == min(2 * value, 2.0**16)


def test_the_rate_rises_over_the_warm_up():
    settings = varlap.FitSettings(epochs=10, warmup_epochs=2, schedule="constant")
    assert [settings.lr_factor(progress) for progress in (0.0, 0.1, 0.2, 0.9)] == pytest.approx([0, 0.5, 1, 1])


def test_each_epoch_logs_rates_variances_and_memory_to_every_logger(tmp_path: Path):
    logged = []

    class Logger:
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            logged.append((step, metrics))

    history = fit_small(made_bnn(), out=tmp_path, loggers=[Logger()], validation=made_data(20))
    assert [step for step, _ in logged] == [5, 10, 15, 20]
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == history.epochs
    row = history.epochs[-1]
    assert row["lr_log_sigma"] == pytest.approx(10 * row["lr"])
    assert row["log_sigma_over_s_q05"] <= row["log_sigma_over_s_median"] <= row["log_sigma_over_s_q95"]
    assert 0 <= row["share_at_prior"] <= 1
    assert row["memory_mb"] > 0
    assert {"validation_nll", "validation_accuracy", "validation_ece"} <= row.keys()


def test_only_the_newest_checkpoints_stay(tmp_path: Path):
    fit_small(made_bnn(), out=tmp_path, save_every=2, num_checkpoints=3)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [f"step-{step:012d}" for step in (16, 18, 20)]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory in use from /proc")
def test_many_short_epochs_do_not_grow_in_memory_or_time():
    memory, clock = [], []

    class Resident:
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            clock.append(time.process_time())  # of this process alone, whatever else the machine does
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            memory.append(pages * resource.getpagesize() / 2**20)

    fit_small(made_bnn(), epochs=200, loggers=[Resident()])
    seconds = [after - before for before, after in itertools.pairwise(clock)]
    early, late = sorted(seconds[20:60]), sorted(seconds[159:])
    assert len(memory) == 200
    assert memory[-1] - memory[20] < 5
    assert late[len(late) // 4] < 3 * early[len(early) // 4]


def test_a_few_kills_leave_a_run_that_ends_with_the_same_bits():
    script = Path(__file__).parents[2] / "benchmarks" / "kills.py"
    subprocess.run([sys.executable, str(script), "--kills", "2"], check=True, capture_output=True, timeout=300)


def test_a_carried_on_optimizer_keeps_the_precision_of_what_it_remembers():
    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.NAdam([nn.Parameter(torch.ones(2, dtype=torch.float64))])

    first, again = optimizer(), optimizer()
    first.param_groups[0]["params"][0].sum().backward()
    first.step()
    saved = copy.deepcopy(first.state_dict())
    again.load_state_dict(saved)
    (own,) = again.state.values()
    assert own["mu_product"].dtype == torch.float64  # torch's cast, which loses nothing but rounds otherwise from here
    _give_back_types(again, saved["state"])
    for name, value in saved["state"][0].items():
        assert own[name].dtype == value.dtype
        assert torch.equal(own[name], value)


def test_training_works_whatever_the_default_type_is():
    torch.set_default_dtype(torch.float64)
    try:
        bnn = varlap.BNN(nn.Linear(2, 3))
        history = varlap.fit(bnn, varlap.VL(12), (torch.randn(12, 2), torch.arange(12) % 3), epochs=1, progress="none")
    finally:
        torch.set_default_dtype(torch.float32)
    assert history.epochs[0]["log_sigma_over_s_median"] == pytest.approx(-3.0, abs=0.1)


def test_a_carried_on_optimizer_keeps_its_step_and_moments_on_the_device_they_were_loaded_to():
    """A parameter that is a number has the shape of Adam's step, which must stay on the CPU without `capturable`."""
    parameter = nn.Parameter(torch.zeros((), device="meta"))  # stands for another device
    optimizer = torch.optim.Adam([parameter])
    loaded = {"step": torch.tensor(3.0), "exp_avg": torch.tensor(2.0, dtype=torch.float64)}
    optimizer.state[parameter] = dict(loaded)
    _lay_out_as_parameters(optimizer)
    assert optimizer.state[parameter]["step"] is loaded["step"]
    assert optimizer.state[parameter]["exp_avg"].device == torch.device("cpu")
    assert torch.equal(optimizer.state[parameter]["exp_avg"], loaded["exp_avg"])
