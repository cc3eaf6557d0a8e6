"""A topic on the log over a Pulsar topic in memory: it takes over, whoever was there, and settles what is unknown."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seqdedupe.log.pulsar.entries import EntryFormat
from seqdedupe.log.pulsar.log import PulsarLog
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic.answers import Receipt, Refusal
from seqdedupe.topic.frame import NumbersCache
from seqdedupe.topic.opening import open_sessions
from seqdedupe.topic.policy import Applied
from seqdedupe.topic.publishing import Topic
from seqdedupe.topic.reading import end_index
from seqdedupe.topic.state import State
from tests.batches import batch
from tests.log.pulsar.test_log import BOTH, StandInHarness
from tests.log.pulsar.topics import INCARNATION, marker

LIMIT_SECONDS = 30


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "store")
    yield store
    store.close()


async def recovered(log: PulsarLog, store: Store) -> Topic:
    snapshots = Snapshots(store, INCARNATION)
    applied = Applied(deduplication_snapshot_interval_seconds=0)
    loaded = snapshots.load()
    topic = Topic(log.place, log, store, snapshots, loaded, applied=applied, random_bytes=os.urandom)
    await topic.recover()
    assert topic.state is State.SERVING
    return topic


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not condition():  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.001)


async def publish(topic: Topic, *ids: int) -> list[Receipt | Refusal]:
    """One frame each; their answers, as they come."""
    opened = await open_sessions(topic, ["p"], None)
    answers: list[Receipt | Refusal] = []
    link = opened.persisted[0]
    for sequence_id in ids:
        encoded = batch([("p", sequence_id)], epochs={"p": opened.epochs[0]}, links={"p": link}).encode()
        link = sequence_id
        topic.admit(encoded, sequence_id, answers.append, NumbersCache())
    return answers


@BOTH
async def test_a_topic_goes_on_from_its_snapshot_in_a_higher_term(entry_format: EntryFormat, store: Store) -> None:
    harness = StandInHarness(entry_format)
    topic = await recovered(await harness.open(), store)
    answers = await publish(topic, 1, 2, 3)
    await topic.flight.all_of_now()
    await topic.snapshot()
    answers += await publish(topic, 4, 5)
    await topic.flight.all_of_now()
    assert [type(answer) for answer in answers] == [Receipt] * 3
    await topic.close("")
    # Another one had it meanwhile, of whom nobody here knows.
    harness.topic.add(marker(7, "other"))
    topic = await recovered(await harness.open(), store)
    assert (topic.term, end_index(topic)) == (8, 5)
    assert (await open_sessions(topic, ["p"], None)).persisted == [5]
    await topic.close("")


@BOTH
async def test_what_is_unknown_settles(entry_format: EntryFormat, store: Store) -> None:
    harness = StandInHarness(entry_format)
    topic = await recovered(await harness.open(), store)
    left = 4
    lost = asyncio.Event()

    def fail(_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0 and not lost.is_set():
            harness.client.refuses = True
            lost.set()

    harness.client.before = fail
    answers = await publish(topic, 1, 2, 3, 4, 5)
    await lost.wait()
    await until(lambda: topic.state is not State.SERVING)
    harness.client.refuses = False
    await until(lambda: topic.state is State.SERVING and len(answers) == 5)
    stored = [answer for answer in answers if isinstance(answer, Receipt)]
    assert 0 < len(stored) < 5
    assert end_index(topic) == len(stored)
    persisted = (await open_sessions(topic, ["p"], None)).persisted
    assert persisted == [len(stored)]
    await topic.close("")
