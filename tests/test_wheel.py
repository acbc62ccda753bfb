"""What is built installs into an empty environment and works there, from files of the wheel alone."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*arguments: object, folder: Path, timeout: float = 900) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VARLAP_DATA")}
    done = subprocess.run(
        [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from it."""
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, folder=out)
    return out


@pytest.mark.slow
def test_wheel_and_sdist_hold_every_file_of_the_package(built: Path):
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    files = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src" / "varlap").rglob("*") if p.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert "varlap/py.typed" in files
    assert {name.rpartition(".")[2] for name in files} >= {"py", "toml", "css"}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if not re.match(r"varlap-[^/]*/", name)}
    assert packed == files
    with tarfile.open(sdist) as archive:
        unpacked = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in files} <= unpacked
    assert {"README.md", "LICENSE", "pyproject.toml", "examples/accelerate_loop.py"} <= unpacked


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(built: Path, tmp_path: Path):
    (wheel,) = built.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    python, varlap = tmp_path / "venv" / "bin" / "python", tmp_path / "venv" / "bin" / "varlap"
    constraints = ROOT / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", constraints, f"{wheel}[sklearn]", folder=tmp_path)

    readme = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert readme is not None
    printed = run(python, "-c", readme.group(1), folder=tmp_path)
    scores = re.search(r"'accuracy': ([\d.]+)", printed)
    assert scores is not None
    assert float(scores.group(1)) > 0.9

    demo = json.loads(run(varlap, "demo", "--epochs", "2", "--json", folder=tmp_path))
    assert "VL" in str(demo["methods"])
    train = run(varlap, "train", "digits", "--epochs", "1", "--json", "--out", "runs/a", folder=tmp_path)
    assert json.loads(train)["test"]["nll"] > 0
    assert "Example: varlap train" in run(varlap, "train", "--help", folder=tmp_path)

    code = """
import varlap
try:
    import varlap.integrations.lightning
except ImportError as error:
    print(error)
"""
    assert "pip install '.[lightning]' in the checkout" in run(python, "-c", code, folder=tmp_path)
