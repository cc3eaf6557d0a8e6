"""What pages under docs/start and docs/guides show is what happens. tests/spark/test_pages.py has those about Spark."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from seqdedupe.errors import SeqdedupeError
from seqdedupe.testing import Sidecar, reserved_port
from tests.pages import EXCEPTIONS, PLAIN, Reader, blocks, runnable

ROOT = Path(__file__).parent.parent
QUICKSTART = ROOT / "docs" / "start" / "quickstart.md"
PAGES = sorted([*ROOT.glob("docs/start/*.md"), *ROOT.glob("docs/guides/*.md")])
ELSEWHERE = {"broker.md"}
"""Their programs are for a sidecar of another kind, or for a suite of its own: their tests run them."""
READ_HERE = [page for page in PAGES if runnable(page) and page.name not in ELSEWHERE]
SPARK_PAGES = [page for page in READ_HERE if page.name.startswith("spark")]

NOT_RUN = {
    "elsewhere": 33,
    "fragment": 12,
    "sample": 5,
}
"""How many blocks do not run, by the reason (`EXCEPTIONS`)."""


def environment(address: str, **more: str) -> dict[str, str]:
    return os.environ | {"SEQDEDUPE_ADDRESS": address} | more


@contextmanager
def reading(folder: Path) -> Iterator[Reader]:
    """A reader with an empty folder and a new sidecar."""
    (folder / "reader").mkdir()
    with Sidecar(folder / "sidecar") as sidecar:
        reader = Reader(folder / "reader", environment(sidecar.address), sidecar.address)
        with closing(reader):
            yield reader


@pytest.mark.parametrize(
    "page",
    [page for page in READ_HERE if page not in (QUICKSTART, *SPARK_PAGES)],
    ids=lambda page: f"{page.parent.name}/{page.name}",
)
def test_the_page_is_true(page: Path, tmp_path: Path) -> None:
    with reading(tmp_path) as reader:
        reader.follow(page)


def test_pages_that_follow_one_another_are_true_in_one_folder(tmp_path: Path) -> None:
    """A reader who goes from page to page keeps the folder, with its databases, and the sidecar with its topics."""
    with reading(tmp_path) as reader:
        for page in ("start/services", "guides/outbox", "guides/consumer", "guides/inbox", "guides/pipe"):
            reader.follow(ROOT / "docs" / f"{page}.md")


def test_the_quickstart_is_true(tmp_path: Path) -> None:
    with reserved_port() as port:
        address = f"127.0.0.1:{port.getsockname()[1]}"
        with closing(Reader(tmp_path, environment(address, SEQDEDUPE_LISTEN=address), address)) as reader:
            assert reader.follow(QUICKSTART) == 4


def test_what_does_not_run_is_known() -> None:
    found = Counter[str]()
    for page in PAGES:
        for block in blocks(page):
            assert block.mark in ("", *EXCEPTIONS), f"{page.name}:{block.line}"
            if block.mark in EXCEPTIONS:
                found[block.mark] += 1
            if block.language in PLAIN:
                assert "\n$ " not in "\n" + block.text, f"{page.name}:{block.line}: a command that is not run"
    assert found == NOT_RUN


@pytest.mark.parametrize(
    "shown",
    [
        "```console\n$ echo one\ntwo\n```\n",
        "```console\n$ false\n```\n",
        "```sh\nfalse\ntrue\n```\n",
        "```python\nassert [] == [1]\n```\n",
        "```toml\nno_such_key = 1\n```\n",
        "```cobol\nSTOP RUN.\n```\n",
    ],
)
def test_what_is_not_true_is_found(shown: str, tmp_path: Path) -> None:
    with closing(Reader(tmp_path, os.environ, "")) as reader:
        assert reader.follow("```console\n$ export A=1\n$ echo $A; sleep 1000 &\n1\n$ kill %1\n```\n") == 1
        with pytest.raises((AssertionError, SeqdedupeError)):
            reader.follow(shown)
