"""Cursors that the sidecar keeps: the suite of all cursors, kill -9, a lost store, snapshots, bad input, retention.
Twenty seconds, three sidecars."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from seqdedupe.client import Client, Cursor, InvalidRequestError, Kept, MessageId, NotFoundError, Position
from seqdedupe.limits import Retention
from seqdedupe.testing import Sidecar
from seqdedupe.topic import topic as topic_module
from seqdedupe.topic.policy import MAX_CURSORS, NamedCursor, Policy
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar import planted_cursor
from tests.client.cursors import ONE, CursorSuite


class Place(NamedTuple):
    client: Client
    topic: str


@pytest.fixture
async def place(shared_sidecar: Sidecar, topic: str) -> AsyncIterator[Place]:
    async with Client(shared_sidecar.address) as client:
        await client.admin.create_topic(topic)
        yield Place(client, topic)


class TestSidecarCursor(CursorSuite):
    def make(self, place: Place) -> Cursor:
        return place.client.cursor(place.topic, "one")


async def test_they_are_listed_held_and_removed(place: Place) -> None:
    client, topic = place
    other = ONE._replace(note="other")
    await client.cursor(topic, "b").compare_and_set(None, ONE)
    await client.cursor(topic, "a").compare_and_set(None, other)
    await client.admin.hold_cursor(topic, "b", 5)
    # Moving it changes nothing of that, nor does a policy change the cursors.
    await client.cursor(topic, "b").compare_and_set(ONE, other)
    await client.admin.set_policy(topic, admin_pb2.TopicPolicy(deduplication_entries_interval=7))
    await client.admin.remove_policy(topic)
    listed = await client.admin.cursors(topic)
    assert [(c.name, c.note, c.hold_retention_in_mb) for c in listed] == [("a", "other", 0), ("b", "other", 5)]
    assert Position.from_proto(listed[0].position) == ONE.position
    await client.admin.delete_cursor(topic, "a")
    assert await client.cursor(topic, "a").read() is None
    assert [c.name for c in await client.admin.cursors(topic)] == ["b"]
    for call in (client.admin.delete_cursor(topic, "a"), client.admin.hold_cursor(topic, "a", 1)):
        with pytest.raises(NotFoundError) as caught:
            await call
        assert caught.value.reason == "CURSOR_NOT_FOUND"
    with pytest.raises(InvalidRequestError):
        await client.admin.hold_cursor(topic, "b", -1)


async def test_bad_input_is_refused_and_changes_nothing(place: Place) -> None:
    client, topic = place
    for name in ("", "x" * 256, "a\nb"):
        with pytest.raises(InvalidRequestError) as caught:
            await client.cursor(topic, name).compare_and_set(None, ONE)
        assert caught.value.reason == "INVALID_NAME"
    with pytest.raises(NotFoundError):
        await client.cursor("nobody-made-it", "c").read()
    for k in range(MAX_CURSORS):
        # As large as they can be: all of them fit into a snapshot.
        await client.cursor(topic, f"{k:03}".ljust(255, "x")).compare_and_set(None, ONE._replace(note="y" * 1024))
    with pytest.raises(InvalidRequestError) as caught:
        await client.cursor(topic, "one more").compare_and_set(None, ONE)
    assert caught.value.reason == "TOO_MANY_CURSORS"
    await client.admin.snapshot(topic)
    assert len(await client.admin.cursors(topic)) == MAX_CURSORS


async def test_the_suite_finds_moves_that_do_not_see_each_other(start_sidecar: Callable[..., Sidecar]) -> None:
    """The control: two that expect the same both believe that they have moved it."""
    sidecar = start_sidecar(module=planted_cursor.MODULE)
    async with Client(sidecar.address) as client:
        await client.admin.create_topic("t")
        with pytest.raises(AssertionError):
            await TestSidecarCursor().test_of_many_at_once_one_wins_each_time(Place(client, "t"))


async def test_they_survive_kill_9_a_lost_store_and_a_snapshot_that_is_put_back(
    start_sidecar: Callable[..., Sidecar], tmp_path: Path
) -> None:
    sidecar = start_sidecar()
    kept: Kept | None = None

    async def move(snapshot: bool = False) -> Kept:
        async with Client(sidecar.address) as client:
            cursor = client.cursor("t", "c")
            if kept is None:
                await client.admin.create_topic("t")
            assert await cursor.read() == kept
            index = 0 if kept is None else kept.position.index + 1
            new = Kept(Position(7, MessageId(7, index), index, 5), "note")
            await cursor.compare_and_set(kept, new)
            if snapshot:
                await client.admin.snapshot("t")
        return new

    for step in range(6):
        kept = await move(snapshot=step % 2 == 0)
        await asyncio.to_thread(sidecar.restart)
    async with Client(sidecar.address) as client:
        await client.admin.rebuild_topic("t")
        assert await client.cursor("t", "c").read() == kept
        await client.admin.export_snapshot("t", tmp_path / "snapshot")
        await client.admin.import_snapshot("t", tmp_path / "snapshot")
        assert await client.cursor("t", "c").read() == kept
        # What came after the snapshot is in the log.
        kept = await move()
        await client.admin.import_snapshot("t", tmp_path / "snapshot")
        assert await client.cursor("t", "c").read() == kept


class Log:
    """Segments of ten messages and 1 MB: what retention asks of a log."""

    async def may_trim_to(self, covered_index: int, retention: Retention) -> int:
        index = 0
        while index + 10 < covered_index and retention.size_bytes is not None:
            if (100 - index - 10) * 104858 < retention.size_bytes:
                break
            index += 10
        return index


class Topic:
    incarnation = 7
    keeper = SimpleNamespace(snapshot_index=95)

    def __init__(self, *cursors: tuple[Position, int]) -> None:
        self.log = Log()
        self.policy = Policy(cursors=tuple(NamedCursor(str(k), *one[:1], "", one[1]) for k, one in enumerate(cursors)))


@pytest.mark.parametrize(
    ("cursors", "first"),
    [
        ([], 80),
        ([(Position.before(7, 35), 0)], 80),
        ([(Position.before(7, 35), 100)], 30),
        ([(Position.before(7, 30), 100)], 20),
        ([(Position.before(7, 99), 100)], 80),
        # Not further than its limit; nor for a position of another incarnation.
        ([(Position.before(7, 35), 5)], 50),
        ([(Position.before(7, 35), 1)], 80),
        ([(Position.before(8, 35), 100)], 80),
        ([(Position.before(7, 35), 5), (Position.before(7, 65), 100)], 50),
    ],
)
async def test_retention_waits_for_those_that_hold_it(cursors: list[tuple[Position, int]], first: int) -> None:
    found = await topic_module._may_trim_to(Topic(*cursors), Retention(2 * 1024 * 1024, None))  # type: ignore[arg-type]
    assert found == first
