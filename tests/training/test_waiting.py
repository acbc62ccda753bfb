"""Between two steps `fit` does not wait for the device: a GPU that is waited for has nothing to do meanwhile."""

import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import varlap
from varlap.data import crop_and_flip
from varlap.training import loop
from varlap.training.step import TrainingStep

NUM_STEPS = 40
WAITS = ("aten.lift_fresh.default", "aten._local_scalar_dense.default", "aten.nonzero.default")
"""A tensor made of Python numbers, a number read from a tensor, and a shape that depends on values."""


class Waits(TorchDispatchMode):
    """Notes what would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in WAITS:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def _fit(augment: Any, device: str) -> None:
    bnn = varlap.BNN(varlap.models.convnet(1, 10, image_size=8).to(device))
    images, labels = torch.randn(8 * NUM_STEPS, 1, 8, 8), torch.arange(8 * NUM_STEPS) % 10
    settings = {"epochs": 1, "batch_size": 8, "augment": augment, "progress": "none"}
    varlap.fit(bnn, varlap.VL(len(labels), 0.1), (images, labels), **settings)


def test_the_loop_makes_no_tensor_of_numbers_and_reads_none(monkeypatch: pytest.MonkeyPatch):
    # Stands in for a compiled step, which launches its graph and returns.
    monkeypatch.setattr(TrainingStep, "take", lambda self, *_, **__: torch.ones(4))
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_VALUES", 1e9)
    noted: list[list[str]] = []
    waits = Waits()

    def augment(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if len(x) > 1:  # before the first step, one item is tried
            noted.append(waits.seen.copy())
        return crop_and_flip(x, generator, padding=1)

    with waits:
        _fit(augment, "cpu")
    assert len(noted) == NUM_STEPS
    assert noted[1] == noted[-1]  # the first step shows its values


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_steps_on_a_gpu_follow_each_other_without_a_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop, "SECONDS_BETWEEN_VALUES", 1e9)
    num_calls = 0

    def augment(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        nonlocal num_calls
        num_calls += len(x) > 1
        # Compiling waits, and so does the epoch's end.
        torch.cuda.set_sync_debug_mode("warn" if 10 < num_calls < NUM_STEPS else "default")
        return crop_and_flip(x, generator, padding=1)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            _fit(augment, "cuda")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert num_calls == NUM_STEPS
    assert not {f"{w.filename}:{w.lineno}" for w in told if "synchronizing CUDA operation" in str(w.message)}
