"""What two operators do to one topic at once: one of them wins, and what the other learns is so."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.errors import SeqdedupeError
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Loaded
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import listing
from seqdedupe.topic.base import State
from seqdedupe.transfer.topic_state import saved
from tests.topic.test_directory import NAME, FailingStore, Process, turns
from tests.topic.test_saved import begun, brokers, history, known, live


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    process = Process(tmp_path / "store")
    await process.start()
    await process.topics.create(NAME)
    yield process
    await process.stop()


async def lost(tmp_path: Path) -> tuple[int, Loaded]:
    """Incarnation and snapshot of a broker's topic, of which nothing but these is left."""
    store = Store.open(tmp_path / "lost")
    topics = await brokers(store)
    topic, _, _ = await begun(topics)
    snapshot = saved(topic)
    await topics.drain()
    store.close()
    return topic.incarnation, snapshot


async def outcomes(*works: Any) -> list[str]:
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        assert not isinstance(result, BaseException) or isinstance(result, SeqdedupeError), result
    return [result.reason if isinstance(result, SeqdedupeError) else "" for result in results]


@pytest.mark.parametrize("import_first", [True, False])
@pytest.mark.parametrize("late", range(6))
async def test_a_broker_attaches_while_its_topic_is_imported(tmp_path: Path, import_first: bool, late: int) -> None:
    incarnation, snapshot = await lost(tmp_path)
    store = Store.open(tmp_path / "anew")
    topics = await brokers(store)

    async def later(work: Any) -> Any:
        await turns(late)
        return await work

    importing, attaching = listing.renew(topics, "t", incarnation, snapshot), topics.get_or_create("t")
    works = (importing, later(attaching)) if import_first else (later(importing), attaching)
    reasons = await outcomes(*works)
    # There is one topic, and it is also the next start's.
    topic = topics.get("t")
    assert "" in reasons
    await topics.drain()
    assert [record.incarnation for record in store.topics()] == [topic.incarnation]
    topics = await brokers(store)
    assert topics.get("t").incarnation == topic.incarnation
    await topics.drain()
    store.close()


async def test_a_snapshot_is_imported_under_two_names(tmp_path: Path) -> None:
    incarnation, snapshot = await lost(tmp_path)
    store = Store.open(tmp_path / "anew")
    topics = await brokers(store)
    reasons = await outcomes(*(listing.renew(topics, name, incarnation, snapshot) for name in ("t", "u")))
    assert sorted(reasons) == ["", "TOPIC_EXISTS"]
    assert len(topics.all()) == 1
    await topics.drain()
    assert [record.incarnation for record in store.topics()] == [incarnation]
    store.close()


async def test_retention_goes_on_while_a_snapshot_is_imported(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = await history(process)
    topic, before = live(process), known(process)
    close = topic.log.close

    async def close_when_trimmed() -> None:
        await topic.log.trim(snapshot.next_index)
        await close()

    monkeypatch.setattr(topic.log, "close", close_when_trimmed)
    await topic.keeper.snapshot()
    with pytest.raises(SeqdedupeError, match="POSITION_TRIMMED"):
        await listing.renew(process.topics, NAME, topic.incarnation, snapshot)
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while process.topics.look_at(NAME).state is not State.SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert known(process) == before
    await process.restart()
    assert known(process) == before


@pytest.mark.parametrize("fail_at", [1, 2])
async def test_a_lost_topic_whose_import_fails_leaves_nothing(tmp_path: Path, fail_at: int) -> None:
    incarnation, snapshot = await lost(tmp_path)
    store = FailingStore.open_failing(tmp_path / "anew")
    topics = await brokers(store)
    store.syncs, store.fail_at = 0, fail_at
    with pytest.raises(SeqdedupeError, match="STORE_UNAVAILABLE"):
        await listing.renew(topics, "t", incarnation, snapshot)
    store.fail_at, store.is_broken = 0, False
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while store.topics():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert topics.all() == []
    made = await topics.create("t")
    assert (made.position, [record.incarnation for record in store.topics()]) == (b"", [made.incarnation])
    await topics.drain()
    store.close()
