"""Syncs per acknowledged batch at 16 in flight, with 2 ms added to each sync."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.figure import Figure, Ratio
from bench.publish import IN_FLIGHT, ROWS, published_rows
from seqdedupe.testing import Sidecar

BATCHES = 1_000


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    runs = iter(range(1_000))

    def syncs() -> float:
        sidecar = Sidecar(folder / str(next(runs)), module="bench.slow_sync_sidecar")
        sidecar.start()
        try:
            published_rows(sidecar.address, ROWS, BATCHES, IN_FLIGHT)
        finally:
            sidecar.stop()
        return float(next(entry["count"] for entry in sidecar.log if entry["event"] == "syncs"))

    yield Figure(
        arms={"syncs": syncs},
        ratios=[Ratio("syncs ÷ batches", lambda m: m["syncs"] / BATCHES, at_most=0.15, unit="")],
        rounds=3,
    )
