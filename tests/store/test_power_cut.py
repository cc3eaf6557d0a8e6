"""Power cuts at every moment of a snapshot, with lost pages and sectors: what was durable is there, and it opens."""

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rocksdict import Options

from seqdedupe.errors import DamagedError, UnavailableError
from seqdedupe.store import rocksdb
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Delta, Snapshots
from tests.store.model import INCARNATION, State, delta, fast_folder, topic
from tests.store.power import Files, LostError, Machine, Moment, check, every_loss, files_of, torn

CUTS_A_MOMENT = 2
PARTS = 4
"""For all patterns of lost sectors, by turns."""
SEED = 20_26


@pytest.fixture
def memory() -> Iterator[Path]:
    with fast_folder() as folder:
        yield folder


@pytest.fixture
def machine(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(memory / "store")
    machine.plug_in(monkeypatch)
    return machine


def next_change(last: State, names: int) -> Delta:
    """The next snapshot, with that many new names: large enough for several sectors."""
    known = len(last.names)
    return delta(
        last.next_index + 1,
        dict.fromkeys({*range(known, known + names), *range(min(known, 3))}, (last.next_index, 1)),
        first_name=known,
        names=[b"%0200d" % (known + name) for name in range(names)],
    )


async def a_life(machine: Machine) -> None:
    """Snapshots of one sector to over two blocks of RocksDB's log, some together, and compactions."""
    await machine.open()
    for names in (1, 9, 0, 40, 170, 2):
        await machine.write(next_change(machine.states[-1], names), flush=False)
        await machine.write(next_change(machine.states[-1], names // 2), flush=True)
        await machine.compact()
    machine.store.close()


def cut_all(moments: list[Moment], folder: Path, cuts: int = CUTS_A_MOMENT) -> int:
    rng = random.Random(SEED)
    number = 0
    for moment in moments:
        if moment.synced == moment.written and len(moment.marks) == 1:
            continue
        for _ in range(cuts):
            number += 1
            check(moment, moment.cut(rng), folder / f"cut-{number}")
    return number


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.usefixtures("small_pages")
async def test_a_power_cut_at_every_moment_of_snapshots(machine: Machine, memory: Path, part: int) -> None:
    await a_life(machine)
    assert {moment.what for moment in machine.moments} == {
        "written",
        "before the sync",
        "synced, but not marked",
        "marked",
    }
    assert cut_all(machine.moments[part::PARTS], memory) > 100 // PARTS


@pytest.mark.parametrize("part", range(PARTS))
async def test_every_pattern_of_lost_sectors(machine: Machine, memory: Path, part: int) -> None:
    await machine.open()
    await machine.write(next_change(machine.states[-1], 1), flush=True)
    for names in (1, 9):
        await machine.write(next_change(machine.states[-1], names), flush=False)
    machine.store.close()
    moment = machine.moments[-1]
    (log,) = (name for name in moment.written if name.endswith(".log"))
    patterns = list(every_loss(moment.synced[log], moment.written[log]))
    assert 400 < len(patterns) < 3000
    for number, left in enumerate(patterns[part::PARTS]):
        check(moment, moment.written | {log: left}, memory / f"pattern-{number}")


async def test_what_is_lost_below_the_durable_number_is_refused_and_left_alone(machine: Machine, memory: Path) -> None:
    """The other arm: the same losses where bytes had been synced are damage, at every start."""
    await machine.open()
    for names in (3, 20, 3):
        await machine.write(next_change(machine.states[-1], names), flush=True)
    machine.store.close()
    moment = machine.moments[-1]
    (log,) = (name for name in moment.written if name.endswith(".log"))
    rng = random.Random(SEED)
    refused = 0
    for number in range(100):
        damaged = torn(b"", moment.written[log], rng)
        if damaged == moment.written[log]:
            continue
        refused += 1
        folder = memory / f"damaged-{number}"
        folder.mkdir()
        for name, data in (moment.written | {log: damaged}).items():
            (folder / name).write_bytes(data)
        before = files_of(folder)
        for _ in range(2):
            with pytest.raises(DamagedError) as raised:
                Store.open(folder)
            assert raised.value.reason == "STORE_DAMAGED"
            assert "--rebuild-store" in raised.value.hint
        assert files_of(folder) == before
        shutil.rmtree(folder)
    assert refused > 50


# A failed sync, and RocksDB opened again.


async def a_life_with_a_failed_sync(machine: Machine) -> tuple[Moment, Moment]:
    """The moments before and after RocksDB is opened again; more is written afterwards."""
    await machine.open()
    await machine.write(next_change(machine.states[-1], 9), flush=True)
    machine.fails = True
    with pytest.raises(UnavailableError):
        await machine.write(next_change(machine.states[-1], 30), flush=True)
    before = machine.moments[-1]
    while True:
        try:
            machine.store.topics()
            break
        except UnavailableError:
            await machine.store.in_thread(int)
    machine.reopened()
    after = machine.moments[-1]
    for names in (3, 30):
        await machine.write(next_change(machine.states[-1], names), flush=False)
        await machine.write(next_change(machine.states[-1], names), flush=True)
    machine.store.close()
    return before, after


async def test_power_cuts_around_a_failed_sync(machine: Machine, memory: Path) -> None:
    before, after = await a_life_with_a_failed_sync(machine)
    assert cut_all(machine.moments, memory, 10) > 50
    # While RocksDB is opened again: the log that could not be synced is torn still, `CURRENT` is the old or new one.
    rng = random.Random(SEED)
    for number in range(50):
        left = before.cut(rng)
        for name, data in after.written.items():
            if name not in left:
                left[name] = torn(b"", data, rng)
        check(before, left, memory / f"old-{number}")
        left |= {name: data for name, data in after.written.items() if name not in before.written}
        check(after, left | {"CURRENT": after.written["CURRENT"]}, memory / f"new-{number}")


# RocksDB's own work: a log becomes a table file, table files are merged.


@dataclass
class TableMade:
    """RocksDB began a new log and made the old one a table file, during one write.

    `before` are the files before the write, of whose log `synced` is a part; `after` those when all was done, and
    `flushed` those when the write was durable too. `states` are those that were not durable, and that of the write.
    """

    before: Files
    synced: Files
    after: Files
    flushed: Files
    states: list[State]

    def cuts(self, rng: random.Random) -> Iterator[tuple[str, Files, list[State]]]:
        """What a power cut leaves at one moment after the other, and which states may be found then."""
        old_logs = {name: torn(self.synced[name], data, rng) for name, data in logs(self.before).items()}
        new_log = {name: torn(b"", data, rng) for name, data in logs(self.after).items()}
        new_tables = {name: data for name, data in self.after.items() if name.endswith(".sst")}
        left = self.before | old_logs | new_log
        yield "the table is written", new_tables_torn(new_tables, left, rng) | left, self.states
        manifest = self.before["CURRENT"].decode().strip()
        edit = torn(self.before[manifest], self.after[manifest], rng)
        yield "the manifest is written", left | new_tables | {manifest: edit}, self.states
        yield "the old log is removed", self.after | old_logs | new_log, self.states[-2:]
        yield "and the new one is synced", self.flushed | old_logs, self.states[-1:]


def new_tables_torn(tables: Files, left: Files, rng: random.Random) -> Files:
    return {name: torn(b"", data, rng) for name, data in tables.items() if name not in left}


def logs(files: Files) -> Files:
    return {name: data for name, data in files.items() if name.endswith(".log")}


def tables(files: Files) -> frozenset[str]:
    return frozenset(name for name in files if name.endswith(".sst"))


def settled(folder: Path, *, without: frozenset[str] = frozenset()) -> Files:
    """The files when RocksDB's threads have nothing more to do: one log is left, and none of these tables."""
    while True:
        try:
            files = files_of(folder)
            if len(logs(files)) == 1 and not tables(files) & without and files == files_of(folder):
                return files
        except FileNotFoundError:
            continue


async def tables_made(folder: Path, count: int) -> tuple[list[TableMade], State]:
    """This many tables, and the state when the store was closed."""
    store = Store.open(folder)
    snapshots = Snapshots(store, INCARNATION)
    await store.put_topics(topic())
    after = settled(folder)
    synced = logs(after)
    states = [State()]
    made: list[TableMade] = []
    while len(made) < count:
        before = after
        written = next_change(states[-1], 30)
        opening = snapshots.write_delta(written)
        states.append(states[-1].after(written))
        after = settled(folder)
        if tables(after) != tables(before) or len(states) > 4:
            await store.flush(opening)
            flushed = settled(folder)
            if tables(after) != tables(before):
                made.append(TableMade(before, synced, after, flushed, states))
            after, synced, states = flushed, logs(flushed), states[-1:]
    store.close()
    return made, states[-1]


def small_tables(monkeypatch: pytest.MonkeyPatch, *, merged: bool) -> None:
    def options(raw_mode: bool) -> Options:
        options = Options(raw_mode=raw_mode)
        options.set_disable_auto_compactions(not merged)
        return options

    monkeypatch.setattr(rocksdb, "Options", options)
    monkeypatch.setattr(rocksdb, "MEMTABLE_BYTES", 64 * 1024)


async def test_power_cuts_while_a_log_becomes_a_table(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tables(monkeypatch, merged=False)
    made, _ = await tables_made(memory / "store", 4)
    rng = random.Random(SEED)
    for number in range(60):
        for what, left, states in made[number % len(made)].cuts(rng):
            check(Moment(what, {}, {}, set(), states), left, memory / "cut")


async def test_power_cuts_while_tables_are_merged(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tables(monkeypatch, merged=False)
    folder = memory / "store"
    _, state = await tables_made(folder, 5)
    before = files_of(folder)
    small_tables(monkeypatch, merged=True)
    # RocksDB keeps the options of a database there, and they are not what this is about.
    for options in folder.glob("OPTIONS-*"):
        options.unlink()
    store = Store.open(folder)
    after = settled(folder, without=tables(before))
    store.close()
    manifest = after["CURRENT"].decode().strip()
    *_, last, end = record_ends(after[manifest])
    assert end == len(after[manifest])
    assert len(tables(after)) < len(tables(before))
    rng = random.Random(SEED)
    for _ in range(50):
        left = after | {name: before[name] for name in tables(before)}
        edit = torn(after[manifest][:last], after[manifest], rng)
        check(Moment("the manifest is written", {}, {}, set(), [state]), left | {manifest: edit}, memory / "cut")
        left |= {name: torn(b"", data, rng) for name, data in after.items() if name in tables(after)}
        early = after[manifest][:last]
        check(Moment("tables are written", {}, {}, set(), [state]), left | {manifest: early}, memory / "cut")


def record_ends(manifest: bytes) -> Iterator[int]:
    """Where the records of a small manifest end."""
    at = 0
    while at < len(manifest):
        at += 7 + int.from_bytes(manifest[at + 4 : at + 6], "little")
        yield at


# Control arm.


async def test_control_a_durable_number_that_moves_before_the_sync_is_found(
    machine: Machine, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_early(store: Store, opening: Any) -> None:
        store._mark.move(opening.db.latest_sequence_number())
        rocksdb.sync(opening.db)

    monkeypatch.setattr(Store, "_sync", too_early)
    await a_life(machine)
    with pytest.raises(LostError, match="has lost durable writes"):
        cut_all(machine.moments, memory)
