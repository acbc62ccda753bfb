"""A small experiment for the claims about runs and grids, and one that stands in for it, by a clock of its own."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from made_results import made_result
from varlap.errors import NonFiniteError, OutOfTime
from varlap.experiments import Result, RunSpec, Store, run_grid

SPEC = RunSpec(
    "digits", "vl", 0.1, model="mlp", epochs=3, precision="fp32", lr=3e-3, validation=0.2, num_train=300, batch_size=64
)

QUICK = dataclasses.replace(SPEC, method="map", linearised=False)


class Clocked:
    """Stands in for `run`: a run takes as long as it says, by a clock of its own."""

    def __init__(self, seconds: Mapping[float, float], fails: float | None = None) -> None:
        self.now, self.seconds, self.fails, self.limits = 0.0, seconds, fails, []

    def __call__(self, spec: RunSpec, store: Store, *, time_limit_s: float | None, **_: object) -> Result:
        self.limits.append(time_limit_s)
        if spec.beta == self.fails:
            raise NonFiniteError("step 3: the loss is NaN")
        if time_limit_s is not None and self.seconds[spec.beta] > time_limit_s:
            self.now += time_limit_s
            raise OutOfTime(3, saved=True)
        self.now += self.seconds[spec.beta]
        result = made_result("map", spec.beta, data="digits", num_epochs=spec.epochs)
        result = dataclasses.replace(result, spec=spec)
        store.put(result)
        return result


def grid_by_its_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clocked: Clocked, budget_s: float | None, **options
):
    monkeypatch.setattr("varlap.experiments.grid_run.run", clocked)
    specs = [RunSpec("digits", "map", beta, epochs=10) for beta in clocked.seconds]
    return run_grid(specs, Store(tmp_path), budget_s=budget_s, clock=lambda: clocked.now, **options)
