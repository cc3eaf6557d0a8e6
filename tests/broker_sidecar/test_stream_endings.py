"""How a stream ends when its sidecar ends it: the client hears why, whatever was under way."""

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
import pytest

from broker_sidecar.rpc import Context
from broker_sidecar.streams import Stream, Streams
from seqdedupe.errors import error

METHOD = "/test.Service/Stream"
TIMEOUT_SECONDS = 5.0
"""The control arm waits so long."""


async def _fail_in_mid_write(_requests: Any, _context: Context, stream: Stream) -> None:
    """Begins to write its first message, gives that up, and fails."""
    writing = asyncio.ensure_future(stream.write(b"x"))
    await asyncio.sleep(0)
    writing.cancel()
    raise error("INVALID_REQUEST", "no")


async def _code(address: str) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.stream_stream(METHOD)(timeout=TIMEOUT_SECONDS)
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        return await call.code()  # type: ignore[no-any-return]


def _as_it_is(streams: Streams) -> Any:
    return streams.handler(_fail_in_mid_write)


def _without_metadata(streams: Streams) -> Any:
    """The control arm: what a handler is without the first step."""
    handle = streams.handler(_fail_in_mid_write)

    async def without(requests: Any, context: Any) -> None:
        async def nothing(_metadata: object) -> None:
            pass

        class Silent:
            def __getattr__(self, name: str) -> Any:
                return nothing if name == "send_initial_metadata" else getattr(context, name)

        await handle(requests, Silent())  # type: ignore[arg-type]

    return without


@pytest.mark.parametrize("make", [_as_it_is, _without_metadata])
async def test_a_stream_that_fails_while_its_first_message_is_written_says_why(make: Any) -> None:
    server = grpc.aio.server()
    methods: dict[str, Any] = {"Stream": grpc.stream_stream_rpc_method_handler(make(Streams(10)))}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        code = await _code(f"127.0.0.1:{port}")
        lost = make is _without_metadata
        assert code is (grpc.StatusCode.DEADLINE_EXCEEDED if lost else grpc.StatusCode.INVALID_ARGUMENT)
    finally:
        await server.stop(0)
