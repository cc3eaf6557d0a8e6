"""A command imports what it needs, and what others need is not waited for. Processes of their own, no sidecar."""

import subprocess
import sys

import click
import pytest

from seqdedupe.cli.commands import cli

SLOW = ("grpc", "numpy", "google.protobuf", "numba", "rocksdict", "seqdedupe.client")

SHOW = """
import sys
from seqdedupe.cli.main import main
try:
    main()
finally:
    print(*sys.modules)
"""


def imported(*words: str) -> tuple[int, set[str]]:
    """The status of a command line, and what its process has imported."""
    done = subprocess.run([sys.executable, "-c", SHOW, *words], capture_output=True, text=True)
    return done.returncode, set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("words", "status"),
    [(("--help",), 0), (("--version",), 0), ((), 2), (("publsh",), 2), (("--unknown",), 2)],
)
def test_what_no_command_does_imports_none(words: tuple[str, ...], status: int) -> None:
    found, modules = imported(*words)
    assert modules.isdisjoint(SLOW)
    assert found == status


def test_control_what_a_command_does_imports_what_it_needs() -> None:
    found, modules = imported("serve", "--no-such-flag", "x")
    assert "seqdedupe.client" in modules
    assert found == 2


@pytest.mark.parametrize("words", [["--help"], ["--port", "x"], ["--config", "/no/such/file"]])
def test_a_configuration_is_looked_at_without_what_compiles(words: list[str]) -> None:
    _, modules = imported("serve", *words)
    assert "broker_sidecar.config" in modules
    assert modules.isdisjoint({"numba", "pulsar", "pyspark"})


def test_the_list_names_commands_that_are_there() -> None:
    context = click.Context(cli)
    names = cli.list_commands(context)
    assert len(names) >= 30
    for name in names:
        command = cli.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert command.callback is not None
    assert cli.get_command(context, "no-such-command") is None
