"""Large messages through the client, several in flight, durable, against serial append + fdatasync; and read back."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from bench import setup
from bench.echo import STREAM
from bench.figure import Arm, Figure, Ratio, over
from bench.reading import read_bytes
from seqdedupe.client import Client
from seqdedupe.testing import Sidecar

TOTAL_BYTES = {1_000_000: 200_000_000, 64_000: 100_000_000}
"""What an arm sends of messages of such a size."""

_topics = count()


class _Topic:
    """The topic that was published last, with messages of one size, and how long each receipt took."""

    def __init__(self, address: str, size: int) -> None:
        self.messages = TOTAL_BYTES[size] // size
        self.took_ms: list[float] = []
        self._address = address
        self._payload = os.urandom(size)
        self._name = ""

    def publish(self) -> float:
        """Bytes a second, one message a call."""
        self._name = f"large-{next(_topics)}"
        self.took_ms = []
        return setup.run(self._publish())

    async def _publish(self) -> float:
        async with Client(self._address) as client, client.producer(self._name, "p") as producer:
            sent: asyncio.Queue[tuple[float, Any]] = asyncio.Queue()

            async def receive() -> None:
                for _ in range(self.messages):
                    at, receipt = await sent.get()
                    await receipt
                    self.took_ms.append((time.perf_counter() - at) * 1000)

            receiving = asyncio.ensure_future(receive())
            began = time.perf_counter()
            for _ in range(self.messages):
                sent.put_nowait((time.perf_counter(), await producer.send(self._payload)))
            await receiving
            return self.messages * len(self._payload) / (time.perf_counter() - began)

    def read(self) -> float:
        """Bytes a second, each payload looked at."""
        return setup.run(self._read())

    async def _read(self) -> float:
        size = 0
        async with Client(self._address) as client, client.reader(self._name) as reader:
            began = time.perf_counter()
            async for message in reader:
                size += len(message.payload or b"")
            assert size == self.messages * len(self._payload)
            return size / (time.perf_counter() - began)


class _Disk:
    """Serial append, and what its syncs took."""

    def __init__(self, folder: Path, size: int) -> None:
        self._path = folder / "serial"
        self._data = os.urandom(size)
        self._count = TOTAL_BYTES[size] // size
        self.syncs_ms: list[float] = []

    def append(self) -> float:
        """Bytes a second."""
        self.syncs_ms = []
        file = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        try:
            began = time.perf_counter()
            for _ in range(self._count):
                os.write(file, self._data)
                at = time.perf_counter()
                os.fdatasync(file)
                self.syncs_ms.append((time.perf_counter() - at) * 1000)
            return self._count * len(self._data) / (time.perf_counter() - began)
        finally:
            os.close(file)
            self._path.unlink()


def _identity(address: str, size: int, messages: int) -> float:
    """Bytes a second of the same messages from a server that does nothing."""
    return setup.run(read_bytes(address, STREAM, f"{size} {messages}".encode(), times=1))


def _percentile(of: Any, name: str, q: int) -> Arm:
    """Of what the arm before has measured."""
    return lambda: float(np.percentile(getattr(of, name), q))


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    arms: dict[str, Arm] = {}
    ratios: list[Ratio] = []
    with Sidecar(folder / "sidecar") as sidecar, setup.echo_server(folder) as echo:
        for size in TOTAL_BYTES:
            topic, disk = _Topic(sidecar.address, size), _Disk(folder, size)
            of = f"{size // 1000} KB"
            arms |= {
                f"{of} published": topic.publish,
                f"{of} receipt, p50 ms": _percentile(topic, "took_ms", 50),
                f"{of} receipt, p99 ms": _percentile(topic, "took_ms", 99),
                f"{of} serial append + fdatasync": disk.append,
                f"{of} sync, p50 ms": _percentile(disk, "syncs_ms", 50),
                f"{of} read": topic.read,
                f"{of} identity": partial(_identity, echo, size, topic.messages),
            }
            ratios += [
                Ratio(f"{of} published ÷ serial", over(f"{of} published", f"{of} serial append + fdatasync")),
                Ratio(f"{of} read ÷ identity", over(f"{of} read", f"{of} identity")),
            ]
        yield Figure(arms=arms, ratios=ratios, rounds=5, notes=["published, appended and read in bytes a second"])
