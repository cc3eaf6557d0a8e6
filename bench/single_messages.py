"""`await send()` one message at a time, and the blocking façade, against ready batches of 1,000 rows."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import setup
from bench.figure import Figure, Ratio, over
from bench.publish import PAYLOAD, published_rows
from seqdedupe.batch import Binary
from seqdedupe.client import Client, ProducerConfig, blocking
from seqdedupe.testing import Sidecar

ROWS = 1_000
MESSAGES = 300_000
IN_FLIGHT = ProducerConfig().max_in_flight_batches


async def _ready(address: str, topic: str) -> float:
    async with Client(address) as client, client.producer(topic, "ready") as producer:
        payloads = Binary.of_all([PAYLOAD] * ROWS)
        began = time.perf_counter()
        for _ in range(MESSAGES // ROWS):
            await producer.send_batch(payloads)
        await producer.flush()
        return MESSAGES / (time.perf_counter() - began)


async def _single(address: str, topic: str) -> float:
    async with Client(address) as client, client.producer(topic, "single") as producer:
        began = time.perf_counter()
        for _ in range(MESSAGES):
            await producer.send(PAYLOAD)
        await producer.flush()
        return MESSAGES / (time.perf_counter() - began)


def _blocking(address: str, topic: str) -> float:
    with blocking.Client(address) as client, client.producer(topic, "blocking") as producer:
        began = time.perf_counter()
        for _ in range(MESSAGES):
            producer.send(PAYLOAD)
        producer.flush()
        return MESSAGES / (time.perf_counter() - began)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with Sidecar(folder / "sidecar") as sidecar:
        yield Figure(
            arms={
                "raw": lambda: published_rows(sidecar.address, ROWS, MESSAGES // ROWS, IN_FLIGHT),
                "ready batches": lambda: setup.run(_ready(sidecar.address, setup.TOPIC)),
                "await send()": lambda: setup.run(_single(sidecar.address, setup.TOPIC)),
                "blocking send()": lambda: _blocking(sidecar.address, setup.TOPIC),
            },
            ratios=[
                Ratio("ready batches ÷ raw", over("ready batches", "raw")),
                Ratio("await send() ÷ ready batches", over("await send()", "ready batches"), at_least=0.25),
                Ratio("blocking send() ÷ ready batches", over("blocking send()", "ready batches"), at_least=0.2),
            ],
            notes=["arms in messages a second"],
        )
