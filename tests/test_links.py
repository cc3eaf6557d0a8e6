"""Pages exist where files of the repository say they are: links, their anchors, every `docs/….md` in code and files."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_LISTED = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).splitlines()
FILES = [Path(name) for name in _LISTED if (ROOT / name).is_file()]
PAGES = [path for path in FILES if path.suffix == ".md"]
KINDS = {"start", "guides", "reference", "internals"}

_CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_NAMED = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.md(?:#[\w-]+)?")


@cache
def anchors(page: Path) -> set[str]:
    """For each heading of a page what links name it by."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower())
        found.add(words.replace(" ", "-"))
    return found


def missing(links: list[str], folder: Path) -> list[str]:
    """The links that lead nowhere, seen from a folder."""
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        page = folder / path
        if not page.exists() or (anchor and page.suffix == ".md" and anchor not in anchors(page)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = _CODE.sub("", (ROOT / page).read_text())
    links = [link if not link.startswith("#") else page.name + link for link in _LINK.findall(text)]
    assert missing([link for link in links if "://" not in link], (ROOT / page).parent) == []


def test_every_page_that_a_file_names_is_there() -> None:
    named: dict[str, Path] = {}
    for path in FILES:
        if path != Path("tests/test_links.py"):
            for found in _NAMED.findall((ROOT / path).read_bytes().decode(errors="replace")):
                named.setdefault(found, path)
    assert len(named) > 40
    assert {name: named[name] for name in missing([*named], ROOT)} == {}


def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# One\n\n```sh\n# two\n```\n\n## `three` and [four](x.md)\n")
    links = ["page.md", "page.md#one", "page.md#three-and-four", "page.md#two", "other.md"]
    assert missing(links, tmp_path) == ["page.md#two", "other.md"]
    named = _NAMED.findall("see docs/guides/a-b.md#c-d. x/docs/no.md, `docs/e.md`")
    assert named == ["docs/guides/a-b.md#c-d", "docs/e.md"]


def test_every_page_is_of_one_kind() -> None:
    kinds = {path.parts[1] for path in PAGES if path.parts[0] == "docs"}
    assert kinds == {"index.md", *KINDS}


def test_every_page_is_listed() -> None:
    listed = {Path("docs") / link for link in _LINK.findall((ROOT / "docs" / "index.md").read_text())}
    assert {path for path in PAGES if path.parts[0] == "docs"} - listed == {Path("docs/index.md")}
