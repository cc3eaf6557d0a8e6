"""A topic that is opened again while something else happens to it, or fails: it goes on, or another one is not hurt."""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.errors import SeqdedupeError, UnavailableError
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import listing
from seqdedupe.topic.base import State
from seqdedupe.topic.topic import state_again
from seqdedupe.transfer.topic_state import saved
from tests.topic.test_directory import NAME, FailingStore, Process
from tests.topic.test_saved import append, attach, begun, brokers, history, known, live
from tests.topic.test_two_at_once import lost, outcomes


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    process = Process(tmp_path / "store")
    await process.start()
    await process.topics.create(NAME)
    yield process
    await process.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while not condition():  # noqa: ASYNC110 (until the next try of what is tried again in the background)
            await asyncio.sleep(0.01)


def is_serving(process: Process) -> bool:
    return process.topics.look_at(NAME).state is State.SERVING


async def trimmed(process: Process) -> None:
    """Retention has dropped the log's beginning; what is in force is stated again."""
    topic = live(process)
    await topic.keeper.snapshot()
    await state_again(topic, topic.confirmed_index - 1)
    await topic.log.trim(topic.confirmed_index - 1)
    assert topic.log.first_index > 0


# -- meanwhile -----------------------------------------------------------------------------------------------------


def held_up(process: Process, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """The snapshot has been looked at, and what was found is not told until the second event is set."""
    looked, go_on = asyncio.Event(), asyncio.Event()
    check_snapshot = process.topics.kind.check_snapshot

    async def check_and_wait(*arguments: Any) -> None:
        await check_snapshot(*arguments)
        looked.set()
        await go_on.wait()

    monkeypatch.setattr(process.topics.kind, "check_snapshot", check_and_wait)
    return looked, go_on


@pytest.mark.parametrize("from_log", [False, True])
@pytest.mark.parametrize("is_made_anew", [False, True])
async def test_a_topic_is_deleted_meanwhile(
    process: Process, monkeypatch: pytest.MonkeyPatch, from_log: bool, is_made_anew: bool
) -> None:
    snapshot = await history(process)
    incarnation = live(process).incarnation
    looked, go_on = held_up(process, monkeypatch)
    renewed = asyncio.ensure_future(listing.renew(process.topics, NAME, incarnation, None if from_log else snapshot))
    await looked.wait()
    await process.topics.delete(NAME)
    another = await process.topics.create(NAME) if is_made_anew else None
    go_on.set()
    with pytest.raises(SeqdedupeError, match="TOPIC_NOT_FOUND"):
        await renewed
    assert process.topics.all() == ([another] if another is not None else [])
    assert Snapshots(process.store, incarnation).load() is None
    assert await process.publish(1) == is_made_anew
    await process.restart()
    assert process.end == (1 if is_made_anew else None)


async def test_a_deletion_fails_meanwhile(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may say that the topic is deleted: it takes nothing, and is not opened again to take some."""
    snapshot = await history(process)
    topic, before = live(process), known(process)
    looked, go_on = held_up(process, monkeypatch)
    renewed = asyncio.ensure_future(listing.renew(process.topics, NAME, topic.incarnation, snapshot))
    await looked.wait()
    process.store.fail_at = process.store.syncs + 1
    with pytest.raises(UnavailableError):
        await process.topics.delete(NAME)
    go_on.set()
    with pytest.raises(UnavailableError, match="being undone"):
        await renewed
    assert live(process) is topic
    assert not await process.publish(1)
    process.store.is_broken = False
    await process.until_published(1)
    del before[0][b"early"]
    assert before[0].items() <= known(process)[0].items()


async def test_the_sidecar_shuts_down_meanwhile(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = await history(process)
    topic, before = live(process), known(process)
    looked, go_on = held_up(process, monkeypatch)
    renewed = asyncio.ensure_future(listing.renew(process.topics, NAME, topic.incarnation, snapshot))
    await looked.wait()
    restarted = asyncio.ensure_future(process.restart())
    await until(lambda: process.topics.is_draining)
    go_on.set()
    with pytest.raises(SeqdedupeError, match="DRAINING"):
        await renewed
    await restarted
    assert known(process) == before


async def test_retention_drops_meanwhile_what_the_log_alone_would_have_to_say(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    await history(process)
    topic, before = live(process), known(process)
    close = topic.close

    async def close_when_trimmed(why: str) -> None:
        await topic.keeper.snapshot()
        await topic.log.trim(topic.confirmed_index - 1)
        await close(why)

    monkeypatch.setattr(topic, "close", close_when_trimmed)
    with pytest.raises(SeqdedupeError, match="LOG_INCOMPLETE"):
        await listing.renew(process.topics, NAME, None, None)
    await until(lambda: is_serving(process))
    assert known(process) == before
    await process.restart()
    assert known(process) == before


async def test_a_broker_is_told_meanwhile_that_it_may_drop_what_the_snapshot_does_not_cover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FailingStore.open(tmp_path / "store")
    topics = await brokers(store)
    topic, attachment, _ = await begun(topics)
    early = saved(topic)
    append(topic, attachment, 5, b"two")
    close = topic.close

    async def close_with_a_snapshot(why: str) -> None:
        await topic.keeper.snapshot()
        await close(why)

    monkeypatch.setattr(topic, "close", close_with_a_snapshot)
    with pytest.raises(SeqdedupeError, match="POSITION_TRIMMED"):
        await listing.renew(topics, "t", topic.incarnation, early)
    assert topics.get("t") is not topic
    assert attach(topics.get("t"))[0].position == b"two"
    await topics.drain()
    store.close()


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail_at", [1, 2])
async def test_a_brokers_topic_whose_record_cannot_be_written(tmp_path: Path, fail_at: int) -> None:
    """The store may have the record all the same: the name is free again when it is certain that it has none."""
    incarnation, snapshot = await lost(tmp_path)
    store = FailingStore.open_failing(tmp_path / "anew")
    topics = await brokers(store)
    store.fail_at = store.syncs + fail_at
    with pytest.raises(UnavailableError):
        await listing.renew(topics, "t", incarnation, snapshot)
    assert topics.all() == []
    for retry in (topics.get_or_create("t"), listing.renew(topics, "t", incarnation, snapshot)):
        with pytest.raises(UnavailableError, match="being undone"):
            await retry
    store.is_broken = False
    reasons = {""}
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while topics.all() == []:
            # TOPIC_EXISTS: the record says DELETING, and is just being removed.
            reasons |= set(await outcomes(listing.renew(topics, "t", incarnation, snapshot)))
            await asyncio.sleep(0.01)
    assert reasons <= {"", "STORE_UNAVAILABLE", "TOPIC_EXISTS"}
    await topics.drain()
    assert [(record.name, record.incarnation) for record in store.topics()] == [(topics.get("t").name, incarnation)]
    topics = await brokers(store)
    assert attach(topics.get("t"))[0].position == b"one"
    await topics.drain()
    store.close()


async def test_an_import_makes_no_more_topics_than_may_be(tmp_path: Path) -> None:
    incarnation, snapshot = await lost(tmp_path)
    store = FailingStore.open(tmp_path / "anew")
    topics = await brokers(store)
    for i in range(10):
        await topics.create(f"t{i}")
    with pytest.raises(SeqdedupeError, match="TOO_MANY_TOPICS"):
        await listing.renew(topics, "t", incarnation, snapshot)
    await topics.delete("t0")
    await listing.renew(topics, "t", incarnation, snapshot)
    await topics.drain()
    store.close()


@pytest.mark.parametrize("failing", ["open", "recover", "snapshot"])
async def test_a_topic_is_rebuilt_though_something_fails_for_a_moment(process: Process, failing: str) -> None:
    """It has no snapshot then, and its log's beginning is gone: it must not be taken for lost."""
    await history(process)
    await trimmed(process)
    before, incarnation = known(process), live(process).incarnation
    snapshots, opened = Snapshots(process.store, incarnation), process.logs.open
    failures: list[str] = []

    async def open_failing(*arguments: Any) -> Any:
        is_first = snapshots.load() is None and not failures
        if is_first and failing == "open":
            failures.append(failing)
            raise OSError(errno.EMFILE, "too many open files")
        log = await opened(*arguments)
        if is_first and failing == "recover":
            failures.append(failing)
            log.refuse_opens(1)
        if is_first and failing == "snapshot":
            failures.append(failing)
            process.store.fail_at = process.store.syncs + 1
        return log

    process.logs.open = open_failing  # type: ignore[method-assign, assignment]
    await listing.renew(process.topics, NAME, None, None)
    assert failures
    process.store.fail_at, process.store.is_broken = 0, False
    await until(lambda: is_serving(process))
    assert known(process) == before
    # Without anything that would make it take one.
    await until(lambda: live(process).keeper.snapshot_index == live(process).confirmed_index)
    await process.restart()
    assert known(process) == before


@pytest.mark.parametrize("failing", ["compaction", "close"])
async def test_a_topic_that_cannot_be_closed_in_order_is_opened_again(
    process: Process, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    snapshot = await history(process)
    topic, before = live(process), known(process)
    close = topic.close

    async def fail() -> bool:
        raise ValueError("a planned failure")

    async def close_and_fail(why: str) -> None:
        await close(why)
        await fail()

    if failing == "compaction":
        monkeypatch.setattr(Snapshots, "compact_if_due", lambda self: fail())
        await topic.keeper.snapshot()
        await listing.renew(process.topics, NAME, topic.incarnation, snapshot)
    else:
        monkeypatch.setattr(topic, "close", close_and_fail)
        with pytest.raises(ValueError, match="planned"):
            await listing.renew(process.topics, NAME, topic.incarnation, snapshot)
    await until(lambda: is_serving(process))
    assert live(process) is not topic
    assert known(process) == before
