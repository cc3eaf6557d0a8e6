"""The entries of a topic: continuing to read at the topic's end, and reading from any place."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import NamedTuple

import numpy as np

from seqdedupe.batch import Int32s, Int64s
from seqdedupe.entry_properties import BATCH, ENTRY, KIND, EntryOwner, EntryPlace
from seqdedupe.errors import DamagedError, SeqdedupeError, UnavailableError, error
from seqdedupe.format import records
from seqdedupe.format.layout import BASE_INDEX, PUBLISH_TIME_MS, RECORD_END, RECORD_START, ROWS
from seqdedupe.log.contract import ANY_BYTES, Entries, LargerRecordError, Location, Records, Runs
from seqdedupe.log.pulsar.entries import PulsarEntry, PulsarMessage
from seqdedupe.log.pulsar.ledgers import Ledgers
from seqdedupe.log.pulsar.places import Places, Point, begins_record, is_batch, size_of
from seqdedupe.log.pulsar.reader import (
    KEPT_TIMEOUT_SECONDS,
    FindEnd,
    LogScan,
    ReaderStep,
    ReadsEntries,
    read_existing,
)
from seqdedupe.log.pulsar.terms import Counts, Terms, TermStanding, TermVerdict
from seqdedupe.message_id import NOWHERE, MessageId

# -- The state kept for readers that continue: cursors where a reader stopped, and the newest steps.

KEPT_CURSORS = 4
"""The maximum number of unused cursors that are kept."""
IDLE_SECONDS = 30.0
"""A cursor that nobody has used for this time is closed."""
MAX_READING = 8
"""The maximum number of cursors in use. A further reader waits until another reader has finished a step."""
KEPT_STEPS = 64
KEPT_BYTES = 4 * 1024 * 1024
"""The maximum size of all kept steps together. The newest step is kept whatever its size."""

OpenReader = Callable[[MessageId | None], Awaitable[ReadsEntries]]
"""Opens a reader of the topic that begins with the entry at a place, or with the first one."""


class KeptReaders:
    """The readers of one topic. At the topic's beginning, a reader begins with the entry `begins_at()`."""

    def __init__(
        self,
        open_reader: OpenReader,
        topic: str,
        ledgers: Callable[[], Awaitable[Ledgers]],
        find_end: FindEnd,
        begins_at: Callable[[], MessageId | None],
    ) -> None:
        self._begins_at = begins_at
        self._find_end = find_end
        self._open_reader = open_reader
        self._topic = topic
        self._ledgers = ledgers
        self._idle: deque[LogScan] = deque()
        self._steps: deque[ReaderStep] = deque(maxlen=KEPT_STEPS)
        self._reading = asyncio.Semaphore(MAX_READING)
        self._closing: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def nearest(self, index: int, point: Point) -> Point:
        """Return the latest point from which reading can continue: not before `point`, and not after the message with
        this index. If a kept step contains the message, return the beginning of that step."""
        for step in reversed(self._steps):
            if step.start.next_index <= index < step.end.next_index:
                return step.start
        points = [point, *(step.end for step in self._steps), *(cursor.here for cursor in self._idle)]
        return max((one for one in points if one.next_index <= index), key=lambda one: one.size_bytes, default=point)

    async def step(self, here: Point, limit: Point) -> ReaderStep:
        """Return the step that begins here. Raises the errors of `LogScan.step`."""
        for step in self._steps:
            if step.start.size_bytes == here.size_bytes:
                return step
        if any(cursor.here.size_bytes == here.size_bytes for cursor in self._idle):
            try:
                return await self._read(here, limit)
            except UnavailableError:
                # Its connection may be lost, and not restored yet.
                pass
        return await self._read(here, limit)

    async def _read(self, here: Point, limit: Point) -> ReaderStep:
        async with self.cursor(here) as cursor:
            return self.keep(await cursor.step(limit))

    def keep(self, step: ReaderStep) -> ReaderStep:
        """Keep a step, and return it."""
        if step.entries is not None:
            self._steps.append(step)
            size_bytes = sum(len(each.entries.raw) for each in self._steps if each.entries)
            while size_bytes > KEPT_BYTES and len(self._steps) > 1:
                oldest = self._steps.popleft().entries
                size_bytes -= len(oldest.raw) if oldest else 0
        return step

    @asynccontextmanager
    async def cursor(self, here: Point, *, keeps: bool = True) -> AsyncIterator[LogScan]:
        """Yield a cursor at this place: a kept cursor, otherwise a new cursor. With `keeps`, the cursor is kept after
        the block, unless the block raises an error."""
        async with self._reading:
            cursor = await self._taken(here)
            try:
                yield cursor
            except BaseException:
                self._close(cursor)
                raise
            if keeps:
                self._put_back(cursor)
            else:
                self._close(cursor)

    async def _taken(self, here: Point) -> LogScan:
        cursor = next((each for each in self._idle if each.here.size_bytes == here.size_bytes), None)
        if cursor is not None:
            self._idle.remove(cursor)
            return cursor
        start = here.message_id if here.message_id.entry_id >= 0 else self._begins_at()
        reader = await self._open_reader(start)
        return LogScan(reader, self._topic, here, self._ledgers, self._find_end)

    async def entries(self, first: MessageId, last: MessageId) -> AsyncGenerator[PulsarEntry, None]:
        """Yield the entries from a place to a later entry, which exists. The caller reads to the end, or closes this.

        Raises LOG_UNREADABLE.
        """
        reader = await self._open_reader(first)
        try:
            while True:
                for entry in await read_existing(reader, self._topic):
                    if entry.message_id <= last:
                        yield entry
                    if entry.message_id >= last:
                        return
        finally:
            await reader.close()

    async def wait_for_more(self, here: Point) -> None:
        """Wait until there is an entry after this place. If the wait is cancelled, the next caller gets the reader.

        Raises LOG_UNREADABLE.
        """
        cursor = await self._taken(here)
        try:
            await cursor.wait_for_more()
        except UnavailableError:
            self._close(cursor)
            raise
        except BaseException:
            self._put_back(cursor)
            raise
        self._put_back(cursor)

    def _put_back(self, cursor: LogScan) -> None:
        now = asyncio.get_running_loop().time()
        cursor.timeout_seconds, cursor.idle_since = KEPT_TIMEOUT_SECONDS, now
        self._idle.append(cursor)
        if len(self._idle) > KEPT_CURSORS or self._is_closed:
            self._close(self._idle.popleft())
        self._start_timer(now)

    def _start_timer(self, now: float) -> None:
        if self._timer is None and self._idle:
            left = self._idle[0].idle_since + IDLE_SECONDS - now
            self._timer = asyncio.get_running_loop().call_later(max(left, 0.0), self._close_idle)

    def _close_idle(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        while self._idle and self._idle[0].idle_since + IDLE_SECONDS <= now:
            self._close(self._idle.popleft())
        self._start_timer(now)

    def _close(self, cursor: LogScan) -> None:
        task = asyncio.get_running_loop().create_task(cursor.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all readers. A reader in use is closed when its step ends."""
        self._is_closed = True
        self._steps.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._idle:
            self._close(self._idle.popleft())
        if self._closing:
            await asyncio.wait(self._closing)


logger = logging.getLogger("seqdedupe.log")


class FoundEntry(NamedTuple):
    """A valid entry that was read."""

    after: Point
    runs: Runs
    """The message IDs of its messages."""

    @property
    def owner(self) -> EntryOwner:
        """The owner of the entry."""
        return self.after.standing.owner


class Beginning:
    """A message that may be the first stored message of a topic, and the entries after it as judged from there.

    An entry says which place its owner gave it, but not whether the entry is valid. It is valid if its owner still had
    the topic (`Candidates`), and if judging from there leads to a point that is known to be valid.
    """

    def __init__(self, place: EntryPlace, message_id: MessageId) -> None:
        self.message_id = message_id
        self.standing = TermStanding(*place[:3])
        """The standing before the message."""
        self.size_bytes = 0
        """The counted size of the valid entries."""
        self._terms = Terms(self.standing)

    @property
    def end(self) -> TermStanding:
        """The standing after the last entry."""
        return self._terms.standing

    def add(self, entry: PulsarEntry) -> bool:
        """Judge the next entry; the first is the message itself. Return whether it can be there."""
        try:
            is_valid = self._terms.judge(entry.message, entry.message_id) is TermVerdict.VALID
        except SeqdedupeError:
            return False
        self.size_bytes += size_of(entry.message) if is_valid else 0
        return True


MAX_BEGINNINGS = 8
"""The most messages that are tried at the same time as the first stored message."""
MAX_BEGINNING_BYTES = 64 * 1024 * 1024
"""The most bytes read to find the first stored message: a second or two. If the first point is further away, the topic
begins at that point."""


class Candidates:
    """Finds the first message of each owner that certainly had the topic at that message.

    Another owner may have replaced the owner before the first stored entry, and its messages may have had the same
    indexes. That is impossible for the owner of a later point, and for an owner whose marker is stored: an owner writes
    messages only if its marker has taken ownership.
    """

    def __init__(self, owner: EntryOwner) -> None:
        """Begin before the first stored entry. `owner` is the owner at a later point."""
        self._certain, self._highest_term = {owner}, 0

    def place_of(self, entry: PulsarEntry) -> EntryPlace | None:
        """Return the place of the next entry if it is such a message."""
        properties = entry.message.properties
        place: EntryPlace | None = None
        with suppress(SeqdedupeError):
            place = EntryPlace.parse(properties.get(ENTRY, ""))
        if place is None or place.owner.term < self._highest_term:
            return None
        self._highest_term = place.owner.term
        if place.number == 0:
            self._certain.add(place.owner)
        elif place.owner in self._certain and is_message(entry.message):
            self._certain.remove(place.owner)
            return place
        return None


def is_message(message: PulsarMessage) -> bool:
    """Return whether an entry of ours has messages and begins a record."""
    return message.properties.get(KIND) in (None, BATCH) and begins_record(message)


class Content:
    """A topic as its readers see it. Reading ends at `limit`, a point that `places` knows.

    Methods that `seqdedupe.log.contract.Log` also has behave as described there.
    """

    def __init__(
        self,
        open_reader: OpenReader,
        topic: str,
        points: Sequence[Point],
        limit: Callable[[], Point],
        first_ledger: Callable[[], Awaitable[int]],
        ledgers: Callable[[], Awaitable[Ledgers]],
        find_end: FindEnd,
        earlier: Mapping[str, int],
        begins_at: MessageId | None,
    ) -> None:
        """Make the content. The topic begins at the first of the points, and is known up to the last point. `earlier`
        and `begins_at`: see `PulsarLog`."""
        self.places = Places(points, begins_at)
        self._read_earlier: Mapping[str, int] = {}
        """As `earlier`, of the entries that were read."""
        self.counts = Counts()
        """The entries read at the end. Entries that an owner knows by their receipts are not counted."""
        self.marked_address = ""
        """The address of the last owner, according to its marker, if that marker was read."""
        self._known_earlier = earlier
        self._topic = topic
        self._limit = limit
        self._first_ledger = first_ledger
        self.needed = points[-1]
        """Before this point there are only old messages."""
        self._kept = KeptReaders(open_reader, topic, ledgers, find_end, lambda: self.places.begins_at)
        self._reading_on = asyncio.Lock()
        self._finding_left = asyncio.Lock()
        self._left: tuple[int, Point] | None = None
        """The first ledger for which the beginning was found last, and that beginning."""
        self._covered_index = points[-1].next_index

    @property
    def earlier(self) -> dict[str, int]:
        """The highest sequence ID of each producer that published before the first marker. It is known after the
        beginning was read."""
        return _higher(self._read_earlier, self._known_earlier)

    # At the end.

    async def begin(self, covered_index: int) -> None:
        """Read the few entries, if any, that a snapshot covers after its last point.

        Raises NO_STATE if the topic does not continue from this point, LOG_DAMAGED if the topic ends before this index.
        """
        self._covered_index = covered_index
        while (await self._read_on(None, [])).is_full and self.places.end.next_index < covered_index:
            pass
        if self.places.end.next_index < covered_index:
            raise error(
                "LOG_GAP" if self.counts.holes else "LOG_DAMAGED",
                f"{self._topic} ends before index {self.places.end.next_index}, but a snapshot covers it up to "
                f"{covered_index}: its end is gone",
                index=self.places.end.next_index,
            )

    async def read_on(self, up_to: MessageId, *, within_batches: bool = False) -> list[FoundEntry]:
        """Judge the entries after the known end up to this entry, and return the valid entries. The known end is then
        after these entries, also if this method raises an error."""
        found: list[FoundEntry] = []
        # A cursor that begins or ends within a batch would not read the same records as other readers.
        while (await self._read_on(up_to, found, keeps=not within_batches)).is_full:
            pass
        return found

    async def _read_on(self, up_to: MessageId | None, found: list[FoundEntry], *, keeps: bool = True) -> ReaderStep:
        """Read a step from the known end on."""

        def hear(entry: PulsarEntry, verdict: TermVerdict, after: Point) -> None:
            self.counts.add(verdict)
            if verdict is TermVerdict.VALID:
                message = entry.message
                runs = self.places.advance(after, begins_record=begins_record(message), is_batch=is_batch(message))
                found.append(FoundEntry(after, runs))

        async with self._reading_on:
            start = self.places.end
            try:
                async with self._kept.cursor(start, keeps=keeps) as cursor:
                    counts = cursor.collector.terms.counts
                    holes = counts.holes
                    if not start.standing.owner.term:
                        # It grows with what is read, also if the step fails behind the first marker: the next one
                        # begins there.
                        self._read_earlier = cursor.collector.earlier
                    step = await cursor.step_on(up_to, hear)
                    if counts.holes > holes:
                        self.counts.holes += counts.holes - holes
                        logger.warning(
                            "%s: before index %d Pulsar has refused an entry of its owner and stored later ones, which "
                            "are void: none of them was acknowledged",
                            self._topic,
                            self.places.end.next_index,
                        )
                    if (marker := cursor.collector.terms.marker) is not None:
                        self.marked_address = marker.settings.address
            except DamagedError as e:
                if e.reason != "LOG_GAP" or self.places.end.next_index > self._covered_index:
                    raise
                why = f"{self._topic} does not go on from index {self._covered_index}, up to which there is a snapshot"
                raise error("NO_STATE", f"{why}: {e.message}", index=self._covered_index) from e
            return self._kept.keep(step) if keeps else step

    async def wait_for_more(self) -> None:
        """Wait until there is an entry after the known end."""
        await self._kept.wait_for_more(self.places.end)

    # At the beginning.

    async def left(self, first_ledger_id: int) -> Point:
        """Return the point where the topic begins if all ledgers before this ledger are removed: before the first
        message that is stored, even if no point was known there. Raises LOG_UNREADABLE."""
        # Many readers may find at the same time that entries are missing.
        async with self._finding_left:
            known = self.places.left(first_ledger_id)
            if known is self.places.first or known.message_id.ledger_id < first_ledger_id:
                return known
            if self._left is None or self._left[0] != first_ledger_id:
                self._left = first_ledger_id, await self._beginning(first_ledger_id, known) or known
            return self._left[1]

    async def _beginning(self, first_ledger_id: int, known: Point) -> Point | None:
        """Return the point before the first stored message that leads to a known point."""
        before = self.places.before(known)
        found, candidates, read_bytes = list[Beginning](), Candidates(known.standing.owner), 0
        async with aclosing(self._kept.entries(MessageId(first_ledger_id, 0), known.message_id)) as entries:
            async for entry in entries:
                read_bytes += size_of(entry.message)
                if read_bytes > MAX_BEGINNING_BYTES:
                    return None
                if len(found) < MAX_BEGINNINGS and (place := candidates.place_of(entry)) is not None:
                    found.append(Beginning(place, entry.message_id))
                found = [one for one in found if one.add(entry)]
        for one in found:
            if one.end == known.standing and one.standing.next_index < known.next_index:
                message_id = MessageId(one.message_id.ledger_id, NOWHERE.entry_id)
                times = before.publish_time_ms, before.at_latest_ms
                return Point(one.standing, message_id, *times, known.size_bytes - one.size_bytes)
        return None

    # Anywhere.

    def check_is_there(self, index: int, *, at_end: bool) -> None:
        """Raise POSITION_TRIMMED or POSITION_AFTER_END unless the index is there."""
        first_index, next_index = self.places.first.next_index, self._limit().next_index
        if index < first_index:
            raise self._trimmed(index)
        if index > next_index or (index == next_index and not at_end):
            raise error("POSITION_AFTER_END", f"index {index} is after the end, {next_index} is the next")

    def _trimmed(self, index: int) -> SeqdedupeError:
        first_index = self.places.first.next_index
        why = f"{self._topic} begins with index {first_index}: what stands at index {index} and before is gone"
        return error("POSITION_TRIMMED", why, first_index=first_index)

    def _from(self, index: int) -> Point:
        """Return a point, not after the message with this index, from which to read."""
        return self._kept.nearest(index, self.places.at(index))

    async def _steps(self, here: Point, index: int) -> AsyncGenerator[ReaderStep, None]:
        """Yield the steps up to the present limit, for a caller that needs the messages from this index on. The caller
        need not close this."""
        limit = self._limit()
        while here.size_bytes < limit.size_bytes:
            try:
                step = await self._kept.step(here, limit)
            except DamagedError as e:
                if e.reason != "LOG_GAP" or (left := await self._removed_to(here)) is None:
                    raise
                if left.next_index > index:
                    raise self._trimmed(here.next_index) from e
                here = left
                continue
            here = step.end
            index = max(index, here.next_index)
            self.places.learn(here)
            yield step

    async def _removed_to(self, here: Point) -> Point | None:
        """Return where the topic begins now, if Pulsar was allowed to remove the entries missing from here on."""
        left = await self.left(await self._first_ledger())
        is_after = here.size_bytes <= left.size_bytes and here.message_id != left.message_id
        if is_after and left.size_bytes <= self.needed.size_bytes:
            self.places.trim(left)
            return left
        return None

    async def replay(self, from_index: int, *, reads_on: bool) -> AsyncGenerator[Entries, None]:
        """Yield the entries up to the limit. With `reads_on`, continue to the topic's end; afterwards the end is known.

        Also raises NO_STATE if Pulsar has removed entries after the known end, so that only other sidecars know these
        entries.
        """
        try:
            async for entries in self._replay(from_index, reads_on=reads_on):
                yield entries
        except DamagedError as e:
            end = self.places.end
            if e.reason != "LOG_GAP" or await self._first_ledger() <= end.message_id.ledger_id:
                raise
            why = f"{self._topic} does not go on from index {end.next_index}, up to which it is known here"
            raise error("NO_STATE", f"{why}: {e.message}", index=end.next_index) from e

    async def _replay(self, from_index: int, *, reads_on: bool) -> AsyncGenerator[Entries, None]:
        self.check_is_there(from_index, at_end=True)
        at_end = from_index == self._limit().next_index
        has_begun = from_index == self.places.first.next_index
        here = self.places.first if has_begun else self._from(from_index - at_end)
        reads_on_once_more = reads_on
        while True:
            async for step in self._steps(here, from_index):
                here = step.end
                if (entries := step.entries) is None:
                    continue
                if not has_begun:
                    ends = entries.table[:, BASE_INDEX] + (0 if at_end else entries.table[:, ROWS] - 1)
                    begins = np.flatnonzero(ends >= from_index)
                    if not len(begins):
                        continue
                    has_begun, k = True, int(begins[0])
                    entries = Entries(entries.raw, entries.table[k:], entries.runs[k:])
                yield entries
            if not reads_on_once_more:
                return
            # The entries read here are kept, and come as a step.
            reads_on_once_more = (await self._read_on(None, [])).is_full

    async def read(self, from_index: int, stop_index: int, max_bytes: int, most_bytes: int = ANY_BYTES) -> Records:
        self.check_is_there(from_index, at_end=False)
        raw: list[bytes] = []
        runs: list[Runs] = []
        left = max_bytes
        async for step in self._steps(self._from(from_index), from_index):
            for record, places, its_runs in _batches(step):
                if places[BASE_INDEX] + places[ROWS] <= from_index:
                    continue
                left -= len(record)
                if places[BASE_INDEX] >= stop_index or (raw and left < 0):
                    return Records(b"".join(raw), runs)
                if len(record) > most_bytes:
                    raise LargerRecordError(len(record))
                raw.append(record)
                runs.append(its_runs)
            if raw and (left <= 0 or step.end.next_index >= stop_index):
                break
        return Records(b"".join(raw), runs)

    def next_readable(self, from_index: int) -> int:
        """Return this index itself: damage in a topic stops every reader, and cannot be skipped."""
        self.check_is_there(from_index, at_end=True)
        return from_index

    async def locate_time(self, publish_time_ms: int, stop_index: int) -> int:
        here = self.places.before_time(publish_time_ms)
        async for step in self._steps(here, here.next_index):
            for _, places, _ in _batches(step):
                if places[PUBLISH_TIME_MS] >= publish_time_ms:
                    return min(int(places[BASE_INDEX]), stop_index)
            if step.end.next_index >= stop_index:
                break
        return stop_index

    async def locate_bytes(self, from_index: int, size_bytes: int, stop_index: int) -> int:
        step = await self._step_with(from_index)
        before = sum(len(r) for r, p, _ in _batches(step) if p[BASE_INDEX] + p[ROWS] <= from_index)
        wanted = step.start.size_bytes + before + size_bytes
        here = self.places.at_size(wanted)
        async for step in self._steps(here, here.next_index):
            reached = step.start.size_bytes
            for record, places, _ in _batches(step):
                reached += len(record)
                if reached >= wanted and places[BASE_INDEX] + places[ROWS] > from_index:
                    return min(int(places[BASE_INDEX] + places[ROWS]), stop_index)
            if step.end.next_index >= stop_index:
                break
        return stop_index

    async def _step_with(self, index: int) -> ReaderStep:
        """Return the step that holds this message, which exists."""
        async for step in self._steps(self._from(index), index):
            if index < step.end.next_index:
                return step
        raise error("INTERNAL", f"{self._topic}: message {index} is not where it was")

    async def locate(self, index: int) -> Location:
        self.check_is_there(index, at_end=False)
        for _, places, runs in _batches(await self._step_with(index)):
            row = index - int(places[BASE_INDEX])
            for run in runs:
                if 0 <= row < run.rows:
                    return Location(run.message_id(row), records.ownership(places))
                row -= run.rows
        raise error("INTERNAL", f"{self._topic}: message {index} is not in its step")

    def known_message_ids(self, indexes: Int64s) -> tuple[Int64s, Int64s, Int32s]:
        found = [self.places.recent(index) or NOWHERE for index in indexes.tolist()]
        ledgers, entry_ids, batch_indexes = np.array(found, np.int64).reshape(-1, 3).T
        return ledgers, entry_ids, batch_indexes.astype(np.int32)

    async def close(self) -> None:
        """Close all readers."""
        await self._kept.close()


def _higher(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Return the higher number of each name."""
    return {name: max(one.get(name, -1), other.get(name, -1)) for name in {**one, **other}}


def _batches(step: ReaderStep) -> list[tuple[bytes, Int64s, Runs]]:
    """Return the records of batches in a step, with places and message IDs."""
    if step.entries is None:
        return []
    raw, table, several = step.entries.raw, step.entries.table, step.entries.runs
    return [
        (raw[places[RECORD_START] : places[RECORD_END]], places, runs)
        for places, runs in zip(table, several, strict=True)
        if runs
    ]
