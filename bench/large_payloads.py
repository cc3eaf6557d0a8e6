"""Large messages through the client, several in flight, durable, against serial append + fdatasync; and read back."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from bench import setup
from bench.by_client import Timed
from bench.echo import STREAM
from bench.figure import Arm, Figure, Ratio, over, percentiles_ms
from bench.reading import read_bytes
from seqdedupe.client import Client
from seqdedupe.testing import Sidecar

TOTAL_BYTES = {1_000_000: 200_000_000, 64_000: 100_000_000}
"""What an arm sends of messages of such a size."""

RATE = "bytes a second"

_topics = count()


class _Topic:
    """The topic that was published last, with messages of one size."""

    def __init__(self, address: str, size: int) -> None:
        self.messages = TOTAL_BYTES[size] // size
        self._address = address
        self._payload = os.urandom(size)
        self._name = ""

    def publish(self) -> dict[str, float]:
        """Bytes a second, one message a call, and how long its receipt took."""
        self._name = f"large-{next(_topics)}"
        return setup.run(self._publish())

    async def _publish(self) -> dict[str, float]:
        seconds: list[float] = []
        async with Client(self._address) as client, client.producer(self._name, "p") as producer:
            timed = Timed[float](lambda since: seconds.append(time.perf_counter() - since))
            began = time.perf_counter()
            for _ in range(self.messages):
                at = time.perf_counter()
                timed.add(await producer.send(self._payload), at)
            await timed.all()
            rate = self.messages * len(self._payload) / (time.perf_counter() - began)
        return {RATE: rate} | percentiles_ms(seconds, "receipt, ")

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


def _append(folder: Path, size: int) -> dict[str, float]:
    """Serial append: bytes a second, and what its syncs took."""
    path, data, messages = folder / "serial", os.urandom(size), TOTAL_BYTES[size] // size
    syncs: list[float] = []
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    try:
        began = time.perf_counter()
        for _ in range(messages):
            os.write(file, data)
            at = time.perf_counter()
            os.fdatasync(file)
            syncs.append(time.perf_counter() - at)
        rate = messages * size / (time.perf_counter() - began)
    finally:
        os.close(file)
        path.unlink()
    return {RATE: rate} | percentiles_ms(syncs, "sync, ")


def _identity(address: str, size: int, messages: int) -> float:
    """Bytes a second of the same messages from a server that does nothing."""
    return setup.run(read_bytes(address, STREAM, f"{size} {messages}".encode(), times=1))


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    arms: dict[str, Arm] = {}
    ratios: list[Ratio] = []
    with Sidecar(folder / "sidecar") as sidecar, setup.echo_server(folder) as echo:
        for size in TOTAL_BYTES:
            topic = _Topic(sidecar.address, size)
            of = f"{size // 1000} KB"
            arms |= {
                f"{of} published": topic.publish,
                f"{of} appended": partial(_append, folder, size),
                f"{of} read": topic.read,
                f"{of} identity": partial(_identity, echo, size, topic.messages),
            }
            ratios += [
                Ratio(f"{of} published ÷ serial", over(f"{of} published, {RATE}", f"{of} appended, {RATE}")),
                Ratio(f"{of} read ÷ identity", over(f"{of} read", f"{of} identity")),
            ]
        yield Figure(arms=arms, ratios=ratios, rounds=5, notes=["read and identity in bytes a second"])
