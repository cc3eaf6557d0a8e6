"""Resident memory per known producer, with 1M of them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench.figure import Figure, Ratio
from bench.start import PRODUCERS, fill
from seqdedupe.testing import Sidecar


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    async def make() -> None:
        await fill(folder / "many" / "data", 1, tail=1)
        await fill(folder / "none" / "data", 1, producers=0, tail=1)

    asyncio.run(make())

    def resident(name: str) -> float:
        sidecar = Sidecar(folder / name)
        sidecar.start()
        size = psutil.Process(sidecar.pid).memory_info().rss
        sidecar.kill()
        return float(size)

    yield Figure(
        arms={"with 1M producers": lambda: resident("many"), "with none": lambda: resident("none")},
        ratios=[
            Ratio(
                "bytes per producer",
                lambda m: (m["with 1M producers"] - m["with none"]) / PRODUCERS,
                at_most=200,
                unit="B",
            )
        ],
        rounds=2,
        notes=["arms in bytes resident"],
    )
