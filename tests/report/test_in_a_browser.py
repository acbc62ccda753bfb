"""In a real browser the page fits a phone and a desktop, complains of nothing and asks for nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import CHROMIUM, Page, browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; install Debian's package chromium")
OPEN_ALL = "document.querySelectorAll('details').forEach(one => one.open = true)"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as found:
        yield found


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [375, 1280])
def test_the_page_fits_and_is_readable(page: Page, written: Path, width: int, dark: bool):
    page.complaints.clear()
    page.requests.clear()
    page.show(written, width, dark)
    assert page.value("innerWidth") == width
    for _ in range(2):  # closed, then with all that can be opened
        assert page.value("document.documentElement.scrollWidth <= innerWidth")
        page.value(OPEN_ALL)
    assert page.value("[...document.images].every(one => one.complete && one.naturalWidth > 0)")
    background = page.value("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 24, 29)" if dark else "rgb(246, 247, 249)")
    assert page.complaints == []
    assert [address for address in page.requests if not address.startswith("data:")] == [written.resolve().as_uri()]
    assert page.value("document.querySelectorAll('table')[1].parentElement.scrollWidth > 375")  # wide, in its own box


def test_the_browser_would_notice(page: Page, tmp_path: Path):
    page.complaints.clear()
    (tmp_path / "bad.html").write_text(
        "<div style='width: 2000px'>wide</div><img src='no.png'><script>console.error('oh'); throw Error('no')</script>"
    )
    page.show(tmp_path / "bad.html", 375)
    assert page.value("document.documentElement.scrollWidth") >= 2000
    assert len(page.complaints) >= 3
