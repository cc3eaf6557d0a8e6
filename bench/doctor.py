"""`seqdedupe doctor` over a log, against reading the same files from the page cache."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.figure import Arm, Figure, Ratio, over
from bench.start import fill
from seqdedupe.doctor.examine import examine

MESSAGES = 4_000_000
FEW_MESSAGES = 400_000
PRODUCERS = 1_000
READ_BYTES = 1024 * 1024


def _logs(data: Path) -> list[Path]:
    return sorted((data / "logs").glob("*/*.log"))


def _rate(data: Path, work: Arm) -> Arm:
    """Bytes of the log a second."""

    def rate() -> float:
        size = sum(path.stat().st_size for path in _logs(data))
        began = time.perf_counter()
        work()
        return size / (time.perf_counter() - began)

    return rate


def _examined(data: Path) -> Arm:
    def work() -> float:
        assert examine(data).is_whole
        return 0.0

    return _rate(data, work)


def _read(data: Path) -> Arm:
    def work() -> float:
        buffer = bytearray(READ_BYTES)
        for path in _logs(data):
            with open(path, "rb", buffering=0) as file:
                at = 0
                while size := os.preadv(file.fileno(), [buffer], at):
                    at += size
        return 0.0

    return _rate(data, work)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    large, small = folder / "rows-256", folder / "rows-1"
    asyncio.run(fill(large, 256, producers=PRODUCERS, tail=MESSAGES))
    asyncio.run(fill(small, 1, producers=PRODUCERS, tail=FEW_MESSAGES))
    yield Figure(
        arms={
            "doctor, batches of 256 rows": _examined(large),
            "reading, batches of 256 rows": _read(large),
            "doctor, batches of one row": _examined(small),
            "reading, batches of one row": _read(small),
        },
        ratios=[
            Ratio(
                "doctor ÷ reading, batches of 256 rows",
                over("doctor, batches of 256 rows", "reading, batches of 256 rows"),
                at_least=0.3,
            ),
            Ratio(
                "doctor ÷ reading, batches of one row",
                over("doctor, batches of one row", "reading, batches of one row"),
            ),
        ],
        notes=["arms in bytes a second"],
    )
