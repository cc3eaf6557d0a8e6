"""Openings of a topic, and what stands in it, for tests of the writer."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import pulsar
import pulsar.asyncio

from pulsar_broker.standalone import Broker
from seqdedupe.errors import SeqdedupeError, UnavailableError
from seqdedupe.log.pulsar.admin_url import AdminUrl, PulsarAdmin
from seqdedupe.log.pulsar.broker_wire import Brokers, open_producer
from seqdedupe.log.pulsar.entries import EntryFormat, PulsarMessage
from seqdedupe.log.pulsar.writer import COUNTER_BITS, EntryWriter, SettledEntry, open_writer
from seqdedupe.message_id import MessageId
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar

LIMIT_SECONDS = LAST_RESORT_SECONDS

_openings = itertools.count(1000)


class Stored(NamedTuple):
    """An entry as a stock reader has it."""

    message_id: MessageId
    payload: bytes
    opening: int
    """The upper half of its sequence ID."""


def quiet() -> pulsar.ConsoleLogger:
    return pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)


async def until(holds: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            result = holds()
            if result if isinstance(result, bool) else await result:
                return
            await asyncio.sleep(0.01)


async def send_native(service_url: str, topic: str, message: PulsarMessage) -> None:
    """Puts a native entry into a topic that nobody writes."""
    stored: asyncio.Future[SeqdedupeError | None] = asyncio.get_running_loop().create_future()
    producer = await open_producer(Brokers(service_url), topic, "late", {}, EntryFormat.NATIVE)
    assert producer is not None
    producer.send(message, 1, lambda _, failure, place: stored.set_result(failure))
    async with asyncio.timeout(LIMIT_SECONDS):
        assert await stored is None
    await producer.close()


async def kill_and_start(broker: Broker) -> None:
    """Kill -9, and again with its data, while the event loop goes on."""
    await asyncio.to_thread(broker.kill)
    broker.spawn()
    await asyncio.to_thread(broker.wait_until_healthy)


class Cluster:
    """A broker as it is reached without a line, with its admin URL; readers and stock producers."""

    def __init__(self, service_url: str, admin_url: str) -> None:
        self.service_url = service_url
        self.admin_url = admin_url
        self.url = AdminUrl(admin_url)
        self.admin = PulsarAdmin(self.url)
        self.silent: set[str] = set()
        """The addresses of sidecars that answer nothing."""

    async def answers(self, address: str) -> bool:
        """Whether the sidecar there does."""
        return address not in self.silent

    def sidecar(self, folder: Path, namespace: str) -> Sidecar:
        """A sidecar with native topics in this namespace, which is not started yet."""
        return Sidecar(
            folder,
            log="pulsar",
            pulsar_service_url=self.service_url,
            pulsar_admin_url=self.admin_url,
            pulsar_namespaces=namespace,
            pulsar_entry_format="native",
        )

    def connect(self) -> pulsar.asyncio.Client:
        return pulsar.asyncio.Client(self.service_url, operation_timeout_seconds=10, logger=quiet())

    async def create(self, topic: str, *, deduplicates: bool = True) -> None:
        """A topic that keeps everything. A broker that has just started may need a while."""

        async def is_created() -> bool:
            try:
                await self.admin.create_topic(topic, {})
            except UnavailableError:
                return False
            return True

        await until(is_created)
        await self.admin.set_policy(topic, "retention", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1})
        if deduplicates:
            await self.admin.set_policy(topic, "deduplicationSnapshotInterval", 0)
            await self.admin.set_policy(topic, "deduplicationEnabled", True)
            await self.until_deduplicating(topic)

    async def trim(self, topic: str) -> None:
        """Pulsar removes what no subscription keeps. Its owner finds the topic unsafe for a moment at most."""
        retention = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}
        await self.admin.set_policy(topic, "retention", retention)

        async def is_in_force() -> bool:
            found: dict[str, int] = await self.admin.policy(topic, "retention")
            return found == retention

        await until(is_in_force)
        await self.url.call("POST", topic.replace("://", "/") + "/trim")
        await self.admin.set_policy(topic, "retention", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1})

    async def until_deduplicating(self, topic: str) -> None:
        """Until Pulsar deduplicates. A topic that was loaded again serves before that, and then knows no producer."""

        async def is_on() -> bool:
            return await self.deduplicates(topic)

        await until(is_on)

    async def deduplicates(self, topic: str) -> bool:
        """Whether Pulsar's own deduplication is in force."""
        return bool((await self.url.get(topic.replace("://", "/") + "/stats"))["deduplicationStatus"] == "Enabled")

    async def until_received(self, topic: str, entries: int) -> None:
        """Until this many were stored since the topic was loaded."""
        path = topic.replace("://", "/") + "/stats"

        async def are_received() -> bool:
            return int((await self.url.get(path))["msgInCounter"]) >= entries

        await until(are_received)

    async def until_somebody_writes(self, topic: str) -> None:
        async def is_taken() -> bool:
            return bool((await self.admin.stats(topic)).publishers)

        await until(is_taken)

    async def until_nobody_writes(self, topic: str) -> None:
        async def is_free() -> bool:
            return not (await self.admin.stats(topic)).publishers

        await until(is_free)

    async def read(self, topic: str) -> list[Stored]:
        return await asyncio.to_thread(self._read, topic)

    def _read(self, topic: str) -> list[Stored]:
        client = pulsar.Client(self.service_url, logger=quiet())
        try:
            reader = client.create_reader(topic, pulsar.MessageId.earliest)
            stored = []
            while reader.has_message_available():
                stored.append(_stored(reader.read_next(timeout_millis=int(LAST_RESORT_SECONDS * 1000))))
            return stored
        finally:
            client.close()


def _stored(message: Any) -> Stored:
    head = f"Message(prod={message.producer_name()}, seq="
    text = str(message._message)
    assert text.startswith(head)
    sequence_id = int(text[len(head) :].partition(",")[0])
    place = message.message_id()
    return Stored(MessageId(place.ledger_id(), place.entry_id()), message.data(), sequence_id >> COUNTER_BITS)


class Owner:
    """Who wants the topic; what its writer has settled. `client` is for what stock producers do there."""

    def __init__(self, service_url: str, topic: str, instance_name: str = "one") -> None:
        self.client = pulsar.asyncio.Client(service_url, operation_timeout_seconds=10, logger=quiet())
        self.brokers = Brokers(service_url)
        self.topic = topic
        self.instance_name = instance_name
        self.confirmed: list[MessageId] = []
        self.doubtful: MessageId | None = None
        self.failure: str | None = None
        self.known: list[int] = []
        """The opening numbers that Pulsar knew."""
        self.opening = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        # Not `shutdown`: it keeps the interpreter's lock, for which the client's threads may wait. Producers that the
        # broker has thrown out are closed already.
        with suppress(pulsar.asyncio.PulsarException):
            await self.client.close()

    async def open(self, first_name_number: int = 0, marker: bytes = b"marker") -> EntryWriter:
        """Opens and marks, and takes the marker for read where its receipt says."""
        self.confirmed, self.doubtful, self.failure = [], None, None
        writer = await open_writer(
            self.brokers,
            self.topic,
            self.instance_name,
            first_name_number,
            self._claim,
            {"address": self.instance_name},
            self._settle,
            EntryFormat.PLAIN,
        )
        writer.append([PulsarMessage(marker, {})])
        self.confirmed.append(await self.doubt())
        self.doubtful = None
        writer.was_read(self.confirmed[-1])
        return writer

    async def doubt(self) -> MessageId:
        """The next receipt that proves nothing."""
        await until(lambda: self.doubtful is not None or self.failure is not None)
        assert self.doubtful is not None, self.failure
        return self.doubtful

    async def open_when_free(self, first_name_number: int = 0, marker: bytes = b"marker") -> EntryWriter:
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                try:
                    return await self.open(first_name_number, marker)
                except SeqdedupeError as e:
                    if e.reason not in ("NOT_OWNER", "LOG_REFUSED"):
                        raise
                await asyncio.sleep(0.05)

    async def until_confirmed(self, entries: int) -> None:
        """Markers included."""
        await until(lambda: len(self.confirmed) >= entries or self.doubtful is not None or self.failure is not None)
        assert (len(self.confirmed), self.doubtful, self.failure) == (entries, None, None)

    async def _claim(self, known: int) -> int:
        self.known.append(known)
        self.opening = max(next(_openings), known + 1)
        return self.opening

    def _settle(self, settled: SettledEntry) -> None:
        assert asyncio.get_running_loop()
        assert self.failure is None, "something is settled after a failure"
        assert not (settled.confirmed and self.doubtful), "something is confirmed beyond a doubt"
        if settled.confirmed is not None:
            entries, first = settled.confirmed
            self.confirmed += [MessageId(first.ledger_id, first.entry_id + k) for k in range(entries)]
        self.doubtful = settled.doubtful or self.doubtful
        self.failure = settled.failure
