"""The clients under test, their programs, and the sidecars that the scenarios share."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from seqdedupe.testing import Sidecar
from tests.client_conformance.lines import Client, Program
from tests.client_conformance.scripted import Scripted
from tests.tiers import GO

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
    Client("go", ["conformance"], ROOT / "clients" / "go"),
]
if command := os.environ.get(YOURS):
    CLIENTS = [Client("yours", shlex.split(command), Path.cwd())]


@pytest.fixture(scope="session")
def programs() -> Iterator[dict[str, Program]]:
    """The programs that run, by their clients' names: scenarios that fail or kill leave none."""
    running: dict[str, Program] = {}
    yield running
    for program in running.values():
        program.kill()


@pytest.fixture(scope="session")
def go_program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Go client's program. Without Go, or the modules that the client needs, the test is skipped."""
    go, folder = GO.where("go"), ROOT / "clients" / "go"
    if go is None or subprocess.run([go, "mod", "download"], cwd=folder, check=False).returncode:
        GO.missing()
    built = tmp_path_factory.mktemp("go") / "conformance"
    subprocess.run([go, "build", "-o", built, "./cmd/conformance"], cwd=folder, check=True)
    return str(built)


@pytest.fixture(params=CLIENTS, ids=lambda client: client.name)
def program(request: pytest.FixtureRequest, programs: dict[str, Program]) -> Iterator[Program]:
    """A program of each client, from which earlier scenarios are gone."""
    client: Client = request.param
    if client.name == "go":
        client = client._replace(command=[request.getfixturevalue("go_program")])
    found = programs.pop(client.name, None)
    if found is None or not found.runs:
        found = Program(client)
    failed = request.session.testsfailed
    try:
        yield found
    finally:
        if request.session.testsfailed == failed and found.runs:
            programs[client.name] = found
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
