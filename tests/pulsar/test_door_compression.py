"""What native entries are in Pulsar: as stock producers sent them, or compressed as configured."""

import asyncio
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pulsar
import pytest

from pulsar_broker.standalone import Broker
from seqdedupe.client.blocking import Client
from seqdedupe.log.pulsar.admin_url import AdminUrl, PulsarAdmin
from seqdedupe.pulsar_wire.batches import EntryRow, rows_of
from seqdedupe.pulsar_wire.connection import StoredEntry, connect_to_owner
from seqdedupe.pulsar_wire.frames import COMPRESSIONS, metadata_of
from seqdedupe.pulsar_wire.pulsar_api_pb2 import LZ4, NONE, ZSTD, CompressionType
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.broker_sidecar.door.conftest import open_wire as open_wire
from tests.broker_sidecar.door.wire import Wire, batch, door_of, ids_of
from tests.pulsar.owners import quiet
from tests.pulsar.test_door import MEBIBYTE, go_on, load
from tests.pulsar.test_door import connect as connect
from tests.pulsar.test_door import namespace as namespace
from tests.pulsar.test_door import start as start
from tests.pulsar.test_door import topic as topic

Start = Callable[..., Sidecar]
OpenWire = Callable[..., Wire]


async def _stored(broker: Broker, topic: str) -> list[StoredEntry]:
    connection = await connect_to_owner(broker.service_url, topic)
    try:
        reader = await connection.reader(topic, "entries")
        last, _ = await reader.last()
        found: list[StoredEntry] = []
        while not found or found[-1].place < last:
            found.append(await asyncio.wait_for(reader.next(), LAST_RESORT_SECONDS))
        return found
    finally:
        await connection.close()


def rows(entry: StoredEntry) -> list[EntryRow]:
    columns = rows_of(entry.entry, entry.metadata, 8 * MEBIBYTE)
    return [columns.row(k) for k in range(len(columns))]


def entries(broker: Broker, topic: str) -> list[StoredEntry]:
    """All entries with messages."""
    found = asyncio.run(_stored(broker, topic))
    return [one for one in found if not any(name == b"seqdedupe.kind" for name, _ in rows(one)[0].properties)]


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_new_batch_passes_byte_for_byte_and_a_mixed_one_is_encoded(
    start: Start, broker: Broker, topic: str, open_wire: OpenWire, compression: CompressionType.ValueType
) -> None:
    sidecar = start(pulsar_entry_format="native")
    wire = open_wire(door_of(sidecar))
    wire.produce(topic, "x")
    whole, mixed = (batch(*ids, size=1000, compression=compression, key=b"k") for ids in ((1, 2, 3), (2, 3, 4, 7)))

    def send() -> list[int]:
        wire.send(1, whole, highest=3)
        wire.send(2, mixed, highest=7)
        return ids_of(wire.receipts(2))

    assert send() == [1, 2]
    first, second = found = entries(broker, topic)
    assert bytes(first.entry.payload) == bytes(whole.payload)
    assert [row.sequence_id for row in rows(second)] == [4, 7]
    for one, count in zip(found, (3, 2), strict=True):
        metadata = one.metadata
        assert (metadata.compression, metadata.num_messages_in_batch) == (compression, count)
        assert (metadata.producer_name, metadata.partition_key) == (b"x", b"k")
        assert metadata.uncompressed_size > 1000 * count
    # Again to an owner that knows nothing but the topic.
    sidecar.kill()
    wire = open_wire(door_of(start(pulsar_entry_format="native")))
    assert wire.produce(topic, "x").last_sequence_id == 7
    assert send() == [1, 2]
    assert entries(broker, topic) == found


def test_a_batch_with_a_schema_and_a_delivery_time_passes(
    start: Start, broker: Broker, topic: str, open_wire: OpenWire
) -> None:
    """Stock consumers see the fields, and readers of the sidecar the properties."""
    sidecar = start(pulsar_entry_format="native")
    wire = open_wire(door_of(sidecar))
    wire.produce(topic, "x")
    entry = batch(1, 2, compression=LZ4, size=1000, ordering_key=b"o")
    metadata = metadata_of(entry)
    metadata.schema_version, metadata.deliver_at_time = bytes(8), 70
    wire.send(1, entry._replace(metadata=metadata.SerializeToString()), highest=2)
    assert ids_of(wire.receipts(1)) == [1]
    [found] = entries(broker, topic)
    assert bytes(found.entry.payload) == bytes(entry.payload)
    assert (found.metadata.schema_version, found.metadata.deliver_at_time) == (bytes(8), 70)
    assert [row.properties for row in rows(found)] == [(), ()]
    with Client(sidecar.address) as client, client.reader(topic) as reader:
        assert [message.properties for message in reader] == [
            {"pulsar.deliver_at_time": "70", "pulsar.schema_version": "0" * 16, "pulsar.ordering_key": "bw=="}
        ] * 2


def test_a_batch_near_the_limit(start: Start, broker: Broker, topic: str, open_wire: OpenWire) -> None:
    """With our field it may be too large: then it is stored as two entries."""
    wire = open_wire(door_of(start(pulsar_entry_format="native")))
    wire.produce(topic, "x")
    limit = wire.connected.connected.max_message_size
    sizes = [len(batch(1, 2, size=0).payload)]
    for k, spare in enumerate((2000, 100)):
        size = (limit - sizes[0] - spare) // 2
        entry = batch(2 * k + 1, 2 * k + 2, size=size)
        assert limit - spare - 10 <= len(entry.payload) < limit
        wire.send(2 * k + 1, entry, highest=2 * k + 2)
    assert ids_of(wire.receipts(2)) == [1, 3]
    assert [len(rows(entry)) for entry in entries(broker, topic)] == [2, 1, 1]


def test_stock_producers_keep_their_compression_and_every_consumer_reads_it(
    start: Start,
    broker: Broker,
    topic: str,
    connect: Callable[..., pulsar.Client],
    open_wire: OpenWire,
    pulsar_home: Path,
) -> None:
    sidecar = start(pulsar_entry_format="native", pulsar_compression="zstd")
    client = connect(sidecar)
    kinds = pulsar.CompressionType
    for kind in (kinds.NONE, kinds.LZ4, kinds.ZLib, kinds.ZSTD, kinds.SNAPPY):
        for batches in (True, False):
            name = f"{kind.name}-{batches}"
            producer = client.create_producer(
                topic,
                producer_name=name,
                compression_type=kind,
                batching_enabled=batches,
                batching_max_publish_delay_ms=1000,
            )
            for i in range(1, 4):
                producer.send_async(f"{name}-{i}".encode() * 50, lambda *_: None, sequence_id=i)
            producer.flush()
            producer.close()
    with Client(sidecar.address) as own, own.producer(topic, "own") as publisher:
        for payload in (b"own" * 50, random.Random(1).randbytes(500)):
            publisher.send(payload).result(LAST_RESORT_SECONDS)
    found = {
        (one.metadata.producer_name.decode(), one.metadata.compression): len(rows(one))
        for one in entries(broker, topic)
    }
    expected = {
        (f"{kind.name}-{batches}", COMPRESSIONS[k]): 3 if batches else 1
        for k, kind in enumerate((kinds.NONE, kinds.LZ4, kinds.ZLib, kinds.ZSTD, kinds.SNAPPY))
        for batches in (True, False)
    }
    # Random bytes do not get smaller.
    assert found == expected | {("own", ZSTD): 1, ("own", NONE): 1}
    payloads = [f"{name}-{i}".encode() * 50 for name, _ in expected for i in range(1, 4)] + [b"own" * 50]
    python = pulsar.Client(broker.service_url, logger=quiet())
    reader = python.create_reader(topic, pulsar.MessageId.earliest)
    read: list[bytes] = []
    while len(read) < len(payloads):
        message = reader.read_next(timeout_millis=int(LAST_RESORT_SECONDS * 1000))
        if "seqdedupe.kind" not in message.properties():
            read.append(message.data())
    python.close()
    assert read == payloads
    count = str(sum(len(rows(entry)) for entry in asyncio.run(_stored(broker, topic))))
    command = [str(pulsar_home / "bin" / "pulsar-client"), "--url", broker.service_url, "consume", topic]
    options = ["--subscription-name", "java", "--subscription-position", "Earliest", "--num-messages", count]
    said = subprocess.run([*command, *options], capture_output=True, check=False, timeout=LAST_RESORT_SECONDS).stdout
    for payload in payloads:
        assert b"content:" + payload in said


async def test_passed_batches_over_kills_and_unloads(
    start: Start, broker: Broker, topic: str, connect: Callable[..., pulsar.Client]
) -> None:
    sidecar = start(pulsar_entry_format="native")
    admin = PulsarAdmin(AdminUrl(broker.admin_url))
    producers = load(connect(sidecar), topic)
    for _ in range(3):
        sidecar.restart()
        go_on(producers)
        await admin.unload(topic)
        go_on(producers)
    sent = {}
    for producer in producers:
        await asyncio.to_thread(producer.finish)
        assert not producer.failed, producer.failed[:3]
        assert len(producer.acknowledged) == producer.sent
        sent[producer.name_in_log] = producer.sent
    with Client(sidecar.address) as client, client.reader(topic) as reader:
        found: dict[str, list[int]] = {name: [] for name in sent}
        for message in reader:
            found[message.producer_name].append(message.sequence_id)
    assert found == {name: list(range(count)) for name, count in sent.items()}
