"""What users do, by the client that they have: beside what a raw stream takes."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from seqdedupe.batch import Binary
from seqdedupe.client import Client, ProducerConfig, Reader
from seqdedupe.limits import MAX_BATCH_BYTES

T = TypeVar("T")

_names = itertools.count()


class Timed(Generic[T]):
    """Awaits receipts, in the order in which they are given, and tells what came with each as soon as it is there."""

    def __init__(self, tell: Callable[[T], None]) -> None:
        self._tell = tell
        # An `asyncio.Queue` takes as long for a message as the client's own part in it.
        self._receipts: deque[tuple[Awaitable[object], T]] = deque()
        self._is_more = asyncio.Event()
        self._are_all = False
        self._waiting = asyncio.create_task(self._wait())

    def add(self, receipt: Awaitable[object], given: T) -> None:
        self._receipts.append((receipt, given))
        self._is_more.set()

    async def all(self) -> None:
        """Returns when all that were added are there. Raises what a receipt does."""
        self._are_all = True
        self._is_more.set()
        await self._waiting

    async def _wait(self) -> None:
        while self._receipts or not self._are_all:
            while self._receipts:
                receipt, given = self._receipts.popleft()
                await receipt
                self._tell(given)
            if not self._are_all:
                self._is_more.clear()
                await self._is_more.wait()


async def publish_batches(
    address: str, topic: str, payloads: Binary, count: int, in_flight: int
) -> tuple[float, list[float]]:
    """Publishes a ready batch `count` times; messages a second, and the seconds for each receipt."""
    config = ProducerConfig(max_batch_bytes=MAX_BATCH_BYTES, max_in_flight_batches=in_flight)
    seconds: list[float] = []
    async with Client(address) as client, client.producer(topic, f"by-client-{next(_names)}", config) as producer:
        timed = Timed[float](lambda since: seconds.append(time.perf_counter() - since))
        began = time.perf_counter()
        for _ in range(count):
            at = time.perf_counter()
            timed.add(await producer.send_batch(payloads), at)
        await timed.all()
        return (len(payloads.offsets) - 1) * count / (time.perf_counter() - began), seconds


async def one_in_flight(address: str, topic: str, payload: bytes, count: int) -> list[float]:
    """Sends messages, each after the one before has its receipt; the seconds that each took."""
    seconds = []
    async with Client(address) as client, client.producer(topic, f"by-client-{next(_names)}") as producer:
        for _ in range(count):
            began = time.perf_counter()
            await (await producer.send(payload))
            seconds.append(time.perf_counter() - began)
    return seconds


async def read(address: str, topic: str, *, whole_batches: bool) -> float:
    """Reads a topic; messages a second, with each payload in hand, or in batches as they are stored."""
    messages = 0
    began = time.perf_counter()
    async with Client(address) as client, client.reader(topic) as reader:
        if whole_batches:
            async for stored in reader.batches():
                messages += len(stored)
        else:
            async for message in reader:
                messages += message.payload is not None
    return messages / (time.perf_counter() - began)


async def follow(address: str, topic: str, count: int, following: Callable[[], None]) -> None:
    """Follows a topic that has a message, by so many readers, for ever; `following` is called when all of them do."""
    async with Client(address) as client:
        last = (await client.ends(topic)).last.index
        readers = [client.reader(topic, last, follow=True) for _ in range(count)]
        # The message that is there already: from then on each is at the end.
        await asyncio.gather(*(reader.next_batch() for reader in readers))
        following()

        async def read_on(reader: Reader) -> None:
            async for _ in reader.batches():
                pass

        await asyncio.gather(*map(read_on, readers))
