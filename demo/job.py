"""The reader job as a process that is killed while it works, and the audit of what it has read."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Self

from demo.producer import TOPIC
from seqdedupe.testing import Patience

TABLE = "flights"
KILL_AT = (0.25, 0.6)
"""Parts of all flights that are in the table when the job is killed; the last time its checkpoint is deleted too."""

ROUNDS = 20
"""The flights are read in about so many transactions."""

POLL_SECONDS = 0.05
LINE_SECONDS = 2.0


class ReaderJob:
    """`with ReaderJob(folder, address, flights) as job`: no process of it is left afterwards."""

    def __init__(self, folder: Path, address: str, flights: int, *, deduplicate: bool) -> None:
        self.kills = 0
        self._folder = folder
        self._address = address
        self._flights = flights
        self._deduplicate = deduplicate
        self._database = folder / "flights.db"
        self._checkpoint = folder / "checkpoint"
        self._log = folder / "job.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kill()

    def read(self, say: Callable[[str], None], *, kill_at: tuple[float, ...] = KILL_AT) -> None:
        """Reads the topic into the table, killed at these parts of it. Raises RuntimeError if that fails."""
        parts = list(kill_at)
        said = time.monotonic()
        told = 0
        self._start()
        patience = Patience("the reader job")
        while (status := self._poll()) is None:
            rows = self._rows()
            patience.check(rows, self._log.stat().st_size)
            if parts and rows >= parts[0] * self._flights:
                parts.pop(0)
                self._kill()
                self.kills += 1
                if not parts:
                    shutil.rmtree(self._checkpoint)
                checkpoint = "" if parts else "deleted its checkpoint, "
                told = rows
                say(f"killed the reader job (-9) with {rows:,} rows in the table, {checkpoint}and started it again")
                self._start()
                patience = Patience(f"the reader job, killed {self.kills} times")
            elif rows > told and time.monotonic() > said + LINE_SECONDS:
                said, told = time.monotonic(), rows
                say(f"{rows:,} rows in the table")
            time.sleep(POLL_SECONDS)
        if status:
            raise RuntimeError(f"the reader job ended with {status}:\n{self._tail()}")
        if parts:
            raise RuntimeError(f"all was read before {len(parts)} of the kills: publish more flights")

    def rows(self) -> Iterator[tuple[str, ...]]:
        """What the table holds, in the order in which it was written."""
        with closing(sqlite3.connect(self._database)) as database:
            yield from database.execute(f"SELECT * FROM {TABLE} ORDER BY rowid")

    def _start(self) -> None:
        command = [sys.executable, "-m", "seqdedupe_spark.reader_job", "run", "--job", "demo", "--table", TABLE]
        command += ["--store", f"sqlite:///{self._database}", "--address", self._address, "--topic", TOPIC]
        command += ["--transform", "demo.rows:rows", "--checkpoint-location", str(self._checkpoint)]
        command += ["--max-offsets-per-trigger", str(self._flights // ROUNDS + 1)]
        if self._deduplicate:
            command.append("--deduplicate")
        with self._log.open("ab") as log:
            # A process group of its own: it is killed together with its JVM.
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def _poll(self) -> int | None:
        return self._process.poll() if self._process else 0

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _rows(self) -> int:
        if not self._database.exists():
            return 0
        with closing(sqlite3.connect(self._database)) as database:
            try:
                return int(database.execute(f"SELECT coalesce(max(rowid), 0) FROM {TABLE}").fetchone()[0])
            except sqlite3.OperationalError:  # it has not made the table yet
                return 0

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-10:])


def audit(address: str) -> tuple[int, str]:
    """Runs the audit; returns its exit status and its report, or why there is none."""
    command = [sys.executable, "-m", "seqdedupe_spark.audit_job", "--address", address, TOPIC]
    done = Patience("the audit").run(command)
    return done.returncode, done.stdout or done.stderr
