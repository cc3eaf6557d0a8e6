"""PostgreSQL servers whose data is put back to an older state, or to a replica's."""

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import psycopg

from tests.spark.postgres import START_TIMEOUT_SECONDS, PostgresServer


class Restorable(PostgresServer):
    """One whose data may be put back."""

    def _run(self, program: str, *arguments: object) -> None:
        if program != "initdb" or not (self.folder / "data").exists():
            super()._run(program, *arguments)

    def crash(self) -> None:
        """At once, as if the machine had lost power, but for the disk's own cache."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(START_TIMEOUT_SECONDS)

    def kill(self) -> None:
        """kill -9 of all its processes: it is not asked, and its children find out by themselves."""
        process = self._process
        if process is None:
            return
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in (process.pid, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def save(self) -> None:
        """A copy of the data as a crash leaves it, which is what a snapshot of a disk is."""
        self.crash()
        shutil.copytree(self.folder / "data", self.folder / "saved")
        self._own("saved")
        self.start()

    def save_base_backup(self) -> None:
        """For a server that runs and is written to, as a person does it."""
        shutil.rmtree(self.folder / "saved", ignore_errors=True)
        self._base_backup(self)

    def _base_backup(self, to: PostgresServer, *more: str) -> None:
        """Into the other one's folder `saved`, or of another server `data`."""
        name = "saved" if to is self else "data"
        where = ("-h", self.folder, "-U", "postgres", "-D", to.folder / name)
        self._run("pg_basebackup", *where, "-c", "fast", "-X", "stream", "--no-sync", *more)

    def restore(self) -> None:
        """The data that was saved, with all that a backup's recovery does."""
        self.crash()
        shutil.rmtree(self.folder / "data")
        shutil.copytree(self.folder / "saved", self.folder / "data")
        self._own("data")
        self.start()

    def _own(self, name: str) -> None:
        folder = self.folder / name
        folder.chmod(0o700)
        if self._user:
            for path in (folder, *folder.rglob("*")):
                shutil.chown(path, self._user)

    def follow(self, primary: "Restorable") -> None:
        """Starts as a replica of that one, by streaming replication: it may be some commits behind."""
        primary._base_backup(self, "-R")
        self.start()

    def stop_following(self) -> None:
        """What is committed from now on never comes to this replica."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET primary_conninfo = ''")
            connection.execute("SELECT pg_reload_conf()")
            while connection.execute("SELECT 1 FROM pg_stat_wal_receiver").fetchone():
                pass

    def promote(self) -> None:
        """From now on it is written to; returns when it may be."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("SELECT pg_promote(true, 120)")
