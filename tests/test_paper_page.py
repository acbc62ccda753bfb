"""The page that maps equations to code and tests must not promise what does not exist."""

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "paper.md").read_text()


def _exists(dotted: str) -> bool:
    module, _, name = dotted.rpartition(".")
    return hasattr(importlib.import_module(module), name)


def test_every_function_on_the_page_exists():
    names = re.findall(r"`(varlap\.[\w.]+)`", PAGE)
    assert len(names) > 20
    assert [name for name in names if not _exists(name)] == []


def test_every_test_on_the_page_exists():
    names = re.findall(r"`(test_\w+)`", PAGE)
    assert len(names) > 20
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in names if f"def {name}(" not in written] == []


def test_every_equation_of_the_paper_has_its_row():
    covered: set[int] = set()
    for cell in re.findall(r"^\| (\d[\d, -]*) \|", PAGE, flags=re.MULTILINE):
        for part in cell.split(","):
            first, _, last = part.strip().partition("-")
            covered |= set(range(int(first), int(last or first) + 1))
    assert covered == set(range(1, 34))


def test_every_public_name_is_in_the_reference():
    reference = (ROOT / "docs" / "reference.md").read_text().splitlines()
    assert [name for name in importlib.import_module("varlap").__all__ if f"::: varlap.{name}" not in reference] == []
