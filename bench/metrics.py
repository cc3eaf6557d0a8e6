"""Publishing with metrics that somebody scrapes every second, against publishing without."""

import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.figure import Figure, Ratio, over
from bench.publish import published_rows
from seqdedupe.client import ProducerConfig
from seqdedupe.testing import Sidecar

ROWS = 256
FRAMES = 4_000
IN_FLIGHT = ProducerConfig().max_in_flight_batches
EVERY_SECONDS = 1.0
TIMEOUT_SECONDS = 60.0


@contextmanager
def scraped(address: str) -> Iterator[None]:
    """Somebody asks for metrics every second during the block."""
    ending = threading.Event()

    def scrape() -> None:
        while not ending.wait(EVERY_SECONDS):
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_SECONDS) as response:
                response.read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with Sidecar(folder / "off") as off, Sidecar(folder / "on", metrics_listen="127.0.0.1:0") as on:
        metrics = next(line["address"] for line in on.log if line["event"] == "metrics")

        def with_metrics() -> float:
            with scraped(metrics):
                return published_rows(on.address, ROWS, FRAMES, IN_FLIGHT)

        yield Figure(
            arms={"off": lambda: published_rows(off.address, ROWS, FRAMES, IN_FLIGHT), "on": with_metrics},
            ratios=[Ratio("metrics on ÷ off", over("on", "off"), at_least=0.98)],
            notes=["arms in rows a second"],
        )
