"""A sidecar that says what a test wants: for answers that the real one gives seldom, or never."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from seqdedupe.v1 import batch_pb2, publish_pb2, read_pb2

T = TypeVar("T")
Frames = Callable[[publish_pb2.Frame], Iterable[publish_pb2.PublishStreamResponse | bytes]]

INCARNATION = 5


class Refused(Exception):
    """A handler raises it to end the call with this status."""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str | None = None,
        retry_delay_ms: int | None = None,
        **numbers: str,
    ) -> None:
        super().__init__(reason)
        self.code = code
        self.message = f"refused [{reason}]" if reason else "refused"
        self.details: list[any_pb2.Any] = []
        if reason is not None:
            self._add(error_details_pb2.ErrorInfo(reason=reason, domain="seqdedupe", metadata=numbers))
        if retry_delay_ms is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(retry_delay_ms)
            self._add(error_details_pb2.RetryInfo(retry_delay=delay))

    def _add(self, detail: Any) -> None:
        packed = any_pb2.Any()
        packed.Pack(detail)
        self.details.append(packed)

    def trailing_metadata(self) -> Any:
        status = status_pb2.Status(code=self.code.value[0], message=self.message, details=self.details)
        return rpc_status.to_status(status).trailing_metadata if self.details else ()


class FakeSidecar:
    """Its handlers are set by the test; what it was sent is kept."""

    def __init__(self) -> None:
        self.address = ""
        self.term = 1
        self.ends_streams = 0
        """This many streams end, in peace, with their first batch."""
        self.idle_streams = 0
        """This many streams learn that they are of no use, as soon as they have said what they are for."""
        self.was_idle = asyncio.Event()
        self.unread_topics: set[str] = set()
        """Streams for these are not read any more once they have said so."""
        self.peers: set[str] = set()
        """The connections over which publish streams and `Open` came."""
        self.open_streams = 0
        """Publish streams that have neither ended nor been cancelled."""
        self.opens: list[publish_pb2.OpenRequest] = []
        self.messages: list[publish_pb2.PublishStreamRequest] = []
        self.frames: list[publish_pb2.Frame] = []
        self.on_open: Callable[[publish_pb2.OpenRequest], publish_pb2.OpenResponse] = lambda _: self.opened()
        self.on_frame: Frames = lambda frame: [self.stored(frame)]
        self.on_read: Callable[[read_pb2.ReadStreamRequest], Iterable[read_pb2.ReadStreamResponse]] = lambda _: []
        self.on_unary: Callable[[str], bytes] = lambda _: b""

    def opened(self, epoch: int = 100, persisted: int = -1, **columns: Any) -> publish_pb2.OpenResponse:
        columns = {"incarnation": INCARNATION, "term": self.term} | columns
        return publish_pb2.OpenResponse(
            epochs=[epoch],
            persisted=[persisted],
            persisted_indexes=[-1],
            persisted_message_ids=[batch_pb2.MessageId()],
            **columns,
        )

    def stored(self, frame: publish_pb2.Frame) -> publish_pb2.PublishStreamResponse:
        """All rows are new, at the indexes of their sequence IDs."""
        return self.answer(receipts=[{"frame": frame.number, "first_index": frame.batch.sequence_ids[0]}])

    def refusal(self, frame: publish_pb2.Frame, reason: str, delay_ms: int) -> publish_pb2.PublishStreamResponse:
        refusal = {"frame": frame.number, "reason": reason, "message": "no", "retry_delay_ms": delay_ms}
        return self.answer(refusals=[refusal])

    def answer(self, **columns: Any) -> publish_pb2.PublishStreamResponse:
        return publish_pb2.PublishStreamResponse(**({"incarnation": INCARNATION, "term": self.term} | columns))

    async def _open(self, data: bytes, context: Any) -> bytes:
        request = publish_pb2.OpenRequest.FromString(data)
        self.opens.append(request)
        self.peers.add(context.peer())
        return await _or_abort(context, lambda: self.on_open(request).SerializeToString())

    def _answers(self, frame: publish_pb2.Frame) -> list[publish_pb2.PublishStreamResponse | bytes]:
        return list(self.on_frame(frame))

    async def _publish(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.open_streams += 1
        self.peers.add(context.peer())
        try:
            await context.send_initial_metadata(())
            async for answer in self._answered(requests, context):
                yield answer
        finally:
            self.open_streams -= 1

    async def _answered(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for data in requests:
            self.messages.append(publish_pb2.PublishStreamRequest.FromString(data))
            if self.messages[-1].topic in self.unread_topics:
                await asyncio.Event().wait()
            if self.idle_streams:
                self.idle_streams -= 1
                self.was_idle.set()
                idle = Refused(grpc.StatusCode.UNAVAILABLE, "STREAM_IDLE", 0)
                await context.abort(idle.code, idle.message, idle.trailing_metadata())
            for frame in self.messages[-1].frames:
                self.frames.append(frame)
                if self.ends_streams:
                    self.ends_streams -= 1
                    return
                for answer in await _or_abort(context, partial(self._answers, frame)):
                    yield answer if isinstance(answer, bytes) else answer.SerializeToString()

    async def _read(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        request = read_pb2.ReadStreamRequest.FromString(data)
        for answer in await _or_abort(context, lambda: list(self.on_read(request))):
            yield answer.SerializeToString()

    def service(self, details: Any) -> Any:
        if details.method.endswith("/Open"):
            return grpc.unary_unary_rpc_method_handler(self._open)
        if details.method.endswith("/PublishStream"):
            return grpc.stream_stream_rpc_method_handler(self._publish)
        if details.method.endswith("/ReadStream"):
            return grpc.unary_stream_rpc_method_handler(self._read)

        async def unary(data: bytes, context: Any) -> bytes:
            return await _or_abort(context, lambda: self.on_unary(details.method))

        return grpc.unary_unary_rpc_method_handler(unary)


async def _or_abort(context: "grpc.aio.ServicerContext[Any, Any]", act: Callable[[], T]) -> T:
    try:
        return act()
    except Refused as e:
        await context.abort(e.code, e.message, e.trailing_metadata())


@asynccontextmanager
async def fake_sidecar(max_concurrent_streams: int = 1000) -> AsyncIterator[FakeSidecar]:
    """A connection may have this many streams at a time."""
    fake = FakeSidecar()
    limits = (
        ("grpc.max_receive_message_length", 16 * 1024 * 1024),
        ("grpc.max_concurrent_streams", max_concurrent_streams),
    )
    server = grpc.aio.server(options=limits)

    class Handler(grpc.GenericRpcHandler):
        def service(self, handler_call_details: Any) -> Any:
            return fake.service(handler_call_details)

    server.add_generic_rpc_handlers((Handler(),))
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield fake
    finally:
        await server.stop(None)
