"""What stands at a sidecar's address and is none: as a proxy that answers calls by itself."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from tests.listener import Listener

CODES = [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED]
"""What a proxy's 404 and 403 come to."""


@asynccontextmanager
async def answering(address: str, code: grpc.StatusCode, status_details: bytes = b"") -> AsyncIterator[Counter[str]]:
    """What listens at this address answers all calls with this status, and these details of it if there are any.
    Yields how often each was called."""
    calls: Counter[str] = Counter()

    class Foreign(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            async def refuse(_: object, context: Any) -> None:
                calls[details.method.rpartition("/")[2]] += 1
                await context.abort(
                    code, "not here", (("grpc-status-details-bin", status_details),) if status_details else ()
                )

            return grpc.stream_stream_rpc_method_handler(refuse)

    async with listening(address, Foreign()):
        yield calls


@asynccontextmanager
async def listening(address: str, handler: grpc.GenericRpcHandler) -> AsyncIterator[None]:
    """A server with this handler, and no other one, listens at this address."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


PAGE = b"<html><body>not here</body></html>"

_PREFACE_BYTES = 24
_HEAD_BYTES = 9
_DATA, _HEADERS, _RST_STREAM, _SETTINGS = 0, 1, 3, 4
_END_STREAM, _END_HEADERS = 1, 4


@asynccontextmanager
async def answering_http(status: int, *, resets: bool = False) -> AsyncIterator[tuple[str, list[int]]]:
    """An HTTP/2 server that answers all requests with this status and a page, as a proxy does. With `resets` it
    takes nothing more of the request after that. Yields its address, and the requests that came."""
    came: list[int] = []

    def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
        return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(_PREFACE_BYTES)
        writer.write(frame(_SETTINGS, 0, 0))
        while True:
            head = await reader.readexactly(_HEAD_BYTES)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == _HEADERS:
                stream = int.from_bytes(head[5:], "big")
                came.append(stream)
                headers = b"\x00\x07:status\x03" + str(status).encode() + b"\x00\x06server\x03web"
                answer = frame(_HEADERS, _END_HEADERS, stream, headers) + frame(_DATA, _END_STREAM, stream, PAGE)
                writer.write(answer + frame(_RST_STREAM, 0, stream, bytes(4)) * resets)

    async with Listener(serve) as listener:
        yield f"127.0.0.1:{listener.port}", came
