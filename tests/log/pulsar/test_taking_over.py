"""Topics that others wrote to before: what their entries say of their producers, and what the properties keep."""

import asyncio
import os
from collections.abc import Container
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from seqdedupe.entry_properties import ENTRY, MESSAGE
from seqdedupe.errors import DamagedError, SeqdedupeError, UnavailableError, error
from seqdedupe.log.contract import LogName
from seqdedupe.log.pulsar import native, taking_over
from seqdedupe.log.pulsar.admin_url import StoredBefore
from seqdedupe.log.pulsar.broker_wire import TopicReader, open_reader
from seqdedupe.log.pulsar.entries import EntryFormat, PulsarMessage, check_earlier
from seqdedupe.log.pulsar.ledgers import Ledger, Ledgers
from seqdedupe.log.pulsar.native import highest_id, single_wire_entry, stock_entry, wire_entry
from seqdedupe.log.pulsar.places import Point
from seqdedupe.log.pulsar.reader import LogScan
from seqdedupe.log.pulsar.taking_over import (
    NUMBERS,
    READ,
    TAKEN_OVER,
    check_ledgers,
    last_before,
    numbers_before,
    properties_of,
    read_before,
)
from seqdedupe.message_id import NOWHERE, MessageId
from seqdedupe.pulsar_wire.batches import EntryKind, EntryRow, EntryRows, batch_of, range_of
from seqdedupe.pulsar_wire.frames import COMPRESSIONS, WireEntry, metadata_of
from seqdedupe.pulsar_wire.pulsar_api_pb2 import MessageMetadata
from seqdedupe.store.db import Store
from seqdedupe.store.parts import LogKind
from seqdedupe.store.snapshots import Snapshots
from seqdedupe.topic import listing
from seqdedupe.topic.base import State
from seqdedupe.topic.directory import Topics
from seqdedupe.topic.lives import PublishedTopics
from seqdedupe.topic.operations import open_sessions
from seqdedupe.topic.policy import Applied
from seqdedupe.topic.topic import Topic
from seqdedupe.v1.admin_pb2 import StockEntry, StockTopic
from tests.log.conformance import replayed, what
from tests.log.pulsar.client import StandInBrokers
from tests.log.pulsar.test_log import TOPIC, StandInHarness
from tests.log.pulsar.test_topic import StandInLogs, recovered, until
from tests.log.pulsar.topics import INCARNATION, collector, marker, stock, stored
from tests.pulsar_wire.test_stock_entries import recorded


@pytest.mark.parametrize("client", ["python", "java"])
def test_the_highest_id_of_a_batch_of_every_compression_is_found(client: str) -> None:
    """The metadata of Python's client alone say 10."""
    batches = recorded(client, EntryKind.BATCH)
    assert len(batches) == len(COMPRESSIONS)
    assert [highest_id(*pair) for pair in batches] == [30] * len(batches)
    assert [highest_id(*pair) for pair in recorded(client, EntryKind.SINGLE)] == [10, 20, 30]


def test_an_encrypted_batch_says_its_highest_id_by_its_metadata() -> None:
    [(entry, metadata)] = recorded("java", EntryKind.ENCRYPTED)
    assert highest_id(entry, metadata) == 30
    # Without it, as clients of C++ write: as if numbered in a row.
    metadata.ClearField("highest_sequence_id")
    assert (range_of(metadata)[1], highest_id(entry, metadata)) == (10, 12)


def test_a_message_of_chunks_is_there_with_its_last_one() -> None:
    """A message whose last chunk is missing was never there: its producer sends it again."""
    chunks = recorded("java", EntryKind.CHUNK)
    assert [metadata.chunk_id for _, metadata in chunks] == [0, 1]
    assert [highest_id(*pair) for pair in chunks] == [-1, 7]


def test_entries_of_pulsars_own_and_invalid_ids_say_nothing() -> None:
    marker = MessageMetadata(producer_name=b"p", sequence_id=4, publish_time=1, marker_type=20)
    too_high = MessageMetadata(producer_name=b"p", sequence_id=2**63, publish_time=1)
    assert [highest_id(WireEntry(b"", b""), metadata) for metadata in (marker, too_high)] == [-1, -1]


def test_the_rows_decide_only_if_the_metadata_state_no_highest_id() -> None:
    entry = batch_of(EntryRows.of([EntryRow(k) for k in (7, 90, 8)]), b"p", 1)
    metadata = metadata_of(entry)
    metadata.ClearField("highest_sequence_id")
    assert highest_id(entry, metadata) == 90
    # What cannot be decoded counts at least as the broker counts it.
    assert highest_id(entry._replace(payload=b"\xff"), metadata) == 9


def test_what_was_there_before_is_kept_in_properties() -> None:
    numbers = {f"producer-{k}": k for k in range(1000)} | {"ü": 2**63 - 1}
    properties = properties_of(StoredBefore(MessageId(17, 4), numbers | {"none": -1}))
    assert numbers_before(properties) == numbers
    assert last_before(properties) == MessageId(17, 4)
    without = properties_of(StoredBefore(MessageId(17, -1), {}))
    assert (last_before(without), numbers_before(without)) == (MessageId(17, -1), {})
    assert (last_before({}), numbers_before({})) == (NOWHERE, {})


def test_numbers_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taking_over, "MAX_NUMBERS_BYTES", 20)
    with pytest.raises(SeqdedupeError, match=r"knows 2 producers .*INVALID_REQUEST"):
        properties_of(StoredBefore(MessageId(17, 4), {"a": 1, "b": 2}))


def stock_topic(*ledgers: tuple[int, int], **numbers: int) -> StockTopic:
    """What a job has read of these ledgers, each with so many entries."""
    (first, _), (last, entries) = ledgers[0], ledgers[-1]
    return StockTopic(
        topic=TOPIC,
        ledger_ids=[ledger for ledger, _ in ledgers],
        ledger_entries=[entries for _, entries in ledgers],
        first=StockEntry(ledger_id=first),
        last=StockEntry(ledger_id=last, entry_id=entries - 1),
        producer_names=[*numbers],
        persisted=[*numbers.values()],
    )


def ledgers(*several: tuple[int, int]) -> Ledgers:
    return Ledgers([Ledger(ledger, entries, 100) for ledger, entries in several])


def test_what_a_job_has_read_is_kept_with_the_brokers_numbers() -> None:
    before = StoredBefore(MessageId(17, 9), {"gone": 7, "p": 6}, ledgers((17, 10)))
    properties = properties_of(before, stock_topic((17, 5), p=8, q=2))
    assert numbers_before(properties) == {"gone": 7, "p": 8, "q": 2}
    assert (last_before(properties), read_before(properties)) == (MessageId(17, 9), MessageId(17, 4))
    # Of a partition that was empty, all is read.
    nothing = properties_of(before, StockTopic(topic=TOPIC))
    assert (numbers_before(nothing), read_before(nothing)) == ({"gone": 7, "p": 6}, None)


def test_numbers_of_another_attempt_are_not_those_of_the_job() -> None:
    """It has replaced one property, not the other: else IDs up to the place would be known to nobody."""
    before = StoredBefore(MessageId(17, 9), {"gone": 7}, ledgers((17, 10)))
    both = properties_of(before, stock_topic((17, 5), p=8)) | properties_of(before)
    assert (READ in both, read_before(both)) == (True, None)
    assert read_before(properties_of(before)) is None
    for text in ("17", "17:4", "17:4:x", "x:4:00000000"):
        with suppress(DamagedError):
            assert read_before({READ: text, NUMBERS: ""}) is None


@pytest.mark.parametrize(
    ("stored", "is_same"),
    [
        ([(3, 5), (8, 4), (9, 2)], True),
        ([(3, 5), (8, 4), (9, 7), (12, 3)], True),
        ([(8, 4), (9, 2)], True),
        ([(9, 2)], True),
        ([(3, 5), (8, 4), (9, 1)], False),
        ([(3, 5), (8, 4)], False),
        ([(12, 3)], False),
        ([], False),
        ([(3, 4), (8, 4), (9, 2)], False),
        ([(3, 5), (9, 2)], False),
        ([(1, 1), (3, 5), (8, 4), (9, 2)], False),
        ([(3, 5), (7, 1), (8, 4), (9, 2)], False),
    ],
)
def test_only_the_first_ledgers_that_were_read_may_be_gone(stored: list[tuple[int, int]], is_same: bool) -> None:
    read = stock_topic((3, 5), (8, 4), (9, 2))
    with nullcontext() if is_same else pytest.raises(SeqdedupeError, match="INVALID_REQUEST"):
        check_ledgers(read, ledgers(*stored))


@pytest.mark.parametrize("entry_format", EntryFormat)
async def test_what_a_job_has_read_is_not_read_again(entry_format: EntryFormat) -> None:
    harness = StandInHarness(entry_format)
    for sequence_id in range(100):
        harness.topic.add(stock(), "p", sequence_id)
    harness.begins_at = harness.topic.last
    harness.earlier = {"p": 99, "q": 3}
    for sequence_id in (100, 101):
        harness.topic.add(stock(), "p", sequence_id)
    log = await harness.open()
    assert log.earlier == {"p": 101, "q": 3}
    assert harness.client.entries_read == 3
    await log.open_for_writing(1, bytes(16), lambda outcome: None)
    assert [what(record) for record in await replayed(log)] == [("marker", 1, 0)]
    await log.close()


async def test_a_job_reads_to_an_end_that_no_reader_gets() -> None:
    harness = StandInHarness(EntryFormat.PLAIN)
    places = [harness.topic.add(stock(), "p", sequence_id) for sequence_id in range(5)]
    log = await harness.open()

    async def read(first: MessageId, last: MessageId) -> tuple[bool, list[MessageId], dict[str, int]]:
        found: list[MessageId] = []
        reader = await open_reader(log._shared.brokers, TOPIC, first, None)
        ledgers, find_end = partial(harness.admin.ledgers, TOPIC), partial(harness.admin.end_after, TOPIC)
        scan = LogScan(reader, TOPIC, Point.start(-1), ledgers, find_end)
        is_whole = await scan.step_to(last, lambda entry: found.append(entry.message_id))
        await scan.close()
        return is_whole, found, scan.collector.earlier

    assert await read(places[1], places[3]) == (True, places[1:4], {"p": 3})
    harness.topic.add_hidden()
    assert await read(places[3], harness.topic.last) == (False, places[3:], {"p": 4})
    hidden = harness.topic.last
    harness.topic.add(stock(), "p", 9)
    assert await read(places[3], hidden) == (True, places[3:], {"p": 4})
    await log.close()


@pytest.mark.parametrize("entry_format", EntryFormat)
def test_a_job_knows_entries_of_sidecars_in_every_format(entry_format: EntryFormat) -> None:
    message, name = marker(1), "seqdedupe-one-\x1f0" if entry_format is EntryFormat.NATIVE else "seqdedupe-one-0"
    if entry_format is EntryFormat.NATIVE:
        entry = wire_entry(message, name, 3)
    else:
        entry = single_wire_entry(message, name, 3, 1)
    with pytest.raises(DamagedError, match="of another incarnation"):
        check_earlier(stock_entry(MessageId(1, 2), entry, metadata_of(entry)))
    # Anybody may write such a field; the IDs of its producer count.
    metadata = MessageMetadata(producer_name=b"p", sequence_id=4, publish_time=1, seqdedupe=b"\x01")
    found = stock_entry(MessageId(1, 2), WireEntry(b"", b""), metadata)
    check_earlier(found)
    assert (found.producer_name, found.sequence_id) == ("p", 4)


@pytest.mark.parametrize("text", ["{}", "eA==", "eJyrVgIAATIAqA==", "\x00"])
def test_damaged_properties_are_damage(text: str) -> None:
    for find, name in ((numbers_before, NUMBERS), (last_before, TAKEN_OVER)):
        with pytest.raises(SeqdedupeError, match=f"{name}.*LOG_DAMAGED"):
            find({name: text})


async def test_the_brokers_numbers_stand_for_entries_that_are_gone(tmp_path: Path) -> None:
    """The higher one counts. Once the log states it, neither is needed."""
    store, another = Store.open(tmp_path / "one"), Store.open(tmp_path / "another")
    harness = StandInHarness(EntryFormat.PLAIN)
    harness.earlier = {"gone": 7, "p": 6, "q": 9}
    for name, sequence_id in (("p", 8), ("q", 2)):
        harness.topic.add(stock(), name, sequence_id)
    expected = [7, 8, 9, -1]
    topic = await recovered(harness, store)
    await topic.flight.all_of_now()
    assert (await open_sessions(topic, ["gone", "p", "q", "r"], None)).persisted == expected
    await topic.close("")
    harness.earlier = {}
    for at in (store, another):
        topic = await recovered(harness, at)
        assert (await open_sessions(topic, ["gone", "p", "q", "r"], None)).persisted == expected
        await topic.close("")
        at.close()


async def test_an_id_that_is_none_takes_nothing_from_the_other_producers(tmp_path: Path) -> None:
    """A stock client takes any number up to 2^64 - 1."""
    harness = StandInHarness(EntryFormat.PLAIN)
    for name, sequence_id in (("p", 8), ("too high", 2**64 - 1), ("highest", 2**63 - 1)):
        harness.topic.add(stock(), name, sequence_id)
    with closing(Store.open(tmp_path / "store")) as store:
        topic = await recovered(harness, store)
        await topic.flight.all_of_now()
        opened = await open_sessions(topic, ["p", "too high", "highest"], None)
        assert opened.persisted == [8, -1, 2**63 - 1]
        await topic.close("")


def test_a_batch_that_cannot_be_read_has_no_id_above_the_highest() -> None:
    metadata = MessageMetadata(producer_name=b"p", sequence_id=2**63 - 2, publish_time=1, num_messages_in_batch=9)
    assert highest_id(WireEntry(b"", b"\xff"), metadata) == 2**63 - 1


def test_rows_without_end_are_not_looked_at() -> None:
    """They would take a gibibyte of memory."""
    most = native.MAX_EARLIER_ROWS
    for rows, expected in ((most, 10**9), (most + 1, most + 1)):
        ids = [*range(1, rows), 10**9]
        entry = batch_of(EntryRows.of([EntryRow(k) for k in ids]), b"p", 1)
        metadata = metadata_of(entry)
        metadata.ClearField("highest_sequence_id")
        assert highest_id(entry, metadata) == expected


async def test_a_broker_with_a_low_limit_takes_the_long_names_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = StandInHarness(EntryFormat.NATIVE)
    names = [f"{k:0255}" for k in range(4000)]
    harness.earlier = dict.fromkeys(names, 7)
    limit = AsyncMock(return_value=512 * 1024)
    monkeypatch.setattr(StandInBrokers, "max_entry_bytes", limit)
    with closing(Store.open(tmp_path / "store")) as store:
        topic = await recovered(harness, store)
        await topic.flight.all_of_now()
        assert (await open_sessions(topic, names[-2:], None)).persisted == [7, 7]
        await topic.close("")


async def test_nothing_is_taken_while_earlier_producers_cannot_be_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = StandInHarness(EntryFormat.NATIVE)
    names = [f"{k:0255}" for k in range(1000)]
    harness.earlier = dict.fromkeys(names, 7)
    limit = AsyncMock(return_value=128 * 1024)
    monkeypatch.setattr(StandInBrokers, "max_entry_bytes", limit)
    with closing(Store.open(tmp_path / "store")) as store:
        log = await harness.open()
        snapshots = Snapshots(store, INCARNATION)
        topic = Topic(log.place, log, store, snapshots, None, applied=Applied(), random_bytes=os.urandom)
        await topic.recover()
        assert topic.state is State.READ_ONLY
        assert "the watermarks from before cannot be written" in topic.why
        limit.return_value = 512 * 1024
        await until(lambda: topic.state is State.SERVING)
        assert (await open_sessions(topic, names[-2:], None)).persisted == [7, 7]
        await topic.close("")


async def test_a_failure_behind_the_first_marker_forgets_no_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next reading begins behind the marker."""
    harness = StandInHarness(EntryFormat.PLAIN)
    harness.topic.add(stock(), "p", 3)
    log = await harness.open()
    harness.topic.add(stock(), "p", 9)
    harness.topic.add(marker(1))
    is_at_end, calls = TopicReader.is_at_end, 0

    async def fails_behind_it(reader: TopicReader) -> bool:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error("LOG_UNREADABLE", "once")
        return await is_at_end(reader)

    monkeypatch.setattr(TopicReader, "is_at_end", fails_behind_it)
    with pytest.raises(UnavailableError):
        await replayed(log)
    assert [what(record) for record in await replayed(log)] == [("marker", 1, 0)]
    assert log.earlier == {"p": 9}
    await log.close()


def test_copies_from_another_topic_of_sidecars_are_earlier_messages() -> None:
    """A program that forwards messages keeps their properties."""
    elsewhere = PulsarMessage(b"copy", {ENTRY: f"1:{INCARNATION - 1}:1:{'0' * 16}:1:0", MESSAGE: "5:0:-1:-1:1:q"})
    reading = collector()
    for entry in stored([elsewhere, elsewhere, marker(1)]):
        reading.add(entry._replace(producer_name="forwards"))
    assert reading.earlier == {"forwards": 1}
    # Another incarnation of this topic is none: what its producers have sent cannot be told.
    reading = collector()
    [entry] = stored([elsewhere])
    with pytest.raises(DamagedError, match="of another incarnation"):
        reading.add(entry._replace(producer_name="seqdedupe-one-0"))


class TakenOver(StandInLogs):
    """The topic exists, and is a log once it is taken over."""

    def __init__(self, harness: StandInHarness, failure: SeqdedupeError | None) -> None:
        super().__init__(harness)
        self.begun, self.goes_on = asyncio.Event(), asyncio.Event()
        self._failure = failure
        self._is_log = False

    async def create(self, *_: object) -> None:
        if self._failure is None:
            raise error("TOPIC_EXISTS", "it is there")
        self._is_log = True

    async def list(self, without: Container[str] = ()) -> list[LogName]:
        return [LogName(INCARNATION, TOPIC)] if self._is_log else []

    async def take_over(self, *_: object) -> None:
        self.begun.set()
        await self.goes_on.wait()
        if self._failure is not None:
            raise self._failure
        self._is_log = True


@pytest.mark.parametrize("fails", [False, True])
async def test_who_creates_the_topic_meanwhile_gets_it(fails: bool, tmp_path: Path) -> None:
    logs = TakenOver(StandInHarness(EntryFormat.NATIVE), error("TOPIC_IN_USE", "somebody writes") if fails else None)
    with closing(Store.open(tmp_path / "store")) as store:
        topics = Topics(
            store,
            lambda told: PublishedTopics(store, logs, log=LogKind.PULSAR, on_state=told),
            max_topics=10,
            allow_auto_topic_creation=True,
            on_state=lambda name, state: None,
        )
        await topics.open_all()
        await topics.recover_all()
        taking = asyncio.ensure_future(listing.take_over(topics, TOPIC))
        await logs.begun.wait()
        creating = asyncio.ensure_future(topics.get_or_create(TOPIC))
        await asyncio.wait({creating}, timeout=0)
        logs.goes_on.set()
        [failed, made] = await asyncio.gather(taking, creating, return_exceptions=True)
        assert isinstance(failed, SeqdedupeError) == fails
        assert made is topics.get(TOPIC)
        await topics.drain()


async def test_old_messages_are_read_without_the_entries_before_them() -> None:
    """Otherwise each reader of the first message would read through all that others have written before."""
    harness = StandInHarness(EntryFormat.PLAIN)
    for sequence_id in range(100):
        harness.topic.add(stock(), "p", sequence_id)
    harness.topic.roll_over()
    log = await harness.open()
    assert log.earlier == {"p": 99}
    places = log._content.places
    found = [places.begins_at]
    await log.open_for_writing(1, bytes(16), lambda outcome: None)
    [marker] = [entry for entry in harness.topic.entries if entry.message.properties.get("seqdedupe.kind") == "marker"]
    assert [*found, places.begins_at] == [None, marker.message_id]
    await log.close()
