"""Copy everything that a store holds about a topic, except the topic's record, to another store.

The other store is in this process (`copy`), or belongs to another sidecar. To another sidecar, each record of the store
is sent after its two lengths (`row_bytes`). `IncomingSnapshot` receives the records in both cases. All records are
copied unchanged.
"""

import struct
from collections.abc import Iterator

from rocksdict import WriteBatch

from seqdedupe.errors import error
from seqdedupe.store.db import Store
from seqdedupe.store.parts import IMPORTED, MAX_NUMBER, part_key, part_number, seal, snapshot_range, unseal

BATCH_BYTES = 256 * 1024
"""The size of one write. It is limited because other threads wait for a write."""

MAX_ROW_BYTES = 256 * 1024 * 1024
"""The most bytes of one record of the store. Memory holds the whole record. A snapshot has this size if nine million
producers have changed since the previous snapshot."""

_LENGTHS = struct.Struct("<II")


def row_bytes(key: bytes, value: bytes) -> bytes:
    """Return a record of the store in the form in which it is sent."""
    return _LENGTHS.pack(len(key), len(value)) + key + value


class IncomingSnapshot:
    """Replaces all records of a topic in this store. Until `finish` has returned, no other code may read these records
    or write to the topic. All methods must be called on the store's event loop.

    All methods raise STORE_UNAVAILABLE, MOVE_FAILED for data that cannot be split into records, and INVALID_REQUEST for
    records that do not belong to this topic.
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
        """Add the next piece of the data. Wait while the store is busy, since all topics of the sidecar share the
        store."""
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
        # All records must be written during one opening of RocksDB: see `finish`.
        self._opening = self._opening or self._store.opening
        self._batch.put(key, value)
        self._batch_bytes += len(key) + len(value)
        if self._batch_bytes > BATCH_BYTES:
            await self._write()

    async def _write(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, WriteBatch(raw_mode=True), 0
        await self._store.write_when_idle(batch)

    async def finish(self) -> None:
        """End the snapshot when everything has arrived. The snapshot is durable on return."""
        if self._rest:
            raise _are_none(len(self._rest))
        self._opening = self._opening or self._store.opening
        await self._write()
        # `flush` fails if RocksDB was reopened since the first record: then some records may be lost.
        await self._store.flush(self._opening)


def _are_none(size: int) -> Exception:
    return error("MOVE_FAILED", f"the snapshot that came has a record of {size} bytes, and ends")


# -- Within one process: when the number of workers changes, and when the readable part of a damaged directory is saved.


async def copy(old: Store, new: Store, incarnation: int) -> None:
    """Make the new store's data of a topic equal to the old store's data. When this returns, the change is durable.
    Raises STORE_UNAVAILABLE, and STORE_DAMAGED for a damaged record."""
    await put_all(new, incarnation, _checked(old, *snapshot_range(incarnation)))


async def put_all(store: Store, incarnation: int, records: Iterator[tuple[bytes, bytes]]) -> None:
    """Replace all records of a topic in the store by `records`. When this returns, the change is durable. Raises the
    errors of `IncomingSnapshot` and of `records`."""
    incoming = IncomingSnapshot(store, incarnation)
    for key, value in records:
        await incoming.put(key, value)
    await incoming.finish()


def without_imported(store: Store, incarnation: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield a topic's records, without the records that were imported into the topic. Raises the errors of `copy`."""
    return _checked(store, snapshot_range(incarnation)[0], part_key(incarnation, IMPORTED, 0))


def imported_as(store: Store, incarnation: int, as_incarnation: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the records that were imported into a topic, changed to belong to the incarnation `as_incarnation`. Raises
    the errors of `copy`."""
    for key, value in store.scan(part_key(incarnation, IMPORTED, 0), part_key(incarnation, IMPORTED, MAX_NUMBER)):
        as_key = part_key(as_incarnation, IMPORTED, part_number(key))
        yield as_key, seal(as_key, unseal(key, value))


def _checked(store: Store, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
    for key, value in store.scan(start, stop):
        unseal(key, value)
        yield key, value
