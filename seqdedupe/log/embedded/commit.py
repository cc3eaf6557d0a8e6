"""Group commit: one thread writes and syncs for all topics of a sidecar.

It takes everything that has arrived, writes it with one call a topic, syncs each topic that has something new, and
tells the event loop topic by topic. What arrives meanwhile is the next group.
"""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from seqdedupe.files import sync_folder
from seqdedupe.format import records
from seqdedupe.log.contract import Failure, Outcome
from seqdedupe.log.embedded.segment import POINT_INTERVAL_BYTES, SUFFIX, Point

GATHER_SECONDS = 0.0001
"""After a group of several batches the next one waits so long for more of them.

Whoever sends several at once has more under way, and on few cores the wake-ups and syncs of small groups cost more than
the wait (`python -m bench publish single_messages`). A lone batch is never kept waiting.
"""
GATHER_BYTES = 512 * 1024
"""Unless the group was as large as this: then writing takes longer than the wait would save."""

GROUP_BATCHES = 256
"""So many batches of a topic are in one group at most: what the event loop is told of at once, it settles at once.

Twice as many buffers (each has a header) fit into one `writev` of Linux, which takes 1,024.
"""


class Opening:
    """One opening for writing. Made on the event loop, and handed over; `marked` and `failed` belong to the thread."""

    def __init__(
        self, writer: "Writer", queue: "SimpleQueue[Work]", term: int, token: bytes, settle: Callable[[Outcome], None]
    ) -> None:
        self.writer = writer
        self.term = term
        self.token = token
        self.settle = settle
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.opened = False
        """Whether the event loop knows that the marker is durable."""
        self.marked = False
        self.failed = False
        self._batches: deque[tuple[bytes, int, int]] = deque()
        self._queue = queue
        self._queued = False
        self._wake()

    def _wake(self) -> None:
        """Wakes the thread if it does not know yet that there is something."""
        if not self._queued:
            self._queued = True
            self._queue.put(self)

    def append(self, batch: bytes, rows: int, column_bytes: int) -> None:
        """Hands a batch to the thread."""
        self._batches.append((batch, rows, column_bytes))
        self._wake()

    def take(self) -> list[tuple[bytes, int, int]]:
        """What has been appended, up to a group. The rest, and what is appended from now on, wakes the thread again."""
        self._queued = False
        taken = [self._batches.popleft() for _ in range(min(len(self._batches), GROUP_BATCHES))]
        if self._batches:
            self._wake()
        return taken


class Closing(NamedTuple):
    """Asks the thread to let go of a writer's file."""

    writer: "Writer"
    closed: "asyncio.Future[None]"


class Written(NamedTuple):
    """What became of an opening's marker or of some of its batches, for the event loop."""

    opening: Opening
    batches: int
    base_index: int
    """Of the segment written to, which may be new."""

    end: int
    """Up to here that segment is durable."""

    next_index: int
    points: list[Point]
    """What the sparse index gets."""

    failure: Failure | None = None
    why: str = ""


Work = Opening | Closing | None


class FatalError(Exception):
    """What is on the disk is not known any more, or could not be undone: the process must end."""


class Writer:
    """The end of one topic's log. Belongs to the commit thread.

    `mend` is called before anything is written. `on_news` is called on the event loop with what was written.
    """

    def __init__(
        self,
        folder: Path,
        incarnation: int,
        file: int,
        *,
        base_index: int,
        end: int,
        next_index: int,
        publish_time_ms: int,
        last_point: int,
        segment_bytes: int,
        mend: Callable[[], None],
        on_news: Callable[[Written], None],
    ) -> None:
        self.file = file
        self.on_news = on_news
        self.has_more_coming = False
        """Whether the last group makes it likely that waiting for more is worth it."""
        self._folder = folder
        self._incarnation = incarnation
        self._base_index = base_index
        self._end = end
        self._synced = end
        self._next_index = next_index
        self._publish_time_ms = publish_time_ms
        self._last_point = last_point
        self._segment_bytes = segment_bytes
        self._opening: Opening | None = None
        self._mend: Callable[[], None] | None = mend
        self._broken = False
        self._closed = False

    def write(self, opening: Opening, now_ms: int) -> Written | None:
        """Writes what an opening has handed over, its marker first, and does not sync yet.

        None if there is nothing to do: an older opening's appends, those behind a failure, and what is left when the
        file has been let go of are dropped. A failed write is undone before it is returned as refused. Raises
        FatalError if that fails.
        """
        batches = opening.take()
        if self._broken or self._closed:
            return None
        if not opening.marked:
            opening.marked = True
            self._opening = opening
        elif self._opening is not opening or opening.failed or not batches:
            return None
        if self._mend is not None:
            try:
                self._mend()
            except OSError as e:
                opening.failed = True
                return self._written(opening, 0, [], Failure.REFUSED, f"the log cannot be mended: {e}")
            self._mend = None
        self._publish_time_ms = max(self._publish_time_ms, now_ms)
        try:
            self._roll()
            if batches:
                buffers, end, next_index, points = self._pack(batches)
            else:
                buffers, end, next_index, points = self._pack_marker(opening)
            _write_all(self.file, buffers, self._end)
        except OSError as e:
            self._undo()
            opening.failed = True
            return self._written(opening, 0, [], Failure.REFUSED, f"the log cannot be written: {e}")
        if points:
            self._last_point = points[-1].offset
        self.has_more_coming = len(batches) > 1 and end - self._end < GATHER_BYTES
        self._end, self._next_index = end, next_index
        return self._written(opening, len(batches), points)

    def sync(self) -> None:
        """Makes what was written durable. Raises FatalError."""
        if self._broken:
            # A sync that succeeds after one that failed proves nothing.
            raise FatalError(f"{self._path()} could not be synced before")
        if self._synced < self._end:
            try:
                os.fdatasync(self.file)
            except OSError as e:
                self._broken = True
                raise FatalError(f"{self._path()} cannot be synced: {e}") from e
            self._synced = self._end

    def close(self) -> None:
        """Lets go of the file."""
        self._closed = True
        os.close(self.file)

    def _written(
        self,
        opening: Opening,
        batches: int,
        points: list[Point],
        failure: Failure | None = None,
        why: str = "",
    ) -> Written:
        return Written(opening, batches, self._base_index, self._end, self._next_index, points, failure, why)

    def _path(self) -> Path:
        return self._folder / f"{self._base_index:020d}{SUFFIX}"

    def _roll(self) -> None:
        """Goes on in a new segment if this one is long enough. Raises OSError if there can be none now."""
        if self._end < self._segment_bytes or self._next_index == self._base_index:
            return
        self.sync()
        path = self._folder / f"{self._next_index:020d}{SUFFIX}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.close(self.file)
        self.file = file
        self._base_index, self._end, self._synced = self._next_index, 0, 0
        self._last_point = -POINT_INTERVAL_BYTES
        try:
            sync_folder(self._folder)
        except OSError as e:
            self._broken = True
            raise FatalError(f"{self._folder} cannot be synced: {e}") from e

    def _undo(self) -> None:
        """Cuts off what a failed write has left. What was written before it is synced too."""
        try:
            os.ftruncate(self.file, self._end)
            os.fsync(self.file)
        except OSError as e:
            self._broken = True
            raise FatalError(f"{self._path()} cannot be cut after a failed write: {e}") from e
        self._synced = self._end

    def _pack(self, batches: list[tuple[bytes, int, int]]) -> tuple[list[bytes], int, int, list[Point]]:
        buffers: list[bytes] = []
        points: list[Point] = []
        end, next_index, last_point = self._end, self._next_index, self._last_point
        for batch, rows, column_bytes in batches:
            if end >= last_point + POINT_INTERVAL_BYTES:
                points.append(Point(next_index, end, self._publish_time_ms))
                last_point = end
            header = records.batch_header(
                batch,
                rows=rows,
                column_bytes=column_bytes,
                incarnation=self._incarnation,
                file_offset=end,
                base_index=next_index,
                publish_time_ms=self._publish_time_ms,
                synced_offset=self._synced,
            )
            buffers.append(header)
            buffers.append(batch)
            end += len(header) + len(batch)
            next_index += rows
        return buffers, end, next_index, points

    def _pack_marker(self, opening: Opening) -> tuple[list[bytes], int, int, list[Point]]:
        points: list[Point] = []
        if self._end >= self._last_point + POINT_INTERVAL_BYTES:
            points.append(Point(self._next_index, self._end, self._publish_time_ms))
        record = records.marker_record(
            opening.term,
            opening.token,
            incarnation=self._incarnation,
            file_offset=self._end,
            next_index=self._next_index,
            publish_time_ms=self._publish_time_ms,
            synced_offset=self._synced,
        )
        return [record], self._end + len(record), self._next_index, points


def _write_all(file: int, buffers: list[bytes], offset: int) -> None:
    """Writes the buffers one behind the other. Raises OSError; then any part of them may have been written."""
    size = sum(map(len, buffers))
    written = os.pwritev(file, buffers, offset)
    if written < size:
        # Short, as on a disk that is filling up: writing the rest tells why.
        rest = memoryview(b"".join(buffers))
        while written < size:
            written += os.pwrite(file, rest[written:], offset + written)


class Committer:
    """The commit thread. Made on the event loop that is told what was written.

    `fatal` is called, in the thread, with the reason why the process must end.
    """

    def __init__(self, clock_ms: Callable[[], int], fatal: Callable[[str], None]) -> None:
        self.queue: SimpleQueue[Work] = SimpleQueue()
        self._clock_ms = clock_ms
        self._fatal = fatal
        self._loop = asyncio.get_running_loop()
        self._news: deque[Written | Closing] = deque()
        self._announced = False
        self._gathers = False
        self._thread = threading.Thread(target=self._run, name="seqdedupe-commit", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Ends the thread when it has done what was handed over."""
        self.queue.put(None)
        await self._loop.run_in_executor(None, self._thread.join)

    def _run(self) -> None:
        ended = False
        try:
            while not ended:
                work = [self.queue.get()]
                if self._gathers:
                    time.sleep(GATHER_SECONDS)
                work += [self.queue.get() for _ in range(self.queue.qsize())]
                ended = None in work
                self._round([item for item in work if item is not None])
        finally:
            if not ended:
                self._fatal("the commit thread has failed")

    def _round(self, work: list[Opening | Closing]) -> None:
        """Writes everything, then syncs file by file: the first sync often pays for the others' metadata."""
        now_ms = self._clock_ms()
        written = []
        for item in work:
            if isinstance(item, Closing):
                continue
            try:
                news = item.writer.write(item, now_ms)
            except FatalError as e:
                self._fatal(str(e))
                continue
            if news is not None:
                written.append(news)
        self._gathers = any(news.opening.writer.has_more_coming for news in written)
        for news in written:
            try:
                news.opening.writer.sync()
            except FatalError as e:
                self._fatal(str(e))
                continue
            self._tell(news)
        for item in work:
            if isinstance(item, Closing):
                item.writer.close()
                self._tell(item)

    def _tell(self, news: Written | Closing) -> None:
        self._news.append(news)
        if not self._announced:
            self._announced = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._announced = False
        try:
            while self._news:
                news = self._news.popleft()
                if isinstance(news, Written):
                    news.opening.writer.on_news(news)
                elif not news.closed.done():
                    news.closed.set_result(None)
        finally:
            # A caller's exception goes to the loop's handler; the news of the others must not wait for more.
            if self._news:
                self._loop.call_soon(self._deliver)
