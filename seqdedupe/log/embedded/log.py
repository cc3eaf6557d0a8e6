"""The embedded log: one folder of append-only segment files per topic. `docs/internals/formats.md` describes the files.

The log is made for one machine. An append is confirmed when the append is durable, and its outcome is never unknown. A
failed write is undone before the write is reported as refused. If it cannot be undone, the process ends.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from seqdedupe.batch import Int32s, Int64s
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.files import sync_folder
from seqdedupe.limits import MAX_BATCH_BYTES, FlushInterval, Retention
from seqdedupe.log.contract import ANY_BYTES, DamageFound, Entries, Location, Outcome, Records, Skipped
from seqdedupe.log.embedded.commit import Closing, Committer
from seqdedupe.log.embedded.inspection import Damage, DurablePart
from seqdedupe.log.embedded.reader import AHEAD_MS, BEHIND_FILE, Ahead, ReadAhead, SegmentReader, steady_ms
from seqdedupe.log.embedded.segment import Segment, segment_path
from seqdedupe.log.embedded.tail import Tail
from seqdedupe.log.embedded.writer import LateAppends, Room, Writer, WriteTerm, WrittenAppends

logger = logging.getLogger("seqdedupe.log")

SEGMENTS_AN_AGE = 10
"""With retention by time, a segment accepts messages for about a tenth of the retention time."""
LEAST_SEGMENT_MS = 60_000
"""Retention by time never ends a segment before this time."""

MAX_PLACES = 10_000
"""The most places of damage kept in memory per log. The limit exists because a failing disk may have damage
everywhere."""


@dataclass(frozen=True, slots=True)
class EmbeddedResources:
    """The resources that all logs of a sidecar share: settings, the commit thread, the reading threads."""

    clock_ms: Callable[[], int]
    """Return the publish time of messages that arrive now."""
    earliest_ms: Callable[[], int]
    """Return a time that is not later than the present, or 0 if no such time is known yet. Retention by time uses this
    clock."""
    segment_bytes: int
    committer: Callable[[], Committer]
    threads: ThreadPoolExecutor
    read_ahead: ReadAhead
    room: Room
    holds: set[object] = field(default_factory=set)
    """While there is a hold, retention removes nothing."""


class EmbeddedLog:
    """The log of one topic. It implements `seqdedupe.log.contract.Log`. `EmbeddedLogs.open` creates it.

    In a message ID, the ledger is the incarnation and the entry is the index. `cut_bytes` is the size of the torn tail
    found when the log was opened. `cut_records` is the approximate number of records in it.
    """

    replays_what_is_certain = False

    def __init__(self, shared: EmbeddedResources, folder: Path, segments: list[Segment], tail: Tail) -> None:
        self.identity = identity = tail.segment.identity
        self.incarnation = identity.incarnation
        self.cut_bytes = tail.cut_bytes
        self.cut_records = tail.cut_records
        self._shared = shared
        self._folder = folder
        self._certain_index = tail.certain_index
        self._reader = SegmentReader(identity, segments, tail.next_index, shared.threads, shared.read_ahead)
        self._writer = Writer(folder, tail, shared.segment_bytes, self._on_news, self._on_late, shared.room)
        self._opening: WriteTerm | None = None
        self._flush_due: asyncio.TimerHandle | None = None
        self._is_mended = False
        """Whether the end of the log that opening found is certainly on the disk."""
        if not tail.next_index:
            segments[-1].made_ms = steady_ms()
        self._ahead = Ahead(folder)
        self._behind = Ahead(folder, BEHIND_FILE)
        self._looking = asyncio.Lock()
        self._trim_below = 0
        self._trimming: asyncio.Task[None] | None = None
        self.is_closed = False
        self._damage: dict[tuple[int, int], Damage] = {}
        """The damage found by the scrub. The key is the segment's first index and the offset in the file."""

    @property
    def place(self) -> str:
        return str(self._folder)

    @property
    def schema(self) -> None:
        return None

    @property
    def entry_format(self) -> str:
        return ""

    @property
    def first_index(self) -> int:
        return self._reader.first_index

    @property
    def certain_index(self) -> int:
        return self._certain_index

    @property
    def size_bytes(self) -> int:
        return sum(segment.end for segment in self._reader.segments)

    # Scrubbing for damage.

    @property
    def base_indexes(self) -> list[int]:
        """The first index of each segment, in order."""
        return [segment.base_index for segment in self._reader.segments]

    @property
    def parts(self) -> list[DurablePart]:
        """Return all parts of the log that readers may see at the time of this call."""
        reader = self._reader
        return [
            DurablePart(segment.path, self.identity, segment.base_index, segment.end, reader.index_after(segment))
            for segment in reader.segments
        ]

    def durable_part(self, base_index: int) -> DurablePart | None:
        """Return the segment that begins with this index. Return None if the segment is removed or being removed, or if
        the log is closed.

        The last segment is returned only if the log has been opened for writing. After a failed sync, the only correct
        copy of the segment's end may be in the page cache. Opening for writing writes the end again. Before that, a
        read from the disk would drop the copy in the page cache.
        """
        reader = self._reader
        for segment in () if self.is_closed else reader.segments[: None if self._is_mended else -1]:
            if segment.base_index == base_index and segment is not reader.leaving:
                return DurablePart(segment.path, self.identity, base_index, segment.end, reader.index_after(segment))
        return None

    def add_damage(self, base_index: int, damage: Damage) -> bool:
        """Store damage in a segment. Return False if the damage was known, the segment was removed, or MAX_PLACES
        places are stored."""
        place = base_index, damage.offset
        if place in self._damage or base_index < self.first_index or len(self._damage) >= MAX_PLACES:
            return False
        self._damage[place] = damage
        return True

    @property
    def damage_found(self) -> DamageFound:
        there = self._damage.values()
        return DamageFound(len(there), sum((damage.next_index or 0) - damage.first_index for damage in there))

    @property
    def skipped(self) -> Skipped:
        return Skipped()

    @property
    def earlier(self) -> dict[str, int]:
        return {}

    # Writing.

    def check(self, batch: bytes) -> None:
        """Accept every batch that fits into a frame."""

    async def open_for_writing(self, term: int, token: bytes, settle: Callable[[Outcome], None]) -> int:
        self._opening = opening = WriteTerm(self._writer, self._shared.committer().queue.put, term, token, settle)
        await opening.ready
        return 0

    def append(self, batch: bytes, rows: int, column_bytes: int, sent: object = None) -> None:
        if self._opening is None or not self._opening.opened:
            raise error("INTERNAL", "an append to a log that is not open for writing")
        self._opening.append((batch, rows, column_bytes))

    def append_control(self, body: bytes) -> None:
        if len(body) > MAX_BATCH_BYTES:
            raise error("INTERNAL", f"a control record of {len(body)} bytes: at most {MAX_BATCH_BYTES} are taken")
        self.append(body, 0, len(body))

    def flush_every(self, interval: FlushInterval) -> None:
        self._writer.flush_interval = interval
        if self._flush_due is not None:
            # The batches that wait were written with the previous interval.
            self.flush()

    def flush(self) -> None:
        if self._opening is not None and not self.is_closed:
            self._opening.flush()

    def _on_late(self, late: LateAppends) -> None:
        """Settle appends as written but not durable. Readers do not see these messages yet."""
        opening = late.opening
        if opening is not self._opening or self.is_closed:
            return
        if self._flush_due is None:
            delay_seconds = self._writer.flush_interval.ms / 1000
            self._flush_due = asyncio.get_running_loop().call_later(delay_seconds, self._flush_is_due)
        opening.settle(Outcome([], written=late.runs))

    def _flush_is_due(self) -> None:
        self._flush_due = None
        self.flush()

    def _on_news(self, news: WrittenAppends) -> None:
        """Make the durable messages readable, then notify the topic."""
        self._shared.read_ahead.written_at = time.monotonic()
        if self._flush_due is not None:
            # For batches that still wait for their sync, `_on_late` sets the timer again.
            self._flush_due.cancel()
            self._flush_due = None
        segments = self._reader.segments
        if news.base_index != segments[-1].base_index:
            segments.append(Segment(self._folder, self.identity, news.base_index))
            segments[-1].made_ms = steady_ms()
        segments[-1].grow(news.end, news.points, news.control_bytes)
        self._reader.next_index = news.next_index
        opening = news.opening
        if opening.opened:
            self._certain_index = news.next_index
            if opening is self._opening:
                opening.settle(Outcome(news.runs, news.failure, news.why))
            return
        opening.opened = news.failure is None
        if opening.opened:
            # Opening for writing wrote the end of the log again, before it wrote the marker.
            self._is_mended = True
            self._certain_index = news.next_index
        if opening.ready.cancelled():
            return
        if news.failure is None:
            opening.ready.set_result(None)
        else:
            opening.ready.set_exception(error("LOG_REFUSED", news.why))

    # Reading.

    def replay(self, from_index: int) -> AsyncGenerator[Entries, None]:
        return self._reader.replay(from_index)

    async def wait_for_more(self) -> None:
        # Wait forever, because no other process writes to the folder.
        await asyncio.get_running_loop().create_future()

    async def wait_until_free(self) -> None:
        """Return at once: no other process uses the folder."""

    async def let_go(self) -> None:
        """Do nothing: no other process can open the log."""

    async def read(self, from_index: int, stop_index: int, max_bytes: int, most_bytes: int = ANY_BYTES) -> Records:
        return Records(await self._reader.read(from_index, stop_index, max_bytes, most_bytes))

    async def next_readable(self, from_index: int) -> int:
        return await self._reader.next_readable(from_index)

    async def locate_time(self, publish_time_ms: int, stop_index: int) -> int:
        return await self._reader.locate_time(publish_time_ms, stop_index)

    async def locate_bytes(self, from_index: int, size_bytes: int, stop_index: int) -> int:
        return await self._reader.locate_bytes(from_index, size_bytes, stop_index)

    async def locate(self, index: int) -> Location:
        return await self._reader.locate(index)

    def known_message_ids(self, indexes: Int64s) -> tuple[Int64s, Int64s, Int32s]:
        return np.full(len(indexes), self.incarnation), indexes, np.full(len(indexes), -1, np.int32)

    # Snapshots and retention.

    def place_at(self, next_index: int) -> bytes:
        return b""

    async def snapshot_is_durable(self, place: bytes) -> None:
        """Do nothing, because messages are removed at once when they are trimmed."""

    async def may_trim_to(self, covered_index: int, retention: Retention) -> int:
        segments = list(self._reader.segments)
        size_bytes, age_ms = retention
        too_many = 0 if size_bytes is None else await self._too_many(segments, size_bytes)
        too_old = 0 if age_ms is None else await self._too_old(segments, age_ms)
        count = 0
        while count < max(too_many, too_old) and segments[count + 1].base_index < covered_index:
            count += 1
        return segments[count].base_index

    async def _too_many(self, segments: list[Segment], size_bytes: int) -> int:
        """Return the number of the oldest segments that retention may remove. The messages of the remaining segments
        must still have `size_bytes`.

        Control records do not count. A client that moves a cursor causes control records, and they must not make
        retention remove messages.
        """
        if sum(segment.end for segment in segments[1:]) < size_bytes:
            return 0
        left = 0
        try:
            for count in range(len(segments) - 1, 0, -1):
                left += await self._reader.message_bytes(segments[count])
                if left >= size_bytes:
                    return count
        except SeqdedupeError as e:
            logger.warning("%s: retention by size has stopped: %s", self._folder, e)
        return 0

    async def _too_old(self, segments: list[Segment], age_ms: int) -> int:
        """Return the number of the oldest segments whose messages are all older than `age_ms`.

        The clock must be trustworthy. If it were ahead, retention would drop messages that are only minutes old. If the
        last segment has existed for long enough, the next message begins a new segment. Otherwise old messages would be
        kept as long as the new messages in their segment.
        """
        await self._look_behind(segments)
        if not (earliest_ms := self._shared.earliest_ms()):
            return 0
        part_ms = max(age_ms // SEGMENTS_AN_AGE, LEAST_SEGMENT_MS)
        count = 0
        try:
            await self._look_ahead(segments, earliest_ms + AHEAD_MS)
            if await self._is_older(segments[-1], part_ms, earliest_ms):
                self._writer.roll_through = segments[-1].base_index
            for following in segments[1:]:
                if not await self._is_older(following, age_ms, earliest_ms):
                    break
                count += 1
            if (
                # On a quiet topic, the next segment may begin much later. Then the age of this segment's last message
                # decides, and must be read.
                count + 1 < len(segments)
                and segments[count].base_index not in self._behind
                and await self._reader.begins_before(segments[count], earliest_ms - age_ms - part_ms)
                and await self._ends_before(segments[count], earliest_ms - age_ms)
            ):
                count += 1
        except SeqdedupeError as e:
            logger.warning("%s: retention by age has stopped: %s", self._folder, e)
        return count

    async def _is_older(self, segment: Segment, age_ms: int, earliest_ms: int) -> bool:
        """Return whether a segment's first message, and therefore every earlier message, is older than `age_ms`."""
        if segment.base_index in self._behind:
            return self._behind.age_ms(segment.base_index) > age_ms
        is_older = self._ahead.age_ms(segment.base_index) > age_ms
        return is_older or await self._reader.begins_before(segment, earliest_ms - age_ms)

    async def _ends_before(self, segment: Segment, publish_time_ms: int) -> bool:
        """Return whether all messages of a segment were published before that time. The segment must not be the last
        one."""
        end_index = self._reader.index_after(segment)
        return await self._reader.locate_time(publish_time_ms, end_index) == end_index

    async def _look_ahead(self, segments: list[Segment], too_late_ms: int) -> None:
        """Find the segments whose first publish time is after `too_late_ms`, and so cannot be right. These are the last
        segments, because publish times never decrease."""
        first, end = 0, len(segments)
        while first < end:
            middle = (first + end) // 2
            began_ms = await self._reader.began_ms(segments[middle])
            if began_ms is not None and began_ms <= too_late_ms:
                first = middle + 1
            else:
                end = middle
        began_ms = await self._reader.began_ms(segments[first]) if first < len(segments) else None
        bases = [] if began_ms is None else [segment.base_index for segment in segments[first:]]
        if not bases and self._ahead.is_empty:
            return
        why = "begins in the future: it was written when the clock was ahead, or the clock is behind now"
        await self._see(self._ahead, bases, why)

    async def _look_behind(self, segments: list[Segment]) -> None:
        """Find the segments whose first publish time is earlier than the time when this process made the segment. These
        are the first segments made by this process, because publish times never decrease."""
        apart_ms = (self._shared.earliest_ms() or self._shared.clock_ms()) - steady_ms() - AHEAD_MS
        bases: list[int] = []
        for segment in segments:
            if segment.made_ms is None or segment.base_index in self._behind:
                continue
            try:
                began_ms = await self._reader.began_ms(segment)
            except SeqdedupeError:
                # Retention by age stops at this segment.
                break
            if began_ms is None or began_ms >= segment.made_ms + apart_ms:
                break
            bases.append(segment.base_index)
        if not bases and self._behind.is_empty and self._behind.has_looked:
            return
        why = "begins before it was made: it was written when the clock was behind, or the clock is ahead now"
        await self._see(self._behind, bases, why)

    async def _see(self, seen: Ahead, bases: list[int], why: str) -> None:
        """Count the age of these segments from the time when each segment was first found. Write one log line for each
        segment."""
        async with self._looking:
            run, threads = asyncio.get_running_loop().run_in_executor, self._shared.threads
            new = await run(threads, seen.look, bases, frozenset(self.base_indexes))
        for base_index in new:
            path = segment_path(self._folder, base_index)
            logger.warning("%s %s. Retention by time counts it from now on", path, why)

    async def trim(self, below_index: int) -> None:
        self._trim_below = max(self._trim_below, below_index)
        await asyncio.shield(self.go_on_trimming())

    def go_on_trimming(self) -> "asyncio.Task[None]":
        """Remove the segments that a hold has kept."""
        if self._trimming is None or self._trimming.done():
            self._trimming = asyncio.get_running_loop().create_task(self._trim())
        return self._trimming

    async def trimming_rests(self) -> None:
        """Wait until nothing is being removed."""
        if self._trimming is not None:
            await asyncio.wait([self._trimming])

    @property
    def has_to_trim(self) -> bool:
        """Whether trimmed segments still exist, for example because of a hold."""
        segments = self._reader.segments
        return len(segments) > 1 and segments[1].base_index <= self._trim_below

    async def _trim(self) -> None:
        """Remove segments one after the other. Each removal is durable before the next removal begins.

        So no file exists whose successor was removed. A segment that cannot be removed stays readable.
        """
        run, threads = asyncio.get_running_loop().run_in_executor, self._shared.threads
        segments = self._reader.segments
        try:
            while self.has_to_trim and not self._shared.holds:
                # An earlier call may have removed files without making the removal durable.
                await run(threads, sync_folder, self._folder)
                self._reader.leaving = segments[0]
                await run(threads, segments[0].path.unlink, True)
                dropped = segments.pop(0)
                logger.info(
                    "%s: retention has dropped the messages from index %d to %d, %d bytes",
                    dropped.path, dropped.base_index, segments[0].base_index - 1, dropped.end,
                )  # fmt: skip
                self._damage = {place: it for place, it in self._damage.items() if place[0] >= self.first_index}
                await run(threads, sync_folder, self._folder)
        except OSError as e:
            logger.warning("%s: retention has stopped: %s", self._folder, e)
        finally:
            self._reader.leaving = None

    async def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if self._flush_due is not None:
            self._flush_due.cancel()
        closing = Closing(self._writer, asyncio.get_running_loop().create_future())
        self._shared.committer().queue.put(closing)
        self._reader.close()
        await self.trimming_rests()
        await closing.closed
