"""The producer of native entries, before a broker that says what the test wants."""

import asyncio

import pytest

from seqdedupe.log.pulsar.native_topic import NativeProducer
from seqdedupe.pulsar_wire.connection import connect
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
