"""kill -9 while topics are made and deleted."""

import random
import time
from collections.abc import Callable

import grpc
import pytest

from seqdedupe.log.embedded.logs import incarnations
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, Client, batch

KILLS = 5


def test_half_made_and_half_deleted_topics_are_finished(
    start_sidecar: Callable[..., Sidecar], pytestconfig: pytest.Config
) -> None:
    """What was answered stays so; of the others each is there whole or not at all, and no folder is left over."""
    seed = pytestconfig.getoption("randomly_seed", 1)
    print("seed", seed)
    rng = random.Random(seed)
    sidecar = start_sidecar()
    client = Client(sidecar.address)
    alive: set[str] = set()
    made = 0
    for _ in range(KILLS):
        creations, deletions = {}, {}
        deadline = time.monotonic() + rng.uniform(0.02, 0.3)
        while time.monotonic() < deadline:
            name = f"t{made}"
            made += 1
            creations[name] = client.admin.CreateTopic.future(admin_pb2.CreateTopicRequest(topic=name))
            if alive and rng.random() < 0.6:
                name = rng.choice(sorted(alive))
                alive.discard(name)
                deletions[name] = client.admin.DeleteTopic.future(admin_pb2.DeleteTopicRequest(topic=name))
            time.sleep(0.003)
        sidecar.kill()
        created = {name for name, call in creations.items() if call.exception() is None}
        deleted = {name for name, call in deletions.items() if call.exception() is None}
        sidecar.start()
        request = admin_pb2.ListTopicsRequest()
        listed = client.admin.ListTopics(request, wait_for_ready=True, timeout=TIMEOUT_SECONDS).topics
        there = {topic.name.rpartition("/")[2] for topic in listed}
        assert len(there) == len(listed)
        assert alive | created <= there <= alive | set(creations) | set(deletions) - deleted
        assert {topic.state for topic in listed} <= {admin_pb2.TOPIC_STATE_SERVING}
        # Killed soon enough it has never made one, nor a folder for them.
        logs = sidecar.data / "logs"
        folders = set(incarnations(logs)) if logs.exists() else set()
        assert folders == {topic.incarnation for topic in listed}
        alive = there
    client.close()


DELETIONS = 60


def test_deletions_that_are_given_up_leave_a_topic_whole_or_gone(start_sidecar: Callable[..., Sidecar]) -> None:
    """With deadlines too short to wait for; then an orderly start. What has a receipt after a deletion stays."""
    sidecar = start_sidecar()
    client = Client(sidecar.address)
    receipts: dict[str, int] = {}
    deleted: set[str] = set()
    for i in range(DELETIONS):
        name = f"d{i}"
        epochs = client.epochs(name, "p")
        client.publish_unary(name, batch([("p", 0)], epochs))
        receipts[name] = 1
        call = client.admin.DeleteTopic.future(admin_pb2.DeleteTopicRequest(topic=name), timeout=0.0005 * (1 + i % 8))
        for sequence_id in range(1, 4):
            try:
                client.publish_unary(name, batch([("p", sequence_id)], epochs))
                receipts[name] = sequence_id + 1
            except grpc.RpcError:
                break
        if call.exception() is None:
            deleted.add(name)
    assert len(deleted) < DELETIONS
    assert sidecar.stop() == 0
    sidecar.start()
    there = {
        topic.name.rpartition("/")[2]
        for topic in client.admin.ListTopics(admin_pb2.ListTopicsRequest(), wait_for_ready=True).topics
    }
    assert not there & deleted
    for name in there:
        assert client.rows(name) == [("p", i) for i in range(receipts[name])]
    client.close()
