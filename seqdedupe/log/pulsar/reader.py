"""A topic's entries in order: the existing ones, then new ones as they arrive."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from seqdedupe.entry_properties import BATCH, CONTROL, KIND
from seqdedupe.errors import DamagedError, error
from seqdedupe.format import records
from seqdedupe.format.headers import BATCH_TAG, CONTROL_TAG, MARKER_BYTES, MARKER_TAG, NO_KEY, header, marker_body
from seqdedupe.format.layout import RECORD_END, ROWS
from seqdedupe.log.contract import Entries, Run, Runs
from seqdedupe.log.pulsar.entries import (
    PulsarEntry,
    Rows,
    check_earlier,
    control_body,
    damaged,
    encoded_part,
    read_marker,
)
from seqdedupe.log.pulsar.ledgers import Ledgers
from seqdedupe.log.pulsar.places import STEP_BYTES, Point, begins_record, size_of
from seqdedupe.log.pulsar.terms import Terms, TermVerdict, gap
from seqdedupe.message_id import NOWHERE, MessageId


class ReadsEntries(Protocol):
    """A reader of a topic's entries: `broker_wire.TopicReader` describes the methods."""

    async def read(self) -> list[PulsarEntry]: ...

    async def is_at_end(self) -> bool: ...

    async def close(self) -> None: ...


# -- From a Pulsar topic's entries to stored records: all other code here reads those.


class Collector:
    """Collects the valid entries among the entries added, in the topic's order.

    If the rows of a batch are separate entries, they become one record again. A packed batch is one record already. If
    reading begins within a batch, or the batch's owner has ended within it, the record contains only the rows that were
    read.
    """

    def __init__(self, terms: Terms, publish_time_ms: int = 0) -> None:
        """Make a collector. `publish_time_ms` is the publish time of the previous record. No later record has an
        earlier time."""
        self.terms = terms
        self.earlier: dict[str, int] = {}
        """The highest sequence ID of each producer that published before the first marker, as far as its entries have
        one: `terms.counts.earlier` counts all entries."""
        self._publish_time_ms = publish_time_ms
        self._records: list[bytes] = []
        self._runs: list[Runs] = []
        self._first_index = self._index = terms.next_index
        self._owner = terms.owner
        self._rows = Rows()
        self._row_runs: list[Run] = []

    def __len__(self) -> int:
        """Return the number of records that `take` would return."""
        return len(self._records) + (len(self._rows) > 0)

    def add(self, entry: PulsarEntry) -> TermVerdict:
        """Judge the next entry, and collect it if it is valid. Raises as `Terms.judge`."""
        verdict = self.terms.judge(entry.message, entry.message_id)
        if verdict is TermVerdict.VALID:
            kind = entry.message.properties.get(KIND)
            if kind is None:
                self._add_row(entry)
            else:
                self._end_rows()
                self._publish_time_ms = max(self._publish_time_ms, entry.message.event_time_ms or entry.publish_time_ms)
                self._add_record(kind, entry)
        elif verdict is TermVerdict.EARLIER:
            self._add_earlier(entry)
        return verdict

    def _add_earlier(self, entry: PulsarEntry) -> None:
        name = entry.producer_name
        check_earlier(entry)
        if name and entry.sequence_id >= 0:
            self.earlier[name] = max(entry.sequence_id, self.earlier.get(name, -1))

    async def add_over_borders(self, entry: PulsarEntry, ledgers: Callable[[], Awaitable[Ledgers]]) -> TermVerdict:
        """Do the same as `add`. If an entry seems to be missing, use the topic's ledgers to check whether every
        position was read."""
        try:
            return self.add(entry)
        except DamagedError as e:
            borders = self.terms.borders
            if e.reason != "LOG_GAP" or not borders:
                raise
            there = await ledgers()
            if not all(there.are_neighbours(*border) for border in borders):
                raise
            borders.clear()
        return self.add(entry)

    def take(self) -> Entries | None:
        """Return the data collected since the last call; None if there is no data. Raises LOG_DAMAGED, NEWER_FORMAT."""
        self._end_rows()
        if not self._records:
            return None
        several, runs, first_index = self._records, self._runs, self._first_index
        self._records, self._runs, self._first_index = [], [], self._index
        raw, table, result = b"".join(several), records.new_table(len(several)), records.new_result()
        view = np.frombuffer(raw, np.uint8)
        why = records.scan(view, self.terms.owner.incarnation, -1, first_index, NO_KEY, table, result)
        # A packed payload must be one record, and agree with its properties.
        if (
            why != records.END
            or table[:, RECORD_END].tolist() != list(accumulate(map(len, several)))
            or table[:, ROWS].tolist() != [sum(run.rows for run in each) for each in runs]
            or records.first_bad_payload(view, table, len(table)) >= 0
        ):
            raise damaged(f"among the entries from index {first_index} to {self._index} one is not intact")
        return Entries(raw, table, runs)

    def _add_row(self, entry: PulsarEntry) -> None:
        if not self._rows.add(entry.message):
            self._end_rows()
            self._rows.add(entry.message)
        ledger_id, entry_id, _ = entry.message_id
        if len(self._rows) == 1:
            self._publish_time_ms = max(self._publish_time_ms, entry.publish_time_ms)
            self._row_runs.append(Run(1, ledger_id, entry_id))
            return
        last = self._row_runs[-1]
        if (last.ledger_id, last.entry_id + last.rows) == (ledger_id, entry_id):
            self._row_runs[-1] = last._replace(rows=last.rows + 1)
        else:
            self._row_runs.append(Run(1, ledger_id, entry_id))

    def _end_rows(self) -> None:
        """Turn the collected rows into a record."""
        if not len(self._rows):
            return
        part = encoded_part(self._rows.batch())
        self._records.append(self._headed(BATCH_TAG, part.encoded, part.rows, part.column_bytes))
        self._runs.append(tuple(self._row_runs))
        self._index += part.rows
        self._rows, self._row_runs = Rows(), []

    def _add_record(self, kind: str, entry: PulsarEntry) -> None:
        """Add an entry that is a record alone."""
        runs: Runs = ()
        if kind == BATCH:
            runs = (Run(self.terms.next_index - self._index, entry.message_id.ledger_id, entry.message_id.entry_id, 0),)
            record = entry.message.payload or b""
        elif kind == CONTROL:
            body = control_body(entry.message)
            record = self._headed(CONTROL_TAG, body, 0, len(body))
        else:
            self._owner = self.terms.owner
            marker = read_marker(entry.message, self._owner)
            record = self._headed(MARKER_TAG, marker_body(marker.term, marker.token), 0, MARKER_BYTES)
        self._records.append(record)
        self._runs.append(runs)
        self._index = self.terms.next_index

    def _headed(self, tag: int, body: bytes, rows: int, column_bytes: int) -> bytes:
        """Return the stored record with this body at the present place. The record is in no file, so it has no file
        offsets."""
        made = header(
            body,
            tag,
            rows=rows,
            column_bytes=column_bytes,
            incarnation=self._owner.incarnation,
            file_offset=0,
            base_index=self._index,
            publish_time_ms=self._publish_time_ms,
            synced_offset=0,
            ownership=self._owner.ownership,
            key=NO_KEY,
        )
        return made + body


# -- A reader of a topic, with the knowledge about its place. It judges and collects entries, one step at a time.

READ_TIMEOUT_SECONDS = 30.0
"""The time within which an existing entry arrives, unless Pulsar is in trouble."""
KEPT_TIMEOUT_SECONDS = 3.0
"""The same for a reader that was kept: it may wait long before it connects again, and a new reader connects at once."""
LOOK_SECONDS = 1.0
"""If the broker says that there is more, and nothing comes for this time, the admin URL is asked what there is."""

_NOT_COMING = (
    "See whether the Pulsar cluster serves. If the sidecar's role may not get single entries from the admin URL, the "
    "topic may end with entries that no reader gets: pulsar-admin topics unload TOPIC. It is tried again."
)


async def read_existing(
    reader: ReadsEntries, topic: str, timeout_seconds: float = READ_TIMEOUT_SECONDS
) -> list[PulsarEntry]:
    """Return the next entries of a reader, of which at least one must exist. If this is cancelled, no entry is lost.

    Raises LOG_UNREADABLE, also if no entry comes within this time.
    """
    try:
        async with asyncio.timeout(timeout_seconds):
            return await reader.read()
    except TimeoutError as e:
        why = f"an entry that should be there did not come for {timeout_seconds:.0f} s"
        raise error("LOG_UNREADABLE", f"{topic}: {why}", hint=_NOT_COMING) from e


Hear = Callable[[PulsarEntry, TermVerdict, Point], None]
"""Called with each entry, the verdict on it, and the point after it."""
FindEnd = Callable[[MessageId], Awaitable[MessageId | None]]
"""Returns the topic's last entry if no reader gets an entry after the given one; None if one does, or it is not
known."""


class ReaderStep(NamedTuple):
    """The entries between two points."""

    start: Point
    end: Point
    entries: Entries | None
    """The valid entries; None if there are none."""

    @property
    def is_full(self) -> bool:
        """Whether the step ended because of its size."""
        return self.end.size_bytes - self.start.size_bytes >= STEP_BYTES


class LogScan:
    """Continues to read from a point. After an error or a cancelled call, the scan can only be closed.

    The valid entry before the point must still exist. Otherwise later entries may also be missing, which is LOG_GAP.
    """

    def __init__(
        self,
        reader: ReadsEntries,
        topic: str,
        start: Point,
        ledgers: Callable[[], Awaitable[Ledgers]],
        find_end: FindEnd,
    ) -> None:
        """Make a scan. The first entry of `reader` is the valid entry before the point. `ledgers` returns the topic's
        present ledgers."""
        self.here = start
        """The point where the next step begins."""
        self.collector = Collector(Terms(start.standing, start.message_id), start.publish_time_ms)
        self.timeout_seconds = READ_TIMEOUT_SECONDS
        self.idle_since = 0.0
        self._reader = reader
        self._topic = topic
        self._ledgers = ledgers
        self._find_end = find_end
        self._due = start.message_id if start.message_id.entry_id >= 0 else None
        self._last = NOWHERE
        """The entry that was judged last, or a later one that no reader gets."""
        self._left: deque[PulsarEntry] = deque()

    async def step(self, limit: Point) -> ReaderStep:
        """Return the next entries, about STEP_BYTES, up to the limit, which must be after this point.

        Raises the errors of the collector; LOG_GAP if the topic's state at the limit differs from the known state;
        LOG_UNREADABLE.
        """
        start = self.here
        while self._last < limit.message_id:
            entry = await self._peek()
            if self._is_full(start, entry):
                return ReaderStep(start, self.here, self.collector.take())
            if entry.message_id <= limit.message_id:
                await self._judge(entry)
            else:
                break
        if self.here.standing != limit.standing:
            raise gap(f"it does not end with the entry at {limit.message_id} any more", self.here.next_index)
        return ReaderStep(start, self.here, self.collector.take())

    async def step_on(self, up_to: MessageId | None, hear: Hear) -> ReaderStep:
        """Do the same as `step`, up to an entry that may be invalid, or up to the topic's end. A step that is not full
        has reached this entry or end."""
        start = self.here
        while up_to is None or self._last < up_to:
            if up_to is None and not self._left and (await self._reader.is_at_end() or await self._gets_no_more()):
                break
            entry = await self._peek()
            if self._is_full(start, entry):
                break
            verdict = await self._judge(entry)
            if verdict is not None:
                hear(entry, verdict, self.here)
        return ReaderStep(start, self.here, self.collector.take())

    async def step_to(self, last: MessageId, hear: Callable[[PulsarEntry], None]) -> bool:
        """Judge the entries up to this one, in a topic without markers. Return false if the topic ends before: no
        reader gets the rest."""
        while self._last < last:
            if not self._left and (await self._reader.is_at_end() or await self._gets_no_more()):
                return False
            entry = await self._peek()
            if entry.message_id > last:
                break
            await self._judge(entry)
            hear(entry)
        return True

    async def _gets_no_more(self) -> bool:
        """Return whether nothing comes although the broker says that there is more. That is so for a terminated topic,
        and if the last entries are not for readers."""
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                self._left.extend(await self._reader.read())
            return False
        except TimeoutError:
            end = await self._find_end(self._last)
        if end is None:
            return False
        self._last = max(self._last, end)
        return True

    async def wait_for_more(self) -> None:
        """Wait until there is an entry that was not judged. If this is cancelled, no entry is lost."""
        while all(entry.message_id <= self._last or entry.message_id == self._due for entry in self._left):
            self._left.extend(await self._reader.read())

    def _is_full(self, start: Point, entry: PulsarEntry) -> bool:
        return self.here.size_bytes - start.size_bytes >= STEP_BYTES and begins_record(entry.message)

    async def _peek(self) -> PulsarEntry:
        """Return the next entry, which must exist. After a broker's crash some entries may be delivered again."""
        while not self._left or self._left[0].message_id <= self._last:
            if self._left:
                self._left.popleft()
                continue
            self._left.extend(await read_existing(self._reader, self._topic, self.timeout_seconds))
        return self._left[0]

    async def _judge(self, entry: PulsarEntry) -> TermVerdict | None:
        """Return the verdict on the next entry; None for the entry before the point where the scan began."""
        self._left.popleft()
        self._last = entry.message_id
        if self._due is not None:
            due, self._due = self._due, None
            if entry.message_id != due:
                raise gap(f"the entry at {due}, after which it goes on, is not there any more", self.here.next_index)
            return None
        verdict = await self.collector.add_over_borders(entry, self._ledgers)
        if verdict is TermVerdict.VALID:
            message = entry.message
            time_ms = (KIND in message.properties and message.event_time_ms) or entry.publish_time_ms
            standing = self.collector.terms.standing
            self.here = self.here.after(standing, entry.message_id, time_ms, time_ms, size_of(message))
        return verdict

    async def close(self) -> None:
        """Close the reader."""
        await self._reader.close()
