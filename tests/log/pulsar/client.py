"""Pulsar's client over topics in memory, for the log: as much of it as our writer and reader look at."""

import asyncio
from collections.abc import Callable
from typing import Any

import pulsar
import pulsar.asyncio

from seqdedupe.entry_properties import KIND
from seqdedupe.errors import error
from seqdedupe.log.pulsar.admin_url import ConnectedProducer, PulsarAdmin, TopicStats
from seqdedupe.log.pulsar.entries import MAX_ENTRY_BYTES, PulsarEntry, PulsarMessage
from seqdedupe.log.pulsar.ledgers import Ledgers
from seqdedupe.log.pulsar.native import native_entry, wire_entry
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.batches import EntryRow, EntryRows, batch_of
from seqdedupe.pulsar_wire.connection import StoredEntry, WirePlace
from seqdedupe.pulsar_wire.frames import WireEntry, metadata_of
from tests.log.pulsar.standin import NO_RECEIPT, PulsarTopic

Answer = Callable[[pulsar.Result, pulsar.MessageId], None]


class StandInClient:
    """To one topic. `refuses`: what it is given from now on is answered with Timeout and is nowhere, and nobody gets
    the topic."""

    def __init__(self, topic: PulsarTopic) -> None:
        self.topic = topic
        self.excludes = True
        """Whether there is one writer at a time."""
        self.before: Callable[[PulsarMessage], None] = lambda message: None
        """Is called before an entry is stored."""
        self.loses: Callable[[PulsarMessage], bool] = lambda message: False
        """Whether an entry fails by itself, and is nowhere; what comes after it is stored all the same."""
        self.refuses = False
        self.opened_readers = self.open_readers = 0
        self.entries_read = 0
        self.fails_reading: Callable[[], bool] = lambda: False
        """Whether a reader that waits for an entry learns that it cannot."""
        self.writer: StandInProducer | StandInNativeProducer | None = None
        self.receipt_of: Callable[[MessageId], MessageId] = lambda message_id: message_id
        """What is reported of where an entry stands."""

    async def create_producer(
        self, _: str, *, producer_name: str, properties: dict[str, str], **__: Any
    ) -> "StandInProducer":
        await asyncio.sleep(0)
        if self.refuses:
            raise pulsar.asyncio.PulsarException(pulsar.Result.Timeout)
        if (self.writer is not None and self.excludes) or self.topic.is_terminated:
            raise pulsar.asyncio.PulsarException(pulsar.Result.ProducerFenced)
        self.writer = StandInProducer(self, producer_name, properties)
        return self.writer

    async def create_reader(
        self, _: str, start: pulsar.MessageId, *, receiver_queue_size: int, start_message_id_inclusive: bool
    ) -> "StandInReader":
        await asyncio.sleep(0)
        assert start_message_id_inclusive
        self.opened_readers += 1
        self.open_readers += 1
        return StandInReader(self, MessageId(start.ledger_id(), start.entry_id()))


class StandInAdmin(PulsarAdmin):
    """What the topic's statistics say of who writes to it, and where its durable subscription stands."""

    def __init__(self, client: StandInClient) -> None:
        self._client = client
        self.answers = True
        self.lists_ledgers = True
        self.policies: dict[str, Any] = {
            "deduplicationEnabled": True,
            "deduplicationSnapshotInterval": 0,
            "retention": {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1},
        }
        self.answers_policies = True
        self.looked = 0
        """How often it was asked for the last policy that is looked at."""
        self.answers_left = 1_000_000
        """This many times it says yet who writes."""

    async def properties(self, topic: str) -> dict[str, str]:
        return {}

    async def schema(self, topic: str) -> tuple[str, str, int]:
        await asyncio.sleep(0)
        return "STRING", "", 0

    async def subscription_expiration_minutes(self, namespace: str) -> int | None:
        await asyncio.sleep(0)
        self.looked += 1
        if not self.answers_policies:
            raise error("LOG_UNREADABLE", "no broker answers")
        return self.policies.get("subscriptionExpirationTime") or 0

    async def set_policy(self, topic: str, name: str, value: object) -> None:
        self.policies[name.partition("?")[0]] = value

    async def namespace_policy(self, namespace: str, name: str) -> Any:
        return None

    async def policy(self, topic: str, name: str) -> Any:
        await asyncio.sleep(0)
        if not self.answers_policies:
            raise error("LOG_UNREADABLE", "no broker answers")
        return self.policies.get(name)

    async def stats(self, topic: str) -> TopicStats:
        await asyncio.sleep(0)
        self.answers_left -= 1
        if not self.answers or self.answers_left < 0:
            raise error("LOG_UNREADABLE", "no broker answers")
        writer = self._client.writer
        return TopicStats((ConnectedProducer(writer.name, writer.metadata),) if writer else (), 0, True)

    async def create_subscription(self, topic: str, name: str) -> None:
        await asyncio.sleep(0)

    async def first_ledger(self, topic: str) -> int:
        await asyncio.sleep(0)
        if not self.answers:
            raise error("LOG_UNREADABLE", "no broker answers")
        return self._client.topic.first_ledger

    async def is_terminated(self, topic: str) -> bool:
        await asyncio.sleep(0)
        return self._client.topic.is_terminated

    async def ledgers(self, topic: str) -> Ledgers:
        await asyncio.sleep(0)
        if not self.lists_ledgers:
            raise error("LOG_UNREADABLE", "no broker answers")
        return self._client.topic.ledgers

    async def keep_from(self, topic: str, name: str, message_id: MessageId) -> None:
        await asyncio.sleep(0)
        if not self.answers:
            raise error("LOG_REFUSED", "no broker answers")
        self._client.topic.keep_from(message_id)


class StandInProducer:
    def __init__(self, client: StandInClient, name: str, metadata: dict[str, str]) -> None:
        self._producer = self
        self.name = name
        self.metadata = metadata
        self._client = client

    def is_connected(self) -> bool:
        return self._client.writer is self or not self._client.excludes

    def last_sequence_id(self) -> int:
        return self._client.topic.highest(self.name)

    def send_async(self, built: Any, answer: Answer) -> None:
        asyncio.get_running_loop().call_soon(self._store, built, answer)

    def _store(self, built: Any, answer: Answer) -> None:
        place, result = MessageId(-1, -1), pulsar.Result.Timeout
        if self._client.topic.is_terminated:
            answer(pulsar.Result.TopicTerminated, pulsar.MessageId(-1, -1, -1, -1))
            return
        sequence_id = int(str(built).partition("seq=")[2].partition(",")[0])
        payload = None if built.has_null_value() else built.data()
        message = PulsarMessage(payload, built.properties(), built.partition_key(), built.event_timestamp())
        self._client.before(message)
        takes = self._client.writer is self or not self._client.excludes
        if takes and not self._client.refuses and not self._client.loses(message):
            place, result = self._client.topic.add(message, self.name, sequence_id), pulsar.Result.Ok
            place = self._client.receipt_of(place)
        answer(result, pulsar.MessageId(-1, place.ledger_id, place.entry_id, -1))

    async def close(self) -> None:
        await asyncio.sleep(0)
        if self._client.writer is self:
            self._client.writer = None


class StandInReader:
    def __init__(self, client: StandInClient, start: MessageId) -> None:
        self._client = client
        self._reader = self._native = _Native(client, start)
        self._is_closed = False

    def topic(self) -> str:
        return "a topic in memory"

    async def read_next(self) -> Any:
        if self._client.fails_reading():
            raise pulsar.asyncio.PulsarException(pulsar.Result.ConnectError)
        while (found := self._native.next()) is None:
            if self._is_closed:
                raise pulsar.asyncio.PulsarException(pulsar.Result.AlreadyClosed)
            await asyncio.sleep(0.001)
        return _Wrapped(self._native.overtaking(found))

    async def has_message_available(self) -> bool:
        await asyncio.sleep(0)
        return self._native.has_next()

    async def close(self) -> None:
        await asyncio.sleep(0)
        self._is_closed = True
        self._client.open_readers -= 1


class _Wrapped:
    def __init__(self, message: "_Read") -> None:
        self._message = message


class _Native:
    def __init__(self, client: StandInClient, start: MessageId) -> None:
        self._client = client
        self._topic = client.topic
        self._start = start
        self._after: MessageId | None = None
        self._overtaken: _Read | None = None

    def close_async(self, _: Any) -> None:
        self._client.open_readers -= 1

    def _next(self) -> PulsarEntry | None:
        return self._topic.next(self._after, self._start)

    def has_next(self) -> bool:
        return self._overtaken is not None or self._next() is not None

    def overtaking(self, found: "_Read") -> "_Read":
        """As Pulsar's client does it where somebody begins to wait while an entry is put into its queue: the one behind
        it comes first. Here it is so as often as there are two."""
        if (second := self.next()) is None:
            return found
        self._overtaken = found
        return second

    def next(self) -> "_Read | None":
        if self._overtaken is not None:
            overtaken, self._overtaken = self._overtaken, None
            return overtaken
        entry = self._next()
        if entry is None:
            return None
        self._after = entry.message_id
        self._client.entries_read += 1
        return _Read(entry)

    def read_next(self, _: int) -> "_Read":
        found = self.next()
        if found is None:
            raise pulsar.Timeout
        return found


class _Read:
    """A message as the client's reader gives it."""

    def __init__(self, entry: PulsarEntry) -> None:
        self.entry = self._entry = entry

    def message_id(self) -> pulsar.MessageId:
        place = self._entry.message_id
        return pulsar.MessageId(-1, place.ledger_id, place.entry_id, place.batch_index)

    def properties(self) -> dict[str, str]:
        return dict(self._entry.message.properties)

    def has_null_value(self) -> bool:
        return self._entry.message.payload is None

    def data(self) -> bytes:
        return self._entry.message.payload or b""

    def partition_key(self) -> str:
        return self._entry.message.key

    def ordering_key(self) -> str:
        return ""

    def int_schema_version(self) -> int:
        return -1

    def event_timestamp(self) -> int:
        return self._entry.message.event_time_ms

    def publish_timestamp(self) -> int:
        return self._entry.publish_time_ms

    def producer_name(self) -> str:
        return self._entry.producer_name

    def __str__(self) -> str:
        return f"Message(prod={self._entry.producer_name}, seq={self._entry.sequence_id}, "


class StandInBrokers:
    """The brokers of a topic of native entries."""

    def __init__(self, client: StandInClient) -> None:
        self._client = client

    async def max_entry_bytes(self) -> int:
        return MAX_ENTRY_BYTES

    async def connection(self, _: str) -> "StandInConnection":
        await asyncio.sleep(0)
        return StandInConnection(self._client)


class StandInConnection:
    def __init__(self, client: StandInClient) -> None:
        self._client = client
        self._reader: StandInWireReader | None = None
        self._producer: StandInNativeProducer | None = None

    async def producer(self, _: str, on_receipt: Any, on_end: Any, *, name: str, properties: dict[str, str]) -> Any:
        await asyncio.sleep(0)
        client = self._client
        if client.refuses:
            raise error("LOG_REFUSED", "it is not the time")
        if (client.writer is not None and client.excludes) or client.topic.is_terminated:
            raise error("NOT_OWNER", "fenced", server_error=25)
        client.writer = self._producer = StandInNativeProducer(client, name, properties, on_receipt, on_end)
        return self._producer

    async def reader(self, _: str, __: str, start: WirePlace | None) -> "StandInWireReader":
        await asyncio.sleep(0)
        self._client.opened_readers += 1
        self._client.open_readers += 1
        self._reader = StandInWireReader(self, self._client, MessageId(*(start or (-1, -1))))
        return self._reader

    async def close(self) -> None:
        await asyncio.sleep(0)
        if self._producer is not None:
            await self._producer.close()
        if self._reader is not None and not self._reader.is_closed:
            self._reader.is_closed = True
            self._client.open_readers -= 1


class StandInNativeProducer:
    def __init__(
        self, client: StandInClient, name: str, metadata: dict[str, str], on_receipt: Any, on_end: Any
    ) -> None:
        self.name = name
        self.metadata = metadata
        self.last_sequence_id = client.topic.highest(name)
        self._client = client
        self._on_receipt, self._on_end = on_receipt, on_end
        self._is_ended = False

    def send(self, number: int, entry: WireEntry, *, rows: int) -> None:
        message = native_entry(NO_RECEIPT, entry, metadata_of(entry)).message
        asyncio.get_running_loop().call_soon(self._store, number, message)

    def _store(self, number: int, message: PulsarMessage) -> None:
        client = self._client
        if client.topic.is_terminated:
            self._end("TopicTerminated")
            return
        client.before(message)
        takes = client.writer is self or not client.excludes
        if not takes or client.refuses or client.loses(message):
            self._end("refused")
            return
        place = client.receipt_of(client.topic.add(message, self.name, number))
        if self._is_ended:
            return
        if place == NO_RECEIPT:
            self._end("a duplicate")
        else:
            self._on_receipt(number, WirePlace(*place[:2]))

    def _end(self, why: str) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._on_end(error("LOG_REFUSED", why), ())

    async def close(self) -> None:
        await asyncio.sleep(0)
        self._is_ended = True
        if self._client.writer is self:
            self._client.writer = None


class StandInWireReader:
    def __init__(self, connection: StandInConnection, client: StandInClient, start: MessageId) -> None:
        self.connection = connection
        self.is_closed = False
        self._native = _Native(client, start)
        self._client = client

    async def next(self) -> StoredEntry:
        while True:
            if self._client.fails_reading() or self.is_closed:
                raise error("LOG_UNREADABLE", "the reader was closed")
            if (found := self.next_now()) is not None:
                return found
            await asyncio.sleep(0.001)

    def next_now(self) -> StoredEntry | None:
        read = self._native.next()
        if read is None:
            return None
        stored = read.entry
        if KIND in stored.message.properties:
            entry = wire_entry(stored.message, stored.producer_name, max(stored.sequence_id, 0))
        else:
            rows = EntryRows.of([EntryRow(stored.sequence_id, stored.message.payload or b"")])
            entry = batch_of(rows, stored.producer_name.encode(), stored.publish_time_ms)
        return StoredEntry(WirePlace(*stored.message_id[:2]), entry, metadata_of(entry))

    async def last(self) -> tuple[WirePlace, WirePlace | None]:
        await asyncio.sleep(0)
        if self.is_closed:
            raise error("LOG_UNREADABLE", "the reader was closed")
        there = self._client.topic.entries
        last = there[-1].message_id if there else NO_RECEIPT
        begin = WirePlace(-1, -1) if self._native.has_next() else WirePlace(*last[:2])
        return WirePlace(*last[:2]), begin
