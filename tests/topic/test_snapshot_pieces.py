"""The window of a snapshot is written piece by piece, and counts as a whole: kills and failures at each piece.

About 12 s, one process.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rocksdict import WriteBatch

from seqdedupe.core import id_slots
from seqdedupe.core.id_runs import PIECE_BYTES
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.store import rocksdb
from seqdedupe.store import windows as stored_ids
from seqdedupe.store.db import Store
from seqdedupe.store.parts import IDS, part_key, part_number
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic import keeper
from tests.topic.test_by_id import INCARNATION, Place, originals
from tests.topic.test_window_runs import fail_a_sync

SMALL = 24
"""Bytes of a piece: some IDs of six."""
SOME = [b"id-%03d" % k for k in range(26)]

named_index = stored_ids.end_index
"""Up to where a snapshot names IDs, no matter what is planted."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_slots, "PIECE_BYTES", SMALL)


async def begun(store: Store, **policy: Any) -> Place:
    """A topic with a durable snapshot, and more that none has."""
    place = Place(store, **policy)
    await place.start()
    send(place, *SOME[:9])
    await place.topic.keeper.snapshot()
    send(place, *SOME[9:])
    return place


def send(place: Place, *ids: bytes) -> None:
    place.send(*ids)
    place.log.settle()


def pieces(store: Store) -> list[int]:
    """Where those that are stored begin."""
    keys = part_key(INCARNATION, IDS, 0), part_key(INCARNATION, IDS, 2**64 - 1)
    return [part_number(key) for key, _ in store.scan(*keys)]


async def all_is_known(place: Place) -> None:
    """After a start, from a snapshot and the log, and from a snapshot that has all of it. Nothing is left over then."""
    await place.crash(None)
    stored = place.stored()
    assert originals(place, place.send(*stored)) == dict(enumerate(range(len(stored))))
    send(place, b"another-%d" % len(stored))
    await place.topic.keeper.snapshot()
    await place.crash()
    stored = place.stored()
    assert originals(place, place.send(*stored)) == dict(enumerate(range(len(stored))))
    assert place.topic.window is not None
    named = named_index(place.store, INCARNATION)
    assert named == len(stored)
    assert all(index < named for index in pieces(place.store))


def only_so_many(writes: int) -> Callable[..., int]:
    """A store that fails after these."""
    real, left = Store.write, [writes]

    def write(self: Store, batch: WriteBatch, *more: Any) -> int:
        if left[0] <= 0:
            raise error("STORE_UNAVAILABLE", "the power is gone")
        left[0] -= 1
        return real(self, batch, *more)

    return write


async def at_each_write(store: Store, monkeypatch: pytest.MonkeyPatch, then: Callable[[Place], Awaitable[None]]) -> int:
    """A snapshot of which the store gets no write, one, two and so on; how many there are."""
    for writes in range(100):
        place = await begun(store)
        with monkeypatch.context() as patched:
            patched.setattr(Store, "write", only_so_many(writes))
            await place.topic.keeper.snapshot_in_background()
        is_whole = place.topic.keeper.snapshotter.failed == 0
        assert named_index(store, INCARNATION) == (26 if is_whole else 9)
        await then(place)
        await place.topic.close("")
        await store.flush(Snapshots(store, INCARNATION).remove())
        if is_whole:
            return writes
    raise AssertionError("it does not end")


async def test_a_kill_at_any_piece_leaves_nothing_that_counts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anyone who writes the next snapshot may cut otherwise."""

    async def then(place: Place) -> None:
        monkeypatch.setattr(id_slots, "PIECE_BYTES", SMALL + 17)
        await all_is_known(place)
        monkeypatch.setattr(id_slots, "PIECE_BYTES", SMALL)

    assert await at_each_write(store, monkeypatch, then) >= 5


async def test_a_store_that_fails_at_any_piece_has_all_in_the_next_snapshot(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def then(place: Place) -> None:
        monkeypatch.setattr(id_slots, "PIECE_BYTES", SMALL + 17)
        send(place, b"one more")
        await place.topic.keeper.snapshot()
        assert named_index(store, INCARNATION) == 27
        await place.crash(0)
        assert place.topic.counters.replayed == 0
        await all_is_known(place)
        monkeypatch.setattr(id_slots, "PIECE_BYTES", SMALL)

    assert await at_each_write(store, monkeypatch, then) >= 5


async def opened_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's sync fails; RocksDB is opened again, and has lost all pieces that no snapshot names."""
    await fail_a_sync(store, monkeypatch)
    lost = WriteBatch(raw_mode=True)
    named = named_index(store, INCARNATION)
    lost.delete_range(part_key(INCARNATION, IDS, named), part_key(INCARNATION, IDS, 2**64 - 1))
    store.write(lost)


async def _opened_again_meanwhile(store: Store, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    place = await begun(store)
    real, count = Store.wait_until_idle, [0]

    async def wait_until_idle(self: Store, *more: float) -> None:
        count[0] += 1
        if count[0] == after:
            await opened_again(store, monkeypatch)
        await real(self, *more)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "wait_until_idle", wait_until_idle)
        await place.topic.keeper.snapshot()
    assert count[0] > after
    assert named_index(store, INCARNATION) == 26
    await all_is_known(place)
    await place.topic.close("")


@pytest.mark.parametrize("after", [1, 4])
async def test_pieces_from_before_the_store_was_opened_again_do_not_count(
    store: Store, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    await _opened_again_meanwhile(store, monkeypatch, after)


async def test_control_what_was_written_before_counts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    end = [0]

    def written(self: stored_ids.WrittenPieces, piece: Any) -> None:
        self.end_index = end[0] = piece.end_index

    monkeypatch.setattr(stored_ids.WrittenPieces, "written", written)
    monkeypatch.setattr(stored_ids, "end_index", lambda *_: end[0])
    with pytest.raises((AssertionError, SeqdedupeError)):
        await _opened_again_meanwhile(store, monkeypatch, 4)


async def test_control_what_is_left_over_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stored_ids.WrittenPieces.__init__

    def init(self: stored_ids.WrittenPieces, *arguments: int) -> None:
        real(self, *arguments)
        self._has_left_over = False

    monkeypatch.setattr(stored_ids.WrittenPieces, "__init__", init)
    with pytest.raises((AssertionError, SeqdedupeError)):
        await test_a_kill_at_any_piece_leaves_nothing_that_counts(store, monkeypatch)


async def test_control_a_piece_that_is_named_was_not_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshots, "write_piece", lambda self, piece: self._pieces.written(piece))
    place = await begun(store)
    await place.topic.keeper.snapshot()
    with pytest.raises(SeqdedupeError, match="should be there") as raised:
        Snapshots(store, INCARNATION).load()
    assert raised.value.reason == "STORE_DAMAGED"
    await place.topic.close("")


# -- what comes and goes meanwhile -----------------------------------------------------------------------------------


@pytest.mark.parametrize("a_piece", [1, 7, 60])
async def test_what_is_forgotten_while_a_snapshot_is_written_is_not_missed(
    store: Store, monkeypatch: pytest.MonkeyPatch, a_piece: int
) -> None:
    """This many messages come with each piece: the window moves on in the snapshot, up to its end, and past it."""
    place = await begun(store, deduplication_window_max_messages=32)
    real, sent = Store.wait_until_idle, [0]

    async def wait_until_idle(self: Store, *more: float) -> None:
        for _ in range(a_piece):
            sent[0] += 1
            send(place, b"more-%d" % sent[0])
        await real(self, *more)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "wait_until_idle", wait_until_idle)
        await place.topic.keeper.snapshot()
    assert sent[0] >= a_piece
    before = place.topic.window
    await place.crash(None)
    assert place.topic.window is not None
    assert before is not None
    assert place.topic.window.first_index <= before.first_index
    end = len(place.stored())
    assert originals(place, place.send(*place.stored()[-32:])) == dict(enumerate(range(end - 32, end)))
    await place.topic.keeper.snapshot()
    assert min(pieces(store), default=0) >= min(place.topic.window.first_index, len(place.stored()))
    await place.topic.close("")


# -- a store that does not keep up -----------------------------------------------------------------------------------


async def test_a_store_that_stays_behind_has_the_snapshot_given_up_and_made_later(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not after the time for each piece: one was written when it began to wait."""
    place = await begun(store)
    topic = place.topic
    with monkeypatch.context() as patched:
        patched.setattr(keeper, "IDLE_SECONDS", 0.1)
        patched.setattr(rocksdb, "BEHIND_MEMTABLES", 0)
        await topic.keeper.snapshot_in_background()
        assert (topic.keeper.snapshotter.failed, named_index(store, INCARNATION)) == (1, 9)
        written = [index for index in pieces(store) if index >= 9]
        assert len(written) == 1
        assert "no snapshot of topic t: the store has not worked off in time" in caplog.text
    await topic.keeper.snapshot()
    assert (topic.keeper.snapshotter.failed, named_index(store, INCARNATION)) == (1, 26)
    assert written[0] in pieces(store)
    await all_is_known(place)
    await place.topic.close("")


async def test_a_drain_ends_although_the_store_stays_behind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a snapshot is being written when it begins; the next start finds all in the log."""
    place = await begun(store)
    with monkeypatch.context() as patched:
        patched.setattr(keeper, "IDLE_SECONDS", 0.1)
        patched.setattr(rocksdb, "BEHIND_MEMTABLES", 0)
        running = asyncio.ensure_future(place.topic.keeper.snapshot_in_background())
        while not any(index >= 9 for index in pieces(store)):  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0)
        await place.topic.drain()
        await running
    assert place.topic.keeper.snapshotter.failed == 2
    assert sum(index >= 9 for index in pieces(store)) == 2
    assert named_index(store, INCARNATION) == 9
    await place.crash(None)
    await all_is_known(place)
    await place.topic.close("")


async def _a_little_behind_at_each_piece(store: Store, monkeypatch: pytest.MonkeyPatch, wait_seconds: float) -> int:
    """A store that is behind for 20 ms at each of the pieces; how many of them were written."""
    place = await begun(store)
    asked = itertools.count(1)
    with monkeypatch.context() as patched:
        patched.setattr(keeper, "IDLE_SECONDS", wait_seconds)
        patched.setattr(rocksdb, "is_behind", lambda db: bool(next(asked) % 3))
        await place.topic.keeper.snapshot_in_background()
    await place.topic.close("")
    assert place.topic.keeper.snapshotter.failed == (named_index(store, INCARNATION) == 9)
    return sum(index >= 9 for index in pieces(store))


async def test_what_a_snapshot_waits_for_the_store_is_counted_over_all_pieces(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 1 <= await _a_little_behind_at_each_piece(store, monkeypatch, 0.045) <= 3
    assert named_index(store, INCARNATION) == 9


async def test_a_store_that_keeps_up_in_time_gets_the_whole_snapshot(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await _a_little_behind_at_each_piece(store, monkeypatch, 1000) >= 5
    assert named_index(store, INCARNATION) == 26


async def test_control_each_piece_waits_for_itself(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Store.wait_until_idle

    async def wait_until_idle(self: Store, at_most_seconds: float) -> None:
        with suppress(SeqdedupeError):
            await real(self, keeper.IDLE_SECONDS)

    monkeypatch.setattr(Store, "wait_until_idle", wait_until_idle)
    with pytest.raises(AssertionError):
        await test_what_a_snapshot_waits_for_the_store_is_counted_over_all_pieces(store, monkeypatch)


# -- how large the pieces are ----------------------------------------------------------------------------------------


async def test_pieces_are_small_and_others_are_served_between(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = await _turns_of_a_large_one(store, monkeypatch, PIECE_BYTES)
    assert max(size for size, _ in turns) <= PIECE_BYTES + 1024
    assert len(turns) > 20
    assert all(after > before for (_, before), (_, after) in itertools.pairwise(turns))


async def test_control_one_large_piece_is_seen(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = await _turns_of_a_large_one(store, monkeypatch, 1 << 20)
    assert max(size for size, _ in turns) > PIECE_BYTES + 1024


async def _turns_of_a_large_one(
    store: Store, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> list[tuple[int, int]]:
    """For each write of a snapshot its bytes, and how many turns others have had before it."""
    monkeypatch.setattr(id_slots, "PIECE_BYTES", piece_bytes)
    place = Place(store)
    await place.start()
    ids = [k.to_bytes(16, "big") for k in range(100_000)]
    for first in range(0, len(ids), 10_000):
        send(place, *ids[first : first + 10_000])
    turns, real = 0, Store.write
    writes: list[tuple[int, int]] = []

    def write(self: Store, batch: WriteBatch, *more: Any) -> int:
        writes.append((batch.size_in_bytes(), turns))
        return real(self, batch, *more)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others_run = asyncio.ensure_future(others())
    monkeypatch.setattr(Store, "write", write)
    await place.topic.keeper.snapshot()
    others_run.cancel()
    await place.topic.close("")
    return writes
