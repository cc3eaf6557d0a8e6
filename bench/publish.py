"""Durable publish over gRPC, 256 × 100 B, 16 in flight, against serial append + fdatasync and an echo."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench import setup
from bench.figure import Figure, Ratio, over
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
    name = f"p{next(_names)}"
    seconds, _ = setup.run(setup.publish(address, [name], rising(name, rows), batches, in_flight))
    return rows * batches / seconds


def frame_bytes(rows: int) -> bytes:
    return setup.frame(rising("p", rows)(1, np.array([1 << 32])))


def figure_of(folder: Path, rows: int, batches: int, ratios: list[Ratio]) -> Iterator[Figure]:
    """The three arms for a batch size."""
    one = frame_bytes(rows)
    with Sidecar(folder / "sidecar") as sidecar, setup.echo_server(folder) as echo:
        yield Figure(
            arms={
                "published": lambda: published_rows(sidecar.address, rows, batches, IN_FLIGHT),
                "serial append + fdatasync": lambda: (
                    rows * batches / sum(setup.serial_append(folder, len(one), batches))
                ),
                "echo": lambda: rows * batches / setup.run(setup.echo(echo, one, batches, IN_FLIGHT))[0],
            },
            ratios=ratios,
            notes=["arms in rows a second"],
        )


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    yield from figure_of(
        folder,
        ROWS,
        BATCHES,
        [
            Ratio("published ÷ serial", over("published", "serial append + fdatasync"), at_least=1.3, aim=1.7),
            Ratio("published ÷ echo", over("published", "echo"), at_least=0.55),
        ],
    )
