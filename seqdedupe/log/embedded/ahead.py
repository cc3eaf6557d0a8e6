"""Segments that were written while the clock was ahead: how long they have been there, by no clock that can be wrong.

The publish times in such a segment lie in the future, and so do those of all that comes later, for they never fall. So
the segment counts from the first look that saw it. The time since then is the time that processes have run, by the
steady clock, which never jumps; the time between two processes does not count. So a segment may be taken for younger
than it is, never for older. The time of the segment's file is not believed: of a file written by a clock that was
behind it is too early, and messages would go that are new.

A segment that was written while the clock was behind would go as soon as the clock is right. It is found while the
process runs that made it, which knows for how long it has been there, and counts in the same way.
"""

import logging
import os
import time
import zlib
from collections.abc import Sequence, Set
from pathlib import Path

from seqdedupe.files import write_synced

logger = logging.getLogger("seqdedupe.log")

AHEAD_FILE = "ahead"
BEHIND_FILE = "behind"
AHEAD_MS = 60 * 60 * 1000
"""A segment whose first publish time lies further ahead of the believed time was written by a wrong clock."""

_VERSION = 1
_SAVE_MS = 60_000
"""At most so much of what a process has counted is lost with it, and what it had not looked at yet."""


class Ahead:
    """How long such segments of one log have been seen. `look` blocks, and is called by one thread at a time."""

    def __init__(self, folder: Path, name: str = AHEAD_FILE) -> None:
        self._path = folder / name
        self._ran_ms = self._saved_ms = 0
        """For how long processes have run since the first of them was seen; and what of that the file says."""
        self._seen_ms: dict[int, int] = {}
        """When each was seen first, in that time, by the segment's first index."""
        self._looked_ms: int | None = None
        """When this process looked last, by the steady clock."""

    def age_ms(self, base_index: int) -> int:
        """For how long a segment has been there, at least."""
        seen_ms = self._seen_ms.get(base_index)
        return 0 if seen_ms is None else self._ran_ms - seen_ms

    @property
    def is_empty(self) -> bool:
        """Whether none is known, of those that this process has looked for."""
        return not self._seen_ms

    @property
    def has_looked(self) -> bool:
        """Whether what an earlier process has seen is known."""
        return self._looked_ms is not None

    def __contains__(self, base_index: int) -> bool:
        return base_index in self._seen_ms

    def look(self, ahead: Sequence[int], there: Set[int]) -> list[int]:
        """Sees which segments lie ahead, of those that are there. Returns those that were not known yet.

        Without the file, or with a damaged one, all count anew.
        """
        now_ms = steady_ms()
        if self._looked_ms is None:
            self._load()
        else:
            self._ran_ms += now_ms - self._looked_ms
        self._looked_ms = now_ms
        new = [base_index for base_index in ahead if base_index not in self._seen_ms]
        left = {base_index: seen_ms for base_index, seen_ms in self._seen_ms.items() if base_index in there}
        left.update(dict.fromkeys(new, self._ran_ms))
        is_due = left != self._seen_ms or self._ran_ms - self._saved_ms >= _SAVE_MS
        self._seen_ms = left
        if is_due and (left or self._path.exists()):
            self._save()
        return new

    def _load(self) -> None:
        try:
            said, _, checksum = self._path.read_bytes().rpartition(b"\n")
            head, *rows = [[int(number) for number in line.split(b" ")] for line in said.split(b"\n")]
            if int(checksum, 16) != zlib.crc32(said) or head[0] != _VERSION:
                return
            self._seen_ms = {row[0]: row[1] for row in rows}
            self._ran_ms = self._saved_ms = head[1]
        except (OSError, ValueError, IndexError):
            return

    def _save(self) -> None:
        rows = [(_VERSION, self._ran_ms), *sorted(self._seen_ms.items())]
        said = "\n".join(f"{first} {second}" for first, second in rows).encode()
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            write_synced(new, b"%b\n%08x" % (said, zlib.crc32(said)))
            os.rename(new, self._path)
            self._saved_ms = self._ran_ms
        except OSError as e:
            # It is tried again; until then a start counts them anew.
            logger.warning("%s cannot be written: %s", self._path, e)
            self._saved_ms = -_SAVE_MS


def steady_ms() -> int:
    return time.monotonic_ns() // 1_000_000
