"""A broker's producers that nobody uses: a durable snapshot forgets them before the topic does."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqdedupe.batch import Binary
from seqdedupe.core.rule import DUP, NOT_DUP
from seqdedupe.errors import UnavailableError, error
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic.attached import AttachedTopic, Columns
from seqdedupe.topic.keeper import DUE_PERIODS
from seqdedupe.topic.policy import Applied
from tests.topic.test_directory import turns
from tests.topic.test_inactivity import known

FORGETS = Applied(deduplication_producer_inactivity_timeout_minutes=60)


class Broker:
    """Its log is a list of (name, ID). It takes its topic, replays, and reports at once."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.log: list[tuple[str, int]] = []
        self.start()

    def start(self) -> None:
        """A new process of the sidecar."""
        snapshots = Snapshots(self.store, 1)
        self.topic = AttachedTopic(
            "t",
            1,
            self.store,
            snapshots,
            snapshots.load(),
            applied=FORGETS,
            now_seconds=lambda: 0.0,
            on_state=lambda topic: None,
        )
        self.attach()

    def attach(self) -> None:
        self.attachment = self.topic.attach(lambda why: None, lambda: None)
        self.handles: dict[str, int] = {}
        first = int(self.attachment.position) + 1 if self.attachment.position else 0
        self.replayed = self.log[first:]
        for number, (name, sequence_id) in enumerate(self.replayed, first):
            position, before = b"%d" % number, b"%d" % (number - 1) if number else b""
            columns = self.columns(name, sequence_id)
            self.attachment.replay(columns, Binary.of_all([position]), Binary.of_all([before]))
            self.topic.replayed(self.attachment, 1)
        self.attachment.end_replay(b"%d" % (len(self.log) - 1) if self.log else b"")
        self.topic.ready()

    def columns(self, name: str, sequence_id: int) -> Columns:
        if name not in self.handles:
            self.handles[name] = self.attachment._handles
            self.attachment.register(self.handles[name], [name.encode()])
        ids = np.array([sequence_id], np.int64)
        return Columns(np.array([self.handles[name]], np.int32), ids, ids)

    def admit(self, name: str, sequence_id: int) -> tuple[int, int]:
        checked = self.topic.check(self.attachment, self.columns(name, sequence_id))
        return int(checked.verdicts[0]), checked.first_admission

    def publish(self, name: str, sequence_id: int) -> int:
        verdict, admission = self.admit(name, sequence_id)
        if verdict == NOT_DUP:
            self.log.append((name, sequence_id))
            self.topic.report(self.attachment, admission, 1, b"%d" % (len(self.log) - 1), 0)
        return verdict

    def release(self, *names: str) -> None:
        self.attachment.release(np.array([self.handles.pop(name) for name in names], np.int32))

    async def pass_timeout(self, looks: int = DUE_PERIODS) -> None:
        for _ in range(looks):
            await self.topic.keeper.inactivity.look()

    def known(self) -> dict[str, int]:
        return known(self.topic.producers)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "store")
    yield store
    store.close()


async def test_who_was_released_is_forgotten_and_a_replay_does_not_bring_it_back(store: Store) -> None:
    broker = Broker(store)
    for name in ("gone", "stays", "again"):
        assert broker.publish(name, 7) == NOT_DUP
    broker.release("gone", "again")
    await broker.pass_timeout(DUE_PERIODS - 1)
    assert len(broker.known()) == 3
    assert broker.publish("again", 7) == DUP
    await broker.pass_timeout(1)
    assert broker.known() == {"stays": 7, "again": 7}
    assert broker.topic.counters.purged == 1
    broker.start()
    assert broker.replayed == []
    assert broker.known() == {"stays": 7, "again": 7}
    assert broker.publish("gone", 2) == NOT_DUP
    # Other IDs from the beginning: what was known before must not come back over them.
    broker.start()
    assert broker.known() == {"stays": 7, "again": 7, "gone": 2}
    assert broker.publish("gone", 3) == NOT_DUP
    await broker.topic.delete()


async def test_who_is_released_has_a_full_timeout_from_then_on(store: Store) -> None:
    broker = Broker(store)
    broker.publish("a", 7)
    await broker.pass_timeout(1)
    # As if just before the next look, which counts for nothing of the timeout.
    assert broker.publish("a", 7) == DUP
    broker.release("a")
    await broker.pass_timeout(DUE_PERIODS - 1)
    assert broker.known() == {"a": 7}
    await broker.pass_timeout(1)
    assert broker.known() == {}
    await broker.topic.delete()


async def test_handles_go_on_under_new_numbers(store: Store) -> None:
    broker = Broker(store)
    for name in ("gone", "stays", "new"):
        broker.publish(name, 7)
    # Registered and without a message: nothing is known of it, and it is held.
    broker.columns("silent", 0)
    await broker.pass_timeout(2 * DUE_PERIODS)
    assert broker.topic.producers.generation == 0
    broker.release("gone")
    verdict, admission = broker.admit("new", 8)
    await broker.pass_timeout()
    assert (verdict, broker.topic.producers.generation) == (NOT_DUP, 1)
    broker.log.append(("new", 8))
    broker.topic.report(broker.attachment, admission, 1, b"3", 0)
    assert [broker.publish(name, 9) for name in ("stays", "new", "silent", "gone")] == [NOT_DUP] * 4
    assert broker.known() == {"stays": 9, "new": 9, "silent": 9, "gone": 9}
    await broker.topic.delete()


async def test_what_is_in_flight_is_not_forgotten(store: Store) -> None:
    broker = Broker(store)
    broker.publish("a", 7)
    _, admission = broker.admit("a", 8)
    broker.release("a")
    await broker.pass_timeout(2 * DUE_PERIODS)
    assert broker.known() == {"a": 7}
    broker.topic.report(broker.attachment, admission, 1, b"1", 0)
    assert broker.known() == {"a": 8}
    await broker.topic.delete()


async def test_what_was_in_flight_has_a_full_timeout_from_then_on(store: Store) -> None:
    broker = Broker(store)
    broker.publish("a", 7)
    _, admission = broker.admit("a", 8)
    broker.release("a")
    await broker.pass_timeout(DUE_PERIODS - 1)
    broker.topic.report(broker.attachment, admission, 1, b"1", 0)
    await broker.pass_timeout(DUE_PERIODS - 1)
    assert broker.known() == {"a": 8}
    await broker.pass_timeout(1)
    assert broker.known() == {}
    await broker.topic.delete()


async def test_what_is_in_flight_since_deduplication_was_off_is_not_forgotten(store: Store) -> None:
    """Its ID is no news, so that the numbers do not tell; another entry is no message, and of no handle."""
    broker = Broker(store)
    broker.publish("a", 7)
    broker.publish("b", 7)
    broker.topic.inherit(replace(FORGETS, deduplication_enabled=False))
    columns = Columns(np.array([0, 99], np.int32), np.array([7, 7]), np.array([7, 7]), np.array([0, 1], np.uint8))
    admission = broker.topic.check(broker.attachment, columns).first_admission
    broker.release("a")
    broker.topic.inherit(FORGETS)
    await broker.pass_timeout()
    assert (broker.known(), broker.topic.producers.generation) == ({"a": 7, "b": 7}, 0)
    broker.topic.report(broker.attachment, admission, 2, b"3", 0)
    await broker.pass_timeout()
    assert broker.known() == {"b": 7}
    await broker.topic.delete()


async def test_a_store_that_fails_forgets_nobody(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(store)
    broker.publish("a", 7)
    broker.release("a")
    await broker.pass_timeout(DUE_PERIODS - 1)

    def fails(*_: object) -> None:
        raise error("STORE_UNAVAILABLE", "a planned failure")

    monkeypatch.setattr(store, "_sync", fails)
    with pytest.raises(UnavailableError, match="STORE_UNAVAILABLE"):
        await broker.pass_timeout(1)
    assert broker.publish("a", 7) == DUP
    monkeypatch.undo()
    await broker.topic.keeper.snapshot()
    broker.start()
    assert broker.known() == {"a": 7}
    await broker.topic.delete()


async def test_who_comes_back_while_the_snapshot_is_written_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker(store)
    broker.publish("a", 7)
    broker.publish("b", 7)
    broker.release("a", "b")
    await broker.pass_timeout(DUE_PERIODS - 1)
    flush = store.flush

    async def flush_while_it_comes_back(opening: int) -> None:
        await flush(opening)
        monkeypatch.setattr(store, "flush", flush)
        assert broker.publish("a", 7) == DUP

    monkeypatch.setattr(store, "flush", flush_while_it_comes_back)
    await broker.pass_timeout(1)
    assert broker.known() == {"a": 7}
    await broker.topic.keeper.snapshot()
    broker.start()
    assert broker.known() == {"a": 7}
    await broker.topic.delete()


class HeldStore:
    """The next flush of this store, and those after it, wait until it may end."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_held, self.may_end = asyncio.Event(), asyncio.Event()
        flush = store.flush

        async def flush_held(opening: int) -> None:
            self.is_held.set()
            await self.may_end.wait()
            await flush(opening)

        monkeypatch.setattr(store, "flush", flush_held)


async def nearly_due(store: Store) -> Broker:
    """With the next look a and b are due; there are too many others for rows to be freed."""
    broker = Broker(store)
    for name in "abcdefghij":
        broker.publish(name, 7)
    broker.release("a", "b")
    await broker.pass_timeout(DUE_PERIODS - 1)
    return broker


async def test_who_comes_back_while_the_snapshot_waits_for_another_is_known_after_a_crash(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await nearly_due(store)
    held = HeldStore(store, monkeypatch)
    before = asyncio.ensure_future(broker.topic.keeper.snapshot())
    await held.is_held.wait()
    looking = asyncio.ensure_future(broker.pass_timeout(1))
    await turns(50)
    # The log has it, and all crash before its producer hears of it.
    assert broker.publish("a", 8) == NOT_DUP
    held.may_end.set()
    await asyncio.gather(before, looking)
    await asyncio.gather(*broker.topic._tasks)
    broker.start()
    assert [broker.publish("a", sequence_id) for sequence_id in (7, 8)] == [DUP, DUP]
    assert broker.publish("b", 7) == NOT_DUP
    await broker.topic.delete()


async def test_who_got_an_answer_while_the_snapshot_was_written_is_known_after_a_crash(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await nearly_due(store)
    held = HeldStore(store, monkeypatch)
    looking = asyncio.ensure_future(broker.pass_timeout(1))
    await held.is_held.wait()
    assert broker.publish("a", 7) == DUP
    held.may_end.set()
    await looking
    await asyncio.gather(*broker.topic._tasks)
    broker.start()
    assert [broker.publish(name, 7) for name in "ab"] == [DUP, NOT_DUP]
    await broker.topic.delete()


async def test_a_drain_in_the_middle_keeps_who_came_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = await nearly_due(store)
    held = HeldStore(store, monkeypatch)
    looking = broker.topic.spawn(broker.topic.keeper.inactivity.look())
    await held.is_held.wait()
    assert broker.publish("a", 7) == DUP
    draining = asyncio.ensure_future(broker.topic.drain())
    await asyncio.sleep(0)
    held.may_end.set()
    await draining
    await asyncio.wait([looking])
    broker.start()
    assert [broker.publish(name, 7) for name in "ab"] == [DUP, NOT_DUP]
    await broker.topic.delete()


async def test_while_no_broker_is_attached_no_time_counts(store: Store) -> None:
    broker = Broker(store)
    broker.publish("a", 7)
    broker.topic.detach(broker.attachment)
    await broker.pass_timeout(3 * DUE_PERIODS)
    assert broker.known() == {"a": 7}
    broker.attach()
    await broker.pass_timeout(DUE_PERIODS - 1)
    assert broker.known() == {"a": 7}
    await broker.pass_timeout(1)
    assert broker.known() == {}
    await broker.topic.delete()


async def test_the_snapshot_that_forgets_says_that_somebody_was(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may end before the next one is taken, which frees the names."""
    broker = Broker(store)
    assert broker.publish("gone", 7) == NOT_DUP
    await broker.topic.keeper.snapshot()
    broker.start()
    stored: list[bool] = []
    original = broker.topic.keeper.snapshotter.forget

    async def forget(*calls: Any) -> None:
        await original(*calls)
        loaded = Snapshots(store, 1).load()
        assert loaded is not None
        assert not (loaded.persisted >= 0).any()
        stored.append(loaded.has_forgotten)

    assert not broker.topic.producers.has_forgotten
    monkeypatch.setattr(broker.topic.keeper.snapshotter, "forget", forget)
    await broker.pass_timeout()
    assert stored == [True]
    await broker.topic.delete()


async def test_who_came_back_before_the_snapshot_that_would_forget_was_not_forgotten(store: Store) -> None:
    broker = Broker(store)
    assert broker.publish("back", 7) == NOT_DUP
    broker.release("back")
    await broker.pass_timeout(DUE_PERIODS - 1)
    async with broker.topic.keeper.snapshotter.stands_still():
        looking = asyncio.ensure_future(broker.pass_timeout(1))
        await turns(10)
        assert broker.publish("back", 7) == DUP
    await looking
    assert broker.known() == {"back": 7}
    assert not broker.topic.producers.has_forgotten
    await broker.topic.delete()
