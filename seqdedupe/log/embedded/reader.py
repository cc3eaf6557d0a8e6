"""Reading one topic's log: what is durable in its segment files."""

import asyncio
import errno
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, overload

import numpy as np

from seqdedupe.batch import Int64s
from seqdedupe.errors import DamagedError, SeqdedupeError, error
from seqdedupe.format.columns import BASE_INDEX, ROWS
from seqdedupe.log.contract import ANY_BYTES, Entries, LargerRecordError, Location, Run, Runs
from seqdedupe.log.embedded.past_damage import look_past
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
    Identity,
    NotInMemoryError,
    Piece,
    Segment,
    Step,
    damaged,
    read_from_memory,
)
from seqdedupe.log.embedded.window import INLINE_BESIDE_PUBLISHERS_BYTES, WINDOW_BYTES, ReadAhead, Window
from seqdedupe.message_id import MessageId

ANYWHERE = 2**63 - 1
"""Damage is passed over wherever it ends."""

T = TypeVar("T")


class Reader:
    """The segments of one log, the last of which grows. Belongs to the event loop; long reads are done in `threads`."""

    def __init__(
        self,
        identity: Identity,
        segments: list[Segment],
        next_index: int,
        threads: ThreadPoolExecutor,
        ahead: ReadAhead,
    ) -> None:
        self.segments = segments
        self.next_index = next_index
        """The index after what can be read."""
        self.leaving: Segment | None = None
        """The first segment while its file is being removed."""
        self._incarnation = identity.incarnation
        self._threads = threads
        self._ahead = ahead

    @property
    def first_index(self) -> int:
        """The index of the first message left."""
        return self.segments[0].base_index

    def close(self) -> None:
        """Nobody reads any more."""
        self._ahead.forget(self)

    async def replay(self, from_index: int) -> AsyncGenerator[Entries, None]:
        """See `Log.replay`. The next read is under way, in a thread, while its caller works on what it was given."""
        self.check_is_there(from_index)
        at_end = from_index == self.next_index
        # Markers after the last message may stand at the end of its segment and in the one that follows.
        first = self._place_of(from_index - 1 if at_end else from_index)
        steps = self._steps([(segment, segment.end) for segment in self.segments[first:]], from_index)

        async def read() -> Step | None:
            return await anext(steps, None)

        skipping = from_index > self.first_index
        following = asyncio.ensure_future(read())
        try:
            while (step := await following) is not None:
                following = asyncio.ensure_future(read())
                # So that it is begun before this one is worked on.
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

    async def _steps(self, wanted: list[tuple[Segment, int]], from_index: int) -> AsyncGenerator[Step, None]:
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
        """Has a thread read what comes after a window, while its last slice is being sent, unless it is little."""
        segment, index = window.segment, window.next_index
        if segment.end - window.end > INLINE_BESIDE_PUBLISHERS_BYTES:
            run = asyncio.get_running_loop().run_in_executor
            # What is larger is read when there is room for it.
            ahead = run(self._threads, segment.read, window.end, segment.end, index, size, index, size)
            window.read_ahead(ahead)

    async def _window(self, from_index: int, max_bytes: int, most_bytes: int, before: Window | None) -> Window:
        """Checked records from the one that holds the index on; many for a reader that has finished a window."""
        if before is not None and (ahead := await before.take_ahead()) is not None:
            before.segment.learn(ahead)
            hits = np.flatnonzero(_holds(from_index)(ahead))
            if len(hits):
                return Window(before.segment, ahead, int(hits[0]), goes_on=True)
        # Retention may have been faster.
        self.check_is_there(from_index)
        segment = self.segments[self._place_of(from_index)]
        size = max_bytes + POINT_INTERVAL_BYTES if before is None else max(max_bytes, WINDOW_BYTES)
        if max_bytes < most_bytes < ANY_BYTES:
            # The record before was so large.
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
        found = await self._find(
            segment, *segment.before_index(index), _holds(index), past=index, size=2 * POINT_INTERVAL_BYTES
        )
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
        # What is damaged counts as published when what stands after it was: nobody is led past it.
        offset, older = segment.before_time(publish_time_ms)
        while (piece := await self._piece(segment, offset, older, past=ANYWHERE)) is not None:
            hits = np.flatnonzero(piece.table[:, TIME_MS] >= publish_time_ms)
            if len(hits):
                return min(int(piece.table[hits[0], BASE]) if hits[0] else older, stop_index)
            offset, older = piece.end, piece.next_index(older)
        return min(older, stop_index)

    async def locate_bytes(self, from_index: int, size_bytes: int, stop_index: int) -> int:
        """See `Log.locate_bytes`."""
        self.check_is_there(from_index)
        segments = self.segments[self._place_of(from_index) :]
        offset, index = segments[0].before_index(from_index)
        found = await self._find(segments[0], offset, index, _holds(from_index), past=ANYWHERE)
        # What is damaged there has no bytes.
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
        """Whether the first record that can be read from a segment on was published before that time.

        Not if there is none.
        """
        began_ms = await self.began_ms(segment)
        return began_ms is not None and began_ms < publish_time_ms

    async def began_ms(self, segment: Segment) -> int | None:
        """When the first record that can be read from a segment on was published; None if there is none. A segment in
        which nothing can be read is read once."""
        for one in self.segments[self._place_of(segment.base_index) :]:
            if not one.points and one.indexed_end < one.end:
                await self._piece(one, 0, one.base_index, POINT_INTERVAL_BYTES, past=ANYWHERE)
            if one.points:
                return one.points[0].publish_time_ms
        return None

    async def message_bytes(self, segment: Segment) -> int:
        """What a segment holds but for control records and markers. One that was not read since the log was opened is
        read, once."""
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
        wanted: Callable[[Piece], np.ndarray],
        *,
        past: int,
        size: int = CHUNK_BYTES,
        payloads_from: int | None = None,
        most_bytes: int = ANY_BYTES,
    ) -> tuple[Piece, int] | None:
        """The first wanted record of a segment from an offset on: its place in the piece that was read with it.

        Damage is passed over if it ends at or before the index `past`.
        """
        next_size = CHUNK_BYTES if most_bytes == ANY_BYTES else SCAN_BYTES
        while True:
            piece = await self._piece(segment, offset, index, size, payloads_from, most_bytes, past=past)
            if piece is None:
                return None
            hits = np.flatnonzero(wanted(piece))
            if len(hits):
                return piece, int(hits[0])
            offset, index, size = piece.end, piece.next_index(index), next_size

    async def _piece(
        self,
        segment: Segment,
        offset: int,
        index: int,
        size: int = CHUNK_BYTES,
        payloads_from: int | None = None,
        most_bytes: int = ANY_BYTES,
        *,
        past: int,
    ) -> Piece | None:
        """The next piece of a segment from an offset on, None at its end."""
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
    ) -> Piece:
        """A piece of a segment, checked. Raises what is damaged or has been trimmed."""
        self.check_is_there(segment.base_index)
        piece = None
        if not self._ahead.is_beside_publishers or min(size, end - offset) <= INLINE_BESIDE_PUBLISHERS_BYTES:
            piece = _read_from_memory(segment, offset, end, index, size, payloads_from, most_bytes)
        if piece is None:
            piece = await self._in_thread(segment, segment.read, offset, end, index, size, payloads_from, most_bytes)
        segment.learn(piece)
        return piece

    async def _in_thread(self, segment: Segment, read: Callable[..., T], *arguments: Any) -> T:
        """Calls a read of a segment in a thread. Damage is looked at twice, the second time on the disk itself."""
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
        """Which segment holds an index, or would."""
        return max(0, bisect_right(self.segments, index, key=lambda segment: segment.base_index) - 1)

    def index_after(self, segment: Segment) -> int:
        """The index after the messages of a segment."""
        i = bisect_right(self.segments, segment.base_index, key=lambda segment: segment.base_index)
        return self.segments[i].base_index if i < len(self.segments) else self.next_index

    def check_is_there(self, index: int) -> None:
        """Raises POSITION_TRIMMED or POSITION_AFTER_END unless reading can begin at this index."""
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
    """The message IDs of entries of the embedded log, which follow from their indexes: made when they are asked for."""

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
    """Whether it may be that a record is damaged, or stands where the disk cannot be read."""
    if e.reason == "LOG_UNREADABLE":
        return isinstance(e.__cause__, OSError) and e.__cause__.errno == errno.EIO
    return e.reason == "LOG_DAMAGED"


def _holds(index: int) -> Callable[[Piece], np.ndarray]:
    """Wants the record that holds a message."""
    return lambda piece: piece.table[:, BASE] + piece.table[:, COUNT] > index


def _read_from_memory(
    segment: Segment, offset: int, end: int, index: int, size: int, payloads_from: int | None, most_bytes: int
) -> Piece | None:
    """A small piece, or None if it is not in memory. A hop to a thread would cost more than this does."""
    if size >= CHUNK_BYTES:
        return None
    try:
        return segment.read(offset, end, index, min(size, INLINE_BYTES), payloads_from, most_bytes, read_from_memory)
    except (NotInMemoryError, FileNotFoundError, SeqdedupeError):
        # What is wrong is looked at again in a thread.
        return None
