"""An Open of one new name in a topic of 10M, against the disk's own sync."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import numpy as np

from bench import setup
from bench.figure import Figure, Ratio
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
    taken: dict[str, list[float]] = {}
    rounds = 0

    def measured(of: str, percent: float) -> Callable[[], float]:
        return lambda: float(np.percentile(taken[of], percent)) * 1000

    with Sidecar(folder) as sidecar:

        def opened() -> float:
            nonlocal rounds
            rounds += 1
            names = [f"new-{rounds}-{i}" for i in range(OPENS)]
            taken["open"] = setup.run(_seconds(sidecar.address, names))
            taken["sync"] = setup.serial_append(folder, RECORD_BYTES, OPENS)
            return measured("open", 50)()

        yield Figure(
            arms={
                "Open, p50": opened,
                "Open, p99": measured("open", 99),
                "append and sync, p50": measured("sync", 50),
                "append and sync, p99": measured("sync", 99),
            },
            ratios=[
                Ratio("Open, p50", lambda m: m["Open, p50"], unit="ms"),
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
