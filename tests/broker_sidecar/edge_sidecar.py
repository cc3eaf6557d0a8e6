"""A sidecar whose clock may be wrong, and runs quickly; that writes down what it has synced; and planted bugs.

Its time may go many times as fast as that of the machine, the same in all processes that were given its beginning. A
file says how far its clock is from that. Segments and files of the journal are small.
"""

import json
import os
import sys
import time
from functools import partialmethod
from pathlib import Path
from typing import Any, NamedTuple

from broker_sidecar import kernels

VARIABLE = "EDGE_SIDECAR"
MODULE = __name__ if __name__ != "__main__" else "tests.broker_sidecar.edge_sidecar"

BEGAN_MS = 1_700_000_000_000
SEGMENT_BYTES = 8192
JOURNAL_FILE_BYTES = 6000
RETENTION_SECONDS = 0.2
_BYTES = 8


class Quick(NamedTuple):
    """Its own time: when it began, in nanoseconds of the steady clock, and how fast it is."""

    began_ns: int
    speed: int


def settings(
    folder: Path,
    bug: str = "",
    *,
    quick: Quick | None = None,
    is_ruled: bool = False,
    idle_seconds: float = 10,
    journal_file_bytes: int = JOURNAL_FILE_BYTES,
) -> dict[str, Any]:
    """Return those of a sidecar like this. `is_ruled`: it believes who a caller says it is, as in `by_name`.
    The journal forgets every `idle_seconds`, and when a file of it has `journal_file_bytes`."""
    told = {
        "folder": str(folder),
        "bug": bug,
        "quick": quick,
        "is_ruled": is_ruled,
        "idle_seconds": idle_seconds,
        "journal_file_bytes": journal_file_bytes,
    }
    return {"module": MODULE, "environment": {VARIABLE: json.dumps(told)}}


class Time:
    """The quick time, and a clock that differs from it."""

    def __init__(self, folder: Path, quick: Quick) -> None:
        self.quick = quick
        self._file = os.open(folder / "shift", os.O_RDWR | os.O_CREAT, 0o600)

    def true_ms(self) -> int:
        return BEGAN_MS + (time.monotonic_ns() - self.quick.began_ns) * self.quick.speed // 1_000_000

    def clock_ms(self) -> int:
        return self.true_ms() + int.from_bytes(os.pread(self._file, _BYTES, 0), "little", signed=True)

    def shift(self, ms: int) -> None:
        """From now on the clock is ahead by this much, or behind."""
        os.pwrite(self._file, ms.to_bytes(_BYTES, "little", signed=True), 0)

    def begin(self) -> None:
        """The sidecar has not looked at the clock before."""
        os.pwrite(self._file, self.true_ms().to_bytes(_BYTES, "little"), _BYTES)

    @property
    def begun_ms(self) -> int:
        """When the sidecar has begun, as it says."""
        return int.from_bytes(os.pread(self._file, _BYTES, _BYTES), "little")


def syncs(folder: Path) -> Path:
    """Where the file stands that has a line for each sync of a segment or of a file of the journal: how long it was,
    and its path."""
    return folder / "syncs"


def _run_quickly(here: Time) -> None:
    from broker_sidecar import data
    from seqdedupe.log.embedded import log, reader
    from seqdedupe.topic import clock

    clock._both_ms = lambda: (here.clock_ms(), here.true_ms())
    reader.steady_ms = log.steady_ms = here.true_ms  # type: ignore[attr-defined]
    clock.LOOK_SECONDS = clock.LOOK_SECONDS / here.quick.speed
    data.RETENTION_SECONDS = RETENTION_SECONDS


def _write_down_syncs(file: int) -> None:
    def written_down(really: Any) -> Any:
        def sync(fd: Any) -> None:
            size, path = os.fstat(fd).st_size, os.readlink(f"/proc/self/fd/{fd}")
            really(fd)
            if path.endswith((".log", ".journal")):
                os.write(file, f"{size} {path}\n".encode())

        return sync

    os.fsync, os.fdatasync = written_down(os.fsync), written_down(os.fdatasync)


def _plant(bug: str) -> None:
    """What protects from one of the attacks is not there."""
    from broker_sidecar.security.permissions import Need, On, Permissions
    from broker_sidecar.security.rules import Action
    from seqdedupe.log.embedded.journal_replay import JournalReplay
    from seqdedupe.topic import clock

    match bug:
        case "the newest file of the journal is named nowhere":
            JournalReplay.begun = lambda self, number: None  # type: ignore[method-assign]
        case "one look at the clock is enough":
            clock.LOOKS = 1
        case "who may publish may attach":
            check = Permissions.check_topic

            def check_either(self: Permissions, action: Action, topic: str) -> None:
                need = Need(On.TOPIC, (action, Action.PUBLISH)) if action is Action.ATTACH else None
                self.check(need, topic) if need else check(self, action, topic)

            Permissions.check_topic = check_either  # type: ignore[method-assign]
        case "who may read may move each cursor":
            Permissions._check_cursor = lambda self, topic, name: None  # type: ignore[method-assign]
        case _:
            raise AssertionError(bug)


def main() -> int:
    """As the sidecar's."""
    told = json.loads(os.environ[VARIABLE])
    here = Time(Path(told["folder"]), Quick(*told["quick"])) if told["quick"] else None
    if here is not None:
        time.time_ns = lambda: here.clock_ms() * 1_000_000
        time.time = lambda: here.clock_ms() / 1000
    kernels.prepare()

    from broker_sidecar.__main__ import main as serve
    from seqdedupe.log.embedded import commit
    from seqdedupe.log.embedded.logs import EmbeddedLogs
    from tests.broker_sidecar.security import by_name

    EmbeddedLogs.__init__ = partialmethod(EmbeddedLogs.__init__, segment_bytes=SEGMENT_BYTES)  # type: ignore[assignment]
    commit.FILE_BYTES = told["journal_file_bytes"]
    commit.IDLE_SECONDS = told["idle_seconds"]
    _write_down_syncs(os.open(syncs(Path(told["folder"])), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    if here is not None:
        _run_quickly(here)
        here.begin()
    if told["bug"]:
        _plant(told["bug"])
    return by_name.serve() if told["is_ruled"] else serve()


if __name__ == "__main__":
    sys.exit(main())
