"""The rule when a log may be opened for writing: its disk has room, and after a refused write a trial has succeeded.

Opening writes little, and fits where no batch does. Without a trial, a topic on a full disk would serve, refuse, and
serve again, with a new marker each time. A full quota and a file system that has become read-only count like a full
disk.
"""

import os
import tempfile
import time
from pathlib import Path

from seqdedupe.files import write_all
from seqdedupe.log.embedded.segment import MAX_RECORD_BYTES

LARGEST_BYTES = MAX_RECORD_BYTES
"""The largest batch as it is stored."""

SHARE_BYTES = 2 * LARGEST_BYTES
"""The room that a topic needs before its log is opened for writing."""

TRIAL_SECONDS = 5.0
"""The least time from the end of a trial to the next one."""

_MIB = 1024 * 1024
_BLOCK_BYTES = _MIB


class Room:
    """The free space of the file system of a folder of logs. Belongs to the commit thread: no log is written meanwhile.

    All logs of the folder share one trial. The space that is free after it is shared out: SHARE_BYTES for each log that
    is opened. The others wait for the next trial, which looks at the free space again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shares = 0
        """The number of logs that may still be opened after the last trial."""
        self._why = ""
        """Why the last trial failed; empty if it succeeded."""
        self._next_trial = time.monotonic()

    def refused(self) -> None:
        """Record that a write was refused: the result of the last trial is no longer valid."""
        self._shares = 0

    def why_not(self, *, was_refused: bool) -> str:
        """Return why a log may not be opened for writing now; empty if it may.

        A log whose last write `was_refused` takes a share of the room. Any other log only needs free space.
        """
        if (why := self._why_no_share()) or not was_refused:
            return why
        if time.monotonic() >= self._next_trial:
            self._shares = 0
            self._why = self._why_trial_fails()
            self._next_trial = time.monotonic() + TRIAL_SECONDS
        if not self._shares:
            return self._why or f"the disk of {self._folder} was full: other topics go first"
        self._shares -= 1
        return ""

    def _why_no_share(self) -> str:
        try:
            free = self._free_bytes()
        except OSError as e:
            return f"the room in {self._folder} cannot be seen: {e}"
        if free >= SHARE_BYTES:
            return ""
        needed, there = SHARE_BYTES / _MIB, free / _MIB
        return f"the disk of {self._folder} has {there:.1f} MiB free: a topic needs {needed:.1f} MiB to be written"

    def _why_trial_fails(self) -> str:
        """Write the largest batch to an unnamed file, which leaves nothing, and measure the free space. Return why that
        failed."""
        # Random bytes: no file system can compress them.
        block = os.urandom(_BLOCK_BYTES)
        try:
            with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
                for at in range(0, LARGEST_BYTES, _BLOCK_BYTES):
                    write_all(file.fileno(), block[: LARGEST_BYTES - at], at)
                os.fdatasync(file.fileno())
            self._shares = self._free_bytes() // SHARE_BYTES
        except OSError as e:
            return f"a trial write of {LARGEST_BYTES / _MIB:.1f} MiB in {self._folder} failed: {e.strerror}"
        return ""

    def _free_bytes(self) -> int:
        disk = os.statvfs(self._folder)
        return disk.f_bavail * disk.f_frsize
