"""GetStatistics over the wire."""

import time
from functools import partial
from typing import Any

import pytest

from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, Client, batch, refused

POLL_SECONDS = 0.1


def _ask(client: Client, **request: Any) -> admin_pb2.GetStatisticsResponse:
    return client.admin.GetStatistics(admin_pb2.GetStatisticsRequest(**request), timeout=TIMEOUT_SECONDS)


def _make(client: Client, *names: str) -> None:
    for name in names:
        client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=name))


def _short(found: admin_pb2.GetStatisticsResponse) -> list[str]:
    return [one.topic.name.rpartition("/")[2] for one in found.topics]


def _wait_for_past(client: Client, topic: str) -> admin_pb2.TopicStatistics:
    """As soon as an interval in which something happened is over."""
    until = time.monotonic() + TIMEOUT_SECONDS
    while True:
        [one] = _ask(client, topic=topic).topics
        if one.activity.not_dup:
            return one
        assert time.monotonic() < until
        time.sleep(POLL_SECONDS)


def test_what_a_topic_did(client: Client, topic: str) -> None:
    _ask(client)  # from here on it is counted
    epochs = client.epochs(topic, "p")
    stream = client.stream(topic)
    stream.receipt(batch([("p", 0), ("p", 1)], epochs))
    stream.receipt(batch([("p", 1), ("p", 2)], epochs))
    stream.refusal(batch([("p", 9)], epochs))
    past = _wait_for_past(client, topic).activity
    sums = [sum(values) for values in (past.not_dup, past.dup, past.unknown, past.refused)]
    assert sums == [3, 1, 0, 1]
    assert sum(past.stored_bytes) > 0
    found = _ask(client, search=topic)
    assert sum(found.activity.not_dup) >= 3
    assert len(found.activity.not_dup) >= len(past.not_dup)
    assert found.is_serving
    assert found.interval_ms > 0
    assert abs(found.now_ms / 1000 - time.time()) < TIMEOUT_SECONDS
    assert {one.reason for one in found.refusals} >= {"PREDECESSOR_MISSING"}
    assert found.replay_left_messages == 0
    [one] = found.topics
    assert one.topic == client.topic(topic)
    assert one.snapshot_age_ms > 0
    client.admin.Snapshot(admin_pb2.SnapshotRequest(topic=topic))
    assert _ask(client, topic=topic).topics[0].snapshot_age_ms == 0


def test_search_order_and_pages(client: Client, topic: str) -> None:
    names = [f"{topic}-{letter}" for letter in "abcd"]
    _make(client, *names)
    _ask(client)
    for name, rows in zip(names, (1, 30, 0, 7), strict=True):
        if rows:
            client.publish_unary(name, batch([("p", k) for k in range(rows)], client.epochs(name, "p")))
    for name in (names[0], names[1], names[3]):
        _wait_for_past(client, name)
    asked = partial(_ask, client, search=topic.upper())
    for order, letters in (
        (admin_pb2.STATISTICS_ORDER_NAME, "abcd"),
        (admin_pb2.STATISTICS_ORDER_SNAPSHOT, "bdac"),
        (admin_pb2.STATISTICS_ORDER_STATE, "abcd"),
        (admin_pb2.STATISTICS_ORDER_TROUBLE, "abcd"),
    ):
        assert "".join(name[-1] for name in _short(asked(order=order))) == letters
    for order in (admin_pb2.STATISTICS_ORDER_RATE, admin_pb2.STATISTICS_ORDER_UNSPECIFIED):
        # In the last interval others may have been busier; in all of them it is this.
        assert _short(asked(order=order))[-1] == names[2]
    page = asked(order=admin_pb2.STATISTICS_ORDER_NAME, offset=1, limit=2)
    assert (_short(page), page.topics_found) == (names[1:3], 4)
    assert _short(asked(offset=4)) == []
    assert _ask(client, search="no such name").topics_found == 0


def test_bad_questions(client: Client, topic: str) -> None:
    cases: dict[str, dict[str, Any]] = {
        "offset is -1": {"offset": -1},
        "limit is -1": {"limit": -1},
        "limit is 501": {"limit": 501},
        "order is 99": {"order": 99},
    }
    for message, request in cases.items():
        answer = refused(partial(_ask, client, **request))
        assert (answer.reason, message in answer.message) == ("INVALID_REQUEST", True)
    assert refused(partial(_ask, client, topic=topic)).reason == "TOPIC_NOT_FOUND"
    assert refused(partial(_ask, client, topic="a b")).reason == "INVALID_TOPIC_NAME"


@pytest.mark.parametrize("limit", [1, 3, 1000, 0])
def test_pages_of_producers_are_as_long_as_asked(client: Client, topic: str, limit: int) -> None:
    names = [f"p{k}" for k in range(7)]
    client.open(topic, *names)
    found: list[str] = []
    request = admin_pb2.ListProducersRequest(topic=topic, limit=limit)
    while True:
        page = client.admin.ListProducers(request)
        assert len(page.producers) <= (limit or 1000)
        found += [one.name for one in page.producers]
        if not page.next_offset:
            break
        request.offset = page.next_offset
    assert found == names
    for bad in (-1, 1001):
        request = admin_pb2.ListProducersRequest(topic=topic, limit=bad)
        assert refused(partial(client.admin.ListProducers, request)).reason == "INVALID_REQUEST"
