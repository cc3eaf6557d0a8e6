"""Compaction changes nothing that loading gives, wherever it is stopped."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from rocksdict import Rdict, WriteBatch

from seqdedupe.errors import DamagedError, UnavailableError
from seqdedupe.store import rocksdb
from seqdedupe.store.db import Store
from seqdedupe.store.parts import DELTA, HEADER, MAX_NUMBER, NAMES, PAGE, part_key, part_number
from seqdedupe.store.snapshots import Delta, Snapshots
from tests.store.conftest import SMALL_MAX_DELTAS, SMALL_PAGE
from tests.store.copies import copy_of_live
from tests.store.model import INCARNATION, State, delta, load, save, state_of

pytestmark = pytest.mark.usefixtures("small_pages")


def numbers_of(store: Store, part: bytes) -> list[int]:
    stop = part_key(INCARNATION, part, MAX_NUMBER)
    return [part_number(key) for key, _ in store.scan(part_key(INCARNATION, part, 0), stop)]


def change(step: int, producers: int) -> Delta:
    """One new producer a step, and something of two older ones; numbers rise and fall."""
    slots = {step, (step * 7) % producers, (step * 3) % producers}
    return delta(
        step + 1,
        {slot: ((step * 31) % 50, (step * 17) % 9) for slot in slots if slot <= step},
        first_name=step,
        names=[b"name-%d" % step],
    )


async def write_some(store: Store, snapshots: Snapshots, first: int, last: int, model: State) -> State:
    for step in range(first, last):
        written = change(step, last)
        await save(store, snapshots, written)
        model = model.after(written)
    return model


async def test_it_is_not_due_before_there_are_many_deltas(store: Store) -> None:
    snapshots = Snapshots(store, INCARNATION)
    assert not await snapshots.compact_if_due()
    model = await write_some(store, snapshots, 0, SMALL_MAX_DELTAS, State())
    assert not await snapshots.compact_if_due()
    await write_some(store, snapshots, SMALL_MAX_DELTAS, SMALL_MAX_DELTAS + 1, model)
    assert await snapshots.compact_if_due()
    assert not await snapshots.compact_if_due()


async def test_it_is_due_by_size(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqdedupe.store.snapshots.MAX_DELTA_BYTES", 100)
    snapshots = Snapshots(store, INCARNATION)
    await write_some(store, snapshots, 0, 2, State())
    assert await snapshots.compact_if_due()
    assert not await snapshots.compact_if_due()


async def test_it_leaves_pages_full_records_of_names_and_no_deltas(store: Store) -> None:
    snapshots = Snapshots(store, INCARNATION)
    model = await write_some(store, snapshots, 0, 10, State())
    assert await snapshots.compact_if_due()
    assert numbers_of(store, DELTA) == []
    assert numbers_of(store, PAGE) == [0, SMALL_PAGE, 2 * SMALL_PAGE]
    assert numbers_of(store, NAMES) == [0, SMALL_PAGE, 2 * SMALL_PAGE]
    assert state_of(snapshots.load()) == model
    model = await write_some(store, snapshots, 10, 15, model)
    assert await snapshots.compact_if_due()
    assert numbers_of(store, NAMES) == [0, SMALL_PAGE, 2 * SMALL_PAGE, 3 * SMALL_PAGE]
    assert state_of(Snapshots(store, INCARNATION).load()) == model


@pytest.mark.parametrize("fresh", [False, True])
async def test_many_rounds_with_and_without_restarts(folder: Path, fresh: bool) -> None:
    store = Store.open(folder)
    snapshots = Snapshots(store, INCARNATION)
    model = State()
    for round_ in range(12):
        model = await write_some(store, snapshots, 5 * round_, 5 * round_ + 5, model)
        assert await snapshots.compact_if_due()
        if fresh:
            store.close()
            store = Store.open(folder)
            snapshots = Snapshots(store, INCARNATION)
        assert state_of(snapshots.load()) == model
    store.close()


def copy_at_every_write(
    monkeypatch: pytest.MonkeyPatch, store: Store, folder: Path, also: Callable[[int], None] = lambda _: None
) -> list[Path]:
    """Copies the store's folder, as a crash would leave it, after every write to it."""
    copies: list[Path] = []
    write = store.write

    def copying(batch: WriteBatch, *more: int) -> int:
        opening = write(batch, *more)
        copies.append(copy_of_live(folder, folder.with_name(f"copy{len(copies)}")))
        also(len(copies))
        return opening

    monkeypatch.setattr(store, "write", copying)
    return copies


async def test_a_crash_at_any_write_loads_the_same_and_can_be_compacted_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(folder)
    snapshots = Snapshots(store, INCARNATION)
    model = await write_some(store, snapshots, 0, 9, State())
    assert await snapshots.compact_if_due()
    model = await write_some(store, snapshots, 9, 18, model)
    copies = copy_at_every_write(monkeypatch, store, folder)
    assert await snapshots.compact_if_due()
    store.close()
    assert len(copies) >= 7
    for copy in copies:
        assert load(copy) == model
        again = Store.open(copy)
        snapshots = Snapshots(again, INCARNATION)
        more = await write_some(again, snapshots, 18, 23, model)
        assert await snapshots.compact_if_due()
        assert state_of(snapshots.load()) == more
        again.close()


async def test_snapshots_go_on_while_it_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(folder)
    snapshots = Snapshots(store, INCARNATION)
    states = [await write_some(store, snapshots, 0, 12, State())]
    writing = False

    def meanwhile(_: int) -> None:
        nonlocal writing
        if not writing:
            writing = True
            written = change(11 + len(states), 60)
            states.append(states[-1].after(written))
            snapshots.write_delta(written)
            writing = False

    copies = copy_at_every_write(monkeypatch, store, folder, meanwhile)
    assert await snapshots.compact_if_due()
    monkeypatch.delattr(store, "write")
    assert len(states) > 6
    assert state_of(snapshots.load()) == states[-1]
    for copy in copies:
        state = load(copy)
        assert state == states[state.next_index - 12]
    store.close()


async def test_only_one_runs_at_a_time(store: Store) -> None:
    snapshots = Snapshots(store, INCARNATION)
    model = await write_some(store, snapshots, 0, 9, State())
    assert sorted(await asyncio.gather(*(snapshots.compact_if_due() for _ in range(3)))) == [False, False, True]
    assert state_of(snapshots.load()) == model


@pytest.mark.parametrize("steps", range(1, 40, 3))
async def test_cancelled_at_any_moment_it_is_done_again(store: Store, steps: int) -> None:
    snapshots = Snapshots(store, INCARNATION)
    model = await write_some(store, snapshots, 0, 12, State())
    running = asyncio.create_task(snapshots.compact_if_due())
    for _ in range(steps):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    model = await write_some(store, snapshots, 12, 17, model)
    assert await snapshots.compact_if_due()
    assert state_of(snapshots.load()) == model
    assert state_of(Snapshots(store, INCARNATION).load()) == model


async def test_it_stops_when_the_store_was_opened_again_between_its_pages(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that the first opening took may be lost: the header must not say that they are there."""
    snapshots = Snapshots(store, INCARNATION)
    model = await write_some(store, snapshots, 0, 20, State())
    write = rocksdb.write
    pages = 20 // SMALL_PAGE
    writes = 0

    def opened_again_after_the_last_page(db: Rdict, batch: WriteBatch) -> None:
        nonlocal writes
        writes += 1
        if writes == pages + 1:
            raise OSError(28, "No space left on device")
        write(db, batch)
        if writes == pages:
            with pytest.raises(UnavailableError):
                store.write(WriteBatch(raw_mode=True))
            while True:
                try:
                    assert store.opening == 2
                    return
                except UnavailableError:
                    continue

    monkeypatch.setattr(rocksdb, "write", opened_again_after_the_last_page)
    with pytest.raises(UnavailableError):
        await snapshots.compact_if_due()
    assert numbers_of(store, HEADER) == []
    assert state_of(Snapshots(store, INCARNATION).load()) == model
    assert await snapshots.compact_if_due()
    assert state_of(snapshots.load()) == model


@pytest.mark.parametrize(
    ("part", "number"), [(HEADER, 0), (PAGE, 0), (PAGE, SMALL_PAGE), (PAGE, 2 * SMALL_PAGE), (NAMES, SMALL_PAGE)]
)
async def test_a_part_that_is_gone_is_damage(store: Store, part: bytes, number: int) -> None:
    snapshots = Snapshots(store, INCARNATION)
    await write_some(store, snapshots, 0, 10, State())
    assert await snapshots.compact_if_due()
    batch = WriteBatch(raw_mode=True)
    batch.delete(part_key(INCARNATION, part, number))
    store.write(batch)
    with pytest.raises(DamagedError) as raised:
        Snapshots(store, INCARNATION).load()
    assert raised.value.reason == "STORE_DAMAGED"
