"""Compaction of a topic's snapshots: deltas into pages, small records of names into full ones.

It works from what is stored, never from live memory, in small steps: reading and merging in the store's
thread, one page or record a write on the event loop. The last write alone lets go of the deltas. RocksDB
keeps writes in order, so whatever a crash leaves of it loads to the same state: pages without the last write
only repeat their deltas.
"""

from dataclasses import dataclass

import numpy as np
from rocksdict import WriteBatch

from seqdedupe.errors import error
from seqdedupe.limits import NO_EPOCH, NO_SEQUENCE_ID
from seqdedupe.store.db import Store
from seqdedupe.store.parts import (
    NOT_STATED,
    PAGE_PRODUCERS,
    Header,
    Numbers,
    Slots,
    StoredDelta,
    StoredPosition,
    decode_names,
    decode_page,
    encode_names,
    encode_page,
)
from seqdedupe.store.records import (
    DELTA,
    HEADER,
    MAX_NUMBER,
    NAMES,
    PAGE,
    damaged,
    part_key,
    part_number,
    seal,
)

DELTAS_A_STEP = 64
DELTA_BYTES_A_STEP = 512 * 1024
"""Read at once, whichever comes first: little enough not to keep the GIL from the event loop."""

PAGES_A_FLUSH = 16
"""Pages are not written faster than the disk takes them, nor do others wait for the sync of many."""


@dataclass(frozen=True, slots=True)
class Compacted:
    """The new header, and the size of the deltas that are gone."""

    header: Header
    delta_bytes: int


@dataclass(frozen=True, slots=True)
class _Changes:
    """What the last delta that names a producer says, of all after the header's, sorted by producer number.

    `pages` are the first producer numbers of the pages that they change.
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
    """Merges the deltas after the header's into pages, packs names, writes the new header. Durable on return.

    There must be such a delta. Raises STORE_UNAVAILABLE, also if RocksDB was opened again meanwhile;
    STORE_DAMAGED.
    """
    opening = store.opening

    def write(batch: WriteBatch) -> None:
        # Writes of two openings are not one sequence: the header must not speak for pages that may be lost.
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
    """Some deltas after that number, and their sizes; none if there are no more."""
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
    """The first producer numbers of the pages to write: those with changes, and those of new producers."""
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
    """One record of the names from that number on, as many as belong in one; and the number after them."""
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
