"""p50 of a publish at 1,000 messages a second in all, over 1, 100 and 1,000 topics that are written to in turn."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from bench import setup
from bench.figure import Arm, Figure, Ratio, over, percentiles_ms
from bench.publish import rising
from seqdedupe.testing import Sidecar

RATE = 1_000
SECONDS = 5.0
PACE_SECONDS = 0.01
"""What is due by then is sent at once, as many senders' messages come."""

CONNECTIONS = 20
"""A server takes so many streams of one at most: 100."""

_runs = itertools.count()


class Topic:
    """A stream of one topic; each message has a frame of its own."""

    def __init__(self, stream: setup.Stream, name: str, seconds: list[float]) -> None:
        self._stream = stream
        self._make = rising(name, 1)
        self._seconds = seconds
        self._sent: deque[float] = deque()
        self._count = 0

    async def send(self) -> None:
        frame = setup.frame(self._make(self._count, self._stream.epochs))
        self._count += 1
        self._sent.append(time.perf_counter())
        await self._stream.call.write(frame)

    async def read(self) -> None:
        """Receipts, until it is cancelled."""
        while True:
            for _ in range(setup.receipts(await self._stream.call.read())):
                self._seconds.append(time.perf_counter() - self._sent.popleft())


async def seconds_each(address: str, count: int, run: int) -> list[float]:
    """What each message took."""
    seconds: list[float] = []
    channels: list[Any] = [
        grpc.aio.insecure_channel(address, options=[*setup.LARGE, ("grpc.use_local_subchannel_pool", 1)])
        for _ in range(min(count, CONNECTIONS))
    ]
    try:
        topics = []
        for k in range(count):
            name = f"run-{run}"
            stream = await setup.opened(channels[k % len(channels)], [name], f"dirty-{k}")
            topics.append(Topic(stream, name, seconds))
        reading = [asyncio.ensure_future(topic.read()) for topic in topics]
        turns = itertools.cycle(topics)
        for topic in topics:
            await topic.send()
        await _until(seconds, len(topics))
        seconds.clear()
        await _until(seconds, await _paced(turns))
        for task in reading:
            task.cancel()
        return seconds
    finally:
        for channel in channels:
            await channel.close()


async def _paced(turns: Iterator[Topic]) -> int:
    """Sends at the rate; how many."""
    began, sent = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < SECONDS:
        while sent < passed * RATE:
            await next(turns).send()
            sent += 1
        await asyncio.sleep(PACE_SECONDS)
    return sent


async def _until(seconds: list[float], count: int) -> None:
    while len(seconds) < count:  # noqa: ASYNC110 (nobody tells)
        await asyncio.sleep(PACE_SECONDS)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with Sidecar(folder / "sidecar", max_streams=2_000) as sidecar:

        def taking_ms(count: int) -> Arm:
            return lambda: percentiles_ms(setup.run(seconds_each(sidecar.address, count, next(_runs))))

        yield Figure(
            arms={f"{count} topics": taking_ms(count) for count in (1, 100, 1_000)},
            ratios=[
                Ratio("100 dirty topics ÷ 1", over("100 topics, p50", "1 topics, p50"), at_most=3),
                Ratio("1,000 dirty topics ÷ 1", over("1000 topics, p50", "1 topics, p50"), at_most=8),
            ],
            rounds=3,
            notes=["arms in milliseconds"],
        )
