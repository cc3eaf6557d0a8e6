"""A sidecar with more topics than its start waits for: what it says of them, and what somebody who uses one finds."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import with_constants
from tests.broker_sidecar.calls import DUP, NOT_DUP, Client, batch, verdicts
from tests.broker_sidecar.health import health_of

TOPICS = ("a", "b", "c", "d", "e")
SERVING = health_pb2.HealthCheckResponse.SERVING
WAIT_SECONDS = LAST_RESORT_SECONDS


def full(topic: str) -> str:
    return f"persistent://public/default/{topic}"


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    """Killed with a message in each of five topics, and started again: one is opened by then, and none by itself."""
    constants = {"OPENED_AT_START": 1, "APART_SECONDS": 10**6, "USE_SECONDS": WAIT_SECONDS}
    said = json.dumps({f"seqdedupe.topic.directory.{name}": value for name, value in constants.items()})
    with Sidecar(tmp_path, module=with_constants.MODULE, environment={with_constants.VARIABLE: said}) as sidecar:
        with closing(Client(sidecar.address)) as client:
            for topic in TOPICS:
                assert publish(client, topic) == NOT_DUP
        sidecar.restart()
        yield sidecar


def publish(client: Client, topic: str) -> int:
    """The verdict of the topic's one message."""
    receipt = client.publish_unary(topic, batch([("p", 0)], client.epochs(topic, "p")))
    return verdicts(receipt, 1)[0]


def states(client: Client) -> dict[str, admin_pb2.Topic]:
    return {topic.name: topic for topic in client.admin.ListTopics(admin_pb2.ListTopicsRequest()).topics}


def test_topics_that_wait(sidecar: Sidecar) -> None:
    """To ask for one is to use it, and nobody uses "e" before the end."""
    with closing(Client(sidecar.address)) as client:
        listed = states(client)
        assert listed[full("a")].state == admin_pb2.TOPIC_STATE_SERVING
        for topic in TOPICS[1:]:
            assert listed[full(topic)].state == admin_pb2.TOPIC_STATE_RECOVERING
            assert "nobody has used it since the start" in listed[full(topic)].why
        health = health_of(client.channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == SERVING

        # Health claims nothing that is not known, and then finds out.
        until = time.monotonic() + WAIT_SECONDS
        while health.Check(health_pb2.HealthCheckRequest(service=full("b"))).status != SERVING:
            assert time.monotonic() < until
            time.sleep(0.02)
        for told in health.Watch(health_pb2.HealthCheckRequest(service=full("c")), timeout=WAIT_SECONDS):
            if told.status == SERVING:
                break
        topic_d = client.topic("d")
        assert (topic_d.state, topic_d.last.index, topic_d.producers) == (admin_pb2.TOPIC_STATE_SERVING, 0, 1)

        # What nobody asks for is not open.
        assert states(client)[full("e")].state == admin_pb2.TOPIC_STATE_RECOVERING
    assert sidecar.stop() == 0
    sidecar.start()
    with closing(Client(sidecar.address)) as client:
        assert states(client)[full("b")].state == admin_pb2.TOPIC_STATE_RECOVERING
        assert [publish(client, topic) for topic in TOPICS] == [DUP] * len(TOPICS)
        assert {topic.state for topic in states(client).values()} == {admin_pb2.TOPIC_STATE_SERVING}
