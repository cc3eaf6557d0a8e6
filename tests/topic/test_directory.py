"""Making and deleting topics: given up at every await, and failing at every call of the store and of the logs.

A topic is there with all its receipts, or it is gone; what was answered stays so, also at the next start.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.errors import SeqdedupeError, UnavailableError, error
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Delta, Snapshots
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic.base import State
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.lives import PublishedTopics
from seqdedupe.topic.operations import open_sessions
from tests.batches import batch
from tests.log.faulty import FaultyLog, Storage
from tests.topic.logs import MemoryLogs

NAME = "persistent://public/default/t"


class FailingStore(Store):
    """The store, of which a sync can fail. What was written then is found at the next start all the same."""

    fail_at = 0
    """The so-manieth sync from now on fails, and all after it until `heal`; 0: none."""
    syncs = 0
    is_broken = False

    @staticmethod
    def open_failing(folder: Path) -> "FailingStore":
        store = Store.open(folder)
        store.__class__ = FailingStore
        assert isinstance(store, FailingStore)
        return store

    def _sync(self, opening: object) -> None:
        self.syncs += 1
        if self.syncs == self.fail_at:
            self.is_broken = True
        if self.is_broken:
            raise error("STORE_UNAVAILABLE", "a planned failure")
        super()._sync(opening)  # type: ignore[arg-type]


@dataclass
class Process:
    """A process with topics: made again over the same store folder and logs."""

    folder: Path
    storages: dict[int, tuple[str, Storage]] = field(default_factory=dict)
    states: list[tuple[str, State | None]] = field(default_factory=list)

    async def start(self) -> None:
        self.store = FailingStore.open_failing(self.folder)
        self.logs = MemoryLogs(self.storages)
        self.topics = Topics(
            self.store,
            self.kind,
            max_topics=10,
            allow_auto_topic_creation=True,
            on_state=lambda name, state: self.states.append((name, state)),
        )
        await self.topics.open_all()
        await self.topics.recover_all()

    def kind(self, told: Callable[[Any], None]) -> PublishedTopics:
        return PublishedTopics(self.store, self.logs, on_state=told)

    async def stop(self) -> None:
        """An orderly end: the store's last writes become durable."""
        await self.topics.drain()
        self.store.is_broken = False
        self.store.fail_at = 0
        await self.store.flush(self.store.opening)
        self.store.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def publish(self, sequence_id: int) -> bool:
        """Whether a message got its receipt."""
        try:
            topic = self.topics.get(NAME)
            opened = await open_sessions(topic, ["p"], None)
        except SeqdedupeError:
            return False
        frame = batch([("p", sequence_id)], epochs={"p": opened.epochs[0]}, links={"p": -1}).encode()
        answers: list[FrameReceipt | Refusal] = []
        topic.admit(frame, 1, answers.append, NumbersCache(), lone=True)
        await topic.flight.all_of_now()
        return isinstance(answers[0], FrameReceipt)

    async def until_published(self, sequence_id: int) -> None:
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            while not await self.publish(sequence_id):  # noqa: ASYNC110
                # Until the next try of what is tried again in the background.
                await asyncio.sleep(0.01)

    @property
    def end(self) -> int | None:
        """Where the topic ends; None if there is none."""
        try:
            return self.topics.get(NAME).confirmed_index
        except SeqdedupeError:
            return None


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path / "store")
    yield process
    process.store.close()


async def turns(count: int) -> None:
    """This many turns of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


TURNS = (*range(40), *(2**k for k in range(6, 20)))
"""For the event loop: each of the first ones, then many, since a slow machine's disk takes any number of them."""


async def cancelled_after(steps: int, work: Callable[[], object]) -> bool:
    """Gives something up after this many turns of the event loop; whether it had not ended by itself."""
    task = asyncio.ensure_future(work())  # type: ignore[call-overload]
    await turns(steps)
    was_under_way = not task.done()
    task.cancel()
    await asyncio.wait([task])
    return was_under_way


async def test_a_deletion_that_is_given_up_at_any_await_is_done(process: Process) -> None:
    await process.start()
    for steps in TURNS:
        await process.topics.create(NAME)
        assert await process.publish(1)
        if not await cancelled_after(steps, lambda: process.topics.delete(NAME)):
            break
        receipts = 1
        if await process.publish(2):
            receipts += 1
        # Anyone who deletes next waits for the deletion that goes on; a creation makes another topic.
        topic = await process.topics.create(NAME, exists_ok=True)
        if steps and receipts == 1:
            assert topic.confirmed_index == 0
        await process.restart()
        assert process.end == (0 if receipts == 1 and steps else receipts)
        await process.topics.delete(NAME)
        assert process.states[-1] == (NAME, None)
    else:
        raise AssertionError("it never ended by itself")
    assert steps > 3
    await process.restart()
    assert process.end is None
    assert not process.storages


async def test_a_creation_that_is_given_up_at_any_await_is_done(process: Process) -> None:
    await process.start()
    for steps in TURNS:
        under_way = await cancelled_after(steps, lambda: process.topics.create(NAME))
        await process.topics.create(NAME, exists_ok=True)
        assert await process.publish(1)
        await process.restart()
        assert process.end == 1
        await process.topics.delete(NAME)
        if not under_way:
            break
    assert steps > 3


@pytest.mark.parametrize("call", range(1, 5))
async def test_a_deletion_whose_store_fails(process: Process, call: int) -> None:
    """The topic takes nothing until it is certain that it lives on: with all its receipts, or it is gone."""
    await process.start()
    await process.topics.create(NAME)
    assert await process.publish(1)
    process.store.fail_at = process.store.syncs + call
    answered = True
    try:
        await process.topics.delete(NAME)
    except UnavailableError:
        answered = False
    assert answered == (call > 1)
    receipts = 1 + await process.publish(2)
    assert receipts == 1
    await process.restart()
    assert process.end in ([None] if answered else [None, receipts])
    if process.end is not None:
        assert await process.publish(3)


async def test_a_deletion_whose_store_fails_for_a_while(process: Process) -> None:
    await process.start()
    topic = await process.topics.create(NAME)
    assert await process.publish(1)
    process.store.fail_at = process.store.syncs + 1
    with pytest.raises(UnavailableError):
        await process.topics.delete(NAME)
    with pytest.raises(UnavailableError, match="could not be written"):
        topic.check_serving()
    with pytest.raises(UnavailableError, match="being undone"):
        await process.topics.delete(NAME)
    process.store.is_broken = False
    await process.until_published(2)
    await process.restart()
    assert process.end == 2


@pytest.mark.parametrize("call", range(1, 5))
async def test_a_creation_whose_store_fails(process: Process, call: int) -> None:
    """It is refused and leaves nothing, or it is there."""
    await process.start()
    process.store.fail_at = process.store.syncs + call
    try:
        await process.topics.create(NAME)
        is_there = True
    except UnavailableError:
        is_there = False
    assert is_there == (call > 2)
    assert (process.end is not None) == is_there
    process.store.is_broken = False
    process.store.fail_at = 0
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while True:
            try:
                await process.topics.create(NAME, exists_ok=True)
                break
            except UnavailableError:
                await asyncio.sleep(0.01)
    assert await process.publish(1)
    await process.restart()
    assert process.end == 1
    assert len(process.storages) == 1


@pytest.mark.parametrize("call", ["create", "open"])
async def test_a_creation_whose_log_fails_and_cannot_be_undone_does_not_hinder_the_next_start(
    process: Process, call: str
) -> None:
    await process.start()

    def fail(name: str) -> None:
        if name in (call, "delete"):
            raise error("LOG_REFUSED", "no room")

    process.logs.before = fail
    with pytest.raises(UnavailableError, match="no room"):
        await process.topics.create(NAME)
    assert process.end is None
    await process.restart()
    assert process.end is None
    assert not process.storages
    await process.topics.create(NAME)
    assert await process.publish(1)


async def test_a_log_that_cannot_be_opened_at_the_start_is_opened_later(process: Process) -> None:
    await process.start()
    await process.topics.create(NAME)
    assert await process.publish(1)
    await process.stop()
    process.store = FailingStore.open_failing(process.folder)
    failures = 3

    def fail(name: str) -> None:
        nonlocal failures
        if name == "open" and failures:
            failures -= 1
            raise OSError(24, "too many open files")

    process.logs = MemoryLogs(process.storages, fail)
    process.topics = Topics(
        process.store,
        process.kind,
        max_topics=10,
        allow_auto_topic_creation=True,
        on_state=lambda name, state: process.states.append((name, state)),
    )
    await process.topics.open_all()
    await process.topics.recover_all()
    for work in (process.topics.delete(NAME), process.topics.create(NAME), process.topics.get_or_create(NAME)):
        with pytest.raises(UnavailableError, match="too many open files") as caught:
            await work
        assert caught.value.reason == "RECOVERING"
    await process.until_published(2)
    assert process.end == 2


async def test_health_is_that_of_the_newest_topic_of_a_name(process: Process) -> None:
    """A creation that comes while the topic is deleted waits for it: the last state told is SERVING."""
    await process.start()
    await process.topics.create(NAME)
    deletion = asyncio.ensure_future(process.topics.delete(NAME))
    await turns(1)
    await process.topics.create(NAME)
    await deletion
    assert process.states[-1] == (NAME, State.SERVING)


async def test_a_snapshot_that_nothing_was_left_for_leaves_nobody_out(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that has failed: the next snapshot holds what that one would have."""
    await process.start()
    await process.topics.create(NAME)
    assert await process.publish(7)

    def write_nothing(self: Snapshots, delta: Delta) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Snapshots, "write_delta", write_nothing)
        with pytest.raises(MemoryError):
            await process.topics.get(NAME).keeper.snapshot()
    topic = process.topics.get(NAME)
    await topic.keeper.snapshot()
    loaded = Snapshots(process.store, topic.incarnation).load()
    assert loaded is not None
    assert (loaded.names.some(), loaded.persisted.tolist(), loaded.next_index) == ([b"p"], [7], 1)


async def test_a_store_that_is_found_damaged_at_the_end_keeps_no_topic_open(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    await process.start()
    topics = [await process.topics.create(name) for name in ("one", "two", "three")]
    closed: list[object] = []
    close = FaultyLog.close

    async def closing(log: FaultyLog) -> None:
        closed.append(log)
        await close(log)

    async def damaged(self: Store, opening: object) -> None:
        raise error("STORE_DAMAGED", "a planned failure")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "flush", damaged)
        patch.setattr(FaultyLog, "close", closing)
        await process.topics.drain()
    assert closed == [topic.log for topic in topics]
