"""A topic's entries in order: the existing ones, then new ones as they arrive."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import pulsar
import pulsar.asyncio

from seqdedupe.entry_properties import BATCH, CONTROL, ENTRY, KIND
from seqdedupe.errors import DamagedError, SeqdedupeError, UnavailableError, error
from seqdedupe.format import records
from seqdedupe.format.columns import RECORD_END, ROWS
from seqdedupe.format.headers import BATCH_TAG, CONTROL_TAG, MARKER_BYTES, MARKER_TAG, NO_KEY, header, marker_body
from seqdedupe.limits import MAX_SEQUENCE_ID
from seqdedupe.log.contract import Entries, Run, Runs
from seqdedupe.log.pulsar.entries import (
    PulsarEntry,
    PulsarMessage,
    Rows,
    check_earlier,
    content_bytes,
    control_body,
    damaged,
    encoded_part,
    is_of_sidecar,
    read_marker,
)
from seqdedupe.log.pulsar.ledgers import Ledgers
from seqdedupe.log.pulsar.places import STEP_BYTES, Point, begins_record, size_of
from seqdedupe.log.pulsar.pulsar_client import opened, told
from seqdedupe.log.pulsar.terms import Terms, TermVerdict, gap
from seqdedupe.message_id import NOWHERE, MessageId

READ_STEP_ENTRIES = 500
"""The most entries that are taken in one step: a few milliseconds of the event loop."""
READ_STEP_BYTES = 256 * 1024
"""After this number of payload bytes a step takes no more entries."""
OPEN_TIMEOUTS_SECONDS = (2.0, 4.0)
"""The opening of a reader while its topic is unloaded ends with the client's own time-out. Another reader is opened at
once."""
_AT_ONCE_MS = 0
_LEDGER, _ENTRY, _BATCH_SIZE, _FIRST_CHUNK = 1, 2, 6, 7
"""Field numbers of Pulsar's `MessageIdData`."""
_FIXED_SIZES = {1: 8, 5: 4}
"""The sizes of fields with these wire types of protobuf."""


class ReadsEntries(Protocol):
    """A reader of a topic's entries, with the methods of `EntryReader`."""

    async def read(self) -> list[PulsarEntry]: ...

    async def is_at_end(self) -> bool: ...

    async def close(self) -> None: ...


class EntryReader:
    """Reads from one place on, until it is closed. All methods are called on one event loop.

    Entries that Pulsar has trimmed are skipped silently. After a broker's crash, entries may be delivered again. So the
    caller must check numbers and indexes (`Terms`).
    """

    def __init__(self, reader: Any) -> None:
        """Make the reader, for `open_reader`."""
        self._reader = reader
        self._next: asyncio.Future[Any] | None = None

    async def read(self) -> list[PulsarEntry]:
        """Return the next entries, at least one. This waits for the first. Nothing is lost if it is cancelled.

        Raises LOG_UNREADABLE: then a new reader is needed.
        """
        # A message that arrives when no caller waits any more would be lost.
        if self._next is None:
            self._next = asyncio.ensure_future(self._reader.read_next())
        try:
            message = await asyncio.shield(self._next)
        except pulsar.asyncio.PulsarException as e:
            self._next = None
            raise _unreadable(self._reader.topic(), e) from e
        self._next = None
        entries = [_entry(message._message)]
        size_bytes = 0
        while len(entries) < READ_STEP_ENTRIES and size_bytes < READ_STEP_BYTES:
            size_bytes += content_bytes(entries[-1].message)
            # The layer below the client's reader for event loops, which wakes the loop for every message.
            try:
                entries.append(_entry(self._reader._reader.read_next(_AT_ONCE_MS)))
            except pulsar.PulsarException:
                # No entry is there yet. Any other failure shows in the next wait.
                break
        if len(entries) > 1 and entries[1].message_id < entries[0].message_id:
            # Pulsar's client passes an entry to a waiting caller even while it still queues the entry before. That
            # happens if the earlier entry was received when no caller waited yet.
            entries[:2] = entries[1], entries[0]
        return entries

    async def is_at_end(self) -> bool:
        """Return whether there are no more entries now. Not while a caller waits in `read`. Raises LOG_UNREADABLE."""
        try:
            has_more = await self._reader.has_message_available()
        except pulsar.asyncio.PulsarException as e:
            raise _unreadable(self._reader.topic(), e) from e
        # An entry may have arrived for a caller that was cancelled.
        return not (has_more or (self._next is not None and self._next.done()))

    async def close(self) -> None:
        """Close the reader. A caller that waits in `read` gets LOG_UNREADABLE."""
        # On an error the broker has closed the reader, or will when the connection ends.
        with suppress(pulsar.asyncio.PulsarException):
            await self._reader.close()
        waiting = self._next
        if waiting is not None:
            await asyncio.wait([waiting])
            # Retrieve the exception, in case no caller waits in `read`.
            waiting.exception()


async def open_reader(
    client: pulsar.asyncio.Client, topic: str, start: MessageId | None, queue_entries: int
) -> EntryReader:
    """Return a reader whose first entry is the entry at `start`. If that entry was trimmed, or `start` is None, the
    reader begins with the first stored entry.

    `queue_entries` entries of any size are fetched ahead. Raises LOG_UNREADABLE.
    """
    place = pulsar.MessageId.earliest if start is None else pulsar.MessageId(-1, *start)
    try:
        for timeout_seconds in OPEN_TIMEOUTS_SECONDS:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_seconds):
                    return EntryReader(await _opened(client, topic, place, queue_entries))
        return EntryReader(await _opened(client, topic, place, queue_entries))
    except pulsar.asyncio.PulsarException as e:
        raise _unreadable(topic, e) from e


async def _opened(client: pulsar.asyncio.Client, topic: str, place: pulsar.MessageId, queue_entries: int) -> Any:
    opening = client.create_reader(topic, place, receiver_queue_size=queue_entries, start_message_id_inclusive=True)
    return await opened(opening, lambda reader: reader._reader.close_async(lambda _: None))


def _entry(native: Any) -> PulsarEntry:
    place = native.message_id()
    try:
        properties = native.properties()
    except UnicodeDecodeError:
        # A stock producer's: those of our own entries are UTF-8.
        properties = {}
    message = PulsarMessage(
        None if native.has_null_value() else native.data(),
        properties,
        _text(native.partition_key),
        native.event_timestamp(),
    )
    message_id = MessageId(place.ledger_id(), place.entry_id(), place.batch_index())
    producer_name = _text(native.producer_name)
    if ENTRY in properties and is_of_sidecar(producer_name):
        return PulsarEntry(message, message_id, native.publish_timestamp(), producer_name)
    sequence_id = _sequence_id(native, producer_name)
    of_id = fields_of(place.serialize())
    return PulsarEntry(
        message,
        message_id,
        native.publish_timestamp(),
        producer_name,
        sequence_id,
        _batch_size(of_id) if message_id.batch_index >= 0 else 0,
        _raw(native.ordering_key),
        native.int_schema_version(),
        _first_chunk(of_id),
    )


def _text(read: Callable[[], str]) -> str:
    """Return a text of the client's, which may have bytes that are not UTF-8: clients of C++ and Go send any bytes."""
    return _raw(read).decode(errors="replace")


def _raw(read: Callable[[], str]) -> bytes:
    """Return bytes that the client takes for text. It fails if they are none."""
    try:
        return read().encode()
    except UnicodeDecodeError as e:
        return e.object


def _batch_size(of_id: Mapping[int, int | bytes]) -> int:
    """Return the number of messages in the batch of a message, by its ID: the client shows it nowhere else."""
    size = of_id.get(_BATCH_SIZE)
    if not isinstance(size, int):
        raise error("INTERNAL", f"Pulsar's client does not say of how many messages a batch is: {of_id}")
    return size


def _first_chunk(of_id: Mapping[int, int | bytes]) -> MessageId | None:
    first = of_id.get(_FIRST_CHUNK)
    if not isinstance(first, bytes):
        return None
    place = fields_of(first)
    return MessageId(int(place.get(_LEDGER, 0)), int(place.get(_ENTRY, 0)))


def fields_of(raw: bytes) -> dict[int, int | bytes]:
    """Return the fields of a protobuf message by their numbers; for a repeated field, the last one. Raises ValueError
    or IndexError if it is not a message."""
    fields: dict[int, int | bytes] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = raw[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(raw):
        tag = varint()
        if tag & 7 == 0:
            fields[tag >> 3] = varint()
            continue
        size = varint() if tag & 7 == 2 else _FIXED_SIZES[tag & 7]
        fields[tag >> 3] = raw[at : at + size]
        at += size
    if at > len(raw):
        raise ValueError("a field ends after its message")
    return fields


def _sequence_id(native: Any, producer_name: str) -> int:
    """Return the sequence ID; -1 if the client does not show it. The client has no call for that, but prints it."""
    head = f"Message(prod={producer_name}, seq="
    text = _text(native.__str__)
    digits = text[len(head) :].partition(",")[0]
    found = int(digits) if text.startswith(head) and digits.isdecimal() else -1
    # An invalid ID says nothing: no producer of the sidecar can have it.
    return found if found <= MAX_SEQUENCE_ID else -1


def _unreadable(topic: str, failure: pulsar.asyncio.PulsarException) -> SeqdedupeError:
    return error(
        "LOG_UNREADABLE",
        f"{topic} cannot be read: Pulsar's client says {told(failure)}",
        hint="See whether the Pulsar cluster serves, and whether the sidecar may read the topic; it is tried again.",
    )


# -- From a Pulsar topic's entries to stored records: all other code here reads those.


class Collector:
    """Collects the valid entries among the entries added, in the topic's order.

    If the rows of a batch are separate entries, they become one record again. A packed batch is one record already. If
    reading begins within a batch, or the batch's owner has ended within it, the record contains only the rows that were
    read.
    """

    def __init__(self, terms: Terms, publish_time_ms: int = 0) -> None:
        """Make a collector. `publish_time_ms` is the time of the record before; no record has an earlier one."""
        self.terms = terms
        self.earlier: dict[str, int] = {}
        """The highest sequence ID of each producer that published before the first marker, as far as the client shows
        them: `terms.counts.earlier` counts all entries."""
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
        """Add as `add`. If something seems to be missing, the topic's ledgers say whether every position was read."""
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
        """Return what was collected since the last call; None if there is nothing. Raises LOG_DAMAGED, NEWER_FORMAT."""
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
        """Return the stored record of this body at the present place. It has no file, and so no offsets in one."""
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

Hear = Callable[[PulsarEntry, TermVerdict, Point], None]
"""Called with each entry, the verdict on it, and the point after it."""


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
        self, reader: ReadsEntries, topic: str, start: Point, ledgers: Callable[[], Awaitable[Ledgers]]
    ) -> None:
        """Make a scan. `reader` begins with the valid entry before the point. `ledgers` returns the topic's present
        ledgers."""
        self.here = start
        """The point where the next step begins."""
        self.collector = Collector(Terms(start.standing, start.message_id), start.publish_time_ms)
        self.timeout_seconds = READ_TIMEOUT_SECONDS
        self.idle_since = 0.0
        self._reader = reader
        self._topic = topic
        self._ledgers = ledgers
        self._due = start.message_id if start.message_id.entry_id >= 0 else None
        self._last = NOWHERE
        """The entry that was judged last."""
        self._left: deque[PulsarEntry] = deque()

    async def step(self, limit: Point) -> ReaderStep:
        """Return the entries from here on, about STEP_BYTES, up to the limit, which is known to be after this point.

        Raises the errors of the collector; LOG_GAP if the limit is not as it was known; LOG_UNREADABLE.
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
        """Step in the same way, up to an entry that may be invalid, or to the topic's end. A step that is not full has
        reached it."""
        start = self.here
        while up_to is None or self._last < up_to:
            if up_to is None and not self._left and await self._reader.is_at_end():
                break
            try:
                entry = await self._peek()
            except UnavailableError:
                # For a terminated topic the broker says that there is more.
                if up_to is not None or not (await self._ledgers()).is_last(self._last):
                    raise
                break
            if self._is_full(start, entry):
                break
            verdict = await self._judge(entry)
            if verdict is not None:
                hear(entry, verdict, self.here)
        return ReaderStep(start, self.here, self.collector.take())

    async def wait_for_more(self) -> None:
        """Wait until there is an entry that was not judged. Nothing is lost if this is cancelled."""
        while all(entry.message_id <= self._last or entry.message_id == self._due for entry in self._left):
            self._left.extend(await self._reader.read())

    def _is_full(self, start: Point, entry: PulsarEntry) -> bool:
        return self.here.size_bytes - start.size_bytes >= STEP_BYTES and begins_record(entry.message)

    async def _peek(self) -> PulsarEntry:
        """Return the next entry, which must exist. After a broker's crash some entries come again."""
        while not self._left or self._left[0].message_id <= self._last:
            if self._left:
                self._left.popleft()
                continue
            try:
                async with asyncio.timeout(self.timeout_seconds):
                    self._left.extend(await self._reader.read())
            except TimeoutError as e:
                why = f"an entry that should be there did not come for {self.timeout_seconds:.0f} s"
                raise error("LOG_UNREADABLE", f"{self._topic}: {why}") from e
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
