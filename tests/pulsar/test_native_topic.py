"""The writer and the readers of native entries on a real broker, and what stock consumers have of what is written."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pulsar
import pulsar.asyncio
import pytest

from pulsar_broker.standalone import Broker, free_port
from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar import broker_wire
from seqdedupe.log.pulsar.broker_wire import Brokers, TopicReader, open_reader
from seqdedupe.log.pulsar.entries import EntryFormat, EntrySettings, PulsarEntry, PulsarMessage
from seqdedupe.log.pulsar.log import PulsarLog
from seqdedupe.log.pulsar.writer import RESERVED, EntryWriter, SettledEntry, open_writer
from seqdedupe.message_id import NOWHERE, MessageId
from tests.batches import batch
from tests.log.conformance import Owner as OwnerOfLog
from tests.log.conformance import ids_of, replayed
from tests.log.pulsar.test_native import control, marker
from tests.log.pulsar.topics import native
from tests.pulsar.conftest import StartBroker
from tests.pulsar.line import Line
from tests.pulsar.owners import LIMIT_SECONDS, Cluster, quiet, until
from tests.pulsar.test_log import INCARNATION, shared

_openings = itertools.count(1000)

MANY = 500


class NativeOwner:
    """Who writes native entries, and what its writer has settled."""

    def __init__(self, service_url: str, topic: str, instance_name: str = "one") -> None:
        self.brokers = Brokers(service_url)
        self.topic = topic
        self.instance_name = instance_name
        self.confirmed: list[MessageId] = []
        self.doubtful: MessageId | None = None
        self.failure: str | None = None
        self.openings: itertools.count[int] = _openings

    async def open(self) -> EntryWriter:
        """Opens and marks, and takes the marker for read where its receipt says."""
        self.confirmed, self.doubtful, self.failure = [], None, None
        properties, own = {"address": "a"}, EntryFormat.NATIVE
        writer = await open_writer(
            self.brokers, self.topic, self.instance_name, 0, self._claim, properties, self._settle, own
        )
        writer.append([marker(1)])
        await until(lambda: self.doubtful is not None or self.failure is not None)
        self._take_marker(writer)
        return writer

    def _take_marker(self, writer: EntryWriter) -> None:
        if self.doubtful is not None:
            self.confirmed.append(self.doubtful)
            writer.was_read(self.doubtful)
            self.doubtful = None

    async def until_confirmed(self, entries: int) -> None:
        await until(lambda: len(self.confirmed) >= entries or self.failure is not None)
        assert (len(self.confirmed), self.failure) == (entries, None)

    async def until_failed(self) -> str:
        await until(lambda: self.failure is not None)
        assert self.failure is not None
        return self.failure

    async def _claim(self, known: int) -> int:
        return next(self.openings)

    def _settle(self, settled: SettledEntry) -> None:
        assert self.failure is None, "something is settled after a failure"
        if settled.confirmed is not None:
            entries, first = settled.confirmed
            self.confirmed += [MessageId(first.ledger_id, first.entry_id + k) for k in range(entries)]
        self.doubtful, self.failure = settled.doubtful or self.doubtful, settled.failure


def numbered(first: int, entries: int) -> list[PulsarMessage]:
    """Entries of two messages each."""
    found: list[PulsarMessage] = []
    for number in range(first, first + entries):
        rows = [("true name", 2 * number), ("true name", 2 * number + 1)]
        found += native(1, number + 1, 2 * number, batch(rows))
    return found


async def read(reader: TopicReader, entries: int) -> list[PulsarEntry]:
    found: list[PulsarEntry] = []
    async with asyncio.timeout(LIMIT_SECONDS):
        while len(found) < entries:
            last = found[-1].message_id if found else NOWHERE
            found += [entry for entry in await reader.read() if entry.message_id > last]
    assert len(found) == entries
    return found


async def all_of(cluster: Cluster, topic: str) -> list[PulsarEntry]:
    reader = await open_reader(Brokers(cluster.service_url), topic, None, EntryFormat.NATIVE)
    found: list[PulsarEntry] = []
    async with asyncio.timeout(LIMIT_SECONDS):
        while not await reader.is_at_end():
            found += await reader.read()
    await reader.close()
    return found


@pytest.fixture
async def line(broker: Broker) -> AsyncIterator[Line]:
    async with Line(broker) as line:
        yield line


@pytest.mark.parametrize("deduplicates", [True, False])
async def test_what_is_written_is_confirmed_and_read_from_any_place_on(
    cluster: Cluster, topic: str, deduplicates: bool
) -> None:
    await cluster.create(topic, deduplicates=deduplicates)
    owner = NativeOwner(cluster.service_url, topic)
    writer = await owner.open()
    sent = [*numbered(0, MANY), control(1, MANY + 1, 2 * MANY)]
    writer.append(sent)
    await owner.until_confirmed(1 + len(sent))
    assert (await cluster.admin.stats(topic)).publishers[0].metadata == {"address": "a"}
    await writer.close()
    found = await all_of(cluster, topic)
    assert [entry.message for entry in found] == [marker(1), *sent]
    assert [entry.message_id for entry in found] == owner.confirmed
    for at in (1, 77, MANY + 1):
        reader = await open_reader(owner.brokers, topic, owner.confirmed[at], EntryFormat.NATIVE)
        assert await read(reader, len(found) - at) == found[at:]
        assert await reader.is_at_end()
        await reader.close()


async def test_markers_and_control_records_alone_are_read(cluster: Cluster, topic: str) -> None:
    """With no messages in an entry, a broker would send it to nobody."""
    await cluster.create(topic)
    owner = NativeOwner(cluster.service_url, topic)
    writer = await owner.open()
    reader = await open_reader(owner.brokers, topic, None, EntryFormat.NATIVE)
    assert (await read(reader, 1))[0].message == marker(1)
    sent = [control(1, 1 + k, 0) for k in range(250)]
    writer.append(sent)
    assert [entry.message for entry in await read(reader, len(sent))] == sent
    await reader.close()
    await writer.close()


async def test_a_stock_consumer_reads_what_was_published(
    cluster: Cluster, client: pulsar.asyncio.Client, topic: str
) -> None:
    await cluster.create(topic)
    owner = NativeOwner(cluster.service_url, topic)
    writer = await owner.open()
    published = batch(
        [("true name", 7), ("true name", 2**40), ("another", 1)],
        payloads=[b"one", None, b""],
        keys=["käy".encode(), None, b"k"],
        event_times_ms=np.array([5, 0, 1_700_000_000_123], np.int64),
        row_properties=[{"colour": "blue", "ü": "ö"}, None, None],
    )
    writer.append(native(1, 1, 0, published))
    await owner.until_confirmed(3)
    await writer.close()
    reader = await client.create_reader(topic, pulsar.MessageId.earliest)
    async with asyncio.timeout(LIMIT_SECONDS):
        hidden, *found = [await reader.read_next() for _ in range(4)]
    assert (hidden.data(), hidden.properties()) == (b"", {"seqdedupe.kind": "marker"})
    assert [message.properties() for message in found] == [{"colour": "blue", "ü": "ö"}, {}, {}]
    assert [message.partition_key() for message in found] == ["käy", "", "k"]
    assert [message.event_timestamp() for message in found] == [5, 0, 1_700_000_000_123]
    assert [message.producer_name() for message in found] == ["true name", "true name", "another"]
    assert [message._message.has_null_value() for message in found] == [False, True, False]
    for message, sequence_id in zip(found, (7, 2**40, 1), strict=True):
        assert f"seq={sequence_id}," in str(message._message)
    places = [(message.message_id().entry_id(), message.message_id().batch_index()) for message in found]
    assert places == [(1, 0), (1, 1), (2, 0)]


async def test_a_java_consumer_that_acknowledges_one_by_one_has_no_backlog(
    cluster: Cluster, topic: str, pulsar_home: Path
) -> None:
    """Of entries without messages either: hidden ones would stay in it, and its subscription would not move on."""
    await cluster.create(topic)
    owner = NativeOwner(cluster.service_url, topic)
    writer = await owner.open()
    one, two = batch([("p", 1), ("p", 5)], payloads=[b"one", b"two"]), batch([("q", 1)], payloads=[b"three"])
    writer.append([control(1, 1, 0), *native(1, 2, 0, one), control(1, 3, 2), *native(1, 4, 2, two)])
    await owner.until_confirmed(5)
    await writer.close()
    command = [str(pulsar_home / "bin" / "pulsar-client"), "--url", cluster.service_url, "consume", topic]
    options = ["--subscription-name", "java", "--num-messages", "6", "--subscription-position", "Earliest"]
    consumer = await asyncio.create_subprocess_exec(*command, *options, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(LIMIT_SECONDS):
        said = (await consumer.communicate())[0].decode()
    contents = [line.partition("content:")[2] for line in said.splitlines() if "content:" in line]
    assert [content for content in contents if content in ("one", "two", "three")] == ["one", "two", "three"]
    assert [said.count(f"seqdedupe.kind={kind}") for kind in ("marker", "control")] == [1, 2]
    cursor = (await cluster.url.get(topic.replace("://", "/") + "/internalStats"))["cursors"]["java"]
    last = owner.confirmed[-1]
    assert cursor["markDeletePosition"] == f"{last.ledger_id}:{last.entry_id}"


async def test_another_writer_is_refused_and_a_released_topic_is_free(cluster: Cluster, topic: str) -> None:
    await cluster.create(topic)
    owner, other = (NativeOwner(cluster.service_url, topic, name) for name in ("one", "two"))
    writer = await owner.open()
    for second in (other, NativeOwner(cluster.service_url, topic)):
        with pytest.raises(SeqdedupeError, match="NOT_OWNER"):
            await second.open()
    await writer.close()
    await (await other.open()).close()


async def test_no_producer_that_publishes_has_the_name_of_a_writer(cluster: Cluster, topic: str) -> None:
    await cluster.create(topic)
    writer = await NativeOwner(cluster.service_url, topic).open()
    [publisher] = (await cluster.admin.stats(topic)).publishers
    assert publisher.name == writer.producer_name == f"seqdedupe-one-{RESERVED}0"
    await writer.close()


async def test_what_a_broker_takes_for_a_duplicate_is_a_failure(cluster: Cluster, topic: str) -> None:
    """Never a success, and nothing after it either: here the number of an opening falls, which it never should."""
    await cluster.create(topic)
    owner = NativeOwner(cluster.service_url, topic)
    owner.openings = iter([2000, 1999])  # type: ignore[assignment]
    writer = await owner.open()
    writer.append(numbered(0, 10))
    await owner.until_confirmed(11)
    await writer.close()
    writer = await owner.open()
    writer.append(numbered(10, 10))
    assert "duplicate" in await owner.until_failed()
    assert not owner.confirmed
    await writer.close()
    assert len(await all_of(cluster, topic)) == 11


@pytest.mark.parametrize("fault", ["cut", "unload", "thrown out"])
@pytest.mark.parametrize("deduplicates", [True, False])
async def test_what_has_no_receipt_is_unknown_and_never_sent_again(
    cluster: Cluster, line: Line, topic: str, fault: str, deduplicates: bool
) -> None:
    """What is stored is what was sent up to some entry, each once."""
    await cluster.create(topic, deduplicates=deduplicates)
    owner = NativeOwner(line.service_url, topic)
    writer = await owner.open()
    writer.append(numbered(0, MANY))
    await until(lambda: len(owner.confirmed) > 100)
    client = pulsar.Client(cluster.service_url, logger=quiet())
    match fault:
        case "cut":
            line.hold_answers()
            writer.append(numbered(MANY, 50))
            await cluster.until_received(topic, len(owner.confirmed) + 1)
            line.cut()
        case "unload":
            await cluster.admin.unload(topic)
        case _:
            mode = pulsar.ProducerAccessMode.ExclusiveWithFencing
            await asyncio.to_thread(client.create_producer, topic, access_mode=mode)
    writer.append(numbered(MANY + 50, 10))
    await owner.until_failed()
    await asyncio.to_thread(client.close)
    await writer.close()
    await cluster.until_nobody_writes(topic)
    stored = [entry.message for entry in await all_of(cluster, topic)]
    sent = [marker(1), *numbered(0, MANY), *(numbered(MANY, 50) if fault == "cut" else numbered(MANY + 50, 10))]
    assert stored == sent[: len(stored)]
    assert len(stored) >= len(owner.confirmed)
    # Somebody else goes on after that.
    again = await NativeOwner(cluster.service_url, topic, "two").open()
    await again.close()


async def test_an_opening_that_is_cancelled_does_not_keep_the_topic(cluster: Cluster, line: Line, topic: str) -> None:
    await cluster.create(topic)
    line.hold_answers_after(RESERVED.encode())
    opening = asyncio.ensure_future(NativeOwner(line.service_url, topic).open())
    await cluster.until_somebody_writes(topic)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    line.let_answers_through()
    await cluster.until_nobody_writes(topic)
    await (await NativeOwner(cluster.service_url, topic, "two").open()).close()


async def test_an_opening_whose_number_cannot_be_claimed_does_not_keep_the_topic(cluster: Cluster, topic: str) -> None:
    await cluster.create(topic)

    async def refuse(known: int) -> int:
        raise OSError("no space left on device")

    owner = NativeOwner(cluster.service_url, topic)
    with pytest.raises(OSError, match="no space left"):
        await open_writer(owner.brokers, topic, "one", 0, refuse, {}, owner._settle, EntryFormat.NATIVE)
    await (await owner.open()).close()


async def test_cut_lines_and_unloaded_topics_are_read_on_without_a_gap(
    cluster: Cluster, line: Line, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.create(topic)
    monkeypatch.setattr(broker_wire, "READ_STEP_ENTRIES", 7)
    owner = NativeOwner(cluster.service_url, topic)
    writer = await owner.open()
    sent = numbered(0, MANY)
    writer.append(sent)
    await owner.until_confirmed(1 + MANY)
    await writer.close()
    reader = await open_reader(Brokers(line.service_url), topic, None, EntryFormat.NATIVE)
    found: dict[MessageId, PulsarMessage] = {}
    async with asyncio.timeout(LIMIT_SECONDS):
        for change in (1, 2, 3, None):
            while len(found) < (1 + MANY if change is None else 100 * change):
                found |= {entry.message_id: entry.message for entry in await reader.read()}
            if change == 2:
                await cluster.admin.unload(topic)
            elif change is not None:
                line.cut()
        assert await reader.is_at_end()
    await reader.close()
    assert list(found) == owner.confirmed
    assert list(found.values()) == [marker(1), *sent]


async def test_who_no_longer_waits_loses_nothing_and_closing_ends_the_waiting(cluster: Cluster, topic: str) -> None:
    await cluster.create(topic)
    owner = NativeOwner(cluster.service_url, topic)
    writer = await owner.open()
    reader = await open_reader(owner.brokers, topic, owner.confirmed[0], EntryFormat.NATIVE)
    await read(reader, 1)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(), 0.01)
    sent = numbered(0, 2)
    writer.append(sent)
    assert [entry.message for entry in await read(reader, 2)] == sent
    waiting = asyncio.ensure_future(reader.read())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.01)
    await reader.close()
    with pytest.raises(SeqdedupeError, match="LOG_UNREADABLE"):
        await waiting
    await writer.close()


async def test_entries_of_stock_producers_have_their_names_and_highest_ids(
    cluster: Cluster, client: pulsar.asyncio.Client, topic: str
) -> None:
    await cluster.create(topic)
    single = await client.create_producer(topic, producer_name="single", batching_enabled=False)
    await single.send(b"x", sequence_id=7)
    await single.close()
    batching = await client.create_producer(topic, producer_name="batches", batching_max_publish_delay_ms=100)
    await asyncio.gather(*(batching.send(b"x", sequence_id=number) for number in (10, 20, 30)))
    await batching.close()
    found = await all_of(cluster, topic)
    assert [(entry.producer_name, entry.sequence_id) for entry in found] == [("single", 7), ("batches", 30)]
    assert not any(entry.message.properties for entry in found)


async def test_ledgers_that_roll_over_under_a_live_producer(start_broker: StartBroker, topic: str) -> None:
    broker = start_broker(managedLedgerMaxEntriesPerLedger=20, managedLedgerMinLedgerRolloverTimeMinutes=0)
    cluster = Cluster(broker.service_url, broker.admin_url)
    await cluster.create(topic, deduplicates=False)
    settings = EntrySettings(EntryFormat.NATIVE, "SEQUENCE_ID", 0, "host:6680")
    log = PulsarLog(shared(cluster), topic, INCARNATION, settings)
    await log.begin(0)
    owner = await OwnerOfLog(log, 1).open()
    for index in range(300):
        owner.append(3 * index, 3)
        if index % 50 == 0:
            await owner.until_stored(index + 1)
    await owner.until_stored(300)
    told = [one for runs in owner.runs for one in ids_of(runs)]
    assert len({one.ledger_id for one in told}) > 3
    assert [(await log.locate(index)).message_id for index in range(0, 900, 30)] == told[::30]
    assert [one for record in await replayed(log) for one in record.batch.sequence_ids] == list(range(900))
    await log.close()


async def test_without_a_broker_it_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_wire, "OPEN_SECONDS", 1.0)
    brokers = Brokers(f"pulsar://127.0.0.1:{free_port()}")
    with pytest.raises(SeqdedupeError, match="LOG_UNREADABLE"):
        await open_reader(brokers, "persistent://public/default/topic", MessageId(1, 2), EntryFormat.NATIVE)
