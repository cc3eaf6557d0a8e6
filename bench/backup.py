"""A backup of 300 MB while somebody publishes one message at a time: its speed, and what publishing feels of it."""

import itertools
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.figure import Figure, Ratio, over, percentiles_ms, shown
from seqdedupe.client.blocking import Client
from seqdedupe.testing import Sidecar

PAYLOAD_BYTES = 100_000
PAYLOADS = 3_000
ALONE_SECONDS = 1.5
APART_SECONDS = 0.002


def _publish(client: Client, stopping: threading.Event, took: list[float]) -> None:
    """One message, its receipt, a rest, and again."""
    with client.producer("small", "p") as producer:
        while not stopping.wait(APART_SECONDS):
            began = time.perf_counter()
            producer.send(b"x" * 100)
            producer.flush()
            took.append(time.perf_counter() - began)


class _Beside:
    """Somebody who publishes for the length of a block."""

    def __init__(self, client: Client) -> None:
        self._stopping = threading.Event()
        self._took: list[float] = []
        self._thread = threading.Thread(target=_publish, args=(client, self._stopping, self._took))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def percentiles(self) -> dict[str, float]:
        return percentiles_ms(self._took)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    backups = folder / "backups"
    backups.mkdir()
    numbers = itertools.count()
    with Sidecar(folder, backup_directory=backups) as sidecar, Client(sidecar.address) as client:
        with client.producer("large", "p") as producer:
            for _ in range(PAYLOADS):
                producer.send(b"x" * PAYLOAD_BYTES)

        def alone() -> dict[str, float]:
            with (beside := _Beside(client)):
                time.sleep(ALONE_SECONDS)
            return beside.percentiles()

        def backup() -> dict[str, float]:
            with (beside := _Beside(client)):
                began = time.perf_counter()
                [made] = client.admin.backup(f"{next(numbers)}")
                seconds = time.perf_counter() - began
            return beside.percentiles() | {"MB/s": made.bytes / 1e6 / seconds}

        def anew() -> dict[str, float]:
            shutil.rmtree(backups)
            backups.mkdir()
            return backup()

        yield Figure(
            arms={"alone": alone, "first": anew, "second": backup},
            ratios=[
                shown("alone, p99"),
                shown("first, p99"),
                shown("second, p99"),
                Ratio("p99 beside a first backup ÷ alone", over("first, p99", "alone, p99"), at_most=10),
                shown("first, MB/s", "MB/s"),
                Ratio("a second backup, which shares ÷ a first", over("second, MB/s", "first, MB/s"), at_least=3),
            ],
            rounds=5,
        )
