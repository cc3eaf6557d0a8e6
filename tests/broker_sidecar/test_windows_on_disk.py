"""Windows of deduplication IDs of which most lie on disk, through all that becomes of a data directory. In one process.

Each test asks the same again and again: every ID of the window is sent, and has to be Dup of its original.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker_sidecar import data
from broker_sidecar.server import SidecarServer
from seqdedupe.client import Client, InvalidRequestError, Verdict
from seqdedupe.doctor.examine import examine
from seqdedupe.doctor.salvage import salvage
from seqdedupe.store.parts import RUN, part_key
from seqdedupe.topic import window_runs
from seqdedupe.topic.topic import Topic
from seqdedupe.transfer.backup import restore
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar.moving_pair import LIMIT_SECONDS, TOPIC, One, Pair, pair

FRAME = 25
FILLED = 1500
"""Messages: memory has room for the IDs of some hundred."""


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_runs, "MAX_RUNS", 2)
    monkeypatch.setattr(data, "BYTES_A_MB", 4096)


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Pair]:
    async with pair(tmp_path, backup_directory=str(tmp_path), deduplication_window_memory_in_mb=4) as made:
        yield made


class Content:
    """What the topic holds: `ids` by index."""

    def __init__(self, ids: list[bytes] | None = None) -> None:
        self.ids = list(ids or ())

    async def fill(self, client: Client, count: int) -> None:
        """This many new messages more."""
        async with client.publisher(TOPIC) as publisher:
            for _ in range(0, count, FRAME):
                first = len(self.ids)
                new = [b"id-%d" % k + b"x" * (k % 40) for k in range(first, first + FRAME)]
                result = await publisher.send_batch([b"of " + one for one in new], new)
                assert set(result.verdicts.tolist()) == {Verdict.NOT_DUP}
                assert result.indexes.tolist() == list(range(first, first + FRAME))
                self.ids += new

    async def check(self, client: Client, first: int = 0) -> None:
        """All from this index on are known, and where; what is new is new."""
        async with client.publisher(TOPIC) as publisher:
            for at in range(first, len(self.ids), 500):
                some = self.ids[at : at + 500]
                result = await publisher.send_batch([b"again"] * len(some), some)
                assert set(result.verdicts.tolist()) == {Verdict.DUP}
                assert result.indexes.tolist() == list(range(at, at + len(some)))
        await self.fill(client, FRAME)


def live(one: One) -> Topic:
    topic: Topic = one.topics.get(TOPIC)
    return topic


async def moved(one: One) -> Topic:
    """Its topic, when what has no room in memory lies on disk."""
    topic = live(one)
    async with asyncio.timeout(LIMIT_SECONDS):
        while (moving := topic.ids.memory._moving) is not None:  # type: ignore[union-attr]
            await asyncio.wait({moving})
    return topic


async def on_disk(one: One) -> int:
    window = (await moved(one)).window
    assert window is not None
    return window.on_disk


def stored_runs(one: One, incarnation: int) -> set[int]:
    first, end = part_key(incarnation, RUN, 0), part_key(incarnation, RUN, 2**64 - 1)
    return {int.from_bytes(key[-8:-4], "big") for key, _ in one.topics.store.scan(first, end)}


async def check_store(one: One) -> None:
    """It has the runs of the window, and no others, when none is being made."""
    topic = await moved(one)
    assert topic.window is not None
    assert stored_runs(one, topic.incarnation) == set(topic.window.older.numbers)


async def filled(one: One, **policy: Any) -> Content:
    """A topic with this many messages, or some more, of which most of the IDs lie in runs, which were merged."""
    more = admin_pb2.TopicPolicy(deduplication_entries_interval=3, **policy)
    await one.client.admin.create_topic(TOPIC, deduplication_mode="deduplication-id", policy=more)
    content = Content()
    await content.fill(one.client, FILLED)
    window = live(one).window
    assert window is not None
    async with asyncio.timeout(LIMIT_SECONDS):
        # How much a run takes along depends on how fast it is made.
        while await on_disk(one) <= FILLED / 2 or window.older.next_number <= 4:
            await content.fill(one.client, 4 * FRAME)
    return content


async def serve(one: One, folder: Path, **repairs: bool) -> None:
    """It goes on with this data directory."""
    await one.stop()
    one.config, one.folder = replace(one.config, data_directory=str(folder)), folder
    one.sidecar = SidecarServer(one.config, connections=1000, **repairs)
    await one.sidecar.listen()
    await one.sidecar.recover()


async def test_starts_backups_and_the_doctor(two: Pair, tmp_path: Path) -> None:
    one = two.old
    content = await filled(one)
    await one.restart()
    assert await on_disk(one) > FILLED / 2
    await content.check(one.client)
    await one.client.admin.backup("backup")
    at_backup = Content(content.ids)
    await content.fill(one.client, 500)
    await check_store(one)
    await one.stop()
    assert (await asyncio.to_thread(examine, tmp_path / "old")).is_whole
    await asyncio.to_thread(salvage, tmp_path / "old", tmp_path / "salvaged")
    await asyncio.to_thread(restore, tmp_path / "backup", tmp_path / "restored")
    await one.start()
    for folder, expected in ((tmp_path / "restored", at_backup), (tmp_path / "salvaged", content)):
        await serve(one, folder)
        assert await on_disk(one) > FILLED / 2
        await expected.check(one.client)
        await expected.fill(one.client, 500)
        await expected.check(one.client)
        await check_store(one)


async def test_a_store_that_is_made_anew_from_the_log(two: Pair, tmp_path: Path) -> None:
    one = two.old
    content = await filled(one)
    await one.client.admin.rebuild_topic(TOPIC)
    await content.check(one.client)
    await check_store(one)
    with pytest.raises(InvalidRequestError, match="only a backup"):
        await one.client.admin.export_snapshot(TOPIC, tmp_path / "snapshot")
    await content.check(one.client)
    await one.stop()
    shutil.copytree(tmp_path / "old", tmp_path / "lost", ignore=shutil.ignore_patterns("store"))
    await one.start()
    await serve(one, tmp_path / "lost", rebuild_store=True)
    await content.check(one.client)
    await content.fill(one.client, 200)
    assert await on_disk(one) > FILLED / 2
    await one.restart()
    await content.check(one.client)
    await check_store(one)


async def test_a_topic_that_is_moved_to_and_fro(two: Pair) -> None:
    content = await filled(two.old)
    for owner, other in ((two.old, two.new), (two.new, two.old)):
        incarnation = live(owner).incarnation
        await owner.client.admin.move_topic(TOPIC, other.address)
        assert await two.the_owner() is other
        assert not stored_runs(owner, incarnation)
        assert await on_disk(other) > FILLED / 2
        await content.check(other.client)
        await content.fill(other.client, 300)
        await check_store(other)
    await two.old.restart()
    await content.check(two.old.client)


async def test_a_window_that_reaches_further_back_than_the_log(two: Pair) -> None:
    one = two.old
    content = await filled(one, retention_size_in_mb=0)
    await one.client.admin.snapshot(TOPIC)
    async with asyncio.timeout(LIMIT_SECONDS):
        while live(one).log.first_index < FILLED / 2:  # noqa: ASYNC110 (retention goes on beside the snapshot)
            await asyncio.sleep(0.01)
    with pytest.raises(InvalidRequestError) as raised:
        await one.client.admin.rebuild_topic(TOPIC)
    assert raised.value.reason == "LOG_INCOMPLETE"
    await content.check(one.client)
    await one.restart()
    assert live(one).log.first_index > FILLED / 2
    await content.check(one.client)
    # Messages are not read again; a move, and what is read from the log's end, leave the window as it was.
    await one.client.admin.move_topic(TOPIC, two.new.address)
    await content.check(two.new.client)
    await check_store(two.new)


async def test_a_topic_of_the_same_name_knows_nothing_of_the_one_before(two: Pair) -> None:
    one = two.old
    await filled(one)
    incarnation = live(one).incarnation
    await one.client.admin.delete_topic(TOPIC)
    assert not stored_runs(one, incarnation)
    content = await filled(one)
    await one.restart()
    assert not stored_runs(one, incarnation)
    await content.check(one.client)


async def test_what_is_beyond_the_window_goes_from_the_disk(two: Pair) -> None:
    one = two.old
    content = await filled(one, deduplication_window_max_messages=FILLED)
    await content.fill(one.client, FILLED)
    await one.client.admin.snapshot(TOPIC)
    await check_store(one)
    found = await one.client.admin.topic(TOPIC)
    assert FILLED <= found.window_messages <= FILLED * 17 // 16 + FRAME
    assert found.window_forgotten == len(content.ids) - found.window_messages
    await content.check(one.client, len(content.ids) - FILLED)
    await one.restart()
    await content.check(one.client, len(content.ids) - FILLED)
    again: Any = content.ids[:FRAME]
    async with one.client.publisher(TOPIC) as publisher:
        result = await publisher.send_batch(again, again)
    assert set(result.verdicts.tolist()) == {Verdict.NOT_DUP}
