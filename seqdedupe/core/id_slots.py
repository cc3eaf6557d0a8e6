"""The table of a window of deduplication IDs, with the work that is done on it bit by bit: it grows, and is cleared.

It leads to all IDs of the chunks in memory, and to some of those that are forgotten or lie in runs, which is harmless:
whoever finds one sees by its index that it does not count. With the frames that come a share of these is taken out, and
a share of all IDs put into a larger table, if one is needed, so that no frame waits for all of it.
"""

from collections import deque
from collections.abc import Iterator

import numpy as np

from seqdedupe.core.growing import Growing
from seqdedupe.core.id_newer import Newer
from seqdedupe.core.id_table import EMPTY, FIRST_INDEX, NEXT, ROWS, STATES, USED, WINDOW, put, take_out
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
_CLEARED_A_ROW = 2
"""So many that are forgotten are taken out of the table with each row that comes."""
_CLEARED_A_FRAME = 64


class Slots:
    """The slots, as `id_table` has them, of IDs that lie in `newer`. `state` is the window's."""

    def __init__(self, hash_key: Int64s, newer: Newer, state: Int64s) -> None:
        self._table = _table(_FIRST_SLOTS)
        self._hash_key = hash_key
        self._newer = newer
        self._state = state
        self._larger: Growing | None = None
        """The table that is to take the place of the one in use, with all IDs below `_moved`."""
        self._touched = 0
        """So many of its slots have memory."""
        self._larger_state = np.zeros(STATES, np.int64)
        self._moved = (0, 0)
        """Of the chunk with this first index so many rows, and all before it."""
        self._forgotten: deque[tuple[int, int]] = deque()
        """Places of chunks that are forgotten or lie in runs, and how many of their rows are cleared away."""

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
        is_near = self._larger is None and self._state[USED] > _NEAR * len(self.rows)
        return 2 * self.rows.nbytes if is_near else 0

    def put(self, place: int, first: int, end: int) -> None:
        """The IDs of these rows of a place are found from now on, each before all that are put in later."""
        self._put(self.rows, self._state, place, first, end)

    def take_out(self, place: int, first: int, end: int) -> None:
        """These rows of a place are found no more."""
        ids, offsets = self._newer.ids.rows.reshape(-1), self._newer.offsets.rows.reshape(-1)
        take_out(place, first, end, self._hash_key, self.rows, ids, offsets, self._state)
        if self._larger is not None and self._touched >= len(self._larger.rows):
            take_out(place, first, end, self._hash_key, self._larger.rows, ids, offsets, self._larger_state)

    def forget(self, place: int) -> None:
        """The chunk at this place is not among the others any more: its IDs are taken out by and by."""
        self._forgotten.append((place, 0))

    def load(self, ids: int) -> None:
        """A table of all IDs of all chunks, so many."""
        self._table = _table(_slots_for(ids))
        for place in self._newer.order:
            self.put(place, 0, int(self._newer.chunks[place, ROWS]))

    # -- bit by bit ------------------------------------------------------------------------------------------------

    def make_room(self, rows: int) -> None:
        """There is room for so many more IDs."""
        needed = int(self._state[USED]) + rows
        if self._larger is not None and needed > _LOAD * len(self._larger.rows):
            # It was to be a smaller one.
            self.give_up_larger()
        if needed <= _LOAD * len(self.rows):
            return
        if len(self.rows) <= _AT_ONCE or needed > _FULL * len(self.rows):
            self._begin_larger(needed)
            self._move_on(int(self._state[NEXT] - self._state[WINDOW]))
        elif self._larger is None:
            self._begin_larger(needed)

    def go_on(self, rows: int) -> None:
        """The share of a frame with so many rows in what is done bit by bit."""
        self._clear(_CLEARED_A_ROW * rows + _CLEARED_A_FRAME)
        self._grow(_TOUCHED_A_ROW * rows, _MOVED_A_ROW * rows)

    def tidy(self, rows: int) -> bool:
        """Clears away so many rows of what is forgotten or lies in runs, and gives their memory back; makes a table
        smaller that is nearly empty.

        Whether there is more to do.
        """
        self._clear(rows)
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

    def _clear(self, left: int) -> None:
        """Takes so many rows out of the table that are no more to be found there."""
        chunks = self._newer.chunks
        while self._forgotten and left > 0:
            place, cleared = self._forgotten.popleft()
            end = min(cleared + left, int(chunks[place, ROWS]))
            self.take_out(place, cleared, end)
            left -= end - cleared
            if end < chunks[place, ROWS]:
                self._forgotten.appendleft((place, end))
            else:
                self._newer.give_back(place)

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

    def _put(self, slots: Int64s, state: Int64s, place: int, first: int, end: int) -> None:
        ids, offsets = self._newer.ids.rows.reshape(-1), self._newer.offsets.rows.reshape(-1)
        put(place, first, end, self._hash_key, slots, ids, offsets, state)


def _table(slots: int) -> Growing:
    return Growing(slots, (), np.int64)  # all EMPTY


def _slots_for(ids: int) -> int:
    """The slots of a table that has room for so many, and for some more."""
    slots = _FIRST_SLOTS
    while ids > _LOAD * slots:
        slots *= 2
    return slots
