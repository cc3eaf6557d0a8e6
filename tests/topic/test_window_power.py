"""Power cuts while runs of deduplication IDs are built, named, merged and dropped: see `tests.store.power`.

A log is ahead of the store at all times, so everything that the cut leaves of the store the verdicts have to be the
same.
"""

import copy
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rocksdict import WriteBatch

from seqdedupe.core.rule import DUP
from seqdedupe.errors import SeqdedupeError
from seqdedupe.store import rocksdb, windows
from seqdedupe.store.db import Store
from seqdedupe.store.parts import IDS, part_key
from seqdedupe.tasks import Broadcast
from seqdedupe.topic import window_runs
from tests.log.faulty import FaultyLog, Storage
from tests.store.model import fast_folder
from tests.store.power import Files, Machine, Moment
from tests.store.test_power_cut import TableMade, logs, settled, tables
from tests.topic.test_by_id import receipt
from tests.topic.test_window_runs import SmallPlace, window_of

SEED = 20_27
WINDOW = 64
MESSAGES = 165
STEP = 11
"""IDs, between two moves to disk."""

CUT = 0.15
"""The share of moments at which the power is cut."""


@pytest.fixture
def memory() -> Iterator[Path]:
    with fast_folder() as folder:
        yield folder


def id_of(index: int) -> bytes:
    return b"%d-" % index + b"x" * (index * 7 % 250)


class Life(Machine):
    """A topic whose IDs move to disk all the time; `storages` has its log as it was at each moment."""

    storages: list[Storage]
    place: SmallPlace

    async def live(self, patch: pytest.MonkeyPatch) -> None:
        self.storages = []
        self.plug_in(patch)
        real = Store.flush

        async def flush(store: Store, opening: int) -> None:
            await real(store, opening)
            self.marked()

        self.store = Store.open(self.folder)
        self._synced = self.logs()
        self._mark = (self.folder / "DURABLE").read_bytes()
        patch.setattr(Store, "flush", flush)
        self.place = SmallPlace(self.store, 10**9, deduplication_window_max_messages=WINDOW)
        await self.place.start()
        for first in range(0, MESSAGES, STEP):
            await self.place.store_each(*map(id_of, range(first, first + STEP)))
            await self.place.to_a_run()
        assert window_of(self.place).older.next_number > 2 * MESSAGES / STEP, "runs were merged"
        assert window_of(self.place).first_index > WINDOW, "runs were dropped"
        await self.place.topic.close("")
        patch.setattr(Store, "flush", real)
        self.store.close()

    def keep(self, what: str) -> None:
        if not hasattr(self, "place"):
            return
        written = settled(self.folder)
        self.moments.append(Moment(what, written | self._synced, written, {self._mark, written["DURABLE"]}, []))
        self.storages.append(as_of_now(self.place.storage))

    def cuts(self, rng: random.Random) -> Iterator[tuple[str, Files, Storage]]:
        """What the disk has after a cut at one moment after the other, with the log as it was."""
        before: Moment | None = None
        for moment, storage in zip(self.moments, self.storages, strict=True):
            # Where tables were merged too, those in between are in neither.
            if before is not None and tables(moment.written) > tables(before.written):
                made = TableMade(before.written, logs(before.synced), moment.written, moment.written, [])
                yield from ((what, left, storage) for what, left, _ in made.cuts(rng))
            if rng.random() < CUT:
                yield moment.what, moment.cut(rng), storage
            before = moment


def as_of_now(storage: Storage) -> Storage:
    """What is stored later is not in it."""
    same = copy.copy(storage)
    same.records, same.writer, same.news = list(storage.records), None, Broadcast()
    return same


async def check_all(life: Life, memory: Path) -> int:
    """Cuts the power at every moment; how often."""
    count = 0
    for count, (_, left, storage) in enumerate(life.cuts(random.Random(SEED)), 1):
        await check(_with_files(memory / f"cut-{count}", left), as_of_now(storage))
    return count


def _with_files(folder: Path, files: Files) -> Path:
    folder.mkdir()
    for name, body in files.items():
        (folder / name).write_bytes(body)
    return folder


async def check(folder: Path, storage: Storage) -> None:
    """A topic that recovers from this knows its window, goes on, and leaves nothing behind."""
    store = Store.open(folder)
    place = SmallPlace(store, 10**9, deduplication_window_max_messages=WINDOW)
    place.storage, place.log = storage, FaultyLog(storage)
    try:
        await place.start()
        await _check(place)
        await place.topic.close("")
    finally:
        store.close()
        shutil.rmtree(folder)


async def _check(place: SmallPlace) -> None:
    window = window_of(place)
    stored = place.stored()
    assert window.next_index == len(stored)
    assert window.first_index <= max(len(stored) - WINDOW, 0)
    if stored:
        known = receipt(place.send(*stored[window.first_index :]))
        assert known.verdicts is not None
        assert set(known.verdicts.tolist()) == {DUP}
        assert known.known_indexes.tolist() == list(range(window.first_index, len(stored)))
    await place.store_each(b"new")
    await place.to_a_run()
    assert place.run_numbers() == set(window_of(place).older.numbers)


@pytest.fixture
async def life(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    """With small tables, so that runs lie in some of them, and in the log."""
    monkeypatch.setattr(rocksdb, "MEMTABLE_BYTES", 32 * 1024)
    monkeypatch.setattr(window_runs, "MAX_RUNS", 2)
    monkeypatch.setattr(windows, "PAGES_A_WRITE", 1)
    life = Life(memory / "store")
    with monkeypatch.context() as patched:
        await life.live(patched)
    return life


async def test_a_power_cut_at_every_moment(life: Life, memory: Path) -> None:
    assert await check_all(life, memory) > 60
    assert len(tables(life.moments[-1].written)) > 0


async def test_control_pieces_that_go_before_their_run_is_named_are_missed(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so are runs that go before the one that they were merged to is named: in their own write."""
    real = windows.put

    def put(batch: Any, incarnation: int, stored: windows.StoredIds, pieces: windows.WrittenPieces) -> None:
        if stored.moved_from is not None:
            one.store.write(without_pieces(incarnation, stored))
        real(batch, incarnation, stored, pieces)

    monkeypatch.setattr(windows, "put", put)
    one = Life(memory / "store")
    with monkeypatch.context() as patched:
        patched.setattr(window_runs, "MAX_RUNS", 2)
        await one.live(patched)
    with pytest.raises((AssertionError, SeqdedupeError)):
        await check_all(one, memory)


def without_pieces(incarnation: int, stored: windows.StoredIds) -> WriteBatch:
    """That pieces are gone which lie in a run."""
    batch = WriteBatch(raw_mode=True)
    assert stored.moved_from is not None
    first, end = (part_key(incarnation, IDS, index) for index in (stored.moved_from, stored.pieces_index))
    batch.delete_range(first, end)
    return batch
