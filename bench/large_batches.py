"""Durable publish of 4,096 × 100 B, 16 in flight, against serial append + fdatasync."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.figure import Figure, Ratio, over
from bench.publish import figure_of

ROWS = 4_096
BATCHES = 300


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    yield from figure_of(
        folder,
        ROWS,
        BATCHES,
        [
            Ratio("published ÷ serial", over("published", "serial append + fdatasync"), at_least=0.8, aim=1.2),
            Ratio("echo ÷ serial", over("echo", "serial append + fdatasync")),
        ],
    )
