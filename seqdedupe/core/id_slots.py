"""What a window of deduplication IDs has in memory: its newer part, chunks that fill up, and the table that leads to
them, with the work that is done on it bit by bit: it grows, and is cleared.

The table leads to all IDs of the chunks in memory, and to some of those that are forgotten or lie in runs, which is
harmless: whoever finds one sees that its chunk is gone. With the frames that come a share of the slots is swept clear
of these, one slot after the other, which is quicker than looking for each of them; and a share of all IDs is put into a
larger table, if one is needed, so that no frame waits for all of it.
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
from seqdedupe.format.columns import DEDUPLICATION_ID_OFFSETS, start
from seqdedupe.format.jit import Int32s, Int64s, Int64s2, Uint8s
from seqdedupe.limits import NO_LIMIT, WindowLimits

# -- The newer part of a window: chunks in memory, each at a place (`id_table`), which fill up.
#
# What lies at a place stays there until the place is given back: the table may lead to it, long after the chunk has
# been forgotten.

PARTS = 16
"""A window moves forward by one in so many parts of it, or less."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a window: it is forgotten as a whole."""

    first_index: int
    rows: int
    id_bytes: int
    first_time_ms: int
    last_time_ms: int

    @property
    def end_index(self) -> int:
        return self.first_index + self.rows


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


_FIRST_SLOTS = 1024
_LOAD = 0.7
"""From here on a larger table is made."""
_NEAR = 0.6
"""From here on it is near."""
_SPARSE = 0.15
"""Below this a smaller one may be made."""
_FULL = 0.9
"""More a table never has: then the larger one is finished at once."""
_AT_ONCE = 1 << 14
"""A table with so few slots is simply made anew."""
_MOVED_A_ROW = 8
"""So many IDs go into the larger table with each row that comes, which is done before the other one is full."""
_PAGE_SLOTS = 512
"""So many slots have a page of memory."""
_TOUCHED_A_ROW = 64
"""So many slots of the larger table get their memory with each row that comes, before the first ID is put there: IDs go
everywhere in it, and it takes the system microseconds for each page that is written to for the first time."""
_SWEPT_A_ROW = 16
"""So many slots are swept with each row that comes, while there is anything to be taken out: all of them before a
sixteenth as many IDs are forgotten anew."""
_SWEPT_A_FRAME = 64
_SWEPT_AT_ONCE = 512
"""So many or more: a call takes as long as a thousand slots."""


class Slots:
    """The slots, as `id_table` has them, of IDs that lie in `newer`. `state` is the window's."""

    def __init__(self, hash_key: Int64s, newer: Newer, state: Int64s) -> None:
        self._table = _table(_FIRST_SLOTS)
        self._hash_key = hash_key
        self._newer = newer
        self._state = state
        self._hashes = np.empty(HASHED, np.int64)
        """For `put` and `take_out`."""
        self._larger: Growing | None = None
        """The table that is to take the place of the one in use, with all IDs below `_moved`."""
        self._touched = 0
        """So many of its slots have memory."""
        self._larger_state = np.zeros(STATES, np.int64)
        self._moved = (0, 0)
        """Of the chunk with this first index so many rows, and all before it."""
        self._forgotten: deque[tuple[int, int]] = deque()
        """Places of chunks that are forgotten or lie in runs, and how many slots are swept when none leads there."""
        self._swept = 0
        """So many are, all of them over and over."""
        self._owed = 0
        """So many should be, for the frames that came."""
        self._given_back: deque[Iterator[None]] = deque()
        """Tables that are not needed any more: it takes the system long to take one back, too."""

    @property
    def rows(self) -> Int64s:
        """The table in use: another array after it has grown."""
        rows: Int64s = self._table.rows
        return rows

    @property
    def memory_bytes(self) -> int:
        """What the tables take, and all IDs that may be found by them."""
        newer = self._newer
        tables = self.rows.nbytes + (self._larger.rows.nbytes if self._larger is not None else 0)
        places = [*newer.order, *(place for place, _ in self._forgotten)]
        rows = sum(int(newer.chunks[place, ROWS]) for place in places)
        return int(tables + 4 * rows + sum(newer.bytes_of(place) for place in places))

    @property
    def soon_needed_bytes(self) -> int:
        """What a larger table will take, if one is soon needed."""
        is_near = self._larger is None and self._needed > _NEAR * len(self.rows)
        return 2 * self.rows.nbytes if is_near else 0

    def put(self, place: int, first: int, end: int) -> None:
        """The IDs of these rows of a place are found from now on, each before all that are put in later."""
        self._put(self.rows, self._state, place, first, end)

    def take_out(self, place: int, first: int, end: int) -> None:
        """These rows of a place are found no more. Only while no larger table is being filled."""
        ids, offsets = self._newer.ids.rows.reshape(-1), self._newer.offsets.rows.reshape(-1)
        take_out(place, first, end, self._hash_key, self.rows, ids, offsets, self._state, self._hashes)
        # Others may have been moved up to where it was swept already.
        self._sweep_anew()

    def forget(self, place: int) -> None:
        """The chunk at this place is not among the others any more: its IDs are taken out by and by."""
        self._newer.chunks[place, FIRST_INDEX] = GONE
        self._forgotten.append((place, self._swept + len(self.rows)))

    def load(self, ids: int) -> None:
        """A table of all IDs of all chunks, so many."""
        self._table = _table(_slots_for(ids))
        for place in self._newer.order:
            self.put(place, 0, int(self._newer.chunks[place, ROWS]))

    # -- bit by bit ------------------------------------------------------------------------------------------------

    def make_room(self, rows: int) -> None:
        """There is room for so many more IDs."""
        used, slots = int(self._state[USED]) + rows, len(self.rows)
        if self._larger is None and used <= _LOAD * slots:
            return
        needed = self._needed + rows
        if self._larger is not None and needed > _LOAD * len(self._larger.rows):
            # It was to be a smaller one.
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
        """The slots that it needs, but for what is to be swept out."""
        return min(int(self._state[USED]), self._newer.rows)

    def go_on(self, rows: int) -> None:
        """The share of a frame with so many rows in what is done bit by bit."""
        if self._forgotten:
            self._owed += _SWEPT_A_ROW * rows + _SWEPT_A_FRAME
            if self._owed >= _SWEPT_AT_ONCE:
                self._sweep(self._owed)
                self._owed = 0
        self._grow(_TOUCHED_A_ROW * rows, _MOVED_A_ROW * rows)

    def tidy(self, rows: int) -> bool:
        """The share of so many rows in sweeping out what is forgotten or lies in runs, whose memory is given back;
        makes a table smaller that is nearly empty.

        Whether there is more to do.
        """
        self._sweep(_SWEPT_A_ROW * rows)
        self._newer.release()
        is_sparse = len(self.rows) > _AT_ONCE and self._state[USED] < _SPARSE * len(self.rows)
        if is_sparse and self._larger is None and not self._forgotten:
            self._begin_larger(2 * int(self._state[USED]))
        self._grow(_TOUCHED_A_ROW * rows, rows)
        return bool(self._forgotten or self._given_back) or self._larger is not None

    def give_up_larger(self) -> None:
        """The table in use stays: what was put into the larger one need not lie where it did."""
        if self._larger is not None:
            self._given_back.append(self._larger.clear())
            self._larger = None

    def _begin_larger(self, needed: int) -> None:
        if self._larger is None or needed > _LOAD * len(self._larger.rows):
            self.give_up_larger()
            # Both or neither: there may be no memory for one of them.
            larger, state = _table(_slots_for(needed)), np.zeros(STATES, np.int64)
            self._larger, self._larger_state, self._touched = larger, state, 0
            self._moved = (int(self._state[WINDOW]), 0)

    def _sweep(self, slots: int) -> None:
        """Sweeps so many slots, if there is anything to be taken out, and gives places back to which none leads."""
        newer = self._newer
        while self._forgotten and slots > 0:
            first = self._swept % len(self.rows)
            end = min(first + slots, len(self.rows))
            ids, offsets = newer.ids.rows.reshape(-1), newer.offsets.rows.reshape(-1)
            sweep_beside(first, end, self._hash_key, self.rows, ids, offsets, newer.chunks, self._state)
            self._swept += end - first
            slots -= end - first
            # The larger table may lead there, too.
            while self._larger is None and self._forgotten and self._forgotten[0][1] <= self._swept:
                newer.give_back(self._forgotten.popleft()[0])

    def _sweep_anew(self) -> None:
        """None of the slots counts as swept."""
        until = self._swept + len(self.rows)
        self._forgotten = deque((place, until) for place, _ in self._forgotten)

    def _grow(self, slots: int, ids: int) -> None:
        """So many slots of the larger table get memory; when all have, so many IDs more go into it. What is not needed
        any more is given back."""
        if self._larger is None:
            self._give_back()
        elif self._touched < len(self._larger.rows):
            self._larger.rows[self._touched : self._touched + slots : _PAGE_SLOTS] = EMPTY
            self._touched += slots
        else:
            self._move_on(ids)

    def _give_back(self) -> None:
        """Some memory of a table that is not needed any more."""
        if self._given_back and next(self._given_back[0], self) is self:
            self._given_back.popleft()

    def _move_on(self, rows: int) -> None:
        """So many rows more go into the larger table; when all are there, it takes the other one's place."""
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
    """The slots of a table that has room for so many, and for some more."""
    slots = _FIRST_SLOTS
    while ids > _LOAD * slots:
        slots *= 2
    return slots
