"""Copies of a store: one to be looked at, since opening a store cuts what is torn, and RocksDB always writes; and one
that is kept, of records that are read while the store is in use."""

import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rocksdict import Rdict, WriteBatch

from seqdedupe.errors import error
from seqdedupe.store.db import Store
from seqdedupe.store.parts import unseal
from seqdedupe.store.rocksdb import Mark, close_rocksdb, create_rocksdb, open_rocksdb, sync, write

_PREFIX = "seqdedupe-store-"

BATCH_BYTES = 256 * 1024
"""What is written at once: other threads wait for it."""

TRIES = 1200
PAUSE_SECONDS = 0.05
_STALLED = "Write stall"


@contextmanager
def opened_copy(folder: Path) -> Iterator[Store]:
    """The store of this folder as the next start would find it, for the length of a block; the folder stays as it is.

    Table files, which nobody ever writes to, are linked; the rest is copied to the system's folder for temporary files.
    Blocks. Raises what `Store.open` raises, STORE_MISSING if there is none; OSError.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        raise error("STORE_MISSING", f"there is no store {folder}")
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as temporary:
        copy = Path(temporary, "store")
        copy.mkdir()
        for path in folder.iterdir():
            if path.suffix == ".sst":
                (copy / path.name).symlink_to(path.resolve())
            elif path.is_file():
                shutil.copyfile(path, copy / path.name)
        store = Store.open(copy)
        try:
            yield store
        finally:
            store.close()


def write_copy(folder: Path, rows: Iterator[tuple[bytes, bytes]]) -> None:
    """Makes a store of these records, each checked; durable on return, but for the names of its files. Blocks.

    Raises STORE_DAMAGED for a record that is not what was written, what `rows` raises; OSError if it cannot be written.
    """
    with _as_os_errors():
        create_rocksdb(folder)
        mark = Mark.open(folder)
        try:
            db = open_rocksdb(folder, mark)
            try:
                for some in _in_batches(rows):
                    _write_patiently(db, some)
                mark.move(sync(db))
            finally:
                close_rocksdb(db)
        finally:
            mark.close()


@contextmanager
def _as_os_errors() -> Iterator[None]:
    """RocksDB's own errors are bare `Exception`s with its text."""
    try:
        yield
    except Exception as e:
        if type(e) is not Exception:
            raise
        raise OSError(str(e)) from e


def _in_batches(rows: Iterator[tuple[bytes, bytes]]) -> Iterator[WriteBatch]:
    batch = WriteBatch(raw_mode=True)
    for key, value in rows:
        unseal(key, value)
        batch.put(key, value)
        if batch.size_in_bytes() >= BATCH_BYTES:
            yield batch
            batch = WriteBatch(raw_mode=True)
    yield batch


def _write_patiently(db: Rdict, batch: WriteBatch) -> None:
    """As soon as RocksDB takes it: it writes down what it has in memory, and would hold up the whole process."""
    for left in reversed(range(TRIES)):
        try:
            write(db, batch)
            return
        except Exception as e:
            if _STALLED not in str(e) or not left:
                raise
            time.sleep(PAUSE_SECONDS)


def of_original(message: str, folder: Path) -> str:
    """What was said of a copy, with the name of the folder that was copied."""
    copy = re.escape(str(Path(tempfile.gettempdir(), _PREFIX))) + r"\w+/store"
    return re.sub(copy, lambda _: str(folder), message)


def check_all(store: Store) -> int:
    """Reads every record that is in force, with its checksum; how many there are. Raises STORE_DAMAGED."""
    count = 0
    for key, value in store.scan(b"", b"\xff"):
        unseal(key, value)
        count += 1
    return count
