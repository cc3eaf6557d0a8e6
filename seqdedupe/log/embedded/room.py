"""Decide when a log may be opened for writing: its disk must have room, and after a refused write a trial must have
succeeded.

Opening writes so little that it succeeds where no batch fits. Without the trial, a topic on a full disk would
repeatedly open, refuse a write, and open again, with a new marker each time. A full quota and a file system that has
become read-only are handled like a full disk.
"""

import os
import tempfile
import time
from pathlib import Path

from seqdedupe.files import write_all
from seqdedupe.log.embedded.segment import MAX_RECORD_BYTES

LARGEST_BYTES = MAX_RECORD_BYTES
"""The size of the largest batch in the log."""

SHARE_BYTES = 2 * LARGEST_BYTES
"""The free space that the disk must have before a topic's log is opened for writing."""

TRIAL_SECONDS = 5.0
"""The least time from the end of a trial to the start of the next trial."""

_MIB = 1024 * 1024
_BLOCK_BYTES = _MIB


class Room:
    """The free space of the file system of a folder of logs. Only the commit thread may use this object. So no log is
    written during a trial.

    All logs of the folder share one trial. The space that is free after the trial is divided into shares of
    SHARE_BYTES, one for each log that is opened. Logs without a share wait for the next trial.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shares = 0
        """The number of shares that are left from the last trial."""
        self._why = ""
        """Why the last trial failed; empty if it succeeded."""
        self._next_trial = time.monotonic()

    def refused(self) -> None:
        """Record that a write was refused. The shares of the last trial are then no longer valid."""
        self._shares = 0

    def why_not(self, *, was_refused: bool) -> str:
        """Return the reason why a log may not be opened for writing now; empty if it may be opened.

        A log whose last write `was_refused` uses up one share. Any other log only needs SHARE_BYTES of free space.
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
        """Write LARGEST_BYTES to a temporary file, which is then removed, and measure the free space. Return the reason
        of a failure; empty if the trial succeeded."""
        # Use random bytes, because a file system cannot compress them.
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
