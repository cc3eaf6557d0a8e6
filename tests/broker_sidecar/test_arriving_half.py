"""A topic of which half has come from another sidecar, or that was here before: nothing of that is in its way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from broker_sidecar.cluster import departures
from broker_sidecar.cluster.departures import Giving
from broker_sidecar.services import arrival_calls
from broker_sidecar.services.arrival_calls import Coming
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.log.embedded.log_folder import ARRIVING, Arrival
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic import directory
from seqdedupe.topic.lives import TopicRecords
from seqdedupe.transfer.stored_records import IncomingSnapshot
from tests.broker_sidecar.moving_messages import (
    BEFORE,
    Publishing,
    halfway,
    incarnation,
    moved_with_all,
    other_way,
    rows_in_store,
    until,
)
from tests.broker_sidecar.moving_pair import LIMIT_SECONDS, TOPIC, Pair, answers_late, pair


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Pair]:
    async with pair(tmp_path) as made:
        yield made


# -- what is left of it -----------------------------------------------------------------------------------------------


async def half_moved(two: Pair, publishing: Publishing, m: pytest.MonkeyPatch) -> int:
    """All of it has come, and the new one ends before it has it, as by kill -9; how many records its store has."""
    monkeypatch_end = asyncio.Event()

    async def dies(*_: Any) -> None:
        monkeypatch_end.set()
        raise error("UNREACHABLE", "planted")

    m.setattr(Coming, "end", lambda self, topics: None)
    m.setattr(Giving, "copy_rest", dies)
    with pytest.raises(SeqdedupeError, match="planted"):
        await two.old.client.admin.move_topic(TOPIC, two.new.address)
    await until(lambda: not two.new.arriving._under_way)
    assert monkeypatch_end.is_set()
    assert (two.new.folder / "logs" / ARRIVING / str(incarnation(two.old))).is_dir()
    return rows_in_store(two.new, incarnation(two.old))


@pytest.mark.parametrize("is_cleaned", [True, False], ids=["as it is", "planted: the store's part stays"])
async def test_a_start_removes_what_had_come_half(two: Pair, monkeypatch: pytest.MonkeyPatch, is_cleaned: bool) -> None:
    publishing = Publishing(two, by_id=True)
    await publishing.make()
    await publishing.new("p", range(BEFORE))
    made = incarnation(two.old)
    with monkeypatch.context() as m:
        assert await half_moved(two, publishing, m) > 0
        if not is_cleaned:
            m.setattr(Store, "remove_snapshots", lambda self, incarnations: None)
        # Nobody learned that it is there.
        assert two.new.topics.registry.record(TOPIC) is None
        await two.new.restart()
    assert two.new.topics.registry.record(TOPIC) is None
    assert not list((two.new.folder / "logs").glob(f"{ARRIVING}/*"))
    assert (rows_in_store(two.new, made) == 0) is is_cleaned
    # The old one has it, and it can be moved by the next try, no matter what is left.
    await publishing.again()
    await two.old.client.admin.move_topic(TOPIC, two.new.address)
    assert await two.the_owner() is two.new
    await publishing.again()


async def test_a_store_that_cannot_be_written_at_a_start_keeps_what_had_come_half_for_the_next(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishing = Publishing(two, by_id=False)
    await publishing.make()
    await publishing.new("p", range(BEFORE))
    made = incarnation(two.old)
    with monkeypatch.context() as m:
        assert await half_moved(two, publishing, m) > 0

        def full(*_: Any) -> None:
            raise error("STORE_UNAVAILABLE", "planted")

        m.setattr(Store, "remove_snapshots", full)
        await two.new.restart()
        # What takes room goes all the same.
        [folder] = (two.new.folder / "logs").glob(f"{ARRIVING}/*")
        assert not list(folder.glob("*.log"))
        assert rows_in_store(two.new, made) > 0
    await two.new.restart()
    assert not list((two.new.folder / "logs").glob(f"{ARRIVING}/*"))
    assert rows_in_store(two.new, made) == 0


async def test_a_start_removes_nothing_of_a_topic_that_is_here(two: Pair) -> None:
    """Everything that lies in the folder of those that come."""
    publishing = Publishing(two, by_id=True)
    await moved_with_all(two, publishing)
    made = incarnation(two.new)
    await two.new.stop()
    (two.new.folder / "logs" / ARRIVING / str(made)).mkdir(parents=True)
    await two.new.start()
    assert rows_in_store(two.new, made) > 0
    await publishing.again()


async def test_what_cannot_be_removed_at_once_is_removed_later(two: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    publishing = Publishing(two, by_id=False)
    await publishing.make()
    await publishing.new("p", range(BEFORE))
    made = incarnation(two.old)
    folder = two.new.folder / "logs" / ARRIVING / str(made)
    tried: list[str] = []
    remove_snapshot, remove = Store.remove_snapshot, Arrival.remove

    async def first_fails(self: Store, incarnation: int) -> None:
        tried.append("store")
        # Where the disk is full nothing else makes room for that.
        assert [path.name for path in folder.iterdir() if path.suffix == ".log"] == []
        if len(tried) == 1:
            raise error("STORE_UNAVAILABLE", "planted")
        await remove_snapshot(self, incarnation)

    def second_fails(self: Arrival) -> None:
        tried.append("folder")
        if len(tried) == 3:
            raise OSError("planted")
        remove(self)

    async def lost(*_: Any) -> None:
        raise error("UNREACHABLE", "planted")

    monkeypatch.setattr(Store, "remove_snapshot", first_fails)
    monkeypatch.setattr(Arrival, "remove", second_fails)
    with monkeypatch.context() as m:
        m.setattr(Giving, "copy_rest", lost)
        with pytest.raises(SeqdedupeError, match="planted"):
            await two.old.client.admin.move_topic(TOPIC, two.new.address)
    await until(lambda: not folder.exists())
    assert rows_in_store(two.new, made) == 0
    assert tried == ["store", "store", "folder", "store", "folder"]
    await two.old.client.admin.move_topic(TOPIC, two.new.address)
    await publishing.again()


@pytest.mark.parametrize("is_guarded", [True, False], ids=["as it is", "planted: it comes all the same"])
async def test_none_comes_while_what_is_left_of_it_is_still_to_be_removed(
    two: Pair, monkeypatch: pytest.MonkeyPatch, is_guarded: bool
) -> None:
    """A removal that has to be tried again would take what has come meanwhile along."""
    publishing = Publishing(two, by_id=False)
    await publishing.make()
    await publishing.new("p", range(BEFORE))
    await two.old.client.admin.snapshot(TOPIC)
    await until(lambda: two.old.topics.get(TOPIC).first_index > 0)
    go_on, calls = asyncio.Event(), 0
    remove_topic = Store.remove_topic

    async def fails_late(self: Store, incarnation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            await go_on.wait()
        await remove_topic(self, incarnation)
        if calls == 1:
            raise error("STORE_UNAVAILABLE", "planted: it may be durable, or not")

    monkeypatch.setattr(Store, "remove_topic", fails_late)
    if not is_guarded:
        monkeypatch.setattr(TopicRecords, "check_is_free", without_guard(TopicRecords.check_is_free))
    with monkeypatch.context() as m:

        def fails(*_: Any, **__: Any) -> None:
            raise error("LOG_UNREADABLE", "planted: its log")

        m.setattr(two.new.topics.kind, "open", fails)
        with pytest.raises(SeqdedupeError, match="does not have it"):
            await two.old.client.admin.move_topic(TOPIC, two.new.address)
    await until(lambda: calls == 2)
    if is_guarded:
        with pytest.raises(SeqdedupeError, match="still being removed"):
            await two.old.client.admin.move_topic(TOPIC, two.new.address)
        go_on.set()
        await until(lambda: not two.new.topics.stored._cleaning)
        await two.old.client.admin.move_topic(TOPIC, two.new.address)
    else:
        await two.old.client.admin.move_topic(TOPIC, two.new.address)
        made = incarnation(two.new)
        assert rows_in_store(two.new, made) > 0
        go_on.set()
        await until(lambda: rows_in_store(two.new, made) == 0)
        return
    await two.new.restart()
    await publishing.again()


def without_guard(check: Any) -> Any:
    def unguarded(self: TopicRecords, incarnation: int, known: Any) -> None:
        self._cleaning.clear()
        check(self, incarnation, known)

    return unguarded


# -- one that was here before -----------------------------------------------------------------------------------------


async def moved_there_and_half_back(two: Pair, publishing: Publishing, m: pytest.MonkeyPatch) -> None:
    """The old one hears, while it comes back, that nothing need be left of it there; it removes that at once."""
    answered, heard = answers_late(two.old, m)
    await publishing.make()
    await publishing.new("p", range(BEFORE))
    await two.old.client.admin.snapshot(TOPIC)
    await until(lambda: two.old.topics.get(TOPIC).first_index > 0)
    # It may say that it does not know yet. The way back has all its time.
    with m.context() as brief, suppress(UnavailableError):
        brief.setattr(departures, "TAKE_SECONDS", 0.1)
        await two.old.client.admin.move_topic(TOPIC, two.new.address)
    await answered.wait()
    async with halfway(other_way(two)):
        heard.set()
        await until(lambda: not any("_settle" in str(task) for task in two.old.topics._background))


@pytest.mark.parametrize("is_kept", [True, False], ids=["as it is", "planted: whoever had it removes it"])
async def test_who_removes_what_is_left_of_it_removes_nothing_that_comes_back(
    two: Pair, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    if not is_kept:

        async def nothing(*_: Any) -> None:
            pass

        monkeypatch.setattr(arrival_calls, "_keep_from_who_had_it", nothing)
    publishing = Publishing(two, by_id=False)
    await moved_there_and_half_back(two, publishing, monkeypatch)
    assert await two.the_owner() is two.old
    await two.old.restart()
    if not is_kept:
        with pytest.raises(SeqdedupeError, match="STORE_DAMAGED"):
            await publishing.again()
        return
    await publishing.again()


async def test_one_that_does_not_come_back_says_where_it_is_also_if_nobody_had_used_it(
    two: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishing = Publishing(two, by_id=False)
    await publishing.make()
    await publishing.new("p", range(BEFORE))
    await two.old.client.admin.move_topic(TOPIC, two.new.address)
    monkeypatch.setattr(directory, "OPENED_AT_START", 0)
    monkeypatch.setattr(directory, "APART_SECONDS", LIMIT_SECONDS)
    await two.old.restart()
    assert len(two.old.topics.waiting) == 1

    async def lost(*_: Any) -> None:
        raise error("UNREACHABLE", "planted")

    monkeypatch.setattr(Giving, "copy_rest", lost)
    with pytest.raises(SeqdedupeError, match="planted"):
        await two.new.client.admin.move_topic(TOPIC, two.old.address)
    with pytest.raises(SeqdedupeError) as told:
        await two.old.client.ends(TOPIC)
    assert told.value.reason == "NOT_OWNER"
    await publishing.again()


@pytest.mark.parametrize("is_replaced", [True, False], ids=["as it is", "planted: earlier rows stay"])
async def test_nothing_of_an_earlier_snapshot_counts(
    two: Pair, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """It comes back to a store that has what it was when it left."""
    if not is_replaced:
        made = IncomingSnapshot.__init__

        def without_removal(self: IncomingSnapshot, *arguments: Any) -> None:
            made(self, *arguments)
            self._batch = type(self._batch)(raw_mode=True)

        monkeypatch.setattr(IncomingSnapshot, "__init__", without_removal)
    # Nothing is removed where it goes away from.
    with monkeypatch.context() as m:
        m.setattr(Snapshots, "remove", lambda self: self._store.opening)
        publishing = Publishing(two, by_id=False)
        await publishing.make()
        await publishing.new("p", range(BEFORE))
        await publishing.new("q", range(BEFORE))
        await two.old.client.admin.move_topic(TOPIC, two.new.address)
        left = rows_in_store(two.old, incarnation(two.new))
        assert left > 2
    # Its snapshot is one of another shape by then.
    await two.new.client.admin.export_snapshot(TOPIC, two.new.folder / "saved")
    await two.new.client.admin.import_snapshot(TOPIC, two.new.folder / "saved")
    await until(two.new.serves)
    await publishing.again()
    if is_replaced:
        await two.new.client.admin.move_topic(TOPIC, two.old.address)
        assert await two.the_owner() is two.old
        await publishing.again()
        return
    with pytest.raises(SeqdedupeError, match="is damaged"):
        await two.new.client.admin.move_topic(TOPIC, two.old.address)
