"""ReadStream of a whole topic, bytes a second, against an identity stream of 256 KiB messages."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from bench import by_client, setup
from bench.echo import STREAM
from bench.figure import Figure, Ratio, over
from bench.publish import frame_bytes, rising
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import read_pb2

MESSAGE_BYTES = 256 * 1024
TOPIC_BYTES = 64 * 1024 * 1024
SMALL_ROWS = 16
LARGE_ROWS = 256
TIMES = 6
"""How often an arm reads it all: once takes too short a time to measure."""


async def read_bytes(address: str, method: str, request: bytes, times: int = TIMES) -> float:
    """Bytes a second of a stream that is read so often."""
    async with grpc.aio.insecure_channel(address, options=setup.LARGE) as channel:
        method_call: Any = channel.unary_stream(method)
        size = 0
        began = time.perf_counter()
        for _ in range(times):
            call = method_call(request)
            while (message := await call.read()) is not grpc.aio.EOF:
                size += len(message)
        return size / (time.perf_counter() - began)


@contextmanager
def figure(folder: Path) -> Iterator[Figure]:
    identity = f"{MESSAGE_BYTES} {TOPIC_BYTES // MESSAGE_BYTES}".encode()
    whole = read_pb2.ReadStreamRequest(topic=setup.TOPIC).SerializeToString()
    message_bytes = len(frame_bytes(LARGE_ROWS)) / LARGE_ROWS

    def by_the_client(address: str, *, whole_batches: bool) -> float:
        """As the messages were sent, which is what is read but for the records' headers."""
        read = by_client.read(address, setup.TOPIC, whole_batches=whole_batches)
        return message_bytes * setup.run(read)

    with (
        Sidecar(folder / "small") as small,
        Sidecar(folder / "large") as large,
        setup.echo_server(folder) as echo,
    ):
        for sidecar, rows in ((small, SMALL_ROWS), (large, LARGE_ROWS)):
            batches = TOPIC_BYTES // (rows * 120)
            setup.run(setup.publish(sidecar.address, ["p"], rising("p", rows), batches, 64))
        method = "/seqdedupe.v1.ReadService/ReadStream"
        yield Figure(
            arms={
                "topic of 256-row batches": lambda: setup.run(read_bytes(large.address, method, whole)),
                "topic of 16-row batches": lambda: setup.run(read_bytes(small.address, method, whole)),
                "the first one by the client, batches": lambda: by_the_client(large.address, whole_batches=True),
                "the first one by the client, messages": lambda: by_the_client(large.address, whole_batches=False),
                "identity": lambda: setup.run(read_bytes(echo, STREAM, identity)),
            },
            ratios=[
                Ratio("256-row batches ÷ identity", over("topic of 256-row batches", "identity"), at_least=0.7),
                Ratio("16-row batches ÷ identity", over("topic of 16-row batches", "identity"), at_least=0.7),
                Ratio(
                    "by the client, batches ÷ the raw stream",
                    over("the first one by the client, batches", "topic of 256-row batches"),
                ),
                Ratio(
                    "by the client, messages ÷ the raw stream",
                    over("the first one by the client, messages", "topic of 256-row batches"),
                ),
            ],
            notes=["arms in bytes a second"],
        )
