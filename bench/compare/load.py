"""What a client is given to send, and what it has to offer to be measured. It runs with a broker's own libraries."""

import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

from bench.compare.usage import Usage

PAYLOAD_BYTES = 100
BATCH_MESSAGES = 1_000
"""In a ready batch."""
PRODUCER = "compare"
PAUSE_SECONDS = 0.001
_LOOK_AT_CLOCK_EVERY = 64
_FILLING = b"x" * (PAYLOAD_BYTES - 8)


def payload(number: int) -> bytes:
    """A message of 100 bytes that begins with its number."""
    return number.to_bytes(8, "big") + _FILLING


def number_of(data: bytes) -> int:
    """The number that a message begins with."""
    return int.from_bytes(data[:8], "big")


class Load:
    """The numbers to send, from 1 on: for so many seconds, or with `a_second` at that pace until `stop` is set.

    None among them means: wait for `PAUSE_SECONDS` and ask again. Never more than `most` are given. A client says how
    to find out what is `confirmed` so far, from another thread, and calls `finish` when all that was sent is. What it
    and the `server`, a session of processes, have taken meanwhile is in `usage` then.
    """

    def __init__(
        self,
        seconds: float,
        most: int,
        a_second: int | None = None,
        stop: threading.Event | None = None,
        server: int = 0,
    ):
        self.sent = 0
        self.confirmed: Callable[[], int] = lambda: 0
        self.seconds = 0.0
        self.latencies: list[float] = []
        """At a pace: the seconds from when each message was due, whenever it was really sent, to its confirmation."""
        self.usage: dict[str, float] = {}
        self._server = server
        self._for_seconds = seconds
        self._most = most
        self._a_second = a_second
        self._stop = stop or threading.Event()
        self._began = 0.0

    def __iter__(self) -> Iterator[int | None]:
        self._begin()
        while self.sent < self._most:
            if self._a_second is not None or self.sent % _LOOK_AT_CLOCK_EVERY == 0:
                elapsed = time.perf_counter() - self._began
                if elapsed >= self._for_seconds or self._stop.is_set():
                    return
                if self._a_second is not None and self.sent >= elapsed * self._a_second:
                    yield None
                    continue
            self.sent += 1
            yield self.sent

    def batches(self) -> Iterator[None]:
        """Instead of numbers: each time a batch of `BATCH_MESSAGES` is to be sent."""
        self._begin()
        while self.sent < self._most and time.perf_counter() - self._began < self._for_seconds:
            self.sent += BATCH_MESSAGES
            yield

    def _begin(self) -> None:
        self._usage = Usage(self._server)
        self._began = time.perf_counter()

    def confirm(self, number: int) -> None:
        """At a pace: this message is confirmed now."""
        self.latencies.append(time.perf_counter() - self._began - number / (self._a_second or 1))

    def finish(self) -> None:
        """All that was sent is confirmed."""
        self.seconds = time.perf_counter() - self._began
        self.usage = self._usage.so_far()


class Client(Protocol):
    """What the module of each broker has as functions; of coroutines where its library is for asyncio."""

    def publish(self, address: str, topic: str, load: Load) -> Awaitable[None] | None:
        """Sends the load pipelined, with deduplication on; what is not confirmed is sent again, whatever breaks."""

    def steady(self, address: str, topic: str, load: Load) -> Awaitable[None] | None:
        """The same at a pace, one message a call, as users do who want to know of each: `Load.confirm` is told."""

    def one_in_flight(self, address: str, topic: str, load: Load) -> list[float] | Awaitable[list[float]]:
        """Sends the load, each message after the one before is confirmed; the seconds that each took."""

    def read(self, address: str, topic: str) -> tuple[list[bytes], float] | Awaitable[tuple[list[bytes], float]]:
        """All messages of the topic, and the seconds from connecting to the last of them."""


class BatchClient(Client, Protocol):
    """One that takes ready batches as well."""

    def ready(self, address: str, topic: str, load: Load) -> Awaitable[None] | None:
        """Sends the load's batches; what is in them is made before."""
