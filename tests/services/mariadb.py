"""A real MariaDB for tests: `from tests.services.mariadb import mariadb_url as mariadb_url` in a conftest.

It is started from the system's package, once in a process that runs tests.
"""

import atexit
import functools
import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text

from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.tiers import MARIADB

START_TIMEOUT_SECONDS = LAST_RESORT_SECONDS


class MariaDBServer:
    """Its own server on a Unix socket, with its data in a temporary folder; it keeps what it commits over kills of
    itself, not of the machine."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mariadb-"))
        # As root it would refuse to run, or let nobody but root in.
        self._user = "mysql" if os.geteuid() == 0 else None
        if self._user:
            shutil.chown(self.folder, self._user)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "socket"

    def start(self) -> None:
        """Returns when it takes connections."""
        self._run("mariadb-install-db", "--auth-root-authentication-method=normal", "--skip-test-db")
        command = [_program("mariadbd"), *self._flags(), f"--socket={self.socket}", "--skip-networking"]
        # What is committed need not be on the disk: the server outlives every test.
        command += ["--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=32M", "--skip-log-bin"]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, user=self._user, group=self._user)
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            try:
                # Not by the driver, which leaves open what a server that begins has dropped.
                with socket.socket(socket.AF_UNIX) as trying:
                    trying.connect(str(self.socket))
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self.folder / "log").read_text()[-2000:]) from None
                time.sleep(0.02)

    def url(self, database: str = "") -> str:
        """SQLAlchemy's."""
        return f"mysql+pymysql://root@/{database}?unix_socket={self.socket}&charset=utf8mb4"

    def engine(self) -> Engine:
        """For making databases."""
        return create_engine(self.url(), isolation_level="AUTOCOMMIT", poolclass=NullPool)

    def stop(self) -> None:
        """Ends it, and removes its data."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder)

    def _flags(self) -> list[str]:
        return ["--no-defaults", f"--datadir={self.folder / 'data'}", "--innodb-log-file-size=8M"]

    def _run(self, program: str, *arguments: str) -> None:
        command = [_program(program), *self._flags(), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, user=self._user, group=self._user, cwd=self.folder, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)


def _program(name: str) -> str:
    return MARIADB.where(name) or name


@functools.cache
def _server() -> MariaDBServer:
    MARIADB.check()
    server = MariaDBServer()
    atexit.register(server.stop)
    server.start()
    return server


@pytest.fixture
def mariadb_url() -> Iterator[str]:
    """The URL of an empty database, which is gone after the test."""
    server = _server()
    name = f"test_{uuid.uuid4().hex}"
    with server.engine().connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} CHARACTER SET utf8mb4"))
        yield server.url(name)
        connection.execute(text(f"DROP DATABASE {name}"))
