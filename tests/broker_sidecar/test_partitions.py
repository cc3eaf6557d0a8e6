"""Partitioned topics over the wire: by the name of the whole, and each partition by its own."""

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from broker_sidecar.services import statistics
from seqdedupe.client.blocking import Client
from seqdedupe.core.id_window import IdWindow
from seqdedupe.errors import InvalidRequestError, NotFoundError
from seqdedupe.log.embedded.logs import incarnations
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.topic.base import TopicBase
from seqdedupe.topic.policy import Policy
from seqdedupe.v1 import admin_pb2, admin_pb2_grpc


@pytest.fixture
def client(shared: Sidecar) -> Iterator[Client]:
    with Client(shared.address) as client:
        yield client


def names(client: Client, whole: str) -> list[tuple[str, int, str]]:
    found = [t for t in client.admin.topics() if t.name.startswith(f"persistent://public/default/{whole}")]
    return [(t.name.rpartition("/")[2], t.partitions, t.partition_of.rpartition("/")[2]) for t in found]


def test_made_listed_shown_and_deleted_by_the_name_of_the_whole(client: Client, topic: str) -> None:
    made = client.admin.create_topic(topic, partitions=3)
    assert (made.partitions, made.state) == (3, admin_pb2.TOPIC_STATE_SERVING)
    parts = [f"{topic}-partition-{k}" for k in range(3)]
    assert names(client, topic) == [(topic, 3, ""), *((part, 0, topic) for part in parts)]
    with client.producer(parts[1], "p") as producer:
        for i in range(4):
            producer.send(b"x", i)
    shown = client.admin.topic(topic)
    assert (shown.not_dup, shown.partitions, shown.why) == (4, 3, "")
    assert shown.log_bytes == sum(client.admin.topic(part).log_bytes for part in parts) > 0
    client.admin.delete_topic(topic)
    assert names(client, topic) == []
    with pytest.raises(NotFoundError):
        client.admin.topic(topic)


def test_the_policy_of_the_whole_is_that_of_its_partitions_or_the_weakest(client: Client, topic: str) -> None:
    policy = admin_pb2.TopicPolicy(retention_size_in_mb=300)
    made = client.admin.create_topic(topic, partitions=3, policy=policy)
    assert (made.policy.deduplication_enabled, made.policy.retention_size_in_mb) == (True, 300)
    assert made.policy == client.admin.topic(f"{topic}-partition-2").policy
    client.admin.set_policy(f"{topic}-partition-1", admin_pb2.TopicPolicy(deduplication_enabled=False))
    assert client.admin.topic(topic).policy.deduplication_enabled is False


def test_a_window_that_lost_all_it_held_knows_nothing_of_what_came_before_now() -> None:
    """As when its store is made again from a log of which retention has left nothing."""
    for forgotten in (0, 7):
        kept = SimpleNamespace(window=IdWindow(b"k" * 16, forgotten), policy=Policy())
        message, before_ms = admin_pb2.Topic(), time.time_ns() // 1_000_000
        statistics._fill_window(message, cast(TopicBase, kept))
        assert (message.window_forgotten, message.window_messages) == (forgotten, 0)
        if forgotten:
            assert message.window_first_publish_time_ms >= before_ms
        else:
            assert message.window_first_publish_time_ms == 0


def test_calls_that_are_for_one_log_are_refused_for_the_whole(client: Client, topic: str) -> None:
    client.admin.create_topic(topic, partitions=2)
    calls: list[Callable[[], object]] = [
        lambda: client.ends(topic),
        lambda: next(iter(client.reader(topic))),
        lambda: client.admin.snapshot(topic),
        lambda: client.admin.producers(topic),
        lambda: client.admin.set_policy(topic, admin_pb2.TopicPolicy(deduplication_enabled=False)),
        lambda: client.admin.rebuild_topic(topic),
    ]
    for call in calls:
        with pytest.raises(InvalidRequestError) as caught:
            call()
        assert (caught.value.reason, caught.value.numbers["partitions"]) == ("TOPIC_IS_PARTITIONED", "2")
    with pytest.raises(InvalidRequestError, match="is a partition of"):
        client.admin.delete_topic(f"{topic}-partition-0")
    with pytest.raises(InvalidRequestError, match="would be taken for a partition"):
        client.producer(f"{topic}-partition-2", "p").open()
    assert names(client, topic)[0] == (topic, 2, "")


def test_no_producer_publishes_where_gaps_are_refused(client: Client, topic: str) -> None:
    """By anybody's policy: here that of the partition itself."""
    client.admin.create_topic(topic, partitions=1)
    reject = admin_pb2.TopicPolicy(gap=admin_pb2.GAP_POLICY_REJECT)
    with pytest.raises(InvalidRequestError, match="over all partitions"):
        client.admin.create_topic(f"{topic}-2", partitions=1, policy=reject)
    client.admin.set_policy(f"{topic}-partition-0", reject)
    with pytest.raises(InvalidRequestError, match="over all partitions"):
        client.producer(f"{topic}-partition-0", "p").open()


KILLS = 4


def test_a_process_that_is_killed_leaves_all_partitions_or_none(start_sidecar: Callable[..., Sidecar]) -> None:
    """Made and deleted under kill -9: what was answered stays so."""
    sidecar = start_sidecar()
    expected: dict[str, bool] = {}
    for turn in range(KILLS):
        with Client(sidecar.address) as client:
            client.wait_ready(LAST_RESORT_SECONDS)
            for i in range(3):
                client.admin.create_topic(f"w{turn}-{i}", partitions=4)
                expected[f"w{turn}-{i}"] = True
            client.admin.delete_topic(f"w{turn}-0")
            expected[f"w{turn}-0"] = False
            # Answered or not, these are under way when the process is killed.
            with grpc.insecure_channel(sidecar.address) as channel:
                admin = admin_pb2_grpc.AdminServiceStub(channel)
                begun: list[Any] = [
                    admin.CreateTopic.future(admin_pb2.CreateTopicRequest(topic=f"w{turn}-3", partitions=4)),
                    admin.DeleteTopic.future(admin_pb2.DeleteTopicRequest(topic=f"w{turn}-1")),
                ]
                if turn % 2:
                    begun[turn // 2].exception()
                sidecar.kill()
                if begun[0].exception() is None:
                    expected[f"w{turn}-3"] = True
                if begun[1].exception() is None:
                    expected[f"w{turn}-1"] = False
                else:
                    del expected[f"w{turn}-1"]
        sidecar.start()
        with Client(sidecar.address) as client:
            found = {t.name.rpartition("/")[2]: t for t in client.admin.topics()}
            wholes = {name for name, t in found.items() if t.partitions}
            assert len(found) == 5 * len(wholes)
            assert {t.state for t in found.values()} == {admin_pb2.TOPIC_STATE_SERVING}
            assert all((name in wholes) == is_there for name, is_there in expected.items())
            folders = set(incarnations(sidecar.data / "logs"))
            assert folders == {t.incarnation for t in found.values() if not t.partitions}
