"""What `--help` shows, of every command: that of `seqdedupe`, of those that its help names, and so on."""

import re
from collections.abc import Iterator

import click
from click.testing import CliRunner

from seqdedupe.cli.commands import NAME, cli
from seqdedupe.functions.wheel import main as function_wheel

NOT_LISTED = {"job": ["audit", "bootstrap"]}
"""Commands that no list of their parent's help has."""

COLUMNS = 120


def pages() -> Iterator[str]:
    """Yield the help of each command."""
    yield from _pages()
    yield _page(function_wheel, "python -m seqdedupe.functions.wheel")


def _pages(*path: str) -> Iterator[str]:
    page = _page(cli, NAME, *path)
    yield page
    listed = page.partition("\nCommands:\n")[2].partition("\n\n")[0]
    for name in [*re.findall(r"^  ([a-z][a-z-]*)", listed, re.MULTILINE), *NOT_LISTED.get(" ".join(path), [])]:
        yield from _pages(*path, name)


def _page(command: click.Command, name: str, *path: str) -> str:
    asked = [*path, "--help"]
    done = CliRunner(env={"COLUMNS": str(COLUMNS)}).invoke(command, asked, prog_name=name)
    assert done.exit_code == 0, done.output
    return f"$ {' '.join((name, *asked))}\n{done.output}"
