"""Everything that a store has of a topic except its record, on its way to another store. The other store is in this
process (`copy`), or another sidecar's. To another sidecar the records go one after the other, each after two lengths
(`row_bytes`). `IncomingSnapshot` takes both.

All records count in the new store as they counted in the old one: no content is made again.
"""

import struct
from collections.abc import Iterator

from rocksdict import WriteBatch

from seqdedupe.errors import error
from seqdedupe.store.db import Store
from seqdedupe.store.parts import IMPORTED, MAX_NUMBER, part_key, part_number, seal, snapshot_range, unseal

BATCH_BYTES = 256 * 1024
"""The size of one write: other threads wait for it."""

MAX_ROW_BYTES = 256 * 1024 * 1024
"""The most bytes of a record of the store, which is held as a whole. A snapshot has this size if nine million producers
have all changed since the snapshot before."""

_LENGTHS = struct.Struct("<II")


def row_bytes(key: bytes, value: bytes) -> bytes:
    """Return a record of the store in the form in which it is sent."""
    return _LENGTHS.pack(len(key), len(value)) + key + value


class IncomingSnapshot:
    """Replaces everything that is stored of a topic here. Until `finish` has returned, nobody may read it or write to
    the topic. It belongs to the store's event loop.

    Everything raises STORE_UNAVAILABLE; MOVE_FAILED for data that is no records, INVALID_REQUEST for records of
    something else.
    """

    def __init__(self, store: Store, incarnation: int) -> None:
        self._store = store
        self._incarnation = incarnation
        self._start, self._stop = snapshot_range(incarnation)
        self._opening = 0
        self._rest = bytearray()
        """The part of a record that has not arrived completely."""
        self._batch, self._batch_bytes = WriteBatch(raw_mode=True), 0
        self._batch.delete_range(self._start, self._stop)

    async def add(self, data: bytes) -> None:
        """Add the next piece. The store receives no more than it can process: all of the sidecar's topics share it."""
        self._rest += data
        at = 0
        while len(self._rest) - at >= _LENGTHS.size:
            sizes = _LENGTHS.unpack_from(self._rest, at)
            if sum(sizes) > MAX_ROW_BYTES:
                raise _are_none(sum(sizes))
            key_at = at + _LENGTHS.size
            value_at, end = key_at + sizes[0], key_at + sum(sizes)
            if len(self._rest) < end:
                break
            await self.put(bytes(self._rest[key_at:value_at]), bytes(self._rest[value_at:end]))
            at = end
        del self._rest[:at]

    async def put(self, key: bytes, value: bytes) -> None:
        """Add the next record, as in `add`."""
        if not (self._start <= key < self._stop):
            what = f"a record {key.hex()[:100]} is no part of a snapshot of {self._incarnation}"
            raise error("INVALID_REQUEST", what)
        # All records must go to one opening of RocksDB.
        self._opening = self._opening or self._store.opening
        self._batch.put(key, value)
        self._batch_bytes += len(key) + len(value)
        if self._batch_bytes > BATCH_BYTES:
            await self._write()

    async def _write(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, WriteBatch(raw_mode=True), 0
        await self._store.write_when_idle(batch)

    async def finish(self) -> None:
        """End the snapshot, when everything has arrived. It is durable on return."""
        if self._rest:
            raise _are_none(len(self._rest))
        self._opening = self._opening or self._store.opening
        await self._write()
        # This fails if RocksDB was opened again meanwhile: then some records may be lost.
        await self._store.flush(self._opening)


def _are_none(size: int) -> Exception:
    return error("MOVE_FAILED", f"the snapshot that came has a record of {size} bytes, and ends")


# -- Within one process: to change the number of workers, and to keep the readable part of a damaged directory.


async def copy(old: Store, new: Store, incarnation: int) -> None:
    """Make the new store's data of a topic equal to the old store's; durable on return. Raises STORE_UNAVAILABLE, and
    STORE_DAMAGED for a record that differs from what was written."""
    await put_all(new, incarnation, _checked(old, *snapshot_range(incarnation)))


async def put_all(store: Store, incarnation: int, records: Iterator[tuple[bytes, bytes]]) -> None:
    """Make these the only records of a topic in the store; durable on return. Raises as `IncomingSnapshot`, and the
    errors of `records`."""
    incoming = IncomingSnapshot(store, incarnation)
    for key, value in records:
        await incoming.put(key, value)
    await incoming.finish()


def without_imported(store: Store, incarnation: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield a topic's records except those that were imported into it. Raises as `copy`."""
    return _checked(store, snapshot_range(incarnation)[0], part_key(incarnation, IMPORTED, 0))


def imported_as(store: Store, incarnation: int, as_incarnation: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the records imported into a topic, as those of another incarnation, or the same. Raises as `copy`."""
    for key, value in store.scan(part_key(incarnation, IMPORTED, 0), part_key(incarnation, IMPORTED, MAX_NUMBER)):
        as_key = part_key(as_incarnation, IMPORTED, part_number(key))
        yield as_key, seal(as_key, unseal(key, value))


def _checked(store: Store, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
    for key, value in store.scan(start, stop):
        unseal(key, value)
        yield key, value
