"""The documentation site, built as `make docs` does, and looked at in a browser."""

import html
import re
import sys
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import CHROMIUM, measure_pages

DOCS = Path(__file__).resolve().parents[1] / "docs"
LOOKED_AT = [
    *("index", "benchmarks", "tutorials/first-training", "guides/which-method", "guides/ddp"),
    *("reference/cli", "reference/api/training", "reference/wire-format"),
    *("explanation/error-feedback", "explanation/alternatives"),
]

# Sphinx and its extensions use what Python or each other will remove.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
sphinx = pytest.importorskip("sphinx.cmd.build", reason="the docs extra is not installed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    kept = list(sys.path)  # conf.py adds to it
    words = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(folder / "doctrees")]
    try:
        assert sphinx.main([*words, str(DOCS), str(folder / "html")]) == 0
    finally:
        sys.path[:] = kept
    return folder / "html"


class Links(HTMLParser):
    """Where a page leads, what it loads, and what in it has a name."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.leads: set[str] = set()
        self.loads: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if found.get("id"):
            self.names.add(str(found["id"]))
        if tag == "a" and found.get("href"):
            self.leads.add(str(found["href"]))
        if tag in ("script", "img", "iframe") and found.get("src"):
            self.loads.add(str(found["src"]))
        if tag == "link" and "stylesheet" in str(found.get("rel")):
            self.loads.add(str(found["href"]))


def test_links_and_anchors_lead_somewhere_and_nothing_is_fetched(site: Path) -> None:
    pages = {path: Links(path) for path in site.rglob("*.html")}
    assert len(pages) > 60
    for path, links in pages.items():
        for load in links.loads:
            assert not re.match(r"(https?:)?//", load), f"{path.name} loads {load}"
        for lead in links.leads:
            target, _, anchor = html.unescape(lead).partition("#")
            if re.match(r"\w+:", target):
                continue
            there = (path.parent / urllib.parse.unquote(target)).resolve() if target else path
            assert there.exists(), f"{path.relative_to(site)} leads to {lead}"
            if anchor and there in pages:
                known = urllib.parse.unquote(anchor) in pages[there].names
                assert known or not anchor, f"{path.relative_to(site)} leads to {lead}"


def test_every_page_is_in_the_menu_once(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    menu = text[text.index('class="sidebar-tree"') :]
    menu = menu[: menu.index("</aside>")]
    found = re.findall(r'class="reference internal" href="([^"]+)"', menu)
    pages = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert sorted(found) == sorted(map(Path.as_posix, pages - {Path("index.html")}))


def test_markup_of_docstrings_was_understood(site: Path) -> None:
    for path in (site / "reference" / "api").glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert "system-message" not in text, path.name
        assert not re.search(r":doc:|docs/\w+/", re.sub(r"<[^>]*>", "", text)), path.name


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on this machine")
@pytest.mark.parametrize("scheme", ["1", "0"], ids=["light", "dark"])
def test_pages_fit_wide_and_narrow_screens(site: Path, scheme: str) -> None:
    pages = [site / f"{name}.html" for name in LOOKED_AT]
    found, _ = measure_pages(pages, site, f"--blink-settings=preferredColorScheme={scheme}")
    assert [frame["width"] for frame in found] == [1280, 390] * len(pages)
    for frame in found:
        assert frame["needs"] <= frame["width"], f"{frame['page']} scrolls sideways"
        light = sum(map(int, re.findall(r"\d+", frame["paper"])[:3])) > 384
        assert light == (scheme == "1"), frame["page"]
        assert frame["outside"] == []
