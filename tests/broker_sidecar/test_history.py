"""What happened in the last intervals, from counters alone."""

from types import SimpleNamespace
from typing import Any

import pytest

from broker_sidecar.services import statistics
from broker_sidecar.services.statistics import INTERVALS, RecentActivity
from seqdedupe.topic.base import TopicCounters


def _past_of(**counters: TopicCounters) -> tuple[RecentActivity, dict[str, Any]]:
    """For topics with these counters, and the topics, by name."""
    live = {name: SimpleNamespace(counters=one) for name, one in counters.items()}

    def open_topics() -> list[Any]:
        return [SimpleNamespace(name=name, counters=one.counters) for name, one in live.items()]

    topics: Any = SimpleNamespace(registry=SimpleNamespace(open_topics=open_topics))
    past = RecentActivity(topics)
    past.look()
    return past, live


async def test_what_each_interval_brought() -> None:
    counters = TopicCounters(not_dup=100, dup=100)
    past, _ = _past_of(a=counters)
    for rows in (3, 0, 5):
        counters.not_dup += rows
        counters.unknown += 1
        await past.end_interval()
    found = past.past("a")
    assert found is not None
    for activity in (past.activity(found), past.activity()):
        columns = activity.not_dup, activity.dup, activity.unknown
        assert [list(column) for column in columns] == [[3, 0, 5], [0, 0, 0], [1, 1, 1]]
    assert found.last == (5, 0, 1, 0, 0)
    assert found.sums == (8, 0, 3, 0, 0)


async def test_a_topic_in_which_nothing_happens_has_no_past_any_more() -> None:
    counters = TopicCounters()
    past, _ = _past_of(busy=counters, idle=TopicCounters(not_dup=1))
    counters.not_dup += 7
    for _ in range(INTERVALS + 1):
        await past.end_interval()
        assert past.past("idle") is None
    found = past.past("busy")
    assert found is not None
    # It is the oldest by now, and the next one takes its place.
    assert list(past.activity(found).not_dup) == [0] * INTERVALS
    await past.end_interval()
    assert past.past("busy") is None
    assert len(past.activity().not_dup) == INTERVALS


async def test_the_sums_are_of_what_is_kept() -> None:
    counters = TopicCounters()
    past, _ = _past_of(a=counters)
    for interval in range(3 * INTERVALS):
        counters.dup += interval
        await past.end_interval()
    found = past.past("a")
    assert found is not None
    assert list(past.activity(found).dup) == list(range(2 * INTERVALS, 3 * INTERVALS))
    assert found.sums[1] == int(found.ring[1].sum())


async def test_topics_come_go_and_are_opened_anew() -> None:
    past, live = _past_of(a=TopicCounters(not_dup=50))
    live["new"] = SimpleNamespace(counters=TopicCounters(not_dup=4))
    # Opened again, it counts from 0.
    live["a"] = SimpleNamespace(counters=TopicCounters(not_dup=2))
    await past.end_interval()
    assert list(past.activity().not_dup) == [6]
    del live["new"]
    await past.end_interval()
    assert past.past("new") is None
    assert list(past.activity().not_dup) == [6, 0]


async def test_histories_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "MAX_HISTORIES", 3)
    monkeypatch.setattr(statistics, "TOPICS_AT_ONCE", 2)
    past, live = _past_of(**{f"t{k}": TopicCounters() for k in range(10)})
    for topic in live.values():
        topic.counters.not_dup += 1
    await past.end_interval()
    assert sum(past.past(name) is not None for name in live) == 3
    assert list(past.activity().not_dup) == [10], "all count in the sum"


async def test_more_than_there_is_room_for_is_the_most_that_there_is() -> None:
    counters = TopicCounters()
    past, _ = _past_of(a=counters)
    counters.stored_bytes += 2**40
    await past.end_interval()
    assert list(past.activity(past.past("a")).stored_bytes) == [2**32 - 1]
