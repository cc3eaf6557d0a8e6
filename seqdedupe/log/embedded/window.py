"""Reading ahead: what one hop to a thread has read and checked is handed out in several slices; when the last one has
been, the next hop is under way.
"""

import asyncio
import time
from collections import OrderedDict

import numpy as np

from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.contract import LargerRecordError
from seqdedupe.log.embedded.segment import BASE, COUNT, END, START, Piece, Segment

WINDOW_BYTES = 1024 * 1024
"""What is read at once for a reader that goes on where it was."""

INLINE_BESIDE_PUBLISHERS_BYTES = 256 * 1024
"""And what the event loop itself reads while it is needed for publishing: more is left to a thread, which reads ahead.

A lone reader is given more a second if the loop reads: what it sends is still in the processor's cache then.
"""

PUBLISHING_SECONDS = 0.1
"""So long after a commit, publishers are about to need the event loop again."""

MAX_WINDOWS = 16
MAX_WINDOWS_BYTES = 16 * 1024 * 1024
"""Kept for all readers of a sidecar; the one not used for longest goes first."""


class Window:
    """Checked records of one segment, from the piece's record `first` on, and how far they have been handed out.

    `goes_on`: it is for a reader that has had the one before. Where there are more readers than windows there is none.
    """

    def __init__(self, segment: Segment, piece: Piece, first: int, *, goes_on: bool) -> None:
        table = piece.table[first:]
        self.segment = segment
        self.goes_on = goes_on
        self.end = piece.end
        """Where reading goes on in the file."""
        self._end_index = piece.next_index(segment.base_index)
        table = table[table[:, COUNT] > 0]
        self._raw = piece.raw
        self._starts, self._ends, self._bases = table[:, START].copy(), table[:, END].copy(), table[:, BASE].copy()
        # Markers were left out: a slice ends where one stood.
        self._gaps = np.append(np.flatnonzero(self._starts[1:] != self._ends[:-1]) + 1, len(table))
        self._next = 0
        self._following: asyncio.Future[Piece] | None = None

    @property
    def next_index(self) -> int:
        """The index at which the next slice begins."""
        return self._end_index if self.is_empty else int(self._bases[self._next])

    @property
    def is_empty(self) -> bool:
        return self._next == len(self._starts)

    @property
    def next_bytes(self) -> int:
        """The size of the record with which the next slice begins."""
        return int(self._ends[self._next] - self._starts[self._next])

    @property
    def size(self) -> int:
        """The number of bytes that it holds."""
        return len(self._raw)

    def cut(self, stop_index: int, max_bytes: int) -> memoryview:
        """The next slice: whole records, at least one, below `stop_index`, not more than `max_bytes` of several."""
        i = self._next
        start = int(self._starts[i])
        j = min(
            int(np.searchsorted(self._ends, start + max_bytes, "right")),
            int(np.searchsorted(self._bases, stop_index)),
            int(self._gaps[np.searchsorted(self._gaps, i, "right")]),
        )
        self._next = max(j, i + 1)
        found = memoryview(self._raw)[start : int(self._ends[self._next - 1])]
        if self.is_empty:
            # Whoever was handed the last slice holds it, and the next window needs room.
            self._raw = b""
        return found

    def read_ahead(self, following: asyncio.Future[Piece]) -> None:
        """The piece after this window is being read."""
        # Where nobody asks for it, what it fails with is not reported either.
        following.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._following = following

    async def take_ahead(self) -> Piece | None:
        """What was read ahead; None if nothing was, or it failed: whoever reads it then hears why."""
        following, self._following = self._following, None
        try:
            return None if following is None else await following
        except (SeqdedupeError, OSError, LargerRecordError):
            return None

    def give_up(self) -> None:
        """Nobody wants what is being read ahead."""
        if self._following is not None:
            self._following.cancel()


class ReadAhead:
    """The windows of all readers, found by the log, as it was opened, and the index at which the reader goes on."""

    def __init__(self) -> None:
        self.written_at = 0.0
        """When something was last committed, by the monotonic clock."""
        self._windows: OrderedDict[tuple[object, int], Window] = OrderedDict()

    @property
    def is_beside_publishers(self) -> bool:
        return time.monotonic() - self.written_at < PUBLISHING_SECONDS

    def take(self, log: object, index: int) -> Window | None:
        return self._windows.pop((log, index), None)

    def keep(self, log: object, window: Window) -> None:
        key = log, window.next_index
        if (same := self._windows.pop(key, None)) is not None:
            same.give_up()
        self._windows[key] = window
        size = sum(one.size for one in self._windows.values())
        while len(self._windows) > MAX_WINDOWS or size > MAX_WINDOWS_BYTES:
            _, oldest = self._windows.popitem(last=False)
            size -= oldest.size
            oldest.give_up()

    def forget(self, log: object) -> None:
        """The log is closed."""
        for key in [key for key in self._windows if key[0] is log]:
            self._windows.pop(key).give_up()
