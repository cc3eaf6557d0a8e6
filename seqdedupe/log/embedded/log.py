"""The embedded log: one folder of append-only segment files a topic. `docs/formats.md` draws the files.

Made for one machine. An append is confirmed when the file has been synced, and it has no unknown outcome: a failed
write is undone before it is answered as refused; where that cannot be done the process ends.
"""

import asyncio
import logging
import os
import shutil
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from seqdedupe.batch import Int32s, Int64s
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import sync_folder
from seqdedupe.log.contract import LogName, Outcome
from seqdedupe.log.embedded.commit import Closing, Committer, Opening, Writer, Written
from seqdedupe.log.embedded.reader import WINDOW_BYTES, ReadAhead, Window
from seqdedupe.log.embedded.segment import (
    BASE,
    CHUNK_BYTES,
    COUNT,
    END,
    POINT_INTERVAL_BYTES,
    START,
    SUFFIX,
    TIME_MS,
    NotInMemoryError,
    Piece,
    Segment,
    damaged,
    read_from_memory,
)
from seqdedupe.log.embedded.tail import Tail, base_indexes, mend, open_segments
from seqdedupe.message_id import MessageId

_log = logging.getLogger("seqdedupe.log")

DEFAULT_SEGMENT_BYTES = 128 * 1024 * 1024
READ_THREADS = 4
TOPIC_FILE = "topic"
"""In a log's folder: the topic's full name."""

INLINE_BYTES = 1024 * 1024
"""What the event loop itself reads and checks at once, if the system has it in memory: a quarter of a millisecond."""


class EmbeddedLogs:
    """All topics' logs of a sidecar, in one folder, which no other process may use.

    `clock_ms` gives publish times. `fatal` is called, in a thread, with a reason when what is on the disk is not
    known any more: it must end the process. A segment is left behind when it exceeds `segment_bytes`; whole segments
    are dropped, once `trim` allows it, while the others hold at least `retention_size_bytes` or when all that is in
    them is older than `retention_time_ms`; None is no such limit.
    """

    def __init__(
        self,
        folder: Path,
        *,
        clock_ms: Callable[[], int],
        fatal: Callable[[str], None],
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        retention_size_bytes: int | None = None,
        retention_time_ms: int | None = None,
    ) -> None:
        self.clock_ms = clock_ms
        self.segment_bytes = segment_bytes
        self.retention_size_bytes = retention_size_bytes
        self.retention_time_ms = retention_time_ms
        self.read_ahead = ReadAhead()
        self.threads = ThreadPoolExecutor(READ_THREADS, "seqdedupe-log")
        self._folder = folder
        self._fatal = fatal
        self._committer: Committer | None = None

    @property
    def committer(self) -> Committer:
        """The commit thread, started when it is first asked for, on the event loop."""
        if self._committer is None:
            self._committer = Committer(self.clock_ms, self._fatal)
        return self._committer

    async def list(self) -> list[LogName]:
        return list(await asyncio.get_running_loop().run_in_executor(self.threads, self._names))

    def _names(self) -> Sequence[LogName]:
        if not self._folder.exists():
            return []
        incarnations = sorted(int(entry.name) for entry in os.scandir(self._folder) if entry.name.isdecimal())
        return [LogName(incarnation, self._topic_of(incarnation)) for incarnation in incarnations]

    def _topic_of(self, incarnation: int) -> str | None:
        try:
            return (self._folder / str(incarnation) / TOPIC_FILE).read_text() or None
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as e:
            raise error("LOG_DAMAGED", f"{self._folder / str(incarnation)} does not say its topic: {e}") from e

    async def create(self, incarnation: int, topic: str) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self.threads, self._create, incarnation, topic)
        except OSError as e:
            raise error("LOG_REFUSED", f"the log of topic {topic} cannot be made: {e}") from e

    def _create(self, incarnation: int, topic: str) -> None:
        folder = self._folder / str(incarnation)
        folder.mkdir(parents=True, exist_ok=True)
        if not base_indexes(folder):
            os.close(os.open(folder / f"{0:020d}{SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        with (folder / TOPIC_FILE).open("w") as file:
            file.write(topic)
            file.flush()
            os.fsync(file.fileno())
        for made in (folder, self._folder, self._folder.parent):
            sync_folder(made)

    async def delete(self, incarnation: int) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self.threads, self._delete, incarnation)
        except OSError as e:
            raise error("LOG_REFUSED", f"the log {incarnation} cannot be removed: {e}") from e

    def _delete(self, incarnation: int) -> None:
        folder = self._folder / str(incarnation)
        if folder.exists():
            shutil.rmtree(folder)
            sync_folder(self._folder)

    async def open(self, incarnation: int, covered_index: int) -> "EmbeddedLog":
        """Opens a log that is there. Everything below `covered_index` is known to have been stored.

        A torn tail, which a crash leaves, is left out and counted in the log's `cut_bytes` and `cut_records`; it
        is cut, and the end of the log made durable again, by the first `open_for_writing`. So a full disk can be
        opened and read; until it can be written, only what is known to have been stored should be shown. Raises
        LOG_DAMAGED, NEWER_FORMAT.
        """
        folder = self._folder / str(incarnation)
        opened = await asyncio.get_running_loop().run_in_executor(
            self.threads, open_segments, folder, incarnation, covered_index
        )
        return EmbeddedLog(self, folder, *opened)

    async def close(self) -> None:
        """Ends the threads. The logs must have been closed."""
        if self._committer is not None:
            await self._committer.close()
        self.threads.shutdown()


class EmbeddedLog:
    """One topic's log, which satisfies `seqdedupe.log.contract.Log`. Made by `EmbeddedLogs.open`.

    A message ID's ledger is the incarnation, its entry the index. `cut_bytes` and `cut_records` (about) are what
    opening found torn.
    """

    def __init__(self, logs: EmbeddedLogs, folder: Path, segments: list[Segment], tail: Tail, file: int) -> None:
        self.incarnation = tail.segment.incarnation
        self.cut_bytes = tail.cut_bytes
        self.cut_records = tail.cut_records
        self._logs = logs
        self._folder = folder
        self._segments = segments
        self._next_index = tail.next_index
        self._certain_index = tail.certain_index
        self._opening: Opening | None = None
        self._closed = False
        self._trim_below = 0
        self._trimming: asyncio.Task[None] | None = None
        points = tail.segment.points
        self._writer = Writer(
            folder,
            self.incarnation,
            file,
            base_index=tail.segment.base_index,
            end=tail.segment.end,
            next_index=tail.next_index,
            publish_time_ms=tail.publish_time_ms,
            last_point=points[-1].offset if points else -POINT_INTERVAL_BYTES,
            segment_bytes=logs.segment_bytes,
            mend=partial(mend, tail, file),
            on_news=self._on_news,
        )

    @property
    def first_index(self) -> int:
        return self._segments[0].base_index

    @property
    def certain_index(self) -> int:
        return self._certain_index

    @property
    def size_bytes(self) -> int:
        return sum(segment.end for segment in self._segments)

    def message_id(self, index: int) -> MessageId:
        return MessageId.of(self.incarnation, index)

    def message_ids(self, indexes: Int64s) -> tuple[Int64s, Int64s, Int32s]:
        return np.full(len(indexes), self.incarnation), indexes, np.full(len(indexes), -1, np.int32)

    # Writing.

    async def open_for_writing(self, term: int, token: bytes, settle: Callable[[Outcome], None]) -> None:
        self._opening = opening = Opening(self._writer, self._logs.committer.queue, term, token, settle)
        await opening.ready

    def append(self, batch: bytes, rows: int, column_bytes: int) -> None:
        if self._opening is None or not self._opening.opened:
            raise error("INTERNAL", "an append to a log that is not open for writing")
        self._opening.append(batch, rows, column_bytes)

    def _on_news(self, news: Written) -> None:
        """What was written is readable from now on; then whoever waits for it hears."""
        if news.base_index != self._segments[-1].base_index:
            self._segments.append(Segment(self._folder, self.incarnation, news.base_index, 0))
        self._segments[-1].grow(news.end, news.points)
        self._next_index = news.next_index
        if news.failure is None:
            self._certain_index = news.next_index
        opening = news.opening
        if opening.opened:
            if opening is self._opening:
                opening.settle(Outcome(news.batches, news.failure, news.why))
            return
        opening.opened = news.failure is None
        if opening.ready.cancelled():
            return
        if news.failure is None:
            opening.ready.set_result(None)
        else:
            opening.ready.set_exception(error("LOG_REFUSED", news.why))

    # Reading.

    async def replay(self, from_index: int) -> AsyncIterator[bytes]:
        self._check_is_there(from_index)
        at_end = from_index == self._next_index
        # Markers behind the last message may stand at the end of its segment and in the one after it.
        first = self._place_of(from_index - 1 if at_end else from_index)
        wanted = [(segment, segment.end) for segment in self._segments[first:]]
        offset, index = wanted[0][0].before_index(from_index)
        skipping = from_index > self.first_index
        for i, (segment, end) in enumerate(wanted):
            if i:
                offset = 0
                if index != segment.base_index:
                    raise damaged(segment.path, 0, f"the record with index {index} should be here")
            while offset < end:
                piece = await self._read(segment, offset, end, index, CHUNK_BYTES)
                offset, index = piece.end, piece.next_index(index)
                start = 0
                if skipping:
                    held = piece.table[:, BASE] if at_end else piece.table[:, BASE] + piece.table[:, COUNT] - 1
                    hit = int(np.searchsorted(held, from_index))
                    if hit == len(held):
                        continue
                    skipping = False
                    start = int(piece.table[hit, START])
                yield bytes(piece.raw[start : piece.size])
        if skipping and not at_end:
            raise damaged(segment.path, end, f"the message with index {from_index} should be here")

    async def read(self, from_index: int, stop_index: int, max_bytes: int) -> memoryview:
        self._check_is_there(from_index)
        ahead = self._logs.read_ahead
        window = ahead.take(self.incarnation, from_index)
        if window is None or window.is_empty:
            window = await self._window(from_index, max_bytes, window)
        records = window.cut(stop_index, max_bytes)
        ahead.keep(self.incarnation, window)
        return records

    async def _window(self, from_index: int, max_bytes: int, before: Window | None) -> Window:
        """Checked records from the one that holds the index on; many for a reader that has finished a window."""
        segment = self._segments[self._place_of(from_index)]
        size = max_bytes + POINT_INTERVAL_BYTES if before is None else max(max_bytes, WINDOW_BYTES)
        offset, index = segment.before_index(from_index)
        if before is not None and before.segment is segment:
            offset, index = before.end, from_index
        found = await self._find(segment, offset, index, _holds(from_index), size=size, payloads_from=from_index)
        if found is None:
            raise damaged(segment.path, segment.end, f"the message with index {from_index} should be here")
        return Window(segment, *found)

    async def locate_time(self, publish_time_ms: int, stop_index: int) -> int:
        segments = list(self._segments)
        low, high = 0, len(segments)
        while low < high:
            middle = (low + high) // 2
            if await self._begins_before(segments[middle], publish_time_ms):
                low = middle + 1
            else:
                high = middle
        if low:
            segment = segments[low - 1]
            offset, index = segment.before_time(publish_time_ms)
            found = await self._find(segment, offset, index, lambda piece: piece.table[:, TIME_MS] >= publish_time_ms)
            if found:
                piece, i = found
                return min(int(piece.table[i, BASE]), stop_index)
        return min(segments[low].base_index, stop_index) if low < len(segments) else stop_index

    async def locate_bytes(self, from_index: int, size_bytes: int, stop_index: int) -> int:
        self._check_is_there(from_index)
        segments = self._segments[self._place_of(from_index) :]
        offset, index = segments[0].before_index(from_index)
        found = await self._find(segments[0], offset, index, _holds(from_index))
        if found is None:
            raise damaged(segments[0].path, segments[0].end, f"the message {from_index} should be here")
        piece, i = found
        goal = piece.offset + int(piece.table[i, START]) + size_bytes
        for segment in segments:
            if goal <= segment.end:
                break
            goal -= segment.end
        else:
            return stop_index
        offset, index = segment.before_offset(goal)
        found = await self._find(segment, offset, index, lambda piece: piece.table[:, END] + piece.offset >= goal)
        if found is None:
            return stop_index
        piece, i = found
        return min(max(int(piece.table[i, BASE] + piece.table[i, COUNT]), from_index + 1), stop_index)

    async def _find(
        self,
        segment: Segment,
        offset: int,
        index: int,
        wanted: Callable[[Piece], np.ndarray],
        *,
        size: int = CHUNK_BYTES,
        payloads_from: int | None = None,
    ) -> tuple[Piece, int] | None:
        """The first wanted record of a segment from an offset on: its place in the piece that was read with it."""
        end = segment.end
        while offset < end:
            piece = await self._read(segment, offset, end, index, size, payloads_from)
            hits = np.flatnonzero(wanted(piece))
            if len(hits):
                return piece, int(hits[0])
            offset, index, size = piece.end, piece.next_index(index), CHUNK_BYTES
        return None

    async def _read(
        self, segment: Segment, offset: int, end: int, index: int, size: int, payloads_from: int | None = None
    ) -> Piece:
        """A piece of a segment, checked. Raises what is damaged or has been trimmed."""
        self._check_is_there(segment.base_index)
        try:
            piece = _read_from_memory(segment, offset, end, index, size, payloads_from)
            if piece is None:
                piece = await asyncio.get_running_loop().run_in_executor(
                    self._logs.threads, segment.read, offset, end, index, size, payloads_from
                )
        except FileNotFoundError as e:
            self._check_is_there(segment.base_index)
            raise damaged(segment.path, offset, "the file is missing") from e
        segment.learn(piece)
        return piece

    async def _begins_before(self, segment: Segment, publish_time_ms: int) -> bool:
        """Whether the first record of a segment was published before that time; not if there is none yet."""
        if not segment.points and segment.end:
            await self._read(segment, 0, segment.end, segment.base_index, POINT_INTERVAL_BYTES)
        return bool(segment.points) and segment.points[0].publish_time_ms < publish_time_ms

    def _place_of(self, index: int) -> int:
        """Which segment holds an index, or would."""
        return max(0, bisect_right(self._segments, index, key=lambda segment: segment.base_index) - 1)

    def _check_is_there(self, index: int) -> None:
        if index < self.first_index:
            raise error(
                "POSITION_TRIMMED",
                f"index {index} is gone by retention: the first one left is {self.first_index}",
                index=index,
                first_index=self.first_index,
            )
        if index > self._next_index:
            raise error(
                "POSITION_UNKNOWN",
                f"index {index} is behind the end: the next message gets {self._next_index}",
                index=index,
                next_index=self._next_index,
            )

    # Retention.

    def trim(self, below_index: int) -> None:
        self._trim_below = max(self._trim_below, below_index)
        if self._trimming is None or self._trimming.done():
            self._trimming = asyncio.get_running_loop().create_task(self._trim())

    async def _trim(self) -> None:
        try:
            while await self._first_may_go():
                path = self._segments.pop(0).path
                # One after the other, so that never an earlier file is left when a later one is gone.
                await asyncio.get_running_loop().run_in_executor(self._logs.threads, _remove, path)
        except (OSError, SeqdedupeError) as e:
            _log.warning("%s: retention has stopped: %s", self._folder, e)

    async def _first_may_go(self) -> bool:
        """Whether retention drops the first segment: never the active one, nor the last snapshot's own entry."""
        if len(self._segments) < 2 or self._segments[1].base_index >= self._trim_below:
            return False
        first, second = self._segments[:2]
        size, age = self._logs.retention_size_bytes, self._logs.retention_time_ms
        if size is not None and self.size_bytes - first.end >= size:
            return True
        # Whoever is published before the next segment's first is older than that one.
        return age is not None and await self._begins_before(second, self._logs.clock_ms() - age)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._trimming is not None:
            await self._trimming
        closing = Closing(self._writer, asyncio.get_running_loop().create_future())
        self._logs.committer.queue.put(closing)
        await closing.closed
        self._logs.read_ahead.forget(self.incarnation)


def _holds(index: int) -> Callable[[Piece], np.ndarray]:
    """Wants the record that holds a message."""
    return lambda piece: piece.table[:, BASE] + piece.table[:, COUNT] > index


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    sync_folder(path.parent)


def _read_from_memory(
    segment: Segment, offset: int, end: int, index: int, size: int, payloads_from: int | None
) -> Piece | None:
    """A small piece, or None if it is not in memory. A hop to a thread would cost more than this does."""
    if size >= CHUNK_BYTES:
        return None
    try:
        return segment.read(offset, end, index, min(size, INLINE_BYTES), payloads_from, read_from_memory)
    except NotInMemoryError:
        return None
