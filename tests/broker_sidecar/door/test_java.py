"""Pulsar's own Java client at the door."""

from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path

import pulsar
import pytest
import trustme

from pulsar_broker.distribution import Unavailable, home
from pulsar_broker.standalone import Broker, free_port
from seqdedupe.client.blocking import Client
from seqdedupe.client.message import Message
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import calls
from tests.broker_sidecar.door.java_client import JavaClient, JavaFailed
from tests.broker_sidecar.door.several import first_of_free_ports
from tests.broker_sidecar.door.wire import door_of
from tests.broker_sidecar.pausing import wait_for
from tests.broker_sidecar.security.issuing import of_server
from tests.broker_sidecar.security.showing import token_of
from tests.broker_sidecar.security.test_certificates import tls_keys
from tests.broker_sidecar.test_workers import topics_of
from tests.tiers import PULSAR

MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def pulsar_home() -> Path:
    try:
        return home()
    except Unavailable:
        PULSAR.missing()


@pytest.fixture(scope="module")
def program(pulsar_home: Path) -> Iterator[JavaClient]:
    with JavaClient(pulsar_home) as program:
        yield program


@pytest.fixture
def java(program: JavaClient, shared: Sidecar) -> JavaClient:
    """The program, connected to the door."""
    program.connect(f"pulsar://{door_of(shared)}")
    return program


def messages_of(sidecar: Sidecar, topic: str) -> list[Message]:
    with Client(sidecar.address) as client, client.reader(topic) as reader:
        return list(reader)


def ids_in(sidecar: Sidecar, topic: str) -> list[int]:
    return [message.sequence_id for message in messages_of(sidecar, topic)]


@pytest.mark.parametrize("compression", ["NONE", "LZ4", "ZLIB", "ZSTD", "SNAPPY"])
@pytest.mark.parametrize("how", ["gathered", "single"])
def test_messages_arrive_as_they_were_sent(
    java: JavaClient, shared: Sidecar, topic: str, how: str, compression: str
) -> None:
    assert java.open(topic, how=how, compression=compression) == ("p", -1)
    java.ask("send", "a", 0, 19)
    java.ask("flush", "a")
    assert java.ids() == list(range(20))
    assert not java.errors
    messages = messages_of(shared, topic)
    assert [message.sequence_id for message in messages] == list(range(20))
    for i, message in enumerate(messages):
        assert message.producer_name == "p"
        assert message.payload == b"payload %d " % i * 10
        assert message.key == f"key {i}".encode()
        assert message.properties == {"number": str(i), "ü": ""}
        assert message.event_time_ms == 1_700_000_000_000 + i


@pytest.mark.parametrize("how", ["gathered", "single"])
def test_sent_again_each_has_the_id_of_its_original(java: JavaClient, shared: Sidecar, topic: str, how: str) -> None:
    java.open(topic, how=how)
    java.ask("send", "a", 0, 9)
    java.ask("flush", "a")
    java.ask("send", "a", 0, 9)
    java.ask("flush", "a")
    java.ask("close", "a")
    assert java.open(topic, how=how) == ("p", 9)
    java.ask("send", "a", 0, 9)
    java.ask("flush", "a")
    receipts = java.receipts["a"]
    assert receipts[:10] == receipts[20:]
    assert ids_in(shared, topic) == list(range(10))


def send_old_and_new(java: JavaClient, topic: str) -> None:
    """One batch has messages that the topic has, and messages that it does not have."""
    java.open(topic)
    java.ask("send", "a", 0, 4)
    java.ask("flush", "a")
    java.ask("close", "a")
    assert java.open(topic) == ("p", 4)
    java.ask("send", "a", 3, 9)
    java.ask("flush", "a")
    assert java.ids() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 8, 9]


def test_old_and_new_messages_in_one_batch(java: JavaClient, shared: Sidecar, topic: str) -> None:
    send_old_and_new(java, topic)
    assert ids_in(shared, topic) == list(range(10))


def test_control_a_broker_loses_what_is_new_in_such_a_batch(program: JavaClient, pulsar_home: Path, topic: str) -> None:
    with Broker(pulsar_home, brokerDeduplicationEnabled="true") as broker:
        program.connect(broker.service_url)
        send_old_and_new(program, topic)
        client = pulsar.Client(broker.service_url, logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error))
        reader = client.create_reader(topic, pulsar.MessageId.earliest)
        found = []
        while reader.has_message_available():
            found.append(reader.read_next().partition_key())
        client.close()
    assert found == [f"key {i}" for i in range(5)]


def test_a_message_that_is_refused_fails_alone(java: JavaClient, shared: Sidecar, topic: str) -> None:
    java.open(topic)
    java.ask("send", "a", 0, 4)
    java.ask("later", "a", 5)
    java.ask("send", "a", 6, 9)
    java.ask("flush", "a")
    [(number, why)] = java.errors["a"]
    assert number == 5
    assert "is to be delivered later [INVALID_REQUEST]" in why
    assert java.ids() == ids_in(shared, topic) == [0, 1, 2, 3, 4, 6, 7, 8, 9]


def test_a_message_in_chunks_is_refused_and_fails_alone(java: JavaClient, shared: Sidecar, topic: str) -> None:
    java.open(topic, how="chunks")
    java.ask("send", "a", 0, 4)
    java.ask("large", "a", 5, 12 * MEBIBYTE)
    java.ask("send", "a", 6, 9)
    java.ask("flush", "a")
    [(number, why)] = java.errors["a"]
    assert number == 5
    assert "is a chunk of a larger message" in why
    assert java.ids() == ids_in(shared, topic) == [0, 1, 2, 3, 4, 6, 7, 8, 9]


def test_a_producer_of_json(java: JavaClient, topic: str) -> None:
    """The sidecar's own log keeps no schemas, and JSON needs none."""
    assert java.open(topic, how="json") == ("p", -1)


def test_a_topic_without_a_schema_takes_the_bytes_of_any(java: JavaClient, shared: Sidecar, topic: str) -> None:
    """The client asks for the topic's schema."""
    java.open(topic, how="auto")
    java.ask("send", "a", 0, 4)
    java.ask("flush", "a")
    assert ids_in(shared, topic) == list(range(5))


def test_producers_without_names(java: JavaClient, shared: Sidecar, topic: str) -> None:
    names = [java.open(topic, "-", label=label)[0] for label in ("a", "b")]
    for label in ("a", "b"):
        java.ask("send", label, 0, 4)
        java.ask("flush", label)
    found = [(message.producer_name, message.sequence_id) for message in messages_of(shared, topic)]
    assert found == [(name, i) for name in names for i in range(5)]


def test_a_partitioned_topic(java: JavaClient, client: calls.Client, shared: Sidecar, topic: str) -> None:
    client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=topic, partitions=3))
    for _ in range(2):
        java.open(topic)
        java.ask("send", "a", 0, 59)
        java.ask("flush", "a")
        java.ask("close", "a")
    found = [ids_in(shared, f"{topic}-partition-{k}") for k in range(3)]
    assert all(found)
    assert sorted(chain(*found)) == list(range(60))
    assert all(a < b for ids in found for a, b in pairwise(ids))


def test_a_producer_is_closed_under_load(java: JavaClient, shared: Sidecar, topic: str) -> None:
    """What has a receipt is stored, and the next producer goes on after what is stored."""
    java.open(topic, how="batches")
    last = -1
    for _ in range(3):
        java.forget()
        java.ask("load", "a")
        java.wait_for_more(500)
        java.ask("close", "a")
        sent = int(java.ask("stop", "a"))
        assert len(java.receipts["a"]) + len(java.errors["a"]) == sent
        assert java.ids() == list(range(last + 1, last + 1 + len(java.ids())))
        name, last = java.open(topic, how="batches")
        assert name == "p"
        assert last >= java.ids()[-1]
        assert ids_in(shared, topic) == list(range(last + 1))


def test_a_client_that_was_killed_goes_on_after_its_last_message(
    pulsar_home: Path, shared: Sidecar, topic: str
) -> None:
    for _ in range(3):
        with JavaClient(pulsar_home) as java:
            java.connect(f"pulsar://{door_of(shared)}")
            _, last = java.open(topic, how="batches", compression="LZ4")
            assert last == len(ids_in(shared, topic)) - 1
            java.ask("load", "a")
            java.wait_for_more(500)
    ids = ids_in(shared, topic)
    assert len(ids) >= 1500
    assert ids == list(range(len(ids)))


def kill_under_load(java: JavaClient, folder: Path, *, deduplicates: bool = True) -> int:
    """Kills a sidecar six times under two producers. Returns how many copies too many the log has. Raises
    AssertionError if a message is missing or out of order.
    """
    address = f"127.0.0.1:{free_port()}"
    with Sidecar(folder, pulsar_listen=address, deduplication_entries_interval=50) as sidecar:
        with Client(sidecar.address) as operator:
            operator.admin.create_topic("t", deduplication_enabled=deduplicates)
        java.connect(f"pulsar://{address}")
        names = {
            label: java.open("t", name, "batches", compression, label)[0]
            for label, name, compression in (("a", "p", "LZ4"), ("b", "-", "ZSTD"))
        }
        for label in names:
            java.ask("load", label)
        for _ in range(6):
            for label in names:
                java.wait_for_more(200, label)
            sidecar.restart()
        sent = {label: int(java.ask("stop", label)) for label in names}
        messages = messages_of(sidecar, "t")
    extra = 0
    assert not java.errors
    for label, name in names.items():
        assert java.ids(label) == list(range(sent[label]))
        ids = [message.sequence_id for message in messages if message.producer_name == name]
        assert list(dict.fromkeys(ids)) == list(range(sent[label]))
        extra += len(ids) - sent[label]
    return extra


def test_nothing_is_lost_or_doubled_over_kills(program: JavaClient, tmp_path: Path) -> None:
    assert kill_under_load(program, tmp_path) == 0


def test_control_without_deduplication_the_client_doubles(program: JavaClient, tmp_path: Path) -> None:
    """What the client resends after a kill is in the log already."""
    if not any(kill_under_load(program, tmp_path / f"{k}", deduplicates=False) for k in range(5)):
        pytest.fail("nothing was doubled: this shows nothing")


@pytest.mark.parametrize("workers", [1, 2])
def test_with_a_token_over_tls(program: JavaClient, tmp_path: Path, workers: int) -> None:
    """The door of the first of two workers sends the client to the second."""
    authority = trustme.CA()
    keys = tls_keys(tmp_path / "tls", of_server(authority)) | {"authentication": "token"}
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    port = first_of_free_ports(workers)
    (topic,) = topics_of(workers - 1, workers, 1)
    with Sidecar(tmp_path / "sidecar", workers=workers, pulsar_listen=f"127.0.0.1:{port}", **keys) as sidecar:
        url = f"pulsar+ssl://localhost:{port}"
        program.connect(url, "wrong", tmp_path / "authority.pem")
        with pytest.raises(JavaFailed, match="UNAUTHENTICATED"):
            program.open(topic)
        program.connect(url, token_of(sidecar), tmp_path / "authority.pem")
        assert program.open(topic) == ("p", -1)
        program.ask("send", "a", 0, 9)
        program.ask("flush", "a")
        assert program.ids() == list(range(10))


def test_consumers_and_readers(java: JavaClient, topic: str) -> None:
    def receive(label: str, count: int) -> list[int]:
        return [int(number) for number in java.ask("receive", label, count).split()]

    java.open(topic)
    java.ask("send", "a", 0, 9)
    java.ask("flush", "a")
    java.ask("subscribe", "first", topic, "s", "Failover")
    java.ask("subscribe", "second", topic, "s", "Failover")
    assert receive("first", 10) == list(range(10))
    java.ask("acknowledge", "first", 0, 1, 4)
    java.ask("refuse", "first", 2)
    assert receive("first", 7) == [2, 3, 5, 6, 7, 8, 9]
    java.ask("acknowledgeUpTo", "first", 6)
    assert java.ask("read", "first", topic, "-") == "0 1 2 3 4 5 6 7 8 9"
    assert java.ask("read", "first", topic, 7) == "7 8 9"
    java.ask("leave", "first")
    assert receive("second", 3) == [7, 8, 9]
    java.ask("seek", "second", 8)
    assert receive("second", 1) == [9]
    with pytest.raises(JavaFailed, match="ConsumerBusy"):
        java.ask("subscribe", "third", topic, "s", "Exclusive")
    for kind in ("Shared", "Key_Shared"):
        with pytest.raises(JavaFailed, match=rf"NotAllowed.*has the type {kind}"):
            java.ask("subscribe", "third", topic, "other", kind)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_consumer_reads_on_over_a_kill(program: JavaClient, tmp_path: Path, workers: int) -> None:
    address = f"127.0.0.1:{first_of_free_ports(workers)}"
    (topic,) = topics_of(workers - 1, workers, 1)
    with Sidecar(tmp_path, workers=workers, pulsar_listen=address) as sidecar:
        program.connect(f"pulsar://{address}")
        program.open(topic)
        program.ask("send", "a", 0, 9)
        program.ask("flush", "a")
        program.ask("subscribe", "c", topic, "s", "Exclusive")
        assert program.ask("receive", "c", 5) == "0 1 2 3 4"
        program.ask("acknowledge", "c", 0, 1, 3)
        with Client(sidecar.address) as client:
            wait_for(lambda: client.admin.cursors(topic)[0].position.index == 1)
        sidecar.restart()
        # What the client has received before, it may still return.
        program.ask("send", "a", 10, 10)
        program.ask("flush", "a")
        found: list[str] = []
        while found[-1:] != ["10"]:
            found += program.ask("receive", "c", 1).split()
        assert not {"0", "1"}.intersection(found)
        assert {"2", "4", "5", "6", "7", "8", "9", "10"}.issubset(found)
