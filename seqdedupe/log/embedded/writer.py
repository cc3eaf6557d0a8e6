"""Write the end of one topic's log: pack records, write them, continue in a new segment, and undo failed writes.

Begin with `Writer`. `Room` decides when a log may be opened for writing. The thread of `Syncer` syncs segment files
that are no longer written to, and files whose records are in the journal.
"""

import asyncio
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, islice
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from seqdedupe.files import sync_folder, write_all
from seqdedupe.format import headers
from seqdedupe.format.headers import NO_KEY
from seqdedupe.limits import FlushInterval
from seqdedupe.log.contract import Failure, Outcome, Run, Runs
from seqdedupe.log.embedded.segment import MAX_RECORD_BYTES, POINT_INTERVAL_BYTES, SegmentPoint, segment_path
from seqdedupe.log.embedded.tail import Tail, mend

# -- Room: a log may be opened for writing if its disk has room, and if a trial has succeeded after a refused write.
#
# Opening writes so little that it succeeds where no batch fits. Without the trial, a topic on a full disk would
# repeatedly open, refuse a write, and open again, with a new marker each time. A full quota and a file system that has
# become read-only are handled like a full disk.

LARGEST_BYTES = MAX_RECORD_BYTES
"""The size of the largest batch in the log."""

SHARE_BYTES = 2 * LARGEST_BYTES
"""The free space that the disk must have before a topic's log is opened for writing."""

TRIAL_SECONDS = 5.0
"""The least time from the end of a trial to the start of the next trial."""

_MIB = 1024 * 1024
_BLOCK_BYTES = _MIB


class Room:
    """The free space of the file system of a folder of logs. Only the commit thread may use this object. So no log is
    written while a trial runs.

    All logs of the folder share one trial. The space that is free after the trial is divided into shares of
    SHARE_BYTES, one for each log that is opened. Logs without a share wait for the next trial.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shares = 0
        """The number of shares that are left from the last trial."""
        self._why = ""
        """Why the last trial failed; empty if it succeeded."""
        self._next_trial = time.monotonic()

    def refused(self) -> None:
        """Record that a write was refused. The shares of the last trial are then no longer valid."""
        self._shares = 0

    def why_not(self, *, was_refused: bool) -> str:
        """Return the reason why a log may not be opened for writing now; empty if it may be opened.

        A log whose last write `was_refused` uses up one share. Any other log only needs SHARE_BYTES of free space.
        """
        if (why := self._why_no_share()) or not was_refused:
            return why
        if time.monotonic() >= self._next_trial:
            self._shares = 0
            self._why = self._why_trial_fails()
            self._next_trial = time.monotonic() + TRIAL_SECONDS
        if not self._shares:
            return self._why or f"the disk of {self._folder} was full: other topics go first"
        self._shares -= 1
        return ""

    def _why_no_share(self) -> str:
        try:
            free = self._free_bytes()
        except OSError as e:
            return f"the room in {self._folder} cannot be seen: {e}"
        if free >= SHARE_BYTES:
            return ""
        needed, there = SHARE_BYTES / _MIB, free / _MIB
        return f"the disk of {self._folder} has {there:.1f} MiB free: a topic needs {needed:.1f} MiB to be written"

    def _why_trial_fails(self) -> str:
        """Write LARGEST_BYTES to a temporary file, measure the free space, and remove the file. Return the reason for a
        failure; empty if the trial succeeded."""
        # Use random bytes, because a file system cannot compress them.
        block = os.urandom(_BLOCK_BYTES)
        try:
            with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
                for at in range(0, LARGEST_BYTES, _BLOCK_BYTES):
                    write_all(file.fileno(), block[: LARGEST_BYTES - at], at)
                os.fdatasync(file.fileno())
            self._shares = self._free_bytes() // SHARE_BYTES
        except OSError as e:
            return f"a trial write of {LARGEST_BYTES / _MIB:.1f} MiB in {self._folder} failed: {e.strerror}"
        return ""

    def _free_bytes(self) -> int:
        disk = os.statvfs(self._folder)
        return disk.f_bavail * disk.f_frsize


# -- Segment files are synced in the background. After the sync, the journal may forget the files' records.

AT_ONCE = 8
"""The number of files that are synced at the same time. Most file systems combine these syncs into one write, so that a
sync costs about a sixth."""


class LeftFile(NamedTuple):
    """An open segment file that must be synced before it is closed."""

    file: int
    path: Path


class Syncer:
    """A thread that processes its queue in order. Adjacent files in the queue are synced at the same time.

    If a sync fails, the thread calls `fatal`. After a failed sync, the journal forgets nothing, because it has data
    that the segments lack. At most `max_files` should wait for a sync.
    """

    def __init__(self, fatal: Callable[[str], None], max_files: int) -> None:
        self._fatal = fatal
        self._max_files = max_files
        self._queue: SimpleQueue[LeftFile | Callable[[], None] | threading.Event | None] = SimpleQueue()
        self._has_failed = False
        self._left = 0
        """The number of files that are not closed yet."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="seqdedupe-sync", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether no more files should be passed to the thread now."""
        return self._left >= self._max_files

    def sync(self, left: LeftFile) -> None:
        """Have the thread sync the file and close it."""
        with self._lock:
            self._left += 1
        self._queue.put(left)

    def then(self, forget: Callable[[], None]) -> None:
        """Make the thread call `forget` when all files passed earlier are synced. `forget` must not raise an exception.
        After a failed sync, the thread does not call `forget`."""
        self._queue.put(forget)

    def wait(self) -> None:
        """Wait until the thread has processed everything passed before."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def close(self) -> None:
        """Wait until the thread has processed everything passed before, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as e:
            self._fatal(f"the sync thread has failed: {e!r}")
            raise

    def _work(self) -> None:
        files: list[LeftFile] = []
        with ThreadPoolExecutor(AT_ONCE, "seqdedupe-sync") as threads:
            while True:
                work = self._queue.get()
                if isinstance(work, LeftFile):
                    files.append(work)
                    if len(files) < AT_ONCE and not self._queue.empty():
                        continue
                list(threads.map(self._sync, files))
                with self._lock:
                    self._left -= len(files)
                files.clear()
                if work is None:
                    return
                if isinstance(work, threading.Event):
                    work.set()
                elif not isinstance(work, LeftFile) and not self._has_failed:
                    work()

    def _sync(self, left: LeftFile) -> None:
        try:
            os.fdatasync(left.file)
        except OSError as e:
            self._has_failed = True
            self._fatal(f"{left.path} cannot be synced: {e}")
        finally:
            os.close(left.file)


# -- The end of a log.

GROUP_APPENDS = 256
"""The most appends of a topic in one group. The limit exists because the event loop settles a whole group in one step.

Each append has two buffers, the header and the body. The buffers of a group fit into one `writev` of Linux, which
accepts 1,024 buffers.
"""
GATHER_BYTES = 512 * 1024
"""Above this size, writing a group takes so long that waiting for more appends saves no time."""

WRITE_BYTES = 1024 * 1024
"""The size of one write. For a larger write, the system allocates memory in larger pieces, which it has not used
recently. In a virtual machine, the host may have to provide these pieces first: 16 MB in one call took up to five times
as long."""

MAX_LATE_APPENDS = 1024
"""The most appends of a topic that wait for a sync, for every flush policy. The limit exists because the event loop
settles all of these appends in one step."""


Append = tuple[bytes, int, int]
"""One append: an encoded batch, its number of rows and its column bytes. An append with 0 rows is an encoded control
record.

The type is a plain tuple for speed, since every batch needs one.
"""


class WriteTerm:
    """One opening of a log for writing. The event loop creates a `WriteTerm` and passes it to the commit thread. Only
    the commit thread uses `marked` and `failed`.

    `hand_over` passes the opening to the commit thread, which then takes the waiting appends.
    """

    def __init__(
        self,
        writer: "Writer",
        hand_over: Callable[["WriteTerm"], None],
        term: int,
        token: bytes,
        settle: Callable[[Outcome], None],
    ) -> None:
        self.writer = writer
        self.term = term
        self.token = token
        self.ownership = headers.ownership_of(token)
        self.settle = settle
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.opened = False
        """Whether the event loop knows that the marker is durable."""
        self.marked = False
        self.failed = False
        self.follows_refusal = False
        """Whether an earlier opening or write was refused. Then a group with several appends has at most LARGEST_BYTES,
        the size of the trial in `Room`."""
        self._appends: deque[Append] = deque()
        self._hand_over = hand_over
        self._queued = False
        self._flushes = self._flushed = 0
        """The number of syncs requested, and the number of requests for which the thread has taken all earlier
        appends."""
        self._wake()

    def _wake(self) -> None:
        """Wake the thread, unless this opening is already in its queue."""
        if not self._queued:
            self._queued = True
            self._hand_over(self)

    def append(self, append: Append) -> None:
        """Pass an append to the thread."""
        self._appends.append(append)
        if not self._queued:
            self._wake()

    def flush(self) -> None:
        """Ask the thread to sync all appends passed so far."""
        self._flushes += 1
        self._wake()

    def take(self) -> tuple[list[Append], bool]:
        """Return the waiting appends, at most one group, and whether a sync of these appends was requested. Remaining
        and later appends wake the thread again."""
        self._queued = False
        # `_flushes` must be read first. Then all appends made before these requests are taken now or stay in the queue.
        flushes = self._flushes
        taken = [self._appends.popleft() for _ in range(self._largest_group())]
        is_due = flushes > self._flushed
        if self._appends:
            self._wake()
        else:
            self._flushed = flushes
        return taken, is_due

    def _largest_group(self) -> int:
        """Return the number of appends to take at once."""
        most = min(len(self._appends), GROUP_APPENDS)
        if not self.follows_refusal:
            return most
        ends = accumulate(headers.HEADER_BYTES + len(body) for body, _, _ in islice(self._appends, most))
        return max(sum(end <= LARGEST_BYTES for end in ends), min(most, 1))


class WrittenAppends(NamedTuple):
    """The outcome of an opening's marker, or of some appends, for the event loop."""

    opening: WriteTerm
    runs: list[Runs]
    """The message IDs of the appends; empty for the marker."""

    base_index: int
    """The first index of the segment that was written to. The segment may be new."""

    start: int
    """The offset in the segment at which the written data begins."""

    end: int
    """The offset in the segment at which the written data ends."""

    next_index: int
    points: list[SegmentPoint]
    """New points of the sparse index."""

    control_bytes: int = 0
    """The number of bytes of a marker or of control records in the written data."""

    buffers: Sequence[bytes | memoryview] = ()
    """The written data."""

    failure: Failure | None = None
    why: str = ""


class LateAppends(NamedTuple):
    """Appends that are written but not durable yet, for the event loop. A `WrittenAppends` with their outcome follows
    later."""

    opening: WriteTerm
    runs: list[Runs]


class FatalError(Exception):
    """The content of the disk is unknown, or a write could not be undone: the process must end."""


class Writer:
    """The end of one topic's log. Only the commit thread may use a writer, except for the attributes named below.

    Before the first write, the writer mends the end of the log (`tail.mend`). On the event loop, `on_news` is called
    for durable data. `on_late` is called for data that is written but not durable, if `flush_interval` allows a delay.
    The event loop may change `flush_interval` and `roll_through`. The file is opened when it is needed, and stays open
    until `let_go`.
    """

    def __init__(
        self,
        folder: Path,
        tail: Tail,
        segment_bytes: int,
        on_news: Callable[[WrittenAppends], None],
        on_late: Callable[[LateAppends], None],
        room: Room,
    ) -> None:
        self.on_news = on_news
        self.on_late = on_late
        self.flush_interval = FlushInterval()
        self.roll_through = -1
        """If the current segment begins at or below this index, the next write begins a new segment, no matter how
        small the current one is."""
        self.is_due = False
        """Whether the written data must be made durable now."""
        self.has_more_coming = False
        """Whether the last group suggests that waiting for more appends is worthwhile."""
        segment = tail.segment
        self._folder = folder
        self.incarnation, self._key = segment.identity
        self._base_index = segment.base_index
        self._end = self._synced = self._file_synced = segment.end
        # Data below `_synced` is durable through the journal or a sync of the file. Data below `_file_synced` is
        # durable through a sync of the file.
        self._next_index = tail.next_index
        self._publish_time_ms = tail.publish_time_ms
        self._last_point = segment.points[-1].offset if segment.points else -POINT_INTERVAL_BYTES
        self._segment_bytes = segment_bytes
        self._opening: WriteTerm | None = None
        self._to_mend: Tail | None = tail
        self._room = room
        self._needs_share = False
        """Whether a write was refused, and no opening has succeeded since."""
        self._was_refused = False
        self._durable_index = tail.next_index
        self._unsynced_appends = 0
        self._unsynced: list[WrittenAppends] = []
        self._durable: list[WrittenAppends] = []  # not reported yet
        self._file: int | None = None
        self._broken = False
        self._closed = False

    def write(self, opening: WriteTerm, now_ms: int) -> WrittenAppends | None:
        """Write the marker or the appends of an opening. The written data is not synced yet.

        Return None if there is nothing to write. Appends are dropped if they belong to an older or failed opening, or
        if the log was closed. A failed write is undone before it is reported as refused. Raises FatalError if the write
        cannot be undone.
        """
        appends, is_asked = opening.take()
        if self._broken or self._closed:
            self.is_due = False
            return None
        self.is_due = self.is_due or is_asked
        if not opening.marked:
            opening.marked = True
            self._opening = opening
            opening.follows_refusal = self._was_refused
            if why := self._room.why_not(was_refused=self._needs_share):
                return self._refused(opening, why)
            # If this opening finds a higher term, the log is opened again. The second opening needs no further share.
            self._needs_share = False
        elif self._opening is not opening or opening.failed or not appends:
            return None
        try:
            file = self._opened()
            if self._to_mend is not None:
                mend(self._to_mend, file)
                self._to_mend = None
        except OSError as e:
            return self._refused(opening, f"the log cannot be opened for writing: {e}")
        self._publish_time_ms = max(self._publish_time_ms, now_ms)
        try:
            file = self._roll(file)
            news = self._pack(opening, appends) if appends else self._pack_marker(opening)
            _write(file, news.buffers, self._end)
        except OSError as e:
            self._undo(file)
            self._room.refused()
            return self._refused(opening, f"the log cannot be written: {e}")
        if news.points:
            self._last_point = news.points[-1].offset
        self.has_more_coming = len(appends) > 1 and news.end - self._end < GATHER_BYTES
        self._end, self._next_index = news.end, news.next_index
        self._unsynced.append(news)
        self._unsynced_appends += len(appends)
        self.is_due = self.is_due or self._must_not_wait(appends)
        return news

    def _must_not_wait(self, appends: list[Append]) -> bool:
        """Return whether the written data must be made durable before it is reported."""
        interval = self.flush_interval
        return (
            interval.ms <= 0
            or not appends
            or self._next_index - self._durable_index >= interval.messages
            or self._unsynced_appends >= MAX_LATE_APPENDS
            or any(not rows for _, rows, _ in appends)
        )

    @property
    def has_unsynced(self) -> bool:
        """Whether there is written data that neither a sync of the file nor the journal has made durable."""
        return bool(self._unsynced)

    @property
    def may_use_journal(self) -> bool:
        """Whether a single round of the journal would be sufficient to make all data durable that must be durable
        now."""
        return self.is_due and len(self._unsynced) == 1

    @property
    def is_in_journal(self) -> bool:
        """Whether the file may lack data that the journal has."""
        return self._file_synced < self._end

    def in_journal(self) -> None:
        """Record that the journal has made the written data durable."""
        self._synced = self._end
        self._confirm()

    def sync(self) -> None:
        """Make the written data durable. Raises FatalError."""
        if self._broken or self._synced < self._end:
            self.sync_file()
        self.is_due = False

    def take_durable(self) -> list[WrittenAppends]:
        """Return the outcomes of the appends that have become durable since the last call."""
        durable, self._durable = self._durable, []
        return durable

    def forget_written(self) -> None:
        """Drop the outcomes of written data, for a caller that does not need them."""
        self._unsynced, self._durable = [], []

    def _confirm(self) -> None:
        self._durable += self._unsynced
        self._unsynced = []
        self._unsynced_appends, self._durable_index = 0, self._next_index
        self.is_due = False

    def sync_file(self) -> None:
        """Make the written data durable by syncing the file itself. Raises FatalError."""
        if self._broken:
            # After a failed sync, a later sync that succeeds does not prove that the data is on the disk.
            raise FatalError(f"{self._path()} could not be synced before")
        if self._file_synced < self._end:
            try:
                os.fdatasync(self._opened())
            except OSError as e:
                self._broken = True
                raise FatalError(f"{self._path()} cannot be synced: {e}") from e
            self._synced = self._file_synced = self._end
            self._confirm()

    def let_go(self) -> LeftFile | None:
        """Release the file until it is needed again. If the journal has data that the file may lack, return the open
        file. The caller must sync the file over this descriptor before closing it. A sync over another descriptor might
        not report a page that could not be written."""
        left, self._file = self._file, None
        if left is None:
            return None
        if self._file_synced < self._end and not self._broken:
            return LeftFile(left, self._path())
        os.close(left)
        return None

    def close(self) -> None:
        """Release the file for good. Raises FatalError."""
        self._closed = True
        try:
            # A file that was released before is synced by the receiver of `let_go`. It is not opened again here, since
            # no descriptor may be available.
            if self._file is not None and not self._broken:
                self.sync_file()
        finally:
            if (left := self.let_go()) is not None:
                os.close(left.file)

    def _opened(self) -> int:
        if self._file is None:
            self._file = os.open(self._path(), os.O_RDWR | os.O_CLOEXEC)
        return self._file

    def _refused(self, opening: WriteTerm, why: str) -> WrittenAppends:
        opening.failed = self._needs_share = self._was_refused = True
        end = self._end
        return WrittenAppends(
            opening, [], self._base_index, end, end, self._next_index, [], failure=Failure.REFUSED, why=why
        )

    def _path(self) -> Path:
        return segment_path(self._folder, self._base_index)

    def _roll(self, file: int) -> int:
        """Continue in a new segment if the current segment is large enough or `roll_through` demands it. Return the
        file to write to. Raises OSError if a new segment cannot be made now."""
        is_long_enough = self._end >= self._segment_bytes or self._base_index <= self.roll_through
        if not is_long_enough or self._next_index == self._base_index:
            return file
        self.sync_file()
        path = segment_path(self._folder, self._next_index)
        new = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.close(file)
        self._file = new
        self._base_index, self._end, self._synced, self._file_synced = self._next_index, 0, 0, 0
        self._last_point = -POINT_INTERVAL_BYTES
        try:
            sync_folder(self._folder)
        except OSError as e:
            self._broken = True
            raise FatalError(f"{self._folder} cannot be synced: {e}") from e
        return new

    def _undo(self, file: int) -> None:
        """Cut off the data that a failed write has left in the file. Also sync the data that was written before."""
        try:
            if self._synced == self._end == os.fstat(file).st_size:
                # The write has left nothing, so nothing is cut: on a read-only file system, cutting would fail.
                return
            os.ftruncate(file, self._end)
            os.fsync(file)
        except OSError as e:
            self._broken = True
            raise FatalError(f"{self._path()} cannot be cut after a failed write: {e}") from e
        self._synced = self._file_synced = self._end
        self._confirm()

    def _pack(self, opening: WriteTerm, appends: list[Append]) -> WrittenAppends:
        made: list[bytes] = []
        runs: list[Runs] = []
        points: list[SegmentPoint] = []
        end, next_index, last_point = self._end, self._next_index, self._last_point
        control_bytes = 0
        # A single header is created with its tag. For several headers, one later call creates all tags.
        key = self._key if len(appends) == 1 else NO_KEY
        for body, rows, column_bytes in appends:
            if end >= last_point + POINT_INTERVAL_BYTES:
                points.append(SegmentPoint(next_index, end, self._publish_time_ms))
                last_point = end
            header = headers.header(
                body,
                headers.BATCH_TAG if rows else headers.CONTROL_TAG,
                rows=rows,
                column_bytes=column_bytes,
                incarnation=self.incarnation,
                file_offset=end,
                base_index=next_index,
                publish_time_ms=self._publish_time_ms,
                synced_offset=self._synced,
                ownership=opening.ownership,
                key=key,
            )
            made.append(header)
            runs.append((Run(rows, self.incarnation, next_index),) if rows else ())
            end += len(header) + len(body)
            control_bytes += 0 if rows else len(header) + len(body)
            next_index += rows
        tagged: Sequence[bytes | memoryview] = made if len(key) else headers.with_tags(made, self._key)
        buffers: list[bytes | memoryview] = []
        for one, (body, _, _) in zip(tagged, appends, strict=True):
            buffers += (one, body)
        return WrittenAppends(
            opening, runs, self._base_index, self._end, end, next_index, points, control_bytes, buffers
        )

    def _pack_marker(self, opening: WriteTerm) -> WrittenAppends:
        points: list[SegmentPoint] = []
        if self._end >= self._last_point + POINT_INTERVAL_BYTES:
            points.append(SegmentPoint(self._next_index, self._end, self._publish_time_ms))
        record = headers.marker_record(
            opening.term,
            opening.token,
            incarnation=self.incarnation,
            file_offset=self._end,
            next_index=self._next_index,
            publish_time_ms=self._publish_time_ms,
            synced_offset=self._synced,
            key=self._key,
        )
        start, end = self._end, self._end + len(record)
        size = end - start
        return WrittenAppends(opening, [], self._base_index, start, end, self._next_index, points, size, [record])


def _write(file: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
    """Write the buffers one after the other. Raises OSError. After an error, any part of the buffers may have been
    written."""
    for some in _in_pieces(buffers):
        size = sum(map(len, some))
        written = os.pwritev(file, some, offset)
        if written < size:
            write_all(file, memoryview(b"".join(some))[written:], offset + written)
        offset += size


def _in_pieces(buffers: Sequence[bytes | memoryview]) -> Iterator[Sequence[bytes | memoryview]]:
    """Yield the buffers in groups of at most WRITE_BYTES."""
    if sum(map(len, buffers)) <= WRITE_BYTES:
        yield buffers
        return
    some: list[bytes | memoryview] = []
    left = WRITE_BYTES
    for buffer in buffers:
        for at in range(0, len(buffer), WRITE_BYTES):
            part = buffer if len(buffer) <= WRITE_BYTES else memoryview(buffer)[at : at + WRITE_BYTES]
            if len(part) > left:
                yield some
                some, left = [], WRITE_BYTES
            some.append(part)
            left -= len(part)
    yield some
