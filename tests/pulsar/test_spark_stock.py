"""Spark reads from a real broker topics that no sidecar writes: each message once, and what is lost is reported."""

import asyncio
import base64
import json
import logging
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pulsar.asyncio
import pytest

from pulsar_broker.standalone import Broker
from seqdedupe.errors import ConfigurationError, PositionError
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.pulsar_api_pb2 import EncryptionKeys, MessageMetadata
from seqdedupe_spark.cluster import broker_connection
from seqdedupe_spark.message_columns import SCHEMA, columns_of
from seqdedupe_spark.options import parse
from seqdedupe_spark.planning import SUBSCRIPTION_PREFIX, of_job, open_client
from seqdedupe_spark.range_reader import read_range
from seqdedupe_spark.range_task import JobOutput, RangeTask
from seqdedupe_spark.rounds import Positions, reset_position
from seqdedupe_spark.stores.contract import Binding
from tests.pulsar.owners import Cluster, until
from tests.pulsar.test_spark_source import Source, rows_in, some
from tests.pulsar.test_spark_source import in_small_steps as in_small_steps
from tests.pulsar.test_spark_source import source as source
from tests.pulsar.wire import Chunk, Publish, open_producer
from tests.spark.jobs import JOB, TABLE, Database, sqlite_database

SUBSCRIPTION = SUBSCRIPTION_PREFIX + JOB


class Stock:
    """A producer of Pulsar's own client, which makes batches of ten."""

    def __init__(self, cluster: Cluster, client: pulsar.asyncio.Client, topic: str) -> None:
        self._cluster = cluster
        self._client = client
        self._topic = topic
        self.sent = 0

    async def send(self, count: int, *, unloads: bool = True) -> None:
        """This many messages. The ledger that the broker writes, which it never drops, ends with them if it unloads."""
        producer = await self._client.create_producer(
            self._topic,
            producer_name="p",
            batching_enabled=True,
            batching_max_messages=10,
            batching_max_publish_delay_ms=60_000,
            compression_type=pulsar.CompressionType.LZ4,
        )
        sends = [producer.send(b"%d" % n) for n in range(self.sent, self.sent + count)]
        flushing = asyncio.gather(*sends)
        await asyncio.sleep(0)
        await producer.flush()
        await flushing
        await producer.close()
        self.sent += count
        if unloads:
            await self._cluster.admin.unload(self._topic)


@pytest.fixture
async def stock(cluster: Cluster, client: pulsar.asyncio.Client, topic: str) -> Stock:
    await cluster.admin.create_topic(topic, {})
    return Stock(cluster, client, topic)


class Job:
    """A reader job's rounds, with its tasks in this process. Each object is a run of it."""

    def __init__(self, broker: Broker, database: Database, topic: str, **more: object) -> None:
        given = {"service.url": broker.service_url, "admin.url": broker.admin_url, "topic": topic}
        self._source = parse(given | {name: str(value) for name, value in more.items()})
        self.service = self._source.service
        service = of_job(self.service, JOB)
        self._client = open_client(service, self._source.selection)
        self._positions = Positions(JOB, TABLE, self._source)
        self._store = database.store
        self._columns = columns_of(self._source.pulsar_columns, False)
        output = JobOutput(database.store, JOB, TABLE, self._columns)
        self._task = RangeTask(output, service, self._columns, None, False, 60.0)

    async def round(self, *, moves: bool = True) -> int:
        """Reads and writes what there is, within the limits; how much is left then. The subscription may stay."""
        return await asyncio.to_thread(self._round, moves)

    def _round(self, moves: bool) -> int:
        with self._store() as store:
            self._positions.bind(store, Binding(TABLE, False), self._columns)
            listing, standings = self._positions.look(self._client, store)
        for step in self._positions.plan(listing, standings):
            report = self._task.run([step])
            if report.failure is not None:
                raise report.failure
            self._positions.committed(step)
            topic = step.range.topic
            standings[topic] = standings[topic].after(step)
            if moves:
                listing.hold(topic, step.range.end)
        return sum(one.lag for one in standings.values())

    async def run(self) -> None:
        while await self.round():
            pass


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return sqlite_database(tmp_path / "out.db")


@pytest.fixture
def job(broker: Broker, database: Database, topic: str) -> Callable[..., Job]:
    return partial(Job, broker, database, topic)


def values(database: Database) -> list[int]:
    return [int(str(row[0])) for row in database.query(f"SELECT CAST(value AS TEXT) FROM {TABLE} ORDER BY rowid")]


async def first_ledger(cluster: Cluster, topic: str) -> int:
    return (await cluster.admin.storage(topic, "")).first_ledger


async def trim(cluster: Cluster, topic: str) -> None:
    """Has the broker drop every ledger that no subscription holds. The standalone broker has no retention."""
    await cluster.url.call("POST", topic.replace("://", "/") + "/trim")


async def until_trimmed(cluster: Cluster, topic: str, ledger_id: int) -> None:
    """Until this ledger is gone."""

    async def is_gone() -> bool:
        await trim(cluster, topic)
        return await first_ledger(cluster, topic) > ledger_id

    await until(is_gone)


async def forget(cluster: Cluster, topic: str) -> None:
    """What an operator does: pulsar-admin topics unsubscribe."""
    await cluster.url.call("DELETE", f"{topic.replace('://', '/')}/subscription/{SUBSCRIPTION}")


async def test_a_job_reads_each_message_once(
    cluster: Cluster, stock: Stock, topic: str, job: Callable[..., Job], database: Database
) -> None:
    """Over ledgers that come and go; every other round ends before the subscription moves, and a new run goes on.

    The topic is loaded again while it is still empty: its first ledger goes then.
    """
    assert await job().round() == 0
    await cluster.admin.unload(topic)
    for _ in range(3):
        await stock.send(70)
    began = await first_ledger(cluster, topic)
    moves, left = False, 21
    while left:
        assert await job(maxOffsetsPerTrigger=4).round(moves=moves) == left - min(left, 4)
        left -= min(left, 4)
        moves = not moves
        await trim(cluster, topic)
    assert values(database) == list(range(stock.sent))
    assert database.query(f'SELECT COUNT(*) FROM {TABLE} WHERE "__index" IS NOT NULL') == [(0,)]
    await stock.send(10)
    await job().run()
    assert values(database) == list(range(stock.sent))
    # What it has read, its subscription releases: but for the entry up to which it was read.
    await until_trimmed(cluster, topic, began)
    position = database.position(topic)
    assert (await cluster.admin.storage(topic, "")).ledgers.ordinal(position.message_id or MessageId(0, 0)) is not None
    assert await job().round() == 0


async def test_without_its_subscription_a_loss_is_told(
    cluster: Cluster,
    stock: Stock,
    topic: str,
    job: Callable[..., Job],
    database: Database,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The control arm: somebody removes the subscription, and Pulsar what it held."""
    await job().round()
    for _ in range(3):
        await stock.send(20)
    assert await job(maxOffsetsPerTrigger=1).round() == 5
    ledger_id = await first_ledger(cluster, topic)
    await forget(cluster, topic)
    await until_trimmed(cluster, topic, ledger_id)
    await stock.send(20, unloads=False)
    for _ in range(2):
        # Started again it must not take what is left for all there was.
        with pytest.raises(PositionError, match="POSITION_TRIMMED"):
            await job().round()
    assert values(database) == list(range(10))
    with caplog.at_level(logging.WARNING):
        await job(failOnDataLoss=False).run()
    assert "gone" in caplog.text
    found = values(database)
    assert found[:10] == list(range(10))
    assert found[-20:] == list(range(60, 80))
    assert len(found) == len(set(found)) < 80
    # It has a subscription again.
    await stock.send(20)
    await trim(cluster, topic)
    await job().run()
    assert values(database) == [*found, *range(80, 100)]


async def test_a_subscription_that_is_gone_is_made_again_where_nothing_is_missing(
    cluster: Cluster, stock: Stock, topic: str, job: Callable[..., Job], database: Database
) -> None:
    await job().round()
    await stock.send(30, unloads=False)
    assert await job(maxOffsetsPerTrigger=2).round() == 1
    await forget(cluster, topic)
    await job().run()
    assert values(database) == list(range(30))
    assert (await cluster.admin.storage(topic, SUBSCRIPTION)).let_go is not None


async def test_a_topic_that_was_made_anew_is_another_one(
    cluster: Cluster, stock: Stock, topic: str, job: Callable[..., Job], database: Database
) -> None:
    await job().round()
    await stock.send(20)
    await job().run()
    await cluster.admin.delete_topic(topic)
    await cluster.admin.create_topic(topic, {})
    with pytest.raises(PositionError, match="recreated"):
        await job().round()
    # As many messages as before, at the same entries.
    await stock.send(20)
    with pytest.raises(PositionError, match="recreated"):
        await job().round()
    await job(failOnDataLoss=False).run()
    await stock.send(20)
    await job().run()
    assert values(database)[:20] == list(range(20))
    assert values(database)[-20:] == list(range(40, 60))


@pytest.mark.usefixtures("in_small_steps")
@pytest.mark.parametrize("fails", [True, False])
async def test_what_is_trimmed_in_mid_read_is_missed(
    cluster: Cluster, client: pulsar.asyncio.Client, stock: Stock, topic: str, source: Source, fails: bool
) -> None:
    await cluster.admin.create_subscription(topic, SUBSCRIPTION)
    for unloads in (True, True, False):
        await stock.send(400, unloads=unloads)
    reader = source.batch(failOnDataLoss=False)
    [part] = await asyncio.to_thread(reader.partitions)
    [span] = part.value
    batches = read_range(reader.options.service, span) if fails else reader.read(part)
    found = (await asyncio.to_thread(some, batches)).column("value").to_pylist()
    plain = await client.create_reader(topic, pulsar.MessageId.earliest, receiver_queue_size=1)
    first = (await plain.read_next()).message_id().ledger_id()
    await forget(cluster, topic)
    await until_trimmed(cluster, topic, first)
    # The control arm: Pulsar's own reader is given what is left, and no word.
    while (await plain.read_next()).message_id().ledger_id() == first:
        pass
    await plain.close()
    said = ""
    try:
        for more in await asyncio.to_thread(list, batches):
            found += more.column("value").to_pylist()
    except PositionError as e:
        said = e.reason
    if said:
        assert (fails, said) == (True, "POSITION_TRIMMED")
    else:
        # A broker can have the ledger at hand that it has dropped: then nothing is missing.
        assert not fails or len(found) == stock.sent
        assert int(found[-1]) == stock.sent - 1
    numbers = list(map(int, found))
    assert numbers == sorted(set(numbers))


async def test_every_partition_has_a_position(
    cluster: Cluster,
    client: pulsar.asyncio.Client,
    topic: str,
    job: Callable[..., Job],
    database: Database,
) -> None:
    await cluster.url.call("PUT", topic.replace("://", "/") + "/partitions", 2)
    producer = await client.create_producer(topic, batching_enabled=False)
    for number in range(20):
        await producer.send(b"%d" % number, partition_key=str(number))
    await job(maxOffsetsPerTrigger=6).run()
    await producer.send(b"20", partition_key="20")
    await producer.close()
    await job().run()
    assert sorted(values(database)) == list(range(21))
    for number in range(2):
        part = f"{topic}-partition-{number}"
        ledgers, _, let_go = await cluster.admin.storage(part, SUBSCRIPTION)
        assert len(ledgers), "a partition without messages shows nothing"
        assert database.position(part).message_id == ledgers.message_id(len(ledgers) - 1)
        assert let_go is not None


async def test_a_job_begins_where_it_is_told(
    cluster: Cluster, stock: Stock, topic: str, job: Callable[..., Job], database: Database, source: Source
) -> None:
    await stock.send(40, unloads=False)
    rows = await source.rows(failOnDataLoss=False)
    assert [int(row["value"]) for row in rows] == list(range(40))
    middle = str(MessageId.from_bytes(rows[23]["__messageId"]))
    assert middle.count(":") == 2, "an entry has several messages"
    entry = middle.rpartition(":")[0]
    found = await source.rows(failOnDataLoss=False, endingOffsets=json.dumps({topic: entry}))
    assert [int(row["value"]) for row in found] == list(range(30))
    with pytest.raises(ConfigurationError, match="several messages of an entry"):
        await source.rows(failOnDataLoss=False, endingOffsets=json.dumps({topic: middle}))
    await job(startingOffsets=json.dumps({topic: middle})).run()
    assert values(database) == list(range(24, 40))
    await asyncio.to_thread(reset_position, database.store, JOB, topic, middle, job().service)
    await job().run()
    assert values(database) == 2 * list(range(24, 40))
    await forget(cluster, topic)
    before, _ = await asyncio.to_thread(reset_position, database.store, JOB, topic, "latest", job().service)
    assert before is not None
    assert database.position(topic) == before.position
    assert (await cluster.admin.storage(topic, SUBSCRIPTION)).let_go is not None


async def test_a_stream_goes_on_from_its_offset(cluster: Cluster, stock: Stock, source: Source, topic: str) -> None:
    await cluster.admin.create_subscription(topic, SUBSCRIPTION)
    begun = source.stream(failOnDataLoss=False)
    offset = await asyncio.to_thread(begun.latestOffset, begun.initialOffset(), begun.getDefaultReadLimit())
    found: list[int] = []
    for _ in range(2):
        await stock.send(50)
        stream = source.stream(failOnDataLoss=False, maxOffsetsPerTrigger=2)
        while (end := await asyncio.to_thread(stream.latestOffset, offset, stream.getDefaultReadLimit())) != offset:
            for _ in range(2):
                # Planned again it is the same.
                again = source.stream(failOnDataLoss=False)
                read = await asyncio.to_thread(rows_in, again, await asyncio.to_thread(again.partitions, offset, end))
            offset = end
            found += [int(row["value"]) for row in read]
    assert found == list(range(100))


async def test_keys_and_schema_versions_are_what_producers_set(
    cluster: Cluster, topic: str, source: Source, job: Callable[..., Job], database: Database
) -> None:
    """The control arm is the column `__key`: bytes are text there, and an empty key is none."""
    await cluster.admin.create_topic(topic, {})
    many = (
        # As Java's client makes a key of bytes.
        Publish(
            1,
            metadata=MessageMetadata(
                partition_key=base64.b64encode(b"\xff\x00"),
                partition_key_b64_encoded=True,
                schema_version=(7).to_bytes(8),
                ordering_key=b"\xffo",
            ),
        ),
        Publish(2, metadata=MessageMetadata(partition_key=b"/wA=")),
        Publish(3, metadata=MessageMetadata(partition_key=b"")),
        Publish(4),
        Publish(5, 6, (5, 6), metadata=MessageMetadata(schema_version=(2**40).to_bytes(8))),
    )
    await publish(cluster, topic, *many)
    rows = await source.rows(failOnDataLoss=False, pulsarColumns=True)
    assert [row["__key"] for row in rows] == [b"/wA=", b"/wA=", None, None, None, None]
    assert [row["__keyBytes"] for row in rows] == [b"\xff\x00", b"/wA=", b"", None, None, None]
    assert [row["__orderingKey"] for row in rows] == [b"\xffo", *[None] * 5]
    assert [row["__schemaVersion"] for row in rows] == [7, None, None, None, 2**40, 2**40]
    assert list((await source.rows(failOnDataLoss=False))[0]) == SCHEMA.names
    await job(pulsarColumns=True).run()
    written = database.query(f'SELECT "__keyBytes", "__schemaVersion" FROM {TABLE} ORDER BY rowid')
    assert written == [(row["__keyBytes"], row["__schemaVersion"]) for row in rows]


MARKER = MessageMetadata(marker_type=21)
"""For a transaction that was committed."""
ENCRYPTED = MessageMetadata(
    encryption_keys=[EncryptionKeys(key=b"key", value=b"of nobody")],
    encryption_algo=b"AES",
    encryption_param=b"123456789012",
)


async def publish(cluster: Cluster, topic: str, *several: Publish) -> None:
    producer = await open_producer(cluster.service_url, topic, "wire")
    producer.send(several)
    for _ in several:
        await producer.answer()
    await producer.close()


async def test_what_no_reader_is_given_is_no_gap(
    cluster: Cluster, topic: str, job: Callable[..., Job], database: Database
) -> None:
    """Markers, in the middle and at the end, and an entry that a Java client made of several messages."""
    await cluster.admin.create_topic(topic, {})
    marker = Publish(0, metadata=MARKER)
    first = [Publish(1, payload=b"1"), marker, marker, Publish(2, 4, (2, 3, 4)), marker]
    await publish(cluster, topic, *first)
    assert await job(maxOffsetsPerTrigger=2).round() == 2
    await job().run()
    assert values(database) == [1, 2, 3, 4]
    await publish(cluster, topic, Publish(5, payload=b"5"))
    await job().run()
    assert values(database) == [1, 2, 3, 4, 5]


async def test_a_chunked_message_is_read_where_it_ends(
    cluster: Cluster, topic: str, job: Callable[..., Job], database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a round ends within it, and while its end is still missing."""
    monkeypatch.setattr(broker_connection, "READ_TIMEOUT_SECONDS", 3.0)
    await cluster.admin.create_topic(topic, {})
    first, second, third = (Publish(2, chunk=Chunk("wire-2", n, 3), payload=b"2") for n in range(3))
    await publish(cluster, topic, Publish(1, payload=b"1"), first, second)
    assert await job().round() == 0
    assert values(database) == [1]
    await publish(cluster, topic, third, Publish(3, chunk=Chunk("wire-3", 0, 2), payload=b"3"))
    for left in (2, 1, 0):
        assert await job(maxOffsetsPerTrigger=1).round() == left
    assert values(database) == [1, 222]
    await publish(cluster, topic, Publish(3, chunk=Chunk("wire-3", 1, 2), payload=b"3"), Publish(4, payload=b"4"))
    await job().run()
    assert values(database) == [1, 222, 33, 4]


async def test_a_chunked_message_may_be_compressed(
    cluster: Cluster, client: pulsar.asyncio.Client, topic: str, source: Source
) -> None:
    """For its parts a broker says nothing."""
    await cluster.admin.create_topic(topic, {})
    producer = await client.create_producer(
        topic, batching_enabled=False, chunking_enabled=True, compression_type=pulsar.CompressionType.LZ4
    )
    large = random.Random(1).randbytes(11_000_000)
    for value in (b"before", large):
        await producer.send(value)
    assert [row["value"] for row in await source.rows(failOnDataLoss=False)] == [b"before", large]
    await producer.send(b"after")
    await producer.close()
    found = await source.rows(failOnDataLoss=False, pulsarColumns=True)
    assert [row["value"] for row in found] == [b"before", large, b"after"]
    assert [row["__keyBytes"] for row in found] == [None] * 3


@pytest.mark.parametrize(
    ("several", "what"),
    [
        ((Publish(2, chunk=Chunk("wire-2", 1, 2)),), "ends a chunked message"),
        ((Publish(2, metadata=ENCRYPTED),), "encrypted"),
    ],
)
@pytest.mark.parametrize("is_last", [False, True])
async def test_what_cannot_be_read_is_refused(
    cluster: Cluster,
    topic: str,
    job: Callable[..., Job],
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    several: tuple[Publish, ...],
    what: str,
    is_last: bool,
) -> None:
    monkeypatch.setattr(broker_connection, "READ_TIMEOUT_SECONDS", 1.0)
    await cluster.admin.create_topic(topic, {})
    await publish(cluster, topic, Publish(1, payload=b"1"), *several, *([] if is_last else [Publish(3, payload=b"3")]))
    with pytest.raises(ConfigurationError, match="UNSUPPORTED_MESSAGE") as refused:
        await job().round()
    assert what in refused.value.message
    assert values(database) == []
    if not is_last:
        # The entry that the message names is the way past it.
        entry = refused.value.message.split(" of ")[0]
        await asyncio.to_thread(reset_position, database.store, JOB, topic, entry, job().service)
        await job().run()
        assert values(database) == [3]
