"""Entries are read from a real broker as they stand there: all of them, in order, no matter who wrote them. So does a
sidecar's reader, and so does the reader of Pulsar's client, for topics that no sidecar writes."""

import asyncio
import gc
import signal
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pulsar
import pulsar.asyncio
import pytest

from pulsar_broker.standalone import Broker, free_port
from seqdedupe.entry_properties import ENTRY
from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar import broker_wire
from seqdedupe.log.pulsar.broker_wire import Brokers, open_reader
from seqdedupe.log.pulsar.entries import EntryFormat, PulsarEntry, PulsarMessage
from seqdedupe.log.pulsar.reader import ReadsEntries
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.pulsar_api_pb2 import ZSTD, MessageMetadata
from seqdedupe_spark.cluster.broker_connection import READ_STEP_ENTRIES, PulsarClient, open_client_reader
from tests.pulsar.line import Line
from tests.pulsar.owners import LIMIT_SECONDS, Cluster, Owner, quiet, until
from tests.pulsar.wire import STORED, Publish, open_producer

QUEUE_ENTRIES = 100

OpenAt = Callable[[str, MessageId | None], Awaitable[ReadsEntries]]


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[pulsar.asyncio.Client]:
    client = PulsarClient(cluster.service_url, logger=quiet())
    yield client
    await client.close()


@pytest.fixture(params=["sidecar", "client"])
def open_at(request: pytest.FixtureRequest, cluster: Cluster, client: pulsar.asyncio.Client) -> OpenAt:
    """Opens a reader of a topic's entries at a place."""

    async def opened(topic: str, start: MessageId | None) -> ReadsEntries:
        if request.param == "sidecar":
            return await open_reader(Brokers(cluster.service_url), topic, start, EntryFormat.PLAIN)
        return await open_client_reader(client, topic, start, QUEUE_ENTRIES)

    return opened


async def read(reader: ReadsEntries, entries: int) -> list[PulsarEntry]:
    """This many entries."""
    found: list[PulsarEntry] = []
    async with asyncio.timeout(LIMIT_SECONDS):
        while len(found) < entries:
            step = await reader.read()
            assert 0 < len(step) <= READ_STEP_ENTRIES
            found += step
    assert len(found) == entries
    return found


async def test_what_was_written_is_read_from_any_place_on(cluster: Cluster, open_at: OpenAt, topic: str) -> None:
    await cluster.create(topic)
    messages = [PulsarMessage(b"%d" % number, {ENTRY: str(number)}) for number in range(2 * READ_STEP_ENTRIES)]
    messages += [
        PulsarMessage(None, {ENTRY: "null", "ü": "ö"}, "käy", 1_700_000_000_123),
        PulsarMessage(b"", {ENTRY: "empty"}),
    ]
    async with Owner(cluster.service_url, topic) as owner:
        writer = await owner.open()
        writer.append(messages)
        await owner.until_confirmed(1 + len(messages))
        await writer.close()

    reader = await open_at(topic, None)
    found = await read(reader, 1 + len(messages))
    assert await reader.is_at_end()
    await reader.close()
    assert [entry.message for entry in found[1:]] == messages
    assert [entry.message_id for entry in found] == owner.confirmed

    middle = owner.confirmed[700]
    reader = await open_at(topic, middle)
    assert await read(reader, len(found) - 700) == found[700:]
    await reader.close()


async def send_as_stock_producers(client: pulsar.asyncio.Client, topic: str, name: str) -> None:
    single = await client.create_producer(topic, producer_name=name, batching_enabled=False)
    for sequence_id in (0, 7, 2**63 - 1):
        await single.send(b"single", sequence_id=sequence_id)
    await single.close()
    batching = await client.create_producer(topic, producer_name="batches", batching_max_publish_delay_ms=100)
    await asyncio.gather(*(batching.send(b"batched", sequence_id=number) for number in (10, 20, 30)))
    await batching.close()


NAME = "we, seq=99, publish_time=1"
SINGLE = [(NAME, 0), (NAME, 7), (NAME, 2**63 - 1)]


async def test_what_stock_producers_wrote_has_their_names_and_ids(
    cluster: Cluster, client: pulsar.asyncio.Client, topic: str
) -> None:
    await cluster.create(topic)
    await send_as_stock_producers(client, topic, NAME)

    reader = await open_client_reader(client, topic, None, QUEUE_ENTRIES)
    found = await read(reader, 6)
    await reader.close()
    of_batch = [("batches", 10), ("batches", 20), ("batches", 30)]
    assert [(entry.producer_name, entry.sequence_id) for entry in found] == [*SINGLE, *of_batch]
    ids = [entry.message_id for entry in found]
    assert [message_id.batch_index for message_id in ids] == [-1, -1, -1, 0, 1, 2]
    assert ids == sorted(ids)
    assert all(entry.publish_time_ms > 1_600_000_000_000 for entry in found)


async def test_a_sidecar_learns_the_highest_id_of_each_entry(
    cluster: Cluster, client: pulsar.asyncio.Client, topic: str
) -> None:
    await cluster.create(topic)
    await send_as_stock_producers(client, topic, NAME)
    reader = await open_reader(Brokers(cluster.service_url), topic, None, EntryFormat.PLAIN)
    found = await read(reader, 4)
    await reader.close()
    assert [(entry.producer_name, entry.sequence_id) for entry in found] == [*SINGLE, ("batches", 30)]


async def test_the_client_reads_a_sidecars_entries_as_all_others(
    cluster: Cluster, client: pulsar.asyncio.Client, topic: str
) -> None:
    """Pulsar has replicated them, for example: nobody there knows of a sidecar."""
    await cluster.create(topic)
    producer = await client.create_producer(topic, producer_name="seqdedupe-a-0", batching_enabled=False)
    await producer.send(b"1", sequence_id=5, properties={ENTRY: "1:7:1:0000000000000001:1:0"}, ordering_key="o")
    await producer.close()
    reader = await open_client_reader(client, topic, None, QUEUE_ENTRIES)
    found = await read(reader, 1)
    await reader.close()
    assert [(entry.sequence_id, entry.ordering_key) for entry in found] == [(5, b"o")]


async def send_no_batch(cluster: Cluster, topic: str, payload: bytes, metadata: MessageMetadata) -> None:
    """Two entries that say they are batches."""
    liar = await open_producer(cluster.service_url, topic, "liar")
    for k, count in enumerate((3, 2**31 - 1)):
        lie = MessageMetadata(num_messages_in_batch=count)
        lie.MergeFrom(metadata)
        liar.send([Publish(k, payload=payload, metadata=lie)])
    assert [await liar.answer() for _ in range(2)] == [STORED] * 2
    await liar.close()


async def test_a_batch_that_cannot_be_decoded_ends_the_process_of_the_client(cluster: Cluster, topic: str) -> None:
    """The control of the test below."""
    await cluster.create(topic)
    await send_no_batch(cluster, topic, b"", MessageMetadata())
    opened = f"pulsar.Client({cluster.service_url!r}).create_reader({topic!r}, pulsar.MessageId.earliest)"
    program = f"import pulsar; {opened}.read_next()"
    ended = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], check=False, capture_output=True)
    assert ended.returncode == -signal.SIGSEGV


@pytest.mark.parametrize(
    "metadata",
    [MessageMetadata(), MessageMetadata(compression=ZSTD, uncompressed_size=10**6)],
    ids=["not compressed", "compressed"],
)
@pytest.mark.parametrize("payload", [b"", b"no batch"], ids=["empty", "not empty"])
async def test_a_batch_that_cannot_be_decoded_is_an_entry_of_another_producer(
    cluster: Cluster, client: pulsar.asyncio.Client, topic: str, metadata: MessageMetadata, payload: bytes
) -> None:
    await cluster.create(topic)
    await send_no_batch(cluster, topic, payload, metadata)
    producer = await client.create_producer(topic, producer_name="honest", batching_enabled=False)
    await producer.send(b"1", sequence_id=5)
    await producer.close()
    reader = await open_reader(Brokers(cluster.service_url), topic, None, EntryFormat.PLAIN)
    found = await read(reader, 3)
    await reader.close()
    assert [entry.producer_name for entry in found] == ["liar", "liar", "honest"]
    assert found[2].sequence_id == 5


async def test_who_no_longer_waits_loses_nothing(
    cluster: Cluster, client: pulsar.asyncio.Client, open_at: OpenAt, topic: str
) -> None:
    await cluster.create(topic)
    producer = await client.create_producer(topic, batching_enabled=False)
    reader = await open_at(topic, None)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(), 0.01)
    sent = [await producer.send(payload) for payload in (b"1", b"2")]
    found = await read(reader, 2)
    assert [entry.message_id[:2] for entry in found] == [(one.ledger_id(), one.entry_id()) for one in sent]
    await reader.close()
    await producer.close()


async def test_the_clients_own_reader_loses_what_nobody_waits_for(
    cluster: Cluster, client: pulsar.asyncio.Client, topic: str
) -> None:
    """The control of the test above."""
    await cluster.create(topic)
    # The message finds a future that was cancelled.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    producer = await client.create_producer(topic, batching_enabled=False)
    reader = await client.create_reader(
        topic, pulsar.MessageId.earliest, receiver_queue_size=QUEUE_ENTRIES, start_message_id_inclusive=True
    )
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read_next(), 0.01)
    for payload in (b"1", b"2"):
        await producer.send(payload)
    async with asyncio.timeout(LIMIT_SECONDS):
        assert (await reader.read_next()).data() == b"2"
    await reader.close()
    await producer.close()


async def test_closing_ends_the_waiting(cluster: Cluster, open_at: OpenAt, topic: str) -> None:
    await cluster.create(topic)
    reader = await open_at(topic, None)
    waiting = asyncio.ensure_future(reader.read())
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.01)
    await reader.close()
    with pytest.raises(SeqdedupeError, match="LOG_UNREADABLE"):
        await waiting


@pytest.mark.parametrize(("kind", "stays"), [(PulsarClient, False), (pulsar.asyncio.Client, True)])
async def test_a_closed_reader_is_let_go_of(
    cluster: Cluster, topic: str, kind: type[pulsar.asyncio.Client], stays: bool
) -> None:
    """One that is not keeps the threads and the descriptors of its client as long as the process lives."""
    await cluster.create(topic)
    client = kind(cluster.service_url, logger=quiet())
    reader = await open_client_reader(client, topic, None, QUEUE_ENTRIES)
    of_pulsar = weakref.ref(reader._reader._reader)
    await reader.close()
    await client.close()
    del reader

    def is_gone() -> bool:
        gc.collect()
        return of_pulsar() is None

    if stays:
        assert not is_gone()
    else:
        # A thread of the client may still be in the callback.
        await until(is_gone)


@pytest.mark.parametrize("whose", ["sidecar", "client"])
async def test_cut_lines_and_unloaded_topics_are_read_on_without_a_gap(
    broker: Broker, cluster: Cluster, topic: str, whose: str
) -> None:
    await cluster.create(topic)
    async with Owner(cluster.service_url, topic) as owner, Line(broker) as line:
        writer = await owner.open()
        writer.append([PulsarMessage(b"%d" % number, {ENTRY: "x"}) for number in range(3000)])
        await owner.until_confirmed(3001)
        await writer.close()
        client = PulsarClient(line.service_url, logger=quiet())
        reader: ReadsEntries
        if whose == "sidecar":
            reader = await open_reader(Brokers(line.service_url), topic, None, EntryFormat.PLAIN)
        else:
            reader = await open_client_reader(client, topic, None, QUEUE_ENTRIES)
        ids: list[MessageId] = []
        async with asyncio.timeout(LIMIT_SECONDS):
            for change in (1, 2, 3, None):
                while len(ids) < (3001 if change is None else 700 * change):
                    ids += [entry.message_id for entry in await reader.read()]
                if change == 2:
                    await cluster.admin.unload(topic)
                elif change is not None:
                    line.cut()
            while len(set(ids)) < 3001:
                ids += [entry.message_id for entry in await reader.read()]
        await reader.close()
        await client.close()
        assert list(dict.fromkeys(ids)) == owner.confirmed


@pytest.mark.parametrize("whose", ["sidecar", "client"])
async def test_without_a_broker_it_is_unreadable(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_wire, "OPEN_SECONDS", 1.0)
    topic, place, url = "persistent://public/default/topic", MessageId(1, 2), f"pulsar://127.0.0.1:{free_port()}"
    client = PulsarClient(url, operation_timeout_seconds=1, logger=quiet())
    opening: Awaitable[ReadsEntries] = (
        open_reader(Brokers(url), topic, place, EntryFormat.PLAIN)
        if whose == "sidecar"
        else open_client_reader(client, topic, place, QUEUE_ENTRIES)
    )
    with pytest.raises(SeqdedupeError, match="LOG_UNREADABLE"):
        await opening
    await client.close()
