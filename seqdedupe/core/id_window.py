"""The window of a topic of deduplication IDs: the IDs of all messages from an index on, and what is a copy of one.

It is a suffix of the log: messages below `confirmed_index` are persisted, those after it in flight, and those below
`first_index` forgotten. IDs lie in chunks (`Newer`), which fill up one after the other, and are forgotten as a
whole, the oldest first. What is forgotten counts from that moment on; the table (`id_slots`) is cleared of it bit by
bit.

What is older may lie in runs (`Older`), on disk: then the table is cleared of it in the same way, and whoever
decides looks there first. Chunks go the way from memory to runs and out of the window one after the other, the oldest
first.

An ID counts at the highest index that it was accepted at: where it is new again beyond the window, or because the topic
does not deduplicate, what is forgotten or failed of it elsewhere changes nothing.

Begin with `IdWindow`. What time it is says a `Moment`, which knows how far a clock can be believed.
"""

from collections import deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np

from seqdedupe.core import id_table
from seqdedupe.core.id_runs import MAX_ROWS, IdRun, Piece, hash_rows, probe
from seqdedupe.core.id_slots import Chunk, Newer, Slots
from seqdedupe.core.id_table import (
    CHUNK_ROWS,
    CONFIRMED,
    FIRST_INDEX,
    LAST_TIME_MS,
    NEXT,
    NOWHERE,
    ROW_BITS,
    ROWS,
    STATES,
    WINDOW,
    decide,
    index_of,
)
from seqdedupe.core.rule import DUP
from seqdedupe.format.columns import ROWS as ROWS_OF_BATCH
from seqdedupe.format.headers import key_of
from seqdedupe.format.jit import Int64s, Int64s2, Uint8s
from seqdedupe.limits import NO_LIMIT, WindowLimits


@dataclass(frozen=True, slots=True)
class Moment:
    """In milliseconds since 1970."""

    earliest_ms: int
    """It is not earlier: by this time goes what is forgotten by its age. 0: that is not known, and nothing is."""
    latest_ms: int
    """It is not later: this time has what comes now."""


# -- The older part of a window of deduplication IDs: runs, and the chunks that they were made of.


class Older:
    """Runs, each of which begins where the one before it ends, the oldest first."""

    def __init__(self) -> None:
        self.runs: tuple[IdRun, ...] = ()
        self.generation = 0
        """Of the runs: what was found in those of another one says nothing."""
        self.offered: IdRun | None = None
        """A run that is whole, and is to be named by the next snapshot: of the oldest chunks in memory, or of some runs
        that follow one another."""
        self.next_number = 1
        """That of the run which is being made, or will be next. All others that are in use are lower."""
        self.clears = 0
        """How often all that was known was given up: a run that was begun before is of no use."""
        self.chunks: deque[Chunk] = deque()
        """Those that are not forgotten, the oldest first."""

    @property
    def end_index(self) -> int:
        """The index after the last one; 0 if there are no runs."""
        return self.runs[-1].end_index if self.runs else 0

    @property
    def memory_bytes(self) -> int:
        return sum(run.memory_bytes for run in self.runs)

    def candidates(self, view: Uint8s, places: Int64s, key: Int64s, first_index: int) -> list[tuple[IdRun, int, range]]:
        """The rows of a batch whose IDs may be in runs, but for forgotten ones; in which, and in which of its pages."""
        runs = [run for run in self.runs if run.end_index > first_index]
        found: list[tuple[IdRun, int, range]] = []
        if not runs:
            return found
        hashes, rows = np.empty(int(places[ROWS_OF_BATCH]), np.int64), np.empty(int(places[ROWS_OF_BATCH]), np.int64)
        hash_rows(view, places, key, hashes)
        for run in runs:
            through = rows[: probe(hashes, run.filter, rows)].tolist()
            found += [(run, row, pages) for row in through if (pages := run.pages_of(int(hashes[row])))]
        return found

    def to_name(self, first_index: int) -> tuple[IdRun, ...]:
        """Those that a snapshot of now has to name: with the one that is offered, and without what is forgotten."""
        runs = self.runs
        if (new := self.offered) is not None:
            before = [run for run in runs if run.end_index <= new.first_index]
            runs = (*before, new, *(run for run in runs if run.first_index >= new.end_index))
        return tuple(run for run in runs if run.end_index > first_index)

    def offer(self, run: IdRun) -> None:
        """This one is whole."""
        self.offered = run
        self.next_number = run.number + 1

    def named(self, runs: tuple[IdRun, ...]) -> None:
        """These are in force from now on. What else is offered is whole, and was not named yet."""
        if self.offered in runs:
            self.offered = None
        if runs != self.runs:
            self.runs = runs
            self.generation += 1

    @property
    def numbers(self) -> list[int]:
        """Those of all runs, the one that is offered too, rising."""
        return sorted({run.number for run in (*self.runs, self.offered) if run is not None})

    def smallest_pair(self, most_runs: int, without: Container[tuple[IdRun, IdRun]] = ()) -> tuple[IdRun, IdRun] | None:
        """Two neighbours, but not these, that are to be one run, where there are more than so many; None if there are
        none."""
        if len(self.runs) <= most_runs:
            return None
        pairs = [pair for pair in pairwise(self.runs) if pair[1].end_index - pair[0].first_index < MAX_ROWS]
        return min(
            (pair for pair in pairs if pair not in without),
            key=lambda pair: len(pair[0]) + len(pair[1]),
            default=None,
        )

    def load(self, runs: tuple[IdRun, ...], first_index: int) -> None:
        """Takes over the runs of a snapshot."""
        self.runs = runs
        self.next_number = max((run.number for run in runs), default=0) + 1
        chunks = (Chunk(*layout) for run in runs for layout in run.chunks.tolist())
        self.chunks.extend(chunk for chunk in chunks if chunk.end_index > first_index)

    def clear(self) -> None:
        """There are none any more."""
        self.chunks.clear()
        self.runs, self.offered = (), None
        self.generation += 1
        self.clears += 1


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
        self._state = np.zeros(STATES, np.int64)
        self._state[[WINDOW, CONFIRMED, NEXT]] = first_index
        self._newer = Newer(self._state)
        self._slots = Slots(self.hash_key, self._newer, self._state)
        self._replaced: deque[tuple[int, Int64s2]] = deque()
        """Of each part of a frame in flight with IDs that were known before: the index after it, and where they lie and
        did, as `id_table.decide` says it. Nothing of what is in the log: its places are other IDs' by and by."""
        self._id_bytes = 0
        """Of all chunks that are not forgotten, wherever they lie."""

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
    def chunks_opened(self) -> int:
        """So many chunks ever were."""
        return self._newer.opened

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
        return self._slots.memory_bytes + self.older.memory_bytes

    @property
    def needed_bytes(self) -> int:
        """The same, with the larger table that will soon be needed."""
        return self.memory_bytes + self._slots.soon_needed_bytes

    def index_of(self, view: Uint8s, places: Int64s) -> int:
        """The index of the message with the ID of a batch's first row, as far as it is in memory; else NOWHERE."""
        newer = self._newer
        ids, offsets = newer.ids.rows.reshape(-1), newer.offsets.rows.reshape(-1)
        return index_of(view, places, self.hash_key, self._slots.rows, ids, offsets, newer.chunks, self._state)

    # -- frames --------------------------------------------------------------------------------------------------

    def decide(
        self,
        view: Uint8s,
        places: Int64s,
        deduplicate: bool,
        limits: WindowLimits,
        now: Moment,
        older: Int64s = NONE_OLDER,
    ) -> Decision:
        """What each row of a batch is; new ones are in flight from now on, with the indexes from `next_index` on.

        Forgets before that what lies beyond the limits. `older` has the index of each row's ID in the runs (else
        NOWHERE); it may be left out if there are none, or with `deduplicate` off.
        """
        rows, newer = int(places[ROWS_OF_BATCH]), self._newer
        if deduplicate and self.older.runs and len(older) != rows:
            raise ValueError("nobody has looked into the runs")
        self.move(limits, now.earliest_ms)
        self._slots.make_room(rows)
        frame_index = self.next_index
        verdicts, found = np.empty(rows, np.uint8), np.empty(rows, np.int64)
        replaced = _NONE_REPLACED if deduplicate else np.empty((rows, 2), np.int64)
        new = first = 0
        while first < rows:
            place, end = newer.room_for(view, places, first, rows, limits, now.latest_ms)
            before = newer.bytes_of(place)
            of_part = (decide if end - first < id_table.MANY_ROWS else id_table.decide_beside)(
                view,
                places,
                first,
                end,
                frame_index,
                deduplicate,
                self.hash_key,
                self._slots.rows,
                newer.ids.rows.reshape(-1),
                newer.offsets.rows.reshape(-1),
                newer.chunks,
                self._state,
                verdicts,
                found,
                replaced,
                older,
            )
            if of_part:
                self._id_bytes += newer.bytes_of(place) - before
                newer.chunks[place, LAST_TIME_MS] = max(int(newer.chunks[place, LAST_TIME_MS]), now.latest_ms)
            if not deduplicate:
                # At once: the next part may find no memory, and this one fails.
                self._remember(replaced[first:end])
            new += of_part
            first = end
        self._slots.go_on(rows)
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
        self._slots.give_up_larger()
        chunks, order = self._newer.chunks, self._newer.order
        while order and (left := self.confirmed_index - int(chunks[order[-1], FIRST_INDEX])) <= 0:
            place = order.pop()
            self._slots.take_out(place, 0, int(chunks[place, ROWS]))
            self._newer.give_back(place)
            self._newer.is_sealed = True
        if order and left < chunks[order[-1], ROWS]:
            self._slots.take_out(order[-1], left, int(chunks[order[-1], ROWS]))
            chunks[order[-1], ROWS] = left
        self._id_bytes = sum(chunk.id_bytes for chunk in self._chunks_of_all())
        self._state[NEXT] = self._state[CONFIRMED]
        self._restore()

    def replay(self, view: Uint8s, places: Int64s, index: int, time_ms: int, limits: WindowLimits) -> None:
        """The rows of a batch are in the log from this index on, published at that time. Nothing is in flight.

        Of what is known already nothing changes. Nothing is forgotten for its age: the clock may have been wrong then.
        """
        rows = int(places[ROWS_OF_BATCH])
        if index + rows <= self.confirmed_index:
            return
        if index != self.confirmed_index:
            self._begin_at(index)
        self.decide(view, places, False, limits, Moment(0, time_ms))
        self._state[CONFIRMED] = self._state[NEXT]
        self._replaced.clear()

    # -- runs ----------------------------------------------------------------------------------------------------

    def oldest_chunks(self, part: int) -> list[int]:
        """The first indexes of the oldest chunks in memory that are full and in the log, of which a run can be made:
        as many as have one in `part` of the IDs there, or more. The newest one is closed if it is the only one."""
        newer = self._newer
        if len(newer.order) == 1 and newer.chunks[newer.order[0], ROWS] and self.confirmed_index == self.next_index:
            newer.is_sealed = True
        full = len(newer.order) - (not newer.is_sealed)
        most = (self.next_index - self.memory_index) // part
        chosen: list[int] = []
        for chunk in islice(newer, full):
            if chunk.end_index > self.confirmed_index or (chosen and chunk.end_index - chosen[0] > most):
                break
            chosen.append(chunk.first_index)
        return chosen

    def whole_chunk(self, first_index: int) -> Piece | None:
        """A copy of the chunk in memory that begins with this index; None if it is forgotten."""
        for place in self._newer.order:
            if self._newer.chunks[place, FIRST_INDEX] == first_index:
                return self._newer.piece(place, 0, self.confirmed_index)
        return None

    def named(self, runs: tuple[IdRun, ...]) -> None:
        """A snapshot is durable that names these runs, and has no chunks that lie in them."""
        self.older.named(runs)
        order = self._newer.order
        while order and self._newer.chunks[order[0], FIRST_INDEX] < self.older.end_index:
            self.older.chunks.append(self._newer.chunk(order[0]))
            self._slots.forget(order.popleft())

    def tidy(self, rows: int) -> bool:
        """Clears away so many rows of what is forgotten or lies in runs; makes a table smaller that is nearly empty.

        Whether there is more to do.
        """
        return self._slots.tidy(rows)

    # -- snapshots -----------------------------------------------------------------------------------------------

    def piece(self, index: int, end_index: int) -> Piece | None:
        """A copy of what is in memory of the messages from this index on and before the other, at most PIECE_BYTES of
        one chunk; None if that is nothing."""
        return self._newer.piece_from(index, end_index)

    def load(self, pieces: Iterable[Piece], runs: tuple[IdRun, ...] = ()) -> None:
        """Takes over the runs and the pieces of a snapshot, which follow each other from `first_index` on. Only before
        anything else came."""
        self.older.load(runs, self.first_index)
        self._id_bytes = sum(chunk.id_bytes for chunk in self.older.chunks)
        self._state[[CONFIRMED, NEXT]] = self.memory_index
        chunk_index = -1
        for piece in pieces:
            if piece.chunk_index != chunk_index or self._newer.is_sealed:
                self._newer.open(piece.first_index, piece.first_time_ms)
                chunk_index = piece.chunk_index
            self._newer.append(piece)
            self._id_bytes += len(piece.ids)
            self._state[[CONFIRMED, NEXT]] = piece.end_index
        self._slots.load(self.confirmed_index - self.memory_index)

    # -- forgetting ----------------------------------------------------------------------------------------------

    def move(self, limits: WindowLimits, now_ms: int) -> None:
        """Forgets chunks that lie beyond the limits, the oldest first, none with anything in flight. It is `now_ms` or
        later."""
        order = self._newer.order
        self._newer.seal_if_due(limits, now_ms)
        while self.older.chunks or (order and (len(order) > 1 or self._newer.is_sealed)):
            oldest = self._oldest()
            if oldest.end_index > self.confirmed_index or not self._is_beyond(oldest, limits, now_ms):
                return
            if self.older.chunks:
                self.older.chunks.popleft()
            else:
                self._slots.forget(order.popleft())
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

    def _bytes_in_flight(self) -> int:
        """How many bytes the IDs of messages in flight have."""
        size_bytes, newer = 0, self._newer
        for place in reversed(newer.order):
            persisted = max(self.confirmed_index - int(newer.chunks[place, FIRST_INDEX]), 0)
            if 0 < newer.chunks[place, ROWS] <= persisted:
                break
            size_bytes += newer.bytes_of(place) - int(newer.offsets.rows[place, persisted])
        return size_bytes

    # -- chunks --------------------------------------------------------------------------------------------------

    def _oldest(self) -> Chunk:
        """Of all that are not forgotten, of which there is one."""
        return self.older.chunks[0] if self.older.chunks else self._newer.chunk(self._newer.order[0])

    def _chunks_of_all(self) -> Iterator[Chunk]:
        yield from self.older.chunks
        yield from self._newer

    def _begin_at(self, index: int) -> None:
        """What is between is unknown, so that nothing before it counts: a window has no holes."""
        while self._newer.order:
            self._slots.forget(self._newer.order.popleft())
        self.older.clear()
        self._id_bytes = 0
        self._newer.is_sealed = True
        self._state[[WINDOW, CONFIRMED, NEXT]] = index

    def _remember(self, replaced: Int64s2) -> None:
        """The newest rows lie there, and their IDs did."""
        if (known := replaced[replaced[:, 1] != NOWHERE]).size:
            self._replaced.append((self.next_index, known))

    def _restore(self) -> None:
        """IDs that were accepted again, and have failed, count where they did before."""
        for _, known in reversed(self._replaced):
            for lies, before in known[::-1].tolist():
                if not self._is_in_use(lies) and self._is_in_use(before):
                    place, row = before >> ROW_BITS, before & (CHUNK_ROWS - 1)
                    self._slots.put(place, row, row + 1)
        self._replaced.clear()

    def _is_in_use(self, lies: int) -> bool:
        """Whether a message that has not failed, and is not forgotten, lies in this row of a place."""
        place, row = lies >> ROW_BITS, lies & (CHUNK_ROWS - 1)
        return place in self._newer.order and row < self._newer.chunks[place, ROWS]


_NO_ROWS: Int64s = np.zeros(0, np.int64)
