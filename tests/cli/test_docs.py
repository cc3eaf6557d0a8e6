"""The examples of docs/reference/cli.md do what they show."""

import re
from contextlib import closing
from pathlib import Path

import click

from seqdedupe.cli.commands import cli
from seqdedupe.testing import Sidecar
from tests.pages import Reader, blocks, commands

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def test_every_command_is_in_the_table() -> None:
    """A group's commands in one row with it."""
    cells = re.findall(r"^\| ([^|]*) \|", DOCUMENT.read_text(), re.MULTILINE)
    rows = [set(re.findall(r"[a-z-]+", cell)) for cell in cells]
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        below = command.commands if isinstance(command, click.Group) else ()
        assert any({name, *below} <= row for row in rows), f"{name} {' '.join(below)}"


def test_the_examples_are_true(tmp_path: Path, environment: dict[str, str], shared_sidecar: Sidecar) -> None:
    shown = [command for block in blocks(DOCUMENT, "console") for command, _ in commands(block.text)]
    assert sum(command.startswith("seqdedupe ") for command in shown) >= 10
    with closing(Reader(tmp_path, environment, shared_sidecar.address)) as reader:
        reader.follow(DOCUMENT)
