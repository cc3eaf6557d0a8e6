"""What stock producers say about their messages, at the door of a sidecar over Pulsar: schemas, and delivery times."""

import asyncio
import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pulsar
import pytest
from pulsar.schema import BytesSchema, Integer, JsonSchema, Record, String, StringSchema

from pulsar_broker.standalone import Broker
from seqdedupe.client.blocking import Client
from seqdedupe.pulsar_wire.batches import rows_of
from seqdedupe.pulsar_wire.connection import StoredEntry, connect_to_owner
from seqdedupe.pulsar_wire.pulsar_api_pb2 import BaseCommand, Schema
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.broker_sidecar.door.conftest import open_wire as open_wire
from tests.broker_sidecar.door.wire import Wire, batch, door_of, ids_of, single
from tests.pulsar.owners import quiet
from tests.pulsar.test_door import MEBIBYTE
from tests.pulsar.test_door import connect as connect
from tests.pulsar.test_door import namespace as namespace
from tests.pulsar.test_door import start as start
from tests.pulsar.test_door import topic as topic


class Order(Record):  # type: ignore[misc]  # the library has no types
    number = Integer()


class Bill(Record):  # type: ignore[misc]
    total = String()


def consumed(broker: Broker, topic: str, schema: Any, count: int) -> list[Any]:
    """This many values, as a typed consumer decodes them, without the sidecar's own entries."""
    client = pulsar.Client(broker.service_url, logger=quiet())
    try:
        first = pulsar.InitialPosition.Earliest
        consumer = client.subscribe(topic, "typed", schema=schema, initial_position=first)
        found: list[Any] = []
        while len(found) < count:
            message = consumer.receive(timeout_millis=int(LAST_RESORT_SECONDS * 1000))
            if "seqdedupe.kind" not in message.properties():
                found.append(message.value())
        return found
    finally:
        client.close()


def test_typed_consumers_decode_what_typed_producers_sent(
    start: Callable[..., Sidecar], broker: Broker, topic: str, connect: Callable[..., pulsar.Client]
) -> None:
    client = connect(start())
    producer = client.create_producer(topic, producer_name="p", schema=JsonSchema(Order))
    for i in range(1, 4):
        producer.send(Order(number=i), sequence_id=i)
        producer.send(Order(number=i), sequence_id=i)
    producer.close()
    # The same schema again, also under another name; another one is refused, and bytes are the producer's own affair.
    again = client.create_producer(topic, producer_name="q", schema=JsonSchema(Order))
    again.send(Order(number=4), sequence_id=1)
    with pytest.raises(pulsar.NotAllowedError):
        client.create_producer(topic, producer_name="r", schema=JsonSchema(Bill))
    assert [order.number for order in consumed(broker, topic, JsonSchema(Order), 4)] == [1, 2, 3, 4]


def test_a_string(
    start: Callable[..., Sidecar], broker: Broker, topic: str, connect: Callable[..., pulsar.Client]
) -> None:
    producer = connect(start()).create_producer(topic, schema=StringSchema())
    producer.send("ü")
    assert consumed(broker, topic, StringSchema(), 1) == ["ü"]


def test_a_topic_without_a_schema_gets_none(
    start: Callable[..., Sidecar], topic: str, connect: Callable[..., pulsar.Client]
) -> None:
    client = connect(start())
    client.create_producer(topic, schema=BytesSchema()).send(b"1")
    with pytest.raises(pulsar.NotAllowedError):
        client.create_producer(topic, schema=JsonSchema(Order))


@pytest.mark.parametrize("kind", ["Json", "Avro"])
def test_the_schema_is_that_of_the_registry(
    start: Callable[..., Sidecar], broker: Broker, topic: str, open_wire: Callable[..., Wire], kind: str
) -> None:
    definition = json.dumps(Order.schema())
    schema = Schema(name="Order", type=Schema.Type.Value(kind), schema_data=definition.encode())
    wire = open_wire(door_of(start()))
    version = wire.produce(topic, schema=schema).schema_version
    assert version == bytes(8)
    assert wire.get_or_create_schema(topic, schema).getOrCreateSchemaResponse.schema_version == version
    with urllib.request.urlopen(f"{broker.admin_url}/admin/v2/schemas/{topic.partition('://')[2]}/schema") as answer:
        there = json.load(answer)
    assert (there["type"], there["version"], json.loads(there["data"])) == (kind.upper(), 0, Order.schema())
    wire.send(0, batch(0, 1), highest=1)
    assert ids_of(wire.receipts(1)) == [0]
    # The writer would label it with the topic's schema, by which nobody could decode it.
    wire.send(2, single(2, schema_version=b"\0" * 7 + b"\1"))
    assert wire.next().type == BaseCommand.SEND_ERROR


async def stored(broker: Broker, topic: str, count: int) -> list[tuple[int, bytes]]:
    """The delivery times and schema versions of this many entries with messages."""
    connection = await connect_to_owner(broker.service_url, topic)
    try:
        reader = await connection.reader(topic, "times")
        found: list[tuple[int, bytes]] = []
        while len(found) < count:
            entry = await reader.next()
            if b"seqdedupe.kind" not in (*(pair.key for pair in entry.metadata.properties), *kinds(entry)):
                found.append((entry.metadata.deliver_at_time, entry.metadata.schema_version))
        return found
    finally:
        await connection.close()


def kinds(entry: StoredEntry) -> list[bytes]:
    """The names of the properties of the first message of a batch."""
    if not entry.metadata.HasField("num_messages_in_batch"):
        return []
    rows = rows_of(entry.entry, entry.metadata, MEBIBYTE)
    return [name for name, _ in rows.row(0).properties]


@pytest.mark.parametrize("entry_format", ["plain", "native"])
def test_a_message_has_its_delivery_time(
    start: Callable[..., Sidecar],
    broker: Broker,
    topic: str,
    connect: Callable[..., pulsar.Client],
    entry_format: str,
) -> None:
    sidecar = start(pulsar_entry_format=entry_format)
    producer = connect(sidecar).create_producer(topic, producer_name="p", batching_enabled=False)
    producer.send(b"later", deliver_at=2**41)
    producer.send(b"now")
    assert asyncio.run(stored(broker, topic, 2)) == [(2**41, b""), (0, b"")]


def test_each_native_entry_has_the_version_of_its_schema(
    start: Callable[..., Sidecar], broker: Broker, topic: str, open_wire: Callable[..., Wire]
) -> None:
    """Also in a topic that was created without a schema, and by producers of several versions."""
    wire = open_wire(door_of(start(pulsar_entry_format="native")))
    assert not wire.produce(topic).schema_version
    wire.send(0, single(0))
    assert ids_of(wire.receipts(1)) == [0]

    def schema(*fields: str) -> Schema:
        each = [{"name": name, "type": ["null", "int"], "default": None} for name in fields]
        definition = json.dumps({"type": "record", "name": "Order", "fields": each})
        return Schema(name="Order", type=Schema.Type.Value("Avro"), schema_data=definition.encode())

    first = wire.produce(topic, "first", schema=schema("a")).schema_version
    second = wire.get_or_create_schema(topic, schema("a", "b")).getOrCreateSchemaResponse.schema_version
    assert (first, second) == (bytes(8), b"\0" * 7 + b"\1")
    for i, version in enumerate((first, second, first)):
        wire.send(i, single(i, schema_version=version))
    assert ids_of(wire.receipts(3)) == [0, 1, 2]
    assert asyncio.run(stored(broker, topic, 4)) == [(0, b""), (0, first), (0, second), (0, first)]
    # Pulsar judges whether a schema can be added.
    other = Schema(name="Order", type=Schema.Type.Value("Avro"), schema_data=b'"string"')
    assert wire.get_or_create_schema(topic, other).getOrCreateSchemaResponse.HasField("error_code")


def test_packed_entries_have_no_delivery_times(
    start: Callable[..., Sidecar], topic: str, open_wire: Callable[..., Wire]
) -> None:
    sidecar = start()
    with Client(sidecar.address) as client:
        client.admin.create_topic(topic, entry_format="packed")
    wire = open_wire(door_of(sidecar))
    wire.produce(topic)
    wire.send(0, single(0, deliver_at_time=2**41))
    assert "is to be delivered later" in wire.next().send_error.message
