"""Snapshots of a topic: deltas that are written while the topic serves, and loaded after a restart.

A delta contains the changes since the previous delta, packed, and the log position up to which these changes go. A
delta is one atomic write. From time to time, deltas are merged into pages (`compaction`). The values of a producer are
in the last delta that names the producer. If no delta names a producer, the producer's page contains the values. Values
may decrease after a reset. After an interrupted compaction, a page may contain deltas that the header does not include
yet. These deltas then still exist, and the last such delta has the same values as the page.
"""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from rocksdict import WriteBatch

from seqdedupe.core.id_runs import Piece
from seqdedupe.core.id_window import IdWindow
from seqdedupe.core.name_table import Names
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.limits import NO_EPOCH, NO_SEQUENCE_ID
from seqdedupe.message_id import MessageId
from seqdedupe.store import windows
from seqdedupe.store.db import Store
from seqdedupe.store.parts import (
    DELTA,
    HEADER,
    IMPORTED,
    MAX_NUMBER,
    NAMES,
    NOT_STATED,
    PAGE,
    PAGE_PRODUCERS,
    RUN,
    START,
    Header,
    Numbers,
    Slots,
    StoredDelta,
    StoredPosition,
    damaged,
    decode_names,
    decode_page,
    encode_names,
    encode_page,
    name_places,
    part_key,
    part_number,
    seal,
    snapshot_range,
)
from seqdedupe.store.windows import StoredIds, WrittenPieces

# -- Compaction of a topic's snapshots: deltas into pages, small records of names into full ones.
#
# Compaction works from the stored data, never from live memory, in small steps. The store's thread reads and merges;
# the event loop writes one page or record at a time. Only the last write removes the deltas. RocksDB keeps the order of
# writes, so the state after any crash loads the same: without the last write, pages only repeat their deltas.

DELTAS_A_STEP = 64
DELTA_BYTES_A_STEP = 512 * 1024
"""The limits of one read; the read ends when it reaches any of them. They are small, to keep the GIL free for the event
loop."""

PAGES_A_FLUSH = 16
"""The number of pages between two flushes. With this limit pages are written no faster than the disk accepts them, and
no sync has much data."""


@dataclass(frozen=True, slots=True)
class Compacted:
    """The new header, and the size of the removed deltas."""

    header: Header
    delta_bytes: int


@dataclass(frozen=True, slots=True)
class _Changes:
    """For each changed producer, the values of the last delta that names the producer. Only deltas after the header's
    delta count. Sorted by producer number.

    `pages` are the first producer numbers of the pages that these values change.
    """

    position: StoredPosition
    through: int
    delta_bytes: int
    pages: list[int]
    slots: Slots
    persisted: Numbers
    epochs: Numbers
    stated: Numbers

    @property
    def columns(self) -> list[Numbers]:
        return [self.persisted, self.epochs, self.stated]


async def compact(store: Store, incarnation: int, header: Header) -> Compacted:
    """Merge the deltas after the header's last delta into pages, pack names, and write the new header. When this
    returns, the result is durable.

    At least one such delta must exist. Raises STORE_UNAVAILABLE, also if RocksDB was opened again meanwhile;
    STORE_DAMAGED.
    """
    opening = store.opening

    def write(batch: WriteBatch) -> None:
        # Writes of two openings are not in one sequence: the header must not cover pages that may be lost.
        if store.opening != opening:
            raise error("STORE_UNAVAILABLE", "the store was opened again while a snapshot was compacted")
        store.write(batch)

    deltas: list[tuple[StoredDelta, int]] = []
    while more := await store.in_thread(_next_deltas, store, incarnation, header.through + len(deltas)):
        deltas += more
    changes = await store.in_thread(_changes_of, deltas, header)
    for page, first in enumerate(changes.pages):
        if page % PAGES_A_FLUSH == 0:
            await store.flush(opening)
        write(await store.in_thread(_merged_page, store, incarnation, changes, first))
    first = after = header.packed_names
    while after < changes.position.producers:
        first = after
        batch, after = await store.in_thread(_packed_names, store, incarnation, first)
        write(batch)
    compacted = Header(changes.through, first, changes.position)
    write(_last_write(incarnation, compacted))
    await store.flush(opening)
    return Compacted(compacted, changes.delta_bytes)


def _next_deltas(store: Store, incarnation: int, after: int) -> list[tuple[StoredDelta, int]]:
    """Return some deltas after that number, with their sizes; none if there are no more deltas."""
    deltas: list[tuple[StoredDelta, int]] = []
    size_bytes = 0
    start = part_key(incarnation, DELTA, after + 1)
    for key, value in store.scan(start, part_key(incarnation, DELTA, MAX_NUMBER)):
        deltas.append((StoredDelta.decode(key, value), len(value)))
        if part_number(key) != after + len(deltas):
            raise damaged(key, f"it is not number {after + len(deltas)}, which should be there")
        size_bytes += len(value)
        if len(deltas) >= DELTAS_A_STEP or size_bytes >= DELTA_BYTES_A_STEP:
            break
    return deltas


def _changes_of(deltas: list[tuple[StoredDelta, int]], header: Header) -> _Changes:
    every = np.concatenate([delta.slots for delta, _ in deltas])
    order = np.argsort(every, kind="stable")
    last_of_each = np.flatnonzero(np.diff(every[order], append=-1))
    order = order[last_of_each]
    slots = every[order]
    position = deltas[-1][0].position
    return _Changes(
        position=position,
        through=header.through + len(deltas),
        delta_bytes=sum(size_bytes for _, size_bytes in deltas),
        pages=_changed_pages(header.position.producers, position.producers, slots),
        slots=slots,
        persisted=np.concatenate([delta.persisted for delta, _ in deltas])[order],
        epochs=np.concatenate([delta.epochs for delta, _ in deltas])[order],
        stated=np.concatenate([delta.stated for delta, _ in deltas])[order],
    )


def _changed_pages(before: int, after: int, slots: Slots) -> list[int]:
    """Return the first producer numbers of the pages to write: pages with changes, and pages of new producers."""
    pages = slots // PAGE_PRODUCERS
    changed: list[int] = (pages[np.flatnonzero(np.diff(pages, prepend=-1))] * PAGE_PRODUCERS).tolist()
    if after == before:
        return changed
    start = before // PAGE_PRODUCERS * PAGE_PRODUCERS
    return [first for first in changed if first < start] + list(range(start, after, PAGE_PRODUCERS))


def _merged_page(store: Store, incarnation: int, changes: _Changes, first: int) -> WriteBatch:
    rows = min(PAGE_PRODUCERS, changes.position.producers - first)
    columns = [np.full(rows, none, np.int64) for none in (NO_SEQUENCE_ID, NO_EPOCH, NOT_STATED)]
    key = part_key(incarnation, PAGE, first)
    for _, value in store.scan(key, key + b"\0"):
        stored = decode_page(key, value)
        if len(stored[0]) > rows:
            raise damaged(key, f"it has {len(stored[0])} producers, of which {rows} are known")
        for column, values in zip(columns, stored, strict=True):
            column[: len(values)] = values
    start, stop = np.searchsorted(changes.slots, [first, first + rows])
    places = changes.slots[start:stop] - first
    for column, values in zip(columns, changes.columns, strict=True):
        column[places] = values[start:stop]
    batch = WriteBatch(raw_mode=True)
    batch.put(key, seal(key, encode_page(columns)))
    return batch


def _packed_names(store: Store, incarnation: int, first: int) -> tuple[WriteBatch, int]:
    """Return one record of the names from that number on, as full as possible, and the number of the name after the
    record."""
    names: list[bytes] = []
    start = part_key(incarnation, NAMES, first)
    for key, value in store.scan(start, part_key(incarnation, NAMES, MAX_NUMBER)):
        more = decode_names(key, value)
        if part_number(key) != first + len(names):
            raise damaged(key, f"it does not follow on name number {first + len(names) - 1}")
        if names and len(names) + len(more) > PAGE_PRODUCERS:
            break
        names += more
    if not names:
        raise damaged(start, "names from this number on are missing")
    batch = WriteBatch(raw_mode=True)
    batch.delete_range(start, part_key(incarnation, NAMES, first + len(names)))
    batch.put(start, seal(start, encode_names(names)))
    return batch, first + len(names)


def _last_write(incarnation: int, header: Header) -> WriteBatch:
    key = part_key(incarnation, HEADER, 0)
    batch = WriteBatch(raw_mode=True)
    batch.put(key, seal(key, header.encode()))
    batch.delete_range(part_key(incarnation, DELTA, 0), part_key(incarnation, DELTA, header.through + 1))
    return batch


logger = logging.getLogger("seqdedupe.snapshots")

MAX_DELTAS = 1024
"""If there are more deltas than this since the last compaction, the next compaction is due."""

MAX_DELTA_BYTES = 4 * 1024 * 1024
"""If the deltas since the last compaction have more bytes than this, the next compaction is due."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The changes of a topic since its last durable snapshot, and the position in the log up to which they include
    changes.

    `message_id` is the ID of message `next_index - 1`; None if there is no message yet. `first_name` is the number of
    producers in a durable snapshot, and `names` are all names from that number on. `slots` are the numbers of the
    changed producers, new or not, rising strictly. `persisted` (-1: none) and `epochs` are the values of these
    producers, as confirmed by the log; values that are only in force are not included. The log states both values from
    index `stated` on (`core.rule.STATED`; -1: not known).

    `ownership` (64 bits, unsigned) belongs to the record of the same message; 0 if there is no message. `policy` is the
    policy in force at this position, in the encoding of its control record (at most 65,535 bytes); empty if no policy
    was ever set. `opaque` (at most 65,535 bytes) is the position in a broker's own log. `has_forgotten` states whether
    the topic has ever forgotten a producer name. `ids` is the window of a topic of deduplication IDs.
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
    """A topic in the state of its newest snapshot: columns by producer number; position and policy as in `Delta`."""

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
    """The window of a topic of deduplication IDs. It belongs to the topic object that is opened from this snapshot."""

    def whole(self) -> Delta:
        """Return everything except the window, as one delta."""
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
        # The stored state in an opening of the store; opening 0 means that it is not known.
        self._opening = 0
        self._header = START
        self._last_delta = 0
        self._position = START.position
        self._delta_bytes = 0
        self._pieces = WrittenPieces(incarnation, 0)
        self._compacting = False

    def load(self) -> Loaded | None:
        """Return the topic in the state of its newest snapshot; None if there is no snapshot. The call blocks, and any
        thread may make it.

        No data of this topic may be written meanwhile. Raises STORE_DAMAGED, NEWER_FORMAT, OLDER_FORMAT,
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
        pieces = WrittenPieces(self._incarnation, windows.end_index(self._store, self._incarnation))
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
            windows.load(self._store, self._incarnation, position.next_index),
        )

    @property
    def pieces_index(self) -> int:
        """The index below which all IDs are written, even if no snapshot names them yet. Raises STORE_UNAVAILABLE."""
        self._catch_up()
        return self._pieces.end_index

    def write_piece(self, piece: Piece) -> None:
        """Write the IDs from `pieces_index` on, or from the first ID that the window has in memory, unsynced.

        These IDs are valid once a snapshot names them. Raises STORE_UNAVAILABLE.
        """
        batch = WriteBatch(raw_mode=True)
        self._pieces.put(batch, piece)
        self._store.write(batch, self._opening)
        self._pieces.written(piece)

    def write_delta(self, delta: Delta) -> int:
        """Write a snapshot completely or not at all, unsynced. Then call `await store.flush()` with the returned
        number.

        If either call fails, the next delta must contain all changes since the last durable delta, with the same
        `first_name`. Raises STORE_UNAVAILABLE.
        """
        self._catch_up()
        known = self._position.producers
        stored = _stored(delta)
        producers = stored.position.producers
        if delta.first_name > known or stored.position.falls_short_of(self._position) or not stored.is_sound():
            raise error("INTERNAL", f"the snapshot {stored.position} cannot follow on {self._position}")
        batch = WriteBatch(raw_mode=True)
        # Names below `known` are stored, but may not be durable yet: this write becomes durable after them.
        for first in range(known, producers, PAGE_PRODUCERS):
            at = first - delta.first_name
            self._put(batch, NAMES, first, encode_names(delta.names[at : at + PAGE_PRODUCERS]))
        if delta.ids is not None:
            self._pieces.check_follows(delta.ids)
            windows.put(batch, self._incarnation, delta.ids, self._pieces)
        size_bytes = self._put(batch, DELTA, self._last_delta + 1, stored.encode())
        # The write depends on data that was written in this opening, or is durable.
        opening = self._store.write(batch, self._opening)
        if delta.ids is not None and delta.ids.last is not None:
            self._pieces.written(delta.ids.last)
        self._last_delta += 1
        self._position = stored.position
        self._delta_bytes += size_bytes
        return opening

    async def write_anew(self, delta: Delta) -> int:
        """Write a snapshot that contains everything except a window. Earlier records become invalid, even records that
        cannot be read.

        It is one unsynced write, as in `write_delta`. No other data of the topic may be written meanwhile. A thread
        prepares the data. The write itself blocks the event loop, about 50 ms for a million producers. Raises
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
        """Return whether the store contains runs that are not in the window. The call blocks, and any thread may make
        it."""
        return windows.has_gaps(self._store, self._incarnation, window.older.numbers)

    def drop_left_over(self, window: IdWindow, *, end: int = windows.MAX_RUN) -> None:
        """Remove runs below number `end` that are not in the window. Data that cannot be removed now is removed at the
        next start."""
        batch = WriteBatch(raw_mode=True)
        windows.put_gaps(batch, self._incarnation, window.older.numbers, end)
        try:
            self._store.write(batch)
        except SeqdedupeError as e:
            logger.warning("what is left of runs of deduplication IDs cannot be removed now: %s", e)

    def remove(self) -> int:
        """Remove the snapshot in one unsynced write, as in `write_delta`. The import is kept, because the log does not
        contain it. Raises STORE_UNAVAILABLE."""
        batch = WriteBatch(raw_mode=True)
        batch.delete_range(snapshot_range(self._incarnation)[0], self._key(IMPORTED, 0))
        self._opening = 0
        return self._store.write(batch)

    def _replacement(self, header: Header, names: list[bytes], stored: StoredDelta) -> WriteBatch:
        """Return a write of all names and pages, in the same form as after a compaction, so that no compaction is due.
        The call takes long, and any thread may make it."""
        columns = [np.full(len(names), none, np.int64) for none in (NO_SEQUENCE_ID, NO_EPOCH, NOT_STATED)]
        for column, values in zip(columns, (stored.persisted, stored.epochs, stored.stated), strict=True):
            overwrite(column, stored.slots, values)
        batch = WriteBatch(raw_mode=True)
        # Runs are complete without the snapshot: the window written with this, or the policy, names them.
        batch.delete_range(snapshot_range(self._incarnation)[0], self._key(RUN, 0))
        batch.delete_range(self._key(RUN, MAX_NUMBER), self._key(IMPORTED, 0))
        self._put(batch, HEADER, 0, header.encode())
        for first in range(0, len(names), PAGE_PRODUCERS):
            page = slice(first, first + PAGE_PRODUCERS)
            self._put(batch, NAMES, first, encode_names(names[page]))
            self._put(batch, PAGE, first, encode_page([column[page] for column in columns]))
        return batch

    async def compact_if_due(self) -> bool:
        """If there are many deltas, merge them into pages, one page at a time. Return whether this was done.

        Snapshots may be written meanwhile. Raises STORE_UNAVAILABLE, STORE_DAMAGED; no data is lost then.
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
            # The progress is determined when it is needed.
            self._opening = 0
            raise
        finally:
            self._compacting = False
        return True

    def _catch_up(self) -> None:
        """Determine the stored state, if RocksDB was opened (again) since the state was last known."""
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
        pieces = WrittenPieces(self._incarnation, windows.end_index(self._store, self._incarnation))
        self._opening, self._header, self._last_delta = opening, header, last_delta
        self._position, self._delta_bytes, self._pieces = position, delta_bytes, pieces

    def _merge_pages(self, header: Header, columns: tuple[Numbers, ...]) -> None:
        """Merge the pages. Pages of producers that the header does not count come from an interrupted compaction."""
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
    """Replace the values at the places `where` by other values. `where` contains each place once."""
    numbers[where] = others
