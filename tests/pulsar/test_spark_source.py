"""Spark's source reads from a real broker what a sidecar's log wrote there: the same rows, positions and errors."""

import asyncio
import itertools
import json
import pickle
import time
from collections.abc import Iterator
from typing import Any

import pulsar
import pulsar.asyncio
import pyarrow as pa
import pytest
from pyspark import cloudpickle

from pulsar_broker.standalone import Broker
from seqdedupe import entry_properties
from seqdedupe.entry_properties import FORMAT, INCARNATION, MODE, PARTITIONS
from seqdedupe.errors import NotFoundError, PositionError, SeqdedupeError
from seqdedupe.format.headers import ownership_of
from seqdedupe.log.pulsar import entries, taking_over
from seqdedupe.log.pulsar.broker_wire import Brokers
from seqdedupe.log.pulsar.entries import EncodedBatch, EntryFormat, EntrySettings, PulsarMessage
from seqdedupe.log.pulsar.log import PulsarLog, PulsarResources
from seqdedupe.message_id import MessageId, Position
from seqdedupe_spark.cluster import broker_connection, cluster_client, stock_reader
from seqdedupe_spark.cluster.broker_connection import BrokerConnection
from seqdedupe_spark.source import BatchReader, SeqdedupeDataSource, StreamReader
from tests.batches import batch
from tests.log.batches import encoded_batch
from tests.log.conformance import Owner
from tests.pulsar.owners import Cluster, send_native, until

OF_LOG = 1_700_000_000_000_000
ALL = pytest.mark.parametrize("entry_format", EntryFormat, ids=lambda one: one.value)

_openings = itertools.count(1)


async def create(cluster: Cluster, topic: str, entry_format: EntryFormat, incarnation: int = OF_LOG) -> None:
    """A topic as a sidecar makes it."""
    properties = {INCARNATION: str(incarnation), FORMAT: entry_format.value, MODE: "SEQUENCE_ID", PARTITIONS: "0"}
    await cluster.admin.create_topic(topic, properties)
    await cluster.admin.set_policy(topic, "retention", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1})
    await cluster.admin.set_policy(topic, "deduplicationSnapshotInterval", 0)
    await cluster.admin.set_policy(topic, "deduplicationEnabled", True)


def log_of(cluster: Cluster, topic: str, entry_format: EntryFormat) -> PulsarLog:
    async def claim(_: str, known: int) -> int:
        return next(number for number in _openings if number > known)

    def now_ms() -> int:
        return time.time_ns() // 1_000_000

    brokers = Brokers(cluster.service_url)
    shared = PulsarResources("one", "host:6680", now_ms, claim, cluster.admin, cluster.answers, brokers)
    return PulsarLog(shared, topic, OF_LOG, EntrySettings(entry_format, "SEQUENCE_ID", 0, "host:6680"))


async def written(
    log: PulsarLog, cluster: Cluster, topic: str, terms: int, batches: int, *, unloads_at_end: bool = True
) -> None:
    """By this many owners, each in its own ledger: batches of ten."""
    first = 0
    for term in range(1, terms + 1):
        await cluster.until_deduplicating(topic)
        owner = await Owner(log, term).open()
        owner.append_control(term)
        for _ in range(batches):
            owner.append(first, 10)
            first += 10
        await owner.until_stored(batches + 1)
        if term < terms or unloads_at_end:
            await cluster.admin.unload(topic)
    await log.close()


def void(entry_format: EntryFormat) -> PulsarMessage:
    """What the first owner of a topic has under way and nobody waits for any more."""
    owner = entry_properties.EntryOwner(OF_LOG, 1, ownership_of(b"token%011d" % 1))
    encoded = batch([("late", 1)]).encode()
    if entry_format is EntryFormat.PLAIN:
        return next(entries.messages_of_part(owner, 402, 400, encoded))
    return entries.packed_message(owner, 42, 400, 1, EncodedBatch(*encoded_batch(1, 1)))


async def send(cluster: Cluster, client: pulsar.asyncio.Client, topic: str, entry_format: EntryFormat) -> None:
    """Puts the void entry into a topic that nobody writes."""
    message = void(entry_format)
    if entry_format is not EntryFormat.NATIVE:
        producer = await client.create_producer(topic, batching_enabled=False)
        await producer.send(message.payload, properties=message.properties)
        await producer.close()
    else:
        await send_native(cluster.service_url, topic, message)


class Source:
    """The data source for one topic, called as Spark calls it, in a thread: it blocks."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self._given = {"service.url": broker.service_url, "admin.url": broker.admin_url, "topic": topic}

    def _made(self, more: dict[str, Any]) -> SeqdedupeDataSource:
        return SeqdedupeDataSource(self._given | {name.lower(): str(value) for name, value in more.items()})

    def batch(self, **more: Any) -> BatchReader:
        made = self._made(more)
        return made.reader(made.schema())

    def stream(self, **more: Any) -> StreamReader:
        made = self._made(more)
        return made.streamReader(made.schema())

    async def rows(self, **more: Any) -> list[dict[str, Any]]:
        reader = self.batch(**more)
        return await asyncio.to_thread(lambda: rows_in(reader, reader.partitions()))

    async def indexes(self, **more: Any) -> list[int]:
        return [row["__index"] for row in await self.rows(**more)]


def rows_in(reader: BatchReader | StreamReader, partitions: list[Any]) -> list[dict[str, Any]]:
    there = pickle.loads(cloudpickle.dumps(reader))  # type: ignore[no-untyped-call]
    return [row for one in partitions for batch in there.read(one) for row in batch.to_pylist()]


@pytest.fixture
def source(broker: Broker, topic: str) -> Source:
    return Source(broker, topic)


@ALL
async def test_everything_is_where_the_log_says(
    cluster: Cluster, client: pulsar.asyncio.Client, topic: str, source: Source, entry_format: EntryFormat
) -> None:
    """Three owners, each in its own ledger, and an entry of the first one that comes too late."""
    await create(cluster, topic, entry_format)
    log = log_of(cluster, topic, entry_format)
    await written(log, cluster, topic, 3, 40)
    await send(cluster, client, topic, entry_format)
    rows = await source.rows()
    assert [row["__index"] for row in rows] == list(range(1200))
    assert [row["__sequenceId"] for row in rows] == list(range(1200))
    assert {(row["__topic"], row["__partition"], row["__incarnation"]) for row in rows} == {(topic, -1, OF_LOG)}
    ids = [MessageId.from_bytes(row["__messageId"]) for row in rows]
    assert len({one.ledger_id for one in ids}) == 3
    for index in range(0, 1200, 97):
        assert ids[index] == (await log.locate(index)).message_id

    def place(index: int) -> str:
        return json.dumps({topic: str(Position(OF_LOG, ids[index], index))})

    assert await source.indexes(startingOffsets=place(73), endingOffsets=place(811)) == list(range(74, 812))
    assert await source.indexes(startingOffsets=json.dumps({topic: 555}), minPartitions=3) == list(range(555, 1200))
    elsewhere = json.dumps({topic: str(Position(OF_LOG, ids[73], 93))})
    with pytest.raises(PositionError, match="POSITION_DIVERGED"):
        await source.rows(startingOffsets=elsewhere)
    middle = rows[600]["__publishTime"]
    found = await source.indexes(startingTime=round(middle.timestamp() * 1000))
    assert found == [row["__index"] for row in rows if row["__publishTime"] >= middle]


@ALL
async def test_a_stream_reads_on_where_it_was(
    cluster: Cluster, client: pulsar.asyncio.Client, topic: str, source: Source, entry_format: EntryFormat
) -> None:
    await create(cluster, topic, entry_format)
    log = log_of(cluster, topic, entry_format)
    begun = source.stream()
    offset = await asyncio.to_thread(begun.latestOffset, begun.initialOffset(), begun.getDefaultReadLimit())
    assert offset == {topic: f"{OF_LOG}/start@-1", "starts": {topic: f"{OF_LOG}/start@-1"}}
    found = []
    for term, first in enumerate(range(0, 900, 300), 1):
        await cluster.until_deduplicating(topic)
        owner = await Owner(log, term).open()
        for index in range(first, first + 300, 10):
            owner.append(index, 10)
        await owner.until_stored(30)
        await cluster.admin.unload(topic)
        # Started again each time: all that it has is the offset.
        stream = source.stream(maxOffsetsPerTrigger=130)
        while (end := await asyncio.to_thread(stream.latestOffset, offset, stream.getDefaultReadLimit())) != offset:
            parts = await asyncio.to_thread(stream.partitions, offset, end)
            offset, read = end, await asyncio.to_thread(rows_in, stream, parts)
            assert 0 < len(read) <= 130
            found += [row["__index"] for row in read]
            position, last = Position.parse(offset[topic]), await log.locate(found[-1])
            assert position == Position(OF_LOG, last.message_id, found[-1], last.ownership)
    assert found == list(range(900))


async def trim(cluster: Cluster, topic: str) -> None:
    """Drops every ledger but the newest. Nobody writes any more."""
    before = (await cluster.admin.ledgers(topic)).first_id
    # For what it has not in a snapshot, Pulsar's deduplication keeps the ledgers.
    await cluster.admin.set_policy(topic, "deduplicationEnabled", False)
    await cluster.admin.set_policy(topic, "retention", {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0})

    async def is_done() -> bool:
        await cluster.url.call("POST", topic.replace("://", "/") + "/trim")
        return (await cluster.admin.ledgers(topic)).first_id != before

    await until(is_done)


@pytest.fixture
def in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is fetched far ahead."""
    monkeypatch.setattr(broker_connection, "MAX_QUEUE_ENTRIES", 2)
    monkeypatch.setattr(cluster_client, "STEP_BYTES", 1)
    monkeypatch.setattr(stock_reader, "STEP_BYTES", 1)
    monkeypatch.setattr("seqdedupe_spark.range_reader.MAX_ROWS", 1)


def some(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch:
    for found in batches:
        return found
    pytest.fail("there is nothing more")


@pytest.mark.usefixtures("in_small_steps")
@pytest.mark.parametrize("fails", [True, False])
async def test_what_is_trimmed_in_mid_read_is_missed(
    cluster: Cluster, client: pulsar.asyncio.Client, topic: str, source: Source, fails: bool
) -> None:
    await create(cluster, topic, EntryFormat.PACKED)
    log = log_of(cluster, topic, EntryFormat.PACKED)
    await written(log, cluster, topic, 2, 40, unloads_at_end=False)
    reader = source.batch(failOnDataLoss=fails)
    [part] = await asyncio.to_thread(reader.partitions)
    stock = await client.create_reader(topic, pulsar.MessageId.earliest, receiver_queue_size=1)
    first_of_stock = (await stock.read_next()).message_id().ledger_id()
    assert first_of_stock == (await cluster.admin.ledgers(topic)).first_id
    batches = reader.read(part)
    found = (await asyncio.to_thread(some, batches)).column("__index").to_pylist()
    await trim(cluster, topic)
    # The control arm: a reader that does not look at indexes is given what is left, and no word.
    while (await stock.read_next()).message_id().ledger_id() == first_of_stock:
        pass
    await stock.close()
    said = ""
    try:
        for more in await asyncio.to_thread(list, batches):
            found += more.column("__index").to_pylist()
    except PositionError as e:
        said = e.reason
    if said:
        assert (fails, said) == (True, "POSITION_TRIMMED")
    else:
        # A broker can have the ledger at hand that it has dropped: then nothing is missing.
        assert not fails or found == list(range(800))
        assert found[-400:] == list(range(400, 800))
    assert found == sorted(set(found))
    assert found[0] == 0
    # And a new one learns so at once.
    with pytest.raises(PositionError, match="POSITION_TRIMMED"):
        await source.rows(startingOffsets=json.dumps({topic: f"{OF_LOG}/start@-1"}))
    assert await source.indexes() == list(range(400, 800))


@pytest.mark.usefixtures("in_small_steps")
@ALL
async def test_an_unloaded_topic_is_read_on(
    cluster: Cluster, client: pulsar.asyncio.Client, topic: str, source: Source, entry_format: EntryFormat
) -> None:
    await create(cluster, topic, entry_format)
    await written(log_of(cluster, topic, entry_format), cluster, topic, 2, 20)
    reader = source.batch()
    [part] = await asyncio.to_thread(reader.partitions)
    found: list[int] = []
    batches = reader.read(part)
    for unloads in (True, True, False):
        if not unloads:
            for more in await asyncio.to_thread(list, batches):
                found += more.column("__index").to_pylist()
        else:
            found += (await asyncio.to_thread(some, batches)).column("__index").to_pylist()
            await cluster.admin.unload(topic)
    assert found == list(range(400))


async def test_a_topic_that_was_made_anew_is_another_one(
    cluster: Cluster, client: pulsar.asyncio.Client, topic: str, source: Source
) -> None:
    await create(cluster, topic, EntryFormat.PLAIN)
    await written(log_of(cluster, topic, EntryFormat.PLAIN), cluster, topic, 1, 2)
    reader = source.batch()
    planned = await asyncio.to_thread(reader.partitions)
    await cluster.admin.delete_topic(topic)
    with pytest.raises(NotFoundError):
        await asyncio.to_thread(rows_in, reader, planned)
    await create(cluster, topic, EntryFormat.PLAIN, OF_LOG + 1)
    with pytest.raises(PositionError, match="POSITION_OF_ANOTHER_INCARNATION"):
        await asyncio.to_thread(rows_in, reader, planned)
    assert await source.rows() == []


async def test_what_no_sidecar_writes_is_refused_without_a_subscription(
    cluster: Cluster, topic: str, source: Source
) -> None:
    with pytest.raises(NotFoundError, match=topic):
        await source.rows()
    assert topic not in await cluster.admin.topics("public/default"), "it was made by looking for it"
    await cluster.admin.create_topic(topic, {})
    with pytest.raises(SeqdedupeError, match=f"no sidecar writes {topic}"):
        await source.rows()
    assert await source.rows(failOnDataLoss=False) == []


async def test_what_was_there_before_a_take_over_is_not_read(
    cluster: Cluster, client: pulsar.asyncio.Client, topic: str, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(cluster, topic, EntryFormat.NATIVE)
    producer = await client.create_producer(topic, batching_enabled=False)
    for _ in range(200):
        await producer.send(b"theirs")
    await producer.close()
    before = taking_over.properties_of(await cluster.admin.stored_before(topic))
    await cluster.admin.set_properties(topic, before)
    await written(log_of(cluster, topic, EntryFormat.NATIVE), cluster, topic, 1, 10, unloads_at_end=False)
    begun = list[MessageId]()
    open_at = BrokerConnection._reader

    async def opened(connection: BrokerConnection, topic: str, start: MessageId, queue_entries: int) -> Any:
        begun.append(start)
        return await open_at(connection, topic, start, queue_entries)

    monkeypatch.setattr(BrokerConnection, "_reader", opened)
    assert await source.indexes() == list(range(100))
    assert min(begun) > taking_over.last_before(before)
