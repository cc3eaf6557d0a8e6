"""One message in flight through the client: every commit synced, against a flush policy of 1,000 messages or 100 ms."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import setup
from bench.figure import Figure, Ratio, over
from bench.publish import PAYLOAD
from seqdedupe.client import Client, blocking
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2

MESSAGES = 1_500
EVERY_COMMIT = "every commit"
POLICY = "1,000 messages or 100 ms"
SYNC = "append + fdatasync"


async def _p50_ms(address: str, topic: str) -> float:
    seconds = []
    async with Client(address) as client, client.producer(topic, "p") as producer:
        for _ in range(MESSAGES):
            began = time.perf_counter()
            await (await producer.send(PAYLOAD))
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1000


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with Sidecar(folder / "sidecar") as sidecar:
        with blocking.Client(sidecar.address) as client:
            client.admin.create_topic("every-commit")
            client.admin.create_topic("policy")
            policy = admin_pb2.TopicPolicy(log_flush_interval_messages=1_000, log_flush_interval_ms=100)
            client.admin.set_policy("policy", policy)
        yield Figure(
            arms={
                EVERY_COMMIT: lambda: setup.run(_p50_ms(sidecar.address, "every-commit")),
                POLICY: lambda: setup.run(_p50_ms(sidecar.address, "policy")),
                SYNC: lambda: statistics.median(setup.serial_append(folder, len(PAYLOAD), MESSAGES)) * 1000,
            },
            ratios=[Ratio(f"{POLICY} ÷ {EVERY_COMMIT}", over(POLICY, EVERY_COMMIT))],
            notes=["arms in milliseconds, p50"],
        )
