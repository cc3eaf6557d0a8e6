"""Reading a range of a topic that no sidecar writes: every entry of it, as the topic's ledgers count them."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from seqdedupe import batch as batches
from seqdedupe.batch import NO_INT32S, NO_INT64S, Batch, Binary
from seqdedupe.client.stored import StoredBatch
from seqdedupe.errors import NotFoundError, UnavailableError, error
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.log.pulsar.entries import Entry
from seqdedupe.log.pulsar.ledgers import Ledgers
from seqdedupe.log.pulsar.places import size_of
from seqdedupe.log.pulsar.reader import Reader
from seqdedupe.message_id import MessageId, Position
from seqdedupe.message_ids import MessageIds
from seqdedupe_spark import stock
from seqdedupe_spark.cluster import task
from seqdedupe_spark.cluster.connection import Connection, next_entries
from seqdedupe_spark.cluster.task import Task
from seqdedupe_spark.ranges import Range
from seqdedupe_spark.stock import STOCK, StockEnds

ASKED_AT_ONCE = 8
"""So many entries that no reader was given are asked about at once."""


@dataclass(slots=True)
class StockBatch(StoredBatch):
    """Messages of one publish time, in which the sequence IDs of each producer rise. They have no indexes."""

    end: Position = field(default_factory=lambda: Position.start(STOCK))
    """The position after the last one."""

    def position(self, row: int) -> Position:
        return self.end if row == len(self) - 1 else stock.after(self.message_id(row))


class StockTask(Task):
    """How far a range was read. What a broker does not give readers is asked for, and is no gap only if the broker says
    why."""

    def __init__(self, span: Range, timeout_seconds: float | None) -> None:
        super().__init__(span, timeout_seconds)
        self._at = span.start

    @property
    def is_done(self) -> bool:
        return self._at.index >= self._span.end.index

    async def _read(self, connection: Connection) -> AsyncGenerator[Sequence[StoredBatch], None]:
        topic, ends = self._span.topic, await connection.stored(self._span.topic)
        first, stop = ends.entries_up_to(self._at), ends.entries_up_to(self._span.end)
        if first is None or stop is None:
            raise stock.trimmed(topic, f"after {stock.entry_before(self._at)}")
        place = ends.ledgers.message_id(first)
        reader = await connection.open_reader(topic, place, task.queue_entries(ends.ledgers))
        run = _Run(ends, first, stop, stock.rows_read(self._at))
        try:
            while run.due < stop:
                for entry in await self._next(connection, reader, run):
                    if (number := run.number(entry)) > run.due:
                        run.check_is_between()
                        await explain(connection, topic, ends.ledgers, range(run.due, number))
                    run.take(entry, number)
                if run.size_bytes >= task.STEP_BYTES or run.due >= stop:
                    found = run.taken()
                    if run.due > first:
                        self._at = stock.after(ends.ledgers.message_id(run.due - 1))
                    yield found
        finally:
            await reader.close()

    async def _next(self, connection: Connection, reader: Reader, run: "_Run") -> list[Entry]:
        try:
            return await next_entries(reader, self._span.topic)
        except UnavailableError:
            # At what it cannot read a client stops without a word.
            await check_is_supported(connection, self._span.topic, run.ends.ledgers.message_id(run.due))
            raise


class _Run:
    """The entries that one reader gives, in their order. Those that are whole are taken."""

    def __init__(self, ends: StockEnds, first: int, stop: int, rows: int) -> None:
        """They are numbered as `ends` does. Of the first one so many messages were read before."""
        self.ends = ends
        self.due = first
        """The number of the next entry."""
        self.size_bytes = 0
        self._stop = stop
        self._rows = rows
        """So many of its messages are not wanted any more."""
        self._found: list[Entry] = []
        self._whole = 0
        """So many of these messages are of entries that are whole."""

    def number(self, entry: Entry) -> int:
        """That of an entry; what stands after the range has the number after the last one of it."""
        number = self.ends.ledgers.ordinal(entry.message_id)
        return self._stop if number is None else min(number, self._stop)

    def check_is_between(self) -> None:
        """Raises LOG_UNREADABLE if it is within an entry: that one has to be read again."""
        if len(self._found) > self._whole:
            raise error("LOG_UNREADABLE", f"Pulsar's client gave {self._rows} messages of a batch, and then others")

    def take(self, entry: Entry, number: int) -> None:
        """Takes a message, unless it was taken before: after a broker's crash some come again."""
        if number > self.due:
            self.due, self._rows = number, 0
        if number < self.due or number >= self._stop:
            return
        row = max(entry.message_id.batch_index, 0)
        if row > self._rows:
            place = f"{entry.message_id.ledger_id}:{entry.message_id.entry_id}"
            raise error("LOG_UNREADABLE", f"of the messages at {place} Pulsar's client gave {row} after {self._rows}")
        if row == self._rows:
            self._found.append(entry)
            self._rows += 1
            self.size_bytes += size_of(entry.message)
        if row + 1 >= entry.of_batch:
            self.due, self._rows, self._whole = self.due + 1, 0, len(self._found)

    def taken(self) -> list[StoredBatch]:
        """The messages of whole entries, once."""
        found, self._found = self._found[: self._whole], self._found[self._whole :]
        self._whole, self.size_bytes = 0, sum(size_of(entry.message) for entry in self._found)
        return list(stored(found))


async def last_readable(connection: Connection, topic: str, ledgers: Ledgers) -> MessageId | None:
    """The last entry that readers are given, of a topic that has some: after it are none, or such as `explain` knows.

    None if there is none. Raises UNSUPPORTED_MESSAGE.
    """
    count, looked_at = len(ledgers), 1
    while True:
        first = max(count - looked_at, 0)
        try:
            found = await connection.entries(topic, ledgers.message_id(first), ledgers.message_id(count - 1))
        except UnavailableError:
            for number in range(count - 1, max(count - ASKED_AT_ONCE, first) - 1, -1):
                await check_is_supported(connection, topic, ledgers.message_id(number))
            raise
        if found or not first:
            return found[-1].message_id._replace(batch_index=-1) if found else None
        looked_at *= 16


async def check_is_supported(connection: Connection, topic: str, entry: MessageId) -> None:
    """Raises UNSUPPORTED_MESSAGE for an entry that is there and cannot be read here."""
    with suppress(NotFoundError):
        _check_supported(topic, entry, await connection.admin.headers(topic, entry))


async def explain(connection: Connection, topic: str, ledgers: Ledgers, numbers: range) -> None:
    """Returns if these are entries that no reader is given: of transactions that were aborted, or markers.

    Raises POSITION_TRIMMED if one is gone, UNSUPPORTED_MESSAGE for one that cannot be read here, LOG_UNREADABLE if it
    is of a transaction that is not over, LOG_DAMAGED for any other one.
    """

    async def ask(number: int) -> None:
        entry = ledgers.message_id(number)
        try:
            said = await connection.admin.headers(topic, entry)
        except NotFoundError as e:
            left = (await connection.stored(topic)).ledgers
            if left.ordinal(entry) is not None:
                raise error("LOG_UNREADABLE", f"Pulsar does not find {entry} of {topic}, and lists it") from e
            raise stock.trimmed(topic, f"from {entry} on") from e
        _check_supported(topic, entry, said)
        if "x-pulsar-marker-type" in said or said.get("x-pulsar-txn-aborted") == "true":
            return
        if said.get("x-pulsar-txn-uncommitted") == "true":
            raise error("LOG_UNREADABLE", f"{entry} of {topic} waits for a transaction that is not over")
        raise error("LOG_DAMAGED", f"{entry} of {topic} is there, and Pulsar's client does not give it")

    for first in range(numbers.start, numbers.stop, ASKED_AT_ONCE):
        await asyncio.gather(*map(ask, range(first, min(first + ASKED_AT_ONCE, numbers.stop))))


def _check_supported(topic: str, entry: MessageId, said: Mapping[str, str]) -> None:
    """Raises UNSUPPORTED_MESSAGE for an entry of which the broker says that it cannot be read here."""
    if said.get("x-pulsar-is-encrypted") == "true":
        raise error("UNSUPPORTED_MESSAGE", f"{entry} of {topic} is encrypted, and nothing here has its key")
    if "x-pulsar-chunk-id" in said:
        raise error("UNSUPPORTED_MESSAGE", f"{entry} of {topic} is a part of a chunked message")


def stored(entries: Sequence[Entry]) -> Iterator[StoredBatch]:
    """Messages that stand one after the other, of whole entries."""
    first = 0
    highest: dict[str, int] = {}
    for number, entry in enumerate(entries):
        is_risen = entry.sequence_id > highest.get(entry.producer_name, NO_SEQUENCE_ID - 1)
        if number > first and (not is_risen or entry.publish_time_ms != entries[first].publish_time_ms):
            yield _stored(entries[first:number])
            first, highest = number, {}
        highest[entry.producer_name] = entry.sequence_id
    if entries:
        yield _stored(entries[first:])


def _stored(entries: Sequence[Entry]) -> StockBatch:
    last = entries[-1]
    is_whole = last.message_id.batch_index + 1 >= last.of_batch
    end = stock.after(last.message_id._replace(batch_index=-1) if is_whole else last.message_id)
    ids = MessageIds.of((1, *entry.message_id) for entry in entries)
    return StockBatch(_batch(entries), 0, last.publish_time_ms, STOCK, 0, ids, end=end)


def _batch(entries: Sequence[Entry]) -> Batch:
    numbers: dict[str, int] = {}
    producers = [numbers.setdefault(entry.producer_name, len(numbers)) for entry in entries]
    messages = [entry.message for entry in entries]
    times = [message.event_time_ms for message in messages]
    offsets, names, values = batches.properties(message.properties for message in messages)
    return Batch(
        producer_names=Binary.of_all([name.encode() for name in numbers]),
        epochs=np.zeros(len(numbers), np.int64),
        previous_sequence_ids=np.full(len(numbers), NO_SEQUENCE_ID, np.int64),
        sequence_ids=np.array([entry.sequence_id for entry in entries], np.int64),
        payloads=Binary.of([message.payload for message in messages]),
        producer_indexes=np.array(producers, np.int32) if len(numbers) > 1 else NO_INT32S,
        event_times_ms=np.array(times, np.int64) if any(times) else NO_INT64S,
        keys=Binary.of([message.key.encode() or None for message in messages]),
        property_offsets=offsets,
        property_names=names,
        property_values=values,
    )
