"""Reads a range of a topic that no sidecar writes. The entry numbers of the topic's ledgers show whether every entry
was read.

Begin with `StockReading`. If a broker does not deliver an entry to readers, the reader asks the broker for the reason
(`explain`). It also asks which keys are bytes (`exact_keys`).

`stock_ranges`, `read_marks` and `stock_watermarks` find the producers' highest sequence IDs, by the rules of a sidecar
that takes the topic over.
"""

import asyncio
import base64
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from seqdedupe import batch as batches
from seqdedupe.batch import NO_INT32S, NO_INT64S, Batch, Binary
from seqdedupe.client.blocking.loop import run
from seqdedupe.client.message import StoredBatch
from seqdedupe.errors import NotFoundError, SeqdedupeError, UnavailableError, error
from seqdedupe.limits import NO_SEQUENCE_ID
from seqdedupe.log.pulsar.admin_url import AdminAnswer
from seqdedupe.log.pulsar.entries import PulsarEntry
from seqdedupe.log.pulsar.ledgers import Ledgers
from seqdedupe.log.pulsar.places import Point, size_of
from seqdedupe.log.pulsar.reader import LogScan, ReadsEntries
from seqdedupe.log.pulsar.taking_over import check_ledgers, stock_entry_of, text_of
from seqdedupe.message_id import MessageId, MessageIds
from seqdedupe.names import is_producer_name, partition_name, topic_name, whole_of
from seqdedupe.pulsar_wire.pulsar_api_pb2 import SingleMessageMetadata
from seqdedupe.v1.admin_pb2 import StockEntry, StockTopic, StockWatermarks
from seqdedupe_spark import stock
from seqdedupe_spark.cluster.broker_connection import (
    STEP_BYTES,
    BrokerConnection,
    connected,
    next_entries,
)
from seqdedupe_spark.ranges import TopicRange
from seqdedupe_spark.service import PulsarCluster
from seqdedupe_spark.stock import STOCK, StockBatch, StockEnds

ASKED_AT_ONCE = 8
"""The number of entries about which brokers are asked at the same time."""

_HINT_OF_ENTRY = (
    "No sidecar writes this topic, so nothing of a sidecar has to be restored. Examine the entry and its origin with "
    "Pulsar's own tools."
)

MAX_STEPS_BACK = 4096
"""The maximum distance, in entries, from the beginning of a chunked message to the beginning of a task. Up to this
distance the message is assembled; beyond it, the message is refused."""
_FIRST_STEPS_BACK = 16

T = TypeVar("T")


class StockReading:
    """The progress of reading a range. If a broker does not deliver some entries to readers, the reader asks the broker
    for the reason. Without a reason, the entries are a gap."""

    def __init__(self, span: TopicRange, tells_keys: bool = False) -> None:
        self._span = span
        self._at = span.start
        self._tells_keys = tells_keys
        self._steps_back = 0
        """The number of entries before the range at which the reading begins. This is needed for a chunked message that
        begins there."""

    @property
    def is_done(self) -> bool:
        return self._at.index >= self._span.end.index

    async def steps(self, connection: BrokerConnection) -> AsyncGenerator[Sequence[StoredBatch], None]:
        topic, ends = self._span.topic, await connection.stored(self._span.topic)
        first, stop = ends.entries_up_to(self._at), ends.entries_up_to(self._span.end)
        if first is None or stop is None:
            raise stock.trimmed(topic, f"after {stock.entry_before(self._at)}")
        if (
            not self._steps_back
            and await part_at(connection, topic, ends.ledgers.message_id(first)) is not ChunkPart.NONE
        ):
            self._steps_back = _FIRST_STEPS_BACK
        place = ends.ledgers.message_id(max(first - self._steps_back, 0))
        reader = await connection.open_reader(topic, place, ends.ledgers)
        run = _EntryRun(ends, first, stop, stock.rows_read(self._at))
        try:
            while run.due < stop:
                for entry in await self._next(connection, reader, run):
                    if (number := run.number(entry)) > run.due:
                        run.check_is_between()
                        await self._explain(connection, ends.ledgers, range(run.due, number), entry.first_chunk)
                    run.take(entry, number)
                if run.size_bytes >= STEP_BYTES or run.due >= stop:
                    found = run.taken()
                    keys = await exact_keys(connection, topic, found) if self._tells_keys else None
                    if run.due > first:
                        self._at, self._steps_back = stock.after(ends.ledgers.message_id(run.due - 1)), 0
                    yield list(stored(found, keys))
        finally:
            await reader.close()

    async def _next(self, connection: BrokerConnection, reader: ReadsEntries, run: "_EntryRun") -> list[PulsarEntry]:
        try:
            return await next_entries(reader, self._span.topic)
        except UnavailableError:
            # A client stops silently at an entry that it cannot read. It drops the end of a message that began before
            # the start of the reading.
            entry = run.ends.ledgers.message_id(run.due)
            if (part := await part_at(connection, self._span.topic, entry)) is not ChunkPart.NONE:
                self._go_back(entry, part)
            raise

    async def _explain(
        self, connection: BrokerConnection, ledgers: Ledgers, numbers: range, first_chunk: MessageId | None
    ) -> None:
        """Explain missing entries, like `explain`. If a chunked message began before the reading and ends here, make
        the reading begin earlier."""
        topic = self._span.topic
        try:
            ends = await explain(connection, topic, ledgers, numbers, first_chunk)
        except UnavailableError:
            self._go_back(ledgers.message_id(numbers.start), ChunkPart.UNTOLD)
            raise
        if ends:
            self._go_back(min(ends), ChunkPart.LAST)
            raise error(
                "LOG_UNREADABLE",
                f"{min(ends)} of {topic} ends a message that began before the place where reading started",
            )

    def _go_back(self, entry: MessageId, part: "ChunkPart") -> None:
        """Make the next attempt begin earlier. Raises UNSUPPORTED_MESSAGE if an earlier beginning has not helped."""
        if self._steps_back >= MAX_STEPS_BACK and part is ChunkPart.LAST:
            raise not_whole(self._span.topic, entry)
        self._steps_back = min(max(_FIRST_STEPS_BACK, self._steps_back * 16), MAX_STEPS_BACK)


class ChunkPart(Enum):
    """The part of a chunked message that an entry contains."""

    NONE = 0
    INNER = 1
    LAST = 2
    """The last part. The position of the message is here."""
    UNTOLD = 3
    """The broker does not answer. This happens for parts of compressed messages, which the broker fails to
    decompress."""


def _part(said: Mapping[str, str]) -> ChunkPart:
    """Return the part, from the broker's answer about an entry."""
    if "x-pulsar-chunk-id" not in said:
        return ChunkPart.NONE
    is_last = int(said["x-pulsar-chunk-id"]) + 1 >= int(said.get("x-pulsar-num-chunks-from-msg", 0))
    return ChunkPart.LAST if is_last else ChunkPart.INNER


async def part_at(connection: BrokerConnection, topic: str, entry: MessageId) -> ChunkPart:
    """Return the part of a chunked message that an entry contains. Raises UNSUPPORTED_MESSAGE for a part that cannot be
    read here."""
    try:
        said = (await connection.quick_admin.entry(topic, entry)).headers
    except NotFoundError:
        return ChunkPart.NONE
    except UnavailableError:
        return ChunkPart.UNTOLD
    _check_supported(topic, entry, said)
    return _part(said)


def not_whole(topic: str, entry: MessageId) -> SeqdedupeError:
    """Return the error for the end of a chunked message that cannot be assembled."""
    return error(
        "UNSUPPORTED_MESSAGE",
        f"{entry} of {topic} ends a chunked message that does not begin in the {MAX_STEPS_BACK} entries before it",
        hint=f"Continue after it: seqdedupe job reset --topic {topic} --to {entry}",
    )


class _EntryRun:
    """The entries that one reader returns, in order. Only complete entries are accepted."""

    def __init__(self, ends: StockEnds, first: int, stop: int, rows: int) -> None:
        """Use the numbering of `ends`. `rows` messages of the first entry were read earlier."""
        self.ends = ends
        self.due = first
        """The number of the next entry."""
        self.size_bytes = 0
        self._stop = stop
        self._rows = rows
        """The number of messages of the next entry that are not wanted any more."""
        self._found: list[PulsarEntry] = []
        self._whole = 0
        """The number of collected messages that belong to complete entries."""

    def number(self, entry: PulsarEntry) -> int:
        """Return the number of an entry. An entry after the range has the number after the range's last entry."""
        number = self.ends.ledgers.ordinal(entry.message_id)
        return self._stop if number is None else min(number, self._stop)

    def check_is_between(self) -> None:
        """Raise LOG_UNREADABLE if the run has stopped within an entry: that entry must be read again."""
        if len(self._found) > self._whole:
            raise error(
                "LOG_UNREADABLE",
                f"Pulsar's client returned only {self._rows} messages of a batch, and then other messages",
            )

    def take(self, entry: PulsarEntry, number: int) -> None:
        """Add a message. Ignore a message that was added before, because some messages are delivered again after a
        broker's crash."""
        if number > self.due:
            self.due, self._rows = number, 0
        if number < self.due or number >= self._stop:
            return
        row = max(entry.message_id.batch_index, 0)
        if row > self._rows:
            place = f"{entry.message_id.ledger_id}:{entry.message_id.entry_id}"
            raise error(
                "LOG_UNREADABLE",
                f"Pulsar's client returned message {row} of the batch at {place}, where message {self._rows} was due",
            )
        if row == self._rows:
            self._found.append(entry)
            self._rows += 1
            self.size_bytes += size_of(entry.message)
        if row + 1 >= entry.of_batch:
            self.due, self._rows, self._whole = self.due + 1, 0, len(self._found)

    def taken(self) -> list[PulsarEntry]:
        """Return the messages of complete entries. Each message is returned once."""
        found, self._found = self._found[: self._whole], self._found[self._whole :]
        self._whole, self.size_bytes = 0, sum(size_of(entry.message) for entry in self._found)
        return found


async def last_readable(connection: BrokerConnection, topic: str, ledgers: Ledgers) -> MessageId | None:
    """Return the last entry that readers of the topic receive. The topic must have entries. The returned entry is
    followed by no entries, or only by entries that `explain` can explain.

    Return None if there is no such entry. Raises UNSUPPORTED_MESSAGE.
    """
    count, part = len(ledgers), ChunkPart.INNER
    while count and (part := await part_at(connection, topic, ledgers.message_id(count - 1))) is ChunkPart.INNER:
        # The message of this entry is still being written.
        count -= 1
    if not count:
        return None
    looked_at = 1 if part is ChunkPart.NONE else _FIRST_STEPS_BACK
    while True:
        first = max(count - looked_at, 0)
        try:
            found = await connection.entries(topic, ledgers.message_id(first), ledgers.message_id(count - 1))
        except UnavailableError:
            if part is not ChunkPart.NONE and first and looked_at < MAX_STEPS_BACK:
                looked_at *= 16
                continue
            if part is ChunkPart.LAST:
                raise not_whole(topic, ledgers.message_id(count - 1)) from None
            for number in range(count - 1, max(count - ASKED_AT_ONCE, first) - 1, -1):
                await part_at(connection, topic, ledgers.message_id(number))
            raise
        if found or not first:
            return found[-1].message_id._replace(batch_index=-1) if found else None
        looked_at *= 16


async def explain(
    connection: BrokerConnection, topic: str, ledgers: Ledgers, numbers: range, first_chunk: MessageId | None
) -> list[MessageId]:
    """Check that there is a reason why no reader receives these entries: they belong to aborted transactions, or are
    markers or parts of chunked messages. Return the entries that end a message that the client has dropped.

    `first_chunk` is the beginning of a message that the client has delivered after these entries. Raises
    POSITION_TRIMMED if an entry is trimmed, UNSUPPORTED_MESSAGE for an entry that cannot be read here, LOG_UNREADABLE
    if the entry's transaction has not ended, LOG_DAMAGED for any other entry.
    """
    ends: list[MessageId] = []

    async def ask(number: int) -> None:
        entry = ledgers.message_id(number)
        is_within = first_chunk is not None and entry >= first_chunk
        try:
            said = (await (connection.quick_admin if is_within else connection.admin).entry(topic, entry)).headers
        except NotFoundError as e:
            left = (await connection.stored(topic)).ledgers
            if left.ordinal(entry) is not None:
                raise error("LOG_UNREADABLE", f"Pulsar does not find {entry} of {topic}, although it lists it") from e
            raise stock.trimmed(topic, f"from {entry} on") from e
        except UnavailableError:
            if is_within:
                # A broker does not answer for a part of a compressed message, but this message was delivered
                # completely.
                return
            raise
        _check_supported(topic, entry, said)
        part = _part(said)
        if part is ChunkPart.LAST:
            ends.append(entry)
        if part is not ChunkPart.NONE or "x-pulsar-marker-type" in said or said.get("x-pulsar-txn-aborted") == "true":
            return
        if said.get("x-pulsar-txn-uncommitted") == "true":
            raise error("LOG_UNREADABLE", f"{entry} of {topic} waits for a transaction that has not ended")
        what = f"{entry} of {topic} exists, but Pulsar's client does not return it"
        raise error("LOG_DAMAGED", what, hint=_HINT_OF_ENTRY)

    await _each(ask, numbers)
    return ends


def _check_supported(topic: str, entry: MessageId, said: Mapping[str, str]) -> None:
    """Raise UNSUPPORTED_MESSAGE for an entry that, by the broker's answer, cannot be read here."""
    if said.get("x-pulsar-is-encrypted") == "true":
        raise error("UNSUPPORTED_MESSAGE", f"{entry} of {topic} is encrypted, and its key is not available here")


async def exact_keys(connection: BrokerConnection, topic: str, entries: Sequence[PulsarEntry]) -> list[bytes | None]:
    """Return the keys exactly as the producers set them. Raises POSITION_TRIMMED if an entry is trimmed.

    Pulsar's client returns keys of bytes in base64, and returns an empty key for a message without a key. If a key may
    have either meaning, the broker is asked for the entry.
    """
    keys: list[bytes | None] = [entry.message.key.encode() for entry in entries]
    unclear: dict[MessageId, list[int]] = {}
    for row, entry in enumerate(entries):
        if _may_be_base64(entry.message.key):
            unclear.setdefault(entry.message_id._replace(batch_index=-1), []).append(row)

    async def ask(place: MessageId) -> None:
        try:
            is_chunked = entries[unclear[place][0]].first_chunk is not None
            found = keys_in(await (connection.quick_admin if is_chunked else connection.admin).entry(topic, place))
            for row in unclear[place]:
                keys[row] = found[max(entries[row].message_id.batch_index, 0)]
        except NotFoundError as e:
            raise stock.trimmed(topic, f"from {place} on") from e
        except UnavailableError:
            if not is_chunked:
                raise
            # A broker does not answer for a part of a compressed message.
            [row] = unclear[place]
            keys[row] = keys[row] or None
        except (IndexError, ValueError, DecodeError) as e:
            what = f"{place} of {topic} is no batch in the form of Pulsar's clients"
            raise error("LOG_DAMAGED", what, hint=_HINT_OF_ENTRY) from e

    await _each(ask, list(unclear))
    return keys


def _may_be_base64(key: str) -> bool:
    try:
        base64.b64decode(key, validate=True)
    except ValueError:
        return False
    return True


def keys_in(answer: AdminAnswer) -> list[bytes | None]:
    """Return the keys of an entry's messages, from the broker's answer. Raises ValueError or DecodeError for an invalid
    batch."""
    said, raw = answer.headers, answer.raw
    if "x-pulsar-num-batch-message" not in said:
        text = said.get("x-pulsar-partition-key")
        is_bytes = said.get("x-pulsar-partition-key-b64-encoded") == "true"
        is_null = said.get("x-pulsar-null-partition-key") == "true"
        return [None if text is None or is_null else _key(text.encode(), is_bytes)]
    keys: list[bytes | None] = []
    while raw:
        begin = 4 + int.from_bytes(raw[:4])
        message = SingleMessageMetadata.FromString(raw[4:begin])
        end = begin + message.payload_size
        if not message.HasField("payload_size") or not begin <= end <= len(raw):
            raise ValueError("a message does not have its payload")
        has_key = message.HasField("partition_key") and not message.null_partition_key
        keys.append(_key(message.partition_key, message.partition_key_b64_encoded) if has_key else None)
        raw = raw[end:]
    return keys


def _key(key: bytes, is_bytes: bool) -> bytes:
    return base64.b64decode(key) if is_bytes else key


async def _each(call: Callable[[T], Awaitable[None]], several: Sequence[T]) -> None:
    """Make several calls at the same time. Raises the exception of the first call that fails."""
    for first in range(0, len(several), ASKED_AT_ONCE):
        await asyncio.gather(*map(call, several[first : first + ASKED_AT_ONCE]))


def stored(entries: Sequence[PulsarEntry], keys: Sequence[bytes | None] | None = None) -> Iterator[StoredBatch]:
    """Yield the messages of whole entries, which follow each other; `keys` are their exact keys."""
    first = 0
    highest: dict[str, int] = {}
    for number, entry in enumerate(entries):
        is_risen = entry.sequence_id > highest.get(entry.producer_name, NO_SEQUENCE_ID - 1)
        if number > first and (not is_risen or entry.publish_time_ms != entries[first].publish_time_ms):
            yield _stored(entries[first:number], keys and keys[first:number])
            first, highest = number, {}
        highest[entry.producer_name] = entry.sequence_id
    if entries:
        yield _stored(entries[first:], keys and keys[first:])


def _stored(entries: Sequence[PulsarEntry], keys: Sequence[bytes | None] | None) -> StockBatch:
    last = entries[-1]
    is_whole = last.message_id.batch_index + 1 >= last.of_batch
    end = stock.after(last.message_id._replace(batch_index=-1) if is_whole else last.message_id)
    ids = MessageIds.of((1, *entry.message_id) for entry in entries)
    return StockBatch(
        _batch(entries),
        0,
        last.publish_time_ms,
        STOCK,
        0,
        ids,
        end=end,
        key_bytes=Binary.of(keys or ()),
        ordering_keys=Binary.of([entry.ordering_key or None for entry in entries]),
        schema_versions=np.array([entry.schema_version for entry in entries], np.int64),
    )


def _batch(entries: Sequence[PulsarEntry]) -> Batch:
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


# -- The producers' highest sequence IDs, for a sidecar that takes the topic over.

RANGE_BYTES = 16 * 1024 * 1024
"""The approximate size of a range, which one task reads: a second, or ten if each message is an entry."""
MAX_RANGES = 256
"""The ranges of a larger topic are larger. The driver keeps the producers of each range until the end."""

_NO_INCARNATION = -1
"""No entry is of this incarnation."""


class StockRange(NamedTuple):
    """A part of a topic's entries."""

    topic: str
    first: MessageId
    last: MessageId


class RangeMarks(NamedTuple):
    """What a range contains."""

    numbers: dict[str, int]
    """The highest sequence ID of each producer."""
    first: StockEntry | None
    """The first entry that a reader received; None if there was none."""
    last: StockEntry | None
    is_whole: bool
    """Whether the topic has entries for readers after the range, or at its end."""


class TopicRanges(NamedTuple):
    """A topic, and its ranges in order."""

    topic: str
    ledgers: Ledgers
    ranges: list[StockRange]


def stock_ranges(cluster: PulsarCluster, topic: str) -> list[TopicRanges]:
    """Return the ranges of a topic, or of each partition, up to its present end. Raises TOPIC_NOT_FOUND; INVALID_SOURCE
    for a partition, or a topic that a sidecar writes."""

    async def of_topic(connection: BrokerConnection, name: str) -> TopicRanges:
        if await connection.is_log(name):
            raise error("INVALID_SOURCE", f"{name} is a topic of a sidecar already: give the sidecar's --address")
        ledgers, ranges, start = await connection.admin.ledgers(name), list[StockRange](), 0
        size_bytes = max(RANGE_BYTES, ledgers.size_bytes // MAX_RANGES)
        while start < len(ledgers):
            stop = ledgers.after(start, size_bytes)
            ranges.append(StockRange(name, ledgers.message_id(start), ledgers.message_id(stop)))
            start = stop + 1
        return TopicRanges(name, ledgers, ranges)

    async def all_of() -> list[TopicRanges]:
        full = topic_name(topic)
        if whole_of(full) is not None:
            raise error("INVALID_SOURCE", f"{full} has the name of a partition: name the partitioned topic")
        async with connected(cluster) as connection:
            partitions = await connection.admin.partitions(full)
            names = [partition_name(full, k) for k in range(partitions)] or [full]
            return [await of_topic(connection, name) for name in names]

    return run(all_of)


def read_marks(cluster: PulsarCluster, span: StockRange) -> RangeMarks:
    """Read a range. Raises LOG_UNREADABLE; LOG_DAMAGED for an entry of a sidecar."""

    async def read() -> RangeMarks:
        async with connected(cluster) as connection:
            find_end = partial(connection.admin.end_after, span.topic)
            ledgers = partial(connection.admin.ledgers, span.topic)
            reader = await connection.open_stock_reader(span.topic, span.first)
            scan = LogScan(reader, span.topic, Point.start(_NO_INCARNATION), ledgers, find_end)
            first: PulsarEntry | None = None
            last: PulsarEntry | None = None

            def hear(entry: PulsarEntry) -> None:
                nonlocal first, last
                first, last = first or entry, entry

            try:
                is_whole = await scan.step_to(span.last, hear)
            finally:
                await scan.close()
            numbers = {name: number for name, number in scan.collector.earlier.items() if is_producer_name(name)}
            return RangeMarks(numbers, first and stock_entry_of(first), last and stock_entry_of(last), is_whole)

    return run(read)


def stock_watermarks(
    cluster: PulsarCluster, topics: Sequence[TopicRanges], marks: Iterator[RangeMarks]
) -> StockWatermarks:
    """Return the watermarks of topics, from what their ranges contain, in order. `marks` is read one by one.

    Raises INVALID_REQUEST if a topic was created again meanwhile, or has too many producers for its properties; the
    errors of `marks`.
    """
    read = [stock_topic(one, list(islice(marks, len(one.ranges)))) for one in topics]

    async def check() -> None:
        async with connected(cluster) as connection:
            for one in read:
                check_ledgers(one, await connection.admin.ledgers(one.topic))

    run(check)
    return StockWatermarks(topics=read)


def stock_topic(topic: TopicRanges, marks: Sequence[RangeMarks]) -> StockTopic:
    """Return what was read of a topic, from what its ranges contain, in order. Raises INVALID_REQUEST as
    `stock_watermarks`."""
    numbers = dict[str, int]()
    first: StockEntry | None = None
    last: StockEntry | None = None
    for one in marks:
        for name, number in one.numbers.items():
            numbers[name] = max(number, numbers.get(name, NO_SEQUENCE_ID))
        first, last = first or one.first, one.last or last
        if not one.is_whole:
            # An open transaction may hide later entries: the sidecar reads them.
            break
    if first is None or last is None:
        return StockTopic(topic=topic.topic)
    text_of(numbers)
    ledgers = topic.ledgers.up_to(MessageId(last.ledger_id, last.entry_id))
    names = sorted(numbers)
    return StockTopic(
        topic=topic.topic,
        ledger_ids=[ledger_id for ledger_id, _ in ledgers],
        ledger_entries=[entries for _, entries in ledgers],
        first=first,
        last=last,
        producer_names=names,
        persisted=[numbers[name] for name in names],
    )
