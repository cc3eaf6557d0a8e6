"""The clients under test, their programs, and the sidecars that the scenarios share."""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from seqdedupe.testing import Sidecar
from tests.client_conformance import programs
from tests.client_conformance.lines import Client, Program
from tests.client_conformance.scripted import Scripted

YOURS = "CONFORMANCE_CLIENT"
"""The variable with the command of another client's program, which is then the only one that is tested."""

ROOT = Path(__file__).parents[2]


def python_program(*options: str) -> list[str]:
    """The command of the Python clients' program."""
    return [sys.executable, "-m", "tests.client_conformance.python_program", *options]


CLIENTS = [
    Client("python", python_program(), ROOT),
    Client("python-blocking", python_program("--blocking"), ROOT),
    Client("schema", [sys.executable, "-m", "tests.client_conformance.schema_program"], ROOT),
    Client("go", (), programs.GO_CLIENT.folder),
    Client("java", (), programs.JAVA_CLIENT.folder),
]
if command := os.environ.get(YOURS):
    CLIENTS = [Client("yours", shlex.split(command), Path.cwd())]


@pytest.fixture(scope="session")
def running() -> Iterator[dict[str, Program]]:
    """The programs that run, by their clients' names: scenarios that fail or kill leave none."""
    found: dict[str, Program] = {}
    yield found
    for program in found.values():
        program.kill()


# Fixtures, because a build that has failed once is not tried again for the next test.


@pytest.fixture(scope="session")
def go_command() -> list[str]:
    return programs.go_command()


@pytest.fixture(scope="session")
def java_command() -> list[str]:
    return programs.java_command()


@pytest.fixture(params=CLIENTS, ids=lambda client: client.name)
def program(request: pytest.FixtureRequest, running: dict[str, Program]) -> Iterator[Program]:
    """A program of each client, from which earlier scenarios are gone."""
    client: Client = request.param
    if not client.command:
        client = client._replace(command=request.getfixturevalue(f"{client.name}_command"))
    found = running.pop(client.name, None)
    if found is None or not found.runs:
        found = Program(client)
    failed = request.session.testsfailed
    try:
        yield found
    finally:
        if request.session.testsfailed == failed and found.runs:
            running[client.name] = found
        else:
            found.kill()


@contextmanager
def serving(program: Program) -> Iterator[Scripted]:
    """A sidecar that a scenario plays, to which the program's client is connected."""
    sidecar = Scripted(program)
    try:
        program.connect(sidecar.address)
        yield sidecar
        sidecar.check()
    finally:
        sidecar.close()


@pytest.fixture
def scripted(program: Program) -> Iterator[Scripted]:
    with serving(program) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar that scenarios may kill: it starts again, at the same address."""
    with Sidecar(tmp_path_factory.mktemp("conformance")) as sidecar:
        yield sidecar
