"""Topics that others wrote to before: what their entries say of their producers, and what the properties keep."""

import asyncio
import os
from collections.abc import Container
from contextlib import closing
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from seqdedupe.entry_properties import ENTRY, MESSAGE
from seqdedupe.errors import DamagedError, SeqdedupeError, UnavailableError, error
from seqdedupe.log.contract import LogName
from seqdedupe.log.pulsar import native, taking_over
from seqdedupe.log.pulsar.admin_url import StoredBefore
from seqdedupe.log.pulsar.broker_wire import TopicReader
from seqdedupe.log.pulsar.entries import EntryFormat, PulsarMessage
from seqdedupe.log.pulsar.native import highest_id
from seqdedupe.log.pulsar.taking_over import NUMBERS, TAKEN_OVER, last_before, numbers_before, properties_of
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
