"""The table of a window of deduplication IDs, with the work that is done on it bit by bit: it grows, and is cleared.

It leads to all IDs of the chunks in memory, and to some of those that are forgotten or lie in runs, which is harmless:
whoever finds one sees that its chunk is gone. With the frames that come a share of the slots is swept clear of these,
one slot after the other, which is quicker than looking for each of them; and a share of all IDs is put into a larger
table, if one is needed, so that no frame waits for all of it.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np

from seqdedupe.core.growing import Growing
from seqdedupe.core.id_beside import sweep
from seqdedupe.core.id_newer import Newer
from seqdedupe.core.id_table import (
    EMPTY,
    FIRST_INDEX,
    GONE,
    HASHED,
    NEXT,
    ROWS,
    STATES,
    USED,
    WINDOW,
    put,
    take_out,
)
from seqdedupe.format.jit import Int64s

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
            self._larger = _table(_slots_for(needed))
            self._touched = 0
            self._larger_state = np.zeros(STATES, np.int64)
            self._moved = (int(self._state[WINDOW]), 0)

    def _sweep(self, slots: int) -> None:
        """Sweeps so many slots, if there is anything to be taken out, and gives places back to which none leads."""
        newer = self._newer
        while self._forgotten and slots > 0:
            first = self._swept % len(self.rows)
            end = min(first + slots, len(self.rows))
            ids, offsets = newer.ids.rows.reshape(-1), newer.offsets.rows.reshape(-1)
            sweep(first, end, self._hash_key, self.rows, ids, offsets, newer.chunks, self._state)
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
