"""A producer, its event loop, and the tasks that share it."""

import asyncio

import pytest

from seqdedupe.client import Client, Producer, ProducerConfig, Receipt
from seqdedupe.errors import InvalidRequestError, OutcomeUnknownError
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.client.helpers import read_all

MANY = 3000


async def test_tasks_send_in_the_order_of_their_calls(shared_sidecar: Sidecar, topic: str) -> None:
    config = ProducerConfig(max_batch_rows=10, max_in_flight_batches=2)
    async with Client(shared_sidecar.address) as client, client.producer(topic, "p", config) as producer:
        sends: list[asyncio.Task[Receipt]] = []
        for number in range(MANY):
            sends.append(asyncio.create_task(producer.send(b"%d" % number, number)))
            if number % 7 == 0:
                await asyncio.sleep(0)
            if number % 50 == 0:
                sends[number // 2].cancel()  # which keeps nobody from their turn
        sent = await asyncio.gather(*sends, return_exceptions=True)
    receipts = [receipt for receipt in sent if not isinstance(receipt, asyncio.CancelledError)]
    assert len(receipts) > MANY // 2
    assert not [failure for failure in receipts if isinstance(failure, BaseException)]
    stored = [message.sequence_id for message in await read_all(shared_sidecar, topic)]
    assert stored == [(await receipt).sequence_id for receipt in receipts if isinstance(receipt, Receipt)]


async def opened(address: str, topic: str) -> Producer:
    producer = Client(address).producer(topic, "p", ProducerConfig(linger_ms=60_000))
    await producer.open()
    await (await producer.send(b"before"))
    return producer


def test_a_producer_on_another_event_loop_than_its_own_is_refused(shared_sidecar: Sidecar, topic: str) -> None:
    async def elsewhere() -> None:
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            receipt = await producer.send(b"elsewhere")
            with pytest.raises(InvalidRequestError, match="another event loop"):
                await producer.flush()
            with pytest.raises(InvalidRequestError, match="another event loop"):
                await receipt
            for call in (producer.send(b"too"), producer.close(), producer.abort()):
                with pytest.raises(InvalidRequestError):
                    await call

    with asyncio.Runner() as runner:
        producer = runner.run(opened(shared_sidecar.address, topic))
        producer._topic.must_pause = False  # as between two messages of a batch
        asyncio.run(elsewhere())
        runner.run(producer.abort())
    assert [message.payload for message in asyncio.run(read_all(shared_sidecar, topic))] == [b"before"]


def test_receipts_do_not_outlive_their_event_loop(shared_sidecar: Sidecar, topic: str) -> None:
    async def send() -> Receipt:
        producer = await opened(shared_sidecar.address, topic)
        receipt = await producer.send(b"late")
        producer._topic.builder.seal()
        return receipt

    async def late(receipt: Receipt) -> None:
        async with asyncio.timeout(LAST_RESORT_SECONDS):
            with pytest.raises(OutcomeUnknownError, match="its event loop"):
                await receipt

    asyncio.run(late(asyncio.run(send())))
