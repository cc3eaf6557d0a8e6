"""A server that does nothing: echoes frames, and streams ready messages. What gRPC itself costs.

`python -m bench.echo` prints its address and serves until it is killed.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import uvloop

ECHO = "/bench.Echo/Echo"
STREAM = "/bench.Echo/Stream"

RECEIPT_BYTES = 60
"""What a receipt of a frame takes, about."""


async def _echo(_requests: object, context: Any) -> None:
    while (data := await context.read()) is not grpc.aio.EOF:
        await context.write(data[:RECEIPT_BYTES] if data[:1] == b"R" else data)


async def _stream(request: bytes, _context: object) -> AsyncIterator[bytes]:
    size, count = (int(n) for n in request.split())
    message = b"x" * size
    for _ in range(count):
        yield message


async def _serve() -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1 << 26), ("grpc.so_reuseport", 0)])
    handlers: dict[str, Any] = {
        "Echo": grpc.stream_stream_rpc_method_handler(_echo),
        "Stream": grpc.unary_stream_rpc_method_handler(_stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(_serve())
