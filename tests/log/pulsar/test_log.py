"""The log over a topic in memory, held against the suite; and what it makes of what no broker can be made to do."""

import asyncio
import itertools
from typing import Any

import pytest

from seqdedupe.entry_properties import KIND, MARKER, MESSAGE, SCHEMA_VERSION, VERSION
from seqdedupe.errors import DamagedError, SeqdedupeError, UnavailableError
from seqdedupe.limits import MAX_PAYLOAD_BYTES
from seqdedupe.log.contract import Failure, Log
from seqdedupe.log.pulsar import reader
from seqdedupe.log.pulsar.entries import EntryFormat, EntrySettings, PulsarEntry, PulsarMessage
from seqdedupe.log.pulsar.log import PulsarLog, PulsarResources
from seqdedupe.message_id import MessageId
from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.log.batches import encoded_batch
from tests.log.conformance import LogConformance, LogHarness, Owner, ids_of, parsed, replayed, what
from tests.log.pulsar.client import StandInAdmin, StandInBrokers, StandInClient
from tests.log.pulsar.owners import valid_in
from tests.log.pulsar.standin import NO_RECEIPT, PulsarTopic
from tests.log.pulsar.topics import INCARNATION, stock

TOPIC = "persistent://public/default/t"
BOTH = pytest.mark.parametrize("entry_format", EntryFormat, ids=lambda entry_format: entry_format.value)


class StandInHarness(LogHarness):
    failure = Failure.UNKNOWN
    takes_higher_terms_only = True
    trims = False

    def __init__(self, entry_format: EntryFormat, version: int = VERSION) -> None:
        self.topic = PulsarTopic(clock_ms=lambda: self.now_ms)
        self.client = StandInClient(self.topic, is_native=entry_format is EntryFormat.NATIVE)
        self.admin = StandInAdmin(self.client)
        self._openings = itertools.count(1)
        self._format = entry_format
        self._version = version
        self.earlier: dict[str, int] = {}
        """What is known of producers before the first marker."""
        self.begins_at: MessageId | None = None
        """The entry up to which a job has read."""

    async def answers(self, address: str) -> bool:
        """Whether a sidecar does."""
        return True

    def shared(self, address: str) -> PulsarResources:
        async def claim(_: str, known: int) -> int:
            return next(number for number in self._openings if number > known)

        brokers: Any = StandInBrokers(self.client)
        return PulsarResources("one", address, lambda: self.now_ms, claim, self.admin, self.answers, brokers)

    def log(self, address: str = "host:6680", place: bytes = b"") -> PulsarLog:
        settings = EntrySettings(self._format, "SEQUENCE_ID", 0, address, self._version)
        return PulsarLog(self.shared(address), TOPIC, INCARNATION, settings, place, self.earlier, self.begins_at)

    async def open(self, covered_index: int = 0, place: bytes = b"") -> PulsarLog:
        log = self.log(place=place)
        try:
            await log.begin(covered_index)
        except BaseException:
            await log.close()
            raise
        return log

    def refuse_writes(self, log: Log) -> None:
        self.client.refuses = True

    def allow_writes(self, log: Log) -> None:
        self.client.refuses = False


class TestPulsarLog(LogConformance):
    @pytest.fixture(params=[*EntryFormat, SCHEMA_VERSION], ids=["plain", "packed", "native", "with a schema"])
    def harness(self, request: pytest.FixtureRequest) -> LogHarness:
        if request.param == SCHEMA_VERSION:
            return StandInHarness(EntryFormat.PLAIN, SCHEMA_VERSION)
        return StandInHarness(request.param)


def is_message(message: PulsarMessage, first_id: int) -> bool:
    """Whether an entry is the message of that sequence ID, or a batch of it alone."""
    return KIND not in message.properties and message.properties.get(MESSAGE, "").startswith(f"{first_id}:")


def the_owners(harness: StandInHarness) -> list[int]:
    """The sequence IDs of all valid messages, by the oracle."""
    found = []
    for _, message in valid_in(harness.topic):
        if MESSAGE in message.properties:
            found.append(int(message.properties[MESSAGE].partition(":")[0]))
    return found


@BOTH
async def test_a_ledger_that_rolls_over_splits_the_message_ids_of_a_batch(entry_format: EntryFormat) -> None:
    harness = StandInHarness(entry_format)
    log = await harness.open()
    owner = await Owner(log, 1).open()
    stored = itertools.count()
    harness.client.before = lambda _: harness.topic.roll_over() if next(stored) % 3 == 2 else None
    for i in range(5):
        owner.append(10 * i, 4)
        owner.append_control(i + 1)
    await owner.until_stored(10)
    ledgers = {entry.message_id.ledger_id for entry in harness.topic.entries}
    assert len(ledgers) > 3
    told = [one for runs in owner.runs for one in ids_of(runs)]
    assert told == sorted(set(told))
    # However the owner had to read them: batches are whole for everybody.
    for index in (2, *range(20)):
        (record,) = parsed(await log.read(index, index + 1, 1))
        assert (record.base_index, record.rows) == (index - index % 4, 4)
    assert [(await log.locate(index)).message_id for index in range(20)] == told
    assert any(len(runs) > 1 for runs in owner.runs) is (entry_format is EntryFormat.PLAIN)
    assert [record.rows for record in await replayed(log) if record.rows] == [4] * 5
    await log.close()


@BOTH
async def test_an_end_that_no_reader_gets_is_no_obstacle(
    entry_format: EntryFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's entry of Pulsar's own kind: a broker says that it is the last, and gives it to no reader."""
    monkeypatch.setattr(reader, "LOOK_SECONDS", 0.01)
    harness = StandInHarness(entry_format)
    harness.topic.add(stock(), "a stranger", 7)
    place = b""
    for term in (1, 2, 3):
        harness.topic.add_hidden()
        harness.topic.roll_over()
        harness.topic.add_hidden()
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            log = await harness.open(term - 1, place)
            assert [what(one)[1] for one in await replayed(log) if one.rows] == list(range(term - 1))
            owner = await Owner(log, term).open()
            owner.append(term - 1, 1)
            await owner.until_stored(1)
        place = log.place_at(term)
        assert (log.certain_index, log.earlier) == (term, {"a stranger": 7} if term == 1 else {})
        await log.close()


async def test_an_end_that_comes_late_is_no_such_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: the broker is only slow."""
    monkeypatch.setattr(reader, "LOOK_SECONDS", 0)
    harness = StandInHarness(EntryFormat.NATIVE)
    harness.topic.add(stock(), "a stranger", 7)
    log = await harness.open()
    assert log.earlier == {"a stranger": 7}
    await log.close()


async def test_a_receipt_of_what_is_not_there_is_an_unknown_outcome() -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await harness.open()
    owner = await Owner(log, 1).open()
    owner.append(0, 1)
    await owner.until_stored(1)
    # What Pulsar's deduplication took for seen, and never stored.
    harness.topic.forget_from_now_on()
    owner.append(1, 1)
    owner.append(2, 1)
    assert await owner.until_failed() is Failure.UNKNOWN
    assert owner.stored == 1
    await log.close()


async def test_of_two_that_both_write_the_earlier_one_learns_it_from_its_next_receipt() -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    harness.client.excludes = False
    old_log, new_log = await harness.open(), await harness.open()
    old = await Owner(old_log, 1).open()
    old.append(0, 1)
    await old.until_stored(1)
    new = await Owner(new_log, 2).open()
    old.append(100, 1)
    assert await old.until_failed() is Failure.UNKNOWN
    assert old.stored == 1
    new.append(1, 1)
    await new.until_stored(1)
    assert the_owners(harness) == [0, 1]
    assert [what(record) for record in await replayed(new_log)] == [
        ("marker", 1, 0),
        ("batch", 0, 1),
        ("marker", 2, 0),
        ("batch", 1, 1),
    ]
    # It learns which term stands, and that its own marker counts for nothing.
    assert await old_log.open_for_writing(2, b"another token...", old._settle) == 2
    assert old_log.certain_index == 2
    for log in (old_log, new_log):
        await log.close()


async def with_hole(harness: StandInHarness, log: PulsarLog) -> Owner:
    """An owner that has stored message 0; message 1 was refused, while what came after it was stored."""
    owner = await Owner(log, 1).open()
    owner.append(0, 1)
    await owner.until_stored(1)
    harness.client.loses = lambda message: is_message(message, 1)
    for first_id in (1, 2, 3):
        owner.append(first_id, 1)
    assert await owner.until_failed() is Failure.UNKNOWN
    owner.append(4, 1)
    assert owner.stored == 1
    assert len(harness.topic.entries) == 4, "what comes after it should have been stored all the same"
    harness.client.loses = lambda _: False
    return owner


async def test_what_follows_a_refused_entry_is_void_for_all_who_read() -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await harness.open()
    await with_hole(harness, log)
    again = await Owner(log, 2).open()
    for first_id in (1, 2):
        again.append(first_id, 1)
    await again.until_stored(2)
    expected = [("marker", 1, 0), ("batch", 0, 1), ("marker", 2, 0), ("batch", 1, 1), ("batch", 2, 1)]
    assert [what(record) for record in await replayed(log)] == expected
    assert log.skipped.void == 2
    # A place before it, one behind it, and none.
    other = await harness.open(3, log.place_at(3))
    assert [record.base_index for record in parsed(await other.read(2, 3, 1))] == [2]
    fresh = await harness.open()
    for each in (other, fresh):
        assert [what(record) for record in await replayed(each)][-2:] == expected[-2:]
    for each in (log, other, fresh):
        await each.close()


async def test_a_hole_at_the_end_of_a_ledger() -> None:
    """What the ledgers say decides. As long as they cannot be looked at, nothing is decided."""
    harness = StandInHarness(EntryFormat.PLAIN)
    harness.client.before = lambda message: harness.topic.roll_over() if is_message(message, 1) else None
    log = await harness.open()
    await with_hole(harness, log)
    assert len({entry.message_id.ledger_id for entry in harness.topic.entries}) == 2
    harness.admin.lists_ledgers = False
    with pytest.raises(UnavailableError, match="LOG_UNREADABLE"):
        await harness.open()
    harness.admin.lists_ledgers = True
    again = await Owner(log, 2).open()
    again.append(1, 1)
    await again.until_stored(1)
    assert [record.base_index for record in await replayed(log) if record.rows] == [0, 1]
    await log.close()


async def test_what_the_broker_has_and_does_not_give_is_a_gap() -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await harness.open()
    owner = await Owner(log, 1).open()
    for first_id in range(3):
        harness.topic.roll_over()
        owner.append(first_id, 1)
    await owner.until_stored(3)
    del harness.topic.entries[2]
    with pytest.raises(DamagedError, match="LOG_GAP"):
        await harness.open()
    await log.close()


async def test_a_snapshot_that_covers_more_proves_that_it_was_no_hole() -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await harness.open()
    await with_hole(harness, log)
    with pytest.raises(DamagedError, match="LOG_GAP"):
        await harness.open(2)
    for each in (log, await harness.open(1)):
        await each.close()


async def test_an_owner_that_ended_within_a_batch_leaves_its_first_rows() -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await harness.open()
    owner = await Owner(log, 1).open()

    def fail_at(message: PulsarMessage) -> None:
        harness.client.refuses = harness.client.refuses or is_message(message, 3)

    harness.client.before = fail_at
    owner.append(0, 5)
    assert await owner.until_failed() is Failure.UNKNOWN
    assert owner.stored == 0
    harness.client.before = lambda _: None
    harness.client.refuses = False
    assert log.certain_index == 0
    again = await Owner(log, 2).open()
    again.append(3, 2)
    await again.until_stored(1)
    assert log.certain_index == 5
    records = await replayed(log)
    assert [what(record) for record in records] == [
        ("marker", 1, 0),
        ("batch", 0, 3),
        ("marker", 2, 0),
        ("batch", 3, 2),
    ]
    assert [list(record.batch.sequence_ids) for record in records if record.rows] == [[0, 1, 2], [3, 4]]
    await log.close()


async def test_what_stock_producers_sent_before_the_first_marker_has_no_index_and_can_be_asked_for() -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    for sequence_id in (3, 8, 5):
        harness.topic.entries.append(
            PulsarEntry(stock(), MessageId(1, sequence_id), 1000, "a stock producer", sequence_id)
        )
    harness.topic.entries.sort(key=lambda entry: entry.message_id)
    log = await harness.open()
    owner = await Owner(log, 1).open()
    harness.topic.add(stock())
    owner.append(0, 1)
    await owner.until_stored(1)
    assert [what(record) for record in await replayed(log)] == [("marker", 1, 0), ("batch", 0, 1)]
    assert log.earlier == {"a stock producer": 8}
    await log.close()


@BOTH
async def test_what_no_entry_can_hold_is_known_before_and_the_rest_is_split(entry_format: EntryFormat) -> None:
    harness = StandInHarness(entry_format)
    log = await harness.open()
    owner = await Owner(log, 1).open()
    too_large, _, _ = encoded_batch(0, 1, MAX_PAYLOAD_BYTES)
    with pytest.raises(SeqdedupeError, match="MESSAGE_TOO_LARGE"):
        log.check(too_large)
    for first_id, rows, payload_bytes in ((0, 1, MAX_PAYLOAD_BYTES - 2048), (1, 4, 2_000_000)):
        log.check(encoded_batch(first_id, rows, payload_bytes)[0])
        owner.append(first_id, rows, payload_bytes)
    await owner.until_stored(2)
    assert [sum(run.rows for run in runs) for runs in owner.runs] == [1, 4]
    ids = [one for record in await replayed(log) for one in record.batch.sequence_ids]
    assert ids == [0, 1, 2, 3, 4]
    at = 0
    while at < 5:
        for record in parsed(await log.read(at, 5, 1)):
            assert (record.base_index, record.batch.sequence_ids[0]) == (at, at)
            at += record.rows
    await log.close()


async def test_a_topic_whose_end_has_changed_is_a_gap() -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await harness.open()
    owner = await Owner(log, 1).open()
    for first_id in range(3):
        owner.append(first_id, 1)
    await owner.until_stored(3)
    harness.topic.add(stock())
    last = harness.topic.entries.pop(-2)
    harness.topic.entries[-1] = harness.topic.entries[-1]._replace(message_id=MessageId(99, 0))
    assert last.message_id == owner.runs[-1][0].message_id(0)
    with pytest.raises(DamagedError, match="LOG_GAP"):
        await replayed(log)
    await log.close()


async def test_settling_ends_with_the_opening() -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await harness.open()
    old = await Owner(log, 1).open()
    harness.client.receipt_of = lambda _: NO_RECEIPT
    old.append(0, 1)
    await asyncio.sleep(0)
    harness.client.receipt_of = lambda message_id: message_id
    new = await Owner(log, 2).open()
    heard = old.calls
    new.append(1, 1)
    await new.until_stored(1)
    assert old.calls == heard
    await log.close()
    with pytest.raises(SeqdedupeError, match="INTERNAL"):
        log.append_control(b"")


async def test_a_marker_that_is_not_taken_lets_go_of_the_topic() -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    log = await harness.open()
    harness.client.loses = lambda message: message.properties.get(KIND) == MARKER
    with pytest.raises(UnavailableError, match="LOG_REFUSED"):
        await Owner(log, 1).open()
    assert harness.client.writer is None
    harness.client.loses = lambda _: False
    other = await harness.open()
    held = await Owner(other, 1).open()
    with pytest.raises(UnavailableError, match="NOT_OWNER"):
        await Owner(log, 2).open()
    held.append(0, 1)
    await held.until_stored(1)
    for each in (log, other):
        await each.close()


@pytest.mark.parametrize("admin_answers", [10, 1])
async def test_who_finds_an_owner_is_told_where_it_is(admin_answers: int) -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    log, again, other = harness.log("host:1"), harness.log("host:1"), harness.log("host:2")
    await Owner(log, 1).open()
    for each in (again, other):
        await each.begin(0)
    harness.admin.answers_left = admin_answers
    # The first time it is asked whether Pulsar's deduplication is on.
    with pytest.raises(UnavailableError, match="NOT_OWNER") as caught:
        await Owner(other, 2).open()
    assert caught.value.numbers == {"owner_address": "host:1"}
    # A producer that it lost itself is no other sidecar.
    harness.admin.answers_left = admin_answers
    with pytest.raises(UnavailableError, match="NOT_OWNER") as caught:
        await Owner(again, 2).open()
    assert caught.value.numbers == {}
    for each in (log, again, other):
        await each.close()
