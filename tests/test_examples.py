"""Every example runs by its own command, and learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import varlap

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {
    "lightning_two_processes": "lightning",
    "accelerate_loop": "accelerate",
    "transformer_head_and_adapters": "transformers",
}
LEAST_ACCURACY = {"transformer_head_and_adapters": 0.8}


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_the_example_runs_and_learns(name: str, tmp_path: Path):
    pytest.importorskip(NEEDS.get(name, "varlap"))
    package = str(Path(varlap.__file__).parents[1])  # the one under test, wherever it was installed from
    environment = os.environ | {
        "PYTHONPATH": package,
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    accuracies = re.findall(r"'accuracy': ([\d.]+)", done.stdout)
    assert accuracies, done.stdout
    assert float(accuracies[-1]) > LEAST_ACCURACY.get(name, 0.9)


def test_every_example_says_how_to_run_it():
    for path in EXAMPLES.glob("*.py"):
        assert f"python examples/{path.name}" in path.read_text(), path.name
