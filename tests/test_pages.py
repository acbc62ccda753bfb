"""The pages' code runs, their links lead somewhere, and every page can be found."""

import json
import pkgutil
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAME = re.compile(r"(?<![\w./-])varlap(?:\.[A-Za-z_]\w*)+")  # varlap.fit, but neither src/varlap.x nor x.varlap.y
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@pytest.mark.parametrize("page", ["theory", "gotchas", "coming-from", "which-method", "image-recipe"])
def test_the_code_of_the_page_runs(page: str):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.DOTALL)
    assert blocks
    exec("\n".join(blocks), {"__name__": page})


def _without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def _without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", _without_blocks(text))


def _anchors(page: Path) -> set[str]:
    """Return what headings are called by mkdocs and by GitHub, which agree but for non-ASCII letters."""
    headings = re.findall(r"^#+ (.*)$", _without_blocks(page.read_text()), flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading, flags=re.ASCII).strip().lower() for heading in headings]
    return {re.sub(r"[\s]+", "-", heading) for heading in plain}


def _broken(page: Path, text: str) -> list[str]:
    broken = []
    for link in LINK.findall(_without_code(text)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        if not file.is_file() or (anchor and anchor not in _anchors(file)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_a_heading(page: Path):
    assert _broken(page, page.read_text()) == []


def test_a_broken_link_would_be_found():
    text = "[a](nowhere.md) [b](index.md#nothing) [c](index.md#what-a-prediction-is) `[d](code.md)` [e](https://x.org)"
    assert _broken(ROOT / "docs" / "theory.md", text) == ["nowhere.md", "index.md#nothing"]


def _unknown(text: str) -> list[str]:
    unknown = []
    for name in NAME.findall(text):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            unknown.append(name)
    return unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_of_the_package_that_a_page_writes_exists(page: Path):
    assert _unknown(page.read_text()) == []


def test_a_name_that_is_gone_would_be_found():
    text = "`varlap.fit(bnn)`, `varlap.fitt`, varlap.data.load_uci, varlap.data.load_ucy. See src/varlap.py"
    assert _unknown(text) == ["varlap.fitt", "varlap.data.load_ucy"]


def test_every_page_is_in_the_navigation_once():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]

    def files(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [file for part in parts for file in files(part)]  # type: ignore[union-attr]

    docs = ROOT / "docs"
    assert sorted(files(nav)) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))


@pytest.mark.parametrize("page", ["predictions", "index"])
def test_the_scores_of_six_ways_to_predict_are_those_of_the_results(page: str):
    results = ROOT / "results" / "quality" / "fashion-mnist-10000-predictions.json"
    if not results.is_file():
        pytest.skip("the results are not part of a source distribution")
    summary = json.loads(results.read_text())["summary"]
    names = {"MAP + temperature scaling": "MAP, temperature", "MAP + Laplace": "MAP, Laplace"}
    names |= {"VL + temperature scaling": "VL, temperature", "MAP": "MAP", "VI": "VI", "VL": "VL"}
    table = (ROOT / "docs" / f"{page}.md").read_text().partition("| method | predicts by |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert len(rows) == (6 if page == "predictions" else 4)
    for name, _, *cells in rows:
        scores = summary[names[name]]
        for score in (f"{scores['nll']:.4f}", f"{scores['ood_auroc_entropy']:.3f}"):
            assert score in cells
        if page == "predictions":
            assert f"{scores['ece']:.3f}" in cells
        assert ("ood_auroc_mutual_information" in scores) == (name == "MAP + Laplace")
        if name == "MAP + Laplace":
            assert f"{scores['ood_auroc_mutual_information']:.3f}" in cells


def test_the_page_on_choices_says_how_much_less_noise_the_variance_reduced_gradient_has():
    results = ROOT / "results" / "bench" / "gradient-noise.json"
    if not results.is_file():
        pytest.skip("the results are not part of a source distribution")
    rows = json.loads(results.read_text())["rows"]
    found = {(row["network"], row["batch_size"], row["gradient"]): row for row in rows}
    page = (ROOT / "docs" / "choices.md").read_text()
    told = re.search(r"batches of 128, the noise is ([\d.]+) times less for a small MLP and ([\d.]+) times less", page)
    assert told is not None
    for network, number in zip(("MLP", "PreactResNet-18, width 4"), told.groups(), strict=True):
        held, quiet = (found[network, 128, gradient]["noise"] for gradient in ("held", "quiet"))
        assert f"{held / quiet:.2g}" == number
    mlp = [found["MLP", 128, "quiet"]["norm_of_mean"], *(found["MLP", 128, g]["noise"] for g in ("held", "quiet"))]
    told = re.search(r"norm is ([\d.]+), against a noise of ([\d.]+) with `\"held\"` and ([\d.]+) with", page)
    assert told is not None
    assert [f"{value:.2g}" for value in mlp] == list(told.groups())
