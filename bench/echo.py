"""A server that does nothing: echoes frames, syncs them, and streams ready messages. What gRPC itself costs.

`python -m bench.echo FOLDER` prints its address and serves until it is killed. The folder is for what is synced.
"""

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from queue import SimpleQueue
from typing import Any

import grpc.aio
import uvloop

ECHO = "/bench.Echo/Echo"
SYNCED_ECHO = "/bench.Echo/SyncedEcho"
GROUPED_ECHO = "/bench.Echo/GroupedEcho"
STREAM = "/bench.Echo/Stream"

RECEIPT_BYTES = 60
"""What a receipt of a frame takes, about."""


async def _echo(_requests: object, context: Any) -> None:
    while (data := await context.read()) is not grpc.aio.EOF:
        await context.write(data)


async def _synced_echo(_requests: object, context: Any) -> None:
    """Echoes when the message has been appended to a file and synced in a thread: the least that is durable."""
    loop = asyncio.get_running_loop()
    work: SimpleQueue[tuple[bytes, asyncio.Future[None]] | None] = SimpleQueue()

    def sync() -> None:
        with tempfile.TemporaryFile(dir=sys.argv[1], buffering=0) as file:
            while (item := work.get()) is not None:
                data, done = item
                file.write(data)
                os.fdatasync(file.fileno())
                loop.call_soon_threadsafe(done.set_result, None)

    thread = threading.Thread(target=sync)
    thread.start()
    while (data := await context.read()) is not grpc.aio.EOF:
        work.put((data, done := loop.create_future()))
        await done
        await context.write(data[:RECEIPT_BYTES])
    work.put(None)


async def _grouped_echo(_requests: object, context: Any) -> None:
    """The same for many at a time: all that are there are appended and synced together, while others come."""
    loop = asyncio.get_running_loop()
    work: SimpleQueue[bytes] = SimpleQueue()
    durable: asyncio.Queue[int] = asyncio.Queue()

    def sync() -> None:
        is_over = False
        with tempfile.TemporaryFile(dir=sys.argv[1], buffering=0) as file:
            while not is_over:
                group = [work.get()]
                group += [work.get() for _ in range(work.qsize())]
                os.writev(file.fileno(), group)
                os.fdatasync(file.fileno())
                loop.call_soon_threadsafe(durable.put_nowait, len(group))
                is_over = not group[-1]

    async def answer() -> None:
        while True:
            for _ in range(await durable.get()):
                await context.write(bytes(RECEIPT_BYTES))

    threading.Thread(target=sync).start()
    answering = asyncio.create_task(answer())
    while (data := await context.read()) is not grpc.aio.EOF:
        work.put(data)
    work.put(b"")
    answering.cancel()


async def _stream(request: bytes, _context: object) -> AsyncIterator[bytes]:
    size, count = (int(n) for n in request.split())
    message = b"x" * size
    for _ in range(count):
        yield message


async def _serve() -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1 << 26), ("grpc.so_reuseport", 0)])
    handlers: dict[str, Any] = {
        "Echo": grpc.stream_stream_rpc_method_handler(_echo),
        "SyncedEcho": grpc.stream_stream_rpc_method_handler(_synced_echo),
        "GroupedEcho": grpc.stream_stream_rpc_method_handler(_grouped_echo),
        "Stream": grpc.unary_stream_rpc_method_handler(_stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(_serve())
