"""20,000 messages a second, one a call: processor time of both sides, and how long receipts take.

Beside Kafka, in one run: `python -m bench.compare`.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import setup
from bench.by_client import Timed
from bench.compare.load import PAUSE_SECONDS, Load, payload
from bench.compare.usage import cpu_seconds_of
from bench.figure import Figure, Ratio, over, percentiles_ms
from seqdedupe.client import Client
from seqdedupe.testing import Sidecar

A_SECOND = 20_000
SECONDS = 3.0
MOST = 1 << 30

CLIENT = "client, CPU seconds a million"
SIDECAR = "sidecar, CPU seconds a million"

STEADY = "20,000 messages a second"
_names = itertools.count()


async def publish(address: str, topic: str, load: Load) -> list[float]:
    """Sends the load, one message a call; the seconds that each receipt took."""
    seconds: list[float] = []
    async with Client(address) as client, client.producer(topic, f"p{next(_names)}") as producer:
        timed = Timed[float](lambda since: seconds.append(time.perf_counter() - since))
        for number in load:
            if number is None:
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                at = time.perf_counter()
                timed.add(await producer.send(payload(number)), at)
        await timed.all()
    return seconds


def measure(sidecar: Sidecar) -> dict[str, float]:
    """One run: processor time for a million messages, and how long after its `send` a receipt is there."""
    load = Load(SECONDS, MOST, A_SECOND)
    client_before, server_before = time.process_time(), cpu_seconds_of(sidecar.pid)
    seconds = setup.run(publish(sidecar.address, setup.TOPIC, load))
    millions = len(seconds) / 1e6
    client, server = time.process_time() - client_before, cpu_seconds_of(sidecar.pid) - server_before
    return {CLIENT: client / millions, SIDECAR: server / millions} | percentiles_ms(seconds)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with Sidecar(folder / "sidecar") as sidecar:
        yield Figure(
            arms={STEADY: lambda: measure(sidecar)},
            ratios=[
                Ratio(
                    "both sides, CPU seconds a million",
                    lambda m: m[f"{STEADY}, {CLIENT}"] + m[f"{STEADY}, {SIDECAR}"],
                    unit="s",
                ),
                Ratio("p99 ÷ p50 of the receipts", over(f"{STEADY}, p99", f"{STEADY}, p50")),
            ],
            rounds=5,
        )
