"""The newer part of a window of deduplication IDs: chunks in memory, each at a place (`id_table`), which fill up.

What lies at a place stays there until the place is given back: the table may lead to it, long after the chunk
has been forgotten.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator

import numpy as np

from seqdedupe.core.growing import Growing
from seqdedupe.core.id_chunks import NO_LIMIT, PARTS, PIECE_BYTES, Chunk, Piece, WindowLimits
from seqdedupe.core.id_table import (
    CHUNK_BYTES,
    CHUNK_OFFSETS,
    CHUNK_ROWS,
    COLUMNS,
    CURRENT,
    FIRST_INDEX,
    LAST_TIME_MS,
    NEXT,
    ROWS,
)
from seqdedupe.format.columns import DEDUPLICATION_ID_OFFSETS, start
from seqdedupe.format.jit import Int32s, Int64s, Int64s2, Uint8s


class Newer:
    """Chunks, each of which begins where the one before it ends, the oldest first. `state` is the window's."""

    def __init__(self, state: Int64s) -> None:
        self.ids = Growing(0, (CHUNK_BYTES,), np.uint8)
        self.offsets = Growing(0, (CHUNK_OFFSETS,), np.int32)
        self.chunks: Int64s2 = np.zeros((0, COLUMNS), np.int64)
        """By place, as `id_table` has them."""
        self.order: deque[int] = deque()
        """The places of the chunks."""
        self.free: list[int] = []
        """Places that nothing leads to. All but the last one, which is taken next, have no memory."""
        self.is_sealed = True
        """Whether the newest chunk takes no more."""
        self.opened = 0
        """So many chunks ever were."""
        self._state = state

    def __iter__(self) -> Iterator[Chunk]:
        return map(self.chunk, self.order)

    @property
    def rows(self) -> int:
        """How many IDs they have together."""
        return int(self._state[NEXT]) - int(self.chunks[self.order[0], FIRST_INDEX]) if self.order else 0

    def bytes_of(self, place: int) -> int:
        """How many bytes the IDs have that lie there."""
        return int(self.offsets.rows[place, self.chunks[place, ROWS]])

    def chunk(self, place: int) -> Chunk:
        """What lies there."""
        first_index, rows, first_time_ms, last_time_ms = self.chunks[place].tolist()
        return Chunk(first_index, rows, self.bytes_of(place), first_time_ms, last_time_ms)

    def piece(self, place: int, from_index: int, end_index: int) -> Piece | None:
        """A copy of what lies there, from one index on and below the other; None if that is nothing."""
        chunk_index, rows, first_time_ms, last_time_ms = self.chunks[place].tolist()
        first = max(from_index - chunk_index, 0)
        end = min(rows, end_index - chunk_index)
        if end <= first:
            return None
        offsets: Int32s = self.offsets.rows[place, first : end + 1]
        sizes = np.diff(offsets).astype(np.uint8)
        ids = self.ids.rows[place, int(offsets[0]) : int(offsets[-1])].copy()
        return Piece(chunk_index, chunk_index + first, first_time_ms, last_time_ms, sizes, ids)

    def piece_from(self, index: int, end_index: int) -> Piece | None:
        """A copy from one index on and below the other, of one chunk, PIECE_BYTES at most; None if that is nothing."""
        before = bisect_right(self.order, index, key=lambda place: int(self.chunks[place, FIRST_INDEX]))
        if not before:
            return None
        place = self.order[before - 1]
        first_index, rows = self.chunks[place, [FIRST_INDEX, ROWS]].tolist()
        first = index - first_index
        offsets, begin = self.offsets.rows[place], int(self.offsets.rows[place, min(first, rows)])
        more = range(first + 2, min(rows, end_index - first_index) + 1)
        fit = 1 + bisect_right(more, PIECE_BYTES, key=lambda row: int(offsets[row]) - begin + row - first)
        return self.piece(place, index, min(index + fit, end_index))

    # -- the chunk that fills up -----------------------------------------------------------------------------------

    def open(self, first_index: int, time_ms: int) -> None:
        """The newest chunk is another one from now on."""
        if not self.free:
            before = len(self.chunks)
            self.ids.reserve(before + 1)
            self.offsets.reserve(before + 1)
            more = len(self.ids.rows)
            if len(self.offsets.rows) < more:
                self.offsets.reserve(more)
            chunks = np.zeros((more, COLUMNS), np.int64)
            chunks[:before] = self.chunks
            self.chunks = chunks
            self.free.extend(reversed(range(before, more)))
        place = self.free.pop()
        self.offsets.rows[place, 0] = 0
        self.chunks[place] = (first_index, 0, time_ms, time_ms)
        self.order.append(place)
        self.opened += 1
        self._state[CURRENT] = place
        self.is_sealed = False

    def give_back(self, place: int) -> None:
        """Nothing leads to this place any more."""
        self.release()
        self.free.append(place)

    def release(self) -> None:
        """No free place has memory."""
        if self.free:
            self.ids.release(self.free[-1])
            self.offsets.release(self.free[-1])

    def room_for(
        self, view: Uint8s, places: Int64s, first: int, rows: int, limits: WindowLimits, now_ms: int
    ) -> tuple[int, int]:
        """The current chunk, and up to which row of a batch it takes all from `first` on."""
        while True:
            if self.is_sealed:
                self.open(int(self._state[NEXT]), now_ms)
            place = self.order[-1]
            here = int(self.chunks[place, ROWS])
            most = min(CHUNK_ROWS, max(limits.messages // PARTS, 1))
            end = min(rows, first + most - here)
            at = start(places, DEDUPLICATION_ID_OFFSETS)
            begins = view[at + 4 * first : at + 4 * (max(end, first) + 1)].view(np.int32)
            left = CHUNK_BYTES - self.bytes_of(place)
            if end > first and begins[-1] - begins[0] > left:
                end = first + int(np.searchsorted(begins, begins[0] + left, "right")) - 1
            if end > first:
                return place, end
            self.is_sealed = True

    def seal_if_due(self, limits: WindowLimits, now_ms: int) -> None:
        """A chunk that is large or old enough takes no more: the window is to move by small parts of it."""
        if not self.order:
            return
        _, rows, first_time_ms, _ = self.chunks[self.order[-1]].tolist()
        if not rows:
            return
        self.is_sealed |= (
            rows >= max(limits.messages // PARTS, 1)
            or (limits.milliseconds != NO_LIMIT and now_ms - first_time_ms >= limits.milliseconds // PARTS)
            or (limits.id_bytes != NO_LIMIT and self.bytes_of(self.order[-1]) >= max(limits.id_bytes // PARTS, 1))
        )

    def append(self, piece: Piece) -> None:
        """The newest chunk has these IDs too. Raises ValueError if it has no room for them."""
        place = self.order[-1]
        here, there = int(self.chunks[place, ROWS]), self.bytes_of(place)
        rows = here + len(piece.sizes)
        if rows > CHUNK_ROWS or there + len(piece.ids) > CHUNK_BYTES:
            raise ValueError(f"a chunk has {rows} IDs, more than it can")
        self.ids.rows[place, there : there + len(piece.ids)] = piece.ids
        np.cumsum(piece.sizes, dtype=np.int32, out=self.offsets.rows[place, here + 1 : rows + 1])
        self.offsets.rows[place, here + 1 : rows + 1] += there
        self.chunks[place, [ROWS, LAST_TIME_MS]] = rows, piece.last_time_ms
