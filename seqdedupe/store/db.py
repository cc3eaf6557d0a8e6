"""The RocksDB directory of a sidecar. Only this module writes RocksDB, makes writes durable, and opens RocksDB again
after a failure.

Writes are small and unsynced, and run on the event loop. `flush` syncs earlier writes in the store's only thread,
without the GIL. After a failed write or sync RocksDB accepts no more writes, so the store closes RocksDB and opens it
again. Data that was not durable by then may be lost, and later writes may depend on that data. So every write returns
the number of the current opening, and `flush` succeeds only for writes of the opening that it has synced.

The functions that copy a store are at the end.
"""

import asyncio
import errno
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from rocksdict import Rdict, ReadOptions, WriteBatch

from seqdedupe.errors import DamagedError, SeqdedupeError, UnavailableError, error
from seqdedupe.files import sync_folder
from seqdedupe.names import SHARDS
from seqdedupe.store import rocksdb
from seqdedupe.store.parts import (
    LAST_INCARNATION,
    MAX_NUMBER,
    NAMESPACES,
    TopicRecord,
    damaged,
    namespace_key,
    seal,
    snapshot_range,
    topic_key,
    unseal,
)
from seqdedupe.store.rocksdb import Mark, close_rocksdb, create_rocksdb, open_rocksdb, rocksdb_errors, sync, write
from seqdedupe.tasks import retrieve

logger = logging.getLogger("seqdedupe.store")

P = ParamSpec("P")
T = TypeVar("T")


BEHIND_SECONDS = 0.01
"""The interval at which the store checks whether RocksDB has processed earlier writes."""

_NO_ROOM = os.strerror(errno.ENOSPC)


@dataclass(frozen=True)
class _Opening:
    number: int
    db: Rdict
    is_read_only: bool = False

    def check_writable(self) -> None:
        if self.is_read_only:
            raise error("STORE_UNAVAILABLE", "the store was opened when its disk was full; it will be opened again")


class Store:
    """The store of one sidecar. Its coroutines and writes belong to one event loop. Any thread may read.

    While RocksDB is not open, every call raises STORE_UNAVAILABLE. Such a call also starts to open RocksDB again,
    unless another call has started this. So a later call may succeed. Reading and opening raise STORE_DAMAGED,
    NEWER_FORMAT and OLDER_FORMAT.
    """

    def __init__(self, folder: Path, mark: Mark, opening: _Opening) -> None:
        self._folder = folder
        self._mark = mark
        self._opening: _Opening | None = opening
        self._openings = opening.number
        self._broken: Rdict | None = None
        self._why: SeqdedupeError | None = None
        self._lock = threading.Lock()
        self._reopening: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._closed = False
        self._this_flush: asyncio.Task[int] | None = None
        self._next_flush: asyncio.Task[int] | None = None
        self._last_incarnation = 0

    @staticmethod
    def open(folder: Path) -> "Store":
        """Open the store in this folder, or create a store if the folder does not exist or is empty. Blocks.

        On a full disk the store can only be read, until there is room and data is written. Raises DIRECTORY_IN_USE,
        STORE_DAMAGED (also if some files are missing), NEWER_FORMAT, OLDER_FORMAT, STORE_UNAVAILABLE.
        """
        with rocksdb_errors(folder):
            if not folder.exists() or not any(folder.iterdir()):
                create_rocksdb(folder)
            else:
                # The process that created the folder may have been killed before it synced the parent folder.
                sync_folder(folder.parent)
            mark = Mark.open(folder)
        try:
            store = Store(folder, mark, _first_opening(folder, mark))
        except BaseException:
            mark.close()
            raise
        try:
            store._last_incarnation = store._stored_last_incarnation()
            store.topics()
        except BaseException:
            store.close()
            raise
        return store

    def close(self) -> None:
        """Wait for work in the store's thread, and close the store. Data that was not flushed may be lost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._thread.shutdown(wait=True)
        for db in (self._opening.db if self._opening else None, self._broken):
            if db is not None:
                close_rocksdb(db)
        self._mark.close()

    # The journal of the logs next to it.

    @property
    def has_journal(self) -> bool:
        """Whether the logs in the same directory may need their journal."""
        return self._mark.has_journal

    def tell_journal(self, has_journal: bool) -> None:
        """Record `has_journal`. When this returns, the record is durable. Any thread may call it. Raises OSError."""
        self._mark.tell_journal(has_journal)

    # Topics.

    def topics(self) -> list[TopicRecord]:
        """Return all topics, the oldest first."""
        stored = self.scan(topic_key(0), topic_key(MAX_NUMBER))
        topics = [TopicRecord.decode(key, value) for key, value in stored]
        for topic in topics:
            if topic.incarnation > self._last_incarnation:
                raise damaged(topic_key(topic.incarnation), "its incarnation is above the last one given")
        return topics

    def next_incarnation(self, now_us: int, shard: int | None = None) -> int:
        """Return an incarnation for a new topic: the current time, or the last incarnation + 1, the higher of the two.

        With `shard`, the number is raised until it ends with the shard. So two processes never return the same
        incarnation.
        """
        given = max(now_us, self._last_incarnation + 1)
        self._last_incarnation = given if shard is None else given + (shard - given) % SHARDS
        return self._last_incarnation

    async def put_topics(self, *records: TopicRecord) -> None:
        """Write all of these topic records, or none, and record that their incarnations are used. When this returns,
        the records are durable."""
        batch = WriteBatch(raw_mode=True)
        for record in records:
            self._last_incarnation = max(self._last_incarnation, record.incarnation)
            key = topic_key(record.incarnation)
            batch.put(key, seal(key, record.encode()))
        batch.put(LAST_INCARNATION, seal(LAST_INCARNATION, self._last_incarnation.to_bytes(8, "little")))
        await self.flush(self.write(batch))

    async def remove_topic(self, incarnation: int) -> None:
        """Remove a topic's record and snapshots. When this returns, the removal is durable. No work on the topic may be
        in progress."""
        batch = WriteBatch(raw_mode=True)
        batch.delete(topic_key(incarnation))
        batch.delete_range(*snapshot_range(incarnation))
        await self.flush(self.write(batch))

    async def remove_snapshot(self, incarnation: int) -> None:
        """Remove all data of a topic except its record. When this returns, the removal is durable. No work on the topic
        may be in progress."""
        await self.flush(self._without_snapshots([incarnation]))

    def remove_snapshots(self, incarnations: list[int]) -> None:
        """Do the same as `remove_snapshot` for several topics. The call blocks. Call it before the store is used."""
        self._without_snapshots(incarnations)
        self._sync(self._current())

    def _without_snapshots(self, incarnations: list[int]) -> int:
        batch = WriteBatch(raw_mode=True)
        for incarnation in incarnations:
            batch.delete_range(*snapshot_range(incarnation))
        return self.write(batch)

    # Namespaces.

    def namespace_policies(self) -> list[tuple[str, bytes]]:
        """Return the policies of namespaces, by name. Each policy has the encoding of its control record."""
        return [(key[1:].decode(), unseal(key, value)) for key, value in self.scan(*NAMESPACES)]

    async def put_namespace_policy(self, namespace: str, policy: bytes | None) -> None:
        """Write a namespace's policy, or remove it (None). When this returns, the change is durable."""
        key = namespace_key(namespace)
        batch = WriteBatch(raw_mode=True)
        if policy is None:
            batch.delete(key)
        else:
            batch.put(key, seal(key, policy))
        await self.flush(self.write(batch))

    def _stored_last_incarnation(self) -> int:
        return int.from_bytes(self.sealed(LAST_INCARNATION), "little")

    # Reading and writing.

    @property
    def opening(self) -> int:
        """The number of times that RocksDB was opened. If the number changes, writes that were not flushed may be
        lost."""
        return self._current().number

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the keys and values from `start` to before `stop`, as of the moment when the reading began. Blocks."""
        opening = self._current()
        with self._failures(opening):
            bounds = ReadOptions()
            bounds.set_iterate_upper_bound(stop)
            # No key is scanned twice.
            bounds.fill_cache(False)  # type: ignore[call-arg]  # rocksdict does not declare it
            rows = opening.db.iter(bounds)
            rows.seek(start)
            while rows.valid():
                yield rows.key(), rows.value()
                rows.next()
            # An error ends the iteration in the same way as the end of the data.
            rows.status()

    def sealed(self, key: bytes) -> bytes:
        """Return the unsealed data of this key; empty if there is no data. The call blocks. Raises STORE_DAMAGED."""
        return next((unseal(key, value) for _, value in self.scan(key, key + b"\0")), b"")

    def get(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the values of these keys, None for a missing key. Blocks, but lets other threads run."""
        opening = self._current()
        with self._failures(opening):
            return opening.db[keys]  # type: ignore[index, return-value]

    def write(self, batch: WriteBatch, only_in: int | None = None) -> int:
        """Write a batch atomically, without a sync. Return the number of the current opening of RocksDB. `await
        flush(number)` makes the batch durable.

        Batches become durable in the order in which they were written. A write holds the GIL, so keep batches small.
        With `only_in`, raise STORE_UNAVAILABLE if this opening is no longer current, because data on which the batch
        depends may be lost.
        """
        opening = self._current()
        if only_in is not None and opening.number != only_in:
            raise error("STORE_UNAVAILABLE", "the store was opened again: what was written may be lost")
        with self._failures(opening):
            opening.check_writable()
            rocksdb.write(opening.db, batch)
        return opening.number

    async def write_when_idle(self, batch: WriteBatch) -> int:
        """Call `write` after RocksDB has processed earlier writes. Use this for data that need not be written at
        once."""
        await self.wait_until_idle()
        return self.write(batch)

    async def wait_until_idle(self, at_most_seconds: float | None = None) -> None:
        """Wait until RocksDB has processed earlier writes. Writes that can wait should be made after this call.

        Raises STORE_UNAVAILABLE if this takes longer than `at_most_seconds`. After such a time, a write might fail, and
        RocksDB would have to be opened again.
        """
        try:
            async with asyncio.timeout(at_most_seconds):
                while True:
                    opening = self._current()
                    with self._failures(opening):
                        is_behind = rocksdb.is_behind(opening.db)
                    if not is_behind:
                        return
                    # RocksDB sends no signal when it has processed them.
                    await asyncio.sleep(BEHIND_SECONDS)
        except TimeoutError:
            raise error("STORE_UNAVAILABLE", "the store has not worked off in time what was written before") from None

    async def flush(self, opening: int) -> None:
        """Make all earlier writes in this opening of RocksDB durable.

        Callers share flushes: a caller that arrives while a flush runs waits for the next flush. Raises
        STORE_UNAVAILABLE, also if RocksDB was opened again after the write. In that case, the write may be lost and
        must be repeated.
        """
        if self._next_flush is None:
            self._next_flush = asyncio.create_task(self._flush_after(self._this_flush))
            self._next_flush.add_done_callback(retrieve)
        if await asyncio.shield(self._next_flush) != opening:
            raise error("STORE_UNAVAILABLE", "the store was opened again: what was written may be lost")

    async def _flush_after(self, running: asyncio.Task[int] | None) -> int:
        if running is not None:
            await asyncio.wait([running])
        self._this_flush, self._next_flush = self._next_flush, None
        opening = self._current()
        await self.in_thread(self._sync, opening)
        return opening.number

    def _sync(self, opening: _Opening) -> None:
        with self._failures(opening):
            opening.check_writable()
            # The order matters: if the number were ahead of the durable data, a power cut would look like damage.
            self._mark.move(rocksdb.sync(opening.db))

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run this function in the store's thread, where it cannot run while RocksDB is opened again."""
        if self._closed:
            raise error("STORE_UNAVAILABLE", "the store is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args, **kwargs))

    # Failure.

    def _current(self) -> _Opening:
        opening = self._opening
        if opening is not None and not self._closed:
            return opening
        why = self._why
        self._reopen()
        if isinstance(why, DamagedError):
            raise why
        raise error("STORE_UNAVAILABLE", why.message if why else "the store is closed")

    @contextmanager
    def _failures(self, opening: _Opening) -> Iterator[None]:
        """Convert RocksDB's errors. After an error other than damage, the current opening is not used any more."""
        try:
            with rocksdb_errors(self._folder):
                yield
        except UnavailableError as e:
            with self._lock:
                if self._opening is opening:
                    self._opening, self._broken, self._why = None, opening.db, e
            raise

    def _reopen(self) -> None:
        with self._lock:
            running = self._reopening is not None and not self._reopening.done()
            if not running and not self._closed and self._opening is None:
                self._reopening = self._thread.submit(self._open_again)

    def _open_again(self) -> None:
        try:
            if self._broken is not None:
                close_rocksdb(self._broken)
                self._broken = None
            db = open_rocksdb(self._folder, self._mark)
        except SeqdedupeError as e:
            self._why = e
            return
        self._openings += 1
        self._opening = _Opening(self._openings, db)


def _first_opening(folder: Path, mark: Mark) -> _Opening:
    try:
        return _Opening(1, open_rocksdb(folder, mark))
    except UnavailableError as e:
        if _NO_ROOM not in e.message:
            raise
        logger.warning("%s. Until there is room it is only read", e.message)
        return _Opening(1, open_rocksdb(folder, mark, read_only=True), is_read_only=True)


# -- Copies of a store. One kind is made to be read, since opening a store cuts torn data, and RocksDB always writes.
# The other kind is kept permanently: it contains records that are read while the store is in use.

_PREFIX = "seqdedupe-store-"

BATCH_BYTES = 256 * 1024
"""The number of bytes written in one step: other threads wait for the write."""

TRIES = 1200
PAUSE_SECONDS = 0.05
_STALLED = "Write stall"


@contextmanager
def opened_copy(folder: Path) -> Iterator[Store]:
    """Open the store of this folder as the next start would find it, for one `with` block. The folder does not change.

    The copy contains links to the table files, which RocksDB never changes. All other files are copied to the system's
    folder for temporary files. The call blocks. Raises the errors of `Store.open`, STORE_MISSING if there is no store,
    OSError.
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
    """Create a store that contains these records, after checking each record. When this returns, the contents are
    durable; the names of the files are not. Blocks.

    Raises STORE_DAMAGED for a damaged record, the errors of `rows`, and OSError if the store cannot be written.
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
    """Convert RocksDB's own errors, which are instances of `Exception` that only have a text."""
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
    """Write as soon as RocksDB accepts a write without delay. While RocksDB writes its memory to disk, a write would
    block the whole process."""
    for left in reversed(range(TRIES)):
        try:
            write(db, batch)
            return
        except Exception as e:
            if _STALLED not in str(e) or not left:
                raise
            time.sleep(PAUSE_SECONDS)


def of_original(message: str, folder: Path) -> str:
    """Return an error text about a copy of the store. In the returned text, `folder`, the path of the original store,
    replaces the path of the copy."""
    copy = re.escape(str(Path(tempfile.gettempdir(), _PREFIX))) + r"\w+/store"
    return re.sub(copy, lambda _: str(folder), message)


def check_all(store: Store) -> int:
    """Read every valid record, verify its checksum, and return the number of records. Raises STORE_DAMAGED."""
    count = 0
    for key, value in store.scan(b"", b"\xff"):
        unseal(key, value)
        count += 1
    return count
