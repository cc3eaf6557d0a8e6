"""Power cuts at every step of an import, and of another one of the same file: see `tests.store.power`.

What the log says was imported is wholly in force after any of them; what it does not say is as if it had never been
begun, and the same file brings it. About 15 s, one process.
"""

import asyncio
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rocksdict import WriteBatch

from seqdedupe import exports
from seqdedupe.core.rule import DUP, NOT_DUP
from seqdedupe.errors import DamagedError
from seqdedupe.exports import KnownId
from seqdedupe.store import rocksdb, windows
from seqdedupe.store.db import Store
from seqdedupe.topic.operations import MessageState, state_by_id
from seqdedupe.transfer import topic_state
from seqdedupe.transfer.topic_state import WindowImport
from tests.log.faulty import FaultyLog, Storage
from tests.store.model import fast_folder
from tests.store.power import Files, Machine, Moment
from tests.store.test_power_cut import settled
from tests.topic.test_window_import import HOUR_MS, ImportPlace
from tests.topic.test_window_power import as_of_now

SEED = 20_27
CUTS = 1
"""At each moment."""

SHARES = 2
"""The power is cut at every second moment in one test, and at the others in another one."""

FIRST = [KnownId(b"%03d-" % k + b"x" * (k * 7 % 250), HOUR_MS + k) for k in range(150)]
OTHER = [KnownId(b"other %03d" % k, HOUR_MS + k) for k in range(60)]
"""For another file, which is never all there."""
IDS = [known.deduplication_id for known in FIRST]
MESSAGES = [b"a", b"b"]


@pytest.fixture
def memory() -> Iterator[Path]:
    with fast_folder() as folder:
        yield folder


@pytest.fixture(autouse=True)
def many_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import has several parts, which are merged; a run has several writes."""
    monkeypatch.setattr(exports, "WINDOW_BLOCK_BYTES", 4096)
    monkeypatch.setattr(topic_state, "PART_BYTES", 8192)
    monkeypatch.setattr(windows, "PAGES_A_WRITE", 1)
    monkeypatch.setattr(rocksdb, "MEMTABLE_BYTES", 1024 * 1024)


class Life(Machine):
    """A topic into which a window is imported again and again; `logs_then` has its log as it was at each moment."""

    place: ImportPlace

    async def live(self, patch: pytest.MonkeyPatch, window: Path) -> None:
        self.patch = patch
        self.logs_then: list[Storage] = []
        self.answered: list[bool] = []
        self.is_answered = False
        self._one_at_a_time = threading.Lock()
        self.plug_in(patch)
        self.store = Store.open(self.folder)
        self._synced = self.logs()
        self._mark = (self.folder / "DURABLE").read_bytes()
        self._watch(patch)
        self.place = ImportPlace(self.store)
        await self.place.start()
        await self.broken_off(OTHER, window, after_put=True)
        await self.broken_off(FIRST, window, after_put=False)
        await self.place.crash()
        await self.broken_off(OTHER, window, after_put=True)
        await self.place.bring(FIRST, window)
        self.is_answered = True
        self.keep("answered")
        assert self.place.new(*MESSAGES) == [NOT_DUP] * len(MESSAGES)
        await self.place.topic.keeper.snapshot()
        await self.broken_off(FIRST, window, after_put=False)
        await self.broken_off(FIRST, window, after_put=True)
        await self.place.bring(FIRST, window)
        await self.place.crash()
        await self.place.bring(FIRST, window)
        self.keep("answered again")
        await self.place.topic.close("")
        self.store.close()

    def _watch(self, patch: pytest.MonkeyPatch) -> None:
        flush, settle = Store.flush, FaultyLog.settle

        async def flushed(store: Store, opening: int) -> None:
            await flush(store, opening)
            self.marked()

        def in_the_log(log: FaultyLog, *arguments: Any) -> None:
            had = log.in_flight
            settle(log, *arguments)
            if had:
                self.keep("in the log")

        patch.setattr(Store, "flush", flushed)
        patch.setattr(FaultyLog, "settle", in_the_log)

    async def broken_off(self, known: list[KnownId], path: Path, *, after_put: bool) -> None:
        """In mid-way, or when the store's record is written and nobody has synced it."""
        exports.write_window(path, known)
        checksum, *blocks = exports.read_window(path)
        importing = WindowImport(self.place.topic, checksum)
        for block in blocks if after_put else blocks[: len(blocks) // 2 + 1]:
            await importing.add(block)
        if after_put:
            was_put = asyncio.Event()
            put = windows.put_import

            def seen(*arguments: Any) -> int:
                was_put.set()
                return put(*arguments)

            with self.patch.context() as patched:
                patched.setattr(windows, "put_import", seen)
                finishing = asyncio.ensure_future(importing.finish(len(known)))
                await was_put.wait()
                finishing.cancel()
                with suppress(asyncio.CancelledError):
                    await finishing
        importing.close()

    def keep(self, what: str) -> None:
        if not hasattr(self, "place"):
            return
        # The store's thread keeps moments too.
        with self._one_at_a_time:
            written = settled(self.folder)
            self.moments.append(Moment(what, written | self._synced, written, {self._mark, written["DURABLE"]}, []))
            self.logs_then.append(as_of_now(self.place.storage))
            self.answered.append(self.is_answered)


async def check_all(life: Life, memory: Path, window: Path, share: slice = slice(None)) -> int:
    """Cuts the power at every moment of a share; how often something was found in force."""
    rng = random.Random(SEED)
    in_force = 0
    for moment, log_then, answered in list(zip(life.moments, life.logs_then, life.answered, strict=True))[share]:
        for _ in range(CUTS):
            in_force += await check(with_files(memory / "cut", moment.cut(rng)), as_of_now(log_then), answered, window)
    return in_force


def with_files(folder: Path, files: Files) -> Path:
    folder.mkdir()
    for name, body in files.items():
        (folder / name).write_bytes(body)
    return folder


async def check(folder: Path, log_then: Storage, answered: bool, window: Path) -> bool:
    """A topic that recovers from this. Whether the window was in force."""
    store = Store.open(folder)
    place = ImportPlace(store)
    place.storage, place.log = log_then, FaultyLog(log_then)
    try:
        await place.start()
        topic = place.topic
        in_force = topic.policy.imported is not None
        assert in_force or not answered
        assert not topic.ids.imported.is_missing
        assert place.import_runs() == ({topic.ids.imported.there.run.number} if topic.ids.imported.there else set())
        if in_force:
            known_to_all(place)
        else:
            # For what was begun nothing counts, no matter what of it is there.
            states = [(await state_by_id(topic, one)).state for one in (*IDS[::9], OTHER[0].deduplication_id)]
            assert set(states) == {MessageState.NOT_SEEN}
        await place.bring(FIRST, window)
        known_to_all(place)
        assert len(place.import_runs()) == 1
        await place.crash()
        known_to_all(place)
        return in_force
    finally:
        await place.topic.close("")
        store.close()
        shutil.rmtree(folder)


def known_to_all(place: ImportPlace) -> None:
    """What was imported, and what is in the log."""
    ids = IDS + place.stored()
    assert place.new(*ids) == [DUP] * len(ids)


async def lived(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Life:
    life = Life(memory / "store")
    with monkeypatch.context() as patched:
        await life.live(patched, memory / "window")
    return life


@pytest.mark.parametrize("share", range(SHARES))
async def test_a_power_cut_at_every_step(memory: Path, monkeypatch: pytest.MonkeyPatch, share: int) -> None:
    life = await lived(memory, monkeypatch)
    in_force = await check_all(life, memory, memory / "window", slice(share, None, SHARES))
    assert 15 < in_force < CUTS * len(life.moments) // SHARES - 15
    assert {"written", "before the sync", "synced, but not marked", "marked", "in the log", "answered"} <= {
        moment.what for moment in life.moments
    }


def the_log_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was imported is written, and nobody waits until it is durable."""

    async def not_flushed(store: Store, opening: int) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    monkeypatch.setattr(Store, "flush", not_flushed)


def the_old_one_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the record that names the new one."""
    put = windows.put_import

    def put_after_all_has_gone(store: Store, incarnation: int, imported: Any) -> int:
        batch = WriteBatch(raw_mode=True)
        batch.delete_range(
            windows.run_key(incarnation, windows.FIRST_RUN, 0),
            windows.run_key(incarnation, imported.run.number, 0),
        )
        store.write(batch)
        return put(store, incarnation, imported)

    monkeypatch.setattr(windows, "put_import", put_after_all_has_gone)


@pytest.mark.parametrize("plant", [the_log_is_told_first, the_old_one_goes_first])
async def test_control_a_planted_bug_is_noticed(memory: Path, monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    with monkeypatch.context() as patched:
        plant(patched)
        life = await lived(memory, monkeypatch)
    with pytest.raises((AssertionError, DamagedError)):
        await check_all(life, memory, memory / "window")
