"""The site builds strictly; in a real browser it fits a phone and a desktop, asks nothing of the network."""

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import CHROMIUM, Page, browser

pytest.importorskip("mkdocs", reason="the site needs the dependency group docs")
pytest.importorskip("material", reason="the site needs the dependency group docs")
ROOT = Path(__file__).parent.parent
MAIN = ("index", "which-method", "theory", "gotchas", "tutorials/regression")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; install Debian's package chromium")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as found:
        yield found


def test_the_tutorials_show_their_code_and_pictures(site: Path):
    for name in ("regression", "digits", "two-moons", "fine-tuning", "own-likelihood", "out-of-distribution"):
        html = (site / "tutorials" / f"{name}.html").read_text()
        assert "8&lt;--" not in html
        assert "--8<--" not in html
        assert "varlap" in re.sub(r"<[^>]*>", "", html.partition('class="highlight"')[2])
        assert f"images/tutorials/{name}.png" in html


def _check(page: Page, address: str, name: str, width: int) -> None:
    page.complaints.clear()
    page.requests.clear()
    page.show(f"{address}/{name}.html", width, dark=width < 500)
    assert page.value("innerWidth") == width
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    assert page.value("document.body.scrollWidth <= innerWidth")
    assert page.value("document.querySelector('h1').innerText.length > 3")
    # Pictures below the fold are loaded when they are scrolled to.
    page.value("document.querySelectorAll('img').forEach(one => one.loading = 'eager')")
    assert page.value("[...document.images].every(one => one.getBoundingClientRect().right <= innerWidth)")
    assert page.complaints == []
    assert [one for one in page.requests if not one.startswith((address, "data:", "blob:"))] == []


@in_a_browser
@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("name", MAIN)
def test_a_main_page_fits_and_asks_for_nothing_elsewhere(page: Page, address: str, name: str, width: int):
    _check(page, address, name, width)


@in_a_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [375, 1280])
def test_every_page_fits_and_asks_for_nothing_elsewhere(page: Page, address: str, site: Path, width: int):
    names = [str(path.relative_to(site).with_suffix("")) for path in sorted(site.rglob("*.html"))]
    assert len(names) > 15
    for name in names:
        if name != "404":
            _check(page, address, name, width)


@in_a_browser
def test_the_site_can_be_opened_from_disk(page: Page, site: Path):
    page.show(site / "tutorials" / "two-moons.html", 1280)
    assert page.value("[...document.images].every(one => one.complete && one.naturalWidth > 0)")
    found = page.value("document.querySelector('.md-nav a[href$=\"theory.html\"]').href")
    assert found == (site / "theory.html").resolve().as_uri()
