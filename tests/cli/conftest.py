"""One sidecar for the commands of a file of tests, and the command as a process."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar

COMMAND = str(Path(sys.executable).with_name("seqdedupe"))
TIMEOUT_SECONDS = LAST_RESORT_SECONDS

Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


def lines(count: int) -> bytes:
    """A file of this many different lines."""
    return b"".join(b"record %d\n" % number for number in range(count))


@pytest.fixture(scope="module")
def shared_sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    with Sidecar(tmp_path_factory.mktemp("cli")) as sidecar:
        yield sidecar


@pytest.fixture
def environment(shared_sidecar: Sidecar) -> dict[str, str]:
    return os.environ | {"SEQDEDUPE_ADDRESS": shared_sidecar.address}


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Run:
    """Runs the command in a folder of the test's own. An error is one line; nobody ever sees a traceback."""

    def run(*arguments: str, status: int = 0, **more: str) -> "subprocess.CompletedProcess[bytes]":
        done = subprocess.run(
            [COMMAND, *arguments], capture_output=True, timeout=TIMEOUT_SECONDS, cwd=tmp_path, env=environment | more
        )
        assert done.returncode == status, done.stderr
        lines = done.stderr.splitlines()
        assert len(lines) == (1 if status else 0), done.stderr
        assert b"Traceback" not in done.stderr
        return done

    return run
