"""Entries are read from a real broker as they stand there: all of them, in order, no matter who wrote them."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import suppress

import pulsar
import pulsar.asyncio
import pytest

from pulsar_broker.standalone import Broker, free_port
from seqdedupe.entry_properties import ENTRY
from seqdedupe.errors import SeqdedupeError
from seqdedupe.log.pulsar.entries import PulsarEntry, PulsarMessage
from seqdedupe.log.pulsar.pulsar_client import PulsarClient
from seqdedupe.log.pulsar.reader import READ_STEP_ENTRIES, EntryReader, open_reader
from seqdedupe.message_id import MessageId
from tests.pulsar.line import Line
from tests.pulsar.owners import LIMIT_SECONDS, Cluster, Owner, quiet, until

QUEUE_ENTRIES = 100


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[pulsar.asyncio.Client]:
    client = PulsarClient(cluster.service_url, logger=quiet())
    yield client
    await client.close()


async def read(reader: EntryReader, entries: int) -> list[PulsarEntry]:
    """This many entries."""
    found: list[PulsarEntry] = []
    async with asyncio.timeout(LIMIT_SECONDS):
        while len(found) < entries:
            step = await reader.read()
            assert 0 < len(step) <= READ_STEP_ENTRIES
            found += step
    assert len(found) == entries
    return found


async def test_what_was_written_is_read_from_any_place_on(
    cluster: Cluster, client: pulsar.asyncio.Client, topic: str
) -> None:
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

    reader = await open_reader(client, topic, None, QUEUE_ENTRIES)
    found = await read(reader, 1 + len(messages))
    await reader.close()
    assert [entry.message for entry in found[1:]] == messages
    assert [entry.message_id for entry in found] == owner.confirmed

    middle = owner.confirmed[700]
    reader = await open_reader(client, topic, middle, QUEUE_ENTRIES)
    assert await read(reader, len(found) - 700) == found[700:]
    await reader.close()


async def test_what_stock_producers_wrote_has_their_names_and_ids(
    cluster: Cluster, client: pulsar.asyncio.Client, topic: str
) -> None:
    await cluster.create(topic)
    name = "we, seq=99, publish_time=1"
    single = await client.create_producer(topic, producer_name=name, batching_enabled=False)
    for sequence_id in (0, 7, 2**63 - 1):
        await single.send(b"single", sequence_id=sequence_id)
    await single.close()
    batching = await client.create_producer(topic, producer_name="batches", batching_max_publish_delay_ms=100)
    await asyncio.gather(*(batching.send(b"batched", sequence_id=number) for number in (10, 20, 30)))
    await batching.close()

    reader = await open_reader(client, topic, None, QUEUE_ENTRIES)
    found = await read(reader, 6)
    await reader.close()
    assert [(entry.producer_name, entry.sequence_id) for entry in found] == [
        (name, 0),
        (name, 7),
        (name, 2**63 - 1),
        ("batches", 10),
        ("batches", 20),
        ("batches", 30),
    ]
    ids = [entry.message_id for entry in found]
    assert [message_id.batch_index for message_id in ids] == [-1, -1, -1, 0, 1, 2]
    assert ids == sorted(ids)
    assert all(entry.publish_time_ms > 1_600_000_000_000 for entry in found)


async def test_who_no_longer_waits_loses_nothing(cluster: Cluster, client: pulsar.asyncio.Client, topic: str) -> None:
    await cluster.create(topic)
    producer = await client.create_producer(topic, batching_enabled=False)
    reader = await open_reader(client, topic, None, QUEUE_ENTRIES)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(), 0.01)
    for payload in (b"1", b"2"):
        await producer.send(payload)
    assert [entry.message.payload for entry in await read(reader, 2)] == [b"1", b"2"]
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


async def test_closing_ends_the_waiting(cluster: Cluster, client: pulsar.asyncio.Client, topic: str) -> None:
    await cluster.create(topic)
    reader = await open_reader(client, topic, None, QUEUE_ENTRIES)
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
    reader = await open_reader(client, topic, None, QUEUE_ENTRIES)
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


async def test_cut_lines_and_unloaded_topics_are_read_on_without_a_gap(
    broker: Broker, cluster: Cluster, topic: str
) -> None:
    await cluster.create(topic)
    async with Owner(cluster.service_url, topic) as owner, Line(broker) as line:
        writer = await owner.open()
        writer.append([PulsarMessage(b"%d" % number, {ENTRY: "x"}) for number in range(3000)])
        await owner.until_confirmed(3001)
        await writer.close()
        client = PulsarClient(line.service_url, logger=quiet())
        reader = await open_reader(client, topic, None, QUEUE_ENTRIES)
        ids: list[MessageId] = []
        async with asyncio.timeout(LIMIT_SECONDS):
            for change in (1, 2, 3, None):
                while len(ids) < (3001 if change is None else 700 * change):
                    ids += [entry.message_id for entry in await reader.read()]
                if change == 2:
                    await cluster.admin.unload(topic)
                elif change is not None:
                    line.cut()
        await reader.close()
        await client.close()
        assert list(dict.fromkeys(ids)) == owner.confirmed


async def test_without_a_broker_it_is_unreadable() -> None:
    client = PulsarClient(f"pulsar://127.0.0.1:{free_port()}", operation_timeout_seconds=1, logger=quiet())
    with pytest.raises(SeqdedupeError, match="LOG_UNREADABLE"):
        await open_reader(client, "persistent://public/default/topic", MessageId(1, 2), QUEUE_ENTRIES)
    await client.close()
