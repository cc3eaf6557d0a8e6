"""A store that fails under an attached topic, at every call: checks go on, and nothing is trimmed that a start needs.

The broker's log is a list, of which it trims all that it learns it may. No matter what the store did, and no matter
what of it a power cut leaves, the broker can attach with what it has kept, and its producers' messages have the right
verdicts.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqdedupe.batch import Binary
from seqdedupe.core.rule import DUP, NOT_DUP, UNKNOWN
from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.store.db import _Opening
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import attached
from seqdedupe.topic.attached import AttachedTopic, BrokerAttachment, Columns
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.lives import BrokersTopics
from seqdedupe.topic.policy import Applied, GapPolicy, Policy
from seqdedupe.transfer.topic_state import saved
from tests.property.disk import CrashableStore
from tests.topic.test_directory import FailingStore

NAME = "persistent://public/default/t"
APPLIED = Applied(deduplication_entries_interval=10**6, deduplication_snapshot_interval_seconds=0)
REJECT = Policy(gap=GapPolicy.REJECT)


class Broker:
    """A broker with one producer, whose IDs are the places of its messages in the log."""

    def __init__(self) -> None:
        self.length = 0
        self.trimmed = 0
        """The entries before this one are gone."""
        self.ended: list[SeqdedupeError] = []

    def attach(self, topic: AttachedTopic) -> None:
        """Attaches, and replays what the topic does not know: it must still be there."""
        self.topic = topic
        self.attachment: BrokerAttachment = topic.attach(self.ended.append, lambda: None)
        known = int(self.attachment.position or b"0")
        assert known >= self.trimmed, f"the sidecar knows {known} entries, and {self.trimmed} are gone"
        self.attachment.register(0, [b"p"])
        ids = range(known, self.length)
        if ids:
            positions = [b"%d" % i if i else b"" for i in range(known, self.length + 1)]
            self.attachment.replay(columns(*ids), Binary.of_all(positions[1:]), Binary.of_all(positions[:-1]))
            topic.replayed(self.attachment, len(ids))
        self.attachment.end_replay(b"%d" % self.length if self.length else b"")
        topic.ready()

    def check(self, *ids: int) -> list[int]:
        verdicts: list[int] = self.topic.check(self.attachment, columns(*ids)).verdicts.tolist()
        return verdicts

    def publish(self) -> None:
        """The producer sends the last three messages again, and two new ones, of which the log refuses the second."""
        again = list(range(max(0, self.length - 3), self.length))
        new = [self.length, self.length + 1]
        assert self.check(*again, *new) == [DUP] * len(again) + [NOT_DUP] * 2
        self.length += 1
        self.topic.report(self.attachment, self.attachment._settled, 1, b"%d" % self.length, 1)
        assert self.check(*new) == [UNKNOWN] * 2
        self.attachment.reset()
        self.trimmed = int(self.topic.trim_position or b"0")
        assert self.trimmed <= self.length

    def check_all(self) -> None:
        """Everything in the log is there, and nothing else."""
        assert self.check(*range(self.length + 1)) == [DUP] * self.length + [NOT_DUP]
        self.topic.report(self.attachment, self.attachment._settled, 0, b"", 1)
        self.attachment.reset()


def columns(*ids: int) -> Columns:
    sequence_ids = np.array(ids, np.int64)
    return Columns(np.zeros(len(ids), np.int32), sequence_ids, sequence_ids)


# -- snapshots and policies --------------------------------------------------------------------------------------------


class BrokenStore(CrashableStore):
    """The store, whose syncs fail from one on. For what they would have synced some may be there all the same."""

    syncs = 0
    fail_at = 0
    survives = 0
    lies = False
    hangs: threading.Event | None = None
    """Until it is set nothing is synced."""
    is_hanging = threading.Event()

    def _sync(self, opening: _Opening) -> None:
        self.syncs += 1
        if self.hangs is not None:
            self.is_hanging.set()
            assert self.hangs.wait(LAST_RESORT_SECONDS)
        if self.lies:
            return
        if self.fail_at and self.syncs >= self.fail_at:
            self.fail_next_sync(self.survives)
        super()._sync(opening)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[BrokenStore]:
    store = CrashableStore.open_crashable(tmp_path / "store")
    store.__class__ = BrokenStore
    assert isinstance(store, BrokenStore)
    yield store
    store.close()


def start(store: BrokenStore, incarnation: int) -> AttachedTopic:
    """A process starts with what the store has."""
    store.restart()
    snapshots = Snapshots(store, incarnation)
    return AttachedTopic(
        "t",
        incarnation,
        store,
        snapshots,
        snapshots.load(),
        applied=APPLIED,
        now_seconds=lambda: 0.0,
        on_state=lambda _: None,
    )


async def answered(work: Any) -> bool:
    try:
        await work
    except UnavailableError:
        return False
    return True


async def live_and_die(store: BrokenStore, fail_at: int, survives: int) -> tuple[int, int]:
    """A life of a topic, then the power is cut. How many of the calls were answered, and how many there were."""
    incarnation = store.next_incarnation(1)
    store.watch(incarnation)
    store.syncs, store.fail_at, store.survives = 0, fail_at, survives
    broker, answers = Broker(), list[bool]()
    broker.attach(start(store, incarnation))
    calls: list[Callable[[], Any]] = [
        lambda: broker.topic.keeper.snapshot(),
        lambda: broker.topic.set_policy(REJECT),
        lambda: broker.topic.keeper.snapshot(),
        lambda: broker.topic.set_policy(Policy()),
        lambda: broker.topic.set_policy(REJECT),
    ]
    for call in calls:
        broker.publish()
        trimmed = broker.topic.trim_position
        answers.append(await answered(call()))
        assert broker.topic.trim_position == (b"%d" % broker.length if answers[-1] else trimmed)
        # Another broker may come while the store fails: what is in memory is as good as ever.
        broker.attach(broker.topic)
        broker.check_all()
    broker.publish()
    if survives:
        # The store is back in time.
        store.fail_at = 0
        await broker.topic.keeper.snapshot()
        assert broker.topic.trim_position == b"%d" % broker.length
        answers.append(True)
        broker.publish()
    assert broker.topic.policy == REJECT
    await broker.topic.keeper.snapshotter.close()
    store.cut_power(survives)
    store.fail_at = 0
    topic = start(store, incarnation)
    broker.attach(topic)
    broker.check_all()
    if answers[-1]:
        assert topic.policy == REJECT
    await topic.drain()
    assert [why.reason for why in broker.ended] == ["NOT_ATTACHED"] * len(calls) + ["DRAINING"]
    return sum(answers), len(answers)


@pytest.mark.parametrize("survives", [0, 1, 2])
async def test_the_store_fails_at_every_call(store: BrokenStore, survives: int) -> None:
    seen = set[int]()
    for fail_at in range(1, 20):
        good, calls = await live_and_die(store, fail_at, survives)
        seen.add(good)
        if good == calls and store.syncs < fail_at:
            break
    assert len(seen) > 4, "it failed at every call"


async def test_a_store_that_loses_what_it_has_called_durable_is_found_out(store: BrokenStore) -> None:
    """The other arm: entries were trimmed that are needed."""
    store.lies = True
    with pytest.raises(AssertionError, match="are gone"):
        await live_and_die(store, 0, 0)


@pytest.mark.parametrize("is_exported", [False, True])
async def test_what_is_exported_while_a_snapshot_is_synced_is_not_trimmed_for_it(
    store: BrokenStore, is_exported: bool
) -> None:
    incarnation = store.next_incarnation(1)
    store.watch(incarnation)
    broker = Broker()
    broker.attach(start(store, incarnation))
    broker.publish()
    store.is_hanging, store.hangs = threading.Event(), threading.Event()
    snapshot = asyncio.ensure_future(broker.topic.keeper.snapshot())
    assert await asyncio.to_thread(store.is_hanging.wait, LAST_RESORT_SECONDS)
    broker.publish()
    if is_exported:
        assert saved(broker.topic).opaque == b"2"
    store.hangs.set()
    await snapshot
    assert (broker.topic.trim_position, broker.topic.keeper.snapshot_index) == (b"1", 1)
    broker.publish()
    store.cut_power(0)
    broker.attach(start(store, incarnation))
    broker.check_all()
    await broker.topic.drain()


@pytest.mark.parametrize(("seconds", "is_often"), [(1000.0, False), (0.0, True)])
async def test_a_log_that_grows_fast_is_not_snapshotted_without_a_break(
    store: BrokenStore, monkeypatch: pytest.MonkeyPatch, seconds: float, is_often: bool
) -> None:
    monkeypatch.setattr(attached, "COUNT_SECONDS", seconds)
    incarnation = store.next_incarnation(1)
    store.watch(incarnation)
    broker = Broker()
    broker.attach(start(store, incarnation))
    broker.topic.keeper.snapshotter.apply(replace(APPLIED, deduplication_entries_interval=1))
    store.syncs = 0
    for _ in range(20):
        broker.publish()
        await asyncio.sleep(0)
        await broker.topic.keeper.snapshotter.finish()
    assert (store.syncs > 5) if is_often else (store.syncs == 1)
    await broker.topic.drain()
    assert broker.topic.trim_position == b"%d" % broker.length


async def test_a_policy_that_could_not_be_stored_is_stored_when_the_store_is_back(store: BrokenStore) -> None:
    """By itself: here no timer takes snapshots, and nothing comes that would."""
    incarnation = store.next_incarnation(1)
    store.watch(incarnation)
    topic = start(store, incarnation)
    Broker().attach(topic)
    store.syncs, store.fail_at = 0, 1
    with pytest.raises(UnavailableError):
        await topic.set_policy(REJECT)
    store.fail_at = 0
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while (loaded := Snapshots(store, incarnation).load()) is None or not loaded.policy:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert start(store, incarnation).policy == REJECT


async def test_draining_with_a_failing_store_ends(store: BrokenStore) -> None:
    incarnation = store.next_incarnation(1)
    store.watch(incarnation)
    broker = Broker()
    broker.attach(start(store, incarnation))
    broker.publish()
    store.syncs, store.fail_at = 0, 1
    await broker.topic.drain()
    assert [why.reason for why in broker.ended] == ["DRAINING"]
    with pytest.raises(UnavailableError):
        broker.topic.attach(broker.ended.append, lambda: None)
    assert broker.topic.trim_position == b""
    store.cut_power(0)
    store.fail_at = 0
    broker.attach(start(store, incarnation))
    broker.check_all()


# -- topics ------------------------------------------------------------------------------------------------------------


class Process:
    """A process with topics of brokers, made again over the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def start(self) -> None:
        self.store = FailingStore.open_failing(self.folder)
        self.topics: Topics[AttachedTopic] = Topics(
            self.store,
            lambda told: BrokersTopics(self.store, on_state=told),
            max_topics=10,
            allow_auto_topic_creation=True,
            on_state=lambda name, state: None,
            applied=APPLIED,
        )
        await self.topics.open_all()
        await self.topics.recover_all()

    def fail_from(self, call: int) -> None:
        self.store.fail_at = self.store.syncs + call

    def heal(self) -> None:
        self.store.is_broken, self.store.fail_at = False, 0

    async def restart(self) -> None:
        await self.topics.drain()
        self.heal()
        await self.store.flush(self.store.opening)
        self.store.close()
        await self.start()

    async def until_attached(self, broker: Broker) -> None:
        """What cannot be written now is tried again in the background."""
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            while True:
                try:
                    broker.attach(await self.topics.get_or_create(NAME))
                    return
                except UnavailableError:
                    await asyncio.sleep(0.01)


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    process = Process(tmp_path / "store")
    await process.start()
    yield process
    process.store.close()


@pytest.mark.parametrize("call", range(1, 5))
async def test_a_store_that_fails_when_a_topic_is_attached_for_the_first_time(process: Process, call: int) -> None:
    """The broker is refused, and nothing is left; or it is attached, and its verdicts count."""
    process.fail_from(call)
    broker = Broker()
    try:
        broker.attach(await process.topics.get_or_create(NAME))
    except UnavailableError:
        assert call <= 2
        assert not process.topics.all()
        process.heal()
        await process.until_attached(broker)
    else:
        assert call > 2
    broker.publish()
    await process.restart()
    broker.attach(process.topics.get(NAME))
    broker.check_all()
    broker.publish()


@pytest.mark.parametrize("call", range(1, 5))
async def test_a_store_that_fails_when_an_attached_topic_is_deleted(process: Process, call: int) -> None:
    """It is there with all its numbers, or it is gone and its broker knows; in between nothing has a verdict."""
    broker = Broker()
    broker.attach(await process.topics.get_or_create(NAME))
    broker.publish()
    process.fail_from(call)
    is_deleted = await answered(process.topics.delete(NAME))
    assert is_deleted == (call > 1)
    if is_deleted:
        assert [why.reason for why in broker.ended] == ["TOPIC_NOT_FOUND"]
        broker = Broker()
    else:
        with pytest.raises(UnavailableError, match="could not be written"):
            broker.check(0, 1)
        with pytest.raises(UnavailableError, match="could not be written"):
            Broker().attach(broker.topic)
        assert not broker.ended
        assert process.topics.get(NAME).producers.number(b"p") is not None
    process.heal()
    await process.until_attached(broker)
    broker.check_all()
    broker.publish()
    await process.restart()
    broker.attach(process.topics.get(NAME))
    broker.check_all()


async def test_a_topic_that_cannot_be_read_at_the_start_is_attached_later(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker()
    broker.attach(await process.topics.get_or_create(NAME))
    broker.publish()
    fails = [True, True]
    load = Snapshots.load

    def failing_load(self: Snapshots) -> Any:
        if fails and fails.pop():
            raise error("STORE_UNAVAILABLE", "a planned failure")
        return load(self)

    monkeypatch.setattr(Snapshots, "load", failing_load)
    await process.restart()
    with pytest.raises(UnavailableError, match="a planned failure"):
        process.topics.get(NAME)
    await process.until_attached(broker)
    assert not fails
    broker.check_all()
