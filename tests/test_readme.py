"""What the README shows is tried as a user does it: nothing starts warm."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from seqdedupe.testing import reserved_port
from tests import warm
from tests.pages import Reader, blocks

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"


@pytest.fixture(autouse=True)
def as_for_a_user() -> Iterator[None]:
    with warm.cold():
        yield


def test_the_quickstart_is_true(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ten commands and one program, with what they print."""
    with reserved_port() as port:
        address = f"127.0.0.1:{port.getsockname()[1]}"
        environment = os.environ | {"SEQDEDUPE_ADDRESS": address, "SEQDEDUPE_LISTEN": address}
        with closing(Reader(tmp_path, environment, address)) as reader:
            assert reader.follow(README) == 2
    assert capfd.readouterr().out == "[('ann,10',), ('bob,20',)]\n"
    assert (tmp_path / "data" / "token").is_file()


def test_its_blocks_run_or_are_no_code() -> None:
    assert [(block.language, block.mark) for block in blocks(README)] == [("console", ""), ("python", ""), ("text", "")]


def test_two_commands_set_everything_up() -> None:
    page, makefile = README.read_text(), (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"`make {target}`" in page
        assert f"\n{target}: " in makefile
