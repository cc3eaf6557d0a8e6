"""A publish stream at work: frames out and answers in, until one side has ended."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import grpc.aio

from seqdedupe.address import SidecarAddress
from seqdedupe.client.connection import typed_errors
from seqdedupe.client.frames import encode_frames
from seqdedupe.client.outbox import Frame
from seqdedupe.errors import error
from seqdedupe.v1 import publish_pb2
from seqdedupe.wire import GREETING

Call = grpc.aio.StreamStreamCall[bytes, bytes]

_PUBLISH_STREAM = "/seqdedupe.v1.PublishService/PublishStream"

_GREETED = ((GREETING, "1"),)
"""Some proxies, as nginx with TLS, hold headers back until a message follows. So the sidecar sends one when it takes a
stream."""


def publish_call(channel: grpc.aio.Channel) -> Call:
    """A publish stream that has said nothing yet."""
    return channel.stream_stream(_PUBLISH_STREAM)(metadata=_GREETED)


async def exchange(
    call: Call,
    address: SidecarAddress,
    topic: str,
    *,
    frames: Callable[[], Awaitable[Sequence[Frame]]],
    take: Callable[[bytes], bool],
    watch: Callable[[], Coroutine[Any, Any, None]],
    early_receipts: bool = False,
) -> None:
    """Sends what `frames` waits for, and gives each answer to `take`, until that says that it was the last one, or one
    of the three raises. `watch` goes on beside them. With `early_receipts` some may be of what is not durable yet.

    Raises what they do, and what the stream ends with; UNREACHABLE if that is nothing.
    """

    async def write() -> None:
        with typed_errors(address):
            try:
                first = publish_pb2.PublishStreamRequest(topic=topic, early_receipts=early_receipts)
                await call.write(first.SerializeToString())
                while True:
                    await call.write(encode_frames(await frames()))
            except asyncio.InvalidStateError:
                # The call has ended: the reader learns why.
                await asyncio.Event().wait()

    async def read() -> None:
        with typed_errors(address):
            is_over = False
            while not is_over:
                raw = await call.read()
                if not isinstance(raw, bytes):  # grpc.aio.EOF
                    raise error("UNREACHABLE", f"the sidecar at {address} ended the stream")
                is_over = take(raw)

    reading = asyncio.create_task(read())
    others = [asyncio.create_task(work) for work in (write(), watch())]
    try:
        done, _ = await asyncio.wait([reading, *others], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in others:
            task.cancel()
        call.cancel()
        # The reader hears of that from gRPC, and so late that nothing of the call is left to be told to a loop that may
        # be closed by then.
        await asyncio.gather(reading, *others, return_exceptions=True)
