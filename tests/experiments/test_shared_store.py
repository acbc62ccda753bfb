"""Several processes may share a store: none computes what another does, and none takes a claim that is held."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import QUICK, SPEC, Clocked, grid_by_its_clock

from made_results import made_result
from varlap.experiments import Result, RunSpec, Store, run_grid
from varlap.experiments.run import RUNNING, claim
from varlap.files import locked


def test_a_run_that_another_process_is_at_is_left_until_that_process_ends(tmp_path: Path):
    store, other = Store(tmp_path), dataclasses.replace(QUICK, beta=0.2, epochs=1)
    spec = dataclasses.replace(QUICK, epochs=1)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), json.dumps(dataclasses.asdict(spec))],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        outcome = run_grid([spec, other], store)
        assert (outcome.left, outcome.num_computed) == ([spec], 1)
        assert store.get(spec) is None
    finally:
        holder.kill()
        holder.wait(60)
    outcome = run_grid([spec, other], store)
    assert (outcome.left, outcome.num_computed) == ([], 1)
    assert not (tmp_path / RUNNING).exists()


HOLD = """
import json, sys, time
from varlap.experiments import RunSpec, Store
from varlap.experiments.run import claim
with claim(RunSpec(**json.loads(sys.argv[2])), Store(sys.argv[1])) as mine:
    print(mine, flush=True)
    time.sleep(600)
"""


def test_a_run_that_another_process_has_finished_meanwhile_is_not_computed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Shared(Clocked):
        """While the first run is at work, another process does the second."""

        def __call__(self, spec: RunSpec, store: Store, **options) -> Result:
            second = RunSpec("digits", "map", 0.1, epochs=10)
            store.put(dataclasses.replace(made_result("map", 0.1, data="digits", num_epochs=10), spec=second))
            return super().__call__(spec, store, **options)

    outcome = grid_by_its_clock(tmp_path, monkeypatch, clocked := Shared({0.01: 1.0, 0.1: 1.0}), budget_s=None)
    assert len(clocked.limits) == 1
    assert (outcome.num_computed, len(outcome.results), outcome.left) == (1, 2, [])


def test_a_run_that_another_process_finishes_after_it_was_left_to_it_is_among_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, second, third = (RunSpec("digits", "map", beta, epochs=10) for beta in (0.01, 0.1, 1.0))

    class Shared(Clocked):
        """While the second run is at work, another process ends the first, and begins the third."""

        def __call__(self, spec: RunSpec, store: Store, **options) -> Result:
            store.put(dataclasses.replace(made_result("map", 0.01, data="digits", num_epochs=10), spec=first))
            theirs.close()
            also_theirs.enter_context(claim(third, store))
            return super().__call__(spec, store, **options)

    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as also_theirs:
        assert theirs.enter_context(claim(first, Store(tmp_path)))
        outcome = grid_by_its_clock(tmp_path, monkeypatch, Shared({0.01: 1.0, 0.1: 1.0, 1.0: 1.0}), budget_s=None)
    assert [result.spec for result in outcome.results] == [first, second]
    assert (outcome.num_computed, outcome.left) == (1, [third])


def test_a_claim_outlives_neither_its_block_nor_a_file_that_was_deleted_under_it(tmp_path: Path):
    store = Store(tmp_path)
    with claim(QUICK, store) as mine:
        assert mine
        with claim(QUICK, store) as again:
            assert not again
        assert (tmp_path / RUNNING / f"{QUICK.key()}.lock").exists()  # who does not have it deletes nothing
        with claim(SPEC, store) as another:
            assert another
    with claim(QUICK, store) as mine:
        assert mine
    assert not (tmp_path / RUNNING).exists()


def test_a_lock_whose_file_was_replaced_is_not_taken_for_the_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened = []

    def delete_before_the_first_lock(path: Path):
        found = locked(path)
        if not opened:
            path.unlink()  # as its former holder does
        opened.append(found)
        return found

    monkeypatch.setattr("varlap.experiments.run.locked", delete_before_the_first_lock)
    with claim(QUICK, Store(tmp_path)) as mine:
        assert mine
        assert [file.closed for file in opened] == [True, False]  # nor is its lock kept
        assert (tmp_path / RUNNING / f"{QUICK.key()}.lock").exists()


def test_a_result_that_another_process_deletes_while_it_is_read_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, results = Store(tmp_path), [made_result("vl", beta) for beta in (0.1, 1.0)]
    for result in results:
        store.put(result)
    original, deleted = Path.read_text, store._path(results[0].spec)

    def read_text(path: Path, *arguments, **options) -> str:
        if path == deleted:
            path.unlink()  # after it was listed
        return original(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert [result.spec for result in store] == [results[1].spec]
    store.put(results[0])
    assert store.get(results[0].spec) is None
