"""A process that publishes to topics under one name until SIGTERM, and prints what it has a receipt for: to be killed.

    python -m tests.pulsar.producing ADDRESSES NAME TOPIC ...

It does not know what it had sent before it was killed: it begins some messages before what the topic has of it.
"""

import asyncio
import signal
import sys

from seqdedupe.client import Client, Producer, ProducerConfig, Receipt, UnavailableError

FORGETS = 10
ROWS = 3
"""A batch may be stored in part."""
PAUSE_SECONDS = 0.05

_CONFIG = ProducerConfig(max_in_flight_batches=10, delivery_timeout_seconds=None)


async def _opened(client: Client, topic: str, name: str) -> Producer:
    while True:
        producer = client.producer(topic, name, _CONFIG)
        try:
            await producer.open()
        except UnavailableError:
            # All that it could ask may be down.
            continue
        return producer


async def _publish(client: Client, topic: str, name: str, is_over: asyncio.Event) -> None:
    producer = await _opened(client, topic, name)
    receipts: asyncio.Queue[tuple[int, Receipt] | None] = asyncio.Queue()
    telling = asyncio.ensure_future(_tell(topic, receipts))
    sequence_id = max(0, producer.persisted_sequence_id + 1 - FORGETS)
    while not is_over.is_set():
        for _ in range(ROWS):
            receipt = await producer.send(b"%s-%d" % (name.encode(), sequence_id), sequence_id)
            receipts.put_nowait((sequence_id, receipt))
            sequence_id += 1
        await asyncio.sleep(PAUSE_SECONDS)
    receipts.put_nowait(None)
    await telling
    await producer.close()


async def _tell(topic: str, receipts: "asyncio.Queue[tuple[int, Receipt] | None]") -> None:
    while (one := await receipts.get()) is not None:
        sequence_id, receipt = one
        await receipt
        print(topic, sequence_id, flush=True)


async def _main(addresses: str, name: str, *topics: str) -> None:
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
    async with Client(addresses) as client, asyncio.TaskGroup() as group:
        for topic in topics:
            group.create_task(_publish(client, topic, name, is_over))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
