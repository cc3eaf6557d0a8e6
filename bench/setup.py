"""What the benchmarks share: servers as processes, a raw publishing client, plain disk writes."""

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import grpc.aio
import numpy as np
import uvloop

from bench.echo import ECHO
from seqdedupe import wire
from seqdedupe.batch import Batch
from seqdedupe.client.stream import FULL_MESSAGE_BYTES
from seqdedupe.v1 import publish_pb2

LARGE = [("grpc.max_receive_message_length", 1 << 26)]
APART = [*LARGE, ("grpc.use_local_subchannel_pool", 1)]
"""Each channel on a connection of its own, with a window of its own."""
TOPIC = "bench"
EPOCHS = np.array([1 << 32])
"""For frames that nobody decides about."""

_frames = itertools.count(1)
_runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)


@contextmanager
def echo_server(folder: Path) -> Iterator[str]:
    """The address of an echo server, which may write to the folder."""
    command = [sys.executable, "-m", "bench.echo", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


MakeBatch = Callable[[int, np.ndarray], Batch]
"""The k-th batch to publish, given the epochs of its producers."""

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in the loop that all of them share, of the sidecar's kind.

    gRPC tells every loop that was ever used of what happens, and complains of those that are closed.
    """
    return _runner.run(work)


Metadata = tuple[tuple[str, str], ...]


def _shown(metadata: Metadata) -> dict[str, Any]:
    """What a call is given beside what the channel itself shows, which takes no other metadata."""
    return {"metadata": metadata} if metadata else {}


async def open_names(
    channel: grpc.aio.Channel, topic: str, names: list[str], metadata: Metadata = ()
) -> publish_pb2.OpenResponse:
    """Starts sessions."""
    call: Any = channel.unary_unary(
        "/seqdedupe.v1.PublishService/Open",
        publish_pb2.OpenRequest.SerializeToString,
        publish_pb2.OpenResponse.FromString,
    )
    request = publish_pb2.OpenRequest(topic=topic, producer_names=names)
    return await call(request, **_shown(metadata))  # type: ignore[no-any-return]


class Windowed:
    """Sends on a stream with at most so many parts unanswered, and keeps the time each answer took.

    `answered` says how many parts an answer is to; without it each answer is to all of a message.
    """

    def __init__(self, call: Any, in_flight: int, answered: Callable[[bytes], int] | None = None) -> None:
        self._call = call
        self._answered = answered
        self._room = asyncio.Semaphore(in_flight)
        self._sent: list[float] = []
        self._messages: deque[int] = deque()  # the parts of each that was sent
        self.seconds: list[float] = []

    async def send(self, parts: Iterable[bytes], count: int) -> float:
        """Sends `count` parts; the seconds it took until the last answer.

        Those that may go out at the same time go in one message, until that is as large as the client's are.
        """
        reader = asyncio.ensure_future(self._read(count))
        began = time.perf_counter()
        message: list[bytes] = []
        size = 0
        for part in itertools.islice(parts, count):
            await self._room.acquire()
            self._sent.append(time.perf_counter())
            message.append(part)
            size += len(part)
            if self._room.locked() or size >= FULL_MESSAGE_BYTES:
                await self._write(message)
                message, size = [], 0
        if message:
            await self._write(message)
        await reader
        return time.perf_counter() - began

    async def _write(self, message: list[bytes]) -> None:
        self._messages.append(len(message))
        await self._call.write(b"".join(message))

    async def _read(self, count: int) -> None:
        got = 0
        while got < count:
            answer = await self._call.read()
            answers = self._messages.popleft() if self._answered is None else self._answered(answer)
            now = time.perf_counter()
            for _ in range(answers):
                self.seconds.append(now - self._sent[got])
                self._room.release()
                got += 1


def receipts(data: bytes) -> int:
    """How many receipts a PublishStreamResponse has. Raises RuntimeError if a frame was refused."""
    message = wire.PublishStreamResponse.FromString(data)
    if message.refusals:
        raise RuntimeError(f"refused: {message.refusals[0].reason} {message.refusals[0].message}")
    return len(message.receipts)


def frame(batch: Batch) -> bytes:
    """An encoded PublishStreamRequest with one frame."""
    return b"".join(wire.frame_parts(next(_frames), batch.encoded_parts()))


class Stream(NamedTuple):
    """A publish stream of names that were opened."""

    call: Any
    epochs: np.ndarray

    async def publish(self, make: MakeBatch, count: int, in_flight: int) -> tuple[float, list[float]]:
        """Publishes `count` batches; seconds in all, and for each receipt."""
        window = Windowed(self.call, in_flight, receipts)
        frames = (frame(make(k, self.epochs)) for k in range(count))
        return await window.send(frames, count), window.seconds


async def opened(channel: grpc.aio.Channel, names: list[str], topic: str = TOPIC, metadata: Metadata = ()) -> Stream:
    """Opens the names, and a stream."""
    answer = await open_names(channel, topic, names, metadata)
    call: Any = channel.stream_stream("/seqdedupe.v1.PublishService/PublishStream")(**_shown(metadata))
    await call.write(publish_pb2.PublishStreamRequest(topic=topic).SerializeToString())
    return Stream(call, np.array(answer.epochs, np.int64))


async def opened_by_id(channel: grpc.aio.Channel, topic: str) -> Stream:
    """A stream into a topic of deduplication IDs, where no names are opened."""
    call: Any = channel.stream_stream("/seqdedupe.v1.PublishService/PublishStream")()
    await call.write(publish_pb2.PublishStreamRequest(topic=topic).SerializeToString())
    return Stream(call, EPOCHS)


async def publish(
    address: str,
    names: list[str],
    make: MakeBatch,
    count: int,
    in_flight: int,
    topic: str = TOPIC,
    metadata: Metadata = (),
) -> tuple[float, list[float]]:
    """Opens the names and publishes `count` batches; seconds in all, and for each receipt."""
    async with grpc.aio.insecure_channel(address, options=LARGE) as channel:
        return await (await opened(channel, names, topic, metadata)).publish(make, count, in_flight)


async def echo(
    address: str, make: MakeBatch, count: int, in_flight: int, method: str = ECHO
) -> tuple[float, list[float]]:
    """As `publish`, from the same batches in the same messages, with a server that does nothing."""
    async with grpc.aio.insecure_channel(address, options=LARGE) as channel:
        window = Windowed(channel.stream_stream(method)(), in_flight)
        frames = (frame(make(k, EPOCHS)) for k in range(count))
        return await window.send(frames, count), window.seconds


def serial_append(folder: Path, size: int, count: int) -> list[float]:
    """Appends so many bytes and syncs, `count` times; the seconds each took."""
    path = folder / "serial"
    data = b"x" * size
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    try:
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            os.write(file, data)
            os.fdatasync(file)
            seconds.append(time.perf_counter() - began)
        return seconds
    finally:
        os.close(file)
        path.unlink()
