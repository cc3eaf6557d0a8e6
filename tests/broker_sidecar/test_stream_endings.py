"""How a stream ends when its sidecar ends it: the client hears why, no matter what was under way."""

import asyncio
import contextlib
from typing import Any

import grpc
import grpc.aio
import pytest

from broker_sidecar import streams as streams_module
from broker_sidecar.rpc import Context, abort
from broker_sidecar.security.permissions import Permissions
from broker_sidecar.security.subject import Subject, set_caller
from broker_sidecar.streams import Stream, Streams
from seqdedupe.errors import error
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe.v1 import admin_pb2

METHOD = "/test.Service/Stream"
TIMEOUT_SECONDS = LAST_RESORT_SECONDS
LOST_SECONDS = 1.0
"""This long a control arm waits for what never comes."""


async def _fail_in_mid_write(_requests: Any, _context: Context, stream: Stream) -> None:
    """Begins to write its first message, gives that up, and fails."""
    writing = asyncio.ensure_future(stream.write(b"x"))
    await asyncio.sleep(0)
    writing.cancel()
    raise error("INVALID_REQUEST", "no")


async def _code(address: str, seconds: float) -> grpc.StatusCode:
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.stream_stream(METHOD)(timeout=seconds)
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


async def _code_of(handler: Any, lost: bool) -> grpc.StatusCode:
    """With which code a call of this handler ends."""
    server = grpc.aio.server()

    async def called(requests: Any, context: Any) -> None:
        set_caller(Subject("somebody", "token", None, "unix:"))
        await handler(requests, context)

    methods: dict[str, Any] = {"Stream": grpc.stream_stream_rpc_method_handler(called)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        return await _code(f"127.0.0.1:{port}", LOST_SECONDS if lost else TIMEOUT_SECONDS)
    finally:
        await server.stop(0)


@pytest.mark.parametrize("make", [_as_it_is, _without_metadata])
async def test_a_stream_that_fails_while_its_first_message_is_written_says_why(make: Any) -> None:
    lost = make is _without_metadata
    code = await _code_of(make(Streams(10, Permissions())), lost)
    assert code is (grpc.StatusCode.DEADLINE_EXCEEDED if lost else grpc.StatusCode.INVALID_ARGUMENT)


async def _is_silent(_requests: Any, _context: Context, stream: Stream) -> None:
    await stream.read()


def _ended_before_it_has_begun(streams: Streams) -> Any:
    handle = streams.handler(_is_silent)

    async def ended(requests: Any, context: Context) -> None:
        asyncio.get_running_loop().call_soon(streams.drain)
        await handle(requests, context)

    return ended


def _with_metadata_given_up(_streams: Streams) -> Any:
    """The control arm: the metadata are not waited for."""

    async def given_up(_requests: Any, context: Context) -> None:
        sending = asyncio.ensure_future(context.send_initial_metadata(()))
        await asyncio.sleep(0)
        sending.cancel()
        await abort(context, error("DRAINING", "no"))

    return given_up


@pytest.mark.parametrize("make", [_ended_before_it_has_begun, _with_metadata_given_up])
async def test_a_stream_that_is_ended_before_it_has_begun_says_why(make: Any) -> None:
    """As one that gives way on a connection that takes nothing for a while."""
    lost = make is _with_metadata_given_up
    code = await _code_of(make(Streams(10, Permissions())), lost)
    assert code is (grpc.StatusCode.DEADLINE_EXCEEDED if lost else grpc.StatusCode.UNAVAILABLE)


async def test_a_call_about_no_topic_does_not_wait_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "TURN_SECONDS", 0.1)
    streams = Streams(10, Permissions())
    streams.reading.take(streams.shares.of("a reader"), streams.reading.limit_bytes)
    known = admin_pb2.ListInFlightRequest(topic="t").SerializeToString()

    async def find(name: str) -> None:
        if name != "t":
            raise error("TOPIC_NOT_FOUND", "there is none")

    async def answer(_request: object, _stream: Stream) -> admin_pb2.ListInFlightResponse:
        raise AssertionError("there is no memory")

    call: Any = streams.call(admin_pb2.ListInFlightRequest, find, answer)
    for data, code in ((b"", grpc.StatusCode.NOT_FOUND), (known, grpc.StatusCode.RESOURCE_EXHAUSTED)):
        assert await _code_of(lambda _, context, data=data: call.unary_stream(data, context), False) is code
