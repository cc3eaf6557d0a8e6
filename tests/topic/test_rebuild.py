"""The log alone tells all that is in force, also after retention has dropped what first said it."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqdedupe.errors import DamagedError, UnavailableError
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.message_id import MessageId, Position
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic.base import State
from seqdedupe.topic.control import ProducerSessions, Purge, decode, encode, runs
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.operations import open_sessions
from seqdedupe.topic.policy import NAMES, Applied, DeduplicationRoute, GapPolicy, NamedCursor, OverlapPolicy, Policy
from seqdedupe.topic.topic import Topic
from tests.batches import batch
from tests.log.batches import encoded_batch
from tests.log.faulty import FaultyLog, Storage

INCARNATION = 5
SEGMENT_BYTES = 4000


def fatal(why: str) -> None:
    raise AssertionError(why)


@pytest.fixture
async def logs(tmp_path: Path) -> AsyncIterator[EmbeddedLogs]:
    """With small segments, of which retention keeps as few as it may."""
    logs = EmbeddedLogs(tmp_path / "logs", clock_ms=lambda: 1, fatal=fatal, segment_bytes=SEGMENT_BYTES)
    await logs.create(INCARNATION, "persistent://public/default/t", bytes(16))
    yield logs
    await logs.close()


async def open_topic(logs: EmbeddedLogs, store: Store) -> Topic:
    snapshots = Snapshots(store, INCARNATION)
    loaded = snapshots.load()
    log = await logs.open(INCARNATION, loaded.next_index if loaded else 0)
    topic = Topic(
        "persistent://public/default/t",
        log,
        store,
        snapshots,
        loaded,
        applied=Applied(deduplication_entries_interval=2**62, retention_size_in_mb=0),
        random_bytes=secrets.token_bytes,
    )
    await topic.recover()
    assert topic.state is State.SERVING
    return topic


async def publish(topic: Topic, name: str, epoch: int, sequence_id: int, link: int) -> FrameReceipt | Refusal:
    answers: list[FrameReceipt | Refusal] = []
    encoded = batch([(name, sequence_id)], epochs={name: epoch}, links={name: link}, payloads=[bytes(500)]).encode()
    topic.admit(encoded, 1, answers.append, NumbersCache())
    await topic.flight.all_of_now()
    return answers[0]


async def test_a_rebuilt_store_knows_all_that_was_in_force(logs: EmbeddedLogs, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    topic = await open_topic(logs, store)
    # Opened and never published; published long ago; taken over from a zombie; and what fills the segments.
    silent = (await open_sessions(topic, ["silent"], None)).epochs[0]
    old = (await open_sessions(topic, ["old"], None)).epochs[0]
    zombie = (await open_sessions(topic, ["name"], None)).epochs[0]
    assert isinstance(await publish(topic, "old", old, 7, -1), FrameReceipt)
    owner = (await open_sessions(topic, ["name"], None)).epochs[0]
    await topic.set_policy(Policy(deduplication_enabled=False))
    await topic.set_policy(Policy())
    await topic.set_policy(Policy(deduplication_enabled=False))
    filler = (await open_sessions(topic, ["filler"], None)).epochs[0]
    for i in range(40):
        assert isinstance(await publish(topic, "filler", filler, i, i - 1), FrameReceipt)
    term = topic.term
    await topic.keeper.snapshot()
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while topic.log.first_index < 20:  # noqa: ASYNC110 (retention goes on beside the snapshot)
            await asyncio.sleep(0.01)
    await topic.close("")
    store.close()

    store = Store.open(tmp_path / "rebuilt")
    topic = await open_topic(logs, store)
    assert topic.confirmed_index == 41
    assert topic.term > term
    assert topic.policy == Policy(deduplication_enabled=False)
    assert (await open_sessions(topic, ["silent"], [silent])).refusals == {}
    opened = await open_sessions(topic, ["old", "name", "filler"], [old, zombie, filler])
    assert opened.persisted == [7, -1, 39]
    assert opened.epochs == [old, 0, filler]
    assert {place: e.reason for place, e in opened.refusals.items()} == {1: "FENCED"}
    assert opened.refusals[1].numbers["current_epoch"] == str(owner)
    fenced = await publish(topic, "name", zombie, 1, -1)
    assert isinstance(fenced, Refusal)
    assert fenced.error.reason == "FENCED"
    assert isinstance(await publish(topic, "name", owner, 1, -1), FrameReceipt)
    await topic.set_policy(Policy())
    again = await publish(topic, "old", old, 7, -1)
    assert isinstance(again, FrameReceipt)
    assert again.verdicts is not None
    assert again.verdicts.tolist() == [2]
    await topic.close("")
    store.close()


async def test_open_works_while_the_store_is_down_and_a_failed_one_fences_nobody(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    log = FaultyLog(Storage(INCARNATION))
    snapshots = Snapshots(store, INCARNATION)
    topic = Topic(
        "t",
        log,
        store,
        snapshots,
        None,
        applied=Applied(deduplication_snapshot_interval_seconds=0),
        random_bytes=secrets.token_bytes,
    )
    await topic.recover()
    store.close()
    opening = asyncio.ensure_future(open_sessions(topic, ["p"], None))
    await asyncio.sleep(0)
    log.settle()
    epoch = (await opening).epochs[0]
    # A resume of a durable epoch writes nothing.
    assert (await open_sessions(topic, ["p"], [epoch])).epochs == [epoch]
    assert log.in_flight == 0

    opening = asyncio.ensure_future(open_sessions(topic, ["p"], None))
    await asyncio.sleep(0)
    answers: list[FrameReceipt | Refusal] = []
    frame = batch([("p", 1)], epochs={"p": epoch}).encode()
    topic.admit(frame, 1, answers.append, NumbersCache())
    # Not decided yet: the client comes again.
    assert isinstance(answers[0], Refusal)
    assert (answers[0].error.reason, answers[0].error.retry_delay_ms > 0) == ("RECOVERING", True)
    resuming = asyncio.ensure_future(open_sessions(topic, ["p"], [epoch]))
    await asyncio.sleep(0)
    assert not resuming.done()
    log.refuse()
    with pytest.raises(UnavailableError, match="no room"):
        await opening
    with pytest.raises(UnavailableError):
        await resuming
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while topic.state is not State.SERVING:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert (await open_sessions(topic, ["p"], [epoch])).refusals == {}
    topic.admit(frame, 1, answers.append, NumbersCache())
    log.settle()
    assert isinstance(answers[1], FrameReceipt)
    await topic.close("")


async def test_a_policy_that_fails_is_not_in_force(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    log = FaultyLog(Storage(INCARNATION))
    snapshots = Snapshots(store, INCARNATION)
    topic = Topic(
        "t",
        log,
        store,
        snapshots,
        None,
        applied=Applied(deduplication_snapshot_interval_seconds=0),
        random_bytes=secrets.token_bytes,
    )
    await topic.recover()
    setting = asyncio.ensure_future(topic.set_policy(Policy(deduplication_enabled=False)))
    await asyncio.sleep(0)
    assert topic.policy == Policy()
    log.refuse()
    with pytest.raises(UnavailableError, match="no room"):
        await setting
    assert topic.policy == Policy()
    await topic.close("")
    store.close()


def test_a_control_record_is_read_as_it_was_written() -> None:
    every = Policy(True, OverlapPolicy.PULSAR, 1, 0, -1, 2**31 - 1, GapPolicy.REJECT, 2**31 - 1, 2**31 - 1, 10_000)
    every = replace(
        every,
        deduplication_window_max_messages=2**62,
        deduplication_window_max_bytes=2**62,
        deduplication_window_max_minutes=2**31 - 1,
        cursors=(NamedCursor("c", Position(2, MessageId(5, 6), 7), "note", 3),),
    )
    assert None not in [getattr(every, name) for name in NAMES]
    by_id = replace(every, by_deduplication_id=True, route=DeduplicationRoute.KEY)
    for policy in (Policy(), Policy(deduplication_enabled=False), Policy(retention_time_in_minutes=-1), every, by_id):
        assert decode(encode(policy, term=3, record_id=9)) == (policy, 3)
    for persisted in (None, np.array([-1, 2**63 - 1])):
        change, term = decode(encode(ProducerSessions([b"a", "ü".encode()], np.array([1, 2**62]), persisted), term=2))
        assert isinstance(change, ProducerSessions)
        assert (change.names, change.epochs.tolist(), term) == ([b"a", "ü".encode()], [1, 2**62], 2)
        assert (change.persisted is None) == (persisted is None)
    change, term = decode(encode(Purge(["ü".encode(), b"b"]), term=4))
    assert isinstance(change, Purge)
    assert (change.names, term) == (["ü".encode(), b"b"], 4)


def test_a_control_record_of_another_kind_is_of_a_newer_format() -> None:
    with pytest.raises(DamagedError, match="NEWER_FORMAT"):
        decode(b"\xaa\x06\x00")


@pytest.mark.parametrize(("body", "reason"), [(b"\xaa\x06\x00", "NEWER_FORMAT"), (b"\x0a\x7f", "LOG_DAMAGED")])
async def test_a_control_record_that_cannot_be_read_is_named_by_its_place(body: bytes, reason: str) -> None:
    storage = Storage(1)
    storage.add_marker(1, b"t" * 16)
    storage.add_batch(*encoded_batch(0, 3))
    offset = sum(map(len, storage.records))
    storage.add_control(body)
    log = FaultyLog(storage)
    [entries] = [one async for one in log.replay(0)]
    where = f"the log {log.place}, at byte {offset} of a segment, before the message with index 3: "
    with pytest.raises(DamagedError, match=where) as caught:
        list(runs(entries.raw, entries.table, log.place))
    assert caught.value.reason == reason
