"""The same through kills of sidecar and broker: nobody else is in front of a broker that was killed."""

import asyncio
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pulsar
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from examples.pulsar.messages import Received, Topic, messages
from pulsar_broker.standalone import Broker
from seqdedupe.client import Client, Producer, ProducerConfig, blocking
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2
from tests import warm
from tests.broker_sidecar.calls import Client as RawClient
from tests.broker_sidecar.calls import refused
from tests.pulsar import secured
from tests.pulsar.owners import quiet, until
from tests.pulsar.test_sidecar import Start, logged
from tests.pulsar.test_sidecar import folder as folder
from tests.pulsar.test_sidecar import made as made
from tests.pulsar.test_sidecar import namespace as namespace
from tests.pulsar.test_sidecar import ports as ports
from tests.pulsar.test_sidecar import topic as topic

MESSAGES = 1_500
TOPICS = ("plain", "packed", "native", "control")
"""In the last one nobody deduplicates."""


@pytest.fixture
def broker(pulsar_home: Path, folder: Path, ports: tuple[int, int]) -> Iterator[Broker]:
    """For one test (see `mortal_broker`)."""
    with Broker(pulsar_home, secured.token(), **secured.keys(folder, *ports)) as broker:
        yield broker


def numbered(number: int) -> bytes:
    return b"message %d" % number


class Load:
    """A producer of a topic that has all its messages under way, as far as its bounds allow."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self.verdicts: Counter[str] = Counter()
        self.settled = 0

    async def send(self, after: Callable[[int], Any]) -> None:
        """Sends all; `after` is awaited after each message that is handed over."""
        tasks = []
        for number in range(MESSAGES):
            tasks.append(asyncio.ensure_future(self._wait(await self._producer.send(numbered(number), number))))
            await after(number)
        await asyncio.gather(*tasks)

    async def _wait(self, receipt: Any) -> None:
        self.verdicts[(await receipt).verdict.name] += 1
        self.settled += 1


def run(*command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LAST_RESORT_SECONDS)


def restart(broker: Broker) -> None:
    broker.kill()
    broker.start()


async def no_more(_: int) -> None:
    pass


def stored(service_url: str, topic: str) -> list[bytes | None]:
    """The payloads of what counts in a topic, read with Pulsar's own client and nothing of this project's."""
    client = pulsar.Client(service_url, authentication=pulsar.AuthenticationToken(secured.token()), logger=quiet())
    try:
        consumer = client.subscribe(
            topic,
            "stock",
            initial_position=pulsar.InitialPosition.Earliest,
            consumer_type=pulsar.ConsumerType.Exclusive,
        )
        last = consumer.get_last_message_id()
        counts = Topic()
        found: list[Received] = []
        while True:
            entry = consumer.receive(timeout_millis=int(LAST_RESORT_SECONDS * 1000))
            place = entry.message_id()
            if counts.counts(entry.properties(), place.ledger_id(), place.entry_id()):
                payload = None if entry.has_null_value() else entry.data()
                found += messages(payload, entry.properties(), entry.partition_key(), entry.event_timestamp())
            if entry.message_id() >= last:
                return [message.payload for message in found]
    finally:
        client.close()


def plainly_stored(service_url: str, topic: str) -> list[bytes]:
    """As a stock consumer has a `plain` topic that skips what says that it is no message."""
    client = pulsar.Client(service_url, authentication=pulsar.AuthenticationToken(secured.token()), logger=quiet())
    try:
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        found = []
        while reader.has_message_available():
            entry = reader.read_next(timeout_millis=int(LAST_RESORT_SECONDS * 1000))
            if "seqdedupe.kind" not in entry.properties():
                found.append(entry.data())
        return found
    finally:
        client.close()


async def test_every_message_is_there_once_whatever_is_killed(made: Start, broker: Broker, namespace: str) -> None:
    """The sidecar is killed in the middle of a load, and then the broker. What was acknowledged is there once and in
    order, and sent again it is Dup. In a topic that does not deduplicate the same is there twice."""
    sidecar = made()
    await asyncio.to_thread(sidecar.start)
    names = [f"persistent://{namespace}/{name}" for name in TOPICS]
    plain, packed, native, control = names
    with blocking.Client(sidecar.address) as client:
        for name in names:
            entry_format = {packed: "packed", native: "native"}.get(name, "plain")
            client.admin.create_topic(name, deduplication_enabled=name != control, entry_format=entry_format)
            assert client.admin.topic(name).entry_format
    config = ProducerConfig(max_batch_rows=20, max_in_flight_batches=8, delivery_timeout_seconds=None)
    client_of_all = Client(sidecar.address)
    async with client_of_all:
        producers = [await client_of_all.producer(name, "p", config).__aenter__() for name in names]
        loads = [Load(producer) for producer in producers]
        turns: dict[int, Callable[[], None]] = {
            MESSAGES // 3: sidecar.restart,
            2 * MESSAGES // 3: lambda: restart(broker),
        }
        in_flight = []

        async def kill_in_turn(number: int) -> None:
            if work := turns.get(number):
                in_flight.append(number + 1 - loads[0].settled)
                # On this thread: a broker ends with the one that started it.
                work()

        first, *others = loads
        await asyncio.gather(first.send(kill_in_turn), *(load.send(no_more) for load in others))
        assert min(in_flight) > 0, "nothing was in flight when something was killed"
        for load in loads:
            assert load.settled == MESSAGES
        for producer in producers:
            await producer.close()
        again = [Load(await client_of_all.producer(name, "p", config).__aenter__()) for name in names]
        for load in again:
            await load.send(no_more)
    assert [load.verdicts for load in again[:3]] == [Counter(DUP=MESSAGES)] * 3
    assert again[3].verdicts == Counter(NOT_DUP=MESSAGES)

    expected = [numbered(number) for number in range(MESSAGES)]
    for name in (plain, packed):
        assert await asyncio.to_thread(stored, broker.service_url, name) == expected
    for name in (plain, native):
        assert await asyncio.to_thread(plainly_stored, broker.service_url, name) == expected
    doubled = Counter(await asyncio.to_thread(stored, broker.service_url, control))
    assert doubled.keys() == set(expected)
    assert min(doubled.values()) == 2
    assert await asyncio.to_thread(sidecar.stop) == 0
    looked_at = await asyncio.to_thread(run, warm.COMMAND, "doctor", str(sidecar.data))
    assert looked_at.returncode == 0
    assert looked_at.stdout.count("its log is a Pulsar topic, and was not looked at") == len(TOPICS)
    salvaged = await asyncio.to_thread(
        run, warm.COMMAND, "doctor", str(sidecar.data), "--salvage", str(sidecar.folder / "new")
    )
    assert salvaged.returncode == 2
    assert "there is nothing to salvage here [INVALID_CONFIGURATION]" in salvaged.stderr


def health(address: str, topic: str = "") -> str:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=topic)
        found = health_pb2_grpc.HealthStub(channel).Check(request, timeout=LAST_RESORT_SECONDS)  # type: ignore[attr-defined]
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(found.status))


def listening(sidecar: Sidecar) -> str:
    """Where it listens, which it does before it serves."""
    return next((entry["address"] for entry in reversed(sidecar.log) if entry["event"] == "listening"), "")


def in_flight(sidecar: Sidecar, topic: str) -> list[Any]:
    raw = RawClient(sidecar.address)
    try:
        return list(raw.admin.ListInFlight(admin_pb2.ListInFlightRequest(topic=topic)).in_flight)
    finally:
        raw.close()


async def test_without_a_cluster_it_starts_says_so_and_stops_and_comes_back_with_it(
    made: Start, broker: Broker, topic: str
) -> None:
    sidecar = made(drain_timeout_seconds=3)
    sidecar.start()
    with blocking.Client(sidecar.address) as client:
        client.admin.create_topic(topic)
        with client.producer(topic, "p") as producer:
            producer.send(b"one", 1).result()
    broker.freeze()
    try:
        sidecar.kill()
        sidecar.log.clear()
        sidecar.spawn()
        await until(lambda: bool(listening(sidecar)))
        assert health(sidecar.address) == health(sidecar.address, topic) == "NOT_SERVING"
        # It was asked to stop, and nobody answers it.
        assert sidecar.stop() == 0
    finally:
        broker.thaw()
    broker.kill()
    sidecar.log.clear()
    sidecar.spawn()
    await until(lambda: logged(sidecar, "refused"))
    raw = RawClient(sidecar.address)
    found = raw.admin.GetTopic(admin_pb2.GetTopicRequest(topic=topic)).topic
    assert found.state == admin_pb2.TOPIC_STATE_RECOVERING
    assert "refused" in found.why
    # Nobody learns that there are no others.
    for call in (
        lambda: raw.admin.ListTopics(admin_pb2.ListTopicsRequest()),
        lambda: raw.admin.GetTopic(admin_pb2.GetTopicRequest(topic=topic + "-other")),
        lambda: raw.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=topic + "-other")),
        lambda: raw.open(topic + "-other", "p"),
    ):
        assert refused(call).reason == "RECOVERING"
    raw.close()
    assert health(sidecar.address) == "NOT_SERVING"
    broker.start()
    sidecar.wait_until_serving()
    assert health(sidecar.address) == health(sidecar.address, topic) == "SERVING"
    with blocking.Client(sidecar.address) as client, client.reader(topic) as reader:
        assert next(iter(reader)).payload == b"one"
    # In mid-load, with messages in flight that nobody settles: they are the next start's.
    with blocking.Client(sidecar.address) as client, client.producer(topic, "p") as producer:
        broker.freeze()
        try:
            receipt = producer.send(b"two", 2)
            await until(lambda: bool(in_flight(sidecar, topic)))
            assert sidecar.stop() == 1
        finally:
            broker.thaw()
        sidecar.start()
        assert receipt.result().index == 1
    assert sidecar.errors == ["seqdedupe: draining took too long: the next start decides about the messages in flight"]
