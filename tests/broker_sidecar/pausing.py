"""A sidecar with small segments whose backups stop half-way while a file is there; and with planted bugs.

Stopped is where the store is copied and the logs are not yet, which is when it says so by its own file.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

from broker_sidecar import kernels
from seqdedupe.testing import LAST_RESORT_SECONDS

MODULE = __name__ if __name__ != "__main__" else "tests.broker_sidecar.pausing"
FOLDER, BUG = "PAUSES_IN", "BACKUP_BUG"
"""In the environment: where the files are, and which bug is planted."""

SEGMENT_BYTES = 8192
WAIT_SECONDS = LAST_RESORT_SECONDS


def environment(folder: Path, bug: str = "") -> dict[str, str]:
    """For `Sidecar(module=MODULE, environment=...)`. The bugs: `nothing kept`, `logs first`. Two more are none of the
    sidecar's: with `slow folder` it stops where it looks for earlier backups; with `half deleted` the backup copies a
    log of which the deletion has removed one file."""
    return {FOLDER: str(folder), BUG: bug}


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


class Pause:
    """Backups stop half-way until `go_on`."""

    def __init__(self, folder: Path) -> None:
        self._wanted, self._stopped = folder / "pause", folder / "paused"

    def begin(self) -> None:
        self._stopped.unlink(missing_ok=True)
        self._wanted.touch()

    def wait(self) -> None:
        """Until one has stopped."""
        wait_for(self._stopped.exists)

    def go_on(self) -> None:
        self._wanted.unlink()


@contextmanager
def paused(folder: Path) -> Iterator[Pause]:
    """During the block backups stop half-way."""
    pause = Pause(folder)
    pause.begin()
    try:
        yield pause
    finally:
        if pause._wanted.exists():
            pause.go_on()


def _stop(folder: Path) -> None:
    if (folder / "pause").exists():
        (folder / "paused").touch()
        wait_for(lambda: not (folder / "pause").exists())


def _plant(bug: str) -> None:
    from broker_sidecar.services import transfer_calls
    from seqdedupe.log.embedded import log_folder
    from seqdedupe.log.embedded.logs import EmbeddedLogs
    from seqdedupe.transfer.backup import BackupMaker

    @asynccontextmanager
    async def nothing_kept(self: EmbeddedLogs) -> Any:
        yield

    if bug == "nothing kept":
        EmbeddedLogs.kept = nothing_kept  # type: ignore[method-assign]
    moment = transfer_calls._moment

    def logs_first(data: Any, parts: Any) -> Any:
        # The store as it is much later: `rows` are read when the logs have been seen for long.
        seen = moment(data, parts)

        def rows() -> Iterator[tuple[bytes, bytes]]:
            _stop(Path(os.environ[FOLDER]))
            yield from data.store.scan(b"", b"\xff")

        return seen._replace(rows=rows())

    if bug == "logs first":
        transfer_calls._moment = logs_first
    delete, add_log = EmbeddedLogs._delete, BackupMaker.add_log
    half_deleted, added = threading.Event(), threading.Event()

    def delete_in_two_steps(self: EmbeddedLogs, incarnation: int) -> None:
        (self.folder_of(incarnation) / log_folder.TOPIC_FILE).unlink()
        half_deleted.set()
        added.wait(WAIT_SECONDS)
        delete(self, incarnation)

    def add_half_deleted(self: BackupMaker, *what: Any) -> None:
        half_deleted.wait(WAIT_SECONDS)
        add_log(self, *what)
        added.set()

    if bug == "half deleted":
        EmbeddedLogs._delete = delete_in_two_steps  # type: ignore[method-assign]
        BackupMaker.add_log = add_half_deleted  # type: ignore[method-assign, assignment]
    iterdir = Path.iterdir

    def slowly(self: Path) -> Iterator[Path]:
        if self.name == "backups":
            _stop(Path(os.environ[FOLDER]))
        return iterdir(self)

    if bug == "slow folder":
        Path.iterdir = slowly  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    kernels.prepare()

    from broker_sidecar.__main__ import main
    from seqdedupe.log.embedded.logs import EmbeddedLogs
    from seqdedupe.transfer.backup import BackupMaker

    EmbeddedLogs.__init__ = partialmethod(EmbeddedLogs.__init__, segment_bytes=SEGMENT_BYTES)  # type: ignore[assignment]
    add_store = BackupMaker.add_store

    def then_stop(self: BackupMaker, rows: Any, at_us: int) -> None:
        add_store(self, rows, at_us)
        _stop(Path(os.environ[FOLDER]))

    BackupMaker.add_store = then_stop  # type: ignore[method-assign]
    _plant(os.environ[BUG])
    sys.exit(main())
