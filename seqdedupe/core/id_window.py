"""The window of a topic of deduplication IDs: the IDs of all messages from an index on, and what is a copy of one.

It is a suffix of the log: messages below `confirmed_index` are persisted, those after it in flight, and those below
`first_index` forgotten. IDs lie in chunks (`id_table`), which fill up one after the other, and are forgotten as a
whole, the oldest first. What is forgotten counts from that moment on; the table is cleared of it bit by bit, with the
frames that come, and made larger in the same way, so that no frame waits for all of it.

What is older may lie in runs (`id_runs`), on disk: then the table is cleared of it in the same way, and whoever decides
looks there first. Chunks go the way from memory to runs and out of the window one after the other, the oldest first.

An ID counts at the highest index that it was accepted at: where it is new again beyond the window, or because the topic
does not deduplicate, what is forgotten or failed of it elsewhere changes nothing.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from seqdedupe.core.growing import Growing
from seqdedupe.core.id_chunks import NO_LIMIT, PARTS, Piece, WindowLimits
from seqdedupe.core.id_older import Chunk, Older
from seqdedupe.core.id_runs import Run
from seqdedupe.core.id_table import (
    CHUNK_BYTES,
    CHUNK_OFFSETS,
    CHUNK_ROWS,
    COLUMNS,
    CONFIRMED,
    CURRENT,
    FIRST_INDEX,
    LAST_TIME_MS,
    NEXT,
    NOWHERE,
    ROW_BITS,
    ROWS,
    STATES,
    USED,
    WINDOW,
    decide,
    put,
    take_out,
)
from seqdedupe.core.rule import DUP
from seqdedupe.format.columns import DEDUPLICATION_ID_OFFSETS, start
from seqdedupe.format.columns import ROWS as ROWS_OF_BATCH
from seqdedupe.format.jit import Int32s, Int64s, Int64s2, Uint8s
from seqdedupe.format.tag import key_of

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
_CLEARED_A_ROW = 2
"""So many that are forgotten are taken out of the table with each row that comes."""
_CLEARED_A_FRAME = 64

_NONE_REPLACED: Int64s2 = np.zeros((0, 2), np.int64)
NONE_OLDER: Int64s = np.zeros(0, np.int64)

Decision = tuple[int, Uint8s, Int64s, Int64s]
"""How many rows are new; the verdicts; the rows with verdict DUP; and the indexes of their originals."""


class IdWindow:
    """The IDs from `first_index` on. The key of the hash has 16 bytes and belongs to the topic; it is never served."""

    def __init__(self, key: bytes, first_index: int) -> None:
        self.key = key
        self.hash_key = key_of(key)
        self.older = Older()
        """What lies in runs."""
        self.chunks_opened = 0
        self._slots = _table(_FIRST_SLOTS)
        self._larger: Int64s | None = None
        """The table that is to take the place of the one in use, with all IDs below `_moved`."""
        self._larger_state = np.zeros(STATES, np.int64)
        self._moved = (0, 0)
        """Of the chunk with this first index so many rows, and all before it."""
        self._ids = Growing(0, (CHUNK_BYTES,), np.uint8)
        self._offsets = Growing(0, (CHUNK_OFFSETS,), np.int32)
        self._chunks: Int64s2 = np.zeros((0, COLUMNS), np.int64)
        self._free: list[int] = []
        self._order: deque[int] = deque()
        """The places of the chunks in memory, the oldest first."""
        self._forgotten: deque[tuple[int, int]] = deque()
        """Places of chunks that are forgotten or lie in runs, and how many of their rows are cleared away."""
        self._is_sealed = True
        """Whether the newest chunk takes no more."""
        self._replaced: deque[tuple[int, Int64s2]] = deque()
        """Of each frame in flight with IDs that were known before: the index after it, and where they lie and did, as
        `id_table.decide` says it. Nothing of what is in the log: its places are those of other IDs by and by."""
        self._id_bytes = 0
        """Of all chunks that are not forgotten, wherever they lie."""
        self._state = np.zeros(STATES, np.int64)
        self._state[[WINDOW, CONFIRMED, NEXT]] = first_index

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def first_index(self) -> int:
        """The IDs of all messages from this index on are known."""
        return int(self._state[WINDOW])

    @property
    def confirmed_index(self) -> int:
        """All messages below it are in the log."""
        return int(self._state[CONFIRMED])

    @property
    def next_index(self) -> int:
        """The index that the next new message gets."""
        return int(self._state[NEXT])

    def __len__(self) -> int:
        """How many messages' IDs are known, those in flight apart."""
        return self.confirmed_index - self.first_index

    @property
    def first_time_ms(self) -> int:
        """When the first of them was published, in milliseconds since 1970; 0 if there is none."""
        return self._oldest().first_time_ms if len(self) else 0

    @property
    def memory_index(self) -> int:
        """Those of messages from this index on are in memory."""
        return max(self.first_index, self.older.end_index)

    @property
    def on_disk(self) -> int:
        """How many of them lie in runs."""
        return self.memory_index - self.first_index

    @property
    def memory_bytes(self) -> int:
        """What IDs and tables take in memory, and runs."""
        tables = self._slots.nbytes + (self._larger.nbytes if self._larger is not None else 0)
        places = [*self._order, *(place for place, _ in self._forgotten)]
        rows = sum(int(self._chunks[place, ROWS]) for place in places)
        return int(tables + 4 * rows + sum(self._chunk_bytes(place) for place in places)) + self.older.memory_bytes

    @property
    def needed_bytes(self) -> int:
        """The same, with the larger table that will soon be needed."""
        is_near = self._larger is None and self._state[USED] > _NEAR * len(self._slots)
        return self.memory_bytes + (2 * self._slots.nbytes if is_near else 0)

    # -- frames --------------------------------------------------------------------------------------------------

    def decide(
        self,
        view: Uint8s,
        places: Int64s,
        deduplicate: bool,
        limits: WindowLimits,
        now_ms: int,
        older: Int64s = NONE_OLDER,
    ) -> Decision:
        """What each row of a batch is; new ones are in flight from now on, with the indexes from `next_index` on.

        Forgets before that what lies beyond the limits. `now_ms` is the time, in milliseconds since 1970. `older` has
        the index of each row's ID in the runs (else NOWHERE); it may be left out if there are none, or with
        `deduplicate` off.
        """
        rows = int(places[ROWS_OF_BATCH])
        if deduplicate and self.older.runs and len(older) != rows:
            raise ValueError("nobody has looked into the runs")
        self.move(limits, now_ms)
        self._make_room(rows)
        frame_index = self.next_index
        verdicts, found = np.empty(rows, np.uint8), np.empty(rows, np.int64)
        replaced = _NONE_REPLACED if deduplicate else np.empty((rows, 2), np.int64)
        new = first = 0
        while first < rows:
            place, end = self._room_for(view, places, first, rows, limits, now_ms)
            before = self._chunk_bytes(place)
            of_part = decide(
                view,
                places,
                first,
                end,
                frame_index,
                deduplicate,
                self.hash_key,
                self._slots,
                self._ids.rows.reshape(-1),
                self._offsets.rows.reshape(-1),
                self._chunks,
                self._state,
                verdicts,
                found,
                replaced,
                older,
            )
            if of_part:
                self._id_bytes += self._chunk_bytes(place) - before
                self._chunks[place, LAST_TIME_MS] = max(int(self._chunks[place, LAST_TIME_MS]), now_ms)
            new += of_part
            first = end
        if not deduplicate and (known := replaced[replaced[:, 1] != NOWHERE]).size:
            self._replaced.append((self.next_index, known))
        self._go_on(rows)
        if new == rows:
            return new, verdicts, _NO_ROWS, _NO_ROWS
        dups = np.flatnonzero(verdicts == DUP)
        return new, verdicts, dups, found[dups]

    def confirm(self, rows: int) -> None:
        """So many more messages are in the log, the oldest in flight."""
        self._state[CONFIRMED] += rows
        while self._replaced and self._replaced[0][0] <= self.confirmed_index:
            self._replaced.popleft()

    def fail(self) -> None:
        """Nothing that is in flight will ever be in the log: it is as if it had not come."""
        if self.next_index == self.confirmed_index:
            return
        self._larger = None
        while self._order and (left := self.confirmed_index - int(self._chunks[self._order[-1], FIRST_INDEX])) <= 0:
            place = self._order.pop()
            self._take_out(place, 0, int(self._chunks[place, ROWS]))
            self._free.append(place)
            self._is_sealed = True
        if self._order and left < self._chunks[self._order[-1], ROWS]:
            self._take_out(self._order[-1], left, int(self._chunks[self._order[-1], ROWS]))
            self._chunks[self._order[-1], ROWS] = left
        self._id_bytes = sum(chunk.id_bytes for chunk in self._chunks_of_all())
        self._state[NEXT] = self._state[CONFIRMED]
        self._restore()

    def replay(self, view: Uint8s, places: Int64s, index: int, time_ms: int, limits: WindowLimits) -> None:
        """The rows of a batch are in the log from this index on, published at that time. Nothing is in flight.

        Of what is known already nothing changes.
        """
        rows = int(places[ROWS_OF_BATCH])
        if index + rows <= self.confirmed_index:
            return
        if index != self.confirmed_index:
            self._begin_at(index)
        self.decide(view, places, False, limits, time_ms)
        self._state[CONFIRMED] = self._state[NEXT]
        self._replaced.clear()

    # -- runs ----------------------------------------------------------------------------------------------------

    def oldest_chunks(self, part: int) -> list[int]:
        """The first indexes of the oldest chunks in memory that are full and in the log, of which a run can be made:
        as many as have one in `part` of the IDs there, or more. The newest one is closed if it is the only one."""
        if len(self._order) == 1 and self._chunks[self._order[0], ROWS] and self.confirmed_index == self.next_index:
            self._is_sealed = True
        full = len(self._order) - (not self._is_sealed)
        most = (self.next_index - self.memory_index) // part
        chosen: list[int] = []
        for place in list(self._order)[:full]:
            chunk = self._chunk(place)
            if chunk.end_index > self.confirmed_index or (chosen and chunk.end_index - chosen[0] > most):
                break
            chosen.append(chunk.first_index)
        return chosen

    def whole_chunk(self, first_index: int) -> Piece | None:
        """A copy of the chunk in memory that begins with this index; None if it is forgotten."""
        for place in self._order:
            if self._chunks[place, FIRST_INDEX] == first_index:
                return self._piece(place, 0)
        return None

    def named(self, runs: tuple[Run, ...]) -> None:
        """A snapshot is durable that names these runs, and has no chunks that lie in them."""
        self.older.named(runs)
        while self._order and self._chunks[self._order[0], FIRST_INDEX] < self.older.end_index:
            self.older.chunks.append(self._chunk(self._order[0]))
            self._forgotten.append((self._order.popleft(), 0))

    def tidy(self, rows: int) -> bool:
        """Clears away so many rows of what is forgotten or lies in runs; makes a table smaller that is nearly empty.

        Whether there is more to do.
        """
        self._clear(rows)
        is_sparse = len(self._slots) > _AT_ONCE and self._state[USED] < _SPARSE * len(self._slots)
        if is_sparse and self._larger is None and not self._forgotten:
            self._begin_larger(2 * int(self._state[USED]))
        self._move_on(rows)
        return bool(self._forgotten) or self._larger is not None

    # -- snapshots -----------------------------------------------------------------------------------------------

    def pieces(self, from_index: int) -> list[Piece]:
        """Copies of what is persisted from this index on."""
        return [piece for place in self._order if (piece := self._piece(place, from_index)) is not None]

    def load(self, pieces: Iterable[Piece], runs: tuple[Run, ...] = ()) -> None:
        """Takes over the runs and the pieces of a snapshot, which follow each other from `first_index` on. Only before
        anything else came."""
        self.older.load(runs, self.first_index)
        self._id_bytes = sum(chunk.id_bytes for chunk in self.older.chunks)
        self._state[[CONFIRMED, NEXT]] = self.memory_index
        chunk_index = -1
        for piece in pieces:
            if piece.chunk_index != chunk_index or self._is_sealed:
                self._open_chunk(piece.first_index, piece.first_time_ms)
                chunk_index = piece.chunk_index
            place = self._order[-1]
            here, there = int(self._chunks[place, ROWS]), self._chunk_bytes(place)
            rows = here + len(piece.sizes)
            if rows > CHUNK_ROWS or there + len(piece.ids) > CHUNK_BYTES:
                raise ValueError(f"a chunk has {rows} IDs, more than it can")
            self._ids.rows[place, there : there + len(piece.ids)] = piece.ids
            np.cumsum(piece.sizes, dtype=np.int32, out=self._offsets.rows[place, here + 1 : rows + 1])
            self._offsets.rows[place, here + 1 : rows + 1] += there
            self._chunks[place, [ROWS, LAST_TIME_MS]] = rows, piece.last_time_ms
            self._id_bytes += len(piece.ids)
            self._state[[CONFIRMED, NEXT]] = piece.end_index
        self._slots = _table(_slots_for(self.confirmed_index - self.memory_index))
        for place in self._order:
            self._put(self._slots, self._state, place, 0, int(self._chunks[place, ROWS]))

    # -- forgetting ----------------------------------------------------------------------------------------------

    def move(self, limits: WindowLimits, now_ms: int) -> None:
        """Forgets chunks that lie beyond the limits, the oldest first, none with anything in flight."""
        if self._order and self._is_due(self._order[-1], limits, now_ms):
            self._is_sealed = True
        while self.older.chunks or (self._order and (len(self._order) > 1 or self._is_sealed)):
            oldest = self._oldest()
            if oldest.end_index > self.confirmed_index or not self._is_beyond(oldest, limits, now_ms):
                return
            if self.older.chunks:
                self.older.chunks.popleft()
            else:
                self._forgotten.append((self._order.popleft(), 0))
            self._id_bytes -= oldest.id_bytes
            self._state[WINDOW] = oldest.end_index

    def _is_beyond(self, oldest: Chunk, limits: WindowLimits, now_ms: int) -> bool:
        """Whether the messages after this chunk alone reach a limit, or it is too old."""
        if self.confirmed_index - oldest.end_index >= limits.messages:
            return True
        if limits.milliseconds != NO_LIMIT and oldest.last_time_ms <= now_ms - limits.milliseconds:
            return True
        if limits.id_bytes == NO_LIMIT or self._id_bytes - oldest.id_bytes < limits.id_bytes:
            return False
        return self._id_bytes - oldest.id_bytes - self._bytes_in_flight() >= limits.id_bytes

    def _is_due(self, place: int, limits: WindowLimits, now_ms: int) -> bool:
        """Whether a chunk is large or old enough to take no more: the window is to move by small parts of it."""
        _, rows, first_time_ms, _ = self._chunks[place].tolist()
        if not rows:
            return False
        if rows >= max(limits.messages // PARTS, 1):
            return True
        if limits.milliseconds != NO_LIMIT and now_ms - first_time_ms >= limits.milliseconds // PARTS:
            return True
        return limits.id_bytes != NO_LIMIT and self._chunk_bytes(place) >= max(limits.id_bytes // PARTS, 1)

    def _bytes_in_flight(self) -> int:
        """How many bytes the IDs of messages in flight have."""
        size_bytes = 0
        for place in reversed(self._order):
            persisted = max(self.confirmed_index - int(self._chunks[place, FIRST_INDEX]), 0)
            if 0 < self._chunks[place, ROWS] <= persisted:
                break
            size_bytes += self._chunk_bytes(place) - int(self._offsets.rows[place, persisted])
        return size_bytes

    # -- chunks --------------------------------------------------------------------------------------------------

    def _chunk_bytes(self, place: int) -> int:
        return int(self._offsets.rows[place, self._chunks[place, ROWS]])

    def _chunk(self, place: int) -> Chunk:
        first_index, rows, first_time_ms, last_time_ms = self._chunks[place].tolist()
        return Chunk(first_index, rows, self._chunk_bytes(place), first_time_ms, last_time_ms)

    def _oldest(self) -> Chunk:
        """Of all that are not forgotten, of which there is one."""
        return self.older.chunks[0] if self.older.chunks else self._chunk(self._order[0])

    def _chunks_of_all(self) -> Iterator[Chunk]:
        yield from self.older.chunks
        yield from map(self._chunk, self._order)

    def _room_for(
        self, view: Uint8s, places: Int64s, first: int, rows: int, limits: WindowLimits, now_ms: int
    ) -> tuple[int, int]:
        """The current chunk, and up to which row of a batch it takes all from `first` on."""
        while True:
            if self._is_sealed:
                self._open_chunk(self.next_index, now_ms)
            place = self._order[-1]
            here = int(self._chunks[place, ROWS])
            most = min(CHUNK_ROWS, max(limits.messages // PARTS, 1))
            end = min(rows, first + most - here)
            at = start(places, DEDUPLICATION_ID_OFFSETS)
            begins = view[at + 4 * first : at + 4 * (max(end, first) + 1)].view(np.int32)
            left = CHUNK_BYTES - self._chunk_bytes(place)
            if end > first and begins[-1] - begins[0] > left:
                end = first + int(np.searchsorted(begins, begins[0] + left, "right")) - 1
            if end > first:
                return place, end
            self._is_sealed = True

    def _open_chunk(self, first_index: int, time_ms: int) -> None:
        """The newest chunk is another one from now on."""
        if not self._free:
            before = len(self._chunks)
            self._ids.reserve(before + 1)
            self._offsets.reserve(before + 1)
            more = len(self._ids.rows)
            if len(self._offsets.rows) < more:
                self._offsets.reserve(more)
            chunks = np.zeros((more, COLUMNS), np.int64)
            chunks[:before] = self._chunks
            self._chunks = chunks
            self._free.extend(reversed(range(before, more)))
        place = self._free.pop()
        self._offsets.rows[place, 0] = 0
        self._chunks[place] = (first_index, 0, time_ms, time_ms)
        self._order.append(place)
        self.chunks_opened += 1
        self._state[CURRENT] = place
        self._is_sealed = False

    def _begin_at(self, index: int) -> None:
        """What is between is unknown, so that nothing before it counts: a window has no holes."""
        while self._order:
            self._forgotten.append((self._order.popleft(), 0))
        self.older.clear()
        self._id_bytes = 0
        self._is_sealed = True
        self._state[[WINDOW, CONFIRMED, NEXT]] = index

    def _piece(self, place: int, from_index: int) -> Piece | None:
        chunk_index, rows, first_time_ms, last_time_ms = self._chunks[place].tolist()
        first = max(from_index - chunk_index, 0)
        end = min(rows, self.confirmed_index - chunk_index)
        if end <= first:
            return None
        offsets: Int32s = self._offsets.rows[place, first : end + 1]
        sizes = np.diff(offsets).astype(np.uint8)
        ids = self._ids.rows[place, int(offsets[0]) : int(offsets[-1])].copy()
        return Piece(chunk_index, chunk_index + first, first_time_ms, last_time_ms, sizes, ids)

    # -- the table -----------------------------------------------------------------------------------------------

    def _put(self, slots: Int64s, state: Int64s, place: int, first: int, end: int) -> None:
        put(place, first, end, self.hash_key, slots, self._ids.rows.reshape(-1), self._offsets.rows.reshape(-1), state)

    def _take_out(self, place: int, first: int, end: int) -> None:
        ids, offsets = self._ids.rows.reshape(-1), self._offsets.rows.reshape(-1)
        take_out(place, first, end, self.hash_key, self._slots, ids, offsets, self._state)
        if self._larger is not None:
            take_out(place, first, end, self.hash_key, self._larger, ids, offsets, self._larger_state)

    def _restore(self) -> None:
        """IDs that were accepted again, and have failed, count where they did before."""
        for _, known in reversed(self._replaced):
            for lies, before in known[::-1].tolist():
                if not self._is_in_use(lies) and self._is_in_use(before):
                    place, row = before >> ROW_BITS, before & (CHUNK_ROWS - 1)
                    self._put(self._slots, self._state, place, row, row + 1)
        self._replaced.clear()

    def _is_in_use(self, lies: int) -> bool:
        """Whether a message that has not failed, and is not forgotten, lies in this row of a place."""
        place, row = lies >> ROW_BITS, lies & (CHUNK_ROWS - 1)
        return place in self._order and row < self._chunks[place, ROWS]

    def _make_room(self, rows: int) -> None:
        """The table has room for so many more."""
        needed = int(self._state[USED]) + rows
        if self._larger is not None and needed > _LOAD * len(self._larger):
            # It was to be a smaller one.
            self._larger = None
        if needed <= _LOAD * len(self._slots):
            return
        if len(self._slots) <= _AT_ONCE or needed > _FULL * len(self._slots):
            self._begin_larger(needed)
            self._move_on(self.next_index - self.first_index)
        elif self._larger is None:
            self._begin_larger(needed)

    def _begin_larger(self, needed: int) -> None:
        if self._larger is None or needed > _LOAD * len(self._larger):
            self._larger = _table(_slots_for(needed))
            self._larger_state = np.zeros(STATES, np.int64)
            self._moved = (self.first_index, 0)

    def _go_on(self, rows: int) -> None:
        """The share of a frame with so many rows in what is done bit by bit."""
        self._clear(_CLEARED_A_ROW * rows + _CLEARED_A_FRAME)
        if self._larger is not None:
            self._move_on(_MOVED_A_ROW * rows)

    def _clear(self, left: int) -> None:
        """Takes so many rows out of the table that are no more to be found there."""
        while self._forgotten and left > 0:
            place, cleared = self._forgotten.popleft()
            end = min(cleared + left, int(self._chunks[place, ROWS]))
            self._take_out(place, cleared, end)
            left -= end - cleared
            if end < self._chunks[place, ROWS]:
                self._forgotten.appendleft((place, end))
            else:
                self._free.append(place)

    def _move_on(self, rows: int) -> None:
        """So many rows more go into the larger table; when all are there, it takes the other one's place."""
        larger = self._larger
        if larger is None:
            return
        chunk_index, done = self._moved
        for place in list(self._order):
            first_index, there = int(self._chunks[place, FIRST_INDEX]), int(self._chunks[place, ROWS])
            if first_index < chunk_index:
                continue
            first = done if first_index == chunk_index else 0
            end = min(first + rows, there)
            self._put(larger, self._larger_state, place, first, end)
            self._moved = (first_index, end)
            rows -= end - first
            if end < there:
                return
        self._slots, self._larger = larger, None
        self._state[USED:] = self._larger_state[USED:]


_NO_ROWS: Int64s = np.zeros(0, np.int64)


def _table(slots: int) -> Int64s:
    return np.zeros(slots, np.int64)  # all EMPTY


def _slots_for(ids: int) -> int:
    """The slots of a table that has room for so many, and for some more."""
    slots = _FIRST_SLOTS
    while ids > _LOAD * slots:
        slots *= 2
    return slots
