"""Read one topic's log: the durable data in its segment files."""

import asyncio
import errno
import logging
import os
import time
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np

from seqdedupe.batch import Int64s
from seqdedupe.errors import DamagedError, SeqdedupeError, error
from seqdedupe.files import write_synced
from seqdedupe.format.layout import BASE_INDEX, ROWS
from seqdedupe.log.contract import ANY_BYTES, Entries, LargerRecordError, Location, Run, Runs
from seqdedupe.log.embedded.segment import (
    BASE,
    CHUNK_BYTES,
    COUNT,
    END,
    INLINE_BYTES,
    OWNER,
    POINT_INTERVAL_BYTES,
    SCAN_BYTES,
    START,
    TIME_MS,
    LogIdentity,
    NotInMemoryError,
    Segment,
    SegmentPiece,
    SegmentStep,
    damaged,
    read_from_memory,
)
from seqdedupe.log.embedded.tail import look_past
from seqdedupe.message_id import MessageId
from seqdedupe.tasks import retrieve

# -- The age of segments that were written while the clock was wrong, determined without a clock that can be wrong.
#
# If a segment was written while the clock was ahead, its publish times are in the future. The publish times of all
# later messages are in the future too, because publish times never decrease. So the age of such a segment is counted
# from the time when the segment was first found. The age is the time for which processes have run since then, by the
# steady clock, which never jumps. The time between two processes does not count. So the counted age may be lower than
# the real age, but never higher. The modification time of the file is not used: if the clock was behind, that time is
# too early, and retention would remove new messages.
#
# If a segment was written while the clock was behind, retention would remove the segment as soon as the clock is right.
# The process that made the segment knows the segment's age, and finds the segment while that process runs. The age of
# such a segment is counted in the same way.

logger = logging.getLogger("seqdedupe.log")

AHEAD_FILE = "ahead"
BEHIND_FILE = "behind"
AHEAD_MS = 60 * 60 * 1000
"""A segment was written with a wrong clock if its first publish time differs from the expected time by more than
this."""

_VERSION = 1
_SAVE_MS = 60_000
"""When a process ends, the time since its last look is lost, and at most this much of the time counted before."""


class Ahead:
    """The ages of one log's segments that were written with a wrong clock. Ages are counted by this object. `look`
    blocks. Only one thread at a time may call `look`."""

    def __init__(self, folder: Path, name: str = AHEAD_FILE) -> None:
        self._path = folder / name
        self._ran_ms = self._saved_ms = 0
        """The time for which processes have run since the first segment was found, and the part of this time that the
        file records."""
        self._seen_ms: dict[int, int] = {}
        """The value of `_ran_ms` when each segment was first found, by the segment's first index."""
        self._looked_ms: int | None = None
        """The time of this process's last look, by the steady clock; None before the first look."""

    def age_ms(self, base_index: int) -> int:
        """Return the counted age of a segment, which is at most its real age; 0 if the segment was not found."""
        seen_ms = self._seen_ms.get(base_index)
        return 0 if seen_ms is None else self._ran_ms - seen_ms

    @property
    def is_empty(self) -> bool:
        """Whether no call of `look` has found or loaded such a segment in this process."""
        return not self._seen_ms

    @property
    def has_looked(self) -> bool:
        """Whether the first `look` has loaded the findings of earlier processes."""
        return self._looked_ms is not None

    def __contains__(self, base_index: int) -> bool:
        return base_index in self._seen_ms

    def look(self, ahead: Sequence[int], there: Set[int]) -> list[int]:
        """Record the segments `ahead`, which were written with a wrong clock. Forget the segments that are not in
        `there`. Return the newly found segments.

        If the file is missing or damaged, the ages of all segments are counted from now.
        """
        now_ms = steady_ms()
        if self._looked_ms is None:
            self._load()
        else:
            self._ran_ms += now_ms - self._looked_ms
        self._looked_ms = now_ms
        new = [base_index for base_index in ahead if base_index not in self._seen_ms]
        left = {base_index: seen_ms for base_index, seen_ms in self._seen_ms.items() if base_index in there}
        left.update(dict.fromkeys(new, self._ran_ms))
        is_due = left != self._seen_ms or self._ran_ms - self._saved_ms >= _SAVE_MS
        self._seen_ms = left
        if is_due and (left or self._path.exists()):
            self._save()
        return new

    def _load(self) -> None:
        try:
            said, _, checksum = self._path.read_bytes().rpartition(b"\n")
            head, *rows = [[int(number) for number in line.split(b" ")] for line in said.split(b"\n")]
            if int(checksum, 16) != zlib.crc32(said) or head[0] != _VERSION:
                return
            self._seen_ms = {row[0]: row[1] for row in rows}
            self._ran_ms = self._saved_ms = head[1]
        except (OSError, ValueError, IndexError):
            return

    def _save(self) -> None:
        rows = [(_VERSION, self._ran_ms), *sorted(self._seen_ms.items())]
        said = "\n".join(f"{first} {second}" for first, second in rows).encode()
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            write_synced(new, b"%b\n%08x" % (said, zlib.crc32(said)))
            os.rename(new, self._path)
            self._saved_ms = self._ran_ms
        except OSError as e:
            # The next look retries the write. Until a write succeeds, a new process counts the ages from 0.
            logger.warning("%s cannot be written: %s", self._path, e)
            self._saved_ms = -_SAVE_MS


def steady_ms() -> int:
    return time.monotonic_ns() // 1_000_000


# -- Reading ahead: a thread reads and checks many records in one step, and the reader returns these records in several
# slices. When the last slice is returned, the next step has already begun.

WINDOW_BYTES = 1024 * 1024
"""The size of one read for a reader that continues where its last read ended."""

INLINE_BESIDE_PUBLISHERS_BYTES = 256 * 1024
"""The most bytes that the event loop itself reads at once while it is busy with publishing. Larger reads, and reads
ahead, are done in a thread.

Without publishing, reading on the event loop has a higher throughput: the data is still in the processor's cache when
it is sent."""

PUBLISHING_SECONDS = 0.1
"""For this time after a commit, the event loop counts as busy with publishing."""

MAX_WINDOWS = 16
MAX_WINDOWS_BYTES = 16 * 1024 * 1024
"""The most windows, and the most bytes of windows, kept for all readers of a sidecar. The least recently used window is
dropped first."""


class Window:
    """Checked records of one segment, beginning with the record number `first` of a piece. The window tracks which
    records have been returned.

    `goes_on` is true if the reader has also read the previous window. If there are more readers than windows, previous
    windows are lost, and `goes_on` is false.
    """

    def __init__(self, segment: Segment, piece: SegmentPiece, first: int, *, goes_on: bool) -> None:
        table = piece.table[first:]
        self.segment = segment
        self.goes_on = goes_on
        self.end = piece.end
        """The offset in the file at which reading continues after this window."""
        self._end_index = piece.next_index(segment.base_index)
        table = table[table[:, COUNT] > 0]
        self._raw = piece.raw
        self._starts, self._ends, self._bases = table[:, START].copy(), table[:, END].copy(), table[:, BASE].copy()
        # Markers are not in the table. A slice ends before a marker.
        self._gaps = np.append(np.flatnonzero(self._starts[1:] != self._ends[:-1]) + 1, len(table))
        self._next = 0
        self._following: asyncio.Future[SegmentPiece] | None = None

    @property
    def next_index(self) -> int:
        """The index at which the next slice begins."""
        return self._end_index if self.is_empty else int(self._bases[self._next])

    @property
    def is_empty(self) -> bool:
        return self._next == len(self._starts)

    @property
    def next_bytes(self) -> int:
        """The size of the record with which the next slice begins."""
        return int(self._ends[self._next] - self._starts[self._next])

    @property
    def size(self) -> int:
        """The number of bytes in the window."""
        return len(self._raw)

    def cut(self, stop_index: int, max_bytes: int) -> memoryview:
        """Return the next slice: complete records below `stop_index`. The slice has at least one record. With several
        records, it has at most `max_bytes`."""
        i = self._next
        start = int(self._starts[i])
        j = min(
            int(np.searchsorted(self._ends, start + max_bytes, "right")),
            int(np.searchsorted(self._bases, stop_index)),
            int(self._gaps[np.searchsorted(self._gaps, i, "right")]),
        )
        self._next = max(j, i + 1)
        found = memoryview(self._raw)[start : int(self._ends[self._next - 1])]
        if self.is_empty:
            # Release the buffer: the caller still holds the bytes of the last slice, and the next window needs the
            # memory.
            self._raw = b""
        return found

    def read_ahead(self, following: asyncio.Future[SegmentPiece]) -> None:
        """Store the running read of the piece that follows this window."""
        following.add_done_callback(retrieve)
        self._following = following

    async def take_ahead(self) -> SegmentPiece | None:
        """Return the piece that was read ahead. Return None if no piece was read ahead, or if that read failed; the
        next read then raises the reason."""
        following, self._following = self._following, None
        try:
            return None if following is None else await following
        except (SeqdedupeError, OSError, LargerRecordError):
            return None

    def give_up(self) -> None:
        """Cancel the read ahead."""
        if self._following is not None:
            self._following.cancel()


class ReadAhead:
    """The windows of all readers. The key of a window is the reader object of the opened log, and the index at which
    the reader continues."""

    def __init__(self) -> None:
        self.written_at = 0.0
        """The time of the last commit, on the monotonic clock."""
        self._windows: OrderedDict[tuple[object, int], Window] = OrderedDict()

    @property
    def is_beside_publishers(self) -> bool:
        return time.monotonic() - self.written_at < PUBLISHING_SECONDS

    def take(self, log: object, index: int) -> Window | None:
        return self._windows.pop((log, index), None)

    def keep(self, log: object, window: Window) -> None:
        key = log, window.next_index
        if (same := self._windows.pop(key, None)) is not None:
            same.give_up()
        self._windows[key] = window
        size = sum(one.size for one in self._windows.values())
        while len(self._windows) > MAX_WINDOWS or size > MAX_WINDOWS_BYTES:
            _, oldest = self._windows.popitem(last=False)
            size -= oldest.size
            oldest.give_up()

    def forget(self, log: object) -> None:
        """Drop the windows of a log that is closed."""
        for key in [key for key in self._windows if key[0] is log]:
            self._windows.pop(key).give_up()


LOOK_BYTES = 2 * POINT_INTERVAL_BYTES
"""The size of the first read that looks for one record. If the sparse index covers the record, this read contains the
record, unless the record is large."""

ANYWHERE = 2**63 - 1
"""The value of `past` with which damage is always skipped, no matter where it ends."""

T = TypeVar("T")


class SegmentReader:
    """The segments of one log. The last segment grows. All methods must be called on the event loop. Long reads run in
    `threads`."""

    def __init__(
        self,
        identity: LogIdentity,
        segments: list[Segment],
        next_index: int,
        threads: ThreadPoolExecutor,
        ahead: ReadAhead,
    ) -> None:
        self.segments = segments
        self.next_index = next_index
        """The index after the last readable message."""
        self.leaving: Segment | None = None
        """The first segment while its file is being removed."""
        self._incarnation = identity.incarnation
        self._threads = threads
        self._ahead = ahead

    @property
    def first_index(self) -> int:
        """The index of the first message that is still stored."""
        return self.segments[0].base_index

    def close(self) -> None:
        """Close the reader. No read may follow."""
        self._ahead.forget(self)

    async def replay(self, from_index: int) -> AsyncGenerator[Entries, None]:
        """See `Log.replay`. While the caller works on a result, a thread already reads the next one."""
        self.check_is_there(from_index)
        at_end = from_index == self.next_index
        # Markers after the last message may be at the end of the last message's segment and in the next segment.
        first = self._place_of(from_index - 1 if at_end else from_index)
        steps = self._steps([(segment, segment.end) for segment in self.segments[first:]], from_index)

        async def read() -> SegmentStep | None:
            return await anext(steps, None)

        skipping = from_index > self.first_index
        following = asyncio.ensure_future(read())
        try:
            while (step := await following) is not None:
                following = asyncio.ensure_future(read())
                # This lets the next read begin before the caller works on this step.
                await asyncio.sleep(0)
                for raw, table in step.parts:
                    entries = table
                    if skipping:
                        held = table[:, BASE_INDEX] if at_end else table[:, BASE_INDEX] + table[:, ROWS] - 1
                        entries = table[int(np.searchsorted(held, from_index)) :]
                        skipping = not len(entries)
                    if len(entries):
                        yield Entries(raw, entries, IndexRuns(self._incarnation, entries))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        if skipping and not at_end:
            last = self.segments[-1]
            raise damaged(last.path, last.end, f"the message with index {from_index} should be here")

    async def _steps(self, wanted: list[tuple[Segment, int]], from_index: int) -> AsyncGenerator[SegmentStep, None]:
        offset, index = wanted[0][0].before_index(from_index)
        ownership = 0
        for i, (segment, end) in enumerate(wanted):
            if i:
                offset = 0
                if index != segment.base_index:
                    raise damaged(segment.path, 0, f"the record with index {index} should be here")
            while offset < end:
                step = await self._in_thread(segment, segment.read_step, offset, end, index, ownership)
                offset, index, ownership = step.end, step.next_index, step.ownership
                yield step

    async def read(self, from_index: int, stop_index: int, max_bytes: int, most_bytes: int = ANY_BYTES) -> memoryview:
        """See `Log.read`."""
        self.check_is_there(from_index)
        window = self._ahead.take(self, from_index)
        if window is None or window.is_empty:
            window = await self._window(from_index, max_bytes, most_bytes, window)
        if window.next_bytes > most_bytes:
            self._ahead.keep(self, window)
            raise LargerRecordError(window.next_bytes)
        found = window.cut(stop_index, max_bytes)
        if window.is_empty and window.goes_on and self._ahead.is_beside_publishers:
            self._read_ahead(window, max(max_bytes, WINDOW_BYTES))
        self._ahead.keep(self, window)
        return found

    def _read_ahead(self, window: Window, size: int) -> None:
        """Make a thread read the piece after a window while the window's last slice is being sent. Do nothing if the
        rest of the segment is small."""
        segment, index = window.segment, window.next_index
        if segment.end - window.end > INLINE_BESIDE_PUBLISHERS_BYTES:
            run = asyncio.get_running_loop().run_in_executor
            # `most_bytes` is `size`: a larger record is not read ahead, but when the reader has room for it.
            ahead = run(self._threads, segment.read, window.end, segment.end, index, size, index, size)
            window.read_ahead(ahead)

    async def _window(self, from_index: int, max_bytes: int, most_bytes: int, before: Window | None) -> Window:
        """Return checked records, beginning with the record that contains the index. If the reader has finished an
        earlier window (`before`), return many records."""
        if before is not None and (ahead := await before.take_ahead()) is not None:
            before.segment.learn(ahead)
            hits = np.flatnonzero(_holds(from_index)(ahead))
            if len(hits):
                return Window(before.segment, ahead, int(hits[0]), goes_on=True)
        # Retention may have removed the message meanwhile.
        self.check_is_there(from_index)
        segment = self.segments[self._place_of(from_index)]
        size = max_bytes + POINT_INTERVAL_BYTES if before is None else max(max_bytes, WINDOW_BYTES)
        if max_bytes < most_bytes < ANY_BYTES:
            # An earlier read has found a record of `most_bytes`.
            size = max(size, most_bytes)
        offset, index = segment.before_index(from_index)
        if before is not None and before.segment is segment:
            offset, index = before.end, from_index
        found = await self._find(
            segment, offset, index, _holds(from_index),
            past=from_index, size=size, payloads_from=from_index, most_bytes=most_bytes,
        )  # fmt: skip
        if found is None:
            raise damaged(segment.path, segment.end, f"the message with index {from_index} should be here")
        return Window(segment, *found, goes_on=before is not None)

    async def next_readable(self, index: int) -> int:
        """See `Log.next_readable`."""
        self.check_is_there(index)
        while index < self.next_index:
            segment = self.segments[self._place_of(index)]
            found = await self._find(
                segment, *segment.before_index(index), _holds(index), past=ANYWHERE, payloads_from=index
            )
            if found is not None:
                piece, i = found
                return max(index, int(piece.table[i, BASE]))
            index = self.index_after(segment)
        return self.next_index

    async def locate(self, index: int) -> Location:
        """See `Log.locate`."""
        self.check_is_there(index)
        self.check_is_there(index + 1)
        segment = self.segments[self._place_of(index)]
        found = await self._find(segment, *segment.before_index(index), _holds(index), past=index)
        if found is None:
            raise damaged(segment.path, segment.end, f"the message with index {index} should be here")
        piece, i = found
        return Location(MessageId.of(self._incarnation, index), int(piece.table[i, OWNER]) % 2**64)

    async def locate_time(self, publish_time_ms: int, stop_index: int) -> int:
        """See `Log.locate_time`."""
        segments = list(self.segments)
        low, high = 0, len(segments)
        while low < high:
            middle = (low + high) // 2
            if await self.begins_before(segments[middle], publish_time_ms):
                low = middle + 1
            else:
                high = middle
        if not low:
            return min(segments[0].base_index, stop_index)
        segment = segments[low - 1]
        # A damaged place is treated as published at the same time as the next record, so that no reader skips the
        # damage unnoticed.
        offset, older = segment.before_time(publish_time_ms)
        size = LOOK_BYTES
        while (piece := await self._piece(segment, offset, older, size, past=ANYWHERE)) is not None:
            hits = np.flatnonzero(piece.table[:, TIME_MS] >= publish_time_ms)
            if len(hits):
                return min(int(piece.table[hits[0], BASE]) if hits[0] else older, stop_index)
            offset, older, size = piece.end, piece.next_index(older), SCAN_BYTES
            del piece  # free it before the next read
        return min(older, stop_index)

    async def locate_bytes(self, from_index: int, size_bytes: int, stop_index: int) -> int:
        """See `Log.locate_bytes`."""
        self.check_is_there(from_index)
        segments = self.segments[self._place_of(from_index) :]
        offset, index = segments[0].before_index(from_index)
        found = await self._find(segments[0], offset, index, _holds(from_index), past=ANYWHERE)
        # If the rest of the segment is damaged, it counts as having no bytes.
        start = segments[0].end if found is None else found[0].offset + int(found[0].table[found[1], START])
        goal = start + size_bytes
        for segment in segments:
            if goal <= segment.end:
                break
            goal -= segment.end
        else:
            return stop_index
        offset, index = segment.before_offset(goal)
        found = await self._find(
            segment, offset, index, lambda piece: piece.table[:, END] + piece.offset >= goal, past=ANYWHERE
        )
        if found is None:
            return min(self.index_after(segment), stop_index)
        piece, i = found
        return min(max(int(piece.table[i, BASE] + piece.table[i, COUNT]), from_index + 1), stop_index)

    async def begins_before(self, segment: Segment, publish_time_ms: int) -> bool:
        """Return whether the first readable record at or after the beginning of a segment was published before that
        time.

        Return False if there is no such record.
        """
        began_ms = await self.began_ms(segment)
        return began_ms is not None and began_ms < publish_time_ms

    async def began_ms(self, segment: Segment) -> int | None:
        """Return the publish time of the first readable record at or after the beginning of a segment. Return None if
        there is no such record. A segment without readable records is read only once."""
        for one in self.segments[self._place_of(segment.base_index) :]:
            if not one.points and one.indexed_end < one.end:
                await self._piece(one, 0, one.base_index, POINT_INTERVAL_BYTES, past=ANYWHERE)
            if one.points:
                return one.points[0].publish_time_ms
        return None

    async def message_bytes(self, segment: Segment) -> int:
        """Return the size of a segment without its control records and markers, in bytes. A segment that was not read
        since the log was opened is read once."""
        offset, index = segment.before_offset(segment.indexed_end)
        while segment.indexed_end < segment.end:
            if (piece := await self._piece(segment, offset, index, SCAN_BYTES, past=ANYWHERE)) is None:
                break
            offset, index = piece.end, piece.next_index(index)
        return segment.end - segment.control_bytes

    async def _find(
        self,
        segment: Segment,
        offset: int,
        index: int,
        wanted: Callable[[SegmentPiece], np.ndarray],
        *,
        past: int,
        size: int = LOOK_BYTES,
        payloads_from: int | None = None,
        most_bytes: int = ANY_BYTES,
    ) -> tuple[SegmentPiece, int] | None:
        """Return the first wanted record at or after an offset of a segment: the piece that was read, and the record's
        number in that piece. Return None if there is none.

        Damage is skipped if it ends at or before the index `past`. Other damage raises.
        """
        while True:
            piece = await self._piece(segment, offset, index, size, payloads_from, most_bytes, past=past)
            if piece is None:
                return None
            hits = np.flatnonzero(wanted(piece))
            if len(hits):
                return piece, int(hits[0])
            offset, index, size = piece.end, piece.next_index(index), SCAN_BYTES
            del piece  # free it before the next read

    async def _piece(
        self,
        segment: Segment,
        offset: int,
        index: int,
        size: int,
        payloads_from: int | None = None,
        most_bytes: int = ANY_BYTES,
        *,
        past: int,
    ) -> SegmentPiece | None:
        """Return the next piece of a segment at or after an offset; None at the segment's end. Damage is handled as in
        `_find`."""
        while offset < segment.end:
            end = segment.end
            try:
                return await self._read(segment, offset, end, index, size, payloads_from, most_bytes)
            except SeqdedupeError as e:
                if not _may_be_damage(e):
                    raise
                following = self.index_after(segment)
                onward = await asyncio.get_running_loop().run_in_executor(
                    self._threads, look_past, segment, offset, end, index, payloads_from, following
                )
                if onward is None or onward.next_index > past:
                    raise
                segment.pass_over(offset, onward.offset)
                offset, index = onward
        return None

    async def _read(
        self,
        segment: Segment,
        offset: int,
        end: int,
        index: int,
        size: int,
        payloads_from: int | None = None,
        most_bytes: int = ANY_BYTES,
    ) -> SegmentPiece:
        """Return a checked piece of a segment. Raises LOG_DAMAGED or NEWER_FORMAT if the segment is damaged there,
        POSITION_TRIMMED if it has been trimmed, and the other errors of `Segment.read`."""
        self.check_is_there(segment.base_index)
        piece = None
        if not self._ahead.is_beside_publishers or min(size, end - offset) <= INLINE_BESIDE_PUBLISHERS_BYTES:
            piece = _read_from_memory(segment, offset, end, index, size, payloads_from, most_bytes)
        if piece is None:
            piece = await self._in_thread(segment, segment.read, offset, end, index, size, payloads_from, most_bytes)
        segment.learn(piece)
        return piece

    async def _in_thread(self, segment: Segment, read: Callable[..., T], *arguments: Any) -> T:
        """Call a read of a segment in a thread. If the read finds damage, read once more, from the disk itself."""
        run = asyncio.get_running_loop().run_in_executor
        self.check_is_there(segment.base_index)
        try:
            try:
                return await run(self._threads, read, *arguments)
            except DamagedError:
                await run(self._threads, segment.forget_pages)
                return await run(self._threads, read, *arguments)
        except FileNotFoundError as e:
            self.check_is_there(segment.base_index)
            if segment is self.leaving:
                raise _trimmed(segment.base_index, self.segments[1].base_index) from e
            raise damaged(segment.path, arguments[0], "the file is missing") from e

    def _place_of(self, index: int) -> int:
        """Return the position in `segments` of the segment that contains the index, or would contain it."""
        return max(0, bisect_right(self.segments, index, key=lambda segment: segment.base_index) - 1)

    def index_after(self, segment: Segment) -> int:
        """Return the index after the messages of a segment."""
        i = bisect_right(self.segments, segment.base_index, key=lambda segment: segment.base_index)
        return self.segments[i].base_index if i < len(self.segments) else self.next_index

    def check_is_there(self, index: int) -> None:
        """Raise POSITION_TRIMMED or POSITION_AFTER_END unless reading can begin at this index."""
        if index < self.first_index:
            raise _trimmed(index, self.first_index)
        if index > self.next_index:
            raise error(
                "POSITION_AFTER_END",
                f"index {index} is after the end: the next message gets {self.next_index}",
                index=index,
                next_index=self.next_index,
            )


class IndexRuns(Sequence[Runs]):
    """The message IDs of entries of the embedded log. They are computed from the indexes on access."""

    def __init__(self, incarnation: int, table: Int64s) -> None:
        self._incarnation = incarnation
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, k: int) -> Runs: ...

    @overload
    def __getitem__(self, k: slice) -> "IndexRuns": ...

    def __getitem__(self, k: int | slice) -> "Runs | IndexRuns":
        if isinstance(k, slice):
            return IndexRuns(self._incarnation, self._table[k])
        rows = int(self._table[k, ROWS])
        return (Run(rows, self._incarnation, int(self._table[k, BASE_INDEX])),) if rows else ()


def _trimmed(index: int, first_index: int) -> SeqdedupeError:
    return error(
        "POSITION_TRIMMED",
        f"index {index} is gone by retention: the first one left is {first_index}",
        index=index,
        first_index=first_index,
    )


def _may_be_damage(e: SeqdedupeError) -> bool:
    """Return whether the error may mean that a record is damaged, or that the disk cannot read the record."""
    if e.reason == "LOG_UNREADABLE":
        return isinstance(e.__cause__, OSError) and e.__cause__.errno == errno.EIO
    return e.reason == "LOG_DAMAGED"


def _holds(index: int) -> Callable[[SegmentPiece], np.ndarray]:
    """Return a function that shows, for each record of a piece, whether the record ends after the index. The first such
    record contains the message."""
    return lambda piece: piece.table[:, BASE] + piece.table[:, COUNT] > index


def _read_from_memory(
    segment: Segment, offset: int, end: int, index: int, size: int, payloads_from: int | None, most_bytes: int
) -> SegmentPiece | None:
    """Return a small piece if the system has it in memory; otherwise None. A thread would cost more than the read."""
    if size >= CHUNK_BYTES:
        return None
    try:
        return segment.read(offset, end, index, min(size, INLINE_BYTES), payloads_from, most_bytes, read_from_memory)
    except (NotInMemoryError, FileNotFoundError, SeqdedupeError):
        # The caller repeats the read in a thread, which raises the actual error.
        return None
