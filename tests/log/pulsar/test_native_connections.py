"""The producer and the readers of native entries, before a broker that says what the test wants, or before none."""

import asyncio

import pytest

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar import native_topic
from seqdedupe.log.pulsar.native_topic import NativeProducer, NativeReader
from seqdedupe.message_id import MessageId
from seqdedupe.pulsar_wire.connection import WireReader, connect
from tests.pulsar_wire.test_connection import FakeBroker, MakeBroker, make_broker

__all__ = ["make_broker"]


@pytest.fixture
async def broker(make_broker: MakeBroker) -> FakeBroker:
    return await make_broker()


async def test_a_closing_that_is_cancelled_leaves_no_connection(broker: FakeBroker) -> None:
    """The broker does not answer. A connection that nobody closes would go on to answer its pings."""
    del broker.answers["close_producer"]
    connection = await connect(broker.url)
    producer = NativeProducer(connection, "p")
    await producer.open("t", {})
    closing = asyncio.ensure_future(producer.close())
    await broker.until("close_producer")
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not connection.is_open


async def test_without_a_broker_the_end_of_a_topic_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be down for hours. The topic would say nothing about it, and keep what it has for its reading."""
    monkeypatch.setattr(native_topic, "OPEN_SECONDS", 0.3)

    async def refuse(place: MessageId | None) -> WireReader:
        raise error("LOG_REFUSED", "the broker cannot be reached")

    reader = NativeReader(refuse, "t")
    async with asyncio.timeout(5.0):
        with pytest.raises(SeqdedupeError, match="LOG_UNREADABLE"):
            await reader.is_at_end()
    await reader.close()
