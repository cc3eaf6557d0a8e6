"""What stands at a sidecar's address and is none: as a proxy that answers calls by itself."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

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
