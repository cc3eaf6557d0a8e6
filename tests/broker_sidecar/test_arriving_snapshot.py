"""The snapshot of a topic that goes to another sidecar: it is read there while the topic serves here."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker_sidecar.cluster.departures import Giving
from seqdedupe.errors import SeqdedupeError
from seqdedupe.message_id import MessageId
from seqdedupe.topic.keeper import RestoredState
from seqdedupe.topic.lives import PublishedTopics
from seqdedupe.topic.topic import Topic
from tests.broker_sidecar.moving_messages import Publishing, moved_with_all
from tests.broker_sidecar.moving_pair import TOPIC, Pair, pair


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Pair]:
    async with pair(tmp_path) as made:
        yield made


@pytest.mark.parametrize("by_id", [False, True], ids=["by sequence ID", "by deduplication ID"])
@pytest.mark.parametrize("is_early", [True, False], ids=["read early", "with an earlier version"])
async def test_whatever_was_published_before_meanwhile_and_afterwards_is_known(
    two: Pair, monkeypatch: pytest.MonkeyPatch, by_id: bool, is_early: bool
) -> None:
    """At the new one, when it comes back, and after a start of either, from what is in their stores and logs alone."""
    read: list[bool] = []
    hold = Topic.hold

    def held(self: Topic, why: SeqdedupeError) -> None:
        [coming] = two.new.arriving._under_way.values() or two.old.arriving._under_way.values()
        read.append(coming.stored is not None)
        hold(self, why)

    monkeypatch.setattr(Topic, "hold", held)
    if not is_early:
        monkeypatch.setattr(Giving, "begin", as_an_earlier_version)
    publishing = Publishing(two, by_id=by_id)
    await moved_with_all(two, publishing)
    assert read == [is_early]
    await two.new.restart()
    await publishing.again()
    await two.new.client.admin.move_topic(TOPIC, two.old.address)
    assert await two.the_owner() is two.old
    await publishing.again()
    await two.old.restart()
    await publishing.again()
    assert await publishing.end() == len(publishing.indexes)


async def as_an_earlier_version(self: Giving) -> str:
    """Neither says, or is reported, that the snapshot has been read."""
    said = await begin(self)
    self._reads_snapshot = False
    return said


begin = Giving.begin


@pytest.mark.parametrize("by_id", [False, True], ids=["by sequence ID", "by deduplication ID"])
async def test_a_position_that_is_newer_than_its_rows_is_noticed(
    two: Pair, monkeypatch: pytest.MonkeyPatch, by_id: bool
) -> None:
    """A planted bug: what came between them is nobody's."""
    load = PublishedTopics.load

    async def newer(self: PublishedTopics, record: Any) -> RestoredState:
        stored = await load(self, record)
        if stored.loaded is None:
            return stored
        index = two.old.topics.get(TOPIC).confirmed_index
        last = MessageId(record.incarnation, index - 1)
        return replace(stored, loaded=replace(stored.loaded, next_index=index, message_id=last, ownership=0))

    publishing = Publishing(two, by_id=by_id)
    monkeypatch.setattr(Giving, "begin", as_an_earlier_version)
    monkeypatch.setattr(PublishedTopics, "load", newer)
    with pytest.raises(AssertionError, match="NOT_DUP"):
        await moved_with_all(two, publishing)
