"""Consumers and readers of Pulsar's own Python client at the door."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pulsar
import pytest

from pulsar_broker.standalone import free_port
from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import calls
from tests.broker_sidecar.door.wire import door_of
from tests.broker_sidecar.pausing import wait_for

EARLIEST = pulsar.InitialPosition.Earliest
RECEIVE_MS = 60_000


@pytest.fixture
def stock(shared: Sidecar) -> Iterator[pulsar.Client]:
    client = client_of(str(door_of(shared)))
    yield client
    client.close()


def client_of(address: str) -> pulsar.Client:
    logger = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
    return pulsar.Client(f"pulsar://{address}", logger=logger, operation_timeout_seconds=60)


def publish(stock: pulsar.Client, topic: str, count: int, first: int = 0) -> list[pulsar.MessageId]:
    producer = stock.create_producer(topic, producer_name="p", batching_enabled=False)
    ids = [
        producer.send(b"%d" % i, sequence_id=i + 1, partition_key=f"key {i}", properties={"number": str(i)})
        for i in range(first, first + count)
    ]
    producer.close()
    return ids


def received(source: pulsar.Consumer, count: int) -> list[pulsar.Message]:
    return [source.receive(RECEIVE_MS) for _ in range(count)]


def numbers(messages: list[pulsar.Message]) -> list[int]:
    return [int(message.data()) for message in messages]


def cursor_index(sidecar: Sidecar, topic: str) -> int:
    with Client(sidecar.address) as client:
        [cursor] = client.admin.cursors(topic)
    return cursor.position.index


def test_a_consumer(stock: pulsar.Client, shared: Sidecar, topic: str) -> None:
    consumer = stock.subscribe(topic, "s", initial_position=EARLIEST)
    ids = publish(stock, topic, 10)
    messages = received(consumer, 10)
    assert numbers(messages) == list(range(10))
    assert [str(message.message_id()) for message in messages] == [str(one) for one in ids]
    for i, message in enumerate(messages):
        assert (message.partition_key(), message.properties()) == (f"key {i}", {"number": str(i)})
        assert message.producer_name() == "p"
        assert message.event_timestamp() == 0
    for k in (5, 0, 1, 2):
        consumer.acknowledge(messages[k])
    # The client sends acknowledgements later, and may ask for messages before.
    wait_for(lambda: cursor_index(shared, topic) == 2)
    consumer.redeliver_unacknowledged_messages()
    assert numbers(received(consumer, 6)) == [3, 4, 6, 7, 8, 9]
    consumer.acknowledge_cumulative(messages[6])
    consumer.close()
    assert cursor_index(shared, topic) == 6
    consumer = stock.subscribe(topic, "s")
    assert numbers(received(consumer, 3)) == [7, 8, 9]
    consumer.seek(messages[4].message_id())
    assert numbers(received(consumer, 5)) == [5, 6, 7, 8, 9]
    consumer.seek(messages[0].publish_timestamp())
    assert numbers(received(consumer, 10)) == list(range(10))
    consumer.unsubscribe()
    with Client(shared.address) as client:
        assert not client.admin.cursors(topic)


def test_a_negative_acknowledgement_brings_a_message_again(stock: pulsar.Client, topic: str) -> None:
    publish(stock, topic, 3)
    consumer = stock.subscribe(topic, "s", initial_position=EARLIEST, negative_ack_redelivery_delay_ms=100)
    first, second, third = received(consumer, 3)
    consumer.acknowledge(first)
    consumer.negative_acknowledge(second)
    assert numbers(received(consumer, 2)) == [1, 2]
    consumer.acknowledge(third)
    consumer.close()


def test_a_reader(stock: pulsar.Client, topic: str) -> None:
    ids = publish(stock, topic, 5)
    for start, inclusive, found in (
        (pulsar.MessageId.earliest, False, [0, 1, 2, 3, 4]),
        (ids[2], False, [3, 4]),
        (ids[2], True, [2, 3, 4]),
        (pulsar.MessageId.latest, False, []),
    ):
        reader = stock.create_reader(topic, start, start_message_id_inclusive=inclusive)
        read = []
        while reader.has_message_available():
            read.append(reader.read_next(RECEIVE_MS))
        assert numbers(read) == found
        reader.close()
    reader = stock.create_reader(topic, pulsar.MessageId.latest)
    publish(stock, topic, 1, 5)
    assert reader.read_next(RECEIVE_MS).data() == b"5"
    reader.seek(ids[1])
    assert reader.read_next(RECEIVE_MS).data() == b"2"
    reader.close()


def test_what_is_refused(stock: pulsar.Client, topic: str) -> None:
    """At once: the client would try other errors again."""
    for kind in (pulsar.ConsumerType.Shared, pulsar.ConsumerType.KeyShared):
        with pytest.raises(pulsar.NotAllowedError):
            stock.subscribe(topic, "s", consumer_type=kind)
    with pytest.raises(pulsar.NotAllowedError):
        stock.subscribe(topic, "s", is_read_compacted=True)
    consumer = stock.subscribe(topic, "s")
    with pytest.raises(pulsar.ConsumerBusy):
        stock.subscribe(topic, "s")
    consumer.close()
    stock.subscribe(topic, "s").close()


def test_a_partitioned_topic_over_failover(
    stock: pulsar.Client, shared: Sidecar, client: calls.Client, topic: str
) -> None:
    client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=topic, partitions=3))
    other = client_of(str(door_of(shared)))
    kind = pulsar.ConsumerType.Failover
    first, second = (one.subscribe(topic, "s", consumer_type=kind, initial_position=EARLIEST) for one in (stock, other))
    publish(stock, topic, 30)
    messages = received(first, 30)
    assert sorted(numbers(messages)) == list(range(30))
    for message in messages[:20]:
        first.acknowledge(message)
    first.close()
    rest = received(second, 10)
    assert sorted(numbers(rest)) == sorted(numbers(messages[20:]))
    other.close()


def test_nothing_is_skipped_over_kills(tmp_path: Path) -> None:
    """Each message comes. What comes again is what the cursor has not passed. The index of a message is its number.

    The control is in `test_consumers`: a cursor that was moved past a hole skips.
    """
    address = f"127.0.0.1:{free_port()}"
    found: list[int] = []
    stopping = threading.Event()
    with Sidecar(tmp_path, pulsar_listen=address) as sidecar:
        client = client_of(address)
        consumer = client.subscribe("t", "s", initial_position=EARLIEST)
        producer = client.create_producer("t", producer_name="p", send_timeout_millis=0, block_if_queue_full=True)
        sent = 0

        def load() -> None:
            nonlocal sent
            while not stopping.wait(0.001):
                producer.send_async(b"%d" % sent, lambda *_: None, sequence_id=sent + 1)
                sent += 1

        def consume(count: int) -> None:
            for message in received(consumer, count):
                found.append(int(message.data()))
                consumer.acknowledge_cumulative(message)

        def has_moved() -> bool:
            """The cursor passes something that came after the last kill."""
            consume(10)
            return cursor_index(sidecar, "t") > before

        loading = threading.Thread(target=load, daemon=True)
        loading.start()
        for _ in range(5):
            before = max(found, default=0)
            wait_for(has_moved)
            moved = cursor_index(sidecar, "t")
            sidecar.restart()
            killed_after = len(found)
            consume(300)
            assert min(found[killed_after:]) > moved
        stopping.set()
        loading.join()
        producer.flush()
        while found[-1] < sent - 1:
            consume(1)
        client.close()
    assert list(dict.fromkeys(found)) == list(range(sent))
