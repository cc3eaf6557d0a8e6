"""The site of `make docs`: built without a warning, whole, and loading nothing from other hosts."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=[\"']?([^\"'\s>]+)")
_STYLED = re.compile(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)")


def loaded_elsewhere(files: Iterable[Path]) -> list[str]:
    """What pages and styles load from other hosts."""
    found = []
    for file in files:
        text = file.read_text()
        if file.suffix == ".html":
            found += [link for link in _LOADED.findall(text) if re.match(r"(?:\w+:)?//", link)]
        found += _STYLED.findall(text)
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def test_every_page_is_there_and_can_be_found(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in ROOT.glob("docs/**/*.md")}
    built = {path.relative_to(site).with_suffix("") for path in site.glob("**/*.html")}
    assert built - pages == {Path("404")}
    assert pages <= built
    index = (site / "search" / "search_index.json").read_text()
    assert all(f'"location":"{page}.html' in index for page in pages)


def test_the_api_comes_from_the_docstrings(site: Path) -> None:
    page = (site / "reference" / "python-api.html").read_text()
    assert ":::" not in page
    assert all(f'id="seqdedupe.client.{name}"' in page for name in ("Client.producer", "Producer.send", "Reader"))


def test_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    assert loaded_elsewhere([*site.glob("**/*.html"), *site.glob("**/*.css")]) == []


def test_what_is_loaded_from_other_hosts_is_found(tmp_path: Path) -> None:
    page, style = tmp_path / "page.html", tmp_path / "page.css"
    page.write_text('<a href="https://a.org">a</a><script async src=https://b.org/x.js></script><img src="x.svg">')
    style.write_text("@import '//c.org/x.css'; p { background: url(x.svg) } q { background: url(https://d.org/y) }")
    assert loaded_elsewhere([page, style]) == ["https://b.org/x.js", "//c.org/x.css", "https://d.org/y"]


def test_pages_stand_in_the_order_of_the_index(site: Path) -> None:
    listed = re.findall(r"^- \[.*\]\((start/.*)\.md\)$", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    shown = re.findall(
        r'<a href="\.\./(start/[\w-]+)\.html" class="md-nav__link', (site / "guides/client.html").read_text()
    )
    assert shown == listed
