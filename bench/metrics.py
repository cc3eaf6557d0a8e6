"""Publishing with metrics that somebody scrapes every second, against publishing without."""

import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

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


def measured(sidecar: Sidecar) -> dict[str, float]:
    """Publishes; rows a second, and what they cost the sidecar."""
    process = psutil.Process(sidecar.pid)
    before = process.cpu_times()
    rate = published_rows(sidecar.address, ROWS, FRAMES, IN_FLIGHT)
    after = process.cpu_times()
    spent = after.user + after.system - before.user - before.system
    return {"rows/s": rate, "CPU": spent / (ROWS * FRAMES) * 1e6}


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    with Sidecar(folder / "off") as off, Sidecar(folder / "on", metrics_listen="127.0.0.1:0") as on:
        metrics = next(line["address"] for line in on.log if line["event"] == "metrics")

        def with_metrics() -> dict[str, float]:
            with scraped(metrics):
                return measured(on)

        yield Figure(
            arms={"off": lambda: measured(off), "on": with_metrics},
            ratios=[
                Ratio("metrics on ÷ off, rate", over("on, rows/s", "off, rows/s"), at_least=0.98),
                Ratio("metrics on ÷ off, CPU", over("on, CPU", "off, CPU")),
            ],
            notes=["arms in rows a second, and in µs of CPU of the sidecar a row"],
        )
