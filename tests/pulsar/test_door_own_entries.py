"""Stock consumers and readers of one URL do not see the entries that a sidecar writes for itself: on a real broker."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulsar
import pytest

from examples.pulsar.messages import messages
from pulsar_broker.standalone import Broker
from seqdedupe.client.blocking import Client
from seqdedupe.log.pulsar.admin_url import AdminUrl, PulsarAdmin
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.broker_sidecar.door.java_client import JavaClient
from tests.broker_sidecar.door.wire import door_of
from tests.pulsar.owners import quiet
from tests.pulsar.test_door import Start
from tests.pulsar.test_door import connect as connect
from tests.pulsar.test_door import namespace as namespace
from tests.pulsar.test_door import start as start
from tests.pulsar.test_door import topic as topic
from tests.pulsar.test_door_consumers import ONE_URL, SHOW_OWN, WAIT_MS, next_of, payloads, publish, taken

Connect = Callable[..., pulsar.Client]

EARLIEST, LATEST = pulsar.MessageId.earliest, pulsar.MessageId.latest
FROM_FIRST = pulsar.InitialPosition.Earliest
OWN = {"marker", "control"}
EVERY_FORMAT = pytest.mark.parametrize("entry_format", ["plain", "packed", "native"])


def kinds_at_broker(broker: Broker, topic: str) -> list[str]:
    """The kinds of a topic's own entries, which every consumer of the broker sees."""
    client = pulsar.Client(broker.service_url, logger=quiet())
    try:
        return own_kinds(client.create_reader(topic, EARLIEST))
    finally:
        client.close()


def own_kinds(reader: Any) -> list[str]:
    found = []
    while reader.has_message_available():
        kind = reader.read_next(WAIT_MS).properties().get("seqdedupe.kind")
        found += [kind] if kind in OWN else []
    return found


def unpacked(message: Any) -> list[bytes]:
    """The payloads in a message, which a sidecar has packed or not."""
    if message.properties().get("seqdedupe.kind") == "batch":
        return [one.payload or b"" for one in messages(message.data(), message.properties(), "", 0)]
    return [message.data()]


async def admin(broker: Broker, method: str, topic: str, what: str) -> Any:
    """What the broker's admin URL answers."""
    answer = await AdminUrl(broker.admin_url).call(method, f"{topic.replace('://', '/')}/{what}")
    return json.loads(answer.raw or b"null")


async def until_no_backlog(broker: Broker, topic: str, subscriptions: set[str]) -> None:
    """Until nothing is left for these subscriptions."""
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while True:
            found = (await admin(broker, "GET", topic, "stats?getPreciseBacklog=true"))["subscriptions"]
            if all(found[name]["msgBacklog"] == 0 and found[name]["unackedMessages"] == 0 for name in subscriptions):
                return


@EVERY_FORMAT
async def test_consumers_of_every_type_receive_messages_alone(
    start: Start, broker: Broker, topic: str, connect: Connect, entry_format: str
) -> None:
    """Own entries are acknowledged: the subscriptions have no backlog."""
    sidecar = start(pulsar_entry_format=entry_format, **ONE_URL)
    client = connect(sidecar)
    kinds = pulsar.ConsumerType
    types = (kinds.Exclusive, kinds.Shared, kinds.Failover, kinds.KeyShared)
    consumers = {kind.name: client.subscribe(topic, kind.name, consumer_type=kind) for kind in types}
    asking = client.subscribe(topic, "asking", initial_position=FROM_FIRST, properties=SHOW_OWN)
    producer = client.create_producer(topic, producer_name="p")
    publish(producer, 1, 20)
    sidecar.restart()
    publish(producer, 21, 20)
    last = client.create_producer(topic, producer_name="q")
    assert kinds_at_broker(broker, topic).count("marker") >= 2
    assert kinds_at_broker(broker, topic)[-1] == "control"
    for consumer in consumers.values():
        found = list[bytes]()
        while len(set(found)) < 40:
            message = next_of(consumer)
            found += unpacked(message)
            consumer.acknowledge(message)
        assert set(found) == set(payloads(1, 40))
    await until_no_backlog(broker, topic, set(consumers))
    seen = set[str]()
    while seen < OWN:
        message = asking.receive(timeout_millis=WAIT_MS)
        seen.add(message.properties().get("seqdedupe.kind", ""))
        asking.acknowledge(message)
    last.close()


@EVERY_FORMAT
async def test_a_reader_knows_when_no_message_is_left(
    start: Start, broker: Broker, topic: str, connect: Connect, entry_format: str
) -> None:
    """Also if a sidecar's own entries are the last, in the last message's ledger or in the next one."""
    sidecar = start(pulsar_entry_format=entry_format, **ONE_URL)
    client = connect(sidecar)
    consumer = client.subscribe(topic, "s")
    reader = client.create_reader(topic, EARLIEST)
    assert kinds_at_broker(broker, topic)
    assert not reader.has_message_available()
    assert not client.create_reader(topic, LATEST).has_message_available()
    producer = client.create_producer(topic, producer_name="p")
    publish(producer, 1, 20)
    direct = pulsar.Client(broker.service_url, logger=quiet())
    expected = direct.subscribe(topic, "direct").get_last_message_id()
    direct.close()
    assert consumer.get_last_message_id() == expected
    producers = [client.create_producer(topic, producer_name=f"q{k}") for k in range(9)]
    for change in (lambda: None, sidecar.restart, None):
        if change is None:
            # The topic's next ledger begins.
            await PulsarAdmin(AdminUrl(broker.admin_url)).unload(topic)
            sidecar.restart()
            producers += [client.create_producer(topic, producer_name="r")]
        else:
            change()
        reader = client.create_reader(topic, EARLIEST)
        found = list[bytes]()
        while reader.has_message_available():
            found += unpacked(next_of(reader))
        assert found == payloads(1, 20)
        assert client.create_reader(topic, LATEST).has_message_available() is False
        inclusive = client.create_reader(topic, LATEST, start_message_id_inclusive=True)
        assert inclusive.has_message_available()
        assert unpacked(next_of(inclusive))[-1] == b"20"
        assert not inclusive.has_message_available()
        last = client.subscribe(topic, "last", consumer_type=pulsar.ConsumerType.Shared).get_last_message_id()
        assert (last.ledger_id(), last.entry_id(), last.batch_index()) == (
            expected.ledger_id(),
            expected.entry_id(),
            expected.batch_index(),
        )
    assert kinds_at_broker(broker, topic).count("marker") >= 3


@pytest.mark.parametrize("entry_format", ["plain", "native"])
async def test_seeks_and_redelivery_bring_messages_alone(
    start: Start, broker: Broker, topic: str, connect: Connect, entry_format: str
) -> None:
    sidecar = start(pulsar_entry_format=entry_format, **ONE_URL)
    client = connect(sidecar)
    consumer = client.subscribe(topic, "s", negative_ack_redelivery_delay_ms=100)
    producer = client.create_producer(topic, producer_name="p", batching_enabled=False)
    ids = [producer.send(b"%d" % i, sequence_id=i) for i in range(1, 6)]
    sidecar.restart()
    ids += [producer.send(b"%d" % i, sequence_id=i) for i in range(6, 11)]
    received = [next_of(consumer) for _ in range(10)]
    assert [message.data() for message in received] == payloads(1, 10)
    for message in received:
        consumer.negative_acknowledge(message)
    assert taken(consumer, 10) == payloads(1, 10)
    for place, first in ((EARLIEST, 1), (ids[3], 4), (1, 1)):
        consumer.seek(place)
        found = taken(consumer, 1)
        while found[-1] != b"10":
            found += taken(consumer, 1)
        # The client drops the message of the ID itself if the entry is no batch.
        assert found in (payloads(first, 11 - first), payloads(first + 1, 10 - first))
    # The client sends acknowledgements later, and may ask for messages before.
    await until_no_backlog(broker, topic, {"s"})
    consumer.redeliver_unacknowledged_messages()
    publish(producer, 11, 1)
    assert taken(consumer, 1) == [b"11"]


def test_consumers_and_readers_without_a_queue(start: Start, broker: Broker, topic: str, connect: Connect) -> None:
    """They give the broker one permit at a time."""
    sidecar = start(**ONE_URL)
    client = connect(sidecar)
    producer = client.create_producer(topic, producer_name="p", batching_enabled=False)
    publish(producer, 1, 10)
    sidecar.restart()
    publish(producer, 11, 10)
    consumer = client.subscribe(topic, "s", receiver_queue_size=0, initial_position=FROM_FIRST)
    assert [consumer.receive().data() for _ in range(20)] == payloads(1, 20)
    reader = client.create_reader(topic, EARLIEST, receiver_queue_size=0)
    # Also at a broker, such a reader does not know when no message is left.
    assert [reader.read_next().data() for _ in range(20)] == payloads(1, 20)


@pytest.mark.parametrize("entry_format", ["plain", "native"])
def test_partitions(start: Start, broker: Broker, topic: str, connect: Connect, entry_format: str) -> None:
    sidecar = start(pulsar_entry_format=entry_format, **ONE_URL)
    with Client(sidecar.address) as client:
        client.admin.create_topic(topic, partitions=3)
    stock = connect(sidecar)
    assert not stock.create_reader(topic, EARLIEST).has_message_available()
    producer = stock.create_producer(topic, producer_name="p")
    for i in range(1, 21):
        producer.send(b"%d" % i, sequence_id=i, partition_key=str(i))
    sidecar.restart()
    consumer = stock.subscribe(topic, "s", consumer_type=pulsar.ConsumerType.Shared, initial_position=FROM_FIRST)
    reader = stock.create_reader(topic, EARLIEST)
    found = list[bytes]()
    while reader.has_message_available():
        found.append(next_of(reader).data())
    assert sorted(map(int, found)) == list(range(1, 21))
    assert sorted(map(int, taken(consumer, 20))) == list(range(1, 21))


@pytest.mark.parametrize("entry_format", ["plain", "native"])
async def test_compacted_reads(start: Start, broker: Broker, topic: str, connect: Connect, entry_format: str) -> None:
    sidecar = start(pulsar_entry_format=entry_format, **ONE_URL)
    client = connect(sidecar)
    producer = client.create_producer(topic, producer_name="p")
    for i, key in enumerate("abab", 1):
        producer.send(b"%d" % i, sequence_id=i, partition_key=key)
    await admin(broker, "PUT", topic, "compaction")
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while (await admin(broker, "GET", topic, "compaction"))["status"] != "SUCCESS":
            pass
    for more in (False, True):
        if more:
            sidecar.restart()
            producer.send(b"5", sequence_id=5, partition_key="c")
            client.create_producer(topic, producer_name="q")
        reader = client.create_reader(topic, EARLIEST, is_read_compacted=True)
        found = list[bytes]()
        while reader.has_message_available():
            found.append(next_of(reader).data())
        assert found == [b"3", b"4"] + [b"5"] * more


@pytest.mark.parametrize("entry_format", ["plain", "native"])
def test_messages_that_look_like_own_entries_arrive(
    start: Start, broker: Broker, topic: str, connect: Connect, entry_format: str
) -> None:
    """From a stock producer at the broker, and at the door."""
    direct = pulsar.Client(broker.service_url, logger=quiet())
    try:
        copied = {"seqdedupe.entry": "1:7:1:0123456789abcdef:0:-1", "seqdedupe.kind": "marker"}
        other = f"{topic}-other"
        for batching in (True, False):
            earlier = direct.create_producer(other, batching_enabled=batching)
            earlier.send(b"earlier", properties=copied)
            earlier.close()
        sidecar = start(pulsar_entry_format=entry_format, **ONE_URL)
        client = connect(sidecar)
        consumer = client.subscribe(other, "s", initial_position=FROM_FIRST)
        for _ in range(2):
            message = consumer.receive(timeout_millis=WAIT_MS)
            assert (message.data(), message.properties()) == (b"earlier", copied)
        consumer = client.subscribe(topic, "s")
        client.create_producer(topic, producer_name="p").send(b"", properties=copied, sequence_id=1)
        renamed = consumer.receive(timeout_millis=WAIT_MS).properties()
        assert {f"seqdedupe.user.{name}" for name in copied} <= set(renamed)
    finally:
        direct.close()


def test_a_java_reader_knows_when_no_message_is_left(
    start: Start, pulsar_home: Path, broker: Broker, topic: str
) -> None:
    sidecar: Sidecar = start(pulsar_entry_format="native", **ONE_URL)
    with JavaClient(pulsar_home) as java:
        java.connect(f"pulsar://{door_of(sidecar)}")
        java.open(topic, "p", "batches")
        java.ask("subscribe", "c", topic, "s", "Exclusive")
        assert java.ask("read", "c", topic, "-") == ""
        java.ask("send", "a", 1, 30)
        java.ask("flush", "a")
        sidecar.restart()
        java.open(topic, "q", "batches")
        assert java.ask("read", "c", topic, "-") == " ".join(map(str, range(1, 31)))
    assert kinds_at_broker(broker, topic)[-1] == "control"
