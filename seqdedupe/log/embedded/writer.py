"""The end of one topic's log: packs records, writes them, goes on in a new segment, undoes what failed.

Begin with `Writer`. A segment file that is full, or that the journal covers, is left to the thread of `Syncer`.
"""

import asyncio
import os
import threading
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
from seqdedupe.log.embedded.room import LARGEST_BYTES, Room
from seqdedupe.log.embedded.segment import POINT_INTERVAL_BYTES, SegmentPoint, segment_path
from seqdedupe.log.embedded.tail import Tail, mend

# -- Segment files are synced in the background; then the journal may forget what they hold.

AT_ONCE = 8
"""So many files are synced together: most file systems make that one write, and each costs a sixth."""


class LeftFile(NamedTuple):
    """An open segment file that has to be synced before it is closed."""

    file: int
    path: Path


class Syncer:
    """A thread that does one thing after the other, but for files that are handed over in a row.

    `fatal` is called, in the thread, if a sync fails. Nothing is forgotten any more then: the journal has what the
    disk has not. At most `max_files` should wait to be synced.
    """

    def __init__(self, fatal: Callable[[str], None], max_files: int) -> None:
        self._fatal = fatal
        self._max_files = max_files
        self._queue: SimpleQueue[LeftFile | Callable[[], None] | threading.Event | None] = SimpleQueue()
        self._has_failed = False
        self._left = 0
        """So many files are not closed yet."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="seqdedupe-sync", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        """Whether no more files should be left to it now."""
        return self._left >= self._max_files

    def sync(self, left: LeftFile) -> None:
        """Syncs the file, and closes it."""
        with self._lock:
            self._left += 1
        self._queue.put(left)

    def then(self, forget: Callable[[], None]) -> None:
        """Calls this when all files are synced that were handed over before. It must not raise."""
        self._queue.put(forget)

    def wait(self) -> None:
        """Returns when all is done that was handed over."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def close(self) -> None:
        """The same, and ends the thread."""
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
"""So many appends of a topic are in one group at most: what the event loop is told of at once, it settles at once.

Twice as many buffers (each has a header) fit into one `writev` of Linux, which takes 1,024.
"""
GATHER_BYTES = 512 * 1024
"""A group as large as this takes longer to write than waiting for more would save."""

WRITE_BYTES = 1024 * 1024
"""What one call writes. For a larger write the system takes memory in larger pieces, of those that it has not used for
long, which in a virtual machine may have to come from the host: 16 MB in one call took up to five times as long."""

MAX_LATE_APPENDS = 1024
"""So many appends of a topic wait for a sync at most, whatever its flush policy: the event loop settles all at once."""


Append = tuple[bytes, int, int]
"""What is handed over: an encoded batch, its rows and column bytes; without rows, an encoded control record.

A plain tuple, as there is one for every batch.
"""


class WriteTerm:
    """One opening for writing. Made on the event loop, and handed over; `marked` and `failed` belong to the thread.

    `hand_over` gives it to the commit thread, which takes what there is.
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
        """Whether one before was refused: then a group has no more bytes than the trial of `Room` has written."""
        self._appends: deque[Append] = deque()
        self._hand_over = hand_over
        self._queued = False
        self._flushes = self._flushed = 0
        """So often it was asked for a sync; so often all was taken that had been appended by then."""
        self._wake()

    def _wake(self) -> None:
        """Wakes the thread if it does not know yet that there is something."""
        if not self._queued:
            self._queued = True
            self._hand_over(self)

    def append(self, append: Append) -> None:
        """Hands an append to the thread."""
        self._appends.append(append)
        if not self._queued:
            self._wake()

    def flush(self) -> None:
        """Asks the thread to sync what has been appended."""
        self._flushes += 1
        self._wake()

    def take(self) -> tuple[list[Append], bool]:
        """What has been appended, up to a group, and whether it was asked for a sync of it. The rest, and what is
        appended from now on, wakes the thread again."""
        self._queued = False
        # In this order: what was appended before it was asked is taken now, or left over.
        flushes = self._flushes
        taken = [self._appends.popleft() for _ in range(self._largest_group())]
        is_due = flushes > self._flushed
        if self._appends:
            self._wake()
        else:
            self._flushed = flushes
        return taken, is_due

    def _largest_group(self) -> int:
        """How many of the appends are taken at once."""
        most = min(len(self._appends), GROUP_APPENDS)
        if not self.follows_refusal:
            return most
        ends = accumulate(headers.HEADER_BYTES + len(body) for body, _, _ in islice(self._appends, most))
        return max(sum(end <= LARGEST_BYTES for end in ends), min(most, 1))


class WrittenAppends(NamedTuple):
    """What became of an opening's marker or of some of its appends, for the event loop."""

    opening: WriteTerm
    runs: list[Runs]
    """Of the appends, message IDs; none for the marker."""

    base_index: int
    """Of the segment written to, which may be new."""

    start: int
    """From here on that segment has what was written."""

    end: int
    """Up to here it is durable."""

    next_index: int
    points: list[SegmentPoint]
    """What the sparse index gets."""

    control_bytes: int = 0
    """How much of it is a marker or control records."""

    buffers: Sequence[bytes | memoryview] = ()
    """What was written."""

    failure: Failure | None = None
    why: str = ""


class LateAppends(NamedTuple):
    """For the event loop: these appends are written, and not durable yet; what became of them comes later."""

    opening: WriteTerm
    runs: list[Runs]


class FatalError(Exception):
    """What is on the disk is not known any more, or could not be undone: the process must end."""


class Writer:
    """The end of one topic's log. Belongs to the commit thread.

    What opening the log found is mended before anything is written. `on_news` is called on the event loop with what
    is durable, `on_late` with what is only written, as `flush_interval` has it, which the event loop may change. The
    file is opened when it is needed, and stays open until `let_go`.
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
        """A segment that begins at or below this index is long enough, whatever its size. The event loop may say so."""
        self.is_due = False
        """Whether what was written has to be made durable now."""
        self.has_more_coming = False
        """Whether the last group makes it likely that waiting for more is worth it."""
        segment = tail.segment
        self._folder = folder
        self.incarnation, self._key = segment.identity
        self._base_index = segment.base_index
        self._end = self._synced = self._file_synced = segment.end
        # What was made durable, by the journal or the file's own sync; and what by the file's own.
        self._next_index = tail.next_index
        self._publish_time_ms = tail.publish_time_ms
        self._last_point = segment.points[-1].offset if segment.points else -POINT_INTERVAL_BYTES
        self._segment_bytes = segment_bytes
        self._opening: WriteTerm | None = None
        self._to_mend: Tail | None = tail
        self._room = room
        self._needs_share = False
        """Whether something was refused, and nothing was opened since."""
        self._was_refused = False
        self._durable_index = tail.next_index
        self._unsynced_appends = 0
        self._unsynced: list[WrittenAppends] = []
        self._durable: list[WrittenAppends] = []  # that nobody was told of yet
        self._file: int | None = None
        self._broken = False
        self._closed = False

    def write(self, opening: WriteTerm, now_ms: int) -> WrittenAppends | None:
        """Writes what an opening has handed over, its marker first, and does not sync yet.

        None if there is nothing to write: an older opening's appends, those after a failure, and what is left when the
        log has been closed are dropped. A failed write is undone before it is returned as refused. Raises FatalError
        if that fails.
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
            # Who has found a higher term opens it once more, and has a share already.
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
        """Whether what was written is to be durable before anybody hears of it."""
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
        """Whether something is written that neither its file's sync nor the journal has made durable."""
        return bool(self._unsynced)

    @property
    def may_use_journal(self) -> bool:
        """Whether a round of the journal would have all that has to be durable now."""
        return self.is_due and len(self._unsynced) == 1

    @property
    def is_in_journal(self) -> bool:
        """Whether its file may lack what the journal has."""
        return self._file_synced < self._end

    def in_journal(self) -> None:
        """The journal has made durable what was written."""
        self._synced = self._end
        self._confirm()

    def sync(self) -> None:
        """Makes durable what was written. Raises FatalError."""
        if self._broken or self._synced < self._end:
            self.sync_file()
        self.is_due = False

    def take_durable(self) -> list[WrittenAppends]:
        """What has become durable since it was asked last."""
        durable, self._durable = self._durable, []
        return durable

    def forget_written(self) -> None:
        """Nobody waits to hear of what was written."""
        self._unsynced, self._durable = [], []

    def _confirm(self) -> None:
        self._durable += self._unsynced
        self._unsynced = []
        self._unsynced_appends, self._durable_index = 0, self._next_index
        self.is_due = False

    def sync_file(self) -> None:
        """Makes it durable in the file itself. Raises FatalError."""
        if self._broken:
            # A sync that succeeds after one that failed proves nothing.
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
        """Gives the file up for now. Where the journal has what the file may lack, somebody has to sync it, and only
        then to close it: whoever opens it anew may not hear of a page that could not be written."""
        left, self._file = self._file, None
        if left is None:
            return None
        if self._file_synced < self._end and not self._broken:
            return LeftFile(left, self._path())
        os.close(left)
        return None

    def close(self) -> None:
        """Lets go of the file for good. Raises FatalError."""
        self._closed = True
        try:
            # What was let go of before is synced by whoever was given it: there need be no descriptor left for it.
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
        """Goes on in a new segment if this one is long enough. Raises OSError if there can be none now."""
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
        """Cuts off what a failed write has left. What was written before it is synced too."""
        try:
            if self._synced == self._end == os.fstat(file).st_size:
                # It has left nothing. A file system that has become read-only takes no cut.
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
        # One tag is made with its header, several with one call.
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
    """Writes the buffers one after the other. Raises OSError; then any part of them may have been written."""
    for some in _in_pieces(buffers):
        size = sum(map(len, some))
        written = os.pwritev(file, some, offset)
        if written < size:
            write_all(file, memoryview(b"".join(some))[written:], offset + written)
        offset += size


def _in_pieces(buffers: Sequence[bytes | memoryview]) -> Iterator[Sequence[bytes | memoryview]]:
    """The buffers, so many at once that they have WRITE_BYTES at most."""
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
