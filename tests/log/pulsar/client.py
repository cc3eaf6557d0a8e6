"""Brokers over topics in memory, for the log: as much of them as our writer and reader look at."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from seqdedupe.entry_properties import KIND
from seqdedupe.errors import error
from seqdedupe.log.pulsar.admin_url import AdminAnswer, ConnectedProducer, PulsarAdmin, TopicStats
from seqdedupe.log.pulsar.entries import MAX_ENTRY_BYTES, PulsarEntry, PulsarMessage
from seqdedupe.log.pulsar.ledgers import Ledgers
from seqdedupe.log.pulsar.native import native_entry, single_entry, single_wire_entry, wire_entry
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.batches import EntryRow, EntryRows, batch_of
from seqdedupe.pulsar_wire.connection import StoredEntry, WirePlace
from seqdedupe.pulsar_wire.frames import WireEntry, metadata_of
from tests.log.pulsar.standin import NO_RECEIPT, PulsarTopic


class StandInClient:
    """To one topic. `refuses`: what it is given from now on is refused and is nowhere, and nobody gets the topic."""

    def __init__(self, topic: PulsarTopic, *, is_native: bool = False) -> None:
        self.topic = topic
        self.is_native = is_native
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
        self.writer: StandInProducer | None = None
        self.receipt_of: Callable[[MessageId], MessageId] = lambda message_id: message_id
        """What is reported of where an entry stands."""


class StandInAdmin(PulsarAdmin):
    """What the topic's statistics say of who writes to it, and where its durable subscription stands."""

    def __init__(self, client: StandInClient) -> None:
        self._client = client
        self.answers = True
        self.lists_ledgers = True
        self.policies: dict[str, Any] = {
            "retention": {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1},
        }
        self.of_topic: dict[str, str] = {}
        """The topic's properties."""
        self.answers_policies = True
        self.looked = 0
        """How often it was asked for the last policy that is looked at."""
        self.answers_left = 1_000_000
        """This many times it says yet who writes."""

    async def properties(self, topic: str) -> dict[str, str]:
        return self.of_topic

    async def set_properties(self, topic: str, properties: Mapping[str, str]) -> None:
        self.of_topic |= properties

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
        return TopicStats((ConnectedProducer(writer.name, writer.metadata),) if writer else (), 0)

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

    async def entry(self, topic: str, entry: MessageId) -> AdminAnswer:
        await asyncio.sleep(0)
        headers = {"x-pulsar-marker-type": "7"} if entry in self._client.topic.hidden else {}
        return AdminAnswer(200, b"", headers)

    async def keep_from(self, topic: str, name: str, message_id: MessageId) -> None:
        await asyncio.sleep(0)
        if not self.answers:
            raise error("LOG_REFUSED", "no broker answers")
        self._client.topic.keep_from(message_id)


class StandInBrokers:
    """The brokers of the topic."""

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
        self._producer: StandInProducer | None = None

    async def producer(
        self, _: str, on_receipt: Any, on_end: Any, *, name: str, properties: dict[str, str], **__: Any
    ) -> Any:
        await asyncio.sleep(0)
        client = self._client
        if client.refuses:
            raise error("LOG_REFUSED", "it is not the time")
        if (client.writer is not None and client.excludes) or client.topic.is_terminated:
            raise error("NOT_OWNER", "fenced", server_error=25)
        client.writer = self._producer = StandInProducer(client, name, properties, on_receipt, on_end)
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


class StandInProducer:
    def __init__(
        self, client: StandInClient, name: str, metadata: dict[str, str], on_receipt: Any, on_end: Any
    ) -> None:
        self.name = name
        self.metadata = metadata
        self.last_sequence_id = client.topic.highest(name)
        self.schema_version = b""
        self._client = client
        self._on_receipt, self._on_end = on_receipt, on_end
        self._is_ended = False

    def send(self, number: int, entry: WireEntry, *, rows: int) -> None:
        decode = native_entry if self._client.is_native else single_entry
        message = decode(NO_RECEIPT, entry, metadata_of(entry)).message
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
        self._client = client
        self._start = start
        self._after: MessageId | None = None

    async def next(self) -> StoredEntry:
        while True:
            if self._client.fails_reading() or self.is_closed:
                raise error("LOG_UNREADABLE", "the reader was closed")
            if (found := self.next_now()) is not None:
                return found
            await asyncio.sleep(0.001)

    def _next(self) -> PulsarEntry | None:
        return self._client.topic.next(self._after, self._start)

    def next_now(self) -> StoredEntry | None:
        stored = self._next()
        if stored is None:
            return None
        self._after = stored.message_id
        self._client.entries_read += 1
        if not self._client.is_native:
            name, number = stored.producer_name, max(stored.sequence_id, 0)
            entry = single_wire_entry(stored.message, name, number, stored.publish_time_ms)
        elif KIND in stored.message.properties:
            entry = wire_entry(stored.message, stored.producer_name, max(stored.sequence_id, 0))
        else:
            rows = EntryRows.of([EntryRow(stored.sequence_id, stored.message.payload or b"")])
            entry = batch_of(rows, stored.producer_name.encode(), stored.publish_time_ms)
        return StoredEntry(WirePlace(*stored.message_id[:2]), entry, metadata_of(entry))

    async def last(self) -> tuple[WirePlace, WirePlace | None]:
        await asyncio.sleep(0)
        if self.is_closed:
            raise error("LOG_UNREADABLE", "the reader was closed")
        topic = self._client.topic
        has_next = self._next() is not None or topic.last in topic.hidden
        begin = WirePlace(-1, -1) if has_next else WirePlace(*topic.last[:2])
        return WirePlace(*topic.last[:2]), begin
