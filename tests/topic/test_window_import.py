"""Windows that are imported, on a log and a store that do what the test says: all of one counts, or nothing.

About 15 s, one process.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rocksdict import WriteBatch

from seqdedupe import exports
from seqdedupe.core import id_runs
from seqdedupe.core.id_runs import entries_with
from seqdedupe.core.rule import DUP, NOT_DUP
from seqdedupe.errors import DamagedError, SeqdedupeError, UnavailableError, error
from seqdedupe.exports import KnownId
from seqdedupe.store import windows
from seqdedupe.store.db import Store
from seqdedupe.store.parts import IMPORTED, part_key
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.store.windows import run_key
from seqdedupe.topic import judge
from seqdedupe.topic.base import State
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.operations import MessageState, state_by_id
from seqdedupe.topic.policy import ImportedWindow, Policy
from seqdedupe.topic.topic import Topic
from seqdedupe.topic.window_runs import WindowImported
from seqdedupe.transfer import topic_state
from seqdedupe.transfer.topic_state import WindowImport
from tests.plain import PLAIN
from tests.topic.test_by_id import INCARNATION, frame, originals, receipt, until_serving, verdicts
from tests.topic.test_window_runs import SmallPlace

HOUR_MS = 3_600_000
OLD = [KnownId(b"old %d" % k, HOUR_MS + 1000 * k) for k in range(10)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "store")
    yield store
    store.close()


class ImportPlace(SmallPlace):
    """It knows what was imported."""

    def __init__(self, store: Store, **policy: Any) -> None:
        super().__init__(store, 10**9, **policy)
        self.now_ms = 2 * HOUR_MS

    def topic_of(self, snapshots: Snapshots, loaded: Any, **more: Any) -> Topic:
        try:
            imported = windows.load_import(self.store, INCARNATION)
        except DamagedError:
            return super().topic_of(snapshots, loaded, **more)
        windows.keep_only_import(self.store, INCARNATION, imported)
        return super().topic_of(snapshots, loaded, imported=imported, **more)

    async def bring(self, known: list[KnownId], path: Path, *, settles: bool = True) -> None:
        """Imports them."""
        exports.write_window(path, known)
        checksum, *blocks = exports.read_window(path)
        importing = WindowImport(self.topic, checksum)
        try:
            for block in blocks:
                await importing.add(block)
            finishing = asyncio.ensure_future(importing.finish(len(known)))
            while not finishing.done():
                if settles:
                    self.log.settle()
                elif self.log.in_flight:
                    return
                await asyncio.sleep(0)
            await finishing
        finally:
            importing.close()

    def import_keys(self) -> list[bytes]:
        first, end = part_key(INCARNATION, IMPORTED, 0), part_key(INCARNATION, IMPORTED, 2**64 - 1)
        return [key for key, _ in self.store.scan(first, end)]

    def import_runs(self) -> set[int]:
        return {int.from_bytes(key[-8:-4], "big") for key in self.import_keys()} - {0}

    def new(self, *ids: bytes) -> list[int]:
        """The verdicts, when what is new is stored."""
        answers = self.send(*ids)
        self.log.settle()
        one = receipt(answers)
        return [NOT_DUP] * len(ids) if one.verdicts is None else one.verdicts.tolist()


@pytest.fixture
async def place(store: Store) -> Any:
    place = ImportPlace(store)
    await place.start()
    yield place
    await place.topic.close("")


def reason(answers: list[FrameReceipt | Refusal]) -> str:
    (answer,) = answers
    assert isinstance(answer, Refusal), answer
    return answer.error.reason


async def refused(work: Any) -> str:
    with pytest.raises(SeqdedupeError) as raised:
        await work
    return raised.value.reason


async def test_what_was_imported_is_dup_without_an_index_over_restarts(place: ImportPlace, tmp_path: Path) -> None:
    await place.bring(OLD, tmp_path / "window")
    for _ in range(2):
        one = receipt(place.send(b"old 3", b"old 9", b"old 3"))
        assert one.verdicts is not None
        assert one.verdicts.tolist() == [DUP] * 3
        assert one.imported_rows.tolist() == [0, 1, 2]
        assert one.known_rows.tolist() == []
        await place.crash()
    mixed = place.send(b"new", b"old 1", b"new", b"old", b"old 10")
    place.log.settle()
    one = receipt(mixed)
    assert one.verdicts is not None
    assert one.verdicts.tolist() == [NOT_DUP, DUP, DUP, NOT_DUP, NOT_DUP]
    assert one.imported_rows.tolist() == [1]
    assert dict(zip(one.known_rows.tolist(), one.known_indexes.tolist(), strict=True)) == {2: 0}
    states = [(await state_by_id(place.topic, one)).state for one in (b"old 1", b"new", b"never")]
    assert states == [MessageState.IMPORTED, MessageState.STORED, MessageState.NOT_SEEN]
    await place.to_a_run()
    assert originals(place, place.send(b"new")) == {0: 0}
    assert (await state_by_id(place.topic, b"new")).state is MessageState.STORED


async def test_however_many_come_memory_has_a_part(
    place: ImportPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "WINDOW_BLOCK_BYTES", 700)
    monkeypatch.setattr(topic_state, "PART_BYTES", 2000)
    monkeypatch.setattr(topic_state, "MERGED_PAGES", 1)
    held: list[int] = []
    written = WindowImport._part_written

    async def measured(self: WindowImport, *, for_good: bool) -> Any:
        held.append(self._part_bytes)
        return await written(self, for_good=for_good)

    monkeypatch.setattr(WindowImport, "_part_written", measured)
    rng = random.Random(1)
    ids = sorted({rng.randbytes(rng.choice([1, 3, 16, 200])) for _ in range(600)})
    await place.bring([KnownId(one, HOUR_MS) for one in ids], tmp_path / "window")
    assert len(held) > 10
    assert max(held) < 3000
    assert len(place.import_runs()) == 1, "what was merged is gone"
    rng.shuffle(ids)
    assert verdicts(place.send(*ids)) == [DUP] * len(ids)
    others = [one for one in (rng.randbytes(16) for _ in range(300)) if one not in ids]
    assert place.new(*others) == [NOT_DUP] * len(others)


async def test_what_is_no_window_for_this_topic_changes_nothing(place: ImportPlace, tmp_path: Path) -> None:
    path = tmp_path / "window"
    exports.write_window(path, OLD)
    checksum, block = exports.read_window(path)

    async def brought(*blocks: bytes, ids: int = len(OLD), checksum: bytes = checksum) -> None:
        importing = WindowImport(place.topic, checksum)
        try:
            for one in blocks:
                await importing.add(one)
            await importing.finish(ids)
        finally:
            importing.close()

    backwards = exports._encoded([1, 1], [b"b", b"a"])
    twice = exports._encoded([1, 1], [b"a", b"a"])
    for wrong in (
        brought(block, ids=9),
        brought(block, checksum=bytes(32)),
        brought(block, checksum=b""),
        brought(),
        brought(block, block),
        brought(backwards),
        brought(twice),
        brought(exports._encoded([1], [b"b"]), exports._encoded([1], [b"a"])),
        brought(b"", ids=0),
        brought(block[:-1]),
    ):
        assert await refused(wrong) == "INVALID_REQUEST"
    older, newer = WindowImport(place.topic, checksum), WindowImport(place.topic, checksum)
    assert await refused(older.add(block)) == "TOPIC_IN_USE"
    older.close()
    newer.close()
    assert place.import_keys() == []
    assert place.new(b"old 1") == [NOT_DUP]
    assert await refused(brought(block)) == "TOPIC_IN_USE"


async def test_a_topic_takes_one_window_and_the_same_again(place: ImportPlace, tmp_path: Path) -> None:
    await place.bring(OLD, tmp_path / "window")
    assert await refused(place.bring(OLD[1:], tmp_path / "other")) == "TOPIC_IN_USE"
    records = len(place.storage.records)
    assert place.new(b"new") == [NOT_DUP]
    await place.bring(OLD, tmp_path / "window")
    assert len(place.storage.records) == records + 1, "the message alone"
    assert verdicts(place.send(b"old 1", b"new")) == [DUP, DUP]
    assert len(place.import_runs()) == 1
    await place.crash()
    assert verdicts(place.send(b"old 1", b"new")) == [DUP, DUP]


async def test_what_comes_while_it_is_not_durable_waits(place: ImportPlace, tmp_path: Path) -> None:
    await place.bring(OLD, tmp_path / "window", settles=False)
    assert reason(place.send(b"old 1")) == "RECOVERING"
    place.log.settle()
    await asyncio.sleep(0)
    assert verdicts(place.send(b"old 1")) == [DUP]


async def test_control_what_comes_while_it_is_not_durable(
    place: ImportPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(WindowImported, "is_under_way", never, raising=False)
    with pytest.raises((AssertionError, ValueError)):
        await test_what_comes_while_it_is_not_durable_waits(place, tmp_path)


@pytest.mark.parametrize("lands", [0, 1])
@pytest.mark.parametrize("ends", ["crash", "unknown"])
async def test_an_unknown_outcome_is_all_or_nothing(place: ImportPlace, tmp_path: Path, ends: str, lands: int) -> None:
    await place.bring(OLD, tmp_path / "window", settles=False)
    if ends == "crash":
        await place.crash(lands)
    else:
        place.log.unknown(lands)
        await until_serving(place.topic)
        await asyncio.sleep(0)
    assert place.new(b"old 1", b"old 9") == ([DUP] * 2 if lands else [NOT_DUP] * 2)
    await place.crash()
    assert verdicts(place.send(b"old 1")) == [DUP]


def failing_after(writes: int) -> Callable[[Store, WriteBatch], int]:
    real, left = Store.write, [writes]

    def write(self: Store, batch: WriteBatch) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise error("STORE_UNAVAILABLE", "as was wanted")
        return real(self, batch)

    return write


async def test_a_store_that_fails_at_any_write_leaves_all_or_nothing(
    place: ImportPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "WINDOW_BLOCK_BYTES", 40)
    monkeypatch.setattr(topic_state, "PART_BYTES", 40)
    is_done = False
    for writes in range(200):
        with monkeypatch.context() as failing, suppress(UnavailableError):
            failing.setattr(Store, "write", failing_after(writes))
            await place.bring(OLD, tmp_path / "window")
            is_done = True
        await place.crash()
        assert place.topic.ids.imported.in_force is None or is_done
        assert place.import_keys() == [] or is_done or place.topic.ids.imported.there is not None
        if is_done:
            break
    assert is_done
    assert writes > 15
    assert verdicts(place.send(*(one.deduplication_id for one in OLD))) == [DUP] * len(OLD)


async def test_each_id_expires_by_its_time_and_all_of_it_for_good(store: Store, tmp_path: Path) -> None:
    place = ImportPlace(store, deduplication_window_max_minutes=60)
    await place.start()
    await place.bring(OLD, tmp_path / "window")
    place.now_ms = HOUR_MS + HOUR_MS + 1000 * 4
    assert place.new(*(b"old %d" % k for k in range(10))) == [NOT_DUP] * 5 + [DUP] * 5, "known for 60 minutes, not more"
    assert place.topic.ids.imported.in_force is not None
    place.now_ms += 5000
    assert place.new(b"old 7") == [NOT_DUP]
    await asyncio.sleep(0)
    place.log.settle()
    await asyncio.sleep(0)
    assert place.topic.policy.imported is None
    assert place.import_keys() == []
    setting = asyncio.ensure_future(place.topic.set_policy(Policy(by_deduplication_id=True)))
    await asyncio.sleep(0)
    place.log.settle()
    await setting
    await place.crash()
    assert not place.topic.ids.imported.is_missing
    assert place.new(b"old 8") == [NOT_DUP], "what has expired stays so"
    await place.topic.close("")


async def test_a_window_of_more_years_than_there_are_holds_what_was_imported_alone(
    store: Store, tmp_path: Path
) -> None:
    place = ImportPlace(store, deduplication_window_max_minutes=2**31 - 1)
    await place.start()
    await place.bring([KnownId(b"first", 0), *OLD], tmp_path / "window")
    assert place.new(b"first", b"never", b"old 1") == [DUP, NOT_DUP, DUP]
    await place.topic.close("")


async def test_a_window_that_the_store_has_lost_is_missed_loudly(
    place: ImportPlace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await place.bring(OLD, tmp_path / "window")
    assert place.new(b"new") == [NOT_DUP]
    await store_loses_all(place)
    assert place.topic.ids.imported.is_missing
    assert "imported again" in caplog.text
    for ids in ([b"old 1"], [b"never"], [b"new"]):
        assert reason(place.send(*ids)) == "WINDOW_MISSING"
    assert await refused(state_by_id(place.topic, b"old 1")) == "WINDOW_MISSING"
    assert await refused(place.bring(OLD[1:], tmp_path / "other")) == "TOPIC_IN_USE"
    await place.bring(OLD, tmp_path / "window")
    assert verdicts(place.send(b"old 1", b"new")) == [DUP, DUP]
    assert place.new(b"never") == [NOT_DUP]
    await place.crash()
    assert verdicts(place.send(b"old 1", b"never")) == [DUP, DUP]


async def store_loses_all(place: ImportPlace) -> None:
    batch = WriteBatch(raw_mode=True)
    batch.delete_range(part_key(INCARNATION, b"A", 0), part_key(INCARNATION, b"Z", 0))
    place.store.write(batch)
    await place.crash()


async def test_an_operator_lets_a_lost_window_expire(place: ImportPlace, tmp_path: Path) -> None:
    await place.bring(OLD, tmp_path / "window")
    await store_loses_all(place)
    assert reason(place.send(b"old 1")) == "WINDOW_MISSING"
    policy = place.topic.newest_policy.with_values_of(Policy(deduplication_window_max_minutes=1))
    setting = asyncio.ensure_future(place.topic.set_policy(policy))
    await asyncio.sleep(0)
    place.log.settle()
    await setting
    assert place.new(b"old 1") == [NOT_DUP]


async def test_damage_is_as_good_as_missing_and_the_file_mends_it(place: ImportPlace, tmp_path: Path) -> None:
    await place.bring(OLD, tmp_path / "window")
    for damaged in [part_key(INCARNATION, IMPORTED, 0), *place.import_keys()[1:]]:
        value = next(iter(place.store.scan(damaged, damaged + b"\0")))[1]
        batch = WriteBatch(raw_mode=True)
        batch.put(damaged, value[:-1] + bytes([value[-1] ^ 1]))
        place.store.write(batch)
        await place.crash()
        assert reason(place.send(b"old 1")) in ("WINDOW_MISSING", "STORE_DAMAGED")
        await place.bring(OLD, tmp_path / "window")
        assert verdicts(place.send(b"old 1")) == [DUP]
        assert len(place.import_runs()) == 1


async def test_what_could_not_be_read_never_passes_for_whole(place: ImportPlace, tmp_path: Path) -> None:
    """A part of the same file, written again where the old run was, is not all of it."""
    await place.bring(OLD, tmp_path / "window")
    (run,) = place.import_runs()
    batch = WriteBatch(raw_mode=True)
    batch.delete(run_key(INCARNATION, run, 0))
    place.store.write(batch)
    await place.crash()
    assert place.topic.ids.imported.is_missing
    checksum = next(exports.read_window(tmp_path / "window"))
    importing = WindowImport(place.topic, checksum)
    few = exports.parse_block(exports._encoded([1], [b"few"]))
    importing._part.append(few)
    await importing._part_written(for_good=False)
    await place.crash()
    assert place.topic.ids.imported.is_missing
    assert reason(place.send(b"old 1")) == "WINDOW_MISSING"


@pytest.mark.parametrize("core", [id_runs, PLAIN["id_runs"]])
def test_where_ids_do_not_rise(core: Any) -> None:
    rng = random.Random(2)
    pool = [b"", b"a", b"ab", b"a\0", b"\xff", b"12345678", b"123456789", b"12345679", b"1234567", b"12345678\0"]
    for _ in range(400):
        ids = [rng.choice(pool[1:]) for _ in range(rng.randint(1, 4))]
        ids = sorted(set(ids)) if rng.random() < 0.5 else ids
        expected = next((k for k in range(1, len(ids)) if ids[k] <= ids[k - 1]), -1)
        offsets = np.array([0, *np.cumsum([len(one) for one in ids])], np.int64)
        assert core.first_not_above(np.frombuffer(b"".join(ids), np.uint8), offsets) == expected, ids


async def history(place: ImportPlace, seed: int, path: Path) -> None:
    """Random frames, restarts and losses, compared with a plain set: what an ID is follows from what is in the log, and
    from the times of what was imported."""
    rng = random.Random(seed)
    await place.start()
    minutes = place.topic.applied.deduplication_window_max_minutes
    ids = [b"%d" % k for k in range(60)]
    known = {one: HOUR_MS + rng.randrange(60) * 1000 for one in ids[:40]}
    window = [KnownId(*one) for one in sorted(known.items())]
    is_imported: bool | None = True
    await place.bring(window, path, settles=rng.random() < 0.7)
    if place.log.in_flight and rng.random() < 0.5:
        place.log.unknown(rng.choice([0, 1]))
        is_imported = None
    for _ in range(60):
        if place.topic.state is not State.SERVING:
            await until_serving(place.topic)
        place.log.settle()
        await asyncio.sleep(0)
        if is_imported is None:
            is_imported = place.topic.policy.imported is not None
        match rng.randrange(12):
            case 0:
                await place.crash(rng.choice([0, None]))
            case 1 | 2:
                place.now_ms += rng.choice([1000, 2000, 30_000])
            case 3:
                await place.topic.keeper.snapshot()
            case 4:
                await place.to_a_run()
            case 5:
                with suppress(SeqdedupeError):
                    await place.bring(window, path)
                    is_imported = True
            case _:
                some = rng.choices(ids, k=rng.randint(1, 6))
                before, since_ms = place.stored(), -1 if minutes < 0 else place.now_ms - 60_000 * minutes
                looked_up = await place.topic.ids.look_up(frame(*some)) if rng.random() < 0.5 else None
                answers: list[FrameReceipt | Refusal] = []
                place.topic.admit(frame(*some), 1, answers.append, NumbersCache(), looked_up=looked_up)
                place.log.settle()
                await asyncio.sleep(0)
                is_imported = is_imported and max(known.values()) > since_ms
                alive = {one for one in known if is_imported and known[one] > since_ms}
                check(place, some, before, alive, receipt(answers))
    await place.topic.close("")


def check(place: ImportPlace, ids: list[bytes], before: list[bytes], alive: set[bytes], one: FrameReceipt) -> None:
    """Each row of a frame, before which these were in the log, and these of the import counted."""
    assert place.topic.window is not None
    window = before[place.topic.window.first_index :]
    found = [NOT_DUP] * len(ids) if one.verdicts is None else one.verdicts.tolist()
    is_copy = [x in window or x in alive or x in ids[:k] for k, x in enumerate(ids)]
    assert found == [DUP if copy else NOT_DUP for copy in is_copy], ids
    assert one.imported_rows.tolist() == [k for k, x in enumerate(ids) if x in alive and x not in window], ids


async def histories(store: Store, tmp_path: Path) -> None:
    for seed in range(12):
        minutes = random.Random(seed).choice([-1, 60])
        place = ImportPlace(store, deduplication_window_max_minutes=minutes, deduplication_window_max_messages=20)
        await history(place, seed, tmp_path / "window")
        batch = WriteBatch(raw_mode=True)
        batch.delete_range(part_key(INCARNATION, b"A", 0), part_key(INCARNATION, b"Z", 0))
        store.write(batch)


async def test_what_an_id_is_follows_from_log_and_times(store: Store, tmp_path: Path) -> None:
    await histories(store, tmp_path)


def _not_looked_into(self: WindowImported, since_ms: int) -> None:
    return None


def _not_stated(self: ImportedWindow, message: Any) -> None:
    return None


PLANTED: dict[str, tuple[Any, str, Any]] = {
    "what was imported does not count": (WindowImported, "to_look_into", _not_looked_into),
    "it never expires": (judge, "since_ms", lambda applied, now: -1),
    "the log does not say what was imported": (ImportedWindow, "fill", _not_stated),
    "the times are cut, and not rounded up": (topic_state, "seconds_of", lambda times: times // 1000 - 1),
    "a part of the import is left out": (topic_state, "entries_with", lambda *a: _without_the_last(*a)),
}


def _without_the_last(sizes: Any, seconds: Any, ids: Any, key: Any) -> Any:
    return entries_with(sizes[:-1], seconds[:-1], ids[: len(ids) - int(sizes[-1])], key)


@pytest.mark.parametrize("bug", PLANTED)
async def test_control_a_planted_bug_is_noticed(
    store: Store, tmp_path: Path, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*PLANTED[bug])
    with pytest.raises((AssertionError, ValueError)):
        await histories(store, tmp_path)


def _never(self: WindowImported) -> bool:
    return False


CONTROLS: dict[str, tuple[Any, str, Any, Callable[..., Any]]] = {
    "the log is told before the store has it": (
        windows, "_put_import", lambda *_: None, test_what_was_imported_is_dup_without_an_index_over_restarts
    ),
    "what is missing is taken for nothing": (
        WindowImported, "is_missing", property(_never), test_damage_is_as_good_as_missing_and_the_file_mends_it
    ),
    "what could not be read stays": (
        windows, "remove_import", lambda *a: None, test_what_could_not_be_read_never_passes_for_whole
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", CONTROLS)
async def test_control_what_a_crash_or_a_loss_leaves(
    place: ImportPlace, tmp_path: Path, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, planted, test = CONTROLS[bug]
    monkeypatch.setattr(where, name, planted)
    with pytest.raises((AssertionError, ValueError)):
        await test(place, tmp_path)
