"""The imported window of a topic of deduplication IDs in the store: one run, and which file it came in.

It is no part of the snapshots: the log says whether it counts. So it is written before the log says so, and stays
when a snapshot is made anew, or all of them are removed.
"""

import struct

from rocksdict import WriteBatch

from seqdedupe.core.id_runs import IdRun, ImportedIds
from seqdedupe.exports import WINDOW_CHECKSUM_BYTES
from seqdedupe.format.headers import SECRET_BYTES
from seqdedupe.store import windows
from seqdedupe.store.db import Store
from seqdedupe.store.parts import IMPORTED, MAX_NUMBER, damaged, other_format, part_key, seal, unseal

FORMAT_VERSION = 1

FIRST_RUN = windows.MAX_RUN + 1
"""Imported runs have numbers from here on."""

_IMPORTED = struct.Struct(f"<BI{SECRET_BYTES}s{WINDOW_CHECKSUM_BYTES}s")


def _key(incarnation: int) -> bytes:
    return part_key(incarnation, IMPORTED, 0)


def put(store: Store, incarnation: int, imported: ImportedIds) -> int:
    """This is what was imported: one write, unsynced; `await store.flush()` with the number returned. Raises
    STORE_UNAVAILABLE."""
    batch = WriteBatch(raw_mode=True)
    _put(batch, incarnation, imported)
    return store.write(batch)


def _put(batch: WriteBatch, incarnation: int, imported: ImportedIds) -> None:
    key = _key(incarnation)
    body = _IMPORTED.pack(FORMAT_VERSION, imported.run.number, imported.key, imported.checksum)
    batch.put(key, seal(key, body))


def remove(store: Store, incarnation: int) -> None:
    """Nothing is left of any import. Raises STORE_UNAVAILABLE."""
    batch = WriteBatch(raw_mode=True)
    batch.delete_range(_key(incarnation), part_key(incarnation, IMPORTED, MAX_NUMBER))
    store.write(batch)


def keep_only(store: Store, incarnation: int, imported: ImportedIds | None) -> None:
    """This is what was imported, whatever was put since, and nothing is left of other runs of imports: one write.
    Raises STORE_UNAVAILABLE."""
    if imported is None:
        remove(store, incarnation)
        return
    batch = WriteBatch(raw_mode=True)
    for start, end in _around(incarnation, imported):
        batch.delete_range(start, end)
    _put(batch, incarnation, imported)
    store.write(batch)


def has_other_runs(store: Store, incarnation: int, imported: ImportedIds | None) -> bool:
    """Whether something is stored of such. Blocks, in any thread."""
    return any(True for start, end in _around(incarnation, imported) for _ in store.scan(start, end))


def _around(incarnation: int, imported: ImportedIds | None) -> list[tuple[bytes, bytes]]:
    """The keys of all runs of imports but this one."""
    first, end = windows.run_key(incarnation, FIRST_RUN, 0), part_key(incarnation, IMPORTED, MAX_NUMBER)
    if imported is None:
        return [(first, end)]
    number = imported.run.number
    return [(first, windows.run_key(incarnation, number, 0)), (windows.run_key(incarnation, number + 1, 0), end)]


def load(store: Store, incarnation: int) -> ImportedIds | None:
    """What was imported, whether it counts or not. Blocks, in any thread. Raises STORE_DAMAGED, NEWER_FORMAT,
    STORE_UNAVAILABLE."""
    key = _key(incarnation)
    [value] = store.get([key])
    if value is None:
        return None
    body = unseal(key, value)
    if body and body[0] != FORMAT_VERSION:
        raise other_format(f"the record {key.hex()}", body[0], FORMAT_VERSION)
    if len(body) != _IMPORTED.size:
        raise damaged(key, f"it is {len(body)} bytes long")
    _, number, secret, checksum = _IMPORTED.unpack(body)
    run: IdRun = windows.load_run(store, incarnation, number)
    if run.first_index != 0:
        raise damaged(key, f"the run {number} is none that was imported")
    return ImportedIds(run, secret, checksum)
