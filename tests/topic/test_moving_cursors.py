"""Named cursors in a topic's log: what a move writes, moves that come together, and records of all cursors at once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from seqdedupe.errors import SeqdedupeError
from seqdedupe.message_id import MessageId, Position
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic import control, operations
from seqdedupe.topic.control import CursorChange
from seqdedupe.topic.policy import MAX_CURSORS, Applied, NamedCursor, Policy
from seqdedupe.topic.topic import Topic, state_again
from tests.log.faulty import FaultyLog, Storage

INCARNATION = 5


def at(index: int) -> operations.CursorContent:
    return Position(7, MessageId(7, index), index, 1), "note"


def new_topic(store: Store, storage: Storage, *, automatic: bool = True) -> Topic:
    snapshots = Snapshots(store, INCARNATION)
    log = FaultyLog(storage, automatic=automatic)
    return Topic("t", log, store, snapshots, None, applied=Applied(), random_bytes=bytes)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store.open(tmp_path / "store")
    yield store
    store.close()


class Written(FaultyLog):
    """Remembers the control records that it was handed."""

    def __init__(self, storage: Storage, *, automatic: bool = True) -> None:
        super().__init__(storage, automatic=automatic)
        self.changes: list[control.Change] = []
        self.sizes: list[int] = []

    def append_control(self, body: bytes) -> None:
        self.changes.append(control.decode(body)[0])
        self.sizes.append(len(body))
        super().append_control(body)


@pytest.fixture
async def topic(store: Store) -> AsyncIterator[Topic]:
    snapshots = Snapshots(store, INCARNATION)
    log = Written(Storage(INCARNATION))
    topic = Topic("t", log, store, snapshots, None, applied=Applied(), random_bytes=bytes)
    await topic.recover()
    yield topic
    await topic.close("the test is over")


async def test_a_move_writes_one_cursor_however_many_there_are(topic: Topic) -> None:
    log = topic.log
    assert isinstance(log, Written)
    for k in range(MAX_CURSORS):
        await operations.move_cursor(topic, f"c{k}", None, at(k))
    assert max(log.sizes) < 2 * min(log.sizes)
    await operations.move_cursor(topic, "c3", at(3), at(4))
    assert log.changes[-1] == CursorChange("c3", NamedCursor("c3", *at(4)))
    await operations.hold_cursor(topic, "c3", 9)
    assert log.changes[-1] == CursorChange("c3", NamedCursor("c3", *at(4), 9))
    await operations.remove_cursor(topic, "c3")
    assert log.changes[-1] == CursorChange("c3", None)
    assert operations.kept_by_cursor(topic, "c3") is None
    assert len(topic.policy.cursors) == MAX_CURSORS - 1


async def test_a_move_to_where_it_stands_writes_nothing(topic: Topic) -> None:
    log = topic.log
    assert isinstance(log, Written)
    await operations.move_cursor(topic, "c", None, at(1))
    await operations.move_cursor(topic, "c", at(1), at(1))
    assert len(log.changes) == 1
    # It is compared all the same, and another note is another thing to keep.
    with pytest.raises(SeqdedupeError, match="CURSOR_MOVED"):
        await operations.move_cursor(topic, "c", at(2), at(1))
    await operations.move_cursor(topic, "c", at(1), (at(1)[0], "other"))
    assert len(log.changes) == 2


async def test_a_move_to_where_one_under_way_goes_waits_for_that(store: Store) -> None:
    topic = new_topic(store, Storage(INCARNATION), automatic=False)
    await topic.recover()
    log = topic.log
    assert isinstance(log, FaultyLog)
    first = asyncio.ensure_future(operations.move_cursor(topic, "c", None, at(1)))
    await asyncio.sleep(0)
    again = asyncio.ensure_future(operations.move_cursor(topic, "c", at(1), at(1)))
    await asyncio.sleep(0)
    assert not again.done()
    log.refuse()
    for move in (first, again):
        with pytest.raises(SeqdedupeError, match="LOG_REFUSED"):
            await move
    assert operations.kept_by_cursor(topic, "c") is None
    await topic.close("the test is over")


async def test_moves_that_come_together_are_one_commit_and_none_is_lost(store: Store) -> None:
    topic = new_topic(store, Storage(INCARNATION), automatic=False)
    await topic.recover()
    log = topic.log
    assert isinstance(log, FaultyLog)
    moves = [asyncio.ensure_future(operations.move_cursor(topic, f"c{k}", None, at(k))) for k in range(8)]
    moves.append(asyncio.ensure_future(topic.set_policy(Policy(deduplication_entries_interval=5))))
    await asyncio.sleep(0)
    # All of them are handed over before any is durable: the log writes and syncs what waits at once.
    assert log.in_flight == 9
    log.settle()
    await asyncio.gather(*moves)
    await topic.close("the test is over")


@pytest.mark.parametrize("begins_with_all", [False, True])
async def test_a_log_tells_them_again(store: Store, begins_with_all: bool) -> None:
    """Also one with records of all cursors at once, as earlier versions wrote at each move."""
    storage = Storage(INCARNATION)
    topic = new_topic(store, storage)
    await topic.recover()
    all_at_once = Policy(cursors=tuple(NamedCursor(f"c{k:02}", *at(k)) for k in range(MAX_CURSORS)))
    if begins_with_all:
        await topic.set_policy(all_at_once)
    else:
        for cursor in all_at_once.cursors:
            await operations.move_cursor(topic, cursor.name, None, (cursor.position, cursor.note))
    await operations.move_cursor(topic, "c05", at(5), at(50))
    await operations.remove_cursor(topic, "c06")
    await topic.set_policy(topic.newest_policy.with_values_of(Policy(deduplication_entries_interval=7)))
    await operations.move_cursor(topic, "c07", at(7), at(70))
    wanted = topic.policy
    assert [c.position.index for c in wanted.cursors[4:8]] == [4, 50, 70, 8]
    await topic.close("the test is over")
    again = new_topic(store, storage)
    await again.recover()
    assert again.policy == wanted
    # What retention says again is all of it, with what comes after.
    await state_again(again, again.confirmed_index + 1)
    moved = asyncio.ensure_future(operations.move_cursor(again, "c07", at(70), at(71)))
    await moved
    wanted = again.policy
    await again.close("the test is over")
    last = new_topic(store, storage)
    await last.recover()
    assert last.policy == wanted
    assert operations.kept_by_cursor(last, "c07") == at(71)
    await last.close("the test is over")
