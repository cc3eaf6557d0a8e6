"""Stock producers at the door of a sidecar whose log is a Pulsar topic, and a stock consumer of the broker."""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pulsar
import pytest

from examples.pulsar.messages import Received, Topic, messages
from pulsar_broker.standalone import Broker, free_port
from seqdedupe.client.blocking import Client
from seqdedupe.log.pulsar.admin_url import AdminUrl, PulsarAdmin
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.frames import WireEntry
from seqdedupe.pulsar_wire.pulsar_api_pb2 import BaseCommand, CommandSendReceipt, ServerError
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.broker_sidecar.door.conftest import open_wire as open_wire
from tests.broker_sidecar.door.stock_load import StockProducer
from tests.broker_sidecar.door.wire import CPP, Wire, batch, door_of, single
from tests.pulsar.conftest import LIMIT_BYTES
from tests.pulsar.owners import quiet

MEBIBYTE = 1024 * 1024
MOST_SECONDS = 0.1
"""A producer waits this long at most before it sends more: what is stored must be read in the end."""

MORE = 100
"""The messages that are acknowledged between one fault and the next, at least."""

NO_ENTRY = 2**64 - 1

_namespaces = itertools.count()

Start = Callable[..., Sidecar]


@pytest.fixture
async def namespace(broker: Broker) -> str:
    """One that nobody else uses: a sidecar takes all topics of its namespaces."""
    name = f"public/door-{os.getpid()}-{next(_namespaces)}"
    await AdminUrl(broker.admin_url).call(
        "PUT", f"namespaces/{name}", {"subscription_expiration_time_minutes": 0}, "TOPIC_EXISTS"
    )
    return name


@pytest.fixture
def topic(namespace: str) -> str:
    return f"persistent://{namespace}/t"


@pytest.fixture
def start(tmp_path: Path, broker: Broker, namespace: str) -> Iterator[Start]:
    """Starts sidecars with a door, whose ports stay the same over restarts."""
    every: list[Sidecar] = []

    def started(**keys: Any) -> Sidecar:
        folder = tmp_path / f"sidecar-{len(every)}"
        # In plain topics a stock consumer can tell which entries are void.
        own = {
            "pulsar_listen": f"127.0.0.1:{free_port()}",
            "instance_name": folder.name,
            "pulsar_entry_format": "plain",
        }
        sidecar = Sidecar(folder, pulsar_namespaces=namespace, **broker.sidecar_keys, **(own | keys))
        every.append(sidecar)
        sidecar.start()
        return sidecar

    yield started
    for sidecar in every:
        sidecar.kill()


@pytest.fixture
def connect() -> Iterator[Callable[..., pulsar.Client]]:
    """Makes stock clients of these doors."""
    clients: list[pulsar.Client] = []

    def connected(*sidecars: Sidecar) -> pulsar.Client:
        url = f"pulsar://{','.join(str(door_of(sidecar)) for sidecar in sidecars)}"
        clients.append(pulsar.Client(url, logger=quiet(), operation_timeout_seconds=60))
        return clients[-1]

    yield connected
    for client in clients:
        client.close()


class Found(NamedTuple):
    """A message as a stock consumer has it."""

    message_id: MessageId
    message: Received
    """As its producer published it, by the entry's properties."""
    raw: Any


def consumed(broker: Broker, topic: str) -> list[Found]:
    """All messages that count, by a consumer of the broker."""
    client = pulsar.Client(broker.service_url, logger=quiet())
    try:
        consumer = client.subscribe(topic, "stock", initial_position=pulsar.InitialPosition.Earliest)
        last = consumer.get_last_message_id()
        counts = Topic()
        found = []
        while True:
            raw = consumer.receive(timeout_millis=int(LAST_RESORT_SECONDS * 1000))
            place = raw.message_id()
            properties = raw.properties()
            if counts.counts(properties, place.ledger_id(), place.entry_id()):
                payload = None if raw.has_null_value() else raw.data()
                of_entry = messages(payload, properties, raw.partition_key(), raw.event_timestamp())
                message_id = MessageId(place.ledger_id(), place.entry_id(), place.batch_index())
                found += [Found(message_id, message, raw) for message in of_entry]
            if place >= last:
                return found
    finally:
        client.close()


def ids_of(found: list[Found], producer: str = "p") -> list[int]:
    return [one.message.sequence_id for one in found if one.message.producer == producer]


@pytest.mark.parametrize("batches", [True, False])
def test_messages_arrive_at_a_stock_consumer_as_they_were_sent(
    start: Start, broker: Broker, topic: str, connect: Callable[..., pulsar.Client], batches: bool
) -> None:
    producer = connect(start()).create_producer(
        topic, producer_name="p", batching_enabled=batches, batching_max_publish_delay_ms=20
    )
    receipts: list[Any] = []
    for i in range(1, 21):
        producer.send_async(
            b"payload %d" % i,
            lambda result, message_id: receipts.append((result, message_id)),
            sequence_id=i * 2,
            partition_key=f"key {i}",
            event_timestamp=1_700_000_000_000 + i,
            properties={"number": str(i), "ü": ""},
        )
    producer.flush()
    found = consumed(broker, topic)
    assert ids_of(found) == list(range(2, 42, 2))
    for i, one in enumerate(found, 1):
        assert one.raw.data() == b"payload %d" % i
        assert one.raw.partition_key() == f"key {i}"
        assert one.raw.event_timestamp() == 1_700_000_000_000 + i
        own = {name: value for name, value in one.raw.properties().items() if not name.startswith("seqdedupe.")}
        assert own == one.message.properties == {"number": str(i), "ü": ""}
    for (result, receipt), one in zip(receipts, found, strict=True):
        assert result == pulsar.Result.Ok
        place = MessageId(receipt.ledger_id(), receipt.entry_id(), receipt.batch_index())
        if batches:
            # A client makes IDs of its own below the ID of a batch, under which no consumer sees these messages.
            assert place[:2] in ((-1, -1), one.message_id[:2])
        else:
            assert place == one.message_id


@pytest.mark.parametrize("entry_format", ["plain", "packed"])
def test_what_is_sent_again_is_there_once_and_receipts_name_what_consumers_see(
    start: Start, broker: Broker, topic: str, open_wire: Callable[..., Wire], entry_format: str
) -> None:
    sidecar = start()
    with Client(sidecar.address) as client:
        client.admin.create_topic(topic, entry_format=entry_format)
    wire = open_wire(door_of(sidecar))
    wire.produce(topic)

    def send(first: int, entry: WireEntry, highest: int = 0) -> CommandSendReceipt:
        wire.send(first, entry, highest=highest)
        command = wire.next()
        assert command.type == BaseCommand.SEND_RECEIPT, command
        assert command.send_receipt.sequence_id == first
        return command.send_receipt

    one = send(0, single(0)).message_id
    many = send(1, batch(1, 2, 3), 3).message_id
    again = send(0, single(0)).message_id
    again_many = send(1, batch(1, 2, 3), 3).message_id
    mixed = send(2, batch(2, 3, 4, 5), 5).message_id
    last = send(6, single(6)).message_id
    assert wire.produce(topic).last_sequence_id == 6
    reopened = send(6, single(6)).message_id

    found = consumed(broker, topic)
    assert ids_of(found) == list(range(7))
    places = [found.message_id[:2] for found in found]
    assert (one.ledgerId, one.entryId) == (again.ledgerId, again.entryId) == places[0]
    assert (last.ledgerId, last.entryId) == (reopened.ledgerId, reopened.entryId) == places[6]
    if entry_format == "plain":
        # The messages of a batch have no common entry there.
        assert many.entryId == NO_ENTRY
    else:
        assert {(many.ledgerId, many.entryId)} == set(places[1:4])
    assert again_many.entryId == mixed.entryId == NO_ENTRY


def load(client: pulsar.Client, topic: str) -> list[StockProducer]:
    """Two producers that have begun."""
    producers = [StockProducer(client, name, seed, topic, MOST_SECONDS) for seed, name in enumerate(("a", "b"))]
    for producer in producers:
        producer.start()
        producer.wait_for_more(MORE)
    return producers


def go_on(producers: list[StockProducer]) -> None:
    for producer in producers:
        producer.wait_for_more(MORE)


def copies(broker: Broker, topic: str, producers: list[StockProducer]) -> int:
    """How many copies too many the topic has, when all is sent. Raises AssertionError if a message is missing or out of
    order.
    """
    for producer in producers:
        producer.finish()
        assert not producer.failed, producer.failed[:3]
        assert len(producer.acknowledged) == producer.sent
    found = consumed(broker, topic)
    extra = 0
    for producer in producers:
        ids = ids_of(found, producer.name_in_log)
        firsts = list(dict.fromkeys(ids))
        assert firsts == list(range(producer.sent))
        extra += len(ids) - len(firsts)
    return extra


async def test_nothing_is_lost_or_doubled_over_kills_and_unloads(
    start: Start, broker: Broker, topic: str, connect: Callable[..., pulsar.Client]
) -> None:
    sidecar = start()
    admin = PulsarAdmin(AdminUrl(broker.admin_url))
    producers = load(connect(sidecar), topic)
    for _ in range(3):
        sidecar.restart()
        go_on(producers)
        await admin.unload(topic)
        go_on(producers)
    assert copies(broker, topic, producers) == 0


def test_control_without_deduplication_the_client_doubles(
    start: Start, broker: Broker, topic: str, connect: Callable[..., pulsar.Client]
) -> None:
    """What a stock client resends after a kill is in the topic already."""
    sidecar = start()
    with Client(sidecar.address) as client:
        client.admin.create_topic(topic, deduplication_enabled=False)
    producers = load(connect(sidecar), topic)
    for _ in range(10):
        sidecar.restart()
        go_on(producers)
    assert copies(broker, topic, producers) > 0


@pytest.mark.parametrize("standby", [True, False])
def test_a_client_with_two_doors_goes_on_at_the_other_one(
    start: Start, broker: Broker, topic: str, connect: Callable[..., pulsar.Client], standby: bool
) -> None:
    """Whichever it asks first, and also at a sidecar that takes a topic only if it is asked."""
    one = start()
    with Client(one.address) as client:
        client.admin.create_topic(topic)
    other = start(standby=standby)
    producers = load(connect(other, one), topic)
    for owner in (one, other, one):
        owner.kill()
        go_on(producers)
        owner.start()
        go_on(producers)
    one.kill()
    # A client that begins now, with a door where nobody is.
    newcomer = connect(one, other).create_producer(topic, producer_name="new")
    newcomer.send(b"new")
    newcomer.close()
    assert copies(broker, topic, producers) == 0


def test_topics_of_two_owners_over_one_client(
    start: Start, broker: Broker, namespace: str, connect: Callable[..., pulsar.Client]
) -> None:
    """Each producer comes to the door of its topic's owner, whichever door the client asks first."""
    one, other = start(), start()
    topics: list[str] = []
    for sidecar in (one, other):
        topics.append(f"persistent://{namespace}/t{len(topics)}")
        with Client(sidecar.address) as client, client.producer(topics[-1], "first"):
            pass
    client = connect(one, other)
    producers = [producer for topic in topics for producer in load(client, topic)]
    go_on(producers)
    for topic, own in zip(topics, (producers[:2], producers[2:]), strict=True):
        assert copies(broker, topic, own) == 0


def test_a_message_above_the_brokers_limit_is_refused_alone(
    start: Start, broker: Broker, topic: str, connect: Callable[..., pulsar.Client], open_wire: Callable[..., Wire]
) -> None:
    sidecar = start()
    wire = open_wire(door_of(sidecar), CPP)
    assert wire.connected.connected.max_message_size == LIMIT_BYTES
    wire.produce(topic)
    wire.send(0, single(0))
    # A client keeps to what is announced without what the sidecar adds.
    wire.send(1, single(1, bytes(LIMIT_BYTES)))
    wire.send(2, single(2))
    assert wire.next().send_receipt.sequence_id == 0
    answer = wire.next().send_error
    assert (answer.sequence_id, answer.error) == (1, ServerError.ChecksumError)
    assert "MESSAGE_TOO_LARGE" in answer.message
    assert wire.next().send_receipt.sequence_id == 2

    producer = connect(sidecar).create_producer(topic, producer_name="stock")
    for size, refusal in ((LIMIT_BYTES, pulsar.MessageTooBig), (LIMIT_BYTES - 256, pulsar.ChecksumError)):
        with pytest.raises(refusal):
            producer.send(bytes(size))
    producer.send(bytes(LIMIT_BYTES - 16 * 1024))
    found = consumed(broker, topic)
    assert ids_of(found) == [0, 2]
    assert [len(one.raw.data()) for one in found[2:]] == [LIMIT_BYTES - 16 * 1024]


def test_an_owner_that_is_asked_to_stop_hands_over(
    start: Start, broker: Broker, topic: str, connect: Callable[..., pulsar.Client]
) -> None:
    one = start()
    with Client(one.address) as client:
        client.admin.create_topic(topic)
    other = start(standby=True)
    producers = load(connect(one, other), topic)
    assert one.stop() == 0
    go_on(producers)
    assert copies(broker, topic, producers) == 0
