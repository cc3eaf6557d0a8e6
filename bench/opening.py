"""An Open of one new name in a topic of 10M, against the disk's own sync."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc.aio

from bench import setup
from bench.figure import Figure, Ratio, percentiles_ms, shown
from bench.start import MANY_PRODUCERS, fill
from seqdedupe.testing import Sidecar

OPENS = 1_000
RECORD_BYTES = 256
"""About what an Open appends."""


async def _seconds(address: str, names: list[str]) -> list[float]:
    """What each took, one after the other."""
    seconds = []
    async with grpc.aio.insecure_channel(address) as channel:
        for name in names:
            began = time.perf_counter()
            await setup.open_names(channel, setup.TOPIC, [name])
            seconds.append(time.perf_counter() - began)
    return seconds


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    setup.run(fill(folder / "data", 256, producers=MANY_PRODUCERS, tail=256))
    rounds = 0
    with Sidecar(folder) as sidecar:

        def opened() -> dict[str, float]:
            nonlocal rounds
            rounds += 1
            names = [f"new-{rounds}-{i}" for i in range(OPENS)]
            return percentiles_ms(setup.run(_seconds(sidecar.address, names)))

        yield Figure(
            arms={
                "Open": opened,
                "append and sync": lambda: percentiles_ms(setup.serial_append(folder, RECORD_BYTES, OPENS)),
            },
            ratios=[
                shown("Open, p50"),
                Ratio(
                    "Open, p99 less the sync's own p99",
                    lambda m: m["Open, p99"] - m["append and sync, p99"],
                    at_most=3,
                    unit="ms",
                ),
            ],
            rounds=5,
            notes=["arms in milliseconds"],
        )
