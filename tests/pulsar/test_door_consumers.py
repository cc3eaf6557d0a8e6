"""One service URL for producers and consumers: stock clients that publish and consume through a sidecar's door."""

import os
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pulsar
import pytest

from examples.pulsar.messages import Topic
from pulsar_broker.distribution import Unavailable
from pulsar_broker.standalone import Broker, free_port
from seqdedupe.client.blocking import Client
from seqdedupe.log.pulsar.admin_url import AdminUrl, PulsarAdmin
from seqdedupe.pulsar_wire.pulsar_api_pb2 import BaseCommand, CommandLookupTopicResponse
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.broker_sidecar.door.conftest import open_wire as open_wire
from tests.broker_sidecar.door.java_client import JavaClient
from tests.broker_sidecar.door.stock_processes import go_program
from tests.broker_sidecar.door.wire import Wire, door_of
from tests.broker_sidecar.pausing import wait_for
from tests.pulsar.owners import quiet
from tests.pulsar.test_door import MEBIBYTE, MORE, Start, consumed, copies, go_on, ids_of, load
from tests.pulsar.test_door import connect as connect
from tests.pulsar.test_door import namespace as namespace
from tests.pulsar.test_door import start as start
from tests.pulsar.test_door import topic as topic
from tests.tiers import PULSAR_GO

Connect = Callable[..., pulsar.Client]

ONE_URL = {"pulsar_serve_consumers": True}
SHOW_OWN = {"seqdedupe.own_entries": "show"}
"""The property of a consumer that recognizes void entries."""
WAIT_MS = int(LAST_RESORT_SECONDS * 1000)


def sidecar_memory(sidecar: Sidecar) -> int:
    """The bytes that the process has in memory."""
    status = Path(f"/proc/{sidecar.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


def next_of(consumer: Any) -> Any:
    """The next message, which is not a sidecar's own entry."""
    is_consumer = hasattr(consumer, "acknowledge")
    message = consumer.receive(timeout_millis=WAIT_MS) if is_consumer else consumer.read_next(WAIT_MS)
    assert message.properties().get("seqdedupe.kind") not in ("marker", "control")
    return message


def taken(consumer: Any, count: int) -> list[bytes]:
    found = list[bytes]()
    for _ in range(count):
        message = next_of(consumer)
        found.append(message.data())
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
    assert [next_of(reader).data() for _ in range(60)] == payloads(1, 60)
    consumer.close()
    publish(producer, 61, 5)
    again = client.subscribe(topic, "s")
    assert taken(again, 5) == payloads(61, 5)
    again.seek(pulsar.MessageId.earliest)
    assert taken(again, 65) == payloads(1, 65)
    again.unsubscribe()


class StockConsumer(threading.Thread):
    """Reads and acknowledges until it has been told the last message."""

    def __init__(self, consumer: pulsar.Consumer) -> None:
        super().__init__(daemon=True)
        self._consumer = consumer
        self.found: set[tuple[str, int]] = set()
        self.times = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        counts = Topic()
        while not self.stopping.is_set():
            with suppress(pulsar.Timeout):
                message = self._consumer.receive(timeout_millis=100)
                place, properties = message.message_id(), message.properties()
                if counts.counts(properties, place.ledger_id(), place.entry_id()):
                    name, number = message.data().decode().split("/")
                    self.found.add((name, int(number)))
                    self.times += 1
                self._consumer.acknowledge(message)

    def wait_for_more(self, count: int) -> None:
        before = len(self.found)
        wait_for(lambda: len(self.found) > before + count)


async def test_a_consumer_goes_on_over_unloads_kills_and_nothing_is_lost_or_doubled(
    start: Start, broker: Broker, topic: str, connect: Connect
) -> None:
    sidecar = start(**ONE_URL)
    admin = PulsarAdmin(AdminUrl(broker.admin_url))
    client = connect(sidecar)
    earliest = pulsar.InitialPosition.Earliest
    consumer = StockConsumer(client.subscribe(topic, "reads", initial_position=earliest, properties=SHOW_OWN))
    consumer.start()
    producers = load(client, topic)
    for _ in range(2):
        await admin.unload(topic)
        go_on(producers)
        consumer.wait_for_more(MORE)
        sidecar.restart()
        go_on(producers)
        consumer.wait_for_more(MORE)
    assert copies(broker, topic, producers) == 0
    every = {(producer.name_in_log, number) for producer in producers for number in range(producer.sent)}
    wait_for(lambda: consumer.found >= every)
    consumer.stopping.set()
    consumer.join()
    assert consumer.found == every


def test_a_topic_that_is_no_sidecars_can_be_consumed_but_not_produced(
    start: Start, broker: Broker, connect: Connect
) -> None:
    topic = f"persistent://public/default/elsewhere-{os.getpid()}"
    direct = pulsar.Client(broker.service_url, logger=quiet())
    client = connect(start(**ONE_URL))
    consumer = client.subscribe(topic, "s")
    direct.create_producer(topic).send(b"elsewhere")
    direct.close()
    assert consumer.receive(timeout_millis=WAIT_MS).data() == b"elsewhere"
    with pytest.raises(pulsar.NotAllowedError):
        client.create_producer(topic, producer_name="p")


async def test_partitioned_topics_of_brokers_and_of_sidecars(
    start: Start, broker: Broker, topic: str, connect: Connect
) -> None:
    sidecar = start(**ONE_URL)
    with Client(sidecar.address) as client:
        client.admin.create_topic(topic, partitions=2)
    other = f"persistent://public/default/parts-{os.getpid()}"
    await AdminUrl(broker.admin_url).call("PUT", f"{other.replace('://', '/')}/partitions", 3)
    stock = connect(sidecar)
    assert len(stock.get_topic_partitions(topic)) == 2
    assert len(stock.get_topic_partitions(other)) == 3
    consumer = stock.subscribe(topic, "s", initial_position=pulsar.InitialPosition.Earliest)
    producer = stock.create_producer(topic, producer_name="p")
    for i in range(1, 21):
        producer.send(b"%d" % i, sequence_id=i, partition_key=str(i))
    assert sorted(map(int, taken(consumer, 20))) == list(range(1, 21))


def test_without_the_key_consumers_are_refused(start: Start, topic: str, connect: Connect) -> None:
    with pytest.raises(pulsar.PulsarException):
        connect(start()).subscribe(topic, "s")


def test_a_client_that_does_not_read_holds_little_memory(
    start: Start, broker: Broker, topic: str, connect: Connect, open_wire: Callable[..., Wire]
) -> None:
    """It gets everything as soon as it reads."""
    sidecar = start(**ONE_URL)
    count, size = 200, MEBIBYTE
    producer = connect(sidecar).create_producer(topic, producer_name="p", batching_enabled=False)
    for i in range(1, count + 1):
        producer.send_async(bytes(size), None, sequence_id=i)
    producer.flush()
    memory = sidecar_memory(sidecar)
    wires = [open_wire(door_of(sidecar)) for _ in range(4)]
    for number, wire in enumerate(wires):
        wire.look_up(topic)
        assert wire.subscribe(topic, f"s{number}").type == BaseCommand.SUCCESS
        wire.flow(10_000)
    first = wires[0].next()
    assert first.type == BaseCommand.MESSAGE
    # Another client is served meanwhile.
    consumer = connect(sidecar).subscribe(topic, "reads", initial_position=pulsar.InitialPosition.Earliest)
    taken(consumer, count)
    assert sidecar_memory(sidecar) < memory + 100 * MEBIBYTE
    received = 1
    while received < count:
        command = wires[0].next()
        received += command.type == BaseCommand.MESSAGE


def test_a_lookup_leads_to_the_owners_door(
    start: Start, topic: str, connect: Connect, open_wire: Callable[..., Wire]
) -> None:
    """A client with the URL of one sidecar publishes and consumes at the owner's, and goes on without the owner."""
    ports = [free_port() for _ in range(2)]
    peers = ",".join(f"127.0.0.1:{port}" for port in ports)
    one, other = (start(listen=f"127.0.0.1:{port}", peers=peers, authentication="none", **ONE_URL) for port in ports)
    with Client(one.address) as client, client.producer(topic, "first"):
        pass
    wire = open_wire(door_of(other))

    def redirected() -> bool:
        answer = wire.look_up(topic).lookupTopicResponse
        return answer.response == CommandLookupTopicResponse.Redirect and (
            answer.brokerServiceUrl == f"pulsar://{door_of(one)}"
        )

    wait_for(redirected)
    for is_sent_on in (True, False):
        # Go's client would take the next address of its URL if it were told to keep to its present one.
        answer = open_wire(door_of(one)).look_up(topic, authoritative=is_sent_on).lookupTopicResponse
        assert answer.response == CommandLookupTopicResponse.Connect
        assert answer.brokerServiceUrl == f"pulsar://{door_of(one)}"
        assert not answer.proxy_through_service_url

    stock = connect(other)
    consumer = stock.subscribe(topic, "s")
    stock_producer = stock.create_producer(topic, producer_name="p")
    publish(stock_producer, 1, 10)
    assert taken(consumer, 10) == payloads(1, 10)
    one.kill()
    publish(stock_producer, 11, 10)
    # The client gathers acknowledgements: what it had acknowledged last may come again.
    found = taken(consumer, 10)
    while found[-1] != b"20":
        found += taken(consumer, 1)
    assert found[-10:] == payloads(11, 10)


def test_a_java_client_publishes_and_consumes_with_one_url(
    start: Start, pulsar_home: Path, broker: Broker, topic: str
) -> None:
    sidecar = start(**ONE_URL)
    with JavaClient(pulsar_home) as java:
        java.connect(f"pulsar://{door_of(sidecar)}")
        java.ask("subscribe", "c", topic, "s", "Exclusive")
        java.open(topic, "p", "batches")
        java.ask("send", "a", 1, 30)
        java.ask("send", "a", 1, 40)
        java.ask("flush", "a")
        assert java.ask("take", "c", 40) == " ".join(map(str, range(1, 41)))
        sidecar.restart()
        java.ask("send", "a", 41, 60)
        java.ask("flush", "a")
        assert java.ask("take", "c", 20) == " ".join(map(str, range(41, 61)))
        java.ask("seek", "c", "-")
        assert java.ask("take", "c", 60) == " ".join(map(str, range(1, 61)))
    found = consumed(broker, topic)
    assert ids_of(found) == list(range(1, 61))


@pytest.fixture(scope="module")
def stock_go(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of stock_go."""
    try:
        return go_program(tmp_path_factory.mktemp("go"), ".")
    except Unavailable:
        PULSAR_GO.missing()


def test_a_go_client_publishes_and_consumes_with_one_url(
    start: Start, stock_go: Path, broker: Broker, topic: str
) -> None:
    sidecar = start(**ONE_URL)

    def run(first: int, last: int) -> list[list[int]]:
        command = [str(stock_go), f"pulsar://{door_of(sidecar)}", topic, str(first), str(last)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=LAST_RESORT_SECONDS)
        return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]

    assert run(1, 40) == [list(range(1, 41))] * 3
    sidecar.restart()
    assert run(41, 60) == [list(range(41, 61)), list(range(1, 61)), list(range(1, 61))]
    assert ids_of(consumed(broker, topic)) == list(range(1, 61))
