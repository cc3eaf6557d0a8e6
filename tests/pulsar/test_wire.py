"""Our own use of Pulsar's protocol against a real broker and its stock client, in both directions."""

import asyncio
import time
from collections.abc import AsyncIterator

import pulsar
import pulsar.asyncio
import pytest

from seqdedupe.errors import SeqdedupeError
from seqdedupe.pulsar_wire.batches import EntryRow, EntryRows, batch_of, rows_of
from seqdedupe.pulsar_wire.connection import Connection, EntryProducer, WirePlace, connect, connect_to_owner
from seqdedupe.pulsar_wire.frames import COMPRESSIONS, entry_frame_bytes, stamped
from seqdedupe.pulsar_wire.pulsar_api_pb2 import LZ4, NONE, SNAPPY, ZLIB, ZSTD, CompressionType, WaitForExclusive
from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.pulsar.owners import Cluster

STOCK = {
    NONE: pulsar.CompressionType.NONE,
    LZ4: pulsar.CompressionType.LZ4,
    ZLIB: pulsar.CompressionType.ZLib,
    ZSTD: pulsar.CompressionType.ZSTD,
    SNAPPY: pulsar.CompressionType.SNAPPY,
}
MAX_BYTES = 5 * 1024 * 1024
ROWS = [
    EntryRow(0, b"first"),
    EntryRow(5, b"second" * 100, b"key", b"ordering", ((b"a", b"1"), ("ü".encode(), b"")), 1_700_000_000_000),
    EntryRow(2**40, b"", b"", None, (), 3),
]


class Log:
    """What the callbacks of a producer are given."""

    def __init__(self) -> None:
        self.receipts: list[tuple[int, WirePlace]] = []
        self.ends: list[tuple[SeqdedupeError, tuple[int, ...]]] = []
        self._news = asyncio.Event()

    def receipt(self, sequence_id: int, place: WirePlace) -> None:
        self.receipts.append((sequence_id, place))
        self._news.set()

    def end(self, why: SeqdedupeError, unknown: tuple[int, ...]) -> None:
        self.ends.append((why, unknown))
        self._news.set()

    async def until(self, receipts: int = 0, ends: int = 0) -> None:
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            while len(self.receipts) < receipts or len(self.ends) < ends:
                self._news.clear()
                await self._news.wait()


@pytest.fixture
async def owner(cluster: Cluster, topic: str) -> AsyncIterator[Connection]:
    """A connection to the topic's broker."""
    connection = await connect_to_owner(cluster.service_url, topic)
    yield connection
    await connection.close()


async def opened(connection: Connection, topic: str, log: Log) -> EntryProducer:
    return await connection.producer(topic, log.receipt, log.end, name="wire")


@pytest.mark.parametrize("compression", COMPRESSIONS)
async def test_a_stock_consumer_reads_what_we_write(
    owner: Connection, client: pulsar.asyncio.Client, topic: str, compression: CompressionType.ValueType
) -> None:
    log = Log()
    producer = await opened(owner, topic, log)
    entry = stamped(batch_of(EntryRows.of(ROWS), b"true name", int(time.time() * 1000), compression), b"ours" * 20)
    producer.send(7, entry, highest=8, rows=len(ROWS))
    await log.until(receipts=1)
    reader = await client.create_reader(topic, pulsar.MessageId.earliest)
    for row in ROWS:
        message = await asyncio.wait_for(reader.read_next(), LAST_RESORT_SECONDS)
        assert message.data() == row.payload
        assert message.producer_name() == "true name"
        assert message.partition_key() == (row.key or b"").decode()
        assert message.ordering_key() == (row.ordering_key or b"").decode()
        assert message.event_timestamp() == row.event_time
        assert message.properties() == {name.decode(): value.decode() for name, value in row.properties}
        assert f"seq={row.sequence_id}," in str(message._message)
    await reader.close()
    await producer.close()
    assert [(str(why), unknown) for why, unknown in log.ends] == [("producer wire was closed [LOG_REFUSED]", ())]


async def test_our_reader_gets_entries_as_they_were_written(owner: Connection, topic: str) -> None:
    log = Log()
    producer = await opened(owner, topic, log)
    entries = [stamped(batch_of(EntryRows.of(ROWS * 50), b"p", 1), b"%d" % k) for k in range(8)]
    for k, entry in enumerate(entries):
        producer.send(k, entry, rows=len(ROWS) * 50)
    await log.until(receipts=len(entries))
    assert [sequence_id for sequence_id, _ in log.receipts] == list(range(len(entries)))
    places = [place for _, place in log.receipts]
    for start in (None, places[3]):
        reader = await owner.reader(topic, "reader", start)
        for k in range(0 if start is None else 3, len(entries)):
            stored = await asyncio.wait_for(reader.next(), LAST_RESORT_SECONDS)
            assert (stored.place, *map(bytes, stored.entry)) == (places[k], *map(bytes, entries[k]))
            assert stored.metadata.seqdedupe == b"%d" % k
        await reader.close()


@pytest.mark.parametrize("compression", COMPRESSIONS)
async def test_we_read_what_the_stock_client_writes(
    owner: Connection, client: pulsar.asyncio.Client, topic: str, compression: CompressionType.ValueType
) -> None:
    producer = await client.create_producer(
        topic, producer_name="stock", compression_type=STOCK[compression], batching_max_publish_delay_ms=200
    )
    await asyncio.gather(
        *(
            producer.send(
                b"payload %d" % k,
                properties={"k": str(k)},
                partition_key=f"key-{k % 2}",
                ordering_key="o",
                sequence_id=10 * k,
                event_timestamp=1000 + k,
            )
            for k in range(1, 6)
        )
    )
    await producer.close()
    reader = await owner.reader(topic, "reader")
    rows: list[EntryRow] = []
    while len(rows) < 5:
        stored = await asyncio.wait_for(reader.next(), LAST_RESORT_SECONDS)
        columns = rows_of(stored.entry, stored.metadata, MAX_BYTES)
        rows += (columns.row(k) for k in range(len(columns)))
        assert stored.metadata.producer_name == b"stock"
    assert rows == [
        EntryRow(10 * k, b"payload %d" % k, b"key-%d" % (k % 2), b"o", ((b"k", b"%d" % k),), 1000 + k)
        for k in range(1, 6)
    ]


async def test_a_topic_has_one_exclusive_producer(owner: Connection, cluster: Cluster, topic: str) -> None:
    first, second, log = Log(), Log(), Log()
    producer = await opened(owner, topic, first)
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        rival = await connect(cluster.service_url)
        with pytest.raises(SeqdedupeError, match="NOT_OWNER"):
            await rival.producer(topic, second.receipt, second.end, name="rival")
        waiting = asyncio.create_task(
            rival.producer(topic, log.receipt, log.end, name="waiter", access_mode=WaitForExclusive, timeout=None)
        )
        await asyncio.sleep(0)
        await rival.partitions(topic)
        assert not waiting.done()
        await producer.close()
        assert (await waiting).name == "waiter"
        await rival.close()
    assert [unknown for _, unknown in log.ends] == [()]
    assert second.ends == []


async def test_an_unload_ends_a_producer_and_nothing_is_sent_again(
    owner: Connection, cluster: Cluster, topic: str
) -> None:
    log = Log()
    producer = await opened(owner, topic, log)
    entry = batch_of(EntryRows.of(ROWS), b"p", 1)
    sent = 0
    unloading = asyncio.create_task(cluster.admin.unload(topic))
    while not log.ends:
        while producer.outstanding < 16 and not log.ends:
            producer.send(sent, entry, rows=len(ROWS))
            sent += 1
        await asyncio.sleep(0)
    await unloading
    [(why, unknown)] = log.ends
    assert why.reason == "LOG_REFUSED"
    assert [sequence_id for sequence_id, _ in log.receipts] + list(unknown) == list(range(sent))
    with pytest.raises(SeqdedupeError, match="LOG_REFUSED"):
        producer.send(sent, entry)
    assert owner.is_open


async def test_an_entry_may_be_as_large_as_the_broker_says(
    owner: Connection, client: pulsar.asyncio.Client, topic: str
) -> None:
    """With our field, which is appended to what a client has kept within the limit."""
    log = Log()
    producer = await opened(owner, topic, log)
    room = owner.max_message_bytes - entry_frame_bytes(
        stamped(batch_of(EntryRows.of([EntryRow(1, b"")]), b"p", 1), bytes(300))
    )
    # Sizes of some kilobytes and more take some bytes more to write.
    rows = EntryRows.of([EntryRow(1, bytes(room - 16))])
    entry = stamped(batch_of(rows, b"p", 1), bytes(300))
    producer.send(1, entry)
    await log.until(receipts=1)
    assert 0 <= owner.max_message_bytes - entry_frame_bytes(entry) < 16
    reader = await client.create_reader(topic, pulsar.MessageId.earliest)
    message = await asyncio.wait_for(reader.read_next(), LAST_RESORT_SECONDS)
    assert len(message.data()) == room - 16
    await reader.close()
    stored = await (await owner.reader(topic, "reader")).next()
    assert tuple(map(bytes, stored.entry)) == tuple(map(bytes, entry))


async def test_partitions_are_told(owner: Connection, topic: str) -> None:
    assert await owner.partitions(topic) == 0
