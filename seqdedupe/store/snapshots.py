"""Snapshots of a topic: deltas written while it serves, loaded again after a restart.

A delta is what changed since the last one, packed, with the position up to which the log is in it, in one
atomic write. Now and then they are merged into pages (`compaction`). Of a producer the last delta that names
it counts, else its page: numbers may fall, by a reset. A page may be ahead of the header, of deltas that are all
still there, and whose last one says the same.
"""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rocksdict import WriteBatch

from seqdedupe.core.id_chunks import Piece
from seqdedupe.core.id_window import IdWindow
from seqdedupe.core.names import Names
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import NO_EPOCH, NO_SEQUENCE_ID
from seqdedupe.message_id import MessageId
from seqdedupe.store import id_runs, ids
from seqdedupe.store.compaction import compact
from seqdedupe.store.db import Store
from seqdedupe.store.ids import StoredIds, WrittenPieces
from seqdedupe.store.parts import (
    NOT_STATED,
    PAGE_PRODUCERS,
    START,
    Header,
    Numbers,
    Slots,
    StoredDelta,
    StoredPosition,
    decode_page,
    encode_names,
    encode_page,
    name_places,
)
from seqdedupe.store.records import (
    DELTA,
    HEADER,
    IMPORTED,
    MAX_NUMBER,
    NAMES,
    PAGE,
    RUN,
    damaged,
    part_key,
    part_number,
    seal,
    snapshot_range,
)

logger = logging.getLogger("seqdedupe.snapshots")

MAX_DELTAS = 1024
"""More of them since the last compaction, and the next one is due."""

MAX_DELTA_BYTES = 4 * 1024 * 1024
"""The same for their size."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What changed in a topic since its last durable snapshot, and the position up to which the log is in it.

    `message_id` is that of message `next_index - 1`; None if there is no message yet. `first_name` is a
    number of producers that a durable snapshot knew, and `names` are all from that number on. `slots` are the
    numbers of the producers that changed, rising strictly, new ones or not; `persisted` (-1: none) and
    `epochs` are theirs: those that the log has confirmed, never one that is only in force. `stated` says from which
    index on the log states both (`core.rule.STATED`; -1: not known).

    `ownership` (64 bits, unsigned) is that of the same message's record, 0 if there is none. `policy` is what is
    in force at this position, in the bytes of its control record (at most 65,535); empty if none was ever set.
    `opaque` (at most 65,535 bytes) is the position in a broker's own log. `has_forgotten`: whether names were ever
    forgotten. `ids` is the window of a topic of deduplication IDs.
    """

    term: int
    next_index: int
    message_id: MessageId | None
    first_name: int
    names: list[bytes]
    slots: Slots
    persisted: Numbers
    epochs: Numbers
    stated: Numbers
    ownership: int = 0
    policy: bytes = b""
    opaque: bytes = b""
    has_forgotten: bool = False
    ids: StoredIds | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A topic as its newest snapshot has it: columns by producer number, position and policy as in `Delta`."""

    term: int
    next_index: int
    message_id: MessageId | None
    names: Names
    persisted: Numbers
    epochs: Numbers
    stated: Numbers
    ownership: int = 0
    policy: bytes = b""
    opaque: bytes = b""
    has_forgotten: bool = False
    window: IdWindow | None = None
    """Of a topic of deduplication IDs, for one that is opened from this."""

    def whole(self) -> Delta:
        """All of it as one delta, but for the window: `ids.copy` takes that to another store."""
        return Delta(
            self.term,
            self.next_index,
            self.message_id,
            0,
            self.names.some(),
            np.arange(len(self.names), dtype=np.int32),
            self.persisted,
            self.epochs,
            self.stated,
            self.ownership,
            self.policy,
            self.opaque,
            self.has_forgotten,
        )


class Snapshots:
    """The snapshots of one topic. Writing and compacting belong to the store's event loop."""

    def __init__(self, store: Store, incarnation: int) -> None:
        self._store = store
        self._incarnation = incarnation
        # What is stored, as of an opening of the store; 0 is none.
        self._opening = 0
        self._header = START
        self._last_delta = 0
        self._position = START.position
        self._delta_bytes = 0
        self._pieces = WrittenPieces(incarnation, 0)
        self._compacting = False

    def load(self) -> Loaded | None:
        """The topic as its newest snapshot has it; None if there is none. Blocks, in any thread.

        Nothing may be written of this topic meanwhile. Raises STORE_DAMAGED, NEWER_FORMAT, OLDER_FORMAT,
        STORE_UNAVAILABLE.
        """
        opening = self._store.opening
        header = self._stored_header()
        names = Names(header.position.producers)
        for key, value in self._parts(NAMES):
            if (before := part_number(key)) != len(names):
                raise damaged(key, f"it does not follow on the {len(names)} names before it")
            body, places = name_places(key, value)
            names.add(np.frombuffer(body, np.uint8), places)
            if len(names) != before + len(places):
                raise damaged(key, "a name in it comes twice")
        persisted = np.full(len(names), NO_SEQUENCE_ID, np.int64)
        epochs = np.full(len(names), NO_EPOCH, np.int64)
        stated = np.full(len(names), NOT_STATED, np.int64)
        columns = (persisted, epochs, stated)
        self._merge_pages(header, columns)
        position = header.position
        last_delta = header.through
        delta_bytes = 0
        for key, value in self._parts(DELTA):
            delta = StoredDelta.decode(key, value)
            last_delta += 1
            if part_number(key) != last_delta:
                raise damaged(key, f"it is not number {last_delta}, which should be there")
            if delta.position.falls_short_of(position) or delta.position.producers > len(names):
                raise damaged(key, "it goes less far than the snapshot before it, or its names are missing")
            for column, values in zip(columns, (delta.persisted, delta.epochs, delta.stated), strict=True):
                overwrite(column, delta.slots, values)
            position = delta.position
            delta_bytes += len(value)
        if position.producers != len(names):
            raise damaged(self._key(NAMES, position.producers), "no snapshot knows of the names there")
        pieces = WrittenPieces(self._incarnation, ids.end_index(self._store, self._incarnation))
        self._opening, self._header, self._last_delta = opening, header, last_delta
        self._position, self._delta_bytes, self._pieces = position, delta_bytes, pieces
        if last_delta == 0:
            return None
        return Loaded(
            position.term,
            position.next_index,
            position.message_id,
            names,
            persisted,
            epochs,
            stated,
            position.ownership,
            position.policy,
            position.opaque,
            position.has_forgotten,
            ids.load(self._store, self._incarnation, position.next_index),
        )

    @property
    def pieces_index(self) -> int:
        """The IDs below this index are written, whether a snapshot names them or not. Raises STORE_UNAVAILABLE."""
        self._catch_up()
        return self._pieces.end_index

    def write_piece(self, piece: Piece) -> None:
        """Writes the IDs from `pieces_index` on, or from where the window has its first ones in memory, unsynced.

        They count once a snapshot names them. Raises STORE_UNAVAILABLE.
        """
        batch = WriteBatch(raw_mode=True)
        self._pieces.put(batch, piece)
        self._store.write(batch, self._opening)
        self._pieces.written(piece)

    def write_delta(self, delta: Delta) -> int:
        """Writes a snapshot, whole or not at all, unsynced; `await store.flush()` with the number returned.

        If either fails, the next delta has to say again all that changed since the last durable one, with
        `first_name` as it was then. Raises STORE_UNAVAILABLE.
        """
        self._catch_up()
        known = self._position.producers
        stored = _stored(delta)
        producers = stored.position.producers
        if delta.first_name > known or stored.position.falls_short_of(self._position) or not stored.is_sound():
            raise error("INTERNAL", f"the snapshot {stored.position} cannot follow on {self._position}")
        batch = WriteBatch(raw_mode=True)
        # Names below `known` are stored, though perhaps not durable yet: this write becomes durable after
        # them.
        for first in range(known, producers, PAGE_PRODUCERS):
            at = first - delta.first_name
            self._put(batch, NAMES, first, encode_names(delta.names[at : at + PAGE_PRODUCERS]))
        if delta.ids is not None:
            self._pieces.check_follows(delta.ids)
            ids.put(batch, self._incarnation, delta.ids, self._pieces)
        size_bytes = self._put(batch, DELTA, self._last_delta + 1, stored.encode())
        # What it builds on was written in this opening, or is durable.
        opening = self._store.write(batch, self._opening)
        if delta.ids is not None and delta.ids.last is not None:
            self._pieces.written(delta.ids.last)
        self._last_delta += 1
        self._position = stored.position
        self._delta_bytes += size_bytes
        return opening

    async def write_anew(self, delta: Delta) -> int:
        """Writes a snapshot that holds all, without a window: nothing that was stored before counts, not even what
        cannot be read.

        It is one write, unsynced, as of `write_delta`. Nothing else may be written meanwhile. What is to be written is
        made in a thread; the write itself holds the event loop, some 50 ms for a million producers. Raises
        STORE_UNAVAILABLE.
        """
        stored = _stored(delta)
        if delta.first_name or delta.ids is not None or not stored.is_sound() or self._compacting:
            raise error("INTERNAL", f"the snapshot {stored.position} cannot take the place of {self._position}")
        producers = stored.position.producers
        header = Header(1, max(producers - 1, 0) // PAGE_PRODUCERS * PAGE_PRODUCERS, stored.position)
        batch = await asyncio.to_thread(self._replacement, header, delta.names, stored)
        opening = self._store.write(batch)
        self._opening, self._header, self._last_delta = opening, header, header.through
        self._position, self._delta_bytes = stored.position, 0
        self._pieces = WrittenPieces(self._incarnation, 0)
        return opening

    def has_left_over(self, window: IdWindow) -> bool:
        """Whether something is stored of runs that the window does not have. Blocks, in any thread."""
        return id_runs.has_gaps(self._store, self._incarnation, window.older.numbers)

    def drop_left_over(self, window: IdWindow, *, end: int = id_runs.MAX_RUN) -> None:
        """Nothing is left of runs below this number that the window does not have. What cannot be removed now is at the
        next start."""
        batch = WriteBatch(raw_mode=True)
        id_runs.put_gaps(batch, self._incarnation, window.older.numbers, end)
        try:
            self._store.write(batch)
        except SeqdedupeError as e:
            logger.warning("what is left of runs of deduplication IDs cannot be removed now: %s", e)

    def remove(self) -> int:
        """There is no snapshot any more: one write, unsynced, as of `write_delta`. What was imported stays: the log
        cannot tell it. Raises STORE_UNAVAILABLE."""
        batch = WriteBatch(raw_mode=True)
        batch.delete_range(snapshot_range(self._incarnation)[0], self._key(IMPORTED, 0))
        self._opening = 0
        return self._store.write(batch)

    def _replacement(self, header: Header, names: list[bytes], stored: StoredDelta) -> WriteBatch:
        """All names and pages, as a compaction leaves them: none is due afterwards. Takes long, in any thread."""
        columns = [np.full(len(names), none, np.int64) for none in (NO_SEQUENCE_ID, NO_EPOCH, NOT_STATED)]
        for column, values in zip(columns, (stored.persisted, stored.epochs, stored.stated), strict=True):
            overwrite(column, stored.slots, values)
        batch = WriteBatch(raw_mode=True)
        # Runs are whole by themselves: the window that comes with this names them, or the policy.
        batch.delete_range(snapshot_range(self._incarnation)[0], self._key(RUN, 0))
        batch.delete_range(self._key(RUN, MAX_NUMBER), self._key(IMPORTED, 0))
        self._put(batch, HEADER, 0, header.encode())
        for first in range(0, len(names), PAGE_PRODUCERS):
            page = slice(first, first + PAGE_PRODUCERS)
            self._put(batch, NAMES, first, encode_names(names[page]))
            self._put(batch, PAGE, first, encode_page([column[page] for column in columns]))
        return batch

    async def compact_if_due(self) -> bool:
        """Merges the deltas into pages if there are many, a page at a time; whether it did.

        Snapshots may be written meanwhile. Raises STORE_UNAVAILABLE, STORE_DAMAGED; nothing is lost then.
        """
        self._catch_up()
        deltas = self._last_delta - self._header.through
        if self._compacting or (deltas <= MAX_DELTAS and self._delta_bytes <= MAX_DELTA_BYTES):
            return False
        self._compacting = True
        try:
            compacted = await compact(self._store, self._incarnation, self._header)
            self._header = compacted.header
            self._delta_bytes -= compacted.delta_bytes
        except BaseException:
            # How far it came is found out when it matters.
            self._opening = 0
            raise
        finally:
            self._compacting = False
        return True

    def _catch_up(self) -> None:
        """Finds out what is stored, if RocksDB was opened (again) since that was known."""
        opening = self._store.opening
        if self._opening == opening:
            return
        header = self._stored_header()
        position = header.position
        last_delta = header.through
        delta_bytes = 0
        for key, value in self._parts(DELTA):
            position = StoredDelta.decode(key, value).position
            last_delta = part_number(key)
            delta_bytes += len(value)
        pieces = WrittenPieces(self._incarnation, ids.end_index(self._store, self._incarnation))
        self._opening, self._header, self._last_delta = opening, header, last_delta
        self._position, self._delta_bytes, self._pieces = position, delta_bytes, pieces

    def _merge_pages(self, header: Header, columns: tuple[Numbers, ...]) -> None:
        """Merges the pages; those after the header's producers are of a compaction that did not end."""
        producers = header.position.producers
        covered = 0
        for key, value in self._parts(PAGE):
            page = decode_page(key, value)
            first = part_number(key)
            stop = first + len(page[0])
            if stop > len(columns[0]) or (covered < producers and first != covered):
                raise damaged(key, "a page is missing before it, or it has too many producers")
            for column, stored in zip(columns, page, strict=True):
                overwrite(column, slice(first, stop), stored)
            covered = stop
        if covered < producers:
            raise damaged(self._key(PAGE, covered), "producers from this number on are missing")

    def _stored_header(self) -> Header:
        for key, value in self._parts(HEADER):
            return Header.decode(key, value)
        return START

    def _parts(self, part: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._store.scan(self._key(part, 0), self._key(part, MAX_NUMBER))

    def _key(self, part: bytes, number: int) -> bytes:
        return part_key(self._incarnation, part, number)

    def _put(self, batch: WriteBatch, part: bytes, number: int, body: bytes) -> int:
        key = self._key(part, number)
        value = seal(key, body)
        batch.put(key, value)
        return len(value)


def _stored(delta: Delta) -> StoredDelta:
    position = StoredPosition(
        delta.term,
        delta.next_index,
        delta.first_name + len(delta.names),
        delta.message_id,
        delta.ownership,
        delta.policy,
        delta.opaque,
        delta.has_forgotten,
    )
    return StoredDelta(position, delta.slots, delta.persisted, delta.epochs, delta.stated)


def overwrite(numbers: Numbers, where: Slots | slice, others: Numbers) -> None:
    """The others count from now on. `where` names each place once."""
    numbers[where] = others
