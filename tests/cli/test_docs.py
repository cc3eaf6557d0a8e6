"""The examples of docs/reference/cli.md do what they show."""

import re
import shlex
import subprocess
from pathlib import Path

import click

from seqdedupe.cli.commands import cli
from tests.cli.conftest import COMMAND, TIMEOUT_SECONDS

SHELLS_OWN = set("|<>$&;*`")
DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def _examples() -> list[tuple[str, str]]:
    """Each command of the document with the output that it shows."""
    blocks = re.findall(r"^```console\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    return [
        (command, output)
        for block in blocks
        for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
    ]


def _pattern(output: str) -> str:
    """In the document `…` stands for anything."""
    return ".*".join(re.escape(part) for part in output.split("…"))


def test_every_command_is_in_the_table() -> None:
    """A group's commands in one row with it."""
    cells = re.findall(r"^\| ([^|]*) \|", DOCUMENT.read_text(), re.MULTILINE)
    rows = [set(re.findall(r"[a-z-]+", cell)) for cell in cells]
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        below = command.commands if isinstance(command, click.Group) else ()
        assert any({name, *below} <= row for row in rows), f"{name} {' '.join(below)}"


def test_the_examples_are_true(tmp_path: Path, environment: dict[str, str]) -> None:
    examples = _examples()
    assert sum(command.startswith("seqdedupe ") for command, _ in examples) >= 10
    environment = environment | {"PATH": f"{Path(COMMAND).parent}:{environment['PATH']}"}
    for command, expected in examples:
        # By itself, and not by a shell, the command starts warm.
        words: str | list[str] = command
        if command.startswith("seqdedupe ") and not set(command) & SHELLS_OWN:
            words = [COMMAND, *shlex.split(command)[1:]]
        done = subprocess.run(
            words,
            shell=words is command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            timeout=TIMEOUT_SECONDS,
        )
        found = (done.stdout + done.stderr).decode()
        if done.returncode:
            found += f"(exit status {done.returncode})\n"
        assert re.fullmatch(_pattern(expected), found, re.DOTALL), f"$ {command}\n{found}\nshould be\n{expected}"
