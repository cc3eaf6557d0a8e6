"""Durable publish into a topic of deduplication IDs, 1,000 × 100 B, 1 % copies, against one of sequence IDs.

IDs have 16 bytes, and a hundredth of each frame's, here and there in it, are copies of some that came a little before.
The window is full, so that as many IDs are forgotten as come.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import numpy as np

from bench import by_client, setup
from bench.figure import Arm, Figure, Ratio, over, percentiles_ms
from bench.publish import IN_FLIGHT, PAYLOAD, published
from seqdedupe.batch import Batch, Binary, without_producers
from seqdedupe.client import Client
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2

ROWS = 1_000
BATCHES = 500
TOPIC = "bench-by-id"
WINDOW = 2_000_000

_EVERY = 100
"""One row in so many is a copy."""
_BACK = 2 * IN_FLIGHT
"""Of one so many batches before, which has settled by then."""
_ID_BYTES = 16
_OFFSETS = np.arange(0, _ID_BYTES * ROWS + 1, _ID_BYTES, dtype=np.int32)


def random_ids() -> list[Binary]:
    """Of each batch its IDs."""
    ids = np.frombuffer(os.urandom(BATCHES * ROWS * _ID_BYTES), np.uint8).reshape(BATCHES, ROWS, _ID_BYTES).copy()
    for k in range(_BACK, BATCHES):
        ids[k, ::_EVERY] = ids[k - _BACK, 1::_EVERY]
    return [Binary(_OFFSETS, of_batch.tobytes()) for of_batch in ids]


async def _raw(address: str, ids: list[Binary], payloads: Binary) -> tuple[float, list[float]]:
    def make(k: int, _epochs: np.ndarray) -> Batch:
        return without_producers(ids[k], payloads)

    async with grpc.aio.insecure_channel(address, options=setup.LARGE) as channel:
        stream = await setup.opened_by_id(channel, TOPIC)
        seconds, each = await stream.publish(make, BATCHES, IN_FLIGHT)
        return ROWS * BATCHES / seconds, each


async def _by_the_client(address: str, ids: list[Binary], payloads: Binary) -> tuple[float, list[float]]:
    """So many calls at a time."""
    seconds: list[float] = []
    left = iter(ids)
    async with Client(address) as client, client.publisher(TOPIC) as publisher:

        async def send() -> None:
            for some in left:
                at = time.perf_counter()
                await publisher.send_batch(payloads, some)
                seconds.append(time.perf_counter() - at)

        began = time.perf_counter()
        await asyncio.gather(*(send() for _ in range(IN_FLIGHT)))
        return ROWS * BATCHES / (time.perf_counter() - began), seconds


async def _create(address: str) -> None:
    policy = admin_pb2.TopicPolicy(deduplication_window_max_messages=WINDOW)
    async with Client(address) as client:
        await client.admin.create_topic(TOPIC, deduplication_mode="deduplication-id", policy=policy)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    payloads = Binary.of_all([PAYLOAD] * ROWS)

    def measured(rate: float, each: list[float]) -> dict[str, float]:
        return {"rows/s": rate} | percentiles_ms(each)

    with Sidecar(folder / "sidecar") as sidecar:
        address = sidecar.address
        setup.run(_create(address))
        for _ in range(WINDOW // (ROWS * BATCHES) + 1):
            setup.run(_raw(address, random_ids(), payloads))
        arms: dict[str, Arm] = {
            "by ID": lambda: measured(*setup.run(_raw(address, random_ids(), payloads))),
            "by sequence": lambda: measured(*published(address, ROWS, BATCHES, IN_FLIGHT)),
            "by ID, client": lambda: measured(*setup.run(_by_the_client(address, random_ids(), payloads))),
            "by sequence, client": lambda: measured(
                *setup.run(by_client.publish_batches(address, setup.TOPIC, payloads, BATCHES, IN_FLIGHT))
            ),
        }
        yield Figure(
            arms,
            ratios=[
                Ratio("by ID ÷ by sequence", over("by ID, rows/s", "by sequence, rows/s"), at_least=0.6),
                Ratio(
                    "the same by the client",
                    over("by ID, client, rows/s", "by sequence, client, rows/s"),
                    at_least=0.6,
                ),
            ],
            notes=["arms in rows a second, and milliseconds a batch"],
        )
