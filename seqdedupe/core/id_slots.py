"""The part of a window of deduplication IDs that is in memory: chunks of IDs, and the hash table that finds them.

The table finds all IDs of the chunks in memory. It may also contain slots of IDs that are forgotten or have moved to
runs. That is harmless, because a look-up that finds such a slot detects that the slot's chunk no longer exists. Two
kinds of work are divided among frames, so that no single frame waits until the whole work is done. Each frame clears
forgotten IDs from a part of the slots, one slot after the other, which is faster than looking up each of these IDs. If
a larger table is needed, each frame moves some of the IDs into it.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from seqdedupe.core.id_runs import PIECE_BYTES, Piece
from seqdedupe.core.id_table import (
    CHUNK_BYTES,
    CHUNK_OFFSETS,
    CHUNK_ROWS,
    COLUMNS,
    CURRENT,
    EMPTY,
    FIRST_INDEX,
    GONE,
    HASHED,
    LAST_TIME_MS,
    NEXT,
    ROWS,
    STATES,
    USED,
    WINDOW,
    put,
    sweep_beside,
    take_out,
)
from seqdedupe.core.name_table import Growing
from seqdedupe.format.jit import Int32s, Int64s, Int64s2, Uint8s
from seqdedupe.format.layout import DEDUPLICATION_ID_OFFSETS, start
from seqdedupe.limits import NO_LIMIT, WindowLimits

# -- The newer part of a window: chunks in memory that fill up, each at a place (`id_table`).
#
# The content of a place is kept until the place is released, because slots of the table may still point to the place
# long after its chunk is forgotten.

PARTS = 16
"""A window moves forward by at most 1/PARTS of its size at a time."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a window. A window always forgets all IDs of a chunk together."""

    first_index: int
    rows: int
    id_bytes: int
    first_time_ms: int
    last_time_ms: int

    @property
    def end_index(self) -> int:
        return self.first_index + self.rows


class Newer:
    """Chunks in the order of their indexes, without gaps. `state` is the window's."""

    def __init__(self, state: Int64s) -> None:
        self.ids = Growing(0, (CHUNK_BYTES,), np.uint8)
        self.offsets = Growing(0, (CHUNK_OFFSETS,), np.int32)
        self.chunks: Int64s2 = np.zeros((0, COLUMNS), np.int64)
        """One row per place, laid out as in `id_table`."""
        self.order: deque[int] = deque()
        """The places of the chunks."""
        self.free: list[int] = []
        """Places to which no slot leads. The last one is used next; the others use no memory."""
        self.is_sealed = True
        """Whether the newest chunk accepts no more IDs."""
        self.opened = 0
        """The number of chunks opened so far."""
        self._state = state

    def __iter__(self) -> Iterator[Chunk]:
        return map(self.chunk, self.order)

    @property
    def rows(self) -> int:
        """The number of IDs in all chunks."""
        return int(self._state[NEXT]) - int(self.chunks[self.order[0], FIRST_INDEX]) if self.order else 0

    def bytes_of(self, place: int) -> int:
        """Return the size in bytes of the IDs at this place."""
        return int(self.offsets.rows[place, self.chunks[place, ROWS]])

    def chunk(self, place: int) -> Chunk:
        """Return the chunk at this place."""
        first_index, rows, first_time_ms, last_time_ms = self.chunks[place].tolist()
        return Chunk(first_index, rows, self.bytes_of(place), first_time_ms, last_time_ms)

    def piece(self, place: int, from_index: int, end_index: int) -> Piece | None:
        """Copy the IDs of a place from `from_index` to before `end_index`. Return None if there are none."""
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
        """Copy at most PIECE_BYTES of IDs of one chunk, from `index` to before `end_index`; None if there are none."""
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
        """Begin a new newest chunk."""
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
        """Free a place to which no slot leads any more."""
        self.release()
        self.free.append(place)

    def release(self) -> None:
        """Release the memory of the free places."""
        if self.free:
            self.ids.release(self.free[-1])
            self.offsets.release(self.free[-1])

    def room_for(
        self, view: Uint8s, places: Int64s, first: int, rows: int, limits: WindowLimits, now_ms: int
    ) -> tuple[int, int]:
        """Return the place of the current chunk, and the end of the rows of a batch that fit into this chunk, from
        `first` on."""
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
        """Seal the newest chunk if the chunk is large or old enough. So the window always moves by a small part."""
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
        """Append IDs to the newest chunk. Raises ValueError if the chunk has no room for the IDs."""
        place = self.order[-1]
        here, there = int(self.chunks[place, ROWS]), self.bytes_of(place)
        rows = here + len(piece.sizes)
        if rows > CHUNK_ROWS or there + len(piece.ids) > CHUNK_BYTES:
            raise ValueError(f"a chunk has {rows} IDs, more than it can")
        self.ids.rows[place, there : there + len(piece.ids)] = piece.ids
        np.cumsum(piece.sizes, dtype=np.int32, out=self.offsets.rows[place, here + 1 : rows + 1])
        self.offsets.rows[place, here + 1 : rows + 1] += there
        self.chunks[place, [ROWS, LAST_TIME_MS]] = rows, piece.last_time_ms


_FIRST_SLOTS = 1024
_LOAD = 0.7
"""Above this load a larger table is made."""
_NEAR = 0.6
"""Above this load a larger table will soon be needed."""
_SPARSE = 0.15
"""Below this load a smaller table may be made."""
_FULL = 0.9
"""The highest load of a table. When it is reached, the larger table is finished at once."""
_AT_ONCE = 1 << 14
"""A table with at most this number of slots is replaced in one step."""
_MOVED_A_ROW = 8
"""The number of IDs moved into the larger table for each new row. This is enough to finish before the table in use is
full."""
_PAGE_SLOTS = 512
"""Slots per page of memory."""
_TOUCHED_A_ROW = 64
"""For each new row, the memory of this number of slots of the larger table is touched, before the first ID is stored
there. IDs are stored all over the table, and the first write to each page takes the operating system microseconds."""
_SWEPT_A_ROW = 16
"""The number of slots swept for each new row, as long as there are forgotten IDs. So all slots are swept before 1/16 as
many IDs are forgotten again."""
_SWEPT_A_FRAME = 64
_SWEPT_AT_ONCE = 512
"""The least number of slots to sweep in one call: the call alone costs as much as a thousand slots."""


class Slots:
    """The hash table that finds the IDs in `newer`, in the layout of `id_table`. `state` is the state of the window."""

    def __init__(self, hash_key: Int64s, newer: Newer, state: Int64s) -> None:
        self._table = _table(_FIRST_SLOTS)
        self._hash_key = hash_key
        self._newer = newer
        self._state = state
        self._hashes = np.empty(HASHED, np.int64)
        """Working memory of `put` and `take_out`."""
        self._larger: Growing | None = None
        """The table that will replace the table in use. It contains all IDs before `_moved`."""
        self._touched = 0
        """The number of its slots that have memory."""
        self._larger_state = np.zeros(STATES, np.int64)
        self._moved = (0, 0)
        """A first index of a chunk, and a number of rows: all chunks before it, and these rows of it, are moved."""
        self._forgotten: deque[tuple[int, int]] = deque()
        """Places of chunks that are forgotten or are in runs. Each has the value of `_swept` at which no slot leads to
        the place any more."""
        self._swept = 0
        """The number of slots swept so far, in all rounds."""
        self._owed = 0
        """The number of slots that must still be swept for the frames so far."""
        self._given_back: deque[Iterator[None]] = deque()
        """Tables that are no longer needed. Releasing a table takes the operating system a long time, so it is done in
        steps."""

    @property
    def rows(self) -> Int64s:
        """The table in use. When the table grows, it is replaced by a different array."""
        rows: Int64s = self._table.rows
        return rows

    @property
    def memory_bytes(self) -> int:
        """The memory of the tables, and of all IDs to which slots of the tables may point."""
        newer = self._newer
        tables = self.rows.nbytes + (self._larger.rows.nbytes if self._larger is not None else 0)
        places = [*newer.order, *(place for place, _ in self._forgotten)]
        rows = sum(int(newer.chunks[place, ROWS]) for place in places)
        return int(tables + 4 * rows + sum(newer.bytes_of(place) for place in places))

    @property
    def soon_needed_bytes(self) -> int:
        """The memory of the larger table that will soon be needed; 0 if no larger table will be needed."""
        is_near = self._larger is None and self._needed > _NEAR * len(self.rows)
        return 2 * self.rows.nbytes if is_near else 0

    def put(self, place: int, first: int, end: int) -> None:
        """Put the IDs of these rows of a place into the table. If the table has equal IDs, the ID that was put in first
        is found."""
        self._put(self.rows, self._state, place, first, end)

    def take_out(self, place: int, first: int, end: int) -> None:
        """Remove these rows of a place from the table. This is allowed only while no larger table is being filled."""
        ids, offsets = self._newer.ids.rows.reshape(-1), self._newer.offsets.rows.reshape(-1)
        take_out(place, first, end, self._hash_key, self.rows, ids, offsets, self._state, self._hashes)
        # Other IDs may have moved to slots that were swept already.
        self._sweep_anew()

    def forget(self, place: int) -> None:
        """Forget the chunk at this place. The IDs of the chunk are removed from the table in steps."""
        self._newer.chunks[place, FIRST_INDEX] = GONE
        self._forgotten.append((place, self._swept + len(self.rows)))

    def load(self, ids: int) -> None:
        """Make a table with room for this number of IDs, and put all IDs of all chunks into the table."""
        self._table = _table(_slots_for(ids))
        for place in self._newer.order:
            self.put(place, 0, int(self._newer.chunks[place, ROWS]))

    # -- work in steps ---------------------------------------------------------------------------------------------

    def make_room(self, rows: int) -> None:
        """Make room for this number of further IDs."""
        used, slots = int(self._state[USED]) + rows, len(self.rows)
        if self._larger is None and used <= _LOAD * slots:
            return
        needed = self._needed + rows
        if self._larger is not None and needed > _LOAD * len(self._larger.rows):
            # The new table should have been smaller than the table in use.
            self.give_up_larger()
        is_full = used > _FULL * slots
        if needed <= _LOAD * slots and not is_full:
            return
        if slots <= _AT_ONCE or is_full:
            self._begin_larger(needed)
            self._move_on(int(self._state[NEXT] - self._state[WINDOW]))
        elif self._larger is None:
            self._begin_larger(needed)

    @property
    def _needed(self) -> int:
        """The number of slots needed, without those of forgotten IDs."""
        return min(int(self._state[USED]), self._newer.rows)

    def go_on(self, rows: int) -> None:
        """Do a part of the sweeping and growing: the share of a frame with `rows` rows."""
        if self._forgotten:
            self._owed += _SWEPT_A_ROW * rows + _SWEPT_A_FRAME
            if self._owed >= _SWEPT_AT_ONCE:
                self._sweep(self._owed)
                self._owed = 0
        self._grow(_TOUCHED_A_ROW * rows, _MOVED_A_ROW * rows)

    def tidy(self, rows: int) -> bool:
        """Do a part of the sweeping (the share of `rows` rows), release memory, and replace a nearly empty table by a
        smaller table.

        Return whether there is more to do.
        """
        self._sweep(_SWEPT_A_ROW * rows)
        self._newer.release()
        is_sparse = len(self.rows) > _AT_ONCE and self._state[USED] < _SPARSE * len(self.rows)
        if is_sparse and self._larger is None and not self._forgotten:
            self._begin_larger(2 * int(self._state[USED]))
        self._grow(_TOUCHED_A_ROW * rows, rows)
        return bool(self._forgotten or self._given_back) or self._larger is not None

    def give_up_larger(self) -> None:
        """Drop the larger table and keep the table in use. Afterwards IDs may be in other slots."""
        if self._larger is not None:
            self._given_back.append(self._larger.clear())
            self._larger = None

    def _begin_larger(self, needed: int) -> None:
        if self._larger is None or needed > _LOAD * len(self._larger.rows):
            self.give_up_larger()
            # Make both before setting either: there may be no memory for one of them.
            larger, state = _table(_slots_for(needed)), np.zeros(STATES, np.int64)
            self._larger, self._larger_state, self._touched = larger, state, 0
            self._moved = (int(self._state[WINDOW]), 0)

    def _sweep(self, slots: int) -> None:
        """Sweep this number of slots if any IDs are forgotten. Free the places to which no slot points any more."""
        newer = self._newer
        while self._forgotten and slots > 0:
            first = self._swept % len(self.rows)
            end = min(first + slots, len(self.rows))
            ids, offsets = newer.ids.rows.reshape(-1), newer.offsets.rows.reshape(-1)
            sweep_beside(first, end, self._hash_key, self.rows, ids, offsets, newer.chunks, self._state)
            self._swept += end - first
            slots -= end - first
            # Slots of the larger table may point to the place too.
            while self._larger is None and self._forgotten and self._forgotten[0][1] <= self._swept:
                newer.give_back(self._forgotten.popleft()[0])

    def _sweep_anew(self) -> None:
        """Count all slots as not swept."""
        until = self._swept + len(self.rows)
        self._forgotten = deque((place, until) for place, _ in self._forgotten)

    def _grow(self, slots: int, ids: int) -> None:
        """Write to `slots` slots of the larger table, so that the system allocates their memory. When all slots have
        memory, move `ids` IDs into the larger table.

        If there is no larger table, release some memory of an old table.
        """
        if self._larger is None:
            self._give_back()
        elif self._touched < len(self._larger.rows):
            self._larger.rows[self._touched : self._touched + slots : _PAGE_SLOTS] = EMPTY
            self._touched += slots
        else:
            self._move_on(ids)

    def _give_back(self) -> None:
        """Release some memory of a table that is no longer needed."""
        if self._given_back and next(self._given_back[0], self) is self:
            self._given_back.popleft()

    def _move_on(self, rows: int) -> None:
        """Move `rows` further rows into the larger table. When all rows are moved, the larger table replaces the table
        in use."""
        larger = self._larger
        if larger is None:
            return
        chunk_index, done = self._moved
        chunks = self._newer.chunks
        for place in list(self._newer.order):
            first_index, there = int(chunks[place, FIRST_INDEX]), int(chunks[place, ROWS])
            if first_index < chunk_index:
                continue
            first = done if first_index == chunk_index else 0
            end = min(first + rows, there)
            self._put(larger.rows, self._larger_state, place, first, end)
            self._moved = (first_index, end)
            rows -= end - first
            if end < there:
                return
        self._given_back.append(self._table.clear())
        self._table, self._larger = larger, None
        self._state[USED:] = self._larger_state[USED:]
        self._sweep_anew()

    def _put(self, slots: Int64s, state: Int64s, place: int, first: int, end: int) -> None:
        ids, offsets = self._newer.ids.rows.reshape(-1), self._newer.offsets.rows.reshape(-1)
        put(place, first, end, self._hash_key, slots, ids, offsets, state, self._hashes)


def _table(slots: int) -> Growing:
    return Growing(slots, (), np.int64)  # all EMPTY


def _slots_for(ids: int) -> int:
    """Return the number of slots of a table with room for this number of IDs and for some further IDs."""
    slots = _FIRST_SLOTS
    while ids > _LOAD * slots:
        slots *= 2
    return slots
