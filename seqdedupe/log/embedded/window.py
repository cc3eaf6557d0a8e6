"""Reading ahead: what one hop to a thread has read and checked is handed out in several slices."""

from collections import OrderedDict

import numpy as np

from seqdedupe.log.embedded.segment import BASE, COUNT, END, START, Piece, Segment

WINDOW_BYTES = 1024 * 1024
"""What is read at once for a reader that goes on where it was."""

MAX_WINDOWS = 16
"""Kept for all readers of a sidecar; the one not used for longest goes first."""


class Window:
    """Checked records of one segment, and how far they have been handed out."""

    def __init__(self, segment: Segment, piece: Piece, first: int) -> None:
        table = piece.table[first:]
        self.segment = segment
        self.end = piece.end
        """Where reading goes on in the file."""
        self._end_index = piece.next_index(segment.base_index)
        table = table[table[:, COUNT] > 0]
        self._raw = piece.raw
        self._starts, self._ends, self._bases = table[:, START].copy(), table[:, END].copy(), table[:, BASE].copy()
        # Markers were left out: a slice ends where one stood.
        self._gaps = np.append(np.flatnonzero(self._starts[1:] != self._ends[:-1]) + 1, len(table))
        self._next = 0

    @property
    def next_index(self) -> int:
        """The index at which the next slice begins."""
        return self._end_index if self.is_empty else int(self._bases[self._next])

    @property
    def is_empty(self) -> bool:
        return self._next == len(self._starts)

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
        return memoryview(self._raw)[start : int(self._ends[self._next - 1])]


class ReadAhead:
    """The windows of all readers, found by incarnation and the index at which the reader goes on."""

    def __init__(self) -> None:
        self._windows: OrderedDict[tuple[int, int], Window] = OrderedDict()

    def take(self, incarnation: int, index: int) -> Window | None:
        return self._windows.pop((incarnation, index), None)

    def keep(self, incarnation: int, window: Window) -> None:
        self._windows[incarnation, window.next_index] = window
        if len(self._windows) > MAX_WINDOWS:
            self._windows.popitem(last=False)

    def forget(self, incarnation: int) -> None:
        """The log is closed."""
        for key in [key for key in self._windows if key[0] == incarnation]:
            del self._windows[key]
