"""What the README and the start page show must run."""

import re
from pathlib import Path

import pytest

from varlap.data import SOURCES

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_example_runs_and_learns(page: str, capsys: pytest.CaptureFixture[str]):
    code = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    assert code is not None
    exec(code.group(1).replace("range(20)", "range(3)"), {})
    scores = re.search(r"'accuracy': ([\d.]+)", capsys.readouterr().out)
    assert scores is not None
    assert float(scores.group(1)) > 0.5


def test_the_run_that_can_be_carried_on_ends_with_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    exec(code.replace("epochs=40", "epochs=1"), {})
    exec(code.replace("epochs=40", "epochs=1"), {})  # again
    assert (tmp_path / "runs" / "mine").is_dir()
    assert (tmp_path / "model").exists()


def test_the_data_page_runs_and_its_table_is_the_catalogue():
    page = (ROOT / "docs" / "data.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert code is not None
    exec(code.group(1), {})
    for name, source in SOURCES.items():
        sizes = f"| {name} | {source.num_train:,} / {source.num_test:,} | {'×'.join(map(str, source.image_shape))} |"
        assert f"{sizes} {source.num_classes} " in page
        assert f"| {source.num_bytes / 1e6:.0f} MB |" in next(row for row in page.splitlines() if row.startswith(sizes))


def test_every_make_target_that_is_mentioned_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    pages = "".join(
        path.read_text() for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
    )
    mentioned = set(re.findall(r"make ([\w-]+)[ `\n]", pages))
    assert {"demo", "test"} <= mentioned
    assert mentioned - {"it", "its"} <= targets
