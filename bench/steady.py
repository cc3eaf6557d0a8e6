"""20,000 messages a second, one a call: processor time of both sides, and how long receipts take.

Beside Kafka, in one run: `python -m bench.compare`.
"""

import asyncio
import itertools
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench import setup
from bench.compare.load import PAUSE_SECONDS, Load, payload
from bench.figure import Figure, Ratio, over
from seqdedupe.client import Client, Receipt
from seqdedupe.testing import Sidecar

A_SECOND = 20_000
SECONDS = 3.0
MOST = 1 << 30

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_names = itertools.count()


class Steady(NamedTuple):
    """What a run has taken."""

    client_seconds: float
    """Of processor time, for a million messages; so the next."""
    server_seconds: float
    p50_ms: float
    """From the call of `send` until its receipt is there; so the next."""
    p99_ms: float


def cpu_seconds_of(process: int) -> float:
    """Processor time that a process has taken, to a hundredth of a second."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND


async def publish(address: str, topic: str, load: Load) -> list[float]:
    """Sends the load, one message a call; the seconds that each receipt took."""
    seconds: list[float] = []
    waiting: deque[tuple[float, Receipt]] = deque()
    is_more = asyncio.Event()
    is_over = False

    async def take() -> None:
        while not is_over:
            await is_more.wait()
            is_more.clear()
            while waiting:
                sent_at, receipt = waiting.popleft()
                await receipt
                seconds.append(time.perf_counter() - sent_at)

    async with Client(address) as client, client.producer(topic, f"p{next(_names)}") as producer:
        taking = asyncio.create_task(take())
        for number in load:
            if number is None:
                await asyncio.sleep(PAUSE_SECONDS)
            else:
                waiting.append((time.perf_counter(), await producer.send(payload(number))))
                is_more.set()
        is_over = True
        is_more.set()
        await taking
    return seconds


def measure(sidecar: Sidecar) -> Steady:
    """One run."""
    load = Load(SECONDS, MOST, A_SECOND)
    client_before, server_before = time.process_time(), cpu_seconds_of(sidecar.pid)
    seconds = sorted(setup.run(publish(sidecar.address, setup.TOPIC, load)))
    millions = len(seconds) / 1e6
    client, server = time.process_time() - client_before, cpu_seconds_of(sidecar.pid) - server_before
    p50, p99 = (1000 * seconds[int(part * len(seconds))] for part in (0.5, 0.99))
    return Steady(client / millions, server / millions, p50, p99)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with Sidecar(folder / "sidecar") as sidecar:
        last = Steady(0, 0, 0, 0)

        def measured() -> float:
            nonlocal last
            last = measure(sidecar)
            return last.client_seconds

        yield Figure(
            arms={
                "client, CPU seconds a million": measured,
                "sidecar, CPU seconds a million": lambda: last.server_seconds,
                "receipt, p50 ms": lambda: last.p50_ms,
                "receipt, p99 ms": lambda: last.p99_ms,
            },
            ratios=[
                Ratio("both sides, CPU seconds a million", lambda m: sum(list(m.values())[:2]), unit="s"),
                Ratio("p99 ÷ p50 of the receipts", over("receipt, p99 ms", "receipt, p50 ms")),
            ],
            rounds=5,
        )
