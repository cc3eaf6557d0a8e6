"""A topic that is opened where a snapshot ends: what is there is found, what is gone is said, nothing is read twice."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import pytest

from seqdedupe.entry_properties import EntryOwner
from seqdedupe.errors import DamagedError, PositionError, SeqdedupeError
from seqdedupe.format.headers import ownership_of
from seqdedupe.limits import Retention
from seqdedupe.log.pulsar import content, entries, places
from seqdedupe.log.pulsar import log as log_module
from seqdedupe.log.pulsar import places as places_module
from seqdedupe.log.pulsar.entries import EntryFormat
from seqdedupe.log.pulsar.log import PulsarLog
from seqdedupe.log.pulsar.places import MAX_POINTS, STEP_BYTES, Places, Point, thinned
from seqdedupe.log.pulsar.terms import TermStanding
from seqdedupe.message_id import MessageId
from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.log.batches import encoded_batch
from tests.log.conformance import Owner as OwnerOfLog
from tests.log.conformance import parsed, replayed, what
from tests.log.pulsar.test_log import BOTH, StandInHarness
from tests.log.pulsar.topics import INCARNATION, marker, stock

PAYLOAD_BYTES = 8_000


async def filled(harness: StandInHarness, messages: int, *, ledger_messages: int = 25) -> PulsarLog:
    """A log with this many messages, each its own batch, in ledgers of this many."""
    log = await harness.open()
    owner = await OwnerOfLog(log, 1).open()
    for i in range(messages):
        if i % ledger_messages == ledger_messages - 1:
            harness.topic.roll_over()
        owner.append(i, 1, PAYLOAD_BYTES)
        await owner.until_stored(i + 1)
    return log


async def ids_from(log: PulsarLog, first: int, stop: int) -> list[int]:
    at, found = first, []
    while at < stop:
        for record in parsed(await log.read(at, stop, 100_000)):
            assert record.base_index == at
            found += list(record.batch.sequence_ids)
            at += record.rows
    return found


# What does not meet the log's first entry.


@BOTH
@pytest.mark.parametrize("ledgers", [1, 3])
async def test_without_a_snapshot_a_topic_whose_beginning_is_gone_is_no_state(
    entry_format: EntryFormat, ledgers: int
) -> None:
    harness = StandInHarness(entry_format)
    await (await filled(harness, 100)).close()
    harness.topic.trim(ledgers)
    there = len(harness.topic.entries)
    with pytest.raises(DamagedError, match="NO_STATE") as caught:
        await harness.open()
    assert "import" in caught.value.hint
    assert len(harness.topic.entries) == there
    assert harness.client.writer is None


@BOTH
@pytest.mark.parametrize("had_owner", [True, False], ids=["after an owner", "before the first owner"])
async def test_entries_of_others_alone_are_no_beginning_of_a_topic_that_had_an_owner(
    entry_format: EntryFormat, had_owner: bool
) -> None:
    """Otherwise the indexes of acknowledged messages would be given again."""
    harness = StandInHarness(entry_format)
    if had_owner:
        await (await filled(harness, 3)).close()
        harness.topic.roll_over()
    harness.topic.add(stock(), "a stranger", 7)
    if had_owner:
        harness.topic.trim(1)
    with pytest.raises(DamagedError, match="NO_STATE") if had_owner else nullcontext():
        log = await harness.open()
        assert (log.first_index, log.earlier) == (0, {"a stranger": 7})
        await log.close()


async def test_the_first_entry_of_another_sidecar_may_come_while_the_topic_is_opened() -> None:
    harness = StandInHarness(EntryFormat.NATIVE)
    one, other = await harness.open(), harness.log()
    properties = harness.admin.properties
    owners: list[OwnerOfLog] = []

    async def slower(topic: str) -> dict[str, str]:
        if not owners:
            owners.append(OwnerOfLog(one, 1))
            await owners[0].open()
            owners[0].append(0, 1)
            await owners[0].until_stored(1)
        return await properties(topic)

    harness.admin.properties = slower  # type: ignore[method-assign]
    await other.begin(0)
    assert other.certain_index == 1
    await one.close()
    await other.close()


@pytest.mark.parametrize("known", [True, False])
async def test_the_marker_that_alone_is_left_says_that_there_was_more(known: bool) -> None:
    """The control: a marker that does not say it is taken for the first entry of all."""
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await filled(harness, 10)
    harness.topic.roll_over()
    if known:
        await OwnerOfLog(log, 2).open()
    else:
        harness.topic.add(marker(2))
    await log.close()
    harness.topic.trim(ledgers=1)
    assert len(harness.topic.entries) == 1
    if known:
        with pytest.raises(DamagedError, match="NO_STATE"):
            await harness.open()
    else:
        assert (await harness.open()).certain_index == 0


@BOTH
@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_snapshot_whose_last_message_is_gone_is_no_state(entry_format: EntryFormat, is_kept: bool) -> None:
    """The control: with the subscription that keeps it all is well."""
    harness = StandInHarness(entry_format)
    log = await filled(harness, 60)
    place = log.place_at(50)
    await log.snapshot_is_durable(place)
    await log.close()
    if is_kept:
        harness.topic.retain_nothing()
    else:
        harness.topic.trim(ledgers=3)
        # By itself it would hide that something is missing before it.
        harness.topic.add(marker(7, "other"))
    there = list(harness.topic.entries)
    if is_kept:
        assert len(there) < 40
        log = await harness.open(50, place)
        assert [what(r)[1] for r in await replayed(log, 49)] == list(range(49, 60))
        await log.close()
        return
    with pytest.raises(DamagedError, match="NO_STATE"):
        await harness.open(50, place)
    assert (harness.topic.entries, harness.client.open_readers) == (there, 0)


async def test_a_topic_that_ends_before_its_snapshot_is_damaged() -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await filled(harness, 60)
    place = log.place_at(60)
    await log.close()
    harness.topic.entries.pop()
    with pytest.raises(DamagedError, match="its end is gone"):
        await harness.open(60, place)


async def test_a_hole_that_is_met_later_is_a_gap() -> None:
    harness = StandInHarness(EntryFormat.PACKED)
    log = await filled(harness, 200)
    place = log.place_at(200)
    await log.close()
    # As without a subscription: nothing held it.
    del harness.topic.entries[60:80]
    log = await harness.open(200, place)
    assert await ids_from(log, 150, 200) == list(range(150, 200))
    with pytest.raises(DamagedError, match="LOG_GAP"):
        await ids_from(log, 0, 150)
    with pytest.raises(DamagedError, match="LOG_GAP"):
        await log.locate(70)
    assert await ids_from(log, 0, 20) == list(range(20))
    await log.close()
    assert harness.client.open_readers == 0


# What Pulsar removes.


async def test_the_subscription_moves_when_a_snapshot_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MOVE_SECONDS", 0)
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await filled(harness, 0)
    owner = await OwnerOfLog(log, 2).open()
    places = []
    for i in range(200):
        owner.append(i, 1, PAYLOAD_BYTES)
        await owner.until_stored(i + 1)
        if i % 20 == 9:
            harness.topic.roll_over()
        if i % 5 == 0:
            places.append((i + 1, log.place_at(i + 1)))
    for k, (covered_index, place) in enumerate(places):
        # A crash before the subscription moves, and one after it: what is durable is enough.
        for _ in range(2):
            harness.topic.retain_nothing()
            again = await harness.open(covered_index, place)
            assert again.first_index <= covered_index
            ids = [what(r)[1] for r in await replayed(again, covered_index - 1) if r.rows]
            assert ids == list(range(covered_index - 1, 200))
            await again.close()
            harness.admin.answers = k % 3 > 0
            with nullcontext() if harness.admin.answers else pytest.raises(SeqdedupeError):
                await log.snapshot_is_durable(place)
            harness.admin.answers = True
    assert len(harness.topic.entries) < 40
    with pytest.raises(DamagedError, match="NO_STATE"):
        await harness.open(*places[-20])
    await log.close()


async def test_it_does_not_move_with_every_snapshot() -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await filled(harness, 60)
    await log.snapshot_is_durable(log.place_at(40))
    kept_from = harness.topic.kept_from
    await log.snapshot_is_durable(log.place_at(60))
    assert harness.topic.kept_from == kept_from is not None
    await log.close()


async def test_what_retention_has_removed_is_trimmed_for_readers() -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await filled(harness, 200)
    reading = await harness.open(200, log.place_at(200))
    assert await ids_from(reading, 0, 40) == list(range(40))
    for each in (log, reading):
        await each.snapshot_is_durable(each.place_at(200))
    assert await log.may_trim_to(200, Retention()) == 0
    harness.topic.trim(ledgers=5)
    # One learns it when it reads there, or where it stood, the other one when it looks, or is opened.
    for index in (0, 70):
        with pytest.raises(PositionError, match="POSITION_TRIMMED") as caught:
            await ids_from(reading, index, 200)
        first = int(caught.value.numbers["first_index"])
        assert first == 124
        assert reading.first_index == first
    assert await ids_from(reading, first, 200) == list(range(first, 200))
    await reading.close()
    place = log.place_at(200)
    log._moves_at = 0
    await log.snapshot_is_durable(place)
    assert await log.may_trim_to(200, Retention()) == first
    assert await log.may_trim_to(50, Retention()) < 50
    assert log.first_index == 0
    await log.trim(first)
    assert log.first_index == first
    await log.close()
    log = await harness.open(200, place)
    assert log.first_index == first
    assert [what(r)[1] for r in await replayed(log, first) if r.rows] == list(range(first, 200))
    with pytest.raises(PositionError):
        await log.locate(first - 1)
    await log.close()


@BOTH
@pytest.mark.parametrize("is_live", [True, False], ids=["live", "opened again"])
async def test_a_topic_begins_with_the_first_message_that_is_left(entry_format: EntryFormat, is_live: bool) -> None:
    """Not with a point that was known after it: a reader that stands there must go on."""
    harness = StandInHarness(entry_format)
    log = await filled(harness, 60)
    for first in (24, 49):
        place = log.place_at(60)
        await log.snapshot_is_durable(place)
        if not is_live:
            await log.close()
        harness.topic.trim(1)
        if not is_live:
            log = await harness.open(60, place)
            assert log.first_index == first
        assert await ids_from(log, first, 60) == list(range(first, 60))
        log._moves_at = 0
        await log.snapshot_is_durable(place)
        assert await log.may_trim_to(60, Retention()) == first
        await log.trim(first)
        assert log.first_index == first
        with pytest.raises(PositionError, match="POSITION_TRIMMED"):
            await log.locate(first - 1)
        assert (await log.locate(first)).message_id.ledger_id == harness.topic.first_ledger
        assert [what(one)[1] for one in await replayed(log, first) if one.rows] == list(range(first, 60))
    await log.close()
    assert harness.client.open_readers == 0


async def check_beginning(harness: StandInHarness, log: PulsarLog, first: int, end: int) -> None:
    """Without its first ledger, the topic begins with the message `first` when it is opened again."""
    place = log.place_at(end)
    await log.close()
    harness.topic.trim(1)
    log = await harness.open(end, place)
    assert log.first_index == first
    assert await ids_from(log, first, end) == list(range(first, end))
    await log.close()


async def test_what_was_void_is_no_beginning() -> None:
    """An entry of an owner that another one had replaced: it has the index of a message that was acknowledged."""
    harness = StandInHarness(EntryFormat.PLAIN)
    harness.client.excludes = False
    frozen, log = await harness.open(), await harness.open()
    old = await OwnerOfLog(frozen, 1).open()
    old.append(0, 1)
    await old.until_stored(1)
    owner = await OwnerOfLog(log, 2).open()
    harness.topic.roll_over()
    old.append(100, 1)
    await old.until_failed()
    for i in range(1, 6):
        owner.append(i, 1)
        await owner.until_stored(i)
    await frozen.close()
    await check_beginning(harness, log, 1, 6)


@pytest.mark.parametrize("payload_bytes", [10, 5_000])
async def test_what_was_void_is_no_beginning_even_if_it_leads_to_a_known_point(payload_bytes: int) -> None:
    """It has the index of a message that is gone, and the next owner goes on after both."""
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await harness.open()
    old = await OwnerOfLog(log, 1).open()
    old.append(0, 1)
    await old.until_stored(1)
    replaced = await OwnerOfLog(log, 2).open()
    replaced.append(1, 1)
    await replaced.until_stored(1)
    harness.topic.roll_over()
    late = EntryOwner(INCARNATION, 1, ownership_of(old.token))
    for message in entries.messages_of_part(late, 2, 1, encoded_batch(100, 1, payload_bytes)[0]):
        harness.topic.add(message)
    owner = await OwnerOfLog(log, 3).open()
    for i in range(2, 6):
        owner.append(i, 1)
        await owner.until_stored(i - 1)
    await check_beginning(harness, log, 2, 6)


@BOTH
@pytest.mark.parametrize("is_live", [True, False], ids=["live", "opened again"])
async def test_what_is_left_of_an_earlier_owner_is_the_beginning(entry_format: EntryFormat, is_live: bool) -> None:
    """Its marker is gone, and all of the later owners is small."""
    harness = StandInHarness(entry_format)
    log = await harness.open()
    for term in range(1, 6):
        owner = await OwnerOfLog(log, term).open()
        for i in range(4):
            if i == 2:
                harness.topic.roll_over()
            owner.append(4 * term - 4 + i, 1)
            await owner.until_stored(i + 1)
    place = log.place_at(20)
    await log.snapshot_is_durable(place)
    if not is_live:
        await log.close()
        log = await harness.open(20, place)
    for first in (2, 6, 10):
        harness.topic.trim(1)
        log._moves_at = 0
        await log.snapshot_is_durable(place)
        assert await log.may_trim_to(20, Retention()) == first
        assert await ids_from(log, first, 20) == list(range(first, 20))
    await log.close()


@BOTH
@pytest.mark.parametrize("trimmed", [0, 1])
async def test_no_later_place_needs_what_is_not_kept_any_more(entry_format: EntryFormat, trimmed: int) -> None:
    """Also while the log is known further than what is merged: then no point is near."""
    harness = StandInHarness(entry_format)
    log = await harness.open()
    owner = await OwnerOfLog(log, 1).open()
    for i in range(16):
        if i == 12:
            place = log.place_at(12)
            await log.snapshot_is_durable(place)
            harness.topic.trim(trimmed)
            log._moves_at = 0
            await log.snapshot_is_durable(place)
            await log.trim(await log.may_trim_to(12, Retention()))
            assert log.first_index == 3 * trimmed
        if i % 4 == 3:
            harness.topic.roll_over()
        owner.append(i, 1)
        await owner.until_stored(i + 1)
    place, log._moves_at = log.place_at(14), 0
    await log.snapshot_is_durable(place)
    harness.topic.retain_nothing()
    await log.close()
    log = await harness.open(14, place)
    assert [what(one)[1] for one in await replayed(log, 13) if one.rows] == [13, 14, 15]
    await log.close()


async def test_readers_that_meet_what_is_gone_look_for_the_beginning_once() -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await filled(harness, 200)
    await log.snapshot_is_durable(log.place_at(200))
    place = log.place_at(200)
    await log.close()
    log = await harness.open(200, place)
    harness.topic.trim(4)
    before = harness.client.opened_readers
    found = await asyncio.gather(*(log.read(i, 200, 1) for i in range(0, 90, 3)), return_exceptions=True)
    assert {getattr(one, "reason", "") for one in found} == {"POSITION_TRIMMED"}
    assert harness.client.opened_readers - before == len(found) + 1
    await log.close()


# Readers.


async def test_reading_on_takes_one_reader_and_reads_nothing_twice() -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await filled(harness, 300)
    place = log.place_at(300)
    await log.close()
    log = await harness.open(300, place)
    before = harness.client.opened_readers, harness.client.entries_read
    assert await ids_from(log, 0, 300) == list(range(300))
    assert harness.client.opened_readers - before[0] == 1
    assert harness.client.entries_read - before[1] <= 310
    await log.close()
    assert harness.client.open_readers == 0


async def test_reading_on_without_what_is_kept_takes_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(content, "KEPT_CURSORS", 0)
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await filled(harness, 300)
    before = harness.client.opened_readers
    assert await ids_from(log, 0, 300) == list(range(300))
    assert harness.client.opened_readers - before > 5
    await log.close()
    assert harness.client.open_readers == 0


async def test_readers_are_few_and_are_closed_when_nobody_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "IDLE_SECONDS", 0.05)
    harness = StandInHarness(EntryFormat.PACKED)
    log = await filled(harness, 200)
    most = 0

    async def look() -> None:
        nonlocal most
        while True:
            most = max(most, harness.client.open_readers)
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    reads = [ids_from(log, first, 200) for first in range(0, 200, 10)]
    for first, found in zip(range(0, 200, 10), await asyncio.gather(*reads), strict=True):
        assert found == list(range(first, 200))
    looking.cancel()
    assert 0 < most <= content.MAX_READING + content.KEPT_CURSORS + 1
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        while harness.client.open_readers:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.01)
    await log.close()


async def test_a_kept_reader_that_fails_gives_way_to_a_new_one() -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await filled(harness, 200)
    await ids_from(log, 0, 40)
    fails = iter([True])
    harness.client.fails_reading = lambda: next(fails, False)
    assert await ids_from(log, 40, 200) == list(range(40, 200))
    place = log.place_at(200)
    await log.close()
    log = await harness.open(200, place)
    harness.client.fails_reading = lambda: True
    with pytest.raises(SeqdedupeError, match="LOG_UNREADABLE"):
        await ids_from(log, 0, 20)
    harness.client.fails_reading = lambda: False
    assert await ids_from(log, 0, 200) == list(range(200))
    await log.close()
    assert harness.client.open_readers == 0


@BOTH
async def test_recovery_reads_the_tail_once(entry_format: EntryFormat) -> None:
    harness = StandInHarness(entry_format)
    log = await filled(harness, 300)
    place = log.place_at(100)
    await log.close()
    before = harness.client.entries_read
    log = await harness.open(100, place)
    opened = harness.client.entries_read - before
    assert opened < 100
    assert [what(record)[1] for record in await replayed(log, 99)] == list(range(99, 300))
    await OwnerOfLog(log, 2).open()
    assert [what(record) for record in await replayed(log, 300)] == [("marker", 2, 0)]
    assert harness.client.entries_read - before <= 201 + 5
    await log.close()


async def cancelled_at(steps: int, work: Awaitable[object]) -> bool:
    """Whether the work was cancelled after this many turns of the event loop, before it was done."""
    task = asyncio.ensure_future(work)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


@BOTH
async def test_whoever_is_cancelled_anywhere_harms_nobody(entry_format: EntryFormat) -> None:
    harness = StandInHarness(entry_format)
    log = await filled(harness, 120)
    place = log.place_at(60)
    await log.close()

    async def tried(work: Callable[[PulsarLog], Awaitable[object]]) -> int:
        for steps in itertools.count():
            log = harness.log(place=place)
            if steps % 2:
                await log.begin(60)
            was_cancelled = await cancelled_at(steps // 2, work(log))
            await log.begin(60)
            assert [what(r)[1] for r in await replayed(log, 59)] == list(range(59, 120))
            assert await ids_from(log, 0, 120) == list(range(120))
            await log.close()
            assert harness.client.open_readers == 0
            if not was_cancelled and steps % 2:
                return steps
        raise AssertionError

    assert await tried(lambda log: log.begin(60)) >= 1
    assert await tried(lambda log: replayed(log, log.certain_index)) > 3
    assert await tried(lambda log: log.read(0, 1, 1)) > 3


# Points.


def grown(entries: int, seed: int) -> tuple[Places, list[Point]]:
    """Places after this many entries, and all points where a record begins."""
    rng = random.Random(seed)
    of = Places([Point.start(INCARNATION)])
    every = [of.end]
    for i in range(entries):
        begins = rng.random() < 0.7
        if begins:
            every.append(of.end)
        count = rng.choice((0, 1, 1, 5)) if begins else 1
        standing = TermStanding(EntryOwner(INCARNATION, 1, 7), i + 1, of.end.next_index + count)
        to = of.end.after(standing, MessageId(1, i), i, i, rng.randrange(64, STEP_BYTES))
        of.advance(to, begins_record=begins, is_batch=count > 1)
    return of, every


@pytest.mark.parametrize("seed", range(5))
def test_points_are_bounded_and_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MAX_POINTS", 40)
    of, points = grown(2_000, seed)
    every = {point.size_bytes for point in points}
    for index in random.Random(seed).sample(range(of.end.next_index), 200):
        point = of.at(index)
        assert point.next_index <= index
        assert point.size_bytes in every
        assert all(one.next_index < index for one in of.below(index)[1:])
    known = of.below(of.end.next_index)
    assert len(known) <= 40
    assert known[0].size_bytes == 0
    apart = [b.size_bytes - a.size_bytes for a, b in itertools.pairwise(known)]
    assert max(apart) < of.end.size_bytes / 3
    assert max(apart[-10:]) < 4 * STEP_BYTES
    of.go_back(points[700])
    assert of.end == points[700]
    assert of.at(of.end.next_index).size_bytes in every
    assert all(point.size_bytes <= of.end.size_bytes for point in of.below(10**9))


def test_a_place_comes_back_and_anything_else_is_refused() -> None:
    of, _ = grown(3_000, 1)
    points = of.below(of.end.next_index)
    assert 64 < len(points) <= MAX_POINTS
    raw = places_module.bytes_of_points(INCARNATION, points)
    back = places_module.points_of_bytes(INCARNATION, raw)
    assert back == thinned(points, places_module.MAX_STORED_POINTS)
    assert len(back) <= places_module.MAX_STORED_POINTS
    assert (back[0], back[-1]) == (points[0], points[-1])
    with pytest.raises(SeqdedupeError, match="NEWER_FORMAT"):
        places_module.points_of_bytes(INCARNATION, b"\x02" + raw[1:])
    backwards = raw[:9] + raw[81:153] + raw[9:81]
    for bad in (raw[:9], raw[:-1], raw + b"x", raw[:1], b"\x00" + raw[1:], backwards):
        with pytest.raises(SeqdedupeError, match="STORE_DAMAGED"):
            places_module.points_of_bytes(INCARNATION, bad)
    with pytest.raises(SeqdedupeError, match="STORE_DAMAGED"):
        places_module.points_of_bytes(INCARNATION + 1, raw)
