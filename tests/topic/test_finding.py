"""Topics that other sidecars of a cluster make, and that somebody deletes there without one."""

import asyncio
from collections.abc import AsyncIterator, Container
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.errors import DamagedError, NotFoundError, UnavailableError, error
from seqdedupe.log.contract import LogName
from seqdedupe.store.db import Store
from seqdedupe.store.parts import LogKind
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import directory
from seqdedupe.topic.base import State
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.listing import Looking
from seqdedupe.topic.lives import PublishedTopics
from seqdedupe.topic.policy import Policy
from seqdedupe.topic.topic import Topic
from tests.log.faulty import FaultyLog, Storage
from tests.records_of import record_of
from tests.topic.logs import MemoryLogs
from tests.topic.publisher import Publisher, stored

LIMIT_SECONDS = LAST_RESORT_SECONDS
NAME = "persistent://public/default/t"

Storages = dict[int, tuple[str, Storage]]


class ClusterLogs(MemoryLogs):
    """Logs that several sidecars reach, of which one at a time owns each."""

    def __init__(self, storages: Storages, address: str) -> None:
        super().__init__(storages)
        self.address = address
        self.lists = 0
        self.is_reached = True

    async def open(self, incarnation: int, covered_index: int, secret: bytes | None = None, place: bytes = b"") -> Any:
        if incarnation not in self.storages:
            raise error("LOG_DAMAGED", f"there is no log {incarnation}")
        storage = self.storages[incarnation][1]
        return FaultyLog(storage, automatic=True, takes_higher_terms_only=True, excludes=True, address=self.address)

    async def list(self, without: Container[str] = ()) -> list[LogName]:
        self.lists += 1
        await asyncio.sleep(0)
        if not self.is_reached:
            raise error("LOG_UNREADABLE", "nobody answers")
        return [one for one in await super().list() if one.topic not in without]


class Sidecar:
    """One in front of the cluster, made again over the same store."""

    def __init__(self, storages: Storages, folder: Path) -> None:
        self.logs = ClusterLogs(storages, folder.name)
        self.states: dict[str, State | None] = {}
        self._folder = folder

    async def start(self) -> None:
        self.store = Store.open(self._folder)
        self.topics: Topics[Topic] = Topics(
            self.store,
            lambda told: PublishedTopics(self.store, self.logs, log=LogKind.PULSAR, on_state=told),
            max_topics=100,
            allow_auto_topic_creation=True,
            on_state=self.states.__setitem__,
        )
        await self.topics.open_all()
        await self.topics.recover_all()

    async def stop(self) -> None:
        await self.topics.drain()
        self.store.close()

    async def until(self, name: str, state: State) -> None:
        async with asyncio.timeout(LIMIT_SECONDS):
            while self.states.get(name) is not state:  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0.005)


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[tuple[Sidecar, Sidecar]]:
    storages: Storages = {}
    one, other = Sidecar(storages, tmp_path / "one"), Sidecar(storages, tmp_path / "other")
    await one.start()
    await other.start()
    yield one, other
    await one.stop()
    await other.stop()


def harm(storage: Storage) -> None:
    """The last record is not what was written."""
    storage.records[-1] = bytes(len(storage.records[-1]))


async def test_a_topic_that_another_sidecar_has_just_made_is_found_by_who_is_asked_for_it(
    two: tuple[Sidecar, Sidecar],
) -> None:
    one, other = two
    await one.topics.create(NAME)
    with pytest.raises(NotFoundError):
        other.topics.get(NAME)
    topic = await directory.find(other.topics, "t")
    assert (topic.state, topic.owner_address) == (State.STANDBY, "one")
    assert other.states == {NAME: State.STANDBY}
    lists = other.logs.lists
    assert await directory.find(other.topics, "t") is topic
    assert other.logs.lists == lists, "what is known is not looked for"


async def test_many_that_ask_at_once_are_answered_by_two_looks_at_most(two: tuple[Sidecar, Sidecar]) -> None:
    """And a topic that all of them find is there once: two looks that go on at once would make two records of it."""
    one, other = two
    names = [f"t{number}" for number in range(20)]
    for name in names:
        await one.topics.create(name)
    lists = other.logs.lists
    answers = await asyncio.gather(
        *(directory.find(other.topics, name) for name in names * 5),
        *(directory.find(other.topics, f"{name}-other") for name in names),
        return_exceptions=True,
    )
    assert {type(answer) for answer in answers[: 5 * len(names)]} == {Topic}
    assert {type(answer) for answer in answers[5 * len(names) :]} == {NotFoundError}
    assert other.logs.lists - lists <= 2
    assert {topic.state for topic in other.topics.all()} == {State.STANDBY}
    assert len(other.topics.all()) == len(names)


async def test_a_cluster_that_cannot_be_asked_does_not_make_a_topic_one_that_is_not_there(
    two: tuple[Sidecar, Sidecar],
) -> None:
    one, other = two
    await one.topics.create(NAME)
    other.logs.is_reached = False
    with pytest.raises(UnavailableError, match="LOG_UNREADABLE"):
        await directory.find(other.topics, NAME)
    other.logs.is_reached = True
    assert (await directory.find(other.topics, NAME)).state is State.STANDBY


async def test_a_look_is_for_those_who_asked_before_it_began() -> None:
    looks, under_way, may_end = 0, asyncio.Event(), asyncio.Event()

    async def look() -> None:
        nonlocal looks
        looks += 1
        under_way.set()
        await may_end.wait()
        if looks == 1:
            raise error("LOG_UNREADABLE", "nobody answers")

    looking = Looking(look)
    early = [asyncio.ensure_future(looking.once()) for _ in range(10)]
    await under_way.wait()
    late = [asyncio.ensure_future(looking.once()) for _ in range(10)]
    early[0].cancel()
    await asyncio.sleep(0)
    assert looks == 1
    may_end.set()
    answers = await asyncio.gather(*early[1:], return_exceptions=True)
    assert {type(answer) for answer in answers} == {UnavailableError}
    await asyncio.gather(*late)
    assert looks == 2


async def test_a_topic_whose_log_somebody_has_deleted_in_the_cluster_can_be_deleted_and_made_anew(
    two: tuple[Sidecar, Sidecar],
) -> None:
    one, _ = two
    for name in (NAME, "damaged"):
        topic = await one.topics.create(name)
        await Publisher("p", lambda topic=topic: [topic]).publish(30)  # type: ignore[misc]
        await topic.keeper.snapshot()
    gone, damaged = record_of(one.topics, NAME).incarnation, one.topics.get("damaged").incarnation
    await one.stop()
    del one.logs.storages[gone]
    harm(one.logs.storages[damaged][1])
    await one.start()
    await one.until(NAME, State.DAMAGED)
    await one.until("persistent://public/default/damaged", State.DAMAGED)
    # Nobody learns that it is empty, or another topic.
    for name in (NAME, "damaged"):
        with pytest.raises(DamagedError):
            await one.topics.create(name, exists_ok=True)
    # What is there is damaged, and nobody's to delete unseen.
    with pytest.raises(DamagedError):
        await directory.delete(one.topics, "damaged")
    one.logs.is_reached = False
    with pytest.raises(UnavailableError, match="LOG_UNREADABLE"):
        await directory.delete(one.topics, NAME)
    one.logs.is_reached = True
    await asyncio.gather(*(directory.delete(one.topics, NAME) for _ in range(3)))
    assert one.states[NAME] is None
    topic = await one.topics.create(NAME)
    await Publisher("p", lambda: [topic]).publish(3)
    await one.stop()
    await one.start()
    again = one.topics.get(NAME)
    assert (again.incarnation, await stored(again)) == (topic.incarnation, {"p": [0, 1, 2]})


async def test_a_topic_that_is_open_while_its_log_is_deleted_can_be_deleted(two: tuple[Sidecar, Sidecar]) -> None:
    one, _ = two
    topic = await one.topics.create(NAME)
    await Publisher("p", lambda: [topic]).publish(30)
    storage = one.logs.storages.pop(topic.incarnation)[1]
    # Who is connected to it finds something else in its place.
    harm(storage)
    log = topic.log
    assert isinstance(log, FaultyLog)
    log.lose_place()
    await one.until(NAME, State.DAMAGED)
    with pytest.raises(DamagedError):
        await one.topics.delete(NAME)
    await directory.delete(one.topics, NAME)
    assert (await one.topics.create(NAME)).confirmed_index == 0


async def make(sidecar: Sidecar, partitions: int) -> list[str]:
    """A topic of this many partitions, 0 for a plain one: the names of what has a log."""
    if not partitions:
        await sidecar.topics.create(NAME)
        return [NAME]
    await directory.create_partitioned(sidecar.topics, NAME, partitions, Policy())
    return sidecar.topics.partitions.names(NAME)


async def delete(sidecar: Sidecar) -> None:
    is_partitioned = NAME in sidecar.topics.partitions
    await (
        directory.delete_partitioned(sidecar.topics, NAME) if is_partitioned else directory.delete(sidecar.topics, NAME)
    )


def incarnations(sidecar: Sidecar) -> dict[str, int]:
    return {record.name: record.incarnation for record in sidecar.store.topics()}


SHAPES = [(0, 0), (2, 2), (3, 2), (2, 3), (0, 2), (2, 0)]
"""Partitions of a topic before and after."""


@pytest.mark.parametrize("is_owner", [False, True])
@pytest.mark.parametrize(("before", "after"), SHAPES)
async def test_a_topic_that_others_have_made_anew_is_followed(
    two: tuple[Sidecar, Sidecar], before: int, after: int, is_owner: bool
) -> None:
    one, other = two
    maker = other if is_owner else one
    for name in await make(maker, before):
        await Publisher("p", lambda name=name: [maker.topics.get(name)]).publish(30)  # type: ignore[misc]
    for each in two:
        await each.topics.looking.once()
        assert len(each.topics.registry) == max(before, 1)
    old = [topic for topic in other.topics.registry.open_topics() if isinstance(topic.log, FaultyLog)]
    for topic in old if is_owner else []:
        # Nobody hears of it.
        await topic.owner.hand_over("", LIMIT_SECONDS)
    await delete(one)
    names = await make(one, after)
    await Publisher("p", lambda: [one.topics.get(names[0])]).publish(2)
    await other.topics.looking.once()
    assert incarnations(other) == incarnations(one)
    assert sorted(topic.name for topic in other.topics.registry.open_topics()) == sorted(names)
    assert {name: state for name, state in other.states.items() if state} == dict.fromkeys(names, State.STANDBY)
    assert list(other.topics.partitions) == list(one.topics.partitions)
    assert all(topic.has_successor and topic.state is State.DRAINING for topic in old)
    # What the old one had is not the new one's.
    for name in names:
        await one.topics.get(name).owner.hand_over("", LIMIT_SECONDS)
        topic = await directory.find(other.topics, name)
        await topic.owner.take()
        assert await stored(topic) == ({"p": [0, 1]} if name == names[0] else {})
    await other.stop()
    await other.start()
    assert incarnations(other) == incarnations(one)
    assert sorted(topic.name for topic in other.topics.registry.open_topics()) == sorted(names)


@pytest.mark.parametrize(("before", "after"), SHAPES)
async def test_a_sidecar_that_was_down_meanwhile_follows_the_new_one(
    two: tuple[Sidecar, Sidecar], before: int, after: int
) -> None:
    one, other = two
    await make(one, before)
    await other.topics.looking.once()
    await other.stop()
    await delete(one)
    names = await make(one, after)
    await other.start()
    assert incarnations(other) == incarnations(one)
    assert {name: state for name, state in other.states.items() if state} == dict.fromkeys(names, State.STANDBY)


async def test_what_is_made_here_during_a_look_is_not_taken_for_gone(two: tuple[Sidecar, Sidecar]) -> None:
    """The list that the look has got is older: it shows what was there before."""
    one, _ = two
    logs, lists = one.logs, one.logs.list
    await one.topics.create(NAME)

    async def list_slowly(without: Container[str] = ()) -> list[LogName]:
        there = await lists(without)
        await delete(one)
        await one.topics.create(NAME)
        return there

    logs.list = list_slowly  # type: ignore[method-assign]
    await one.topics.looking.once()
    assert len(one.store.topics()) == 1
    assert one.topics.get(NAME).state is State.SERVING
    assert one.topics.get(NAME).incarnation in one.logs.storages


async def test_what_was_deleted_here_during_a_look_does_not_come_back(two: tuple[Sidecar, Sidecar]) -> None:
    one, _ = two
    logs, lists = one.logs, one.logs.list
    await one.topics.create(NAME)

    async def list_slowly(without: Container[str] = ()) -> list[LogName]:
        there = await lists(without)
        await delete(one)
        return there

    logs.list = list_slowly  # type: ignore[method-assign]
    await one.topics.looking.once()
    assert (one.store.topics(), one.topics.all()) == ([], [])


async def test_a_store_that_fails_then_is_put_right_by_the_next_look(
    two: tuple[Sidecar, Sidecar], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    await make(one, 2)
    await other.topics.looking.once()
    await delete(one)
    await make(one, 2)

    async def fail(incarnation: int) -> None:
        raise error("STORE_UNAVAILABLE", "the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(other.store, "remove_topic", fail)
        with pytest.raises(UnavailableError, match="STORE_UNAVAILABLE"):
            await other.topics.looking.once()
    await other.topics.looking.once()
    assert incarnations(other) == incarnations(one)
    assert {topic.state for topic in other.topics.all()} == {State.STANDBY}


async def test_without_leaving_it_the_old_one_stays(
    two: tuple[Sidecar, Sidecar], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control arm."""
    one, other = two
    await make(one, 0)
    await other.topics.looking.once()
    old = incarnations(other)
    await delete(one)
    await make(one, 0)

    async def leave_nothing(*_: object) -> None:
        return

    monkeypatch.setattr("seqdedupe.topic.listing._close_recreated", leave_nothing)
    await other.topics.looking.once()
    assert incarnations(other) == old != incarnations(one)
