"""The window of a topic of deduplication IDs: the IDs of the newest messages, and the verdict about an ID.

The window covers the end of the log. Messages below `confirmed_index` are persisted, later messages are in flight, and
messages below `first_index` are forgotten. IDs are in chunks (`Newer`). Chunks are filled one after the other, and each
is forgotten as a whole, the oldest first. A forgotten ID is invalid at once. The ID is removed from the table
(`id_slots`) later, in steps.

Older chunks may be in runs on disk (`Older`). IDs in runs are also removed from the table in steps. A decision first
looks IDs up in the runs. Chunks move in order: from memory to a run, then out of the window.

The valid index of an ID is the highest index at which the ID was accepted. An ID is accepted twice if the window had
forgotten the ID, or while the topic does not deduplicate. When the occurrence at the lower index is then forgotten,
nothing changes for the ID.

Begin with `IdWindow`. A `Moment` is a time with two bounds, which express how far the clock can be trusted.
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
from seqdedupe.format.headers import key_of
from seqdedupe.format.jit import Int64s, Int64s2, Uint8s
from seqdedupe.format.layout import ROWS as ROWS_OF_BATCH
from seqdedupe.limits import NO_LIMIT, WindowLimits


@dataclass(frozen=True, slots=True)
class Moment:
    """Two bounds of the present time, in milliseconds since 1970."""

    earliest_ms: int
    """The time is not earlier than this. The age of IDs is computed with this bound. 0: unknown, and no ID is forgotten
    for its age."""
    latest_ms: int
    """The time is not later than this. New messages get this time."""


# -- The older part of a window of deduplication IDs: runs, and the chunks from which they were made.


class Older:
    """Runs in the order of their indexes, without gaps."""

    def __init__(self) -> None:
        self.runs: tuple[IdRun, ...] = ()
        self.generation = 0
        """A number that changes whenever `runs` changes. A result that was found in the runs of another generation is
        invalid."""
        self.offered: IdRun | None = None
        """A complete run that the next snapshot is to name. It was made of the oldest chunks in memory, or of
        neighbouring runs."""
        self.next_number = 1
        """The number of the run that is being created, or otherwise of the next run. All runs in use have lower
        numbers."""
        self.clears = 0
        """The number of times that all IDs were dropped. A run that was begun before the last of these times is
        useless."""
        self.chunks: deque[Chunk] = deque()
        """The chunks in runs that are not forgotten, the oldest first."""

    @property
    def end_index(self) -> int:
        """The index after the last ID in runs; 0 if there are no runs."""
        return self.runs[-1].end_index if self.runs else 0

    @property
    def memory_bytes(self) -> int:
        return sum(run.memory_bytes for run in self.runs)

    def candidates(self, view: Uint8s, places: Int64s, key: Int64s, first_index: int) -> list[tuple[IdRun, int, range]]:
        """Return the rows of a batch whose IDs may be in unforgotten runs, each row with the run and its pages."""
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
        """Return the runs that a snapshot must name if the snapshot is taken now. The offered run is included;
        forgotten runs are omitted."""
        runs = self.runs
        if (new := self.offered) is not None:
            before = [run for run in runs if run.end_index <= new.first_index]
            runs = (*before, new, *(run for run in runs if run.first_index >= new.end_index))
        return tuple(run for run in runs if run.end_index > first_index)

    def offer(self, run: IdRun) -> None:
        """Offer a complete run to the next snapshot."""
        self.offered = run
        self.next_number = run.number + 1

    def named(self, runs: tuple[IdRun, ...]) -> None:
        """Put these runs into force. If the offered run is not in this list, the offered run waits for the next
        snapshot."""
        if self.offered in runs:
            self.offered = None
        if runs != self.runs:
            self.runs = runs
            self.generation += 1

    @property
    def numbers(self) -> list[int]:
        """The numbers of all runs, including the offered run, in ascending order."""
        return sorted({run.number for run in (*self.runs, self.offered) if run is not None})

    def smallest_pair(self, most_runs: int, without: Container[tuple[IdRun, IdRun]] = ()) -> tuple[IdRun, IdRun] | None:
        """Return the two smallest neighbouring runs that can be merged and are not in `without`. Return None if there
        is no such pair, or if there are at most `most_runs` runs."""
        if len(self.runs) <= most_runs:
            return None
        pairs = [pair for pair in pairwise(self.runs) if pair[1].end_index - pair[0].first_index < MAX_ROWS]
        return min(
            (pair for pair in pairs if pair not in without),
            key=lambda pair: len(pair[0]) + len(pair[1]),
            default=None,
        )

    def load(self, runs: tuple[IdRun, ...], first_index: int) -> None:
        """Load the runs of a snapshot."""
        self.runs = runs
        self.next_number = max((run.number for run in runs), default=0) + 1
        chunks = (Chunk(*layout) for run in runs for layout in run.chunks.tolist())
        self.chunks.extend(chunk for chunk in chunks if chunk.end_index > first_index)

    def clear(self) -> None:
        """Drop all runs."""
        self.chunks.clear()
        self.runs, self.offered = (), None
        self.generation += 1
        self.clears += 1


_NONE_REPLACED: Int64s2 = np.zeros((0, 2), np.int64)
NONE_OLDER: Int64s = np.zeros(0, np.int64)

Decision = tuple[int, Uint8s, Int64s, Int64s]
"""The number of new rows; the verdicts; the rows with verdict DUP; the indexes of their originals."""


class IdWindow:
    """The IDs from `first_index` on. The hash key has 16 bytes and belongs to the topic; it is never sent to anyone."""

    def __init__(self, key: bytes, first_index: int) -> None:
        self.key = key
        self.hash_key = key_of(key)
        self.older = Older()
        """The IDs in runs."""
        self._state = np.zeros(STATES, np.int64)
        self._state[[WINDOW, CONFIRMED, NEXT]] = first_index
        self._newer = Newer(self._state)
        self._slots = Slots(self.hash_key, self._newer, self._state)
        self._replaced: deque[tuple[int, Int64s2]] = deque()
        """For each part of a frame in flight with IDs that were known before: the index after the part, the rows where
        these IDs are now, and the rows where they were before (see `id_table.decide`). Stored messages have no entry,
        because their places are reused for other IDs."""
        self._id_bytes = 0
        """The size of the IDs in all chunks that are not forgotten, in memory and in runs."""

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
        """The index of the next new message."""
        return int(self._state[NEXT])

    def __len__(self) -> int:
        """The number of stored messages whose IDs are known."""
        return self.confirmed_index - self.first_index

    @property
    def first_time_ms(self) -> int:
        """The publish time of the first known message, in milliseconds since 1970; 0 if no message is known."""
        return self._oldest().first_time_ms if len(self) else 0

    @property
    def chunks_opened(self) -> int:
        """The number of chunks opened so far."""
        return self._newer.opened

    @property
    def memory_index(self) -> int:
        """The IDs of messages from this index on are in memory."""
        return max(self.first_index, self.older.end_index)

    @property
    def on_disk(self) -> int:
        """The number of IDs in runs."""
        return self.memory_index - self.first_index

    @property
    def memory_bytes(self) -> int:
        """The memory of IDs, tables and runs."""
        return self._slots.memory_bytes + self.older.memory_bytes

    @property
    def needed_bytes(self) -> int:
        """The memory in use, plus the memory of the larger table that will soon be needed."""
        return self.memory_bytes + self._slots.soon_needed_bytes

    def index_of(self, view: Uint8s, places: Int64s) -> int:
        """Return the index of the message with the ID of a batch's first row; NOWHERE if the ID is not in memory."""
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
        """Judge the rows of a batch. After this call the new rows are in flight, with the indexes from `next_index` on.

        First, chunks beyond the limits are forgotten. `older` has the index of each row's ID in the runs (or NOWHERE).
        `older` may be omitted if there are no runs, or with `deduplicate` off. In other cases, omitting `older` raises
        ValueError.
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
                # Do not do this after the loop: if there is no memory for the next part, this part has to be restored.
                self._remember(replaced[first:end])
            new += of_part
            first = end
        self._slots.go_on(rows)
        if new == rows:
            return new, verdicts, _NO_ROWS, _NO_ROWS
        dups = np.flatnonzero(verdicts == DUP)
        return new, verdicts, dups, found[dups]

    def confirm(self, rows: int) -> None:
        """Confirm that the log has the oldest `rows` messages in flight."""
        self._state[CONFIRMED] += rows
        while self._replaced and self._replaced[0][0] <= self.confirmed_index:
            self._replaced.popleft()

    def fail(self) -> None:
        """Fail all messages in flight, as if they had never arrived. They will never be in the log."""
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
        """Enter the rows of a batch that is in the log from `index` on, published at `time_ms`. Nothing may be in
        flight.

        A batch that is already known changes nothing. No ID is forgotten because of its age: the clock may have been
        wrong when the batch was published.
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
        """Return the first indexes of the oldest chunks in memory that can become a run: sealed chunks whose messages
        are in the log.

        Together these chunks have at most 1/`part` of the IDs in memory. But if any chunk can become a run, at least
        one chunk is returned. If memory has only one chunk, this chunk is sealed first.
        """
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
        """Copy the chunk in memory that begins with this index. Return None if the chunk is forgotten."""
        for place in self._newer.order:
            if self._newer.chunks[place, FIRST_INDEX] == first_index:
                return self._newer.piece(place, 0, self.confirmed_index)
        return None

    def named(self, runs: tuple[IdRun, ...]) -> None:
        """Put runs into force, because a snapshot that names these runs is durable. Remove the chunks of the runs from
        memory."""
        self.older.named(runs)
        order = self._newer.order
        while order and self._newer.chunks[order[0], FIRST_INDEX] < self.older.end_index:
            self.older.chunks.append(self._newer.chunk(order[0]))
            self._slots.forget(order.popleft())

    def tidy(self, rows: int) -> bool:
        """Clear a part of the table (`Slots.tidy`): the share of `rows` rows. Return whether there is more to do."""
        return self._slots.tidy(rows)

    # -- snapshots -----------------------------------------------------------------------------------------------

    def piece(self, index: int, end_index: int) -> Piece | None:
        """Copy the IDs in memory from `index` to before `end_index`: at most PIECE_BYTES of one chunk. Return None if
        there are no IDs."""
        return self._newer.piece_from(index, end_index)

    def load(self, pieces: Iterable[Piece], runs: tuple[IdRun, ...] = ()) -> None:
        """Load the runs and pieces of a snapshot, which follow each other from `first_index` on. The window must be
        new."""
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
        """Forget the chunks that exceed the limits, the oldest chunk first. A chunk with a message in flight is kept.

        The true time is `now_ms` or later.
        """
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
        """Whether the chunk is too old, or the later messages alone reach a limit."""
        if self.confirmed_index - oldest.end_index >= limits.messages:
            return True
        if limits.milliseconds != NO_LIMIT and oldest.last_time_ms <= now_ms - limits.milliseconds:
            return True
        if limits.id_bytes == NO_LIMIT or self._id_bytes - oldest.id_bytes < limits.id_bytes:
            return False
        return self._id_bytes - oldest.id_bytes - self._bytes_in_flight() >= limits.id_bytes

    def _bytes_in_flight(self) -> int:
        """Return the size of the IDs of messages in flight."""
        size_bytes, newer = 0, self._newer
        for place in reversed(newer.order):
            persisted = max(self.confirmed_index - int(newer.chunks[place, FIRST_INDEX]), 0)
            if 0 < newer.chunks[place, ROWS] <= persisted:
                break
            size_bytes += newer.bytes_of(place) - int(newer.offsets.rows[place, persisted])
        return size_bytes

    # -- chunks --------------------------------------------------------------------------------------------------

    def _oldest(self) -> Chunk:
        """Return the oldest chunk that is not forgotten. There must be one."""
        return self.older.chunks[0] if self.older.chunks else self._newer.chunk(self._newer.order[0])

    def _chunks_of_all(self) -> Iterator[Chunk]:
        yield from self.older.chunks
        yield from self._newer

    def _begin_at(self, index: int) -> None:
        """Empty the window and begin at `index`. The messages before `index` are unknown, and a window must not have
        gaps."""
        while self._newer.order:
            self._slots.forget(self._newer.order.popleft())
        self.older.clear()
        self._id_bytes = 0
        self._newer.is_sealed = True
        self._state[[WINDOW, CONFIRMED, NEXT]] = index

    def _remember(self, replaced: Int64s2) -> None:
        """Record the places of the newest rows, and the earlier places of their IDs."""
        if (known := replaced[replaced[:, 1] != NOWHERE]).size:
            self._replaced.append((self.next_index, known))

    def _restore(self) -> None:
        """Handle IDs that were accepted again and then failed: make each ID valid again at its earlier row."""
        for _, known in reversed(self._replaced):
            for lies, before in known[::-1].tolist():
                if not self._is_in_use(lies) and self._is_in_use(before):
                    place, row = before >> ROW_BITS, before & (CHUNK_ROWS - 1)
                    self._slots.put(place, row, row + 1)
        self._replaced.clear()

    def _is_in_use(self, lies: int) -> bool:
        """Whether this row of a place has a message that has not failed and is not forgotten."""
        place, row = lies >> ROW_BITS, lies & (CHUNK_ROWS - 1)
        return place in self._newer.order and row < self._newer.chunks[place, ROWS]


_NO_ROWS: Int64s = np.zeros(0, np.int64)
