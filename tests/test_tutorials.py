"""Each tutorial runs, draws the pictures that its page shows, and its page shows all of its code."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples" / "tutorials").glob("*.py"))
MOST_BYTES = 60_000
MARKER = re.compile(r"^# --8<-- \[(start|end):(\w+)\]$")
by_name = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


def _page(script: Path) -> str:
    return (ROOT / "docs" / "tutorials" / f"{script.stem.replace('_', '-')}.md").read_text()


def _pictures(page: str) -> set[str]:
    return set(re.findall(r"\]\(\.\./images/tutorials/([\w-]+\.png)\)", page))


def test_there_are_seven():
    assert len(SCRIPTS) == 7


@by_name
def test_the_page_shows_all_code_of_the_script_in_its_order(script: Path):
    sections: list[str] = []
    inside = None
    code = script.read_text()
    for line in code.partition('"""\n\n')[2].splitlines():  # after the docstring
        if found := MARKER.match(line):
            kind, name = found.groups()
            assert (inside is None) == (kind == "start")
            inside = name if kind == "start" else None
            sections += [name] if kind == "start" else []
        else:
            assert inside is not None or not line, f"not in any section: {line}"
    shown = re.findall(rf'^--8<-- "examples/tutorials/{script.name}:(\w+)"$', _page(script), flags=re.MULTILINE)
    assert shown == sections
    assert len(shown) >= 3


@by_name
def test_the_page_links_its_script_for_those_who_read_it_without_the_site(script: Path):
    (link,) = re.findall(r'<a href="([^"]*)"><code>examples/tutorials/', _page(script))
    assert (ROOT / "docs" / "tutorials" / link).resolve() == script


@by_name
def test_the_script_draws_what_the_page_shows(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    code, num_replaced = re.subn(r"epochs=\d+", "epochs=2", script.read_text())  # quick: it need not learn
    assert num_replaced >= 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    Path("quick.py").write_text(code)
    runpy.run_path("quick.py")
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == _pictures(_page(script))
    assert drawn
    for name in drawn:
        assert 1_000 < (ROOT / "docs" / "images" / "tutorials" / name).stat().st_size < MOST_BYTES
    wanted = _outputs(_page(script))
    printed = capsys.readouterr().out
    assert bool(wanted) == bool(printed)


@pytest.mark.slow
@by_name
def test_the_numbers_on_the_page_are_those_that_the_script_prints(script: Path, tmp_path: Path):
    environment = os.environ | {"MPLBACKEND": "agg", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    printed, claimed = (_numbers(text) for text in (done.stdout, "".join(_outputs(_page(script)))))
    assert claimed
    # Other machines round otherwise, and training carries that on.
    assert printed == pytest.approx(claimed, abs=0.1)


def _outputs(page: str) -> list[str]:
    return re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text)]
