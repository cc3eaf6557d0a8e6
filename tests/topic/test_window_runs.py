"""A topic of deduplication IDs with memory for a few of them: runs are built, named, merged and dropped all the time.

About 25 s, one process.
"""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rocksdict import WriteBatch

from seqdedupe.core.id_window import Older
from seqdedupe.core.rule import DUP
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.store import rocksdb
from seqdedupe.store import windows as stored_ids
from seqdedupe.store import windows as stored_runs
from seqdedupe.store.db import Store
from seqdedupe.store.parts import RUN, part_key
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import window_runs
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.topic import Topic
from seqdedupe.topic.window_runs import WindowMemory, WindowRuns
from seqdedupe.transfer import stored_records
from tests.store.test_failure import until_open
from tests.topic.test_by_id import INCARNATION, Place, frame, history, originals, receipt, verdicts

MEMORY_BYTES = 8 * 1024 + 100
"""The smallest table, and a few IDs."""


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_runs, "MAX_RUNS", 2)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "store")
    yield store
    store.close()


class SmallPlace(Place):
    """Its windows have memory for a few IDs."""

    def __init__(self, store: Store, memory_bytes: int = MEMORY_BYTES, **policy: Any) -> None:
        super().__init__(store, **policy)
        self.memory = WindowMemory(memory_bytes)
        self.random = random.Random(7)

    def opened(self, snapshots: Snapshots) -> Topic:
        loaded = snapshots.load()
        if loaded is not None and loaded.window is not None and snapshots.has_left_over(loaded.window):
            snapshots.drop_left_over(loaded.window)
        return self.topic_of(snapshots, loaded, window_memory=self.memory)

    async def go_on(self) -> None:
        """Something moves to runs, now and then until all has, and frames come meanwhile."""
        await super().go_on()
        if self.random.random() < 0.4 and self.topic.window is not None:
            self.memory.measure(self.topic.ids.runs, self.topic.window)
        if self.memory._moving is not None and self.random.random() < 0.4:
            await asyncio.wait({self.memory._moving})

    async def store_each(self, *ids: bytes) -> None:
        for one in ids:
            answers = self.send(one)
            self.log.settle()
            assert receipt(answers).verdicts is None

    async def to_a_run(self) -> None:
        """All that is in the log lies in runs."""
        while await self.topic.ids.runs.move_out():
            while await self.topic.ids.runs.merge():
                pass

    def run_keys(self) -> list[bytes]:
        first, end = part_key(INCARNATION, RUN, 0), part_key(INCARNATION, RUN, 2**64 - 1)
        return [key for key, _ in self.store.scan(first, end)]

    def run_numbers(self) -> set[int]:
        return {int.from_bytes(key[-8:-4], "big") for key in self.run_keys()}


@pytest.fixture
async def place(store: Store) -> Any:
    place = SmallPlace(store, 10**9)
    await place.start()
    yield place
    await place.topic.close("")


def window_of(place: Place) -> Any:
    assert place.topic.window is not None
    return place.topic.window


async def test_copies_of_what_lies_in_runs_are_known_over_restarts(place: SmallPlace) -> None:
    ids = [b"a", b"a\0", bytes(16), b"x" * 255, b"id-1"]
    await place.store_each(*ids)
    await place.to_a_run()
    assert window_of(place).on_disk == 5
    assert originals(place, place.send(*ids)) == dict(enumerate(range(5)))
    await place.crash()
    assert window_of(place).on_disk == 5
    assert originals(place, place.send(*reversed(ids))) == dict(enumerate(reversed(range(5))))
    again = place.send(b"a\0\0", b"x" * 254)
    place.log.settle()
    assert receipt(again).verdicts is None


async def test_runs_are_merged_and_dropped_as_the_window_moves(store: Store) -> None:
    place = SmallPlace(store, 10**9, deduplication_window_max_messages=64)
    await place.start()
    for k in range(400):
        await place.store_each(b"%d" % k)
        if k % 5 == 0:
            await place.to_a_run()
    window = window_of(place)
    assert len(window.older.runs) <= 2
    assert window.older.next_number > 20
    assert place.run_numbers() == set(window.older.numbers)
    assert 64 <= len(window) <= 69
    first = window.first_index + 5
    assert verdicts(place.send(b"%d" % first, b"399")) == [DUP, DUP]
    forgotten = place.send(b"%d" % (first - 10))
    place.log.settle()
    assert receipt(forgotten).verdicts is None
    await place.topic.close("")


async def test_a_look_up_beside_the_loop_is_of_the_runs_at_the_decision(place: SmallPlace) -> None:
    """What is looked up in memory's stead, and moves to a run before the decision, is looked up again."""
    await place.store_each(b"a")
    await place.to_a_run()
    await place.store_each(b"b")
    looked_up = await place.topic.ids.look_up(frame(b"b"))
    await place.to_a_run()
    answers: list[FrameReceipt | Refusal] = []
    place.topic.admit(frame(b"b"), 1, answers.append, NumbersCache(), looked_up=looked_up)
    assert verdicts(answers) == [DUP]


async def test_runs_that_go_while_they_are_read_are_looked_up_again(
    place: SmallPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.store_each(b"a", b"b", b"c")
    await place.to_a_run()
    real = stored_runs.read_pages
    loop = asyncio.get_running_loop()

    def read_pages(*arguments: Any) -> Any:
        monkeypatch.setattr(window_runs, "read_pages", real)
        asyncio.run_coroutine_threadsafe(merged(), loop).result(LAST_RESORT_SECONDS)
        return real(*arguments)

    async def merged() -> None:
        monkeypatch.setattr(window_runs, "MAX_RUNS", 0)
        await place.store_each(b"d")
        await place.to_a_run()

    monkeypatch.setattr(window_runs, "read_pages", read_pages)
    looked_up = await place.topic.ids.look_up(frame(b"a", b"d", b"new"))
    assert looked_up is not None
    assert looked_up.indexes.tolist() == [0, 3, -1]
    assert looked_up.generation == window_of(place).older.generation


async def test_what_cannot_be_read_is_an_error_and_nothing_is_stored(
    place: SmallPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.store_each(b"a")
    await place.to_a_run()

    def cannot(*_: Any) -> Any:
        raise error("STORE_UNAVAILABLE", "the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "get", cannot)
        assert await place.topic.ids.look_up(frame(b"a")) is None
        (answer,) = place.send(b"a")
        assert isinstance(answer, Refusal)
        assert answer.error.reason == "STORE_UNAVAILABLE"
    assert verdicts(place.send(b"a")) == [DUP]
    assert place.stored() == [b"a"]


@pytest.mark.parametrize("damage", ["page", "head", "index", "a byte"])
async def test_a_run_that_is_damaged_is_an_error(place: SmallPlace, store: Store, damage: str) -> None:
    await place.store_each(b"a", b"b")
    await place.to_a_run()
    head, index, page = place.run_keys()
    change = WriteBatch(raw_mode=True)
    key = {"page": page, "head": head, "index": index, "a byte": page}[damage]
    change.delete(key)
    if damage == "a byte":
        [value] = [value for _, value in store.scan(page, page + b"\0")]
        change.put(page, value[:-1] + bytes([value[-1] ^ 1]))
    store.write(change)
    if damage in ("head", "index"):
        with pytest.raises(SeqdedupeError, match=r"missing|do not fit") as raised:
            Snapshots(store, INCARNATION).load()
        assert raised.value.reason == "STORE_DAMAGED"
    else:
        (answer,) = place.send(b"a")
        assert isinstance(answer, Refusal)
        assert answer.error.reason == "STORE_DAMAGED"
        assert place.stored() == [b"a", b"b"]


async def test_what_no_snapshot_names_goes_at_the_next_start(place: SmallPlace, store: Store) -> None:
    await place.store_each(b"a")
    await place.to_a_run()
    named = place.run_keys()
    left = WriteBatch(raw_mode=True)
    for number in (0, 2, 3, 70):
        left.put(stored_runs.run_key(INCARNATION, number, 5), b"left")
    store.write(left)
    await place.crash()
    assert place.run_keys() == named
    assert verdicts(place.send(b"a")) == [DUP]


async def test_a_deleted_topic_leaves_no_run(place: SmallPlace, store: Store) -> None:
    await place.store_each(b"a")
    await place.to_a_run()
    assert place.run_keys()
    await store.remove_topic(INCARNATION)
    assert not place.run_keys()


async def test_another_store_gets_the_whole_window(place: SmallPlace, tmp_path: Path) -> None:
    """As where the number of workers changes, and in a backup."""
    await place.store_each(b"a", b"b")
    await place.to_a_run()
    await place.store_each(b"c")
    await place.topic.keeper.snapshot()
    loaded = Snapshots(place.store, INCARNATION).load()
    assert loaded is not None
    other = Store.open(tmp_path / "other")
    await other.flush(await Snapshots(other, INCARNATION).write_anew(loaded.whole()))
    await stored_records.copy(place.store, other, INCARNATION)
    await place.topic.close("")
    place.store, place.log = other, place.log.crash(0)
    await place.start()
    assert window_of(place).on_disk == 2
    assert originals(place, place.send(b"c", b"b", b"a")) == {0: 2, 1: 1, 2: 0}
    await place.topic.close("")
    other.close()


async def test_the_largest_window_gives_way(store: Store) -> None:
    """Two topics share the memory; the table of one that has moved out is made smaller."""
    place = SmallPlace(store, 600_000)
    await place.start()
    ids = [b"%d" % k for k in range(20_000)]
    for first in range(0, len(ids), 1000):
        place.send(*ids[first : first + 1000])
        place.log.settle()
    window = window_of(place)
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        await place.topic.keeper.snapshot()
        while place.memory._moving is not None:
            await asyncio.wait({place.memory._moving})
        assert window.needed_bytes <= 600_000
    assert window.on_disk > 5_000
    looked_up = await place.topic.ids.look_up(frame(*ids[:1000]))
    assert looked_up is not None
    assert looked_up.indexes.tolist() == list(range(1000))
    await place.topic.close("")
    assert not place.memory._bytes


@pytest.mark.parametrize("is_on_disk", [False, True])
async def test_a_window_counts_from_its_start_on_though_nothing_comes(store: Store, is_on_disk: bool) -> None:
    place = SmallPlace(store, 10**9)
    await place.start()
    await place.store_each(*[b"id-%d" % k for k in range(200)])
    if is_on_disk:
        await place.to_a_run()
    await place.topic.keeper.snapshot()
    await place.crash()
    assert place.memory._bytes == {place.topic.ids.runs: window_of(place).needed_bytes}
    await place.topic.close("")


async def test_a_smaller_limit_is_in_force_from_the_start_on(store: Store) -> None:
    place = SmallPlace(store, 10**9)
    await place.start()
    await place.store_each(*[b"id-%d" % k for k in range(200)])
    await place.topic.keeper.snapshot()
    place.memory.limit_bytes = 1
    await place.crash()
    while place.memory._moving is not None:
        await asyncio.wait({place.memory._moving})
    assert window_of(place).on_disk == 200
    await place.topic.close("")


async def test_a_topic_that_takes_no_snapshot_holds_up_no_other(store: Store, tmp_path: Path) -> None:
    """It may be recovering, on standby or damaged, and have the largest window."""
    place = SmallPlace(store, 10**9)
    await place.start()
    elsewhere = Store.open(tmp_path / "elsewhere")
    other = SmallPlace(elsewhere, 10**9)
    other.memory = place.memory
    await other.start()
    await other.store_each(*[b"id-%d" % k for k in range(200)])
    await place.store_each(*[b"id-%d" % k for k in range(20)])
    other.memory.measure(other.topic.ids.runs, window_of(other))
    other.topic.knows_its_end = False
    place.memory.limit_bytes = 1
    await _all_moved(place)
    assert window_of(place).on_disk == 20
    assert not window_of(other).on_disk
    other.topic.knows_its_end = True
    await _all_moved(other)
    assert window_of(other).on_disk == 200
    await other.topic.close("")
    await place.topic.close("")
    elsewhere.close()


async def test_runs_beside_a_damaged_one_are_merged(place: SmallPlace, store: Store) -> None:
    await place.store_each(b"id-0")
    await place.to_a_run()
    (page,) = place.run_keys()[2:]
    change = WriteBatch(raw_mode=True)
    change.delete(page)
    store.write(change)
    place.memory.limit_bytes = 1
    for k in range(1, 41, 4):
        await place.store_each(*[b"id-%d" % (k + j) for j in range(4)])
        await _all_moved(place)
    assert window_of(place).on_disk == 41
    assert len(window_of(place).older.runs) <= 3
    assert verdicts(place.send(b"id-1", b"id-40")) == [DUP] * 2
    (refusal,) = place.send(b"id-0")
    assert isinstance(refusal, Refusal)


async def fail_a_sync(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's flush fails, and RocksDB is opened again: what was not durable may be lost."""

    def cannot(_: Any) -> int:
        raise OSError(5, "Input/output error")

    before = store.opening
    with monkeypatch.context() as patched:
        patched.setattr(rocksdb, "sync", cannot)
        with pytest.raises(SeqdedupeError):
            await store.flush(before)
    await until_open(store)
    assert store.opening == before + 1


async def test_a_run_that_began_before_the_store_was_opened_again_does_not_count(
    place: SmallPlace, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.store_each(b"a", b"b")
    real = stored_runs.RunWriter.finish

    async def finish(*arguments: Any) -> Any:
        await fail_a_sync(store, monkeypatch)
        return await real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(stored_runs.RunWriter, "finish", finish)
        with pytest.raises(SeqdedupeError) as raised:
            await place.topic.ids.runs.move_out()
    assert raised.value.reason == "STORE_UNAVAILABLE"
    assert not window_of(place).on_disk
    await place.to_a_run()
    assert window_of(place).on_disk == 2
    assert verdicts(place.send(b"a", b"b")) == [DUP] * 2


async def test_a_copy_that_began_before_the_store_was_opened_again_does_not_count(
    place: SmallPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.store_each(b"a", b"b")
    await place.to_a_run()
    other = Store.open(tmp_path / "other")
    monkeypatch.setattr(stored_records, "BATCH_BYTES", 1)
    real = Store.write_when_idle
    writes = 0

    async def write(self: Store, batch: WriteBatch) -> int:
        nonlocal writes
        writes += 1
        if writes == 3:
            await fail_a_sync(other, monkeypatch)
        return await real(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "write_when_idle", write)
        with pytest.raises(SeqdedupeError) as raised:
            await stored_records.copy(place.store, other, INCARNATION)
    assert raised.value.reason == "STORE_UNAVAILABLE"
    assert writes > 3
    other.close()


# -- the end of a topic ----------------------------------------------------------------------------------------------


async def _close_in_a_snapshot(place: SmallPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The topic is closed while a snapshot is being made durable."""
    gate, reached = asyncio.Event(), asyncio.Event()
    real = Store.flush

    async def flush(self: Store, opening: int) -> None:
        reached.set()
        await gate.wait()
        await real(self, opening)

    with monkeypatch.context() as patched:
        patched.setattr(Store, "flush", flush)
        taking = asyncio.ensure_future(place.topic.keeper.snapshot())
        await reached.wait()
        closing = asyncio.ensure_future(place.topic.close("it is opened again"))
        while not place.topic.ids.runs.is_closed:  # noqa: ASYNC110
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(taking, closing)


async def test_a_closed_topic_does_not_count_and_does_not_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    place = SmallPlace(store, 10**9)
    await place.start()
    await place.store_each(*[b"id-%d" % k for k in range(20)])
    await _close_in_a_snapshot(place, monkeypatch)
    assert not place.memory._bytes
    place.memory.limit_bytes = 1
    place.memory.measure(place.topic.ids.runs, window_of(place))
    assert not place.memory._bytes
    assert place.memory._moving is None
    for build in (place.topic.ids.runs.move_out, place.topic.ids.runs.merge):
        with pytest.raises(SeqdedupeError) as raised:
            await build()
        assert raised.value.reason == "DRAINING"
    assert not place.run_keys()


@pytest.mark.parametrize("is_merge", [False, True])
@pytest.mark.parametrize("step", ["_ordered", "_filled", "_described"])
async def test_a_topic_that_is_closed_while_a_run_is_built_writes_nothing_more(
    store: Store, monkeypatch: pytest.MonkeyPatch, step: str, is_merge: bool
) -> None:
    await _close_while_a_run_is_built(store, monkeypatch, step, is_merge=is_merge)


async def test_control_one_that_goes_on_is_found(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowRuns, "check_open", lambda self: None)
    with pytest.raises(AssertionError):
        await _close_while_a_run_is_built(store, monkeypatch, "_filled", is_merge=False)


async def _close_while_a_run_is_built(
    store: Store, monkeypatch: pytest.MonkeyPatch, step: str, *, is_merge: bool
) -> None:
    place = SmallPlace(store, 10**9)
    await place.start()
    for k in range(12):
        await place.store_each(b"id-%d" % k)
        if is_merge and k % 4 == 3:
            await place.topic.ids.runs.move_out()
    closed = threading.Event()
    reached = asyncio.Event()
    loop = asyncio.get_running_loop()
    real = getattr(stored_runs.RunWriter, step)

    def waits(*arguments: Any) -> Any:
        loop.call_soon_threadsafe(reached.set)
        closed.wait(LAST_RESORT_SECONDS)
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(stored_runs.RunWriter, step, waits)
        runs = place.topic.ids.runs
        building = asyncio.ensure_future(runs.merge() if is_merge else runs.move_out())
        await reached.wait()
        await place.topic.close("it is opened again")
        await store.flush(Snapshots(store, INCARNATION).remove())
        closed.set()
        with pytest.raises(SeqdedupeError) as raised:
            await building
    assert raised.value.reason == "DRAINING"
    assert not place.run_keys()
    assert window_of(place).older.offered is None


async def test_a_closed_topic_writes_over_no_run_of_its_successor(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `rebuild-topic`: the numbers of its runs begin again."""
    place = SmallPlace(store, 10**9, deduplication_window_max_messages=160)
    await place.start()
    await place.store_each(*[b"id-%d" % k for k in range(60)])
    for _ in range(3):
        await place.topic.ids.runs.move_out()
    await place.topic.ids.runs.merge()
    await place.store_each(b"x")
    await _close_in_a_snapshot(place, monkeypatch)
    await store.flush(Snapshots(store, INCARNATION).remove())
    monkeypatch.setattr(window_runs, "MAX_RUNS", 8)
    place.log = place.log.crash(0)
    await place.start()
    await place.store_each(*[b"more-%d" % k for k in range(40)])
    place.memory.limit_bytes = 1
    await _all_moved(place)
    stored = place.stored()
    assert verdicts(place.send(*stored)) == [DUP] * len(stored)
    await place.topic.close("")


async def _all_moved(place: SmallPlace) -> None:
    for _ in range(5):
        place.memory.measure(place.topic.ids.runs, window_of(place))
        while place.memory._moving is not None:
            await asyncio.wait({place.memory._moving})


# -- histories -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
async def test_each_message_stands_there_once_whatever_fails(
    store: Store, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: list[int] = []
    real = Older.offer

    def offer(self: Older, run: Any) -> None:
        offered.append(run.number)
        real(self, run)

    monkeypatch.setattr(Older, "offer", offer)
    await history(SmallPlace(store), seed)
    assert offered


@pytest.mark.parametrize("is_merge", [False, True])
async def test_a_kill_at_any_write_loses_and_doubles_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, is_merge: bool
) -> None:
    """Writes of the store become durable in their order: what is there after a power cut is what was written before one
    of them."""
    ids = [b"id-%d" % k for k in range(30)]
    for last in range(1000):
        place = SmallPlace(store, 10**9)
        place.storage.records.clear()
        await place.start()
        await place.store_each(*ids[:10])
        if is_merge:
            for part in (ids[10:15], ids[15:20], ids[20:25]):
                await place.topic.ids.runs.move_out()
                await place.store_each(*part)
        await place.topic.keeper.snapshot()
        done = await _cut_after(place, store, last, monkeypatch)
        await place.crash(None)
        stored = place.stored()
        assert verdicts(place.send(*stored)) == [DUP] * len(stored)
        await place.topic.keeper.snapshot()
        await place.to_a_run()
        assert originals(place, place.send(*stored)) == dict(enumerate(range(len(stored))))
        assert place.run_numbers() == set(window_of(place).older.numbers)
        await place.topic.close("")
        await store.flush(Snapshots(store, INCARNATION).remove())
        if done:
            assert last > 4
            return


async def _cut_after(place: SmallPlace, store: Store, writes: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Moves all to runs, of which the store gets this many writes; whether that was all."""
    left = writes

    def write(self: Store, batch: WriteBatch, *more: Any) -> int:
        nonlocal left
        if left <= 0:
            raise error("STORE_UNAVAILABLE", "the power is gone")
        left -= 1
        return real(self, batch, *more)

    real = Store.write
    with monkeypatch.context() as patched:
        patched.setattr(Store, "write", write)
        try:
            await place.to_a_run()
        except SeqdedupeError:
            return False
    return True


def _names_before_it_is_whole(real: Callable[..., Any]) -> Callable[..., Any]:
    async def made(self: WindowRuns, window: Any, pieces: Any) -> Any:
        run = await real(self, window, pieces)
        batch = WriteBatch(raw_mode=True)
        key = stored_runs.run_key(INCARNATION, run.number, 0)
        batch.delete(key)
        self._store.write(batch)
        return run

    return made


PLANTED: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "what was looked up before counts": (
        WindowRuns,
        "older",
        lambda real: lambda self, frame, since_ms, looked_up: np.full(frame.rows, -1, np.int64),
    ),
    "snapshots name no runs": (stored_ids.StoredIds, "pieces_index", lambda real: property(lambda self: 10**6)),
    "a run is named before it is whole": (WindowRuns, "_made", _names_before_it_is_whole),
    "runs that are in use are dropped": (Older, "numbers", lambda real: property(lambda self: [])),
    "what is offered is not named": (
        Older,
        "to_name",
        lambda real: lambda self, first: (self.offered,) if self.offered else self.runs,
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
async def test_control_a_planted_bug_doubles_or_loses(store: Store, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, planted = PLANTED[bug]
    monkeypatch.setattr(where, name, planted(getattr(where, name)))
    with pytest.raises((AssertionError, SeqdedupeError, IndexError, ValueError, TimeoutError)):
        await _histories(store)


async def _histories(store: Store) -> None:
    for seed in range(12):
        await asyncio.wait_for(history(SmallPlace(store), seed), LAST_RESORT_SECONDS)
        await store.flush(Snapshots(store, INCARNATION).remove())
