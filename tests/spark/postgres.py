"""A real PostgreSQL for tests: `from tests.spark.postgres import postgres_url as postgres_url` in a conftest.

It is started from the system's package, once in a process that runs tests, unless TEST_POSTGRES is the URL of
one where databases may be made.
"""

import atexit
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.tiers import POSTGRESQL

START_TIMEOUT_SECONDS = LAST_RESORT_SECONDS
_VARIABLE = "TEST_POSTGRES"


class PostgresServer:
    """Its own server on a Unix socket, with its data in a temporary folder."""

    def __init__(self, **settings: object) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        self.settings = {"listen_addresses": "", "unix_socket_directories": self.folder} | settings
        # PostgreSQL does not run as root.
        self._user = "postgres" if os.geteuid() == 0 else None
        if self._user:
            shutil.chown(self.folder, self._user)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of the database in which others are made."""
        return f"postgresql://postgres@/postgres?host={self.folder}"

    def start(self) -> None:
        """Returns when it takes connections."""
        self._run("initdb", "-D", self.folder / "data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")
        flags = [f"--{name}={value}" for name, value in self.settings.items()]
        command = [_program("postgres"), "-D", str(self.folder / "data"), *flags]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, user=self._user, group=self._user, cwd=self.folder
            )
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            try:
                psycopg.connect(self.url).close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self.folder / "log").read_text()[-2000:]) from None
                time.sleep(0.02)

    def stop(self) -> None:
        """Ends it, and removes its data."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(START_TIMEOUT_SECONDS)
        shutil.rmtree(self.folder)

    def _run(self, program: str, *arguments: object) -> None:
        command = [_program(program), *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, user=self._user, group=self._user, cwd=self.folder, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr)


def _program(name: str) -> str:
    """Where it is; Debian's are in no folder of PATH. Skips the test if there is none."""
    found = shutil.which(name) or max(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), default=None)
    if found is None:
        POSTGRESQL.missing()
    return found


@functools.cache
def _server_url() -> str:
    given = os.environ.get(_VARIABLE)
    if given:
        return given
    _program("postgres")
    # The server outlives every test, so what it has not yet on disk is never needed.
    server = PostgresServer(fsync="off", max_connections=50, shared_buffers="32MB")
    atexit.register(server.stop)
    server.start()
    return server.url


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """The URL of an empty database, which is gone after the test."""
    server = _server_url()
    name = f"test_{uuid.uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        yield urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
