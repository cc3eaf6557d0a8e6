"""The producer and the readers of native entries, before a broker that says what the test wants, or before none."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar import broker_wire
from seqdedupe.log.pulsar.broker_wire import ExclusiveProducer, TopicReader
from seqdedupe.log.pulsar.entries import EntryFormat, PulsarMessage
from seqdedupe.log.pulsar.native import native_entry, wire_entry
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.connection import Connection, WireReader, connect
from seqdedupe.pulsar_wire.frames import WireEntry
from seqdedupe.pulsar_wire.pulsar_api_pb2 import ZLIB
from seqdedupe.testing import LAST_RESORT_SECONDS
from tests.batches import batch
from tests.log.pulsar.topics import native
from tests.pulsar_wire.test_connection import FakeBroker, MakeBroker, make_broker

__all__ = ["make_broker"]


@pytest.fixture
async def broker(make_broker: MakeBroker) -> FakeBroker:
    return await make_broker()


async def test_a_closing_that_is_cancelled_leaves_no_connection(broker: FakeBroker) -> None:
    """The broker does not answer. A connection that nobody closes would go on to answer its pings."""
    del broker.answers["close_producer"]
    connection = await connect(broker.url)
    producer = ExclusiveProducer(connection, "p", EntryFormat.NATIVE)
    await producer.open("t", {}, None)
    closing = asyncio.ensure_future(producer.close())
    await broker.until("close_producer")
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not connection.is_open


LARGE, SMALL = (
    message._replace(compression=ZLIB)
    for message in native(1, 1, 0, batch([("p", 1)], payloads=[bytes(2 * broker_wire.LARGE_BYTES)]))
    + native(1, 2, 1, batch([("p", 2)]))
)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Large entries are encoded when this is set. On the event loop they would never be."""
    let_go = threading.Event()

    def held(message: PulsarMessage, *more: Any) -> WireEntry:
        if message == LARGE:
            assert let_go.wait(LAST_RESORT_SECONDS)
        return wire_entry(message, *more)

    monkeypatch.setattr(broker_wire, "wire_entry", held)
    yield let_go
    let_go.set()


async def opened(broker: FakeBroker) -> ExclusiveProducer:
    connection = await connect(broker.url)
    connection.max_message_bytes = 10 * broker_wire.LARGE_BYTES
    producer = ExclusiveProducer(connection, "p", EntryFormat.NATIVE)
    await producer.open("t", {}, None)
    return producer


async def test_entries_keep_their_order_while_a_thread_compresses_a_large_one(
    broker: FakeBroker, hold: threading.Event
) -> None:
    producer = await opened(broker)
    answers = asyncio.Queue[int]()
    for number, message in enumerate((SMALL, LARGE, SMALL, LARGE, SMALL)):
        producer.send(message, number, lambda number, *_: answers.put_nowait(number))
    assert [send.sequence_id for send in await broker.until("send")] == [0]
    hold.set()
    assert [send.sequence_id for send in await broker.until("send", 5)] == list(range(5))
    producer.send(SMALL, 5, lambda number, *_: answers.put_nowait(number))
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        assert [await answers.get() for _ in range(6)] == list(range(6))
    await producer.close()


async def test_an_entry_that_cannot_be_encoded_ends_the_producer(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = await opened(broker)
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def fail(*_: Any) -> WireEntry:
        raise ValueError("it is not as it should be")

    monkeypatch.setattr(broker_wire, "wire_entry", fail)
    producer.send(LARGE, 0, lambda number, *_: ended.set_result(number))
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        assert await ended == -1
    await producer.close()


async def test_what_waits_for_a_thread_is_not_sent_after_the_end(broker: FakeBroker, hold: threading.Event) -> None:
    producer = await opened(broker)
    producer.send(LARGE, 0, lambda *_: None)
    producer.send(SMALL, 1, lambda *_: None)
    await producer.close()
    hold.set()
    assert not [command for command in broker.commands if command.HasField("send")]


async def test_without_a_broker_the_end_of_a_topic_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be down for hours. The topic would say nothing about it, and keep what it has for its reading."""
    monkeypatch.setattr(broker_wire, "OPEN_SECONDS", 0.3)

    async def refuse(place: MessageId | None) -> WireReader:
        raise error("LOG_REFUSED", "the broker cannot be reached")

    reader = TopicReader(refuse, "t", native_entry)
    async with asyncio.timeout(5.0):
        with pytest.raises(SeqdedupeError, match="LOG_UNREADABLE"):
            await reader.is_at_end()
    await reader.close()


async def test_a_reader_that_is_closed_while_it_opens_leaves_no_connection(broker: FakeBroker) -> None:
    connections: list[Connection] = []
    is_opening, go_on = asyncio.Event(), asyncio.Event()

    async def open_at(_: MessageId | None) -> WireReader:
        connections.append(await connect(broker.url))
        is_opening.set()
        await go_on.wait()
        return WireReader(connections[-1], 1)

    reader = TopicReader(open_at, "t", native_entry)
    waiting = asyncio.ensure_future(reader.read())
    async with asyncio.timeout(LAST_RESORT_SECONDS):
        await is_opening.wait()
        await reader.close()
        go_on.set()
        with pytest.raises(SeqdedupeError, match="LOG_UNREADABLE"):
            await waiting
    assert [connection.is_open for connection in connections] == [False]
