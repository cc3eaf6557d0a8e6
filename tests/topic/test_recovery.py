"""What a topic does, and tells its readers, while it recovers from everything that its log does."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from seqdedupe.core.producers import Producers
from seqdedupe.errors import DamagedError, InvalidRequestError, PositionError, UnavailableError, error
from seqdedupe.format.layout import TERM
from seqdedupe.log.contract import Entries
from seqdedupe.message_id import Position
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.tasks import Broadcast
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import owner
from seqdedupe.topic.base import State
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal, check
from seqdedupe.topic.operations import open_sessions
from seqdedupe.topic.policy import Applied, NamedCursor, Policy
from seqdedupe.topic.readers import check_index, end_index, index_after, read_on
from seqdedupe.topic.topic import Topic, state_again, trim
from tests.batches import batch
from tests.log.faulty import FaultyLog, Storage

INCARNATION = 5


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "store")
    yield store
    store.close()


class TroubledLog(FaultyLog):
    """`trouble` is called before each replay, and may raise. What is certain is not known of what it holds."""

    @property
    def certain_index(self) -> int:
        return self.first_index

    trouble: Callable[[], None] = staticmethod(lambda: None)

    async def replay(self, from_index: int) -> AsyncGenerator[Entries, None]:
        self.trouble()
        async for entries in super().replay(from_index):
            yield entries


def make_topic(
    store: Store,
    log: FaultyLog,
    applied: Applied | None = None,
    random_bytes: Callable[[int], bytes] = bytes,
) -> Topic:
    snapshots = Snapshots(store, INCARNATION)
    return Topic(
        "persistent://public/default/t",
        log,
        store,
        snapshots,
        snapshots.load(),
        applied=applied or Applied(deduplication_snapshot_interval_seconds=0),
        random_bytes=random_bytes,
    )


async def publish(topic: Topic, *ids: int) -> list[FrameReceipt | Refusal]:
    """One frame each; their answers, as they come."""
    opening = asyncio.ensure_future(open_sessions(topic, ["p"], None))
    await asyncio.sleep(0)
    assert isinstance(topic.log, FaultyLog)
    topic.log.settle()
    opened = await opening
    answers: list[FrameReceipt | Refusal] = []
    link = opened.persisted[0]
    for sequence_id in ids:
        encoded = batch([("p", sequence_id)], epochs={"p": opened.epochs[0]}, links={"p": link}).encode()
        link = sequence_id
        topic.admit(encoded, sequence_id, answers.append, NumbersCache())
    return answers


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def filled(store: Store, rows: int) -> Storage:
    """A storage with this many messages, of which a snapshot covers all but the last."""
    storage = Storage(INCARNATION)
    log = FaultyLog(storage, automatic=True)
    topic = make_topic(store, log)
    await topic.recover()
    await publish(topic, *range(rows - 1))
    await topic.flight.all_of_now()
    await topic.keeper.snapshot()
    await publish(topic, rows - 1)
    await topic.flight.all_of_now()
    await topic.close("")
    return storage


@contextmanager
def recovering() -> Iterator[None]:
    with pytest.raises(UnavailableError) as caught:
        yield
    assert caught.value.reason == "RECOVERING"
    assert caught.value.retry_delay_ms > 0


async def test_nobody_says_where_a_topic_ends_before_it_has_read_up_to_its_own_marker(store: Store) -> None:
    storage = await filled(store, 5)
    log = TroubledLog(storage, automatic=True)
    log.opening_allowed.clear()
    topic = make_topic(store, log)
    recovery = asyncio.ensure_future(topic.recover())
    await asyncio.sleep(0)
    good, last = [Position(INCARNATION, storage.message_id(index), index) for index in (4, 3)]
    assert await index_after(topic, last) == 4
    await check_index(topic, 4)
    with recovering():
        end_index(topic)
    with recovering():
        await check_index(topic, 5)
    with recovering():
        await index_after(topic, good)
    with pytest.raises(UnavailableError):
        await topic.keeper.snapshot()
    # A follower waits where what is certain ends.
    pages = read_on(topic, 2, None)
    assert (await anext(pages)).next_index == 4
    following = asyncio.ensure_future(anext(pages))
    await asyncio.sleep(0)
    assert not following.done()
    log.opening_allowed.set()
    await recovery
    assert (await following).next_index == 5
    assert end_index(topic) == 5
    assert await index_after(topic, good) == 5
    with pytest.raises(PositionError, match="POSITION_AFTER_END"):
        await check_index(topic, 6)
    await topic.close("")


@pytest.mark.parametrize("is_shared", [False, True])
async def test_a_running_topic_that_settles_is_read_as_ever(store: Store, is_shared: bool) -> None:
    """Only where another process may have the log by now is the end unknown."""
    log = FaultyLog(Storage(INCARNATION))
    log.replays_what_is_certain = is_shared
    topic = make_topic(store, log)
    await topic.recover()
    await publish(topic, 1, 2, 3)
    log.settle(1)
    log.opening_allowed.clear()
    log.unknown(lands=1)
    await asyncio.sleep(0)
    assert topic.state is State.RECOVERING
    assert topic.readable_index >= 1
    await check_index(topic, 1)
    if is_shared:
        for index in (3, 4):
            with recovering():
                await check_index(topic, index)
        with recovering():
            end_index(topic)
        # It is recovering already.
        await topic.recover()
    else:
        assert end_index(topic) == 1
        asked = [asyncio.ensure_future(check_index(topic, index)) for index in (2, 3)]
        await asyncio.sleep(0)
        assert not any(one.done() for one in asked)
    log.opening_allowed.set()
    await until(lambda: topic.state is State.SERVING)
    assert log.opened == 2
    assert end_index(topic) == 2
    if not is_shared:
        await asked[0]
        with pytest.raises(PositionError, match="POSITION_AFTER_END"):
            await asked[1]
    await topic.close("")


async def test_a_frame_found_in_the_log_is_answered_with_where_it_stands(store: Store) -> None:
    storage = Storage(INCARNATION)
    log = FaultyLog(storage)
    topic = make_topic(store, log)
    await topic.recover()
    answers = await publish(topic, 1)
    # Another owner has put something before it meanwhile.
    others = Producers()
    others.add(b"q")
    frame = check(batch([("q", 1), ("q", 2)]).encode(), others, NumbersCache())
    storage.add_batch(frame.encoded, frame.rows, frame.column_bytes)
    log.unknown(lands=1)
    await until(lambda: bool(answers))
    assert isinstance(answers[0], FrameReceipt)
    assert answers[0].first_index == 2
    await topic.close("")


@pytest.mark.parametrize("takes_higher_terms_only", [False, True])
async def test_after_an_owner_of_a_higher_term_a_still_higher_one_is_taken(
    store: Store, takes_higher_terms_only: bool
) -> None:
    storage = Storage(INCARNATION)
    log = FaultyLog(storage, takes_higher_terms_only=takes_higher_terms_only)
    topic = make_topic(store, log)
    await topic.recover()
    answers = await publish(topic, 1, 2)
    log.fence(term=9, lands=1)
    await until(lambda: topic.state is State.SERVING)
    assert (topic.term, storage.term) == (10, 10)
    assert [type(answer) for answer in answers] == [FrameReceipt, Refusal]
    markers = sum(storage.places(record)[TERM] > 0 for record in storage.records)
    assert markers == (3 if takes_higher_terms_only else 4)
    answers = await publish(topic, 3)
    log.settle()
    assert [type(answer) for answer in answers] == [FrameReceipt]
    assert end_index(topic) == 2
    await topic.close("")


async def test_a_log_that_refuses_again_and_again_is_opened_ever_more_seldom(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a marker and no message, as a disk with a little room left: the topic says READ_ONLY meanwhile."""
    monkeypatch.setattr(owner, "FIRST_REST_SECONDS", 3600.0)
    monkeypatch.setattr(owner, "LONGEST_REST_SECONDS", 3600.0)
    log = FaultyLog(Storage(INCARNATION))
    topic = make_topic(store, log)
    await topic.recover()
    for sequence_id in (1, 2):
        # Whenever it has taken a message, it is opened again at once.
        await publish(topic, sequence_id)
        log.settle()
        await publish(topic, 10 + sequence_id)
        log.refuse()
        await until(lambda: topic.state is State.SERVING)
    opened, term = log.opened, topic.term
    answers = await publish(topic, 20)
    log.refuse()
    for _ in range(100):
        await asyncio.sleep(0)
        assert topic.state is State.READ_ONLY
    assert [answer.error.reason for answer in answers if isinstance(answer, Refusal)] == ["LOG_REFUSED"]
    assert (log.opened, topic.term) == (opened, term)
    await topic.close("")


async def test_what_the_log_cannot_take_is_refused_and_changes_nothing(store: Store) -> None:
    log = FaultyLog(Storage(INCARNATION))
    topic = make_topic(store, log)
    await topic.recover()
    log.max_batch_bytes = 20
    (answer,) = await publish(topic, 1)
    assert isinstance(answer, Refusal)
    assert answer.error.reason == "MESSAGE_TOO_LARGE"
    assert log.in_flight == 0
    log.max_batch_bytes = 1000
    answers = await publish(topic, 1)
    log.settle()
    assert [type(answer) for answer in answers] == [FrameReceipt]
    assert end_index(topic) == 1
    await topic.close("")


class SmallLog(FaultyLog):
    """Takes control records of some bytes alone, as a broker that takes no larger entries."""

    def append_control(self, body: bytes) -> None:
        if len(body) > 100:
            raise error("MESSAGE_TOO_LARGE", f"an entry of {len(body)} bytes is larger than 100")
        super().append_control(body)


async def test_a_change_that_the_log_cannot_take_is_refused_and_changes_nothing(store: Store) -> None:
    log = SmallLog(Storage(INCARNATION))
    topic = make_topic(store, log)
    await topic.recover()
    answers = await publish(topic, 1)
    with pytest.raises(InvalidRequestError, match="MESSAGE_TOO_LARGE"):
        await topic.set_policy(Policy(cursors=(NamedCursor("c", Position.start(5), 100 * "x"),)))
    assert topic.state is State.SERVING, topic.why
    assert log.opened == 1
    assert topic.newest_policy == Policy()
    later = await publish(topic, 2)
    log.settle()
    assert [type(answer) for answer in answers + later] == [FrameReceipt, FrameReceipt]
    await topic.close("")


async def test_sessions_that_the_log_cannot_take_fence_nobody(store: Store) -> None:
    log = SmallLog(Storage(INCARNATION), automatic=True)
    topic = make_topic(store, log)
    await topic.recover()
    opened = await open_sessions(topic, ["p"], None)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="MESSAGE_TOO_LARGE"):
            await open_sessions(topic, ["p", 100 * "q"], None)
        await until(lambda: topic.state is State.SERVING)
    resumed = await open_sessions(topic, ["p"], opened.epochs)
    assert not resumed.refusals
    await topic.close("")


async def test_drain_of_a_topic_that_cannot_be_written_takes_no_snapshot(store: Store) -> None:
    storage = await filled(store, 5)
    log = TroubledLog(storage)
    log.refuse_opens(1000)
    topic = make_topic(store, log)
    await topic.recover()
    assert topic.state is State.READ_ONLY
    assert topic.readable_index == 4
    await topic.drain()
    loaded = Snapshots(store, INCARNATION).load()
    assert loaded is not None
    assert loaded.next_index == 4


@pytest.mark.parametrize("trouble", [OSError(24, "too many open files"), OSError(5, "input/output"), RuntimeError("?")])
async def test_recovery_survives_whatever_is_no_damage(store: Store, trouble: Exception) -> None:
    log = TroubledLog(await filled(store, 5), automatic=True)
    left = 3

    def fail() -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise trouble

    log.trouble = fail
    topic = make_topic(store, log)
    await topic.recover()
    assert topic.state is State.RECOVERING
    with recovering():
        topic.check_serving()
    await until(lambda: topic.state is State.SERVING)
    assert topic.confirmed_index == 5
    await topic.close("")


@pytest.mark.parametrize("times", [1, 2])
async def test_damage_is_looked_at_twice(store: Store, times: int) -> None:
    log = TroubledLog(await filled(store, 5), automatic=True)
    left = times

    def fail() -> None:
        nonlocal left
        left -= 1
        if left >= 0:
            raise error("LOG_DAMAGED", "it looks bad")

    log.trouble = fail
    topic = make_topic(store, log)
    await topic.recover()
    waiting = asyncio.ensure_future(anext(read_on(topic, 4, None)))
    await until(lambda: topic.state in (State.SERVING, State.DAMAGED))
    if times == 1:
        assert topic.state is State.SERVING
        assert (await waiting).next_index == 5
    else:
        assert topic.state is State.DAMAGED
        assert "it looks bad" in topic.why
        # Nobody waits for it, and what is certain is read.
        for call in (topic.check_serving, lambda: end_index(topic)):
            with pytest.raises(DamagedError, match="it looks bad"):
                call()
        with pytest.raises(DamagedError):
            await waiting
        await check_index(topic, 3)
    await topic.close("")


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    news = Broadcast()
    for _ in range(3):
        waiting = asyncio.ensure_future(news.wait())
        await asyncio.sleep(0)
        assert len(news) == 1
        waiting.cancel()
        await asyncio.wait([waiting])
        assert len(news) == 0


async def test_snapshots_are_taken_by_time_and_by_entries(store: Store) -> None:
    topic = make_topic(
        store,
        FaultyLog(Storage(INCARNATION), automatic=True),
        Applied(deduplication_entries_interval=3, deduplication_snapshot_interval_seconds=0.02),
    )
    await topic.recover()
    await publish(topic, 1)
    await until(lambda: topic.keeper.snapshot_index == 1)
    await publish(topic, 2, 3, 4)
    await until(lambda: topic.keeper.snapshot_index == 4)
    await topic.close("")


@pytest.mark.parametrize(
    "by", [{"deduplication_entries_interval": 3}, {"deduplication_snapshot_interval_seconds": 0.02}]
)
async def test_what_was_replayed_counts_towards_the_next_snapshot(store: Store, by: dict[str, Any]) -> None:
    """Else a topic that dies again and again before it takes one would read more each time."""
    storage = Storage(INCARNATION)
    topic = make_topic(store, FaultyLog(storage, automatic=True))
    await topic.recover()
    await publish(topic, 1)
    await topic.flight.all_of_now()
    await topic.close("")
    applied = {"deduplication_entries_interval": 1000, "deduplication_snapshot_interval_seconds": 0} | by
    topic = make_topic(store, FaultyLog(storage, automatic=True), Applied(**applied))
    await topic.recover()
    if "deduplication_entries_interval" in by:
        # One for the session, and one for the message; the third is another session.
        assert topic.keeper.snapshot_index == 0
        await open_sessions(topic, ["p"], None)
    await until(lambda: topic.keeper.snapshot_index == 1)
    await topic.close("")


async def test_a_snapshot_that_fails_says_of_which_topic(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic = make_topic(
        store,
        FaultyLog(Storage(INCARNATION), automatic=True),
        Applied(deduplication_entries_interval=1, deduplication_snapshot_interval_seconds=0),
    )
    await topic.recover()

    async def fails(*_: Any) -> None:
        raise error("STORE_UNAVAILABLE", "the store is tired")

    with monkeypatch.context() as patch:
        patch.setattr(Snapshots, "compact_if_due", fails)
        await publish(topic, 1)
        await until(lambda: "not compacted" in caplog.text)
        patch.setattr(Store, "flush", fails)
        await publish(topic, 2)
        await until(lambda: topic.keeper.snapshotter.failed > 0)
        await topic.keeper.snapshotter.finish()
        await asyncio.sleep(0)
    assert f"snapshots of topic {topic.name} were not compacted: the store is tired" in caplog.text
    assert f"no snapshot of topic {topic.name}: the store is tired" in caplog.text
    await topic.close("")


async def grown(store: Store, storage: Storage, *ids: int, snapshot: bool = False) -> None:
    """These messages are published by a new owner."""
    topic = make_topic(store, FaultyLog(storage, automatic=True), random_bytes=os.urandom)
    await topic.recover()
    await publish(topic, *ids)
    await topic.flight.all_of_now()
    if snapshot:
        await topic.keeper.snapshot()
    await topic.close("")


@pytest.mark.parametrize("restored", [True, False])
async def test_a_log_that_grew_again_from_an_older_copy_is_not_the_snapshots(
    store: Store, tmp_path: Path, restored: bool
) -> None:
    """It is long enough, and has the same message IDs. The control arm keeps the log that the snapshot is of."""
    storage = Storage(INCARNATION)
    await grown(store, storage, 0, 1)
    copy = deepcopy(storage)
    await grown(store, storage, 2, 3, snapshot=True)
    await grown(store, storage, 4)
    if restored:
        elsewhere = Store.open(tmp_path / "elsewhere")
        await grown(elsewhere, copy, 2, 3, 4)
        elsewhere.close()
        storage = copy
    log = FaultyLog(storage, automatic=True)
    topic = make_topic(store, log, random_bytes=os.urandom)
    await topic.recover()
    await until(lambda: topic.state is not State.RECOVERING or topic.damage is not None)
    if restored:
        assert topic.state is State.DAMAGED
        assert "another history than the snapshot" in topic.why
    else:
        assert topic.state is State.SERVING
        assert topic.last_position.ownership == (await log.locate(4)).ownership
    await topic.close("")


async def test_retention_of_a_read_only_topic_drops_what_is_stated_later(store: Store) -> None:
    """A full disk needs that something goes. What would have to be said again stays, for that takes an append."""
    log = FaultyLog(Storage(INCARNATION), automatic=True, retention=True)
    topic = make_topic(store, log)
    await topic.recover()
    for sequence_id in range(10):
        await publish(topic, sequence_id)
    await until(lambda: topic.confirmed_index == 10)
    await state_again(topic, topic.confirmed_index)
    stated = topic.policy_stated
    for sequence_id in range(10, 20):
        await publish(topic, sequence_id)
    await until(lambda: topic.confirmed_index == 20)
    log.automatic = False
    log.opening_allowed.clear()
    await publish(topic, 20)
    log.refuse()
    await until(lambda: topic.state is State.READ_ONLY)
    await topic.keeper.snapshot_in_background()
    records = len(log.storage.records)
    await trim(topic)
    assert 0 < stated == log.storage.first_index
    assert len(log.storage.records) < records
    await topic.close("")
