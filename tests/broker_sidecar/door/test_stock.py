"""Pulsar's own Python client at the door."""

from collections.abc import Iterator
from pathlib import Path

import pulsar
import pytest

from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import calls
from tests.broker_sidecar.door.stock_kills import round_at_sidecar, round_at_workers
from tests.broker_sidecar.door.stock_processes import RIGHT, command_of
from tests.broker_sidecar.door.wire import door_of

COMPRESSIONS = [
    pulsar.CompressionType.NONE,
    pulsar.CompressionType.LZ4,
    pulsar.CompressionType.ZLib,
    pulsar.CompressionType.ZSTD,
    pulsar.CompressionType.SNAPPY,
]


@pytest.fixture
def stock(shared: Sidecar) -> Iterator[pulsar.Client]:
    client = pulsar.Client(
        f"pulsar://{door_of(shared)}",
        logger=pulsar.ConsoleLogger(pulsar.LoggerLevel.Error),
        operation_timeout_seconds=60,
    )
    yield client
    client.close()


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=lambda kind: str(kind).rpartition(".")[2])
@pytest.mark.parametrize("batches", [True, False])
def test_messages_arrive_as_they_were_sent(
    stock: pulsar.Client, shared: Sidecar, topic: str, compression: pulsar.CompressionType, batches: bool
) -> None:
    producer = stock.create_producer(
        topic,
        producer_name="p",
        batching_enabled=batches,
        compression_type=compression,
        batching_max_publish_delay_ms=20,
    )
    assert producer.last_sequence_id() == -1
    done: list[object] = []
    for i in range(20):
        producer.send_async(
            b"payload %d" % i * 50,
            lambda result, _: done.append(result),
            sequence_id=i * 2,
            partition_key=f"key {i}",
            event_timestamp=1_700_000_000_000 + i,
            properties={"number": str(i), "ü": ""},
        )
    producer.flush()
    assert done == [pulsar.Result.Ok] * 20
    producer.close()
    with Client(shared.address) as client, client.reader(topic) as reader:
        messages = list(reader)
    assert [message.sequence_id for message in messages] == list(range(0, 40, 2))
    for i, message in enumerate(messages):
        assert message.payload == b"payload %d" % i * 50
        assert message.key == f"key {i}".encode()
        assert message.event_time_ms == 1_700_000_000_000 + i
        assert message.properties == {"number": str(i), "ü": ""}


def test_a_producer_that_starts_again_goes_on_after_its_last_message(stock: pulsar.Client, topic: str) -> None:
    """Sent again, a message has the ID of its original. (The client takes sequence ID 0 for none.)"""
    first = stock.create_producer(topic, producer_name="p")
    ids = [first.send(b"%d" % i, sequence_id=i) for i in range(1, 6)]
    first.close()
    second = stock.create_producer(topic, producer_name="p")
    assert second.last_sequence_id() == 5
    assert [str(second.send(b"%d" % i, sequence_id=i)) for i in range(1, 6)] == [str(one) for one in ids]
    second.close()


def test_a_name_that_is_taken(stock: pulsar.Client, topic: str) -> None:
    producer = stock.create_producer(topic, producer_name="p")
    with pytest.raises(pulsar.ProducerBusy):
        stock.create_producer(topic, producer_name="p")
    producer.close()
    stock.create_producer(topic, producer_name="p").close()


def test_a_partitioned_topic(stock: pulsar.Client, client: calls.Client, topic: str) -> None:
    client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=topic, partitions=3))
    producer = stock.create_producer(topic, producer_name="p", batching_enabled=False)
    for i in range(30):
        producer.send(b"%d" % i, partition_key=f"key {i}")
    producer.close()
    found = [client.end_index(f"{topic}-partition-{k}") for k in range(3)]
    assert sum(found) == 30
    assert all(found)


def test_nothing_is_lost_or_doubled_over_kills(tmp_path: Path) -> None:
    plan = ("kill_sidecar", "kill_client", "kill_client_and_sidecar", "kill_sidecar")
    found = round_at_sidecar(tmp_path, {"python": command_of("python", tmp_path)}, 1, plan)
    assert found.kills == 5
    assert found.acknowledged["python"] >= 250
    assert found.verdicts == {"python": RIGHT}


def test_nothing_is_lost_or_doubled_over_kills_of_workers(tmp_path: Path) -> None:
    plan = ("kill_worker", "kill_client", "kill_worker", "kill_worker")
    found = round_at_workers(tmp_path, {"python": command_of("python", tmp_path)}, 1, plan)
    assert found.faults == {"worker": 3, "python": 1}
    assert found.verdicts == {"python": RIGHT}


def test_control_without_deduplication_the_client_doubles(tmp_path: Path) -> None:
    """What a stock client resends after a kill is in the log already."""
    commands = {"python": command_of("python", tmp_path)}
    for seed in range(10):
        plan = ("kill_sidecar", "kill_client", "kill_sidecar", "kill_client")
        found = round_at_sidecar(tmp_path / f"{seed}", commands, seed, plan, deduplicates=False)
        assert not found.verdicts["python"].lost
        if found.verdicts["python"].doubled:
            return
    pytest.fail("nothing was doubled: this shows nothing")
