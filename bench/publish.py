"""Durable publish over gRPC, 256 × 100 B, 16 in flight, against serial append + fdatasync and an echo.

The echo's client is that of the raw publish, frame for frame and message for message: what differs is the server. One
that also syncs what it echoes shows how much of the difference is the disk.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench import by_client, echo, setup
from bench.figure import Arm, Figure, Ratio, over, percentiles_ms, shown
from seqdedupe.batch import Batch, Binary, single_producer
from seqdedupe.testing import Sidecar

ROWS = 256
IN_FLIGHT = 16
BATCHES = 2_000
PAYLOAD = b"x" * 100

_names = itertools.count()


def rising(name: str, rows: int, payload: bytes = PAYLOAD) -> setup.MakeBatch:
    """Batches of one producer with rising sequence IDs from 0."""
    payloads = Binary.of_all([payload] * rows)
    base = np.arange(rows, dtype=np.int64)

    def make(k: int, epochs: np.ndarray) -> Batch:
        return single_producer(name.encode(), int(epochs[0]), k * rows - 1, base + k * rows, payloads)

    return make


def published_rows(address: str, rows: int, batches: int, in_flight: int) -> float:
    """Rows a second, published by a new producer."""
    return published(address, rows, batches, in_flight)[0]


def published(address: str, rows: int, batches: int, in_flight: int) -> tuple[float, list[float]]:
    """Rows a second, and the seconds for each receipt, published by a new producer."""
    name = f"p{next(_names)}"
    seconds, each = setup.run(setup.publish(address, [name], rising(name, rows), batches, in_flight))
    return rows * batches / seconds, each


def frame_bytes(rows: int) -> bytes:
    return setup.frame(rising("p", rows)(1, setup.EPOCHS))


def figure_of(folder: Path, rows: int, batches: int, ratios: list[Ratio]) -> Iterator[Figure]:
    """The arms for a batch size."""
    size = len(frame_bytes(rows))
    payloads = Binary.of_all([PAYLOAD] * rows)

    def measured(rate: float, each: list[float]) -> dict[str, float]:
        return {"rows/s": rate} | percentiles_ms(each)

    def echoed(address: str, method: str) -> dict[str, float]:
        seconds, each = setup.run(setup.echo(address, rising("p", rows), batches, IN_FLIGHT, method))
        return measured(rows * batches / seconds, each)

    def appended() -> dict[str, float]:
        each = setup.serial_append(folder, size, batches)
        return measured(rows * batches / sum(each), each)

    def by_the_client(address: str) -> dict[str, float]:
        return measured(*setup.run(by_client.publish_batches(address, setup.TOPIC, payloads, batches, IN_FLIGHT)))

    with Sidecar(folder / "sidecar") as sidecar, setup.echo_server(folder) as echoes:
        arms: dict[str, Arm] = {
            "raw": lambda: measured(*published(sidecar.address, rows, batches, IN_FLIGHT)),
            "client": lambda: by_the_client(sidecar.address),
            "serial append + fdatasync": appended,
            "echo": lambda: echoed(echoes, echo.ECHO),
            "echo that syncs": lambda: echoed(echoes, echo.GROUPED_ECHO),
        }
        syncs = [shown(f"serial append + fdatasync, {p}") for p in ("p50", "p99")]
        yield Figure(arms, ratios=[*ratios, *syncs], notes=["arms in rows a second, and milliseconds a batch"])


RAW, SERIAL, ECHO = "raw, rows/s", "serial append + fdatasync, rows/s", "echo, rows/s"


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    yield from figure_of(
        folder,
        ROWS,
        BATCHES,
        [
            Ratio("published ÷ serial", over(RAW, SERIAL), at_least=1.3, aim=1.7),
            Ratio("published ÷ echo", over(RAW, ECHO), at_least=0.6),
            Ratio("published ÷ echo that syncs", over(RAW, "echo that syncs, rows/s")),
            Ratio("by the client ÷ raw", over("client, rows/s", RAW)),
        ],
    )
