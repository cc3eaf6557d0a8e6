"""Numbers as people read them."""

import pytest

from seqdedupe import figures, topic_facts
from seqdedupe.v1 import admin_pb2, batch_pb2


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (1 / 3, "0.3"),
        (9.94, "9.9"),
        (9.96, "10"),
        (999, "999"),
        (999.6, "1k"),
        (1_500, "1.5k"),
        (99_499, "99k"),
        (999_499, "999k"),
        (999_500, "1M"),
        (3.4e9, "3.4G"),
        (2**63, "9E"),
        (5e21, "5000E"),
    ],
)
def test_short(number: float, shown: str) -> None:
    assert figures.short(number) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (59, "59 s"), (60, "1 min 0 s"), (3_661, "1 h 1 min"), (86_400, "1 d 0 h"), (180_000, "2 d 2 h")],
)
def test_duration(seconds: int, shown: str) -> None:
    assert figures.duration(seconds) == shown


def test_rates_are_of_the_last_interval() -> None:
    assert figures.per_second([], 3000) == 0
    assert figures.per_second([600, 30], 3000) == 10


def test_a_state_of_a_newer_sidecar_has_its_number() -> None:
    assert topic_facts.state_name(admin_pb2.TOPIC_STATE_READ_ONLY) == "READ_ONLY"
    assert topic_facts.state_name(99) == "99"


def test_nothing_is_said_of_a_log_that_is_not_open() -> None:
    last = batch_pb2.Position(index=9)
    topic = admin_pb2.Topic(last=last, snapshot_index=4, state=admin_pb2.TOPIC_STATE_SERVING)
    assert topic_facts.beyond_snapshot(topic) == 6
    assert topic_facts.beyond_snapshot(admin_pb2.Topic(state=admin_pb2.TOPIC_STATE_RECOVERING)) is None
    topic.state = admin_pb2.TOPIC_STATE_DAMAGED
    assert topic_facts.beyond_snapshot(topic) is None


def test_every_order_has_a_name() -> None:
    assert sorted([0, *topic_facts.ORDERS.values()]) == sorted(admin_pb2.StatisticsOrder.values())
