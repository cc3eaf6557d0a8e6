"""One service URL for producers and consumers: stock clients that publish and consume through a sidecar's door."""

from collections.abc import Callable
from typing import Any

import pulsar

from examples.pulsar.messages import Topic
from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.pulsar.test_door import Start
from tests.pulsar.test_door import broker as broker
from tests.pulsar.test_door import connect as connect
from tests.pulsar.test_door import namespace as namespace
from tests.pulsar.test_door import start as start
from tests.pulsar.test_door import topic as topic

Connect = Callable[..., pulsar.Client]

ONE_URL = {"pulsar_serve_consumers": True}
WAIT_MS = int(LAST_RESORT_SECONDS * 1000)


def next_of(consumer: Any, counts: Topic) -> Any:
    """The next message that counts: markers and control records do not."""
    while True:
        message = (
            consumer.receive(timeout_millis=WAIT_MS) if hasattr(consumer, "receive") else consumer.read_next(WAIT_MS)
        )
        place = message.message_id()
        if counts.counts(message.properties(), place.ledger_id(), place.entry_id()):
            return message
        if hasattr(consumer, "acknowledge"):
            consumer.acknowledge(message)


def taken(consumer: Any, count: int, *, acknowledge: bool = True) -> list[bytes]:
    counts, found = Topic(), []
    while len(found) < count:
        message = next_of(consumer, counts)
        found.append(message.data())
        if acknowledge:
            consumer.acknowledge(message)
    return found


def payloads(first: int, count: int) -> list[bytes]:
    return [b"%d" % i for i in range(first, first + count)]


def publish(producer: Any, first: int, count: int) -> None:
    for i in range(first, first + count):
        producer.send_async(b"%d" % i, None, sequence_id=i)
    producer.flush()


def test_a_consumer_and_a_reader_use_the_producers_url(start: Start, topic: str, connect: Connect) -> None:
    """The consumer comes first: the topic is the sidecar's nevertheless."""
    client = connect(start(**ONE_URL))
    consumer = client.subscribe(topic, "s")
    producer = client.create_producer(topic, producer_name="p")
    publish(producer, 1, 50)
    publish(producer, 1, 60)
    assert taken(consumer, 60) == payloads(1, 60)
    reader = client.create_reader(topic, pulsar.MessageId.earliest)
    counts = Topic()
    assert [next_of(reader, counts).data() for _ in range(60)] == payloads(1, 60)
    consumer.close()
    publish(producer, 61, 5)
    again = client.subscribe(topic, "s")
    assert taken(again, 5) == payloads(61, 5)
    again.seek(pulsar.MessageId.earliest)
    assert taken(again, 65) == payloads(1, 65)
    again.unsubscribe()
