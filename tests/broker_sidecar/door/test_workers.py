"""The doors of several workers, and of sidecars with shards: clients know one URL, and find the owner of each topic."""

import asyncio
import math
import secrets
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pulsar
import pytest
import trustme

from broker_sidecar.config import Config
from broker_sidecar.door import topic_lookup
from broker_sidecar.door.topic_lookup import MAX_ASKED, TopicLookup
from broker_sidecar.workers import count_of, make
from seqdedupe.address import SidecarAddress
from seqdedupe.client.blocking import Client
from seqdedupe.errors import ConfigurationError, SeqdedupeError, error
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    BaseCommand,
    CommandLookupTopic,
    CommandLookupTopicResponse,
    CommandPartitionedTopicMetadata,
    CommandPartitionedTopicMetadataResponse,
    ServerError,
)
from seqdedupe.store.directories import SHARDS_FILE, of_worker
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.broker_sidecar.door.several import WORKERS, doors_of, first_of_free_ports, kill_worker
from tests.broker_sidecar.door.stock_load import StockProducer
from tests.broker_sidecar.door.wire import Wire, door_of, ids_of, single
from tests.broker_sidecar.pausing import wait_for
from tests.broker_sidecar.security.issuing import of_server
from tests.broker_sidecar.security.test_certificates import tls_keys
from tests.broker_sidecar.test_workers import topics_of

OpenWire = Callable[..., Wire]
StartSidecar = Callable[..., Sidecar]
Connect = Callable[..., pulsar.Client]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """Three workers that no test may kill, and that know each other."""
    listen = f"127.0.0.1:{first_of_free_ports(WORKERS)}"
    with Sidecar(tmp_path_factory.mktemp("three"), workers=WORKERS, pulsar_listen=listen) as sidecar:
        wait_until_found(sidecar)
        yield sidecar


def wait_until_found(sidecar: Sidecar) -> None:
    """Until the workers know each other."""
    for door in doors_of(sidecar):
        wire = Wire(door)
        for worker in range(WORKERS):
            (name,) = topics_of(worker, WORKERS, 1, "found")
            wait_until_owner_is_known(wire, name)
        wire.close()


def wait_until_owner_is_known(wire: Wire, topic: str) -> None:
    wait_for(lambda: "whose address is not known yet" not in wire.look_up(topic).lookupTopicResponse.message)


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes stock clients."""
    clients: list[pulsar.Client] = []

    def connected(url: str, **options: Any) -> pulsar.Client:
        quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
        clients.append(pulsar.Client(url, logger=quiet, **{"operation_timeout_seconds": 60} | options))
        return clients[-1]

    yield connected
    for client in clients:
        client.close()


# -- what each door answers


def test_every_door_names_the_owners(three: Sidecar, open_wire: OpenWire) -> None:
    doors = doors_of(three)
    for asked in range(WORKERS):
        wire = open_wire(doors[asked])
        for owner in range(WORKERS):
            for name in topics_of(owner, WORKERS, 3, "named"):
                for authoritative in (False, True):
                    answer = wire.look_up(name, authoritative=authoritative).lookupTopicResponse
                    response = CommandLookupTopicResponse.Connect if asked == owner else answer.Redirect
                    assert (answer.response, answer.brokerServiceUrl) == (response, f"pulsar://{doors[owner]}")
                    assert not answer.proxy_through_service_url


def test_nobody_but_the_owner_serves_a_topic(three: Sidecar, open_wire: OpenWire) -> None:
    """After this code a client looks the topic up again. The control arm: the owner accepts the same commands."""
    (name,) = topics_of(1, WORKERS, 1, "served")
    answers = []
    for door in doors_of(three):
        wire = open_wire(door)
        wire.ask_for_producer(name)
        commands = [wire.next()]
        if commands[0].type == BaseCommand.PRODUCER_SUCCESS:
            wire.send(0, single(0))
            assert ids_of(wire.receipts(1)) == [0]
        commands += [wire.subscribe(name), wire.subscribe(name, "", 2, durable=False)]
        answers.append([(command.type, command.error.error) for command in commands])
    refused = [(BaseCommand.ERROR, ServerError.ServiceNotReady)] * 3
    served = [(BaseCommand.PRODUCER_SUCCESS, 0), (BaseCommand.SUCCESS, 0), (BaseCommand.SUCCESS, 0)]
    assert answers == [refused, served, refused]


def test_every_door_knows_the_partitions(three: Sidecar, open_wire: OpenWire, connect: Connect) -> None:
    (name, plain, missing) = topics_of(2, WORKERS, 3, "whole")
    with Client(three.address) as client:
        client.admin.create_topic(name, partitions=3)
        client.admin.create_topic(plain)
    for door in doors_of(three):
        wire = open_wire(door)
        for topic, expected in ((name, 3), (f"{name}-partition-1", 0), (plain, 0), (missing, 0)):
            answer = wire.partitions(topic).partitionMetadataResponse
            assert answer.response == CommandPartitionedTopicMetadataResponse.Success
            assert answer.partitions == expected
    stock = connect(f"pulsar://{doors_of(three)[0]}")
    producer = stock.create_producer(name, producer_name="p", batching_enabled=False)
    for i in range(1, 31):
        producer.send(b"%d" % i, sequence_id=i, partition_key=f"key {i}")
    consumer = stock.subscribe(name, "s", initial_position=pulsar.InitialPosition.Earliest)
    assert sorted(int(consumer.receive(60_000).data()) for _ in range(30)) == list(range(1, 31))


def test_an_owner_that_is_away_has_no_other_answer(tmp_path: Path, open_wire: OpenWire) -> None:
    """Neither is the topic elsewhere, nor has it no partitions. A worker that is back is found again."""
    listen = f"127.0.0.1:{first_of_free_ports(WORKERS)}"
    (name,) = topics_of(0, WORKERS, 1)
    with Sidecar(tmp_path, workers=WORKERS, pulsar_listen=listen) as sidecar:
        wait_until_found(sidecar)
        with Client(sidecar.address) as client:
            client.admin.create_topic(name, partitions=2)
        wire = open_wire(doors_of(sidecar)[1])
        assert wire.partitions(name).partitionMetadataResponse.partitions == 2
        shards_file = of_worker(sidecar.data, 0) / SHARDS_FILE
        said = shards_file.read_bytes()
        shards_file.write_bytes(b"?")  # it cannot start
        kill_worker(sidecar, 0, comes_back=False)
        answer = wire.partitions(name).partitionMetadataResponse
        assert (answer.response, answer.error) == (answer.Failed, ServerError.MetadataError)
        assert "[UNREACHABLE]" in answer.message
        # The address of its door is known for some seconds.
        wait_for(lambda: wire.look_up(name).lookupTopicResponse.response == CommandLookupTopicResponse.Failed)
        found = wire.look_up(name).lookupTopicResponse
        assert found.error == ServerError.MetadataError
        assert "[UNREACHABLE]" in found.message
        shards_file.write_bytes(said)
        wait_for(lambda: wire.partitions(name).partitionMetadataResponse.partitions == 2)
        wait_for(lambda: wire.look_up(name).lookupTopicResponse.brokerServiceUrl == f"pulsar://{listen}")


def test_an_advertised_address_of_each(start_sidecar: StartSidecar, open_wire: OpenWire) -> None:
    """Behind a machine that passes the same range of ports on."""
    sidecar = start_sidecar(workers=2, pulsar_listen="127.0.0.1:0", advertised_pulsar_address="gate.example.org:7000")
    doors = [entry["address"] for entry in sidecar.log if entry["event"] == "door"]
    names = [topics_of(worker, 2, 1)[0] for worker in range(2)]
    for door in doors:
        wire = open_wire(SidecarAddress.parse(door))
        for worker, name in enumerate(names):
            wait_until_owner_is_known(wire, name)
            expected = f"pulsar://gate.example.org:{7000 + worker}"
            assert wire.look_up(name).lookupTopicResponse.brokerServiceUrl == expected


def test_each_worker_counts_its_own_clients(start_sidecar: StartSidecar, open_wire: OpenWire) -> None:
    metrics = first_of_free_ports(2)
    listen = f"127.0.0.1:{first_of_free_ports(2)}"
    sidecar = start_sidecar(workers=2, pulsar_listen=listen, metrics_listen=f"127.0.0.1:{metrics}")
    door = doors_of(sidecar)[1]
    open_wire(door).produce(topics_of(1, 2, 1)[0])
    found = []
    for worker in range(2):
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics + worker}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        found += [line for line in lines if line.startswith("seqdedupe_door_producers ")]
    assert found == ["seqdedupe_door_producers 0.0", "seqdedupe_door_producers 1.0"]


def test_the_number_in_the_data_directory_is_checked_with_the_other_keys(tmp_path: Path) -> None:
    """Before a worker starts. The control arm is an address by which clients reach the doors."""
    make(tmp_path, 3)
    config = Config(data_directory=str(tmp_path), pulsar_listen="0.0.0.0:6651", allow_insecure_listen=True)
    with pytest.raises(ConfigurationError, match="advertised_pulsar_address is needed"):
        count_of(config)
    assert count_of(replace(config, advertised_pulsar_address="gate:6651")) == 3
    with pytest.raises(ConfigurationError, match="the 3 workers would also have ports of listen"):
        count_of(replace(config, advertised_pulsar_address="gate:6651", pulsar_listen="0.0.0.0:6658"))


# -- stock clients


def test_many_topics_over_one_url_while_workers_are_killed(tmp_path: Path, connect: Connect) -> None:
    """Each message is there once, and in order."""
    listen = f"127.0.0.1:{first_of_free_ports(WORKERS)}"
    names = [name for worker in range(WORKERS) for name in topics_of(worker, WORKERS, 4)]
    with Sidecar(tmp_path, workers=WORKERS, pulsar_listen=listen, deduplication_entries_interval=50) as sidecar:
        stock = connect(f"pulsar://{listen}")
        producers = [StockProducer(stock, "p", seed, name) for seed, name in enumerate(names)]
        for producer in producers:
            producer.start()
        for worker in (1, 0, 2, 0):
            for producer in producers:
                producer.wait_for_more(100)
            kill_worker(sidecar, worker)
        for producer in producers:
            producer.wait_for_more(100)
        for producer in producers:
            producer.finish()
            assert not producer.failed
        for name, producer in zip(names, producers, strict=True):
            assert ids_in(sidecar, name) == list(range(producer.sent))


@pytest.mark.parametrize("deduplicates", [True, False])
def test_a_client_that_resends_to_a_worker_that_was_killed(
    start_sidecar: StartSidecar, open_wire: OpenWire, deduplicates: bool
) -> None:
    """The control arm: without deduplication, the worker's next process stores the messages again."""
    sidecar = start_sidecar(workers=2, pulsar_listen=f"127.0.0.1:{first_of_free_ports(2)}")
    (name,) = topics_of(1, 2, 1)
    with Client(sidecar.address) as client:
        client.admin.create_topic(name, deduplication_enabled=deduplicates)
    door = doors_of(sidecar)[0]
    for _ in range(2):
        asked = open_wire(door)
        wait_until_owner_is_known(asked, name)
        owner = asked.look_up(name).lookupTopicResponse.brokerServiceUrl.removeprefix("pulsar://")
        wire = open_wire(SidecarAddress.parse(owner))
        wire.produce(name)
        for number in range(3):
            wire.send(number, single(number))
        assert ids_of(wire.receipts(3)) == [0, 1, 2]
        kill_worker(sidecar, 1)
    assert ids_in(sidecar, name) == [0, 1, 2] * (1 if deduplicates else 2)


def ids_in(sidecar: Sidecar, topic: str) -> list[int]:
    with Client(sidecar.address) as client, client.reader(topic) as reader:
        return [message.sequence_id for message in reader]


def test_consumers_and_readers_read_on_over_kills(tmp_path: Path, connect: Connect) -> None:
    listen = f"127.0.0.1:{first_of_free_ports(WORKERS)}"
    names = [topics_of(worker, WORKERS, 1)[0] for worker in range(WORKERS)]
    with Sidecar(tmp_path, workers=WORKERS, pulsar_listen=listen) as sidecar:
        # The two clients know the doors of different workers.
        first, _, last_door = doors_of(sidecar)
        publishing, reading = connect(f"pulsar://{first}"), connect(f"pulsar://{last_door}")
        producers = [publishing.create_producer(name, producer_name="p") for name in names]
        consumers = [reading.subscribe(name, "s", initial_position=pulsar.InitialPosition.Earliest) for name in names]
        readers = [reading.create_reader(name, pulsar.MessageId.earliest) for name in names]
        consumed: list[list[int]] = [[] for _ in names]
        read: list[list[int]] = [[] for _ in names]
        for last in (20, 40, 60, 80):
            for worker in range(WORKERS):
                for number in range(last - 19, last + 1):
                    producers[worker].send(b"%d" % number, sequence_id=number)
                while last not in consumed[worker]:
                    message = consumers[worker].receive(60_000)
                    consumed[worker].append(int(message.data()))
                    consumers[worker].acknowledge(message)
                while last not in read[worker]:
                    read[worker].append(int(readers[worker].read_next(60_000).data()))
            if last < 80:
                kill_worker(sidecar, last // 20 - 1)
    every = list(range(1, 81))
    # A consumer gets a message again whose acknowledgement was not stored yet.
    assert [list(dict.fromkeys(numbers)) for numbers in consumed] == [every] * WORKERS
    assert read == [every] * WORKERS


def test_another_number_of_workers_moves_the_clients(tmp_path: Path, connect: Connect) -> None:
    """A producer and a consumer stay open while the topics move to other workers."""
    listen = f"127.0.0.1:{first_of_free_ports(WORKERS)}"
    names = [f"moved-{k}" for k in range(6)]
    stock = connect(f"pulsar://{listen}")
    producers: list[Any] = []
    consumers: list[Any] = []
    for life, workers in enumerate((3, 2, 1, 3)):
        sidecar = Sidecar(tmp_path, workers=workers, pulsar_listen=listen)
        # Without the key, a single process would not change the number.
        sidecar.keys["workers"] = workers
        with sidecar:
            if not life:
                producers = [stock.create_producer(name, producer_name="p") for name in names]
                consumers = [
                    stock.subscribe(name, "s", initial_position=pulsar.InitialPosition.Earliest) for name in names
                ]
            for producer, consumer in zip(producers, consumers, strict=True):
                producer.send(b"%d" % life, sequence_id=life + 1)
                while int((message := consumer.receive(60_000)).data()) != life:
                    pass
                consumer.acknowledge(message)
            assert sidecar.stop() == 0
            assert not sidecar.errors
    with Sidecar(tmp_path, workers=WORKERS) as sidecar:
        assert [ids_in(sidecar, name) for name in names] == [[1, 2, 3, 4]] * len(names)


# -- sidecars with shards

HALVES = ("0-31", "32-63")


@pytest.fixture
def start_two(tmp_path: Path) -> Iterator[Callable[..., list[Sidecar]]]:
    """Starts two sidecars, each with half of the shards, and with keys of its own."""
    every: list[Sidecar] = []

    def started(first: dict[str, Any], second: dict[str, Any]) -> list[Sidecar]:
        for number, keys in enumerate((first, second)):
            every.append(Sidecar(tmp_path / f"{number}", shards=HALVES[number], cluster_id="c", **keys))
        for sidecar in every:
            sidecar.keys["peers"] = ",".join(one.address for one in every)
            sidecar.start()
        return every

    yield started
    for sidecar in every:
        sidecar.kill()


def test_two_shards_with_tls_and_tokens(
    tmp_path: Path, start_two: Callable[..., list[Sidecar]], connect: Connect, open_wire: OpenWire
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    token = secrets.token_hex(32)
    for place in (tmp_path / "0" / "data", tmp_path / "1" / "data", tmp_path / "shared"):
        place.mkdir(parents=True)
        (place / "token").write_text(token)
        (place / "token").chmod(0o600)
    keys = tls_keys(tmp_path / "tls", of_server(authority)) | {
        "authentication": "token",
        "peer_token_file": tmp_path / "shared" / "token",
        "peer_tls_ca_file": tmp_path / "authority.pem",
        "pulsar_listen": "127.0.0.1:0",
    }
    two = start_two(keys, keys)
    names = [name for half in range(2) for name in topics_of(half, 2, 3)]
    trusted = str(tmp_path / "authority.pem")
    opened: list[tuple[Any, Any]] = []
    stock = connect(
        f"pulsar+ssl://{door_of(two[0])}",
        authentication=pulsar.AuthenticationToken(token),
        tls_trust_certs_file_path=trusted,
    )
    for name in names:
        producer = stock.create_producer(name, producer_name="p")
        consumer = stock.subscribe(name, "s", initial_position=pulsar.InitialPosition.Earliest)
        for number in (1, 2, 3, 3):
            producer.send(b"%d" % number, sequence_id=number)
        producer.send(b"4", sequence_id=4)
        assert [int(consumer.receive(60_000).data()) for _ in range(4)] == [1, 2, 3, 4]
        opened.append((producer, consumer))
    # The door of the second has another port now, which the first learns.
    before = door_of(two[1])
    two[1].restart()
    assert door_of(two[1]) != before
    for producer, consumer in opened:
        producer.send(b"4", sequence_id=4)
        producer.send(b"5", sequence_id=5)
        # Nothing was acknowledged, so a consumer that is opened again gets all messages.
        while (number := int(consumer.receive(60_000).data())) != 5:
            assert number in (1, 2, 3, 4)
        with pytest.raises(pulsar.Timeout):
            consumer.receive(50)
    # The control arm: nobody without the token, at either door.
    for sidecar in two:
        url = f"pulsar+ssl://{door_of(sidecar)}"
        unknown = connect(url, tls_trust_certs_file_path=trusted, operation_timeout_seconds=2)
        with pytest.raises(pulsar.PulsarException):
            unknown.create_producer(names[0])


def test_an_owner_without_a_door_is_told(start_two: Callable[..., list[Sidecar]], open_wire: OpenWire) -> None:
    """Nobody else may serve its topics, and the client is told why."""
    first, second = start_two({"pulsar_listen": "127.0.0.1:0"}, {})
    own, other = (topics_of(half, 2, 1)[0] for half in range(2))
    wire = open_wire(door_of(first))
    wait_until_owner_is_known(wire, other)
    assert wire.look_up(own).lookupTopicResponse.response == CommandLookupTopicResponse.Connect
    found = wire.look_up(other).lookupTopicResponse
    assert found.response == CommandLookupTopicResponse.Failed
    assert f"belongs to the sidecar at {second.address}, which has no door" in found.message
    assert "Set pulsar_listen at all processes" in found.message
    assert wire.refused(other).error == ServerError.ServiceNotReady


# -- sidecars without shards


def test_clients_follow_a_topic_that_is_moved(
    start_sidecar: StartSidecar, connect: Connect, open_wire: OpenWire
) -> None:
    """Under load, with a consumer. The control arm: without `peers`, a client is not sent to another door."""
    there = start_sidecar(pulsar_listen="127.0.0.1:0", allow_auto_topic_creation=False)
    keys = {"pulsar_listen": "127.0.0.1:0", "allow_auto_topic_creation": False}
    here = start_sidecar(peers=there.address, **keys)
    with Client(here.address) as client:
        client.admin.create_topic("t")
        client.admin.create_topic("stays")
        stock = connect(f"pulsar://{door_of(here)}")
        consumer = stock.subscribe("t", "s", initial_position=pulsar.InitialPosition.Earliest)
        producer = StockProducer(stock, "p", 1, "t")
        producer.start()
        producer.wait_for_more(100)
        assert client.admin.move_topic("t", there.address) == there.address
        producer.wait_for_more(100)
        producer.finish()
    assert not producer.failed
    assert ids_in(there, "t") == list(range(producer.sent))
    consumed: list[bytes] = []
    while consumed[-1:] != [b"p/%d" % (producer.sent - 1)]:
        message = consumer.receive(60_000)
        consumed.append(message.data())
    assert list(dict.fromkeys(consumed)) == [b"p/%d" % number for number in range(producer.sent)]
    wire = open_wire(door_of(here))
    answers = [wire.look_up(name).lookupTopicResponse for name in ("t", "stays")]
    assert [answer.response for answer in answers] == [answers[0].Redirect, answers[0].Connect]
    assert answers[0].brokerServiceUrl == f"pulsar://{door_of(there)}"
    here.kill()
    del here.keys["peers"]
    here.start()
    wire = open_wire(door_of(here))
    assert wire.look_up("t").lookupTopicResponse.response == CommandLookupTopicResponse.Connect
    assert wire.refused("t").error == ServerError.ServiceNotReady


def test_a_topic_that_has_moved_twice_is_found(tmp_path: Path, open_wire: OpenWire) -> None:
    """The control: the second door took the topic for its own, because the first one had redirected the client."""
    three = [Sidecar(tmp_path / str(k), pulsar_listen="127.0.0.1:0") for k in range(3)]
    try:
        for sidecar in three:
            sidecar.keys["peers"] = ",".join(one.address for one in three)
            sidecar.start()
        wires = [open_wire(door_of(sidecar)) for sidecar in three]
        wires[0].produce("t")
        # Nobody has said how clients reach the door: a client stays where it is.
        assert wires[0].look_up("t").lookupTopicResponse.proxy_through_service_url
        for k in range(2):
            with Client(three[k].address) as client:
                client.admin.move_topic("t", three[k + 1].address)
        found = [wires[k].look_up("t", authoritative=k > 0).lookupTopicResponse for k in range(3)]
        urls = [f"pulsar://{door_of(sidecar)}" for sidecar in three]
        assert [answer.brokerServiceUrl for answer in found] == [urls[1], urls[2], urls[2]]
        assert [answer.response == CommandLookupTopicResponse.Redirect for answer in found] == [True, True, False]
    finally:
        for sidecar in three:
            sidecar.kill()


class OtherSidecar:
    """The owner of all topics. It answers when the test lets it: with a number of partitions, or a refusal."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.now = self.at_most = 0
        """The questions that it has not answered."""
        self._answers = asyncio.Semaphore(0)
        self.refusal: SeqdedupeError | None = None

    def answer(self, count: int = 1_000) -> None:
        for _ in range(count):
            self._answers.release()

    async def topic(self, address: str, name: str) -> Any:
        self.asked.append(name)
        self.now += 1
        self.at_most = max(self.at_most, self.now)
        await self._answers.acquire()
        self.now -= 1
        if self.refusal is not None:
            raise self.refusal
        return SimpleNamespace(partitions=7)

    async def door_at(self, address: str) -> str:
        await self.topic(address, "door")
        return "pulsar://there:2"

    async def until_asked(self, count: int) -> None:
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            while len(self.asked) < count:  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0)
        assert len(self.asked) == count


@pytest.fixture
def other() -> OtherSidecar:
    return OtherSidecar()


@pytest.fixture
def lookup(other: OtherSidecar) -> TopicLookup:
    """It asks the other sidecar about all topics."""

    def check(name: str) -> None:
        raise error("NOT_OWNER", "it belongs to another shard", owner_address="there:1")

    topics: Any = SimpleNamespace(ownership=SimpleNamespace(check=check))
    allowing: Any = SimpleNamespace(check_call=lambda *_: None)
    neighbours: Any = other
    return TopicLookup(topics, allowing, neighbours)


Counting = asyncio.Task[CommandPartitionedTopicMetadataResponse]


def count(lookup: TopicLookup, client: str, *names: str) -> list[Counting]:
    """A client asks for the partitions of topics, all at once."""
    commands = [CommandPartitionedTopicMetadata(topic=name, request_id=1) for name in names]
    return [asyncio.ensure_future(lookup.partitions(command, None, client)) for command in commands]


async def answers(*counting: Counting) -> list[CommandPartitionedTopicMetadataResponse]:
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        return await asyncio.gather(*counting)


async def test_a_refusal_of_the_sidecars_own_token_is_not_the_clients(lookup: TopicLookup, other: OtherSidecar) -> None:
    """The control: clients with a good token were told that it was wrong, and gave up for good. And of a hundred
    clients that ask for a topic at once, one asks the owner."""
    other.refusal = error("UNAUTHENTICATED", "the token is not this sidecar's")
    other.answer()
    counted = await answers(*(one for k in range(100) for one in count(lookup, f"client {k}", "t")))
    assert len(other.asked) == 1
    found = await lookup.look_up(CommandLookupTopic(topic="t", request_id=1))
    told: list[Any] = [*counted, found]
    for answer in told:
        assert answer.error == ServerError.MetadataError


MANY = [f"t{k}" for k in range(100)]


def full(*names: str) -> list[str]:
    return [f"persistent://public/default/{name}" for name in names]


async def test_a_client_with_many_questions_delays_only_its_own(lookup: TopicLookup, other: OtherSidecar) -> None:
    flood = count(lookup, "one", *MANY)
    await other.until_asked(MAX_ASKED)
    counting = [*count(lookup, "two", "a", "b"), *count(lookup, "three", "c")]
    await asyncio.sleep(0)
    other.answer(6)
    await other.until_asked(MAX_ASKED + 6)
    assert other.asked[MAX_ASKED:] == full("t4", "a", "c", "t5", "b", "t6")
    other.answer()
    assert [answer.partitions for answer in await answers(*flood, *counting)] == [7] * 103
    assert other.at_most == MAX_ASKED


async def test_a_client_that_leaves_takes_no_turns_with_it(lookup: TopicLookup, other: OtherSidecar) -> None:
    """Neither those of its questions that wait, nor those of the questions that are asked."""
    for client in ("one", "two"):
        flood = count(lookup, client, *MANY)
        await asyncio.sleep(0)
        for one in flood:
            one.cancel()
        await asyncio.wait(flood)
    counting = count(lookup, "three", *(f"a{k}" for k in range(10)))
    await other.until_asked(MAX_ASKED)
    other.answer()
    assert [answer.partitions for answer in await answers(*counting)] == [7] * 10
    assert other.asked[MAX_ASKED:] == full(*(f"a{k}" for k in range(10)))
    assert other.at_most == MAX_ASKED


@pytest.mark.parametrize("reason", ["UNREACHABLE", "OUTCOME_UNKNOWN"])
async def test_a_silent_owner_is_asked_one_question_from_time_to_time(
    lookup: TopicLookup, other: OtherSidecar, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """All others are refused at once. The control: each of them waited for its turn, and then for the owner."""
    monkeypatch.setattr(topic_lookup, "SILENT_SECONDS", math.inf)
    other.refusal = error(reason, "there is no answer")
    waiting = count(lookup, "one", *MANY)
    await other.until_asked(MAX_ASKED)
    other.answer(MAX_ASKED)
    for answer in await answers(*waiting, *count(lookup, "two", "a")):
        assert answer.error == ServerError.MetadataError
    found = await lookup.look_up(CommandLookupTopic(topic="t", request_id=1))
    assert (found.error, len(other.asked)) == (ServerError.MetadataError, MAX_ASKED)

    monkeypatch.setattr(topic_lookup, "SILENT_SECONDS", 0.0)
    [owner] = lookup._owners.values()
    owner._asked_again_at = 0.0
    for is_silent in (True, False):
        [probe, *others] = count(lookup, "two", *MANY)
        refused = await answers(*others)
        assert {answer.error for answer in refused} == {ServerError.MetadataError}
        other.refusal = other.refusal if is_silent else None
        other.answer(1)
        [answer] = await answers(probe)
        assert answer.error == (ServerError.MetadataError if is_silent else 0)
    assert len(other.asked) == MAX_ASKED + 2
    other.answer()
    assert [answer.partitions for answer in await answers(*count(lookup, "one", *MANY))] == [7] * 100
