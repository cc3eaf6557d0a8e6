"""Memory that 20 streams add to a sidecar whose disk stalls: each to a topic of its own, sending all that it may."""

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

from bench import setup
from bench.figure import Arm, Figure, Ratio
from bench.publish import rising
from seqdedupe.client.stream import FULL_MESSAGE_BYTES, MAX_FRAMES
from seqdedupe.testing import Sidecar

STREAMS = 20
STALL_SECONDS = 12
MOST_BYTES = 200_000_000


async def _send(call: Any, epochs: Any, name: str, rows: int) -> None:
    """Sends frames of so many rows for ever, as many in a message as a client sends."""
    make = rising(name, rows)
    frames = (setup.frame(make(k, epochs)) for k in itertools.count())
    while True:
        message: list[bytes] = []
        size = 0
        while size < FULL_MESSAGE_BYTES and len(message) < MAX_FRAMES:
            message.append(next(frames))
            size += len(message[-1])
        await call.write(b"".join(message))


async def _added(sidecar: Sidecar, stall: Path, rows: int) -> float:
    """The bytes by which the sidecar has grown when nobody could send more, or the time was over."""
    process = psutil.Process(sidecar.pid)
    channels = [grpc.aio.insecure_channel(sidecar.address, options=setup.APART) for _ in range(STREAMS)]
    streams = [await setup.opened(channel, [f"p{k}"], f"t{k}") for k, channel in enumerate(channels)]
    before = process.memory_info().rss
    await asyncio.to_thread(stall.touch)
    sending = [asyncio.ensure_future(_send(*stream, f"p{k}", rows)) for k, stream in enumerate(streams)]
    most = 0
    for _ in range(STALL_SECONDS):
        await asyncio.sleep(1)
        most = max(most, process.memory_info().rss)
    for task in sending:
        task.cancel()
    await asyncio.gather(*sending, return_exceptions=True)
    for channel in channels:
        await channel.close()
    await asyncio.to_thread(stall.unlink)
    return most - before


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    stall = folder / "stall"
    runs = itertools.count()

    def added(rows: int) -> Arm:
        def arm() -> float:
            environment = {"BENCH_STALL": str(stall)}
            with Sidecar(folder / str(next(runs)), module="bench.stalling_sidecar", environment=environment) as sidecar:
                return setup.run(_added(sidecar, stall, rows))

        return arm

    arms = {f"frames of {rows} messages": added(rows) for rows in (1, 256, 4096)}
    yield Figure(
        arms=arms,
        ratios=[
            Ratio(f"{arm}: added", lambda m, arm=arm: m[arm] / 1e6, at_most=MOST_BYTES / 1e6, unit="MB")  # type: ignore[misc]
            for arm in arms
        ],
        rounds=2,
        notes=["arms in bytes"],
    )
