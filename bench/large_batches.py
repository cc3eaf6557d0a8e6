"""Durable publish of 4,096 × 100 B, 16 in flight, against serial append + fdatasync."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.figure import Figure, Ratio, over
from bench.publish import ECHO, SERIAL, figure_of

ROWS = 4_096
BATCHES = 300


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    yield from figure_of(
        folder,
        ROWS,
        BATCHES,
        [
            Ratio("published ÷ serial", over("raw, rows/s", SERIAL), at_least=0.57, aim=0.8),
            Ratio("echo ÷ serial", over(ECHO, SERIAL)),
            Ratio("by the client ÷ raw", over("client, rows/s", "raw, rows/s")),
        ],
    )
