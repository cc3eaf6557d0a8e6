"""Watermarks that are imported: all or nothing, before anybody else, for good; and watermarks that are exported."""

import asyncio
import itertools
import os
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqdedupe.core.name_table import Names
from seqdedupe.core.producers import Producers
from seqdedupe.core.rule import PERSISTED
from seqdedupe.doctor.findings import Tally
from seqdedupe.errors import DamagedError, InvalidRequestError, SeqdedupeError, UnavailableError
from seqdedupe.log.embedded.inspection import Intact
from seqdedupe.log.embedded.logs import EmbeddedLogs
from seqdedupe.store.db import Store
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.topic import control
from seqdedupe.topic.attached import AttachedTopic, Columns
from seqdedupe.topic.base import State, TopicBase
from seqdedupe.topic.control import Import, Imported, ImportParts
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.operations import open_sessions, reset_producer
from seqdedupe.topic.policy import Applied
from seqdedupe.topic.topic import Topic
from seqdedupe.transfer.topic_state import _ImportIntoLog, begin_import, watermarks
from tests.batches import batch
from tests.log.faulty import FaultyLog, Storage

INCARNATION = 5
NEVER_BY_ITSELF = Applied(deduplication_entries_interval=2**31 - 1, deduplication_snapshot_interval_seconds=0)
MARKS = {b"a": 7, b"b": 0, b"c": 2**63 - 1}
DUP = 2


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Callable[[], Store]]:
    opened: list[Store] = []

    def new() -> Store:
        opened.append(Store.open(tmp_path / f"store-{len(opened)}"))
        return opened[-1]

    yield new
    for store in opened:
        store.close()


def new_topic(store: Store, log: Any) -> Topic:
    snapshots = Snapshots(store, INCARNATION)
    return Topic("t", log, store, snapshots, snapshots.load(), applied=NEVER_BY_ITSELF, random_bytes=os.urandom)


@pytest.fixture
async def topic(stores: Callable[[], Store]) -> AsyncIterator[Topic]:
    topic = new_topic(stores(), FaultyLog(Storage(INCARNATION), automatic=True))
    await topic.recover()
    yield topic
    await topic.close("")


async def import_marks(topic: TopicBase, marks: dict[bytes, int], at_once: int = 2) -> None:
    with closing(begin_import(topic)) as importing:
        names = sorted(marks)
        for start in range(0, len(names), at_once):
            some = names[start : start + at_once]
            await importing.add(some, np.array([marks[name] for name in some]))
        await importing.finish()


def exported(topic: TopicBase) -> dict[bytes, int]:
    return {
        name: int(persisted)
        for names, column in watermarks(topic)
        for name, persisted in zip(names, column, strict=True)
    }


async def publish(topic: Topic, name: str, *ids: int, link: int | None = None) -> list[int]:
    """Opens the name and sends; the verdicts."""
    opened = await open_sessions(topic, [name], None)
    answers: list[FrameReceipt | Refusal] = []
    before = min(opened.persisted[0], ids[0] - 1) if link is None else link
    encoded = batch([(name, i) for i in ids], epochs={name: opened.epochs[0]}, links={name: before}).encode()
    topic.admit(encoded, 1, answers.append, NumbersCache())
    await topic.flight.all_of_now()
    assert isinstance(answers[0], FrameReceipt)
    return [1] * len(ids) if answers[0].verdicts is None else answers[0].verdicts.tolist()


# -- what it does --------------------------------------------------------------------------------------------------


async def test_what_was_imported_is_a_duplicate_and_what_comes_after_is_new(topic: Topic) -> None:
    await import_marks(topic, MARKS)
    assert exported(topic) == MARKS
    opened = await open_sessions(topic, ["a", "c", "d"], None)
    assert (opened.persisted, opened.indexes) == ([7, 2**63 - 1, -1], [-1, -1, -1])
    assert await publish(topic, "a", 3, 7, 8) == [DUP, DUP, 1]
    assert await publish(topic, "b", 0, 1) == [DUP, 1]
    assert await publish(topic, "c", 2**63 - 1) == [DUP]
    assert await publish(topic, "new", 0) == [1]
    assert exported(topic) == {b"a": 8, b"b": 1, b"c": 2**63 - 1, b"new": 0}


async def test_it_merges_by_maximum_and_may_be_repeated(topic: Topic) -> None:
    await import_marks(topic, {b"a": 5, b"b": 9})
    await import_marks(topic, {b"a": 7, b"b": 3, b"d": 1})
    await import_marks(topic, {b"a": 7, b"b": 3, b"d": 1})
    await import_marks(topic, {})
    assert exported(topic) == {b"a": 7, b"b": 9, b"d": 1}


@pytest.mark.parametrize("has_snapshot", [False, True])
@pytest.mark.parametrize("is_rebuilt", [False, True])
async def test_a_restart_and_a_rebuilt_store_keep_it(
    stores: Callable[[], Store], has_snapshot: bool, is_rebuilt: bool
) -> None:
    store = stores()
    storage = Storage(INCARNATION)
    topic = new_topic(store, FaultyLog(storage, automatic=True))
    await topic.recover()
    await import_marks(topic, MARKS, at_once=1)
    if has_snapshot:
        await topic.keeper.snapshot()
    await topic.close("")
    for _ in range(2):
        # The second time there is a message, and one producer was set back.
        topic = new_topic(stores() if is_rebuilt else store, FaultyLog(storage, automatic=True))
        await topic.recover()
        persisted = MARKS if topic.confirmed_index == 0 else MARKS | {b"a": 2, b"b": 4}
        assert exported(topic) == persisted
        if topic.confirmed_index == 0:
            await reset_producer(topic, "a", 2)
            assert await publish(topic, "b", 0, 4) == [DUP, 1]
            if has_snapshot:
                await topic.keeper.snapshot()
        await topic.close("")


# -- all or nothing ------------------------------------------------------------------------------------------------


def at_once(parts: ImportParts, part: Import) -> Imported:
    """Each part counts by itself."""
    return Imported(Names.of(part.names), np.arange(len(part.names)), part.persisted)


@pytest.mark.parametrize("is_careful", [True, False])
@pytest.mark.parametrize("lands", range(5))
async def test_after_a_crash_all_of_it_is_in_force_or_nothing(
    stores: Callable[[], Store], monkeypatch: pytest.MonkeyPatch, lands: int, is_careful: bool
) -> None:
    """The process ends when this many of its four records have reached the log. Each part by itself would not do."""
    if not is_careful:
        monkeypatch.setattr(ImportParts, "add", at_once)
    store = stores()
    log = FaultyLog(Storage(INCARNATION))
    topic = new_topic(store, log)
    await topic.recover()
    running = asyncio.ensure_future(import_marks(topic, MARKS, at_once=1))
    for _ in range(lands):
        await until(lambda: log.in_flight > 0)
        log.settle(1)
    if lands < 4:
        await until(lambda: log.in_flight > 0)
        assert not running.done()
        running.cancel()
    else:
        await running
    if lands == 2:
        await topic.keeper.snapshot()
    assert exported(topic) == (MARKS if lands == 4 else {}) or not is_careful
    log = log.crash(lands=0)
    log.automatic = True
    topic = new_topic(store, log)
    await topic.recover()
    assert (exported(topic) == (MARKS if lands == 4 else {})) == (is_careful or lands in (0, 4))
    if is_careful:
        assert len(topic.producers) == (3 if lands == 4 else 0)
        # It can be repeated, and is as if it had been the only one.
        await import_marks(topic, MARKS | {b"d": 3}, at_once=3)
        assert exported(topic) == MARKS | {b"d": 3}
        assert await publish(topic, "a", 7, 8) == [DUP, 1]
    await topic.close("")


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("fault", ["refused", "unknown, not there", "unknown, there"])
async def test_a_log_that_fails_at_any_record(stores: Callable[[], Store], at: int, fault: str) -> None:
    log = FaultyLog(Storage(INCARNATION))
    topic = new_topic(stores(), log)
    await topic.recover()
    running = asyncio.ensure_future(import_marks(topic, MARKS, at_once=1))
    for _ in range(at):
        await until(lambda: log.in_flight > 0)
        log.settle(1)
    await until(lambda: log.in_flight > 0)
    is_there = fault == "unknown, there"
    if fault == "refused":
        log.refuse()
    else:
        log.unknown(lands=1 if is_there else 0)
    log.automatic = True
    why = (await asyncio.gather(running, return_exceptions=True))[0]
    # Where an earlier part is found, the next one may come too early.
    reason = "RECOVERING" if is_there else "LOG_REFUSED"
    assert why is None or (isinstance(why, UnavailableError) and why.reason == reason)
    is_answered = why is None
    assert is_answered == is_there if at == 3 else not is_answered or is_there
    await until(lambda: topic.state is State.SERVING)
    assert exported(topic) == (MARKS if is_answered else {})
    await import_marks(topic, MARKS)
    assert exported(topic) == MARKS
    await topic.close("")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.parametrize(("settles", "is_careful"), [(0, True), (1, True), (2, True), (3, True), (1, False)])
async def test_who_opens_first_wins(
    stores: Callable[[], Store], monkeypatch: pytest.MonkeyPatch, settles: int, is_careful: bool
) -> None:
    """A producer opens the topic when this many of the three records are durable: it has learned all of it, or the
    import fails and it learns nothing. Who does not look again changes the numbers under a session that learned
    others."""
    if not is_careful:
        monkeypatch.setattr(_ImportIntoLog, "_check_unused", lambda self: None)
    log = FaultyLog(Storage(INCARNATION))
    topic = new_topic(stores(), log)
    await topic.recover()
    running = asyncio.ensure_future(import_marks(topic, MARKS))
    for _ in range(settles):
        await until(lambda: log.in_flight > 0)
        log.settle(1)
    await until(lambda: running.done() if settles == 3 else log.in_flight > 0)
    opening = asyncio.ensure_future(open_sessions(topic, ["a"], None))
    await asyncio.sleep(0)
    log.settle()
    opened = await opening
    log.automatic = True
    log.settle()
    if not is_careful:
        await running
        assert (opened.persisted, exported(topic)) == ([-1], MARKS)
    elif settles >= 2:
        await running
        assert opened.persisted == [7]
    else:
        with pytest.raises(InvalidRequestError, match="TOPIC_IN_USE"):
            await running
        assert opened.persisted == [-1]
    await topic.close("")


async def a_second_import_ends_the_first(topic: TopicBase) -> None:
    first = begin_import(topic)
    await first.add([b"x"], np.array([1]))
    await import_marks(topic, MARKS)
    with pytest.raises(InvalidRequestError, match="another import"):
        await first.add([b"y"], np.array([1]))
    with pytest.raises(InvalidRequestError, match="another import"):
        await first.finish()


async def test_a_second_import_ends_the_first(topic: Topic) -> None:
    await a_second_import_ends_the_first(topic)
    assert exported(topic) == MARKS


@pytest.mark.parametrize("ends_in", ["a part", "the last part"])
async def test_who_gives_up_while_a_part_is_on_its_way_has_imported_what_a_restart_finds(
    stores: Callable[[], Store], ends_in: str
) -> None:
    """Nothing is kept of what can never be complete; but a last part may land all the same."""
    log = FaultyLog(Storage(INCARNATION))
    store = stores()
    topic = new_topic(store, log)
    await topic.recover()
    running = asyncio.ensure_future(import_marks(topic, MARKS, at_once=1))
    for _ in range(3 if ends_in == "the last part" else 2):
        await until(lambda: log.in_flight > 0)
        log.settle(1)
    await until(lambda: log.in_flight > 0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    log.settle()
    expected = MARKS if ends_in == "the last part" else {}
    assert exported(topic) == expected
    assert topic.import_parts._names is None
    assert topic.newest_import is None
    log = log.crash(lands=0)
    log.automatic = True
    topic = new_topic(store, log)
    await topic.recover()
    assert exported(topic) == expected
    await topic.close("")


# -- refusals ------------------------------------------------------------------------------------------------------


async def test_a_topic_in_use_takes_none(topic: Topic) -> None:
    begun = begin_import(topic)
    await open_sessions(topic, ["p"], None)
    with pytest.raises(InvalidRequestError, match="TOPIC_IN_USE"):
        begin_import(topic)
    with pytest.raises(InvalidRequestError, match="TOPIC_IN_USE"):
        await begun.finish()
    await publish(topic, "p", 4)
    with pytest.raises(InvalidRequestError, match="it has messages"):
        begin_import(topic)
    assert exported(topic) == {b"p": 4}


async def test_what_a_reset_has_set_is_not_imported_again(topic: Topic) -> None:
    await import_marks(topic, MARKS)
    await reset_producer(topic, "a", 3)
    with pytest.raises(InvalidRequestError, match="reset"):
        begin_import(topic)
    assert exported(topic) == MARKS | {b"a": 3}


@pytest.mark.parametrize(
    ("names", "persisted", "reason"),
    [
        ([b""], [1], "INVALID_NAME"),
        ([b"x" * 256], [1], "INVALID_NAME"),
        ([b"\xff"], [1], "INVALID_NAME"),
        ([b"a\n"], [1], "INVALID_NAME"),
        ([b"b", b"b"], [1, 1], "INVALID_REQUEST"),
        ([b"b", b"a"], [1, 1], "INVALID_REQUEST"),
        ([b"M"], [1], "INVALID_REQUEST"),
        ([b"z"], [-1], "INVALID_SEQUENCE_ID"),
        ([b"z"], [1, 2], "INVALID_REQUEST"),
        ([], [1], "INVALID_REQUEST"),
    ],
)
@pytest.mark.parametrize("is_attached", [False, True])
async def test_what_cannot_be_is_refused(
    topic: Topic, stores: Callable[[], Store], names: list[bytes], persisted: list[int], reason: str, is_attached: bool
) -> None:
    into = brokers_topic(stores()) if is_attached else topic
    importing = begin_import(into)
    await importing.add([b"M"], np.array([1]))
    with pytest.raises(SeqdedupeError) as caught:
        await importing.add(names, np.array(persisted))
    assert caught.value.reason == reason
    if not is_attached:
        assert exported(topic) == {}


async def test_nothing_is_exported_or_imported_while_it_is_not_certain(stores: Callable[[], Store]) -> None:
    log = FaultyLog(Storage(INCARNATION))
    log.opening_allowed.clear()
    topic = new_topic(stores(), log)
    recovering = asyncio.ensure_future(topic.recover())
    with pytest.raises(UnavailableError, match="RECOVERING"):
        exported(topic)
    with pytest.raises(UnavailableError, match="RECOVERING"):
        begin_import(topic)
    log.opening_allowed.set()
    await recovering
    log.refuse_opens(10**6)
    log.refuse()
    assert topic.state is State.READ_ONLY
    assert exported(topic) == {}
    with pytest.raises(UnavailableError, match="LOG_REFUSED"):
        begin_import(topic)
    await topic.close("")


# -- records -------------------------------------------------------------------------------------------------------


def test_a_part_is_read_as_it_was_written() -> None:
    for part in (
        Import([b"a", "ü".encode()], np.array([0, 2**63 - 1]), 0, False),
        Import([], np.zeros(0, np.int64), 2**32 - 1, True),
    ):
        change, term = control.decode(control.encode(part, term=7, record_id=3))
        assert isinstance(change, Import)
        assert (change.names, change.persisted.tolist(), term) == (part.names, part.persisted.tolist(), 7)
        assert (change.part, change.is_last) == (part.part, part.is_last)


def test_a_record_that_does_not_fit_together_is_damage() -> None:
    for names, persisted in (([b"a"], [1, 2]), ([b"a", b"b"], [1])):
        body = control.encode(Import(names, np.array(persisted), 0, True))
        with pytest.raises(DamagedError, match="LOG_DAMAGED"):
            control.decode(body)


def test_only_whole_imports_count_in_whatever_order_parts_stand() -> None:
    def part(number: int, is_last: bool = False) -> Import:
        return Import([b"%d" % number], np.array([number]), number, is_last)

    for order in itertools.permutations([part(0), part(1), part(2, True)]):
        parts = ImportParts()
        found = [parts.add(one) for one in order]
        is_whole = [one.part for one in order] == [0, 1, 2]
        assert [0 if complete is None else len(complete.numbers) for complete in found] == (
            [0, 0, 3] if is_whole else [0, 0, 0]
        )
    parts = ImportParts()
    found = [parts.add(one) for one in (part(0), part(1), part(0), part(1, True), part(2, True))]
    assert [one is None for one in found] == [True, True, True, False, True]
    producers = Producers()
    producers.add_all([b"1", b"x"])
    assert found[3] is not None
    found[3].apply(producers, 0)
    names, numbers = producers.names_from(0), producers.numbers[:, PERSISTED].tolist()
    assert dict(zip(names, numbers, strict=False)) == {b"1": 1, b"x": -1, b"0": 0}


async def test_retention_says_it_again_and_the_doctor_follows(stores: Callable[[], Store], tmp_path: Path) -> None:
    logs = EmbeddedLogs(tmp_path / "logs", clock_ms=lambda: 1, fatal=pytest.fail, segment_bytes=4000)
    await logs.create(INCARNATION, "persistent://public/default/t", bytes(16))

    async def start(store: Store) -> Topic:
        snapshots = Snapshots(store, INCARNATION)
        loaded = snapshots.load()
        log = await logs.open(INCARNATION, loaded.next_index if loaded else 0)
        applied = Applied(deduplication_entries_interval=2**31 - 1, retention_size_in_mb=0)
        topic = Topic("t", log, store, snapshots, loaded, applied=applied, random_bytes=os.urandom)
        await topic.recover()
        return topic

    topic = await start(stores())
    await import_marks(topic, MARKS)
    tally = Tally("a log")
    async for entries in topic.log.replay(0):
        tally.add(Intact(entries.raw, entries.table))
    assert dict(zip(tally.producers.names_from(0), tally.persisted().tolist(), strict=True)) == MARKS
    epoch = (await open_sessions(topic, ["filler"], None)).epochs[0]
    for i in range(40):
        rows = batch([("filler", i)], epochs={"filler": epoch}, links={"filler": i - 1}, payloads=[bytes(500)])
        topic.admit(rows.encode(), 1, lambda _: None, NumbersCache())
        await topic.flight.all_of_now()
    await topic.keeper.snapshot()
    await until(lambda: topic.log.first_index >= 20)
    await topic.close("")
    topic = await start(stores())
    assert exported(topic) == MARKS | {b"filler": 39}
    assert await publish(topic, "a", 7, 8) == [DUP, 1]
    await topic.close("")
    await logs.close()


# -- a broker's own log --------------------------------------------------------------------------------------------


def brokers_topic(store: Store) -> AttachedTopic:
    snapshots = Snapshots(store, INCARNATION)
    return AttachedTopic(
        "t",
        INCARNATION,
        store,
        snapshots,
        snapshots.load(),
        applied=NEVER_BY_ITSELF,
        now_seconds=lambda: 0.0,
        on_state=lambda topic: None,
    )


def columns(*ids: int) -> Columns:
    lowest = np.array(ids)
    return Columns(np.zeros(len(ids), np.int32), lowest, lowest)


async def test_a_brokers_topic_takes_and_gives_them_too(stores: Callable[[], Store]) -> None:
    store = stores()
    topic = brokers_topic(store)
    with pytest.raises(UnavailableError, match="NOT_ATTACHED"):
        exported(topic)
    await import_marks(topic, {b"a": 3})
    await import_marks(topic, MARKS)
    # It was durable: nothing is written when the process ends.
    topic = brokers_topic(store)
    begun = begin_import(topic)
    attachment = topic.attach(lambda why: None, lambda: None)
    with pytest.raises(InvalidRequestError, match="a broker is attached"):
        await begun.finish()
    attachment.register(0, [b"a"])
    attachment.end_replay(b"")
    topic.ready()
    assert exported(topic) == MARKS
    checked = topic.check(attachment, columns(7, 8))
    assert checked.verdicts.tolist() == [DUP, 1]
    topic.report(attachment, checked.first_admission, 1, b"p", 0)
    topic.detach(attachment)
    with pytest.raises(InvalidRequestError, match="its log has entries"):
        begin_import(topic)
    await topic.drain()


async def test_a_second_import_into_a_brokers_topic_ends_the_first(stores: Callable[[], Store]) -> None:
    topic = brokers_topic(stores())
    await a_second_import_ends_the_first(topic)
    assert topic.producers.names_from(0) == sorted(MARKS)
    await topic.drain()


async def test_a_brokers_import_that_is_not_finished_has_done_nothing(stores: Callable[[], Store]) -> None:
    topic = brokers_topic(stores())
    importing = begin_import(topic)
    await importing.add([b"a"], np.array([1]))
    assert len(topic.producers) == 0
    held = weakref.ref(importing)
    importing.close()
    del importing
    assert held() is None, "nor is it kept"
    await topic.drain()
