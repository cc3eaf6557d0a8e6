"""Messages of a topic that is moved, and what becomes of them; and a move that stops halfway."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from broker_sidecar.cluster.departures import Giving
from seqdedupe.client import Client, Verdict
from seqdedupe.store.parts import snapshot_range
from seqdedupe.topic.topic import Topic
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar.moving_pair import LIMIT_SECONDS, TOPIC, One, Pair
from tests.records_of import record_of

BEFORE, DURING, AFTER = 200, 60, 40
"""Messages of each producer: before the snapshot is taken, until the topic is held, and when it was moved."""
AT_ONCE = 20
"""So that a segment has few."""
FEW = admin_pb2.TopicPolicy(retention_size_in_mb=0, deduplication_entries_interval=10)
"""The log begins soon after what the snapshot covers: without a snapshot there is no topic."""


def other_way(two: Pair) -> Pair:
    made: Pair = object.__new__(Pair)
    made.old, made.new, made.both = two.new, two.old, two.both
    return made


def rows_in_store(one: One, incarnation: int) -> int:
    """This many records the store has of a topic's snapshot."""
    return len(list(one.topics.store.scan(*snapshot_range(incarnation))))


def incarnation(one: One) -> int:
    found: int = record_of(one.topics, TOPIC).incarnation
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class Publishing:
    """Messages of a topic of either kind, and what became of each; the same once more."""

    def __init__(self, two: Pair, *, by_id: bool) -> None:
        self._two = two
        self._by_id = by_id
        self.indexes: dict[tuple[str, int], int] = {}

    async def make(self) -> None:
        mode = "deduplication-id" if self._by_id else "sequence-id"
        await self._two.old.client.admin.create_topic(TOPIC, deduplication_mode=mode)
        await self._two.old.client.admin.set_policy(TOPIC, FEW)

    async def _published(self, name: str, numbers: range) -> list[Any]:
        async with Client(self._two.both) as client:
            if self._by_id:
                async with client.publisher(TOPIC) as publisher:
                    sent = [publisher.send(b"x" * 40, deduplication_id=f"{name}/{number}") for number in numbers]
                    return await asyncio.gather(*sent)
            async with client.producer(TOPIC, name) as producer:
                receipts = [await producer.send(b"x" * 40, sequence_id=number) for number in numbers]
                return [await receipt for receipt in receipts]

    async def new(self, name: str, numbers: range) -> None:
        """They are new."""
        for first in numbers[::AT_ONCE]:
            some = range(first, min(first + AT_ONCE, numbers.stop))
            found = await self._published(name, some)
            assert {one.verdict for one in found} == {Verdict.NOT_DUP}
            self.indexes |= {(name, number): one.index for number, one in zip(some, found, strict=True)}

    async def again(self) -> None:
        """All of them are known, and none is stored twice."""
        for name in dict.fromkeys(name for name, _ in self.indexes):
            numbers = range(sum(1 for other, _ in self.indexes if other == name))
            found = await self._published(name, numbers)
            verdicts = {one.verdict for one in found}
            assert verdicts == {Verdict.DUP}, f"{name}: {verdicts}"
            if self._by_id:
                assert [one.index for one in found] == [self.indexes[name, number] for number in numbers], name

    async def end(self) -> int:
        async with Client(self._two.both) as client:
            return (await client.ends(TOPIC)).last.index + 1


@asynccontextmanager
async def halfway(two: Pair) -> AsyncIterator[None]:
    """In the block the snapshot has been read at the new one, and the topic serves at the old one; then it goes on.
    Raises what the move does."""
    there, go_on = asyncio.Event(), asyncio.Event()
    copy = Giving.copy_while_it_serves

    async def waiting(self: Giving, topic: Topic) -> None:
        await copy(self, topic)
        there.set()
        await go_on.wait()
        # What was published in the block.
        await self._catch_up(topic)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(Giving, "copy_while_it_serves", waiting)
        moving = asyncio.ensure_future(two.old.client.admin.move_topic(TOPIC, two.new.address))
        reached = asyncio.ensure_future(there.wait())
        await asyncio.wait({moving, reached}, return_when=asyncio.FIRST_COMPLETED)
        reached.cancel()
        if not moving.done():
            yield
        go_on.set()
        await asyncio.wait_for(moving, LIMIT_SECONDS)


async def moved_with_all(two: Pair, publishing: Publishing) -> None:
    """It is moved between messages that are published before, meanwhile and afterwards."""
    await publishing.make()
    await publishing.new("p", range(BEFORE))
    await publishing.new("before", range(BEFORE))
    await two.old.client.admin.snapshot(TOPIC)
    await until(lambda: two.old.topics.get(TOPIC).first_index > BEFORE)
    async with halfway(two):
        await publishing.new("p", range(BEFORE, BEFORE + DURING))
        await publishing.new("during", range(DURING))
        await two.old.client.admin.snapshot(TOPIC)
        await publishing.again()
    await publishing.again()
    await publishing.new("p", range(BEFORE + DURING, BEFORE + DURING + AFTER))
    await publishing.new("after", range(AFTER))
